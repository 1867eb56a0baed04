"""A stand-in for the Windows libraries that the host's named pipe and job objects call.

It proves our side of each call: order, arguments, what each answer leads to. What Windows does is not measured here.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import types
from collections.abc import Callable, Iterator
from ctypes import wintypes
from typing import Any

import pytest

ACCESS_DENIED = 5


class Call:
    """A library function: takes ``argtypes`` and ``restype`` like a real one."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)


class PipeHandle:
    """As asyncio.windows_utils.PipeHandle: owns a handle, closes it once."""

    def __init__(self, handle: int) -> None:
        self.handle: int | None = handle
        self.kernel: Kernel | None = None

    def fileno(self) -> int | None:
        return self.handle

    def close(self) -> None:
        if self.handle is not None and self.kernel is not None:
            self.kernel.release(self.handle)
        self.handle = None


class Kernel:
    """kernel32 and advapi32 in one; remembers every call."""

    def __init__(self) -> None:
        self.error = 0
        self.names: dict[int, str] = {}
        self.created: list[dict[str, Any]] = []
        self.descriptors: dict[int, str] = {}
        self.freed: list[int] = []
        self.closed: list[int] = []
        self.calls: list[str] = []
        self.client_pid: int | None = 4711
        self.refuse: set[str] = set()
        """Functions that fail with ACCESS_DENIED."""
        self._next = 100

    def __getattr__(self, name: str) -> Call:
        if not name[0].isupper():
            raise AttributeError(name)
        try:
            function = object.__getattribute__(self, f"_{name}")
        except AttributeError:
            raise AttributeError(f"the stand-in has no {name}") from None

        def call(*args: Any) -> Any:
            self.calls.append(name)
            if name in self.refuse:
                self.error = ACCESS_DENIED
                return 0
            return function(*args)

        # One object a function, so that argtypes stay where they were put.
        made = Call(call)
        self.__dict__[name] = made
        return made

    def _handle(self) -> int:
        self._next += 1
        return self._next

    def release(self, handle: int) -> None:
        assert handle not in self.closed, f"handle {handle} closed twice"
        self.closed.append(handle)
        self.names.pop(handle, None)

    # advapi32
    def _ConvertStringSecurityDescriptorToSecurityDescriptorW(self, text, revision, out, size):  # type: ignore[no-untyped-def]
        assert revision == 1 and size is None
        out._obj.value = self._handle()
        self.descriptors[out._obj.value] = text
        return 1

    # kernel32
    def _LocalFree(self, descriptor):  # type: ignore[no-untyped-def]
        self.freed.append(descriptor.value)
        return None

    def _CreateNamedPipeW(self, name, open_mode, pipe_mode, instances, out, into, timeout, attributes):  # type: ignore[no-untyped-def]
        security = attributes._obj
        assert security.length == ctypes.sizeof(security)
        assert security.descriptor not in self.freed, "the descriptor is read before it is freed"
        self.created.append(
            {
                "name": name,
                "open_mode": open_mode,
                "pipe_mode": pipe_mode,
                "instances": instances,
                "sddl": self.descriptors[security.descriptor],
                "inherit": bool(security.inherit),
            }
        )
        if name in self.names.values():
            self.error = ACCESS_DENIED
            return wintypes.HANDLE(-1).value
        handle = self._handle()
        self.names[handle] = name
        return handle

    def _GetNamedPipeClientProcessId(self, handle, pid):  # type: ignore[no-untyped-def]
        if self.client_pid is None:
            return 0
        pid._obj.value = self.client_pid
        return 1

    def _DisconnectNamedPipe(self, handle):  # type: ignore[no-untyped-def]
        return 1

    def _CreateJobObjectW(self, attributes, name):  # type: ignore[no-untyped-def]
        assert name is None, "a named job could be opened by others"
        return self._handle()

    def _SetInformationJobObject(self, job, kind, information, size):  # type: ignore[no-untyped-def]
        assert size == ctypes.sizeof(information._obj)
        self.limits = information._obj
        self.limits_kind = kind
        return 1

    def _OpenProcess(self, access, inherit, pid):  # type: ignore[no-untyped-def]
        assert not inherit
        self.opened = (access, pid)
        return self._handle()

    def _AssignProcessToJobObject(self, job, process):  # type: ignore[no-untyped-def]
        return 1

    def _TerminateJobObject(self, job, status):  # type: ignore[no-untyped-def]
        return 1

    def _CloseHandle(self, handle):  # type: ignore[no-untyped-def]
        self.release(handle)
        return 1


@contextlib.contextmanager
def stand_in() -> Iterator[Kernel]:
    """Make synapse_host.worker.windows believe that it runs on Windows, over the yielded kernel."""
    from synapse_host.worker import windows

    kernel = Kernel()

    def made(handle: int) -> PipeHandle:
        result = PipeHandle(handle)
        result.kernel = kernel
        return result

    utils = types.ModuleType("asyncio.windows_utils")
    utils.PipeHandle = made  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "sys", types.SimpleNamespace(platform="win32"))
        patch.setattr(ctypes, "WinDLL", lambda name, use_last_error=False: kernel, raising=False)
        patch.setattr(ctypes, "get_last_error", lambda: kernel.error, raising=False)
        patch.setattr(ctypes, "WinError", lambda code=0: OSError(code, f"Windows error {code}"), raising=False)
        patch.setitem(sys.modules, "asyncio.windows_utils", utils)
        yield kernel
