"""A chat message in the model's own template, as token ids.

What the template writes may be special tokens; what a person wrote never is: a message with a literal ``<|im_end|>``
can't end its own turn.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import UNSET, Struct

from synapse_host.errors import InvalidRequest

if TYPE_CHECKING:
    from engines.bundle.manifest import Bundle
    from synapse_host.text.template import Renderer
    from synapse_host.text.tokenizer import TextTokenizer


class _Message(Struct, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: str


def chat_ids(
    bundle: Bundle, tokenizer: TextTokenizer, renderer: Renderer, prompt: str | Sequence[Mapping[str, str]]
) -> list[int]:
    """Return the ids of a conversation that ends where the assistant's answer begins; call it from a thread.

    Of a conversation with more than ``max_tokens`` ids not all, but more than that. Raises InvalidRequest for a bundle
    without a template, a missing jinja2 or malformed messages; BundleInvalid for a template that fails, runs too long
    or writes too much.
    """
    template = bundle.manifest.chat_template
    name = bundle.manifest.model_id
    if template is UNSET:
        raise InvalidRequest(
            f"bundle {name} has no chat template.",
            advice={"python": "Generate without chat=True.", "command": "Generate without --chat."},
        )
    messages = _messages(prompt, tokenizer.max_characters)
    special = bundle.manifest.special_ids if bundle.manifest.special_ids is not UNSET else {}
    tokens = {f"{role}_token": tokenizer.token(id) for role, id in special.items() if role in ("bos", "eos")}
    if not any(tokenizer.mentions_special(message["content"]) for message in messages):
        return tokenizer.template(renderer.render(template, messages, name=name, tokens=tokens))
    # Someone wrote a special token's literal: render with marks in place of the contents and put those in as text.
    marks = [f"\ue000{secrets.token_hex(8)}\ue001" for _ in messages]
    marked = [{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)]
    rest = renderer.render(template, marked, name=name, tokens=tokens)
    ids: list[int] = []
    for message, mark in zip(messages, marks, strict=True):
        before, found, rest = rest.partition(mark)
        if not found or mark in rest:
            raise InvalidRequest(
                f"the message holds a special token's literal and {name}'s template changes messages; reword it"
            )
        ids += tokenizer.template(before) + tokenizer.literal(message["content"])
    return ids + tokenizer.template(rest)


def _messages(prompt: str | Sequence[Mapping[str, str]], max_characters: int) -> list[dict[str, str]]:
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    try:
        messages = msgspec.convert(prompt, list[_Message])
    except msgspec.ValidationError as exc:
        raise InvalidRequest(f"the prompt is neither text nor a list of messages {{'role', 'content'}}: {exc}") from exc
    if not messages:
        raise InvalidRequest("there is no message")
    for index, message in enumerate(messages):
        if not message.content.strip():
            raise InvalidRequest(f"message {index} is empty", details={"index": index})
        try:
            message.content.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(
                f"message {index} holds half a surrogate pair; it is not valid text", details={"index": index}
            ) from None
    if sum(len(message.content) for message in messages) > max_characters:
        raise InvalidRequest(f"the messages have more than {max_characters} characters in sum")
    return [msgspec.structs.asdict(message) for message in messages]
