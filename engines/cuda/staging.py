"""A bucket's inputs: one block of host memory, filled in place from the token rows, uploaded in one copy.

Pure numpy, no loop over rows: the only copy between a request's frame and the device. A slot's memory may be
page-locked or not; it doesn't matter here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from engines.cuda.buckets import Bucket, Order, Plan

if TYPE_CHECKING:
    from engines.runtime.batch import FloatArray, IntArray, TokenBatch

    Bytes = npt.NDArray[Any]

ALIGNMENT: Final = 256
"""What cudaMalloc guarantees for a block, kept for each input inside it."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One bucket's shapes. ``rows`` and ``width`` are what runs (a captured shape may be larger than the bucket)."""

    rows: int
    width: int
    places: dict[str, tuple[int, tuple[int, ...]]]
    """Input -> (byte offset in the slot, shape)."""
    size: int


def layout(names: Sequence[str], *, rows: int, width: int, tokens: int | None = None) -> Shape:
    """Lay the inputs *names* out one after the other. *tokens*: real tokens, for a packed graph."""
    shapes: dict[str, tuple[int, ...]] = {
        "input_ids": (tokens,) if tokens is not None else (rows, width),
        "lens": (rows,),
        "type_starts": (tokens,) if tokens is not None else (rows,),
        "positions": (tokens,) if tokens is not None else (width,),
        "columns": (width,),
        "token_offset": (rows, width),
        "cu_seqlens": (rows + 1,),
        "max_len": (1,),
    }
    places: dict[str, tuple[int, tuple[int, ...]]] = {}
    offset = 0
    for name in names:
        places[name] = (offset, shapes[name])
        offset += -(-4 * prod(shapes[name]) // ALIGNMENT) * ALIGNMENT
    return Shape(rows, width, places, offset)


def slot_bytes(names: Sequence[str], *, cells: int) -> int:
    """Return bytes that hold any bucket of at most *cells*: no input has more than one number beyond them."""
    return len(names) * (4 * (cells + 1) + ALIGNMENT)


@dataclass(slots=True)
class Slot:
    """Host memory of one submission in flight. ``host``: uint8, at ``address``. ``out``: float32 (rows x dims,)."""

    host: Bytes
    address: int
    out: FloatArray
    out_address: int
    native: dict[str, Any] = field(default_factory=dict)
    """What the device keeps with it: device addresses, event, the binding that runs."""

    def view(self, shape: Shape, name: str) -> IntArray:
        """Return an input's place as int32 of its shape."""
        offset, dims = shape.places[name]
        view: IntArray = self.host[offset : offset + 4 * prod(dims)].view(np.int32).reshape(dims)
        return view


class Filler:
    """Fills slots with buckets of one request."""

    def __init__(self, batch: TokenBatch, plan: Plan, *, pad_id: int, separator: int | None) -> None:
        self.batch, self.plan, self.pad_id = batch, plan, pad_id
        self.starts = type_starts(batch, separator) if separator is not None else None

    def shape(self, bucket: Bucket, names: Sequence[str], *, rows: int, width: int, packed: bool) -> Shape:
        """Return the layout of *bucket* run as (rows, width)."""
        tokens = int(self.batch.lengths[self.plan.order[bucket.start : bucket.stop]].sum()) if packed else None
        return layout(names, rows=rows, width=width, tokens=tokens)

    def fill(self, slot: Slot, bucket: Bucket, shape: Shape) -> None:
        """Write all inputs."""
        rows = self.plan.order[bucket.start : bucket.stop]
        lens, columns = self.batch.lengths[rows], np.arange(shape.width, dtype=np.int32)
        values: dict[str, Any] = {"columns": columns, "max_len": shape.width}
        if "token_offset" in shape.places:
            values |= packed_offsets(lens, shape.width)
            fill_packed(self.batch, rows, slot.view(shape, "input_ids"))
            if self.starts is not None:
                values["type_starts"] = np.repeat(self.starts[rows], lens)
        else:
            # A captured shape has a fixed number of rows; the spare ones become one pad token each.
            spare = (0, shape.rows - len(rows))
            values |= {"positions": columns, "lens": np.pad(lens, spare, constant_values=1)}
            fill_rows(self.batch, rows, slot.view(shape, "input_ids"), pad_id=self.pad_id)
            if self.starts is not None:
                values["type_starts"] = np.pad(self.starts[rows], spare, constant_values=1)
        for name in values.keys() & shape.places.keys():
            slot.view(shape, name)[...] = values[name]


def fill_rows(batch: TokenBatch, rows: Order, ids: IntArray, *, pad_id: int) -> None:
    """Write *rows* of *batch* into *ids* (len(rows) or more, width), right-padded; rows beyond become pad tokens."""
    starts, lens = batch.cu_seqlens[rows], batch.lengths[rows]
    columns = np.arange(ids.shape[1], dtype=np.int32)
    # One gather of whole rows: beyond a row's end it reads its neighbour (clipped at the frame's), overwritten next.
    np.take(batch.input_ids, starts[:, None] + columns, mode="clip", out=ids[: len(rows)])
    np.copyto(ids[: len(rows)], np.int32(pad_id), where=columns >= lens[:, None])
    ids[len(rows) :] = pad_id


def fill_packed(batch: TokenBatch, rows: Order, ids: IntArray) -> None:
    """Write *rows* end to end into *ids*, int32 (their tokens,)."""
    starts = batch.cu_seqlens[rows]
    lens = batch.cu_seqlens[rows + 1] - starts
    ends = np.cumsum(lens)
    # Each token's place in the frame: its own index, shifted by how far its row was moved.
    shift = np.repeat(starts - (ends - lens), lens)
    np.take(batch.input_ids, np.arange(len(ids)) + shift, mode="clip", out=ids)


def packed_offsets(lens: IntArray, width: int) -> dict[str, IntArray]:
    """Return token_offset (rows, width), cu_seqlens (rows + 1,) and positions (tokens,), int32, for packed attention.

    ``token_offset`` lists the padded places of all real tokens, then those of the padding (8.3.4).
    """
    real = (np.arange(width, dtype=np.int32) < lens[:, None]).reshape(-1)
    offset = np.concatenate([np.flatnonzero(real), np.flatnonzero(~real)]).astype(np.int32).reshape(len(lens), width)
    cu_seqlens = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(lens, out=cu_seqlens[1:])
    positions = np.arange(cu_seqlens[-1], dtype=np.int32) - np.repeat(cu_seqlens[:-1], lens)
    return {"token_offset": offset, "cu_seqlens": cu_seqlens, "positions": positions}


def type_starts(batch: TokenBatch, separator: int) -> IntArray:
    """Return int32 (rows,): the column after each row's first *separator*, where token type 1 begins.

    A row without one is a single segment: its length, so that every token has type 0.
    """
    starts, ends = batch.cu_seqlens[:-1], batch.cu_seqlens[1:]
    places = np.append(np.flatnonzero(batch.input_ids == separator), len(batch.input_ids))
    first = places[np.searchsorted(places, starts)]
    result: IntArray = np.where(first < ends, first + 1 - starts, ends - starts).astype(np.int32)
    return result
