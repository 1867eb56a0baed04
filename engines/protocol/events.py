"""The events of a connection: what the bytes that arrived mean."""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from engines.protocol.messages import AnyReply, AnyRequest, Hello, HelloAck, Progress, Scores, Vectors


class HelloReceived(Struct, frozen=True):
    """Host: a well-formed HELLO of the right version; the host checks nonce, peer and identity, then sends ACK."""

    hello: Hello


class AckReceived(Struct, frozen=True):
    """Worker: accepted; ``max_frame`` is in force."""

    ack: HelloAck


class RequestReceived(Struct, frozen=True):
    """Worker: a request with its whole payload. The payload's length is not compared with the header's counts: a
    mismatch is the request's fault (``invalid_request``), not the stream's.
    """

    request: AnyRequest
    payload: memoryview | None


class ShutdownReceived(Struct, frozen=True):
    """Worker: leave the loop and exit 0."""


class ProgressReceived(Struct, frozen=True):
    """Host: validated progress of the running exchange."""

    progress: Progress


class ReplyStarted(Struct, frozen=True):
    """Host: a terminal header whose raw frame is still on its way; renews the silence window once."""

    reply: Vectors | Scores


class ReplyReceived(Struct, frozen=True):
    """Host: the exchange is over and drained."""

    request: AnyRequest
    reply: AnyReply
    payload: memoryview | None


class PeerClosed(Struct, frozen=True):
    """The peer closed the stream between two frames."""


Event: TypeAlias = (
    HelloReceived
    | AckReceived
    | RequestReceived
    | ShutdownReceived
    | ProgressReceived
    | ReplyStarted
    | ReplyReceived
    | PeerClosed
)
