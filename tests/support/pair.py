"""Both ends of a worker connection wired back to back, without a transport between them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from engines.protocol.connection import Connection
from engines.protocol.framing import Allocate, allocate_fresh
from engines.protocol.messages import (
    DEFAULT_MAX_FRAME,
    LLAMA_ENGINE,
    VERSION,
    Buffer,
    EngineInfo,
    Hello,
    HelloAck,
    Message,
)
from engines.protocol.rules import Event, Role, State

Cut = Callable[[bytes], Iterator[bytes]]
"""Cuts a stretch of the stream into the pieces that one read after another delivers."""

NONCE = "0123456789abcdef"


def whole(data: bytes) -> Iterator[bytes]:
    """Deliver everything with one read."""
    if data:
        yield data


def byte_by_byte(data: bytes) -> Iterator[bytes]:
    """Deliver every byte alone."""
    for index in range(len(data)):
        yield data[index : index + 1]


def random_cuts(seed: int) -> Cut:
    """Return a cutter with pieces of 1 to 64 bytes, now and then of many thousand."""
    rng = random.Random(seed)

    def cut(data: bytes) -> Iterator[bytes]:
        start = 0
        while start < len(data):
            size = rng.randint(1, 64) if rng.random() < 0.95 else rng.randint(65, 100_000)
            yield data[start : start + size]
            start += size

    return cut


def receive(connection: Connection, data: Buffer) -> list[Event]:
    """Feed bytes from the peer as one read after another would, and return the events that they complete."""
    events: list[Event] = []
    view = memoryview(data)
    while view:
        target = connection.get_buffer()
        count = min(len(target), len(view))
        target[:count] = view[:count]
        connection.buffer_updated(count)
        view = view[count:]
        while (event := connection.next_event()) is not None:
            events.append(event)
    return events


def joined(buffers: Sequence[Buffer]) -> bytes:
    """Return what a transport would put on the wire for the buffers of one send."""
    return b"".join(bytes(buffer) for buffer in buffers)


def make_hello(**changes: object) -> Hello:
    """Return a valid HELLO of a llama worker with *changes* applied."""
    fields: dict[str, object] = {
        "v": VERSION,
        "nonce": NONCE,
        "engine": EngineInfo(engine=LLAMA_ENGINE, version="0.3.0"),
        "pid": 4242,
        "max_frame": DEFAULT_MAX_FRAME,
    }
    return Hello(**(fields | changes))  # type: ignore[arg-type]


def ready() -> Connection:
    """Return a host's end that has its handshake behind it."""
    pair = ConnectionPair()
    pair.handshake()
    return pair.host


class ConnectionPair:
    """A host and a worker end; what one sends, the other receives at once, cut by *cut*."""

    def __init__(
        self,
        *,
        cut: Cut = whole,
        host_max_frame: int = DEFAULT_MAX_FRAME,
        worker_max_frame: int = DEFAULT_MAX_FRAME,
        worker_allocate: Allocate = allocate_fresh,
    ) -> None:
        self.cut = cut
        self.host = Connection(Role.HOST, max_frame=host_max_frame)
        self.worker = Connection(Role.WORKER, max_frame=worker_max_frame, allocate=worker_allocate)
        self.host_events: list[Event] = []
        self.worker_events: list[Event] = []

    def handshake(self) -> None:
        """Exchange HELLO and HELLO_ACK."""
        self.worker_sends(make_hello(max_frame=self.worker.max_frame))
        self.host_sends(HelloAck(v=VERSION, accept=True, max_frame=self.host.max_frame))
        assert self.host.state is State.IDLE and self.worker.state is State.IDLE

    def host_sends(self, message: HelloAck | Message, payload: Buffer | None = None) -> list[Event]:
        """Send from the host; return the events at the worker."""
        return self.deliver(Role.WORKER, joined(self.host.send(message, payload)))

    def worker_sends(self, message: Hello | Message, payload: Buffer | None = None) -> list[Event]:
        """Send from the worker; return the events at the host."""
        return self.deliver(Role.HOST, joined(self.worker.send(message, payload)))

    def deliver(self, to: Role, data: bytes) -> list[Event]:
        """Let *to* receive arbitrary bytes, cut; return its events."""
        connection, seen = (self.host, self.host_events) if to is Role.HOST else (self.worker, self.worker_events)
        events = [event for piece in self.cut(data) for event in receive(connection, piece)]
        seen += events
        return events
