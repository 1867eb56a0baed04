"""Where a bucket's inputs lie: one block of host memory, filled in place, uploaded in one copy.

Pure numpy. A slot's memory may be page-locked or not; it doesn't matter here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Final

from engines.cuda import inputs
from engines.cuda.buckets import Bucket, Plan

if TYPE_CHECKING:
    import numpy.typing as npt

    from engines.runtime.batch import FloatArray, IntArray, TokenBatch

    Bytes = npt.NDArray[Any]

ALIGNMENT: Final = 256
"""What cudaMalloc guarantees for a block, kept for each input inside it."""
RESIDENT: Final = frozenset({"max_len", "positions", "columns"})
"""Inputs that don't change: they point into a resident 0, 1, 2, … (``positions`` of a packed graph does change)."""


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
    packed = tokens is not None
    shapes: dict[str, tuple[int, ...]] = {
        "input_ids": (tokens,) if tokens is not None else (rows, width),
        "lens": (rows,),
        "type_starts": (tokens,) if tokens is not None else (rows,),
        "positions": (tokens,) if tokens is not None else (width,),
        "token_offset": (rows, width),
        "cu_seqlens": (rows + 1,),
        "max_len": (1,),
    }
    places: dict[str, tuple[int, tuple[int, ...]]] = {}
    offset = 0
    for name in names:
        if name in RESIDENT and not (packed and name == "positions"):
            continue
        places[name] = (offset, shapes[name])
        offset += -(-4 * prod(shapes[name]) // ALIGNMENT) * ALIGNMENT
    return Shape(rows, width, places, offset)


def slot_bytes(names: Sequence[str], *, cells: int, rows: int) -> int:
    """Return bytes that hold any bucket of at most *cells* and *rows*."""
    wide = sum(name in ("input_ids", "token_offset", "positions", "type_starts") for name in names)
    return 4 * (wide * cells + 4 * (rows + 1)) + ALIGNMENT * (len(names) + 1)


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
        import numpy as np

        offset, dims = shape.places[name]
        view: IntArray = self.host[offset : offset + 4 * prod(dims)].view(np.int32).reshape(dims)
        return view


class Filler:
    """Fills slots with buckets of one request."""

    PIECE: Final = 16384
    """Cells filled between two progress reports of the first submission."""

    def __init__(self, batch: TokenBatch, plan: Plan, *, pad_id: int, separator: int | None) -> None:
        self.batch, self.plan, self.pad_id = batch, plan, pad_id
        self.starts = inputs.type_starts(batch, separator) if separator is not None else None

    def shape(self, bucket: Bucket, names: Sequence[str], *, rows: int, width: int, packed: bool) -> Shape:
        """Return the layout of *bucket* run as (rows, width)."""
        tokens = int(self.batch.lengths[self.plan.order[bucket.start : bucket.stop]].sum()) if packed else None
        return layout(names, rows=rows, width=width, tokens=tokens)

    def fill(self, slot: Slot, bucket: Bucket, shape: Shape, done: Callable[[int], None] | None = None) -> None:
        """Write all inputs. *done* is told rows prepared piece by piece, except the last piece."""
        import numpy as np

        rows = self.plan.order[bucket.start : bucket.stop]
        ids = slot.view(shape, "input_ids")
        if "token_offset" in shape.places:
            lens = self.batch.lengths[rows]
            offset, cu_seqlens, positions = inputs.packed_offsets(lens, shape.width)
            for name, value in (("token_offset", offset), ("cu_seqlens", cu_seqlens), ("positions", positions)):
                slot.view(shape, name)[...] = value
            inputs.fill_packed(self.batch, rows, ids)
            if "type_starts" in shape.places and self.starts is not None:
                slot.view(shape, "type_starts")[...] = np.repeat(self.starts[rows], lens)
            return
        lens = slot.view(shape, "lens")
        if "type_starts" in shape.places and self.starts is not None:
            starts = slot.view(shape, "type_starts")
            starts[: len(rows)] = self.starts[rows]
            starts[len(rows) :] = 1
        step = max(1, self.PIECE // shape.width) if done is not None else len(rows)
        for low in range(0, len(rows), step):
            high = min(low + step, len(rows))
            last = high == len(rows)
            until = shape.rows if last else high  # the last piece also fills a captured shape's spare rows
            inputs.fill_rows(self.batch, rows[low:high], ids[low:until], lens[low:until], pad_id=self.pad_id)
            if not last and done is not None:
                done(high - low)
