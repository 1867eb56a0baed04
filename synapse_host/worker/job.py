"""Windows job objects: no descendant of a worker survives it. Not measured: no Windows machine has run this yet."""

from __future__ import annotations

import sys
from typing import Any, Final

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
