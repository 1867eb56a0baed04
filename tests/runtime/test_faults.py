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
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from engines.protocol.connection import Connection
from engines.protocol.errors import ProtocolError
from engines.protocol.messages import EmbedBatch, Item, Load, Loaded, Ping, Pong, Pooling, Shutdown, Vectors
from engines.protocol.rules import PeerClosed
from engines.runtime.transport import SocketTransport, TransportFailed, connect_socket
from tests.support.desk import DIGEST, WorkerThread
from tests.support.toy_engine import ToyEngine

pytestmark = pytest.mark.fault
READ_BYTES = 16 * 1024
"""Small reads, so that large frames take several whatever the timing."""
FEWEST = {"recv_into": 8, "send": 3, "sendmsg": 1}
"""Calls that a session makes at least: 120 KB of ids in small reads; HELLO, LOADED, PONG; VECTORS with its payload."""
RESETS = ("EPIPE", "ECONNRESET")


class Faulty:
    """A socket whose n-th call of one kind fails, or moves one byte only, once."""

    def __init__(self, sock: socket.socket, fault: str, kind: str, at: int) -> None:
        self._socket = sock
        self._fault = fault
        self._turn = (kind, at)
        self._calls: Counter[str] = Counter()
        self.connection: Connection | None = None
        self.struck = False
        self.torn = False
        """Whether a frame was unfinished then."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def _short(self, name: str) -> bool:
        self._calls[name] += 1
        if (name, self._calls[name]) != self._turn:
            return False
        self.struck = True
        self.torn = self.connection is not None and self.connection.mid_frame
        if self._fault != "short":
            raise OSError(getattr(errno, self._fault), self._fault)
        return True

    def recv_into(self, view: memoryview) -> int:
        return self._socket.recv_into(view[: 1 if self._short("recv_into") else READ_BYTES])

    def send(self, view: memoryview) -> int:
        return self._socket.send(view[:1] if self._short("send") else view)

    def sendmsg(self, views: list[memoryview]) -> int:
        return self._socket.send(views[0][:1]) if self._short("sendmsg") else self._socket.sendmsg(views)


def session(fault: str, kind: str, at: int) -> tuple[Faulty, WorkerThread, bool]:
    """Run handshake, LOAD, EMBED_BATCH, PING and SHUTDOWN; return the socket, the worker and whether all went well."""
    sockets: list[Any] = []

    def wrap(sock: socket.socket) -> Any:
        sockets.append(Faulty(sock, fault, kind, at))
        return sockets[0]

    complete = False
    ids = range(30_000)
    with WorkerThread(ToyEngine(dims=5000), wrap=wrap) as worker:
        sockets[0].connection = worker.worker.channel.connection
        end = worker.end
        with contextlib.suppress(ProtocolError, OSError, AssertionError):
            end.shake_hands()
            assert isinstance(end.call(Load("l", "p", DIGEST, "gguf")).reply, Loaded)
            request = EmbedBatch("e", "toy:0", Pooling.CLS, False, [Item("0", len(ids))])
            outcome = end.call(request, struct.pack(f"<{len(ids)}i", *ids))
            assert isinstance(outcome.reply, Vectors) and outcome.payload is not None
            right = bytes(outcome.payload[:4]) == struct.pack("<f", sum(ids))
            assert isinstance(end.call(Ping("p")).reply, Pong)
            end.send(Shutdown())
            complete = isinstance(end.event(), PeerClosed) and right
    assert worker.bug is None, worker.bug
    return sockets[0], worker, complete


def every(fault: str, kind: str) -> Iterator[tuple[Faulty, WorkerThread]]:
    """Run one session for each n, until a session ends before its n-th call of that *kind*."""
    for at in range(1, 1000):
        sock, worker, complete = session(fault, kind, at)
        if not sock.struck:
            assert complete and worker.status == 0 and at > FEWEST[kind]
            return
        # A fault in the very read that would bring SHUTDOWN looks complete to the host, so only this way round:
        assert complete or fault != "short", f"{fault} at {at}"
        yield sock, worker
    raise AssertionError("the session never ends")


@pytest.mark.parametrize("kind", FEWEST)
@pytest.mark.parametrize("fault", ["short", *RESETS, "ENOMEM", "EBADF"])
def test_a_fault_at_every_call(fault: str, kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    seen = set()
    for sock, worker in every(fault, kind):
        lines = capfd.readouterr().err.splitlines()
        refused = fault not in ("short", *RESETS)
        torn = fault in RESETS and kind == "recv_into" and sock.torn
        assert worker.status == len(lines) == int(refused or torn)
        assert all(("the host failed" if refused else "inside a frame") in line for line in lines)
        seen.add(worker.status)
    assert len(seen) == (2 if fault in RESETS and kind == "recv_into" else 1)


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
