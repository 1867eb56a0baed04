"""One connection to a worker under asyncio: bytes land in their final place, large payloads leave without copies."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, cast

from engines.protocol.connection import Connection
from engines.protocol.errors import RemoteProtocolError
from engines.protocol.messages import Buffer, HelloAck, Message
from engines.protocol.rules import Event, Role
from synapse_host.worker.counters import LaneCounters

SMALL: Final = 64 * 1024
"""Bytes up to which header and payload are joined into one write."""
SLICE: Final = 512 * 1024
"""Bytes per write of a large payload where asyncio copies what the kernel doesn't take (before Python 3.12)."""
WRITES_WHOLE: Final = sys.version_info >= (3, 12)


class Channel(asyncio.BufferedProtocol):
    """Feeds a host :class:`Connection` and hands its events to *on_event*.

    *on_fault* is called once, when the worker broke the rules, or with the host's own MemoryError; *on_lost* once, when
    the stream ended.
    """

    def __init__(
        self,
        *,
        max_frame: int,
        on_event: Callable[[Event], None],
        on_fault: Callable[[RemoteProtocolError | MemoryError], None],
        on_lost: Callable[[], None],
        counters: LaneCounters,
    ) -> None:
        self._counters = counters
        self.connection = Connection(Role.HOST, max_frame=max_frame, allocate=_allocate)
        self._on_event = on_event
        self._on_fault = on_fault
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._outgoing: deque[memoryview] = deque()
        self._paused = False
        self.closed = False
        # Bound once: these two run for every read.
        self._fill = self.connection.buffer_updated
        self._next = self.connection.next_event

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; with a high-water mark of 0 `paused` means 'something is still buffered'."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=0)
        own = transport.get_extra_info("socket")
        if own is not None and not WRITES_WHOLE:
            # A slice then leaves with one call instead of being copied by asyncio and sent in five.
            with suppress(OSError):
                own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * SLICE)

    def get_buffer(self, sizehint: int) -> Any:
        """Hand the transport the place where the next bytes belong."""
        return self.connection.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Handle every event that the new bytes complete."""
        self._counters.received += nbytes
        if self.closed:
            return
        self._fill(nbytes)
        try:
            while (event := self._next()) is not None:
                self._on_event(event)
                # After its reply a worker has nothing to say, so usually nothing else has arrived.
                if self.closed or not self.connection.mid_frame:
                    return
        except (RemoteProtocolError, MemoryError) as exc:
            # Without room for a reply the stream has lost its place as well.
            self.closed = True
            self._on_fault(exc)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell once that the stream is over."""
        self._outgoing.clear()
        if not self.closed:
            self.closed = True
            self._on_lost()

    def pause_writing(self) -> None:
        """The transport holds bytes the kernel didn't take."""
        self._paused = True

    def resume_writing(self) -> None:
        """The transport is empty again: go on with the slices."""
        self._paused = False
        self._pump()

    @property
    def connected(self) -> bool:
        """True once a worker has connected, also after it has gone."""
        return self._transport is not None

    @property
    def sending(self) -> bool:
        """True while part of a request hasn't left.

        The transport is asked, not only whether it paused us: ``writelines`` of 3.12 and 3.13 fills its buffer
        past the limit without pausing anybody.
        """
        transport = self._transport
        return bool(self._outgoing) or (transport is not None and transport.get_write_buffer_size() > 0)

    def send(self, message: HelloAck | Message, payload: Any = None) -> None:
        """Send a message and its payload (any contiguous buffer; it must not change until the reply).

        Raises LocalProtocolError before anything is written.
        """
        buffers: list[Buffer] = self.connection.send(message, payload)
        transport = self._transport
        if transport is None or self.closed:
            # The loss of the connection is reported by itself.
            return
        self._counters.sent += sum(map(len, buffers))
        head, body = buffers[0], buffers[-1]
        if len(buffers) == 1 or len(body) <= SMALL:
            transport.write(b"".join(buffers))
        elif WRITES_WHOLE:
            transport.writelines(buffers)
        else:
            transport.write(head)
            view = memoryview(body)
            self._outgoing.extend(view[start : start + SLICE] for start in range(0, len(view), SLICE))
            self._pump()

    def deafen(self) -> None:
        """Take nothing more from the worker, but leave the connection open: its end would end the worker."""
        self.closed = True
        self._outgoing.clear()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def abort(self) -> None:
        """Close at once, without a further callback."""
        self.closed = True
        self._outgoing.clear()
        if self._transport is not None:
            self._transport.abort()

    def _pump(self) -> None:
        outgoing, transport = self._outgoing, self._transport
        while outgoing and not self._paused and transport is not None:
            transport.write(outgoing.popleft())


def _allocate(size: int) -> memoryview:
    """Return fresh memory, owned by whoever gets the reply; a large one is a numpy array's, which nobody zeroes."""
    if size <= SMALL:
        return memoryview(bytearray(size))
    import numpy as np

    return np.empty(size, np.uint8).data
