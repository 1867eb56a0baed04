"""A real worker loop on a thread of this process, and a blocking host end of its socketpair."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import NamedTuple

from engines.protocol.connection import Connection
from engines.protocol.messages import (
    AnyReply,
    AnyRequest,
    Buffer,
    Hello,
    HelloAck,
    Load,
    Loaded,
    Progress,
    Shutdown,
)
from engines.protocol.rules import Event, ReplyReceived, ReplyStarted, Role
from engines.runtime import main as runtime_main
from engines.runtime.engine import Engine
from engines.runtime.transport import SocketTransport
from engines.runtime.worker import Worker

NONCE = "0123456789abcdef"
DIGEST = "sha256:" + "0" * 64
TIMEOUT_S = 60.0
JOIN_S = 30.0


class Outcome(NamedTuple):
    """A finished exchange: the terminal reply, its raw frame, the progress before it."""

    reply: AnyReply
    payload: memoryview | None
    progress: list[Progress]


class HostEnd:
    """The host's end of a connected socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.socket.settimeout(TIMEOUT_S)
        self.connection = Connection(Role.HOST)

    def event(self) -> Event:
        """Return the next event; RemoteProtocolError and PeerClosed come as the connection says."""
        while (event := self.connection.next_event()) is None:
            try:
                count = self.socket.recv_into(self.connection.get_buffer())
            except ConnectionResetError:
                count = 0
            if count == 0:
                return self.connection.receive_eof()
            self.connection.buffer_updated(count)
        return event

    def send(self, message: HelloAck | AnyRequest | Shutdown, payload: Buffer | None = None) -> None:
        """Write one message and its raw frame."""
        for buffer in self.connection.send(message, payload):
            self.socket.sendall(buffer)

    def shake_hands(self) -> Hello:
        """Read HELLO, answer ACK, return HELLO."""
        hello = self.event()
        assert isinstance(hello, Hello), hello
        self.send(HelloAck(v=3, accept=True, max_frame=self.connection.max_frame))
        return hello

    def finish(self) -> Outcome:
        """Read until the terminal reply of the running exchange."""
        progress: list[Progress] = []
        while True:
            event = self.event()
            match event:
                case Progress():
                    progress.append(event)
                case ReplyReceived():
                    return Outcome(event.reply, event.payload, progress)
                case ReplyStarted():
                    pass
                case _:
                    raise AssertionError(f"{event} instead of a reply")

    def call(self, request: AnyRequest, payload: Buffer | None = None) -> Outcome:
        """Run one exchange to its end."""
        self.send(request, payload)
        return self.finish()

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


class WorkerThread:
    """``status`` is what the process would end with, ``exits`` what os._exit would have been called with."""

    def __init__(
        self,
        engine: Engine,
        *,
        clock: Callable[[], float] | None = None,
        wrap: Callable[[socket.socket], socket.socket] = lambda sock: sock,
    ) -> None:
        ours, theirs = socket.socketpair()
        self.end = HostEnd(ours)
        self.worker_socket = theirs
        self.exits: list[int] = []
        self.status: int | None = None
        self.bug: BaseException | None = None
        extra = {} if clock is None else {"clock": clock}
        self.worker = Worker(SocketTransport(wrap(theirs)), engine, engine.identity(), exit=self.exits.append, **extra)
        self._thread = threading.Thread(target=self._run, name="worker-under-test", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.status = runtime_main._guarded("worker-under-test", self._serve, self.exits.append)
        except BaseException as exc:  # a bug of an engine: the test asks for it
            self.bug = exc

    def _serve(self) -> None:
        with contextlib.closing(self.worker.channel):
            self.worker.greet(NONCE)
            if self.worker.await_ack():
                self.worker.serve()

    def ready(self) -> WorkerThread:
        """Shake hands and load one model."""
        self.end.shake_hands()
        reply = self.end.call(Load("load", "path", DIGEST, "gguf")).reply
        assert isinstance(reply, Loaded)
        return self

    def join(self) -> int | None:
        """Wait for the worker's end and return its status."""
        self._thread.join(JOIN_S)
        assert not self._thread.is_alive(), "the worker hangs"
        return self.status

    def __enter__(self) -> WorkerThread:
        return self

    def __exit__(self, *_: object) -> None:
        self.end.close()
        self.join()
        self.worker_socket.close()
