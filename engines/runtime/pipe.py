"""The worker's end of a Windows named pipe: a blocking byte-mode handle. Imported only for ``--pipe``.

The calls are those of `_winapi`, which CPython's own multiprocessing uses: they raise OSError with ``winerror`` and
release the GIL. A synchronous handle serialises its operations in the kernel, so the watcher doesn't look at the pipe
while the main thread may be in a read: it looks while a request is being served, and until then waits on an event. A
host that dies closes its handle, so the same look covers its death.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

from engines.protocol.messages import Buffer
from engines.runtime.transport import PeerGone, TransportFailed

RETRY_S: Final = 0.05
"""Spec (protocol-v3 and issue B, 8): the worker retries every 50 ms within the handshake deadline."""
POLL_S: Final = 0.01
"""Between two looks for the ACK's first byte, or for the end of a host whose request is being served."""
MAX_IO: Final = 1 << 18
"""Bytes of one call: a read allocates as much, a large write pins as much."""

# winnt.h, winbase.h; with no level beside it SECURITY_SQOS_PRESENT means that the server can't act as this worker.
GENERIC_READ_WRITE: Final = 0xC0000000
OPEN_EXISTING: Final = 3
SECURITY_SQOS_PRESENT: Final = 0x00100000
# winerror.h: not there yet, and busy with another client; then end of file, broken pipe, no data, not connected.
COMING: Final = frozenset({2, 231})
GONE: Final = frozenset({38, 109, 232, 233})


class PipeTransport:
    """A connected pipe handle; *api* is `_winapi`."""

    def __init__(self, handle: int, api: Any) -> None:
        self._handle = handle
        self._api = api
        self._deadline: float | None = None
        self._closed = threading.Event()

    def _ask(self, doing: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Make one call; None where its error says that the host is gone."""
        try:
            return call(self._handle, *arguments)
        except OSError as exc:
            if getattr(exc, "winerror", None) in GONE:
                return None
            raise TransportFailed(f"{doing} the host failed: {exc}") from exc

    def recv_into(self, view: memoryview) -> int:
        """Fill a part of *view*; 0 at the end of the stream."""
        # A synchronous read has no time limit of its own, so a bounded one begins when a byte waits.
        while self._deadline is not None:
            seen = self._ask("reading from", self._api.PeekNamedPipe, 0)
            if seen is None or seen[0]:
                break
            if time.monotonic() >= self._deadline:
                raise TimeoutError
            time.sleep(POLL_S)
        data = b""
        while not data:  # a peer's empty write completes a read with nothing, which is not the end
            answer = self._ask("reading from", self._api.ReadFile, min(len(view), MAX_IO))
            if answer is None:
                return 0
            data = answer[0]
        view[: len(data)] = data
        return len(data)

    def send(self, buffers: list[Buffer]) -> None:
        """Write *buffers* in order. A blocking handle takes a whole call; the loop covers the cut at MAX_IO."""
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            while view:
                answer = self._ask("writing to", self._api.WriteFile, view[:MAX_IO])
                if answer is None:
                    raise PeerGone("the host closed the pipe")
                view = view[answer[0] :]

    def set_deadline(self, deadline: float | None) -> None:
        """Bound later reads, or lift the bound."""
        self._deadline = deadline

    def wait_gone(self, busy: threading.Event) -> None:
        """Sleep until the host's end of the pipe is closed; on *busy* while the main thread's read holds the handle."""
        while not self._closed.is_set():
            busy.wait()
            try:
                self._api.PeekNamedPipe(self._handle, 0)
            except OSError:
                return
            time.sleep(POLL_S)

    def shutdown(self) -> None:
        """Let :meth:`wait_gone` end at its next look."""
        self._closed.set()

    def close(self) -> None:
        """Close the handle."""
        self._closed.set()
        handle, self._handle = self._handle, 0
        if handle:
            self._api.CloseHandle(handle)


def connect_pipe(name: str, *, deadline: float, api: Any = None) -> PipeTransport:
    """Open the host's pipe, retrying every 50 ms until *deadline* (``time.monotonic()``). Raises TransportFailed."""
    if api is None:
        import _winapi as api
    while True:
        try:
            handle = api.CreateFile(name, GENERIC_READ_WRITE, 0, 0, OPEN_EXISTING, SECURITY_SQOS_PRESENT, 0)
            return PipeTransport(handle, api)
        except OSError as exc:
            if getattr(exc, "winerror", None) not in COMING or time.monotonic() >= deadline:
                raise TransportFailed(f"no host listens on {name}: {exc}") from exc
        time.sleep(RETRY_S)
