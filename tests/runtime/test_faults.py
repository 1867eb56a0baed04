"""A failure at every n-th socket call of handshake, request and stop: a right result or a typed end, never a hang.

What must happen follows from the call. Short reads and short writes lose nothing, so the session goes on as if nothing
had been. A reset is the end of the stream: status 0 between two frames, 1 inside one; while sending it is
the host's end, status 0. Any other errno is a refusal of the operating system: one line, status 1.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engines.protocol.connection import Connection
from engines.protocol.errors import ProtocolError
from engines.protocol.messages import EmbedBatch, Item, Load, Loaded, Ping, Pong, Pooling, Shutdown, Vectors
from engines.protocol.rules import PeerClosed
from engines.runtime.transport import SocketTransport, TransportFailed, connect_socket
from tests.support.desk import DIGEST, WorkerThread
from tests.support.toy_engine import ToyEngine

pytestmark = pytest.mark.fault
DIMS = 5000
READ_BYTES = 16 * 1024
"""Small reads, so that large frames take several whatever the timing."""
FEWEST = {"recv_into": 8, "send": 3, "sendmsg": 1}
"""Calls that a session makes at least: 120 KB of ids in small reads; HELLO, LOADED, PONG; VECTORS with its payload."""
HARMLESS = {"short"}


class Faulty:
    """A socket whose n-th call of one kind misbehaves once."""

    def __init__(self, sock: socket.socket, fault: str, kind: str, at: int) -> None:
        self._socket = sock
        self._fault = fault
        self._kind = kind
        self._at = at
        self.calls: list[str] = []
        self.struck: str | None = None
        self.torn = False
        self._connection: Connection | None = None
        self._introduced = threading.Event()

    def introduce(self, connection: Connection) -> None:
        """Tell whose socket this is: a strike notes whether a frame was unfinished then."""
        self._connection = connection
        self._introduced.set()

    def fileno(self) -> int:
        return self._socket.fileno()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def _strike(self, name: str) -> bool:
        self.calls.append(name)
        if name != self._kind or self.calls.count(name) != self._at:
            return False
        self.struck = name
        assert self._introduced.wait(10)
        assert self._connection is not None
        self.torn = self._connection.mid_frame
        return True

    def _raise(self) -> None:
        if self._fault not in ("short", "none"):
            code = getattr(errno, self._fault)
            raise OSError(code, self._fault)

    def recv_into(self, view: memoryview) -> int:
        if self._strike("recv_into"):
            self._raise()
            view = view[:1]
        return self._socket.recv_into(view[:READ_BYTES])

    def send(self, view: memoryview) -> int:
        if self._strike("send"):
            self._raise()
            view = view[:1]
        return self._socket.send(view)

    def sendmsg(self, views: list[memoryview]) -> int:
        if self._strike("sendmsg"):
            self._raise()
            return self._socket.send(views[0][:1])
        return self._socket.sendmsg(views)


def session(fault: str, kind: str, at: int) -> tuple[Faulty, WorkerThread, bool]:
    """Run handshake, LOAD, EMBED_BATCH, PING and SHUTDOWN; return the socket, the worker and whether all went well."""
    wrapped: list[Faulty] = []

    def wrap(sock: socket.socket) -> socket.socket:
        wrapped.append(Faulty(sock, fault, kind, at))
        return wrapped[0]  # type: ignore[return-value]

    complete = False
    answered: list[float] = []
    with WorkerThread(ToyEngine(dims=DIMS), wrap=wrap) as worker:
        wrapped[0].introduce(worker.worker.channel.connection)
        end = worker.end
        with contextlib.suppress(ProtocolError, OSError, AssertionError):
            end.shake_hands()
            assert isinstance(end.call(Load("l", "p", DIGEST, "gguf")).reply, Loaded)
            request = EmbedBatch("e", "toy:0", Pooling.CLS, False, [Item("0", 30_000)])
            outcome = end.call(request, struct.pack("<30000i", *range(30_000)))
            assert isinstance(outcome.reply, Vectors)
            assert outcome.payload is not None
            answered.append(struct.unpack_from("<f", outcome.payload)[0])
            assert isinstance(end.call(Ping("p")).reply, Pong)
            end.send(Shutdown())
            complete = isinstance(end.event(), PeerClosed)
    assert worker.bug is None, worker.bug
    assert answered in ([], [float(np.float32(sum(range(30_000))))])
    return wrapped[0], worker, complete


def every(fault: str, kind: str) -> Iterator[tuple[Faulty, WorkerThread]]:
    """Run one session for each n, until a session ends before its n-th call of that *kind*."""
    for at in range(1, 1000):
        sock, worker, complete = session(fault, kind, at)
        if sock.struck is None:
            assert complete
            assert worker.status == 0
            assert at > FEWEST[kind]
            return
        # A fault in the very read that would bring SHUTDOWN looks complete to the host, so only this way round:
        assert complete or fault not in HARMLESS, f"{fault} at {at}: {sock.calls}"
        yield sock, worker
    raise AssertionError("the session never ends")


@pytest.mark.parametrize("kind", FEWEST)
@pytest.mark.parametrize("fault", sorted(HARMLESS))
def test_what_loses_nothing_changes_nothing(fault: str, kind: str) -> None:
    assert all(worker.status == 0 for _, worker in every(fault, kind))


@pytest.mark.parametrize("kind", ["send", "sendmsg"])
@pytest.mark.parametrize("fault", ["EPIPE", "ECONNRESET"])
def test_a_reset_while_sending_is_the_hosts_end(fault: str, kind: str) -> None:
    assert all(worker.status == 0 for _, worker in every(fault, kind))


@pytest.mark.parametrize("fault", ["EPIPE", "ECONNRESET"])
def test_a_reset_while_reading_is_the_end_of_the_stream(fault: str) -> None:
    seen = set()
    for sock, worker in every(fault, "recv_into"):
        assert worker.status == int(sock.torn)
        seen.add(worker.status)
    assert seen == {0, 1}


@pytest.mark.parametrize("kind", FEWEST)
@pytest.mark.parametrize("fault", ["ENOMEM", "EBADF"])
def test_any_other_failure_ends_with_one_line(fault: str, kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    for _, worker in every(fault, kind):
        lines = capfd.readouterr().err.splitlines()
        assert worker.status == 1
        assert len(lines) == 1
        assert "the host failed" in lines[0]


# --- connecting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["__init__", "connect"])
@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOENT])
def test_a_connect_that_fails_is_tried_once(monkeypatch: pytest.MonkeyPatch, code: int, call: str) -> None:
    attempts = []

    def refuse(self: socket.socket, *arguments: object) -> None:
        attempts.append(arguments)
        raise OSError(code, "no")

    monkeypatch.setattr(socket, "socket", type("Refusing", (socket.socket,), {call: refuse}))
    with pytest.raises(TransportFailed, match=r"/tmp/none\.sock"):
        connect_socket("/tmp/none.sock")
    assert len(attempts) == 1


# --- gathered sends --------------------------------------------------------------------------------------------------


class Trickle:
    """Takes a fixed number of bytes a call."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken = b""

    def send(self, view: memoryview) -> int:
        return self.sendmsg([view])

    def sendmsg(self, views: list[memoryview]) -> int:
        chunk = b"".join(views)[: self.size]
        self.taken += chunk
        return len(chunk)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 7, 100])
@pytest.mark.parametrize("buffers", [[b"head"], [b"head", b"payload"], [b"", b"abc"], [b"h", memoryview(bytes(12))]])
def test_partial_sends_resume_where_they_stopped(size: int, buffers: list[Any]) -> None:
    trickle = Trickle(size)
    SocketTransport(trickle).send(buffers)  # type: ignore[arg-type]
    assert trickle.taken == b"".join(bytes(buffer) for buffer in buffers)
