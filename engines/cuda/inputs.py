"""Token rows -> what a graph reads. Pure numpy, no loop over rows.

A bucket's staging is filled in place: the only copy between the request's frame and the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from engines.runtime.batch import IntArray, TokenBatch

    Rows = npt.NDArray[np.intp]


def fill_rows(batch: TokenBatch, rows: Rows, ids: IntArray, lens: IntArray, *, pad_id: int) -> None:
    """Write *rows* of *batch* into *ids* (len(rows) or more, width), right-padded, and their lengths into *lens*.

    Rows of *ids* beyond ``len(rows)`` (a captured shape has a fixed count) become one pad token each.
    """
    import numpy as np

    count, width = len(rows), ids.shape[1]
    starts = batch.cu_seqlens[rows]
    lens[:count] = batch.cu_seqlens[rows + 1] - starts
    lens[count:] = 1
    columns = np.arange(width, dtype=np.int32)
    # One gather of whole rows: beyond a row's end it reads its neighbour (clipped at the frame's), overwritten next.
    np.take(batch.input_ids, starts[:, None] + columns, mode="clip", out=ids[:count])
    np.copyto(ids[:count], np.int32(pad_id), where=columns >= lens[:count, None])
    ids[count:] = pad_id


def fill_packed(batch: TokenBatch, rows: Rows, ids: IntArray) -> None:
    """Write *rows* end to end into *ids*, int32 (their tokens,)."""
    import numpy as np

    starts = batch.cu_seqlens[rows]
    lens = batch.cu_seqlens[rows + 1] - starts
    ends = np.cumsum(lens)
    # Each token's place in the frame: its own index, shifted by how far its row was moved.
    shift = np.repeat(starts - (ends - lens), lens)
    np.take(batch.input_ids, np.arange(len(ids)) + shift, mode="clip", out=ids)


def packed_offsets(lens: IntArray, width: int) -> tuple[IntArray, IntArray, IntArray]:
    """Return (token_offset (rows, width), cu_seqlens (rows + 1,), positions (tokens,)), int32, for packed attention.

    ``token_offset`` lists the padded places of all real tokens, then those of the padding (8.3.4).
    """
    import numpy as np

    rows = len(lens)
    real = (np.arange(width, dtype=np.int32) < lens[:, None]).reshape(-1)
    offset = np.concatenate([np.flatnonzero(real), np.flatnonzero(~real)]).astype(np.int32).reshape(rows, width)
    cu_seqlens = np.zeros(rows + 1, np.int32)
    np.cumsum(lens, out=cu_seqlens[1:])
    positions = np.arange(cu_seqlens[-1], dtype=np.int32) - np.repeat(cu_seqlens[:-1], lens)
    return offset, cu_seqlens, positions


def type_starts(batch: TokenBatch, separator: int) -> IntArray:
    """Return int32 (rows,): the column after each row's first *separator*, where token type 1 begins.

    A row without one is a single segment: its length, so that every token has type 0.
    """
    import numpy as np

    starts, ends = batch.cu_seqlens[:-1], batch.cu_seqlens[1:]
    places = np.append(np.flatnonzero(batch.input_ids == separator), len(batch.input_ids))
    first = places[np.searchsorted(places, starts)]
    result: IntArray = np.where(first < ends, first + 1 - starts, ends - starts).astype(np.int32)
    return result
