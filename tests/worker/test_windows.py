"""Windows: the host's pipe and job objects over stand-ins, and every module where Unix is missing.

A stand-in proves our side of each call: flags, order, what each answer leads to. What Windows does isn't measured here.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import struct
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from synapse_host.worker import windows
from synapse_host.worker.handshake import Peer

ACCESS_DENIED = 5


def test_names_mix_directory_host_and_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    # Lone surrogates are what undecodable file names look like.
    pairs = [("a", "toy-1"), ("b", "toy-1"), ("a", "toy-2"), ("a\0t", "oy-1"), ("\udcff", "toy-1")]
    names = {windows.pipe_name(Path(path), worker) for path, worker in pairs * 2}
    monkeypatch.setattr(os, "getpid", lambda: 1)
    names.add(windows.pipe_name(Path("a"), "toy-1"))
    assert len(names) == 6 and all(re.fullmatch(r"\\\\\.\\pipe\\synapse-[0-9a-f]{16}", name) for name in names)


class Kernel:
    """kernel32, advapi32 and `_winapi` in one; remembers every call."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.pipes: list[tuple[Any, ...]] = []
        self.closed: list[int] = []
        self.limits = (0, b"")
        self.refuse = ""
        """The function that fails with ACCESS_DENIED."""

    def __getattr__(self, name: str) -> Any:
        if not name[0].isupper():
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            return 0 if name == self.refuse else self.answer(name, *arguments)

        self.__dict__[name] = call
        return call

    def answer(self, name: str, *arguments: Any) -> int:
        match name, arguments:
            case "ConvertStringSecurityDescriptorToSecurityDescriptorW", (sddl, 1, out, None):
                out._obj.value = 50
                self.sddl = sddl
            case "CreateNamedPipe", (*plain, where):
                size, descriptor, inherit = struct.unpack("@IPi4x", ctypes.string_at(where, 24))
                assert (size, descriptor, inherit) == (24, 50, 0) and "LocalFree" not in self.calls
                self.pipes.append(tuple(plain))
                return 60
            case "GetNamedPipeClientProcessId", (handle, out):
                assert handle.value == 60
                out._obj.value = 4711
            case "CreateJobObjectW", (None, None):  # a named job could be opened by others
                return 70
            case "SetInformationJobObject", (job, kind, limits, size):
                assert job.value == 70 and size == len(limits)
                self.limits = kind, limits
            case "AssignProcessToJobObject", (job, process):
                assert (job.value, process.value) == (70, 1234)
            case "CloseHandle", (handle,):
                self.closed.append(handle.value)
        return 1


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    kernel = Kernel()
    utils = types.ModuleType("asyncio.windows_utils")
    handle = types.SimpleNamespace(handle=60, close=lambda: kernel.closed.append(60))
    utils.PipeHandle = lambda value: handle  # type: ignore[attr-defined]
    monkeypatch.setattr(windows, "sys", types.SimpleNamespace(platform="win32"))
    monkeypatch.setattr(ctypes, "WinDLL", lambda name, use_last_error=False: kernel, raising=False)
    monkeypatch.setattr(ctypes, "get_last_error", lambda: ACCESS_DENIED, raising=False)
    monkeypatch.setattr(ctypes, "WinError", lambda code=0: OSError(code, f"Windows error {code}"), raising=False)
    monkeypatch.setitem(sys.modules, "asyncio.windows_utils", utils)
    monkeypatch.setitem(sys.modules, "_winapi", kernel)  # type: ignore[arg-type]
    yield kernel


def test_the_pipe_is_private_single_local_and_a_stream(kernel: Kernel) -> None:
    listener = windows.listen(Path("rt"), "toy-1")
    # winbase.h: PIPE_ACCESS_DUPLEX 3, FILE_FLAG_OVERLAPPED 0x40000000, FILE_FLAG_FIRST_PIPE_INSTANCE 0x00080000;
    # PIPE_TYPE_MESSAGE 4 and PIPE_READMODE_MESSAGE 2 are off, PIPE_REJECT_REMOTE_CLIENTS 8 is on; one instance.
    assert kernel.pipes == [(listener.arguments[1], 0x40080003, 0x8, 1, 65536, 65536, 0)]
    assert listener.arguments[0] == "--pipe"
    # A protected list (P: nothing inherited) with one entry: everything for the owner.
    assert kernel.sddl == "D:P(A;;GA;;;OW)"
    assert kernel.calls[-1] == "LocalFree", "the descriptor is freed, after the pipe was made from it"
    listener.close()
    listener.close()
    assert kernel.closed == [60]


def test_a_descriptor_that_cannot_be_made_makes_no_pipe(kernel: Kernel) -> None:
    kernel.refuse = "ConvertStringSecurityDescriptorToSecurityDescriptorW"
    with pytest.raises(OSError):
        windows.listen(Path("rt"), "toy-1")
    assert kernel.pipes == []


@pytest.mark.parametrize("known", [True, False])
def test_the_pipe_becomes_the_connection_of_the_right_process(kernel: Kernel, known: bool) -> None:
    kernel.refuse = "" if known else "GetNamedPipeClientProcessId"

    async def main() -> None:
        listener = windows.listen(Path("rt"), "toy-1")
        loop: Any = asyncio.get_running_loop()
        accepted: list[int] = []
        made: list[Any] = []
        seen: list[Peer] = []

        class Proactor:
            async def accept_pipe(self, opened: Any) -> None:
                accepted.append(opened.handle)

        loop._proactor = Proactor()
        loop._make_duplex_pipe_transport = lambda opened, protocol: made.append((opened.handle, protocol))

        def admit(peer: Peer) -> bool:
            seen.append(peer)
            return len(seen) == 3

        protocol = asyncio.Protocol()
        await listener.connect(protocol, admit)
        assert accepted == [60] * 3 and seen == [Peer(None, 4711 if known else None)] * 3
        assert kernel.calls.count("DisconnectNamedPipe") == 2, "strangers are put out before the next waits"
        assert made == [(60, protocol)]
        listener.close()
        assert kernel.closed == [], "the handle belongs to the transport now"

    asyncio.run(main())


def test_a_job_ends_with_its_last_handle_and_holds_the_child(kernel: Kernel) -> None:
    made = windows.contain(1234)
    # JobObjectExtendedLimitInformation 9; LimitFlags behind two times of 8 bytes: JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE
    assert kernel.limits == (9, bytes(16) + b"\x00\x20\0\0" + bytes(124))
    made.terminate()
    made.close()
    made.close()
    made.terminate()
    assert kernel.closed == [70] and kernel.calls.count("TerminateJobObject") == 1


@pytest.mark.parametrize("call", ["CreateJobObjectW", "SetInformationJobObject", "AssignProcessToJobObject"])
def test_a_job_that_cannot_hold_the_child_is_closed(kernel: Kernel, call: str) -> None:
    kernel.refuse = call
    with pytest.raises(OSError, match=str(ACCESS_DENIED)):
        windows.contain(1234)
    assert kernel.closed == ([] if call == "CreateJobObjectW" else [70])


# --- no module needs Unix --------------------------------------------------------------------------------------------

WINDOWS = """
import asyncio, importlib, os, pkgutil, select, signal, socket, sys, types
import engines, synapse_host

def load():
    names = []
    for package in (engines, synapse_host):
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not found.name.endswith("__main__"):
                importlib.import_module(found.name)
                names.append(found.name)
    return names

load()  # with all that isn't ours
for name in [name for name in sys.modules if name.startswith(("engines.", "synapse_host."))]:
    del sys.modules[name]
for name in "fcntl grp pwd resource termios tty pty syslog readline".split():
    sys.modules[name] = None
sys.modules["msvcrt"] = types.ModuleType("msvcrt")
sys.platform = "win32"
for module, names in (
    (os, "getuid geteuid getgid getegid killpg getpgid setpgid getsid setsid pidfd_open waitid fork sysconf mkfifo "
         "sched_getaffinity uname P_PID WNOHANG WNOWAIT WEXITED O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK statvfs"),
    (signal, "SIGUSR1 SIGUSR2 SIGKILL SIGHUP SIGSTOP SIGCONT SIGALRM SIGCHLD SIGPIPE SIGQUIT"),
    (socket, "AF_UNIX SO_PEERCRED SCM_RIGHTS send_fds recv_fds"),
    (select, "poll epoll kqueue kevent POLLIN POLLRDHUP"),
    (asyncio, "start_unix_server open_unix_connection"),
):
    for name in names.split():
        vars(module).pop(name, None)
print(*load())
from engines.machine import usable_cores
from engines.runtime.transport import TransportFailed, connect_socket
assert usable_cores() >= 1
try:
    connect_socket("x")
except TransportFailed as exc:
    assert str(exc) == "this Python has no Unix sockets; use --pipe"
"""


@pytest.mark.process
def test_every_module_imports_where_unix_is_missing() -> None:
    """Every module of engines and synapse_host, with ``sys.platform`` win32."""
    done = subprocess.run(
        [sys.executable, "-c", WINDOWS],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).resolve().parents[2],
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {"synapse_host.host", "synapse_host.cli.serve", "engines.runtime.pipe", "engines.llama.engine"} <= set(
        done.stdout.split()
    )


@pytest.mark.windows
def test_a_pipe_is_the_first_and_only_instance():
    first = windows.listen(Path("a"), "toy-1")
    try:
        with pytest.raises(OSError):
            windows.listen(Path("a"), "toy-1")
    finally:
        first.close()
    windows.listen(Path("a"), "toy-1").close()
