"""Windows only: the host's end of a named pipe, and the job object that ends a worker with all its children."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from synapse_host.worker.handshake import Peer

OWNER_ONLY: Final = "D:P(A;;GA;;;OW)"
"""SDDL: a protected list with one entry, everything for the owner (OWNER RIGHTS), nothing for anybody else."""
BUFFER: Final = 64 * 1024

# CreateNamedPipeW, winbase.h
PIPE_ACCESS_DUPLEX: Final = 0x3
FILE_FLAG_FIRST_PIPE_INSTANCE: Final = 0x00080000
FILE_FLAG_OVERLAPPED: Final = 0x40000000
PIPE_TYPE_BYTE: Final = 0x0
PIPE_READMODE_BYTE: Final = 0x0
PIPE_REJECT_REMOTE_CLIENTS: Final = 0x8
SDDL_REVISION_1: Final = 1


def pipe_name(runtime_dir: Path, worker_id: str, *, pid: int | None = None) -> str:
    """Return the pipe's name: pipes share one name space, so directory, host and worker are mixed into it."""
    mixed = f"{runtime_dir}\0{os.getpid() if pid is None else pid}\0{worker_id}"
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
        """What the worker is told: ``--pipe NAME``."""
        return ("--pipe", self._name)

    async def connect(self, protocol: asyncio.BaseProtocol, admit: Callable[[Peer], bool]) -> None:
        """Give *protocol* the first client whose process *admit* takes; others are disconnected."""
        loop: Any = asyncio.get_running_loop()
        while True:
            # The Proactor's own calls: asyncio has no public way to adopt a pipe handle for both directions.
            await loop._proactor.accept_pipe(self._handle)
            if admit(Peer(None, _client_pid(self._handle))):
                handle, self._handle = self._handle, None
                loop._make_duplex_pipe_transport(handle, protocol)
                return
            _disconnect(self._handle)

    def close(self) -> None:
        """Close the pipe unless it became the connection; idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.close()


def _create(name: str) -> Any:
    """Return the server end as an asyncio PipeHandle."""
    if sys.platform != "win32":
        raise NotImplementedError("named pipes exist on Windows only")
    else:
        import ctypes
        from asyncio.windows_utils import PipeHandle
        from ctypes import wintypes

        class SecurityAttributes(ctypes.Structure):
            _fields_ = (("length", wintypes.DWORD), ("descriptor", wintypes.LPVOID), ("inherit", wintypes.BOOL))

        kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
        advapi32 = ctypes.WinDLL("advapi32", use_last_error=True)
        convert = advapi32.ConvertStringSecurityDescriptorToSecurityDescriptorW
        convert.argtypes = (wintypes.LPCWSTR, wintypes.DWORD, ctypes.POINTER(wintypes.LPVOID), wintypes.LPVOID)
        create = kernel32.CreateNamedPipeW
        create.argtypes = (wintypes.LPCWSTR, *([wintypes.DWORD] * 6), ctypes.POINTER(SecurityAttributes))
        create.restype = wintypes.HANDLE
        kernel32.LocalFree.argtypes = (wintypes.LPVOID,)

        descriptor = wintypes.LPVOID()
        if not convert(OWNER_ONLY, SDDL_REVISION_1, ctypes.byref(descriptor), None):
            raise ctypes.WinError(ctypes.get_last_error())
        try:
            attributes = SecurityAttributes(ctypes.sizeof(SecurityAttributes), descriptor, False)
            handle = create(
                name,
                PIPE_ACCESS_DUPLEX | FILE_FLAG_OVERLAPPED | FILE_FLAG_FIRST_PIPE_INSTANCE,
                PIPE_TYPE_BYTE | PIPE_READMODE_BYTE | PIPE_REJECT_REMOTE_CLIENTS,
                1,
                BUFFER,
                BUFFER,
                0,
                ctypes.byref(attributes),
            )
            error = ctypes.get_last_error()
        finally:
            kernel32.LocalFree(descriptor)
        if handle is None or handle == wintypes.HANDLE(-1).value:
            raise ctypes.WinError(error)
        return PipeHandle(handle)


def _client_pid(handle: Any) -> int | None:
    """Return the pid of the process that opened the pipe."""
    if sys.platform != "win32":
        return None
    else:
        import ctypes
        from ctypes import wintypes

        pid = wintypes.ULONG()
        kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
        kernel32.GetNamedPipeClientProcessId.argtypes = (wintypes.HANDLE, ctypes.POINTER(wintypes.ULONG))
        known = kernel32.GetNamedPipeClientProcessId(handle.handle, ctypes.byref(pid))
        return pid.value if known else None


def _disconnect(handle: Any) -> None:
    if sys.platform == "win32":
        import ctypes
        from ctypes import wintypes

        kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
        kernel32.DisconnectNamedPipe.argtypes = (wintypes.HANDLE,)
        kernel32.DisconnectNamedPipe(handle.handle)


# JOBOBJECT_EXTENDED_LIMIT_INFORMATION and its flags, winnt.h
EXTENDED_LIMIT_INFORMATION: Final = 9
KILL_ON_JOB_CLOSE: Final = 0x2000
PROCESS_TERMINATE: Final = 0x1
PROCESS_SET_QUOTA: Final = 0x100


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


def contain(pid: int) -> Job:
    """Return a new job that holds the process *pid* and everything it will start. OSError when Windows refuses."""
    if sys.platform != "win32":
        raise NotImplementedError("job objects exist on Windows only")
    else:
        import ctypes
        from ctypes import wintypes

        class BasicLimits(ctypes.Structure):
            _fields_ = (
                ("per_process_time", ctypes.c_int64),
                ("per_job_time", ctypes.c_int64),
                ("flags", wintypes.DWORD),
                ("minimum_working_set", ctypes.c_size_t),
                ("maximum_working_set", ctypes.c_size_t),
                ("active_processes", wintypes.DWORD),
                ("affinity", ctypes.c_size_t),
                ("priority_class", wintypes.DWORD),
                ("scheduling_class", wintypes.DWORD),
            )

        class ExtendedLimits(ctypes.Structure):
            _fields_ = (
                ("basic", BasicLimits),
                ("io_counters", ctypes.c_uint64 * 6),
                ("process_memory", ctypes.c_size_t),
                ("job_memory", ctypes.c_size_t),
                ("peak_process_memory", ctypes.c_size_t),
                ("peak_job_memory", ctypes.c_size_t),
            )

        kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
        kernel32.CreateJobObjectW.argtypes = (wintypes.LPVOID, wintypes.LPCWSTR)
        kernel32.CreateJobObjectW.restype = wintypes.HANDLE
        kernel32.SetInformationJobObject.argtypes = (wintypes.HANDLE, ctypes.c_int, wintypes.LPVOID, wintypes.DWORD)
        kernel32.AssignProcessToJobObject.argtypes = (wintypes.HANDLE, wintypes.HANDLE)
        kernel32.TerminateJobObject.argtypes = (wintypes.HANDLE, wintypes.UINT)
        kernel32.OpenProcess.argtypes = (wintypes.DWORD, wintypes.BOOL, wintypes.DWORD)
        kernel32.OpenProcess.restype = wintypes.HANDLE
        kernel32.CloseHandle.argtypes = (wintypes.HANDLE,)

        handle = kernel32.CreateJobObjectW(None, None)
        if not handle:
            raise ctypes.WinError(ctypes.get_last_error())
        job = Job(kernel32, handle)
        limits = ExtendedLimits()
        limits.basic.flags = KILL_ON_JOB_CLOSE
        process = kernel32.OpenProcess(PROCESS_SET_QUOTA | PROCESS_TERMINATE, False, pid)
        try:
            if not (
                kernel32.SetInformationJobObject(
                    handle, EXTENDED_LIMIT_INFORMATION, ctypes.byref(limits), ctypes.sizeof(limits)
                )
                and process
                and kernel32.AssignProcessToJobObject(handle, process)
            ):
                raise ctypes.WinError(ctypes.get_last_error())
        except BaseException:
            job.close()
            raise
        finally:
            if process:
                kernel32.CloseHandle(process)
        return job
