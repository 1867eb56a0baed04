"""The rules of the wire as tables: the states of a connection, what may come next, and the events that result."""

from __future__ import annotations

from enum import Enum
from typing import Final, TypeAlias

from msgspec import Struct

from engines.protocol.messages import (
    REPLY_TO,
    AnyReply,
    AnyRequest,
    Err,
    Hello,
    HelloAck,
    Progress,
    Scores,
    Shutdown,
    Vectors,
)


class Role(Enum):
    """The two ends of a connection."""

    # Members are compared by identity; Enum's own hash runs Python code on every look-up in the table.
    __hash__ = object.__hash__

    HOST = "host"
    WORKER = "worker"

    @property
    def peer(self) -> Role:
        """The other end."""
        return Role.WORKER if self is Role.HOST else Role.HOST


class State(Enum):
    """What a connection waits for."""

    __hash__ = object.__hash__

    HELLO = "waiting for HELLO"
    ACK = "waiting for HELLO_ACK"
    IDLE = "idle"
    REQUEST_PAYLOAD = "waiting for a request's raw frame"
    BUSY = "exchange running"
    REPLY_PAYLOAD = "waiting for a reply's raw frame"
    STOPPING = "exchange running, shutdown sent"
    STOPPING_PAYLOAD = "waiting for the last reply's raw frame"
    CLOSED = "closed"


class Kind(Enum):
    """Classes of frames that the rules distinguish."""

    __hash__ = object.__hash__

    HELLO = "HELLO"
    ACK = "HELLO_ACK"
    REQUEST = "request"
    REQUEST_WITH_PAYLOAD = "request with raw frame"
    PROGRESS = "PROGRESS"
    REPLY = "reply"
    REPLY_WITH_PAYLOAD = "reply with raw frame"
    PAYLOAD = "raw frame"
    SHUTDOWN = "SHUTDOWN"


TRANSITIONS: Final[dict[tuple[State, Role, Kind], State]] = {
    (State.HELLO, Role.WORKER, Kind.HELLO): State.ACK,
    (State.ACK, Role.HOST, Kind.ACK): State.IDLE,
    (State.IDLE, Role.HOST, Kind.REQUEST): State.BUSY,
    (State.IDLE, Role.HOST, Kind.REQUEST_WITH_PAYLOAD): State.REQUEST_PAYLOAD,
    (State.REQUEST_PAYLOAD, Role.HOST, Kind.PAYLOAD): State.BUSY,
    (State.BUSY, Role.WORKER, Kind.PROGRESS): State.BUSY,
    (State.BUSY, Role.WORKER, Kind.REPLY): State.IDLE,
    (State.BUSY, Role.WORKER, Kind.REPLY_WITH_PAYLOAD): State.REPLY_PAYLOAD,
    (State.REPLY_PAYLOAD, Role.WORKER, Kind.PAYLOAD): State.IDLE,
    # Spec: "SHUTDOWN {} -> worker exits 0 after current request."
    (State.IDLE, Role.HOST, Kind.SHUTDOWN): State.CLOSED,
    (State.BUSY, Role.HOST, Kind.SHUTDOWN): State.STOPPING,
    (State.REPLY_PAYLOAD, Role.HOST, Kind.SHUTDOWN): State.STOPPING_PAYLOAD,
    (State.STOPPING, Role.WORKER, Kind.PROGRESS): State.STOPPING,
    (State.STOPPING, Role.WORKER, Kind.REPLY): State.CLOSED,
    (State.STOPPING, Role.WORKER, Kind.REPLY_WITH_PAYLOAD): State.STOPPING_PAYLOAD,
    (State.STOPPING_PAYLOAD, Role.WORKER, Kind.PAYLOAD): State.CLOSED,
}
"""(state, sender, kind of frame) -> next state. What is not here is a violation."""


KINDS: Final[dict[type[Struct], Kind]] = {
    Hello: Kind.HELLO,
    HelloAck: Kind.ACK,
    Progress: Kind.PROGRESS,
    Shutdown: Kind.SHUTDOWN,
    Err: Kind.REPLY,
    **{kind: Kind.REQUEST if kind.payload is None else Kind.REQUEST_WITH_PAYLOAD for kind in REPLY_TO},
    **{kind: Kind.REPLY if kind.payload is None else Kind.REPLY_WITH_PAYLOAD for kind in REPLY_TO.values()},
}
"""The kind of each control frame."""


# --- what the bytes that arrived mean ---------------------------------------------------------------------------------


class RequestReceived(Struct, frozen=True):
    """Worker: a request with its whole payload. The payload's length is not compared with the header's counts: a
    mismatch is the request's fault (``invalid_request``), not the stream's.
    """

    request: AnyRequest
    payload: memoryview | None


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


Event: TypeAlias = Hello | HelloAck | Progress | Shutdown | RequestReceived | ReplyStarted | ReplyReceived | PeerClosed
"""What a connection reports. A message that stands for itself is one: it was checked and the state has moved.

After HELLO the host still checks nonce, peer and identity, then sends HELLO_ACK; after SHUTDOWN a worker exits 0.
"""
