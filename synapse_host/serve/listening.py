"""One application on a TCP port and on the Unix socket at once, by uvicorn, in the loop that holds the host."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from synapse_host.errors import InvalidRequest
from synapse_host.serve.security import OPERATOR
from synapse_host.worker.listener import RuntimeDirectory

MAX_CONNECTIONS: Final = 1000
"""Open connections of each listener; more are closed at once."""
DESCRIPTORS: Final = 4096
"""What the soft limit of open files is raised to, as far as the hard one lets it."""
RESERVED: Final = 200
"""Descriptors that are kept for workers and files."""
HEAD_S: Final = 30.0
"""How long a connection may take for a request's head, or be silent between two requests."""
SEND_S: Final = 60.0
"""How long a client may read nothing of what it is sent."""
FLUSH_S: Final = 2
"""How long open answers may take to leave once the host is closed."""


def bind(address: str, port: int) -> socket.socket:
    """Return a bound TCP socket; InvalidRequest where the port or the address can't be had."""
    try:
        family, kind, proto, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, proto)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(target)
        except BaseException:
            bound.close()
            raise
    except OSError as exc:
        raise InvalidRequest(
            f"can't serve on {address}:{port}: {exc.strerror or exc}; choose another --host or --port",
            details={"reason": "port", "host": address, "port": port},
        ) from exc
    return bound


def is_loopback(bound: socket.socket) -> bool:
    """Tell whether only this machine reaches a bound socket."""
    return ipaddress.ip_address(bound.getsockname()[0]).is_loopback


def url_of(bound: socket.socket) -> str:
    """Return the address of a bound socket as a URL."""
    address, port = bound.getsockname()[:2]
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


@asynccontextmanager
async def listening(app: ASGIApp, tcp: socket.socket, runtime: RuntimeDirectory) -> AsyncIterator[None]:
    """Serve *app* on both sockets until the end of the block; what is being answered then gets FLUSH_S to leave.

    The Unix socket is ``control.sock`` of the runtime directory, 0600; a dead host's is replaced, and InvalidRequest
    raised for a live listener or anything else in its place.
    """

    async def operator(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, OPERATOR: True}, receive, send)

    async with AsyncExitStack() as stack:
        control = runtime.listen_control()
        stack.callback(control.close)
        _raise_descriptors()
        await stack.enter_async_context(_serving(app, tcp))
        await stack.enter_async_context(_serving(operator, control.listening))
        yield


@asynccontextmanager
async def _serving(app: ASGIApp, bound: socket.socket) -> AsyncIterator[None]:
    config = uvicorn.Config(
        app,
        http=_Connection,
        ws="none",
        lifespan="off",
        # Nothing is logged of requests: they hold texts, and their heads the key. Faults are logged by the service.
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=int(HEAD_S),
        timeout_graceful_shutdown=FLUSH_S,
    )
    server = _Server(config)
    task = asyncio.ensure_future(server.serve(sockets=[bound]))
    try:
        while not server.started and not task.done():
            await asyncio.sleep(0)
        yield
    finally:
        server.should_exit = True
        await task
        for connection in list(server.server_state.connections):
            connection.transport.abort()


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the command: they drain the host first."""
        yield


class _Connection(H11Protocol):
    """A connection that must send its head in time and read what it is sent, and is one of a limited number."""

    _unread = 0
    _reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > _room():
            transport.abort()
        else:
            self.timeout_keep_alive_task = self.loop.call_later(HEAD_S, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_keepalive_if_required()
        self._stop_watching()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # uvicorn ends the timer with any byte. A head that never ends, or the rest of a refused body, would keep the
        # connection for ever.
        timer = self.timeout_keep_alive_task if self._between() else None
        if timer is None:
            super().data_received(data)
            return
        self.timeout_keep_alive_task = None
        super().data_received(data)
        if self._between() and self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self.timeout_keep_alive_task = timer
        else:
            timer.cancel()

    def _between(self) -> bool:
        """Tell whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def timeout_keep_alive_handler(self) -> None:
        # Not `close`: that waits for a client to read what it was sent, which may be never.
        self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.transport.get_write_buffer_size()
        self._reading = self.loop.call_later(SEND_S, self._check_reading)

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

    def _check_reading(self) -> None:
        unread = self.transport.get_write_buffer_size()
        if unread >= self._unread:
            self.transport.abort()
        else:
            self._unread = unread
            self._reading = self.loop.call_later(SEND_S, self._check_reading)

    def _stop_watching(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None


def _room() -> int:
    import resource

    return max(16, min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVED))


def _raise_descriptors() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
