"""Length-prefixed frames: u32 little-endian payload length, then the payload.

Small frames share one staging buffer, so that a header and its payload cost one read; a payload that doesn't fit there
is received straight into its own buffer, so it lands once, in its final place.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from engines.protocol.errors import LocalProtocolError, RemoteProtocolError
from engines.protocol.messages import Buffer

LENGTH: Final = struct.Struct("<I")
_PREFIX: Final = LENGTH.size
_read_length: Final = LENGTH.unpack_from
STAGING_BYTES: Final = 64 * 1024

Allocate = Callable[[int], memoryview]
"""Return a writable, C-contiguous byte view of exactly the given length for one raw payload."""


def allocate_fresh(size: int) -> memoryview:
    """Return a new buffer that belongs to whoever receives it."""
    return memoryview(bytearray(size))


class ReusedBuffer:
    """An allocator that hands out the same memory again: valid until the next payload (a worker's receive buffer)."""

    def __init__(self) -> None:
        self._buffer = bytearray(0)

    def __call__(self, size: int) -> memoryview:
        """Return a view of *size* bytes; grows by doubling, never shrinks."""
        if size > len(self._buffer):
            self._buffer = bytearray(max(size, 2 * len(self._buffer)))
        return memoryview(self._buffer)[:size]


def raw_view(payload: Buffer) -> Buffer:
    """Return *payload* as flat bytes, uncopied; LocalProtocolError for a list or a strided array."""
    if type(payload) is bytes or type(payload) is bytearray:
        return payload
    try:
        view = memoryview(payload)
        # A view with a zero in its shape can't be cast, and has nothing to send anyway.
        return view.cast("B") if view.nbytes else b""
    except (TypeError, ValueError, BufferError) as exc:
        raise LocalProtocolError(f"a raw frame needs a C-contiguous buffer: {exc}") from exc


class FrameReader:
    """Cuts the peer's byte stream into frame payloads. It looks at lengths only.

    Fill :meth:`get_buffer`, report the count to :meth:`buffer_updated`, then call :meth:`next_control` or
    :meth:`next_raw`, whichever the rules expect, until it returns None.
    """

    def __init__(self, *, max_frame: int, allocate: Allocate = allocate_fresh) -> None:
        self.max_frame = max_frame
        self._allocate = allocate
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._start = 0
        self._end = 0
        self._large: memoryview | None = None
        self._filled = 0

    @property
    def at_boundary(self) -> bool:
        """True when no part of an unfinished frame has arrived."""
        return self._large is None and self._start == self._end

    def get_buffer(self) -> memoryview:
        """Return where the next bytes belong; never empty while frames are pulled as they complete."""
        large = self._large
        if large is not None and self._filled < len(large):
            return large[self._filled :]
        start, end = self._start, self._end
        if start == end:
            self._start = self._end = 0
            return self._staging
        if start > STAGING_BYTES // 2 or end == STAGING_BYTES:
            # A frame that was cut near the end moves to the front, so that the rest arrives in one read. Where the
            # buffer is full it has to: what fits a whole buffer need not fit behind the frames before it.
            rest = end - start
            self._staging[:rest] = self._staging[start:end]
            self._start, self._end = 0, rest
        return self._staging[self._end :]

    def buffer_updated(self, count: int) -> None:
        """Record that *count* bytes were written into the last :meth:`get_buffer`."""
        if self._large is not None and self._filled < len(self._large):
            self._filled += count
        else:
            self._end += count

    def next_control(self) -> memoryview | None:
        """Return the payload of the next frame, or None when more bytes are needed.

        The view is valid until the next :meth:`get_buffer`. Raises RemoteProtocolError on a length above max_frame.
        """
        if self._large is not None:
            return self._completed(self._large)
        size = self._length(None)
        if size is None:
            return None
        body = self._start + _PREFIX
        stop = body + size
        if self._end >= stop:
            self._start = stop
            return self._staging[body:stop]
        if size > STAGING_BYTES - _PREFIX:
            self._gather(allocate_fresh(size), body)
        return None

    def next_raw(self, exact: int | None = None) -> memoryview | None:
        """Return the next frame's payload in a buffer of its own (from the allocator), or None as above.

        *exact* is the only length that is legal here; it is compared before anything is allocated.
        """
        if self._large is not None:
            return self._completed(self._large)
        size = self._length(exact)
        if size is None:
            return None
        own = self._allocate(size)
        body = self._start + _PREFIX
        stop = body + size
        if self._end < stop:
            self._gather(own, body)
            return None
        self._start = stop
        own[:] = self._staging[body:stop]
        return own

    def _length(self, exact: int | None) -> int | None:
        """Return the next frame's length, None while it isn't there. Spec: checked before anything is allocated."""
        if self._end < self._start + _PREFIX:
            return None
        size: int = _read_length(self._staging, self._start)[0]
        if size > self.max_frame:
            raise RemoteProtocolError(f"frame length {size} exceeds max {self.max_frame}", reason="oversize")
        if exact is not None and size != exact:
            raise RemoteProtocolError(f"raw frame of {size} bytes where the header promises {exact}", reason="length")
        return size

    def _gather(self, own: memoryview, body: int) -> None:
        """Move what has arrived of a frame's body into *own*; the rest is received straight into it."""
        arrived = self._end - body
        own[:arrived] = self._staging[body : self._end]
        self._start = self._end = 0
        self._large, self._filled = own, arrived

    def _completed(self, large: memoryview) -> memoryview | None:
        if self._filled < len(large):
            return None
        self._large = None
        return large


class SpentReader(FrameReader):
    """Takes the place of a reader whose stream can't be trusted any more: swallows bytes and finds no frame."""

    def __init__(self) -> None:
        super().__init__(max_frame=0)

    def buffer_updated(self, count: int) -> None:
        """Forget what arrived."""
