"""R16: a failure at every n-th call of the host to its sockets and its processes, for every n.

What must happen follows from the call. EINTR, EAGAIN, ECONNABORTED in accept, short reads and short writes lose
nothing: the session goes on as if nothing had been. Everything else ends in a typed answer, at most one strike, nothing
left behind, and the next request is served. (The worker's side: ``tests/runtime/test_faults.py``.)
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import socket
import subprocess
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from synapse_host.errors import EngineCrashed, SynapseError
from synapse_host.worker import listener as listener_module
from tests.faults.arena import Arena, campaign_row
from tests.faults.inprocess import SteppedLoop, ThreadProcess, threads_for_processes
from tests.faults.ledger import Check
from tests.faults.mutations import PATIENCE

DIMS = 5000
LIMIT_S = 30.0
HARMLESS = {"EINTR", "EAGAIN", "short", "ECONNABORTED"}
SOCKET_CALLS: dict[str, tuple[str, ...]] = {
    "recv_into": ("EINTR", "EAGAIN", "short", "ECONNRESET", "EPIPE", "ENOMEM", "EMFILE", "EIO"),
    "send": ("EINTR", "EAGAIN", "short", "EPIPE", "ECONNRESET", "ENOMEM", "ENOBUFS", "EMFILE"),
    "accept": ("EINTR", "EAGAIN", "ECONNABORTED", "EMFILE", "ENFILE", "ENOMEM", "ECONNRESET"),
    "getsockopt": ("ENOMEM", "ENOTCONN", "EBADF"),
    "socket": ("EMFILE", "ENFILE", "ENOMEM", "ENOBUFS"),
    "bind": ("ENOMEM", "EADDRINUSE", "EACCES", "ENOSPC"),
    "listen": ("ENOMEM", "EADDRINUSE"),
}
FEWEST = {"recv_into": 5, "send": 4}
"""Calls that handshake, LOAD, three requests and the stop make at least, where that is more than one."""
PROCESS_CALLS: dict[str, tuple[str, ...]] = {
    "Popen": ("EMFILE", "ENFILE", "ENOMEM", "EAGAIN", "EINTR", "ENOSPC"),
    "pidfd_open": ("EMFILE", "ENOSYS", "EPERM", "ENOMEM"),
    "set_blocking": ("EBADF",),
    "add_reader": ("ENOMEM", "ENOSPC", "EMFILE"),
}


class Injector:
    """Makes the n-th call of one kind fail, once."""

    def __init__(self, kind: str, fault: str, at: int) -> None:
        self.kind, self.fault, self.at = kind, fault, at
        self.count = 0

    @property
    def struck(self) -> bool:
        """True once the fault has happened."""
        return self.count >= self.at

    def hit(self, kind: str) -> bool:
        """Raise if it is this call's turn; return whether it is to be a short one."""
        self.count += kind == self.kind
        if kind != self.kind or self.count != self.at:
            return False
        if self.fault != "short":
            number = getattr(errno, self.fault)
            raise OSError(number, os.strerror(number))
        return True

    def before(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return *call* with the fault before it."""

        def made(*arguments: Any, **options: Any) -> Any:
            self.hit(kind)
            return call(*arguments, **options)

        return made


@contextlib.contextmanager
def faulty_sockets(injector: Injector) -> Iterator[None]:
    """Let the listener module make sockets that obey *injector*."""

    class Faulty(socket.socket):
        def __init__(self, *args: Any, fileno: int | None = None) -> None:
            if fileno is None:
                injector.hit("socket")
            super().__init__(*args, fileno=fileno)

        def bind(self, address: Any) -> None:
            injector.hit("bind")
            super().bind(address)

        def listen(self, backlog: int = 8) -> None:
            injector.hit("listen")
            super().listen(backlog)

        def accept(self) -> tuple[socket.socket, Any]:
            injector.hit("accept")
            descriptor, address = self._accept()  # type: ignore[attr-defined]
            return Faulty(self.family, self.type, self.proto, fileno=descriptor), address

        def getsockopt(self, *args: Any) -> Any:
            injector.hit("getsockopt")
            return super().getsockopt(*args)

        def recv_into(self, buffer: Any, *args: Any) -> int:
            short = injector.hit("recv_into")
            return super().recv_into(memoryview(buffer)[:1] if short else buffer, *args)

        def send(self, data: Any, *args: Any) -> int:
            short = injector.hit("send")
            return super().send(memoryview(data)[:1] if short else data, *args)

    # The worker's own sockets, in this process too, stay sound.
    own = types.SimpleNamespace(**{**vars(socket), "socket": Faulty})
    with mock.patch.object(listener_module, "socket", own):
        yield


@contextlib.contextmanager
def faulty_processes(injector: Injector) -> Iterator[None]:
    """Let what starts and watches a process obey *injector*."""
    places = {"Popen": subprocess, "pidfd_open": os, "set_blocking": os, "add_reader": asyncio.get_running_loop()}
    with contextlib.ExitStack() as stack:
        for name, place in places.items():
            faulty = injector.before(name, getattr(place, name))
            stack.enter_context(mock.patch.object(place, name, faulty))
        yield


@campaign_row("R16", "a fault at every n-th socket and process call of the host", loop=SteppedLoop)
async def r16(ground: Arena, limit: int = 1000, *, processes: bool = True) -> None:
    """Every call, every errno, every n up to *limit*."""
    with threads_for_processes({"dims": DIMS}) as factory:
        for kind, faults in SOCKET_CALLS.items():
            for fault in faults:
                await _every(ground, kind, fault, limit, functools.partial(_socket_case, factory))
    for kind, faults in PROCESS_CALLS.items() if processes else ():
        for fault in faults:
            await _every(ground, kind, fault, min(limit, 5), _process_case)


async def _every(ground: Arena, kind: str, fault: str, limit: int, case: Callable[..., Any]) -> None:
    """Run *case* with the fault at the 1st, 2nd, .. call, until a session makes fewer."""
    for at in range(1, limit + 1):
        injector = Injector(kind, fault, at)
        with ground.row.fault(f"{fault} at {kind} {at}") as check:
            async with asyncio.timeout(LIMIT_S):
                await case(ground, injector, check)
        if not injector.struck:
            ground.row.injected -= 1
            ground.row.survived -= 1
            ground.row.check(at > FEWEST.get(kind, 1), f"{kind}: only {at - 1} calls seen")
            break


async def _socket_case(factory: type[ThreadProcess], ground: Arena, injector: Injector, check: Check) -> None:
    factory.made.clear()
    lane = ground.lanes({"dims": DIMS}, config=PATIENCE, lane_id="faulty")
    told = []
    with faulty_sockets(injector):
        for ask in (ground.history.generate, ground.history.rerank, ground.history.generate):
            try:
                await ask(lane)
                told.append("ok")
            except SynapseError as exc:
                told.append(exc.code)
        strikes, generation = lane.health()["strikes"], lane.health()["generation"]
        if injector.fault in HARMLESS and injector.struck:
            check(told == ["ok"] * 3 and generation == 1, f"not harmless: {told}")
        # The stop may be struck as well.
        await ground.end(lane)
    failed = [outcome for outcome in told if outcome != "ok"]
    check(len(failed) <= 1 and set(failed) <= {"engine_crashed", "invalid_request"}, f"what failed: {told}")
    own_lack = injector.kind in ("socket", "bind", "listen", "accept", "getsockopt")
    check(strikes <= (0 if own_lack else 1), f"{strikes} strikes")
    for process in factory.made:
        check(not process.running, "a worker is left running")
        check(process.bug is None, f"uncaught in the worker: {process.bug!r}")


async def _process_case(ground: Arena, injector: Injector, check: Check) -> None:
    lane = ground.lanes({}, lane_id="faulty")
    told: list[Any] = []
    with faulty_processes(injector):
        for _ in range(2):
            try:
                await lane.load()
                told.append("ok")
            except EngineCrashed as exc:
                told.append(exc.details.get("errno"))
        check(lane.health()["strikes"] == 0, "a strike for the host's own lack")
        await ground.end(lane)
    expected: list[list[Any]] = [["ok", "ok"]]
    if injector.struck and injector.kind != "pidfd_open":  # there is another way to wait for an exit
        # Popen tells why; which of the other two has failed isn't always known.
        expected = [[injector.fault, "ok"], *([[None, "ok"]] if injector.kind != "Popen" else [])]
        expected += [["ok", "ok"]] if injector.kind == "add_reader" else []
    check(told in expected, f"{told}")
