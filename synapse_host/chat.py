"""A chat message in the model's own template, rendered in jinja2's immutable sandbox, as token ids.

What the template writes may be special tokens; what a person wrote never is: a message with a literal ``<|im_end|>``
can't end its own turn.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
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
    if not any(tokenizer.mentions_special(message["content"]) for message in messages):
        return tokenizer.template(render(template, messages, name=name))
    # Someone wrote a special token's literal: render with marks in place of the contents and put those in as text.
    marks = [f"\ue000{secrets.token_hex(8)}\ue001" for _ in messages]
    marked = [{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)]
    rest = render(template, marked, name=name)
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
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(item) for item in prompt]
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
    return messages


def render(template: str, messages: Sequence[Mapping[str, str]], *, name: str) -> str:
    """Return the template's text. A bundle comes from outside, so it gets the immutable sandbox and a size limit."""
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as exc:
        raise InvalidRequest(
            "chat templates need jinja2: pip install 'synapse-workers[chat]'", details={"missing": "jinja2"}
        ) from exc

    def refuse(message: str) -> None:
        raise InvalidRequest(f"{name}'s chat template refuses these messages: {message}")

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols"],
        autoescape=False,
    )
    environment.globals["raise_exception"] = refuse
    variables: dict[str, Any] = {
        "messages": list(messages),
        "add_generation_prompt": True,
        "bos_token": "",
        "eos_token": "",
    }
    parts: list[str] = []
    size = 0
    try:
        for part in environment.from_string(template).generate(**variables):
            size += len(part)
            if size > MAX_RENDERED:
                raise BundleInvalid(f"bundle {name}: its chat template writes more than {MAX_RENDERED} characters")
            parts.append(part)
    except SynapseError:
        raise
    except Exception as exc:  # a template is foreign code: whatever it raises, the bundle is at fault
        raise BundleInvalid(f"bundle {name}: its chat template fails: {exc}") from exc
    return "".join(parts)
