"""R16: a failure at every n-th call of the host to its sockets and its processes, for every n.

What must happen follows from the call. EINTR, EAGAIN, ECONNABORTED in accept, short reads and short writes lose
nothing: the session goes on as if nothing had been. Everything else ends in a typed answer, at most one strike, nothing
left behind, and the next request is served. (The worker's side: ``tests/runtime/test_faults.py``.)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import types
from collections.abc import Callable, Iterator
from typing import Any

from synapse_host.errors import EngineCrashed, SynapseError
from synapse_host.worker import listener as listener_module
from synapse_host.worker import process as process_module
from tests.faults.arena import Arena, arena
from tests.faults.inprocess import ThreadProcess, error_of, threads_for_processes
from tests.faults.ledger import Row
from tests.faults.mutations import PATIENCE

DIMS = 5000
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
FEWEST = {"recv_into": 5, "send": 4, "accept": 1, "getsockopt": 1, "socket": 1, "bind": 1, "listen": 1}
"""Calls that handshake, LOAD, three requests and the stop make at least."""
PROCESS_CALLS: dict[str, tuple[str, ...]] = {
    "Popen": ("EMFILE", "ENFILE", "ENOMEM", "EAGAIN", "EINTR", "ENOSPC"),
    "pidfd_open": ("EMFILE", "ENOSYS", "EPERM", "ENOMEM"),
    "set_blocking": ("EBADF",),
    "add_reader": ("ENOMEM", "ENOSPC", "EMFILE"),
}
UNNOTICED = {("pidfd_open", fault) for fault in PROCESS_CALLS["pidfd_open"]}
"""There is another way to wait for an exit."""


class Injector:
    """Makes the n-th call of one kind fail, once."""

    def __init__(self, kind: str, fault: str, at: int) -> None:
        self.kind, self.fault, self.at = kind, fault, at
        self.count = 0
        self.struck = False

    def strikes(self, kind: str) -> bool:
        if kind != self.kind or self.struck:
            return False
        self.count += 1
        self.struck = self.count == self.at
        return self.struck

    def hit(self, kind: str) -> None:
        """Raise if it is this call's turn."""
        if self.strikes(kind):
            raise error_of(self.fault)


def _sockets(injector: Injector) -> tuple[type[socket.socket], type[socket.socket]]:
    """Return a listening and a connected socket class that obey *injector*."""

    class Listening(socket.socket):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            injector.hit("socket")
            super().__init__(*args, **kwargs)

        def bind(self, address: Any) -> None:
            injector.hit("bind")
            super().bind(address)

        def listen(self, backlog: int = 8) -> None:
            injector.hit("listen")
            super().listen(backlog)

        def accept(self) -> tuple[socket.socket, Any]:
            injector.hit("accept")
            descriptor, address = self._accept()  # type: ignore[attr-defined]
            return Connected(self.family, self.type, self.proto, fileno=descriptor), address

    class Connected(socket.socket):
        def getsockopt(self, *args: Any) -> Any:
            injector.hit("getsockopt")
            return super().getsockopt(*args)

        def recv_into(self, buffer: Any, *args: Any) -> int:
            if injector.strikes("recv_into"):
                if injector.fault != "short":
                    raise error_of(injector.fault)
                buffer = memoryview(buffer)[:1]
            return super().recv_into(buffer, *args)

        def send(self, data: Any, *args: Any) -> int:
            if injector.strikes("send"):
                if injector.fault != "short":
                    raise error_of(injector.fault)
                data = memoryview(data)[:1]
            return super().send(data, *args)

    return Listening, Connected


@contextlib.contextmanager
def faulty_sockets(injector: Injector) -> Iterator[None]:
    """Let the listener module make sockets that obey *injector*."""
    listening, _ = _sockets(injector)
    real = listener_module.socket
    listener_module.socket = types.SimpleNamespace(**{**vars(socket), "socket": listening})  # type: ignore[assignment]
    try:
        yield
    finally:
        listener_module.socket = real


@contextlib.contextmanager
def faulty_processes(injector: Injector) -> Iterator[None]:
    """Let the process module's calls obey *injector*."""
    loop = asyncio.get_running_loop()
    add_reader = loop.add_reader

    def popen(*args: Any, **kwargs: Any) -> Any:
        injector.hit("Popen")
        return subprocess.Popen(*args, **kwargs)

    def wrapped(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            injector.hit(name)
            return getattr(os, name)(*args)

        return call

    def reader(*args: Any) -> None:
        injector.hit("add_reader")
        add_reader(*args)

    fake_os = types.SimpleNamespace(**{**vars(os), **{name: wrapped(name) for name in ("pidfd_open", "set_blocking")}})
    fake_subprocess = types.SimpleNamespace(**{**vars(subprocess), "Popen": popen})
    real = process_module.os, process_module.subprocess
    process_module.os, process_module.subprocess = fake_os, fake_subprocess  # type: ignore[assignment]
    loop.add_reader = reader  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        process_module.os, process_module.subprocess = real
        del loop.add_reader


def r16(limit: int = 1000, *, processes: bool = True) -> Any:
    """Every call, every errno, every n up to *limit*."""
    row = Row("R16", "a fault at every n-th socket and process call of the host")

    async def body() -> None:
        async with arena(row) as ground:
            calls: dict[str, int] = {}
            with threads_for_processes({"dims": DIMS}) as factory:
                for kind, faults in SOCKET_CALLS.items():
                    for fault in faults:
                        calls[kind] = await _every(
                            ground, kind, fault, limit, lambda i: _socket_case(ground, factory, i)
                        )
            if processes:
                for kind, faults in PROCESS_CALLS.items():
                    for fault in faults:
                        calls[kind] = await _every(
                            ground, kind, fault, min(limit, 5), lambda i: _process_case(ground, i)
                        )
            row.notes["calls_of_a_session"] = calls

    return row, body


async def _every(ground: Arena, kind: str, fault: str, limit: int, case: Callable[[Injector], Any]) -> int:
    """Run *case* with the fault at the 1st, 2nd, .. call, until a session makes fewer; return how many it makes."""
    row = ground.row
    for at in range(1, limit + 1):
        injector = Injector(kind, fault, at)
        problems = len(row.problems)
        try:
            await asyncio.wait_for(case(injector), 30)
        except BaseException as exc:
            row.problems.append(f"{fault} at {kind} {at}: {exc!r:.300}")
        if not injector.struck:
            row.check(at > FEWEST.get(kind, 1), f"{kind}: only {at - 1} calls seen")
            return at - 1
        row.injected += 1
        row.survived += len(row.problems) == problems
        row.problems[problems:] = [f"{fault} at {kind} {at}: {text}" for text in row.problems[problems:]]
    return limit


async def _requests(ground: Arena, lane: Any) -> list[str]:
    told = []
    for ask in (ground.history.generate, ground.history.rerank, ground.history.generate):
        try:
            await ask(lane)
        except SynapseError as exc:
            told.append(exc.code if not isinstance(exc, EngineCrashed) else f"{exc.code} {exc.details.get('cause')}")
        else:
            told.append("ok")
    return told


async def _socket_case(ground: Arena, factory: type[ThreadProcess], injector: Injector) -> None:
    row = ground.row
    factory.made.clear()
    lane = ground.lanes({"dims": DIMS}, config=PATIENCE, lane_id="faulty")
    with faulty_sockets(injector):
        told = await _requests(ground, lane)
        strikes, generation = lane.health()["strikes"], lane.health()["generation"]
        if injector.fault in HARMLESS and injector.struck:
            row.check(told == ["ok"] * 3 and generation == 1, f"not harmless: {told}")
        failed = [outcome for outcome in told if outcome != "ok"]
        row.check(len(failed) <= 1, f"more than one request failed: {told}")
        row.check(strikes <= 1, f"{strikes} strikes")
        row.check(all(outcome.split()[0] in ("engine_crashed", "invalid_request") for outcome in failed), f"{failed}")
        if injector.kind in ("socket", "bind", "listen", "accept", "getsockopt"):
            row.check(strikes == 0, "the host's own lack was charged to the worker")
        # The stop may be struck as well.
        await lane.aclose()
    ground.lanes.made.remove(lane)
    row.check(all(not process.running for process in factory.made), "a worker is left running")
    bugs = [process.bug for process in factory.made if process.bug is not None]
    row.check(not bugs, f"uncaught in the worker: {bugs}")


async def _process_case(ground: Arena, injector: Injector) -> None:
    row = ground.row
    lane = ground.lanes({}, lane_id="faulty")
    with faulty_processes(injector):
        outcomes = []
        for _ in range(2):
            try:
                await lane.load()
                outcomes.append("ok")
            except SynapseError as exc:
                outcomes.append(exc.code)
                row.check(exc.details.get("errno") in (injector.fault, None), f"another reason is told: {exc.details}")
                row.check(injector.kind != "Popen" or exc.details["errno"], "the reason is not told")
        strikes = lane.health()["strikes"]
        await lane.aclose()
    ground.lanes.made.remove(lane)
    if injector.struck:
        expected = ["ok", "ok"] if (injector.kind, injector.fault) in UNNOTICED else ["engine_crashed", "ok"]
        row.check(outcomes == expected or (injector.kind == "add_reader" and outcomes == ["ok", "ok"]), f"{outcomes}")
    row.check(strikes == 0, f"{strikes} strikes for the host's own lack")
