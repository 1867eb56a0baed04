"""Windows only: the host's end of a named pipe, and the job object that ends a worker with all its children.

Handles come from `_winapi`, as in CPython's own asyncio; ctypes makes the calls that `_winapi` lacks.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from synapse_host.worker.handshake import Peer

winapi: Any = ctypes  # of which WinDLL, WinError and get_last_error exist on Windows only

OWNER_ONLY: Final = "D:P(A;;GA;;;OW)"
"""SDDL: a protected list with one entry, everything for the owner (OWNER RIGHTS), nothing for anybody else."""
BUFFER: Final = 64 * 1024

# winbase.h: PIPE_ACCESS_DUPLEX, FILE_FLAG_OVERLAPPED and FILE_FLAG_FIRST_PIPE_INSTANCE; PIPE_REJECT_REMOTE_CLIENTS, and
# byte mode for type and reads, which is 0.
OPEN_MODE: Final = 0x3 | 0x40000000 | 0x00080000
PIPE_MODE: Final = 0x8
SDDL_REVISION_1: Final = 1
# winnt.h
EXTENDED_LIMIT_INFORMATION: Final = 9
KILL_ON_JOB_CLOSE: Final = 0x2000


def pipe_name(runtime_dir: Path, worker_id: str) -> str:
    """Return the pipe's name: pipes share one name space, so directory, host and worker are mixed into it."""
    mixed = f"{runtime_dir}\0{os.getpid()}\0{worker_id}"
    return rf"\\.\pipe\synapse-{hashlib.sha256(mixed.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


def listen(runtime_dir: Path, worker_id: str) -> PipeListener:
    """Create the pipe of one worker. OSError when the name exists already."""
    name = pipe_name(runtime_dir, worker_id)
    return PipeListener(name, _create(name))


class PipeListener:
    """One server instance, which becomes the connection itself."""

    def __init__(self, name: str, handle: Any) -> None:
        self._name = name
        self._handle = handle

    @property
    def arguments(self) -> tuple[str, str]:
        """The worker's arguments: ``--pipe NAME``."""
        return ("--pipe", self._name)

    async def connect(self, protocol: asyncio.BaseProtocol, admit: Callable[[Peer], bool]) -> None:
        """Give *protocol* the first client whose process *admit* takes; others are disconnected."""
        loop: Any = asyncio.get_running_loop()
        kernel32 = _library("kernel32")
        while True:
            # The Proactor's own calls: asyncio has no public way to adopt a pipe handle for both directions.
            await loop._proactor.accept_pipe(self._handle)
            handle = ctypes.c_void_p(self._handle.handle)
            pid = ctypes.c_ulong()
            known = kernel32.GetNamedPipeClientProcessId(handle, ctypes.byref(pid))
            if admit(Peer(None, pid.value if known else None)):
                adopted, self._handle = self._handle, None
                loop._make_duplex_pipe_transport(adopted, protocol)
                return
            kernel32.DisconnectNamedPipe(handle)

    def close(self) -> None:
        """Close the pipe unless it became the connection; idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.close()


def _library(name: str) -> Any:
    return winapi.WinDLL(name, use_last_error=True)


def _create(name: str) -> Any:
    """Return the server end as an asyncio PipeHandle; it is the owner's alone, local, and the first of its name."""
    import _winapi
    from asyncio.windows_utils import PipeHandle  # type: ignore[attr-defined,unused-ignore]

    descriptor = ctypes.c_void_p()
    make = _library("advapi32").ConvertStringSecurityDescriptorToSecurityDescriptorW
    if not make(OWNER_ONLY, SDDL_REVISION_1, ctypes.byref(descriptor), None):
        raise winapi.WinError(winapi.get_last_error())
    try:
        # SECURITY_ATTRIBUTES: its own size, the descriptor, and that no child inherits the handle.
        attributes = ctypes.create_string_buffer(struct.pack("@IPi4x", 24, descriptor.value, 0), 24)
        api: Any = _winapi
        where = ctypes.addressof(attributes)
        return PipeHandle(api.CreateNamedPipe(name, OPEN_MODE, PIPE_MODE, 1, BUFFER, BUFFER, 0, where))
    finally:
        _library("kernel32").LocalFree(descriptor)


class Job:
    """One job; the processes in it end with its last handle, also when the host is killed."""

    def __init__(self, kernel32: Any, handle: Any) -> None:
        self._kernel32 = kernel32
        self._handle = handle

    def terminate(self) -> None:
        """Kill every process in the job."""
        if self._handle:
            self._kernel32.TerminateJobObject(self._handle, 1)

    def close(self) -> None:
        """Give the handle back, which kills what is left; idempotent."""
        handle, self._handle = self._handle, None
        if handle:
            self._kernel32.CloseHandle(handle)


def contain(process: int) -> Job:
    """Return a new job that holds a process (its handle, as Popen has it) and everything it will start, or OSError."""
    kernel32 = _library("kernel32")
    kernel32.CreateJobObjectW.restype = ctypes.c_void_p
    job = Job(kernel32, ctypes.c_void_p(kernel32.CreateJobObjectW(None, None)))
    # JOBOBJECT_EXTENDED_LIMIT_INFORMATION of 64-bit Windows: 144 bytes, of which LimitFlags at 16 is all we set.
    limits = struct.pack("16xI124x", KILL_ON_JOB_CLOSE)
    if not (
        job._handle
        and kernel32.SetInformationJobObject(job._handle, EXTENDED_LIMIT_INFORMATION, limits, len(limits))
        and kernel32.AssignProcessToJobObject(job._handle, ctypes.c_void_p(process))
    ):
        error = winapi.get_last_error()
        job.close()
        raise winapi.WinError(error)
    return job
