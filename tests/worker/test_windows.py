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
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock, call

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


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """kernel32, advapi32 and `_winapi` in one; every call succeeds and is remembered."""
    kernel = MagicMock()

    def described(sddl: str, revision: int, out: Any, size: None) -> int:
        out._obj.value = 50
        return 1

    def made(*arguments: Any) -> int:
        kernel.attributes = struct.unpack("@IPi4x", ctypes.string_at(arguments[-1], 24))
        return 60

    def asked(handle: Any, out: Any) -> int:
        out._obj.value = 4711
        return 1

    kernel.ConvertStringSecurityDescriptorToSecurityDescriptorW.side_effect = described
    kernel.CreateNamedPipe.side_effect = made
    kernel.GetNamedPipeClientProcessId.side_effect = asked
    kernel.CreateJobObjectW.return_value = 70
    utils = SimpleNamespace(PipeHandle=lambda value: SimpleNamespace(handle=value, close=kernel.closed))
    monkeypatch.setattr(ctypes, "WinDLL", lambda name, use_last_error=False: kernel, raising=False)
    monkeypatch.setattr(ctypes, "get_last_error", lambda: ACCESS_DENIED, raising=False)
    monkeypatch.setattr(ctypes, "WinError", lambda code=0: OSError(code, f"Windows error {code}"), raising=False)
    monkeypatch.setitem(sys.modules, "asyncio.windows_utils", utils)
    monkeypatch.setitem(sys.modules, "_winapi", kernel)
    return kernel


def refuse(kernel: Any, call: str) -> None:
    getattr(kernel, call).side_effect = lambda *arguments: 0


def test_the_pipe_is_private_single_local_and_a_stream(kernel: Any) -> None:
    listener = windows.listen(Path("rt"), "toy-1")
    # winbase.h: PIPE_ACCESS_DUPLEX 3, FILE_FLAG_OVERLAPPED 0x40000000, FILE_FLAG_FIRST_PIPE_INSTANCE 0x00080000;
    # PIPE_TYPE_MESSAGE 4 and PIPE_READMODE_MESSAGE 2 are off, PIPE_REJECT_REMOTE_CLIENTS 8 is on; one instance.
    pipe = (listener.arguments[1], 0x40080003, 0x8, 1, 65536, 65536, 0)
    assert kernel.CreateNamedPipe.call_args.args[:-1] == pipe and listener.arguments[0] == "--pipe"
    assert kernel.attributes == (24, 50, 0), "a size, the descriptor, nothing inherited"
    # A protected list (P: nothing inherited) with one entry: everything for the owner.
    made, _, freed = kernel.method_calls
    assert made.args[0] == "D:P(A;;GA;;;OW)"
    assert freed == call.LocalFree(made.args[2]._obj), "the descriptor is freed, after the pipe was made from it"
    listener.close()
    listener.close()
    kernel.closed.assert_called_once_with()


def test_a_descriptor_that_cannot_be_made_makes_no_pipe(kernel: Any) -> None:
    refuse(kernel, "ConvertStringSecurityDescriptorToSecurityDescriptorW")
    with pytest.raises(OSError):
        windows.listen(Path("rt"), "toy-1")
    kernel.CreateNamedPipe.assert_not_called()


@pytest.mark.parametrize("known", [True, False])
async def test_the_pipe_becomes_the_connection_of_the_right_process(kernel: Any, known: bool) -> None:
    if not known:
        refuse(kernel, "GetNamedPipeClientProcessId")
    listener = windows.listen(Path("rt"), "toy-1")
    loop: Any = asyncio.get_running_loop()
    loop._proactor = SimpleNamespace(accept_pipe=AsyncMock())
    loop._make_duplex_pipe_transport = MagicMock()
    admit, protocol = MagicMock(side_effect=[False, False, True]), asyncio.Protocol()
    await listener.connect(protocol, admit)
    assert admit.mock_calls == [call(Peer(None, 4711 if known else None))] * 3
    assert loop._proactor.accept_pipe.await_count == 3
    assert kernel.DisconnectNamedPipe.call_count == 2, "strangers are put out before the next waits"
    (adopted, given), _ = loop._make_duplex_pipe_transport.call_args
    assert (adopted.handle, given) == (60, protocol)
    listener.close()
    kernel.closed.assert_not_called()


def test_a_job_ends_with_its_last_handle_and_holds_the_child(kernel: Any) -> None:
    made = windows.contain(1234)
    kernel.CreateJobObjectW.assert_called_once_with(None, None)  # a named job could be opened by others
    # JobObjectExtendedLimitInformation 9; LimitFlags behind two times of 8 bytes: JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE
    job, *limits = kernel.SetInformationJobObject.call_args.args
    assert job.value == 70 and limits == [9, bytes(16) + b"\x00\x20\0\0" + bytes(124), 144]
    assert [handle.value for handle in kernel.AssignProcessToJobObject.call_args.args] == [70, 1234]
    made.terminate()
    made.close()
    made.close()
    made.terminate()
    kernel.TerminateJobObject.assert_called_once_with(job, 1)
    kernel.CloseHandle.assert_called_once_with(job)


@pytest.mark.parametrize("name", ["CreateJobObjectW", "SetInformationJobObject", "AssignProcessToJobObject"])
def test_a_job_that_cannot_hold_the_child_is_closed(kernel: Any, name: str) -> None:
    refuse(kernel, name)
    with pytest.raises(OSError, match=str(ACCESS_DENIED)):
        windows.contain(1234)
    assert kernel.CloseHandle.call_count == (name != "CreateJobObjectW")


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
