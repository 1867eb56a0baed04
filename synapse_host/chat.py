"""A chat message in the model's own template, rendered in jinja2's immutable sandbox, as token ids.

What the template writes may be special tokens; what a person wrote never is: a message with a literal ``<|im_end|>``
can't end its own turn.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from msgspec import UNSET

from synapse_host.errors import BundleInvalid, InvalidRequest, SynapseError

if TYPE_CHECKING:
    from engines.bundle.manifest import Bundle
    from synapse_host.tokenize import TextTokenizer

ROLES: Final = ("system", "user", "assistant")
MAX_RENDERED: Final = 4 * 1024 * 1024


def chat_ids(bundle: Bundle, tokenizer: TextTokenizer, prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
    """Return the ids of a conversation that ends where the assistant's answer begins.

    Raises InvalidRequest for a bundle without a template, a missing jinja2 or malformed messages; BundleInvalid for a
    template that fails.
    """
    template = bundle.manifest.chat_template
    name = bundle.manifest.model_id
    if template is UNSET:
        raise InvalidRequest(f"bundle {name} has no chat template; generate without --chat")
    messages = _messages(prompt)
    special = bundle.manifest.special_ids if bundle.manifest.special_ids is not UNSET else {}
    tokens = {f"{role}_token": tokenizer.token(id) for role, id in special.items() if role in ("bos", "eos")}
    if not any(tokenizer.mentions_special(message["content"]) for message in messages):
        return tokenizer.template(render(template, messages, name=name, tokens=tokens))
    # Someone wrote a special token's literal: render with marks in place of the contents and put those in as text.
    marks = [f"\ue000{secrets.token_hex(8)}\ue001" for _ in messages]
    marked = [{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)]
    rest = render(template, marked, name=name, tokens=tokens)
    ids: list[int] = []
    for message, mark in zip(messages, marks, strict=True):
        before, found, rest = rest.partition(mark)
        if not found or mark in rest:
            raise InvalidRequest(
                f"the message holds a special token's literal and {name}'s template changes messages; reword it"
            )
        ids += tokenizer.template(before) + tokenizer.literal(message["content"])
    return ids + tokenizer.template(rest)


def _messages(prompt: str | Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    listed: Any = prompt
    if not isinstance(listed, Sequence) or isinstance(listed, bytes):
        raise InvalidRequest(f"the prompt is {type(listed).__name__}, must be text or a list of messages")
    messages: list[dict[str, str]] = []
    for index, item in enumerate(listed):
        if not isinstance(item, Mapping):
            raise InvalidRequest(
                f"message {index} is {type(item).__name__}, must be {{'role', 'content'}}", details={"index": index}
            )
        messages.append(dict(item))
    if not messages:
        raise InvalidRequest("there is no message")
    for index, message in enumerate(messages):
        if set(message) != {"role", "content"} or not all(isinstance(value, str) for value in message.values()):
            raise InvalidRequest(
                f"message {index} needs exactly 'role' and 'content', both text", details={"index": index}
            )
        if message["role"] not in ROLES:
            raise InvalidRequest(
                f"message {index} has role {message['role']!r}, must be one of {', '.join(ROLES)}",
                details={"index": index},
            )
        if not message["content"].strip():
            raise InvalidRequest(f"message {index} is empty", details={"index": index})
        if any("\ud800" <= char <= "\udfff" for char in message["content"]):
            raise InvalidRequest(
                f"message {index} holds half a surrogate pair; it is not valid text", details={"index": index}
            )
    return messages


def render(
    template: str, messages: Sequence[Mapping[str, str]], *, name: str, tokens: Mapping[str, str] | None = None
) -> str:
    """Return the template's text, as transformers' ``apply_chat_template(add_generation_prompt=True)`` writes it.

    *tokens*: ``bos_token`` and ``eos_token``. A bundle comes from outside, so its template gets the immutable sandbox
    and a size limit. It may run long: call this where nobody else waits.
    """
    try:
        compiled = _compiled(template)
    except ImportError as exc:
        raise InvalidRequest(
            "chat templates need jinja2 3.1.6 or newer: pip install 'synapse-workers[chat]'",
            details={"missing": "jinja2"},
        ) from exc
    except Exception as exc:  # a template is foreign code: whatever it raises, the bundle is at fault
        raise BundleInvalid(f"bundle {name}: its chat template can't be read: {exc}") from exc
    variables: dict[str, Any] = {
        # What transformers passes: a template tells "no tools" from None.
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
        "bos_token": "",
        "eos_token": "",
        **(tokens or {}),
        "messages": [dict(message) for message in messages],
    }
    parts: list[str] = []
    size = 0
    try:
        for part in compiled.generate(**variables):
            size += len(part)
            if size > MAX_RENDERED:
                raise BundleInvalid(f"bundle {name}: its chat template writes more than {MAX_RENDERED} characters")
            parts.append(part)
    except SynapseError:
        raise
    except _Refused as exc:
        raise InvalidRequest(f"{name}'s chat template refuses these messages: {exc}") from exc
    except Exception as exc:  # as above
        raise BundleInvalid(f"bundle {name}: its chat template fails: {exc}") from exc
    return "".join(parts)


class _Refused(Exception):
    """The template called raise_exception."""


@lru_cache(maxsize=16)
def _compiled(template: str) -> Any:
    """Compile a template in an environment with what transformers offers to templates; ImportError without jinja2."""
    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if tuple(int(part) for part in re.findall(r"\d+", jinja2.__version__)[:3]) < (3, 1, 6):
        raise ImportError("older ones have known ways out of the sandbox")

    class Generation(Extension):
        """``{% generation %}`` marks what a model wrote, for training; here it is its own content."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: object) -> None:
        raise _Refused(str(message))

    def tojson(value: Any, **options: Any) -> str:
        # jinja2's own filter escapes for HTML.
        return json.dumps(value, **{"ensure_ascii": False, **options})

    class Sandbox(ImmutableSandboxedEnvironment):
        """Refuses one small expression that asks for all memory or all time: ``'a' * 10**10``, ``9**9**9``."""

        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**":
                raise ValueError("** is not allowed in a chat template")
            for many, times in ((left, right), (right, left)):
                if hasattr(many, "__len__") and isinstance(times, int) and len(many) * times > MAX_RENDERED:
                    raise ValueError(f"a repetition writes more than {MAX_RENDERED} characters")
            return super().call_binop(context, operator, left, right)

    environment = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
        autoescape=False,
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    # A function, not the class: a class has attributes without an underscore that lead further.
    environment.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)
    environment.globals.pop("lipsum", None)
    return environment.from_string(template)
