"""JSON bytes to messages. All that a peer may get wrong is checked: types, unknown fields, bounds, limits in bytes."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct

from engines.protocol.messages import (
    MAX_IDENTIFIER_BYTES,
    MAX_NESTING,
    U64_MAX,
    Buffer,
    EmbedBatch,
    FromHost,
    FromWorker,
    Hello,
    HelloAck,
    Loaded,
    Pong,
    Progress,
    Shutdown,
)

_NOT_BRACKETS: Final = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[^\[\]{}"]+', re.DOTALL)
"""What lies between the brackets of a JSON text: strings whole (the last one perhaps unfinished), and all else."""
_from_host: msgspec.json.Decoder[FromHost] = msgspec.json.Decoder(FromHost)
_from_worker: msgspec.json.Decoder[FromWorker] = msgspec.json.Decoder(FromWorker)
_hello: msgspec.json.Decoder[Hello] = msgspec.json.Decoder(Hello)
_ack: msgspec.json.Decoder[HelloAck] = msgspec.json.Decoder(HelloAck)


def _too_long(text: str) -> bool:
    return len(text.encode("utf-8")) > MAX_IDENTIFIER_BYTES


def decode_from_host(data: Buffer) -> FromHost:
    """Decode what a worker reads after the handshake; raise one of :data:`DECODE_ERRORS`."""
    message = _from_host.decode(data)
    if type(message) is Shutdown:
        return message
    # The types count characters, the rule counts bytes; for ASCII both are the same.
    request: Any = message
    if not request.req_id.isascii() and _too_long(request.req_id):
        raise msgspec.ValidationError("req_id must have 1 to 64 bytes")
    if type(message) is EmbedBatch:
        text = bytes(data)
        # 256 ids one by one would cost more than the decoding; a plain frame has only plain ids.
        if not text.isascii() or b"\\" in text:
            for item in message.items:
                if _too_long(item.id):
                    raise msgspec.ValidationError("item id must have 1 to 64 bytes")
    return message


def decode_from_worker(data: Buffer) -> FromWorker:
    """Decode what a host reads after the handshake; raise one of :data:`DECODE_ERRORS`."""
    message = _from_worker.decode(data)
    req_id = message.req_id
    if req_id is not UNSET and not req_id.isascii() and _too_long(req_id):
        raise msgspec.ValidationError("req_id must have 1 to 64 bytes")
    for name in _U64_FIELDS.get(type(message), ()):
        if getattr(message, name) > U64_MAX:
            raise msgspec.ValidationError(f"{name} is above the u64 range")
    return message


def decode_hello(data: Buffer) -> Hello:
    """Decode HELLO. ``v`` must be a JSON integer in a byte: ``3.0``, ``"3"``, ``true`` and 256 are refused."""
    # The decoder skips what it doesn't know without looking at its encoding; JSON text is UTF-8 as a whole. How deep it
    # can follow differs between versions of Python, so depth is limited before.
    text = bytes(data)
    text.decode("utf-8")
    depth = 0
    for bracket in _NOT_BRACKETS.sub(b"", text):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_NESTING:
            raise msgspec.ValidationError(f"HELLO nests deeper than {MAX_NESTING} levels")
    return _hello.decode(text)


def decode_ack(data: Buffer) -> HelloAck:
    """Decode HELLO_ACK."""
    return _ack.decode(data)


DECODE_ERRORS: Final = (msgspec.DecodeError, ValueError, RecursionError)
"""What decoding a peer's bytes may raise: malformed or mistyped JSON, bad UTF-8, absurd numbers, deep nesting."""

_U64_FIELDS: Final[dict[type[Struct], tuple[str, ...]]] = {
    Progress: ("completed",),
    Loaded: ("cold_load_ms",),
    Pong: ("rss_mb", "models_loaded"),
}
"""VECTORS.n is compared with the request's items anyway."""
