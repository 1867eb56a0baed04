"""Bytes between a worker and its host: one blocking connection (Unix socket here, Windows named pipe in ``pipe``).

A transport moves bytes and notices when the peer is gone; :class:`Channel` joins it to the protocol under one lock. The
end of the stream may show as a read of nothing, or as a reset where the host left data unread: both are EOF here, and
the connection decides whether a frame was torn. Nothing here is imported that only one platform has.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

from engines.protocol.connection import Connection
from engines.protocol.messages import Buffer, Hello, Message
from engines.protocol.rules import Event

if TYPE_CHECKING:
    from types import TracebackType

HANDSHAKE_S: Final = 10.0
"""Spec (protocol-v3, 2): one end-to-end deadline from spawn to HELLO_ACK."""
STOP_S: Final = 1.0
"""How long an ending worker waits for its watcher thread."""


class PeerGone(Exception):
    """The host closed the connection while we were sending: the end of this process, and not a fault."""


class TransportFailed(Exception):
    """The operating system refused to connect, read or write: the worker ends with one line on stderr."""


class Transport(Protocol):
    """A blocking byte stream. Reads happen on one thread; :meth:`wait_gone` on another."""

    def recv_into(self, view: memoryview) -> int:
        """Fill a part of *view*; return the count, 0 at the end of the stream.

        Raises TimeoutError after the deadline given to :meth:`set_deadline`, TransportFailed on any other failure.
        """

    def send(self, buffers: list[Buffer]) -> None:
        """Write all of *buffers*, each flat bytes, in order. Raises PeerGone or TransportFailed."""

    def set_deadline(self, deadline: float | None) -> None:
        """Bound later reads by a ``time.monotonic()`` value, or lift the bound."""

    def wait_gone(self, busy: threading.Event) -> None:
        """Sleep until the peer has closed its end, reading nothing. *busy* is set while a request is being served."""

    def shutdown(self) -> None:
        """End the conversation without closing: wakes :meth:`wait_gone`. Idempotent."""

    def close(self) -> None:
        """Close our end."""


class SocketTransport:
    """A connected stream socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._deadline: float | None = None

    def recv_into(self, view: memoryview) -> int:
        """Fill a part of *view*; 0 at the end of the stream, which a reset is too."""
        if self._deadline is not None:
            remaining = self._deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            self._socket.settimeout(remaining)
        try:
            return self._socket.recv_into(view)
        except ConnectionError:
            return 0
        except TimeoutError:
            raise
        except OSError as exc:
            raise TransportFailed(f"reading from the host failed: {exc}") from exc

    def send(self, buffers: list[Buffer]) -> None:
        """Write *buffers* with gathered sends, whatever the kernel takes at a time."""
        views: list[Buffer] = list(buffers)
        while views:
            try:
                count = self._socket.sendmsg(views) if len(views) > 1 else self._socket.send(views[0])
            except ConnectionError as exc:
                raise PeerGone(str(exc)) from exc
            except OSError as exc:
                raise TransportFailed(f"writing to the host failed: {exc}") from exc
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if views and count:
                views[0] = memoryview(views[0])[count:]

    def set_deadline(self, deadline: float | None) -> None:
        """Bound later reads, or lift the bound."""
        self._deadline = deadline
        if deadline is None:
            self._socket.settimeout(None)

    def wait_gone(self, busy: threading.Event) -> None:
        """Sleep until the host's end is closed. Data that is waiting doesn't wake us, and nothing is consumed."""
        if sys.platform == "darwin":
            self._wait_gone_kqueue()
        else:
            self._wait_gone_poll()

    def _wait_gone_poll(self) -> None:
        import select

        poller = select.poll()
        # POLLHUP and POLLERR are always reported; POLLIN is left out, so pending bytes can't spin this thread.
        poller.register(self._socket, getattr(select, "POLLRDHUP", 0))
        while not poller.poll():
            pass

    def _wait_gone_kqueue(self) -> None:
        import select

        # EV_CLEAR makes data an edge instead of a level; the low-water mark suppresses most of those edges. kqueue(2):
        # EV_EOF is set when the writer has closed, whatever the mark says.
        queue = select.kqueue()  # type: ignore[attr-defined,unused-ignore]
        event = select.kevent(  # type: ignore[attr-defined,unused-ignore]
            self._socket.fileno(),
            filter=select.KQ_FILTER_READ,  # type: ignore[attr-defined,unused-ignore]
            flags=select.KQ_EV_ADD | select.KQ_EV_CLEAR,  # type: ignore[attr-defined,unused-ignore]
            fflags=select.KQ_NOTE_LOWAT,  # type: ignore[attr-defined,unused-ignore]
            data=2**31 - 1,
        )
        changes: list[Any] | None = [event]
        while True:
            for ready in queue.control(changes, 1, None):
                if ready.flags & select.KQ_EV_EOF:  # type: ignore[attr-defined,unused-ignore]
                    return
            changes = None

    def shutdown(self) -> None:
        """Shut both directions down, which also wakes a watcher that sleeps on the socket."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def connect_socket(path: str) -> SocketTransport:
    """Connect to the host's Unix socket, or raise TransportFailed. One attempt: the host listens before it spawns."""
    family = getattr(socket, "AF_UNIX", None)
    if family is None:
        raise TransportFailed("this Python has no Unix sockets; use --pipe")
    sock: socket.socket | None = None
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.connect(path)
    except OSError as exc:
        if sock is not None:
            sock.close()
        raise TransportFailed(f"no host listens on {path}: {exc}") from exc
    return SocketTransport(sock)


class Channel:
    """Protocol and transport of one worker, under one lock.

    The lock makes a header and its raw frame leave together, even when another thread reports progress. Receiving
    happens on the main thread only, and only while no exchange is open, so the read itself needs no lock.
    """

    def __init__(self, transport: Transport, connection: Connection) -> None:
        self.transport = transport
        self.connection = connection
        self.lock = threading.RLock()

    def send(self, message: Hello | Message, payload: Buffer | None = None) -> None:
        """Write one message and its raw frame. Raises LocalProtocolError (nothing written) or PeerGone."""
        with self.lock:
            self.transport.send(self.connection.send(message, payload))

    def receive(self) -> Event:
        """Return the next event, waiting for it. Raises RemoteProtocolError; TimeoutError after the deadline."""
        connection, transport = self.connection, self.transport
        # Our peer waits for our answer, so usually nothing has arrived beyond the last frame.
        event = connection.next_event() if connection.mid_frame else None
        while event is None:
            count = transport.recv_into(connection.get_buffer())
            if count == 0:
                return connection.receive_eof()
            connection.buffer_updated(count)
            event = connection.next_event()
        return event

    def close(self) -> None:
        """Close the transport."""
        self.transport.close()


class PeerWatcher:
    """Ends the process when the host is gone while a request is being served, also in the middle of a C call.

    Outside of a request it only notes the fact: the main thread is in a read then and sees the end of the stream
    itself, so a torn frame still exits 1. *wakes*: the transport's ``wait_gone`` sleeps on its event between requests
    (named pipes); a socket's doesn't, and setting an event costs as much as decoding a request.
    """

    def __init__(
        self, wait_gone: Callable[[threading.Event], None], exit: Callable[[int], object], *, wakes: bool
    ) -> None:
        self._wait_gone = wait_gone
        self._exit = exit
        self._wakes = wakes
        self._busy = threading.Event()
        self._serving = False
        self._gone = False
        self._ending = threading.Lock()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="peer-watcher", daemon=True)

    def start(self) -> None:
        """Start the daemon thread."""
        self._thread.start()

    def stop(self) -> None:
        """Let the thread end, after the transport's shutdown and before its close (a descriptor number is reused)."""
        self._stopped = True
        self._busy.set()
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    def __enter__(self) -> None:
        # Either this thread sees the flag, or the watcher sees this one: each writes its own before it reads the other.
        self._serving = True
        if self._wakes:
            self._busy.set()
        if self._gone:
            # The request was complete in our receive buffer when its sender died.
            self._end()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._serving = False
        if self._wakes:
            self._busy.clear()

    def _run(self) -> None:
        self._wait_gone(self._busy)
        self._gone = True
        if self._serving:
            self._end()

    def _end(self) -> None:
        if not self._stopped and self._ending.acquire(blocking=False):
            # Spec (protocol-v3, 1): EOF is an orderly close, "also when it comes in mid-exchange".
            self._exit(0)
