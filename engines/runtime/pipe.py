"""The worker's end of a Windows named pipe: a blocking byte-mode handle through ctypes. Imported only for ``--pipe``.

Calls follow Microsoft's documentation of fileapi.h, namedpipeapi.h and synchapi.h. A synchronous handle serialises its
operations in the kernel, so the watcher neither reads nor peeks while the main thread may be in a read: it acts only
while a request is being served, and until then waits on an event.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from engines.protocol.messages import Buffer
from engines.runtime.transport import PeerGone, TransportFailed

RETRY_S: Final = 0.05
"""Spec (protocol-v3 and issue B, 8): the worker retries every 50 ms within the handshake deadline."""
ACK_POLL_S: Final = 0.01
WATCH_MS: Final = 20
MAX_IO: Final = 1 << 24
"""Bytes of one ReadFile or WriteFile call: their length is a DWORD, and a large call pins a large buffer."""

GENERIC_READ: Final = 0x80000000
GENERIC_WRITE: Final = 0x40000000
OPEN_EXISTING: Final = 3
SECURITY_SQOS_PRESENT: Final = 0x00100000
"""With no level beside it: SECURITY_ANONYMOUS, so the server can't act with this worker's identity."""
INVALID_HANDLE: Final = ctypes.c_void_p(-1).value
SYNCHRONIZE: Final = 0x00100000
WAIT_OBJECT_0: Final = 0

ERROR_FILE_NOT_FOUND: Final = 2
ERROR_HANDLE_EOF: Final = 38
ERROR_BROKEN_PIPE: Final = 109
ERROR_PIPE_BUSY: Final = 231
ERROR_NO_DATA: Final = 232
ERROR_PIPE_NOT_CONNECTED: Final = 233
GONE: Final = frozenset({ERROR_HANDLE_EOF, ERROR_BROKEN_PIPE, ERROR_NO_DATA, ERROR_PIPE_NOT_CONNECTED})


def kernel32() -> Any:
    """Return kernel32 with the pointer-sized results declared (the default result type would cut handles)."""
    library = ctypes.WinDLL("kernel32", use_last_error=True)  # type: ignore[attr-defined,unused-ignore]
    library.CreateFileW.restype = ctypes.c_void_p
    library.OpenProcess.restype = ctypes.c_void_p
    return library


def last_error() -> int:
    """Return the calling thread's last Windows error."""
    code: int = ctypes.get_last_error()  # type: ignore[attr-defined,unused-ignore]
    return code


class PipeTransport:
    """A connected pipe handle. ``api`` is kernel32, ``error`` reads its last error."""

    def __init__(self, handle: int, api: Any, error: Callable[[], int]) -> None:
        self._handle = ctypes.c_void_p(handle)
        self._api = api
        self._error = error
        self._deadline: float | None = None
        self._closed = threading.Event()
        self._released = False
        self._server = self._open_server()

    def _open_server(self) -> ctypes.c_void_p | None:
        pid = ctypes.c_ulong()
        if not self._api.GetNamedPipeServerProcessId(self._handle, ctypes.byref(pid)):
            return None
        server = self._api.OpenProcess(SYNCHRONIZE, False, pid)
        return ctypes.c_void_p(server) if server else None

    def recv_into(self, view: memoryview) -> int:
        """Fill a part of *view*; 0 at the end of the stream."""
        if self._deadline is not None:
            self._await_bytes(self._deadline)
        size = min(len(view), MAX_IO)
        target = (ctypes.c_char * size).from_buffer(view[:size])
        count = ctypes.c_ulong()
        while not count.value:  # a peer's empty write completes a read with nothing, which is not the end
            if not self._api.ReadFile(self._handle, target, size, ctypes.byref(count), None):
                return self._gone_or_fail("reading from")
        return count.value

    def _await_bytes(self, deadline: float) -> None:
        """Sleep until a byte waits or the peer is gone: a synchronous ReadFile has no time limit of its own."""
        available = ctypes.c_ulong()
        while self._api.PeekNamedPipe(self._handle, None, 0, None, ctypes.byref(available), None):
            if available.value:
                return
            if time.monotonic() >= deadline:
                raise TimeoutError
            time.sleep(ACK_POLL_S)

    def _gone_or_fail(self, doing: str) -> int:
        code = self._error()
        if code in GONE:
            return 0
        raise TransportFailed(f"{doing} the host failed: Windows error {code}")

    def send(self, buffers: list[Buffer]) -> None:
        """Write *buffers* in order. A blocking handle takes a whole call; the loop covers the cut at MAX_IO."""
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            while view:
                size = min(len(view), MAX_IO)
                array = ctypes.c_char * size
                data = array.from_buffer_copy(view) if view.readonly else array.from_buffer(view)
                count = ctypes.c_ulong()
                if not self._api.WriteFile(self._handle, data, size, ctypes.byref(count), None):
                    self._gone_or_fail("writing to")
                    raise PeerGone("the host closed the pipe")
                view = view[count.value :]

    def set_deadline(self, deadline: float | None) -> None:
        """Bound later reads, or lift the bound."""
        self._deadline = deadline

    def wait_gone(self, busy: threading.Event) -> None:
        """Sleep until the host's process is gone or its end of the pipe is closed.

        While no request is served it sleeps on *busy*, since the main thread's read holds the handle.
        """
        while not self._closed.is_set():
            busy.wait()
            if self._server is None:
                time.sleep(WATCH_MS / 1000)
            elif self._api.WaitForSingleObject(self._server, WATCH_MS) == WAIT_OBJECT_0:
                return
            if busy.is_set() and not self._api.PeekNamedPipe(self._handle, None, 0, None, None, None):
                return

    def shutdown(self) -> None:
        """Let :meth:`wait_gone` end at its next look."""
        self._closed.set()

    def close(self) -> None:
        """Close the handles."""
        self._closed.set()
        if not self._released:
            self._released = True
            self._api.CloseHandle(self._handle)
            if self._server is not None:
                self._api.CloseHandle(self._server)


def connect_pipe(
    name: str, *, deadline: float, api: Any = None, error: Callable[[], int] = last_error
) -> PipeTransport:
    """Open the host's pipe, retrying every 50 ms until *deadline* (``time.monotonic()``). Raises TransportFailed."""
    api = kernel32() if api is None else api
    while True:
        handle = api.CreateFileW(
            name, GENERIC_READ | GENERIC_WRITE, 0, None, OPEN_EXISTING, SECURITY_SQOS_PRESENT, None
        )
        if handle not in (INVALID_HANDLE, None, 0, -1):
            return PipeTransport(handle, api, error)
        code = error()
        if code not in (ERROR_FILE_NOT_FOUND, ERROR_PIPE_BUSY) or time.monotonic() >= deadline:
            raise TransportFailed(f"no host listens on {name}: Windows error {code}")
        time.sleep(RETRY_S)
