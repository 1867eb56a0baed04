"""A request's rows in parts, one exchange each: cut to what fits, sent in order, their answers put together again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from synapse_host.text import limits
from synapse_host.text.rows import Rows

if TYPE_CHECKING:
    from synapse_host.arrays import FloatArray, IntArray


AHEAD: Final = 2
"""Exchanges handed to the lane at once: one runs, the next is prepared and waits."""


class Part(NamedTuple):
    """The rows of one exchange: their numbers in the request, their lengths, their ids end to end."""

    rows: range
    lengths: list[int]
    ids: IntArray


def whole(rows: Rows) -> Part:
    """Return all rows as one part."""
    return Part(range(len(rows.lengths)), rows.lengths, rows.ids)


def cut(rows: Rows, *, reply_row_bytes: int, max_frame: int, common_tokens: int = 0, noun: str) -> list[Part]:
    """Cut rows into parts; arguments and errors as :func:`synapse_host.text.limits.split`."""
    ranges = limits.split(
        rows.lengths, reply_row_bytes=reply_row_bytes, max_frame=max_frame, common_tokens=common_tokens, noun=noun
    )
    offsets = [0, *accumulate(rows.lengths)]
    return [
        Part(part, rows.lengths[part.start : part.stop], rows.ids[offsets[part.start] : offsets[part.stop]])
        for part in ranges
    ]


def buffer(ids: IntArray) -> memoryview:
    """Return the ids' bytes as they lie in memory (int32 little-endian on every platform we run on)."""
    return ids.data.cast("B")


async def collect(
    parts: Sequence[Part], send: Callable[[Part], Coroutine[Any, Any, FloatArray]], *width: int
) -> FloatArray:
    """Send every part and return the rows of all, float32 (n, *width), in request order.

    At most AHEAD of them are under way, started in order; the first failure cancels the others. Without any part the
    answer has no rows.
    """
    if len(parts) == 1:
        return await send(parts[0])
    import numpy as np

    answer = np.empty((parts[-1].rows.stop if parts else 0, *width), np.float32)

    async def place(part: Part) -> None:
        answer[part.rows.start : part.rows.stop] = await send(part)

    pending: list[asyncio.Task[None]] = []
    try:
        for part in parts:
            if len(pending) == AHEAD:
                await pending.pop(0)
            pending.append(asyncio.ensure_future(place(part)))
        while pending:
            await pending.pop(0)
    finally:
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.gather(*pending, return_exceptions=True)
    return answer
