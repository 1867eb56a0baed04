"""Length-prefixed frames: limits before allocation, tensors straight into their buffer, what a payload may be."""

from __future__ import annotations

import array
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engines.protocol.errors import LocalProtocolError, RemoteProtocolError
from engines.protocol.framing import (
    STAGING_BYTES,
    FrameReader,
    ReusedBuffer,
    SpentReader,
    raw_view,
)

MAX = 1 << 20


def frame(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


def fill(reader: FrameReader, data: bytes) -> int:
    """Write as much of *data* as one read may deliver; return how much."""
    buffer = reader.get_buffer()
    count = min(len(buffer), len(data))
    assert count > 0
    buffer[:count] = data[:count]
    reader.buffer_updated(count)
    return count


@pytest.mark.parametrize("size", [0, 1, 4096, STAGING_BYTES - 5, STAGING_BYTES - 4, STAGING_BYTES - 3, 200_000])
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("step", [1, 7, 4096, 1 << 20])
def test_every_size_arrives_whatever_the_reads(size: int, raw: bool, step: int) -> None:
    if step == 1 and size > 5000:
        step = 997
    payload = bytes(index * 7 % 251 for index in range(size))
    data = frame(payload) + frame(b"next")
    reader = FrameReader(max_frame=MAX)
    found = []
    while data or len(found) < 2:
        used = fill(reader, data[:step])
        data = data[used:]
        while (item := reader.next_raw() if raw and not found else reader.next_control()) is not None:
            found.append(bytes(item))
    assert found == [payload, b"next"]
    assert reader.at_boundary


@pytest.mark.parametrize(
    ("pull", "complaint"),
    [
        (FrameReader.next_control, "frame length 1001 exceeds max 1000"),
        (FrameReader.next_raw, "frame length 1001 exceeds max 1000"),
        (lambda reader: reader.next_raw(20), "raw frame of 24 bytes where the header promises 20"),
    ],
)
@pytest.mark.report("python/cpython#10305")
def test_a_length_that_is_refused_allocates_nothing(pull: Callable[[FrameReader], Any], complaint: str) -> None:
    reader = FrameReader(max_frame=1000, allocate=lambda size: pytest.fail(f"{size} bytes allocated"))
    fill(reader, struct.pack("<I", 24 if "24" in complaint else 1001))
    with pytest.raises(RemoteProtocolError, match=complaint):
        pull(reader)


def test_a_large_tensor_lands_in_its_own_buffer() -> None:
    place = memoryview(bytearray(500_000))
    reader = FrameReader(max_frame=MAX, allocate=lambda size: place[:size])
    payload = bytes(500_000)
    fill(reader, struct.pack("<I", len(payload)) + payload[:100])
    assert reader.next_raw() is None
    assert not reader.at_boundary
    target = reader.get_buffer()
    assert len(target) == len(payload) - 100
    target[:] = b"\x01" * len(target)
    assert place[100:] == b"\x01" * len(target)  # what the transport wrote is where the tensor belongs
    reader.buffer_updated(len(target))
    done = reader.next_raw()
    assert done is not None and done.obj is place.obj and len(done) == len(payload)


def test_a_small_tensor_does_not_share_the_staging_buffer() -> None:
    reader = FrameReader(max_frame=MAX)
    fill(reader, frame(b"\x01" * 8) + frame(b"\x02" * 8))
    first = reader.next_raw()
    second = reader.next_raw()
    fill(reader, frame(b"\x03" * 8))
    assert first == b"\x01" * 8 and second == b"\x02" * 8


@pytest.mark.parametrize("before", [4, 5, 96, 1000, 16_384, 32_768, 32_769, 60_000])
def test_the_buffer_to_fill_is_never_empty_and_a_cut_frame_gets_room(before: int) -> None:
    """A frame of *before* bytes in all, then the largest that the staging buffer holds, in one burst."""
    largest = bytes(index * 7 % 251 for index in range(STAGING_BYTES - 4))
    reader = FrameReader(max_frame=MAX)
    stream = frame(bytes(before - 4)) + frame(largest) + frame(b"next")
    found = []
    while stream:
        stream = stream[fill(reader, stream) :]
        while (item := reader.next_control()) is not None:
            found.append(bytes(item))
    assert found == [bytes(before - 4), largest, b"next"]
    assert reader.at_boundary


def test_reused_buffer_keeps_its_memory() -> None:
    allocate = ReusedBuffer()
    first = allocate(100)
    second = allocate(50)
    assert first.obj is second.obj and len(second) == 50
    third = allocate(101)
    assert third.obj is not first.obj and len(third.obj) == 200  # type: ignore[arg-type]
    assert len(allocate(0)) == 0


def test_a_spent_reader_swallows() -> None:
    reader = SpentReader()
    for _ in range(3):
        buffer = reader.get_buffer()
        assert len(buffer) == STAGING_BYTES
        reader.buffer_updated(len(buffer))
        assert reader.next_control() is None and reader.next_raw() is None and reader.at_boundary


# --- payloads --------------------------------------------------------------------------------------------------------

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)
READ_ONLY = ROWS.copy()
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    "payload",
    [
        bytes(48),
        bytearray(48),
        memoryview(bytearray(60))[4:52],
        ROWS,
        READ_ONLY,
        ROWS[1:],
        ROWS.view(np.uint8),
        memoryview(ROWS),
        array.array("f", [1.0, 2.0]),
        np.asfortranarray(ROWS[:1]),
        np.float32(1.5).reshape(()),
    ],
    ids=lambda payload: type(payload).__name__,
)
def test_contiguous_float_buffers_are_sent_uncopied(payload: memoryview) -> None:
    view = raw_view(payload)
    assert bytes(view) == memoryview(payload).tobytes()
    assert len(view) == memoryview(payload).nbytes
    if isinstance(payload, np.ndarray):
        assert np.shares_memory(np.frombuffer(view, np.uint8), payload)


@pytest.mark.parametrize("payload", [np.zeros((0, 384), np.float32), np.zeros((5, 0), np.float32), b"", bytearray()])
def test_empty_buffers_have_nothing_to_send(payload: memoryview) -> None:
    assert len(raw_view(payload)) == 0


RELEASED = memoryview(bytearray(4))
RELEASED.release()


@pytest.mark.parametrize(
    "payload",
    [ROWS[:, 1:], ROWS[::-1], ROWS.T, [1.0, 2.0], "text", RELEASED],
    ids=lambda value: type(value).__name__,
)
def test_what_would_be_sent_wrong_is_refused(payload: memoryview) -> None:
    with pytest.raises(LocalProtocolError, match="needs a C-contiguous buffer"):
        raw_view(payload)
