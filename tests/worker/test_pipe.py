"""One connection, whatever carries it: the same suite over every transport, and the named pipe's own calls.

What needs Windows is marked ``windows`` and is not measured until it has run there. Against a stand-in for kernel32
this proves our side of each call: flags, order, what each answer leads to.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.protocol.connection import HelloReceived, ReplyReceived
from engines.protocol.events import AckReceived, RequestReceived
from engines.protocol.messages import EmbedBatch, HelloAck, Item, Load, Loaded, Pooling, Vectors
from engines.protocol.states import Role
from engines.runtime.engine import EngineIdentity
from engines.runtime.main import connect
from engines.runtime.transport import Channel as WorkerChannel
from engines.runtime.transport import Transport, TransportFailed
from engines.runtime.worker import hello
from synapse_host.worker import windows
from synapse_host.worker.handshake import Peer
from synapse_host.worker.listener import Listener, RuntimeDirectory
from synapse_host.worker.transport import Channel
from tests.support.kernel32 import ACCESS_DENIED, Kernel, stand_in

MIB = 2**20
NONCE = "0123456789abcdef"
WAIT_S = 30.0
ROOT = Path(__file__).resolve().parents[2]


# --- the suite over every transport ----------------------------------------------------------------------------------


class End:
    """A transport's host side: makes listeners."""

    def __init__(self, directory: RuntimeDirectory, kind: str) -> None:
        self.directory = directory
        self.kind = kind

    def listen(self, worker_id: str = "toy-1") -> Listener:
        if self.kind == "pipe":
            return windows.listen(self.directory.path, worker_id)
        return self.directory.listen(worker_id)


@pytest.fixture(params=["unix", pytest.param("pipe", marks=pytest.mark.windows)])
def end(request: pytest.FixtureRequest, runtime_dir: Path) -> Iterator[End]:
    if request.param == "unix" and sys.platform == "win32":
        pytest.skip("asyncio has no Unix sockets on Windows")
    directory = RuntimeDirectory.open(runtime_dir)
    yield End(directory, request.param)
    directory.close()


def reach(listener: Listener, *, limit: float = 5.0) -> Transport:
    """Connect as a worker does, by the arguments that it would get."""
    option, value = listener.arguments
    socket_path, pipe_name = (value, None) if option == "--socket" else (None, value)
    return connect(socket_path, pipe_name, deadline=time.monotonic() + limit)


class HostSide:
    """A host's channel that collects what happens to it."""

    def __init__(self, *, max_frame: int = 64 * MIB) -> None:
        self.events: asyncio.Queue[Any] = asyncio.Queue()
        self.faults: list[Exception] = []
        self.lost = asyncio.Event()
        self.channel = Channel(
            max_frame=max_frame, on_event=self.events.put_nowait, on_fault=self.faults.append, on_lost=self.lost.set
        )


def conversation(end: End, worker: Callable[[Transport], None], host: Callable[[HostSide], Any]) -> None:
    """Run a worker's part on a thread and the host's part on a loop, over one connection."""
    failures: list[BaseException] = []

    async def main() -> None:
        listener = end.listen()
        side = HostSide()

        def body() -> None:
            try:
                transport = reach(listener)
                try:
                    worker(transport)
                finally:
                    transport.close()
            except BaseException as exc:
                failures.append(exc)

        thread = threading.Thread(target=body)
        thread.start()
        try:
            async with asyncio.timeout(WAIT_S):
                await listener.connect(side.channel, lambda peer: True)
                await host(side)
        finally:
            side.channel.abort()
            listener.close()
            await asyncio.to_thread(thread.join, WAIT_S)
            # The transport's last callback runs in the next turn of the loop.
            await asyncio.sleep(0)

    asyncio.run(main())
    assert not failures, failures


class WorkerSide:
    """A worker's protocol over a transport."""

    def __init__(self, transport: Transport) -> None:
        from engines.protocol.connection import Connection

        self.transport = transport
        self.channel = WorkerChannel(transport, Connection(Role.WORKER, max_frame=64 * MIB))

    def greet(self) -> None:
        self.channel.send(hello(EngineIdentity("llama.cpp-worker", "1"), NONCE))
        assert isinstance(self.channel.receive(), AckReceived)

    def request(self) -> RequestReceived:
        event = self.channel.receive()
        assert isinstance(event, RequestReceived)
        return event


async def shake_hands(side: HostSide) -> None:
    event = await side.events.get()
    assert isinstance(event, HelloReceived) and event.hello.nonce == NONCE
    side.channel.send(HelloAck(v=3, accept=True, max_frame=side.channel.connection.max_frame))


def embed(tokens: int, req_id: str) -> EmbedBatch:
    items = [Item("0", tokens)]
    return EmbedBatch(req_id=req_id, model_ref="llama:0", pooling=Pooling.MEAN, normalize=False, items=items)


@pytest.mark.parametrize("tokens", [1, 1000, 16_383, 16_384, 4 * MIB])
def test_payloads_of_every_size_cross_both_ways(end: End, tokens: int) -> None:
    ids = np.arange(tokens, dtype=np.int32)

    def worker(transport: Transport) -> None:
        side = WorkerSide(transport)
        side.greet()
        side.request()
        side.channel.send(Loaded(req_id="l", model_ref="llama:0", dims=tokens, cold_load_ms=1))
        for _ in range(2):
            event = side.request()
            assert event.payload is not None
            out = np.frombuffer(event.payload, np.int32).astype(np.float32)
            side.channel.send(Vectors(req_id=event.request.req_id, dims=tokens, n=1), out)

    async def host(side: HostSide) -> None:
        await shake_hands(side)
        side.channel.send(Load("l", "p", "sha256:" + "0" * 64, "gguf"))
        assert isinstance(await side.events.get(), ReplyReceived)
        for turn in ("a", "b"):
            side.channel.send(embed(tokens, turn), ids)
            while not isinstance(event := await side.events.get(), ReplyReceived):
                pass
            assert event.reply.req_id == turn
            assert np.array_equal(np.frombuffer(event.payload, np.float32), ids.astype(np.float32))
        assert side.faults == []

    conversation(end, worker, host)


def test_bytes_come_in_any_pieces(end: End) -> None:
    def worker(transport: Transport) -> None:
        side = WorkerSide(transport)
        connection = side.channel.connection
        for chunk in connection.send(hello(EngineIdentity("llama.cpp-worker", "1"), NONCE)):
            for value in bytes(chunk):
                transport.send([bytes([value])])
        assert isinstance(side.channel.receive(), AckReceived)

    async def host(side: HostSide) -> None:
        await shake_hands(side)
        await side.lost.wait()

    conversation(end, worker, host)


def test_the_host_sees_the_worker_go(end: End) -> None:
    async def host(side: HostSide) -> None:
        await shake_hands(side)
        await side.lost.wait()
        assert side.channel.closed and side.faults == []

    conversation(end, lambda transport: WorkerSide(transport).greet(), host)


def test_the_worker_sees_the_host_go(end: End) -> None:
    def worker(transport: Transport) -> None:
        side = WorkerSide(transport)
        side.greet()
        busy = threading.Event()
        busy.set()
        watcher = threading.Thread(target=transport.wait_gone, args=(busy,), daemon=True)
        watcher.start()
        watcher.join(WAIT_S)
        assert not watcher.is_alive(), "a worker that computes doesn't see its host go"
        assert transport.recv_into(memoryview(bytearray(8))) == 0

    async def host(side: HostSide) -> None:
        await shake_hands(side)
        side.channel.abort()

    conversation(end, worker, host)


def test_the_wait_for_the_ack_is_bounded(end: End) -> None:
    waited = threading.Event()

    def worker(transport: Transport) -> None:
        transport.set_deadline(time.monotonic() + 0.05)
        with pytest.raises(TimeoutError):
            transport.recv_into(memoryview(bytearray(8)))
        waited.set()

    async def host(side: HostSide) -> None:
        await asyncio.to_thread(waited.wait, WAIT_S)

    conversation(end, worker, host)


def test_strangers_are_turned_away_and_accepting_goes_on(end: End) -> None:
    seen: list[Peer] = []

    async def main() -> None:
        listener = end.listen()
        side = HostSide()

        def admit(peer: Peer) -> bool:
            seen.append(peer)
            return len(seen) == 4

        def strangers() -> Transport:
            for _ in range(3):
                stranger = reach(listener)
                assert stranger.recv_into(memoryview(bytearray(8))) == 0, "turned away without a word"
                stranger.close()
            return reach(listener)

        ours = asyncio.ensure_future(asyncio.to_thread(strangers))
        async with asyncio.timeout(WAIT_S):
            await listener.connect(side.channel, admit)
            transport = await ours
        assert side.channel.connected
        side.channel.abort()
        transport.close()
        listener.close()
        await asyncio.sleep(0)

    asyncio.run(main())
    assert len(seen) == 4


def test_one_connection_and_nobody_after_it(end: End) -> None:
    async def host(side: HostSide) -> None:
        await side.lost.wait()

    conversation(end, lambda transport: None, host)
    listener = end.listen()
    listener.close()
    listener.close()
    with pytest.raises(TransportFailed):
        reach(listener, limit=0.2).close()


def test_a_name_is_free_again_after_its_listener(end: End) -> None:
    first = end.listen()
    first.close()
    second = end.listen()
    assert first.arguments == second.arguments
    second.close()


# --- the pipe's name -------------------------------------------------------------------------------------------------


def test_names_mix_directory_host_and_worker() -> None:
    name = windows.pipe_name(Path("a"), "toy-1", pid=1)
    assert name.startswith("\\\\.\\pipe\\synapse-") and len(name) == len("\\\\.\\pipe\\synapse-") + 16
    assert name == windows.pipe_name(Path("a"), "toy-1", pid=1)
    pairs = [("b", "toy-1", 1), ("a", "toy-2", 1), ("a", "toy-1", 2), ("a\0t", "oy-1", 1)]
    assert len({name, *(windows.pipe_name(Path(p), w, pid=n) for p, w, n in pairs)}) == 5
    # Lone surrogates are what undecodable file names look like.
    assert windows.pipe_name(Path("\udcff"), "toy-1", pid=1) != name


# --- the pipe's calls, over the stand-in -----------------------------------------------------------------------------


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    with stand_in() as kernel:
        yield kernel


def test_the_pipe_is_private_single_local_and_a_stream(kernel: Kernel) -> None:
    listener = windows.listen(Path("rt"), "toy-1")
    (made,) = kernel.created
    assert listener.arguments == ("--pipe", made["name"])
    # winbase.h: PIPE_ACCESS_DUPLEX 3, FILE_FLAG_OVERLAPPED 0x40000000, FILE_FLAG_FIRST_PIPE_INSTANCE 0x00080000
    assert made["open_mode"] == 0x3 | 0x40000000 | 0x00080000
    # PIPE_TYPE_MESSAGE 4 and PIPE_READMODE_MESSAGE 2 are off, PIPE_REJECT_REMOTE_CLIENTS 8 is on
    assert made["pipe_mode"] == 0x8
    assert made["instances"] == 1
    # A protected list (P: nothing inherited) with one entry: everything for the owner.
    assert made["sddl"] == "D:P(A;;GA;;;OW)"
    assert made["inherit"] is False
    assert kernel.freed == list(kernel.descriptors), "the descriptor is freed"
    listener.close()
    listener.close()
    assert kernel.closed == [102]


def test_a_name_that_exists_is_not_ours(kernel: Kernel) -> None:
    first = windows.listen(Path("rt"), "toy-1")
    with pytest.raises(OSError, match=str(ACCESS_DENIED)):
        windows.listen(Path("rt"), "toy-1")
    assert len(kernel.freed) == 2, "the descriptor is freed on failure too"
    first.close()
    windows.listen(Path("rt"), "toy-1").close()


def test_a_descriptor_that_cannot_be_made_makes_no_pipe(kernel: Kernel) -> None:
    kernel.refuse.add("ConvertStringSecurityDescriptorToSecurityDescriptorW")
    with pytest.raises(OSError):
        windows.listen(Path("rt"), "toy-1")
    assert kernel.created == []


def test_the_pipe_becomes_the_connection_of_the_right_process(kernel: Kernel) -> None:
    async def main() -> None:
        listener = windows.listen(Path("rt"), "toy-1")
        handle = 102
        loop: Any = asyncio.get_running_loop()
        accepted: list[Any] = []
        made: list[Any] = []

        class Proactor:
            async def accept_pipe(self, opened: Any) -> None:
                accepted.append(opened.handle)

        loop._proactor = Proactor()
        loop._make_duplex_pipe_transport = lambda opened, protocol: made.append((opened.handle, protocol))
        pids: list[int | None] = []

        def admit(peer: Peer) -> bool:
            assert peer.uid is None
            pids.append(peer.pid)
            return len(pids) == 3

        protocol = asyncio.Protocol()
        await listener.connect(protocol, admit)
        assert accepted == [handle] * 3 and pids == [4711] * 3
        assert kernel.calls.count("DisconnectNamedPipe") == 2, "strangers are put out before the next waits"
        assert made == [(handle, protocol)]
        listener.close()
        assert kernel.closed == [], "the handle belongs to the transport now"

    asyncio.run(main())


def test_a_client_that_windows_cannot_name(kernel: Kernel) -> None:
    kernel.client_pid = None
    listener = windows.listen(Path("rt"), "toy-1")
    assert windows._client_pid(listener._handle) is None
    listener.close()


def test_a_job_ends_with_its_last_handle_and_holds_the_child(kernel: Kernel) -> None:
    made = windows.contain(1234)
    # JobObjectExtendedLimitInformation 9, JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE 0x2000
    assert kernel.limits_kind == 9 and kernel.limits.basic.flags == 0x2000
    # PROCESS_SET_QUOTA 0x100 | PROCESS_TERMINATE 1: what AssignProcessToJobObject needs, and no more
    assert kernel.opened == (0x101, 1234)
    assert kernel.calls.count("AssignProcessToJobObject") == 1 and kernel.closed == [102]
    made.terminate()
    made.close()
    made.close()
    made.terminate()
    assert kernel.closed == [102, 101] and kernel.calls.count("TerminateJobObject") == 1


@pytest.mark.parametrize("call", ["SetInformationJobObject", "OpenProcess", "AssignProcessToJobObject"])
def test_a_job_that_cannot_hold_the_child_is_closed(kernel: Kernel, call: str) -> None:
    kernel.refuse.add(call)
    with pytest.raises(OSError):
        windows.contain(1234)
    assert 101 in kernel.closed


# --- no module needs Unix --------------------------------------------------------------------------------------------

WINDOWS = """
import asyncio, asyncio.subprocess, concurrent.futures, ctypes.wintypes, ctypes.util, importlib, importlib.metadata
import logging.handlers, multiprocessing, os, pkgutil, select, shutil, signal, socket, socketserver, ssl, subprocess
import sys, tempfile, types, urllib.request, zipfile, http.server, uuid, mmap, getpass, pathlib, selectors
import msgspec, numpy, psutil, yaml, platformdirs, rich.console, rich.progress, rich.table, tokenizers
for name in ("jinja2", "jsonschema", "gguf", "prometheus_client"):
    try:
        importlib.import_module(name)
    except ImportError:
        pass

UNIX_ONLY = {"fcntl", "grp", "pwd", "resource", "termios", "tty", "pty", "syslog", "crypt", "readline", "spwd"}

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in UNIX_ONLY:
            raise ModuleNotFoundError(f"{name} does not exist on Windows", name=name)

for name in UNIX_ONLY:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Refuse())
sys.modules["msvcrt"] = types.ModuleType("msvcrt")
sys.platform = "win32"
MISSING = {
    os: "getuid geteuid getgid getegid killpg getpgid getpgrp setpgid getsid setsid pidfd_open waitid fork forkpty "
        "sched_getaffinity sched_setaffinity sysconf chown mkfifo openpty uname P_PID WNOHANG WNOWAIT WEXITED "
        "O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK getloadavg ctermid ttyname statvfs pread preadv nice".split(),
    signal: "SIGUSR1 SIGUSR2 SIGKILL SIGHUP SIGSTOP SIGCONT SIGALRM SIGCHLD SIGPIPE SIGQUIT".split(),
    socket: "AF_UNIX SO_PEERCRED socketpair_ SCM_RIGHTS CMSG_LEN send_fds recv_fds".split(),
    select: "poll epoll kqueue kevent POLLIN POLLRDHUP".split(),
    asyncio: "start_unix_server open_unix_connection".split(),
}
for module, names in MISSING.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)

import engines, synapse_host
names = []
for package in (engines, synapse_host):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
            names.append(found.name)
from engines.machine import usable_cores
from engines.runtime.transport import TransportFailed, connect_socket
assert usable_cores() >= 1
try:
    connect_socket("x")
except TransportFailed as exc:
    assert str(exc) == "this Python has no Unix sockets; use --pipe"
print(*names)
"""


@pytest.mark.process
def test_every_module_imports_where_unix_is_missing() -> None:
    """Every module of engines and synapse_host, with ``sys.platform`` win32."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WINDOWS)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {"synapse_host.host", "synapse_host.cli.run", "engines.runtime.pipe", "engines.llama.engine"} <= set(
        done.stdout.split()
    )


@pytest.mark.skipif(sys.platform == "win32", reason="what other systems answer")
def test_windows_parts_say_so_elsewhere():
    with pytest.raises(NotImplementedError, match="Windows"):
        windows.listen(Path("a"), "toy-1")
    with pytest.raises(NotImplementedError, match="Windows"):
        windows.contain(1)


@pytest.mark.windows
def test_a_pipe_is_the_first_and_only_instance():
    first = windows.listen(Path("a"), "toy-1")
    try:
        with pytest.raises(OSError):
            windows.listen(Path("a"), "toy-1")
    finally:
        first.close()
    windows.listen(Path("a"), "toy-1").close()
