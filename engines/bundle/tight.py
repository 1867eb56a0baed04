"""The layout ``tight-v1``: several short rows back to back in one pass of a fixed width, and when that pays (ane.md 3).

Host and worker plan with the same rules: the host to decide what is worth packing, the worker to lay it out. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

from engines.protocol.errors import EngineError, ErrorCode

LAYOUT: Final = "tight-v1"
MAX_ROWS: Final = 64
"""Rows of one pass, and of one exchange that asks for packing."""


class Pass(Struct, frozen=True):
    """One execution of one packed function: ``rows`` are batch indices in the order they lie in."""

    width: int
    rows: tuple[int, ...]
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if sum(self.lengths) > self.width or len(self.rows) != len(self.lengths):
            raise ValueError(f"rows of {self.lengths} tokens don't fit a pass of {self.width}")

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(start, end) of each row in the pass, in tokens."""
        spans, start = [], 0
        for length in self.lengths:
            spans.append((start, start + length))
            start += length
        return tuple(spans)


def plan(lengths: Sequence[int], *, width: int, max_rows: int) -> list[Pass]:
    """Place every row in exactly one pass of *width*, first fit in order of falling length; ties by index.

    A row longer than *width* is ``packed_rows_too_wide`` (the host routes it to a rung, there is no fallback here); an
    empty one is ``invalid_request``. An exchange has at most 256 rows, so looking through all passes costs little.
    """
    for length in lengths:
        if length < 1:
            raise EngineError(ErrorCode.INVALID_REQUEST, "a row has no tokens")
        if length > width:
            raise EngineError(ErrorCode.PACKED_ROWS_TOO_WIDE, f"a row has {length} tokens, the packed width is {width}")
    passes: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        need = lengths[index]
        place = next((place for place, free in enumerate(room) if free >= need), len(room))
        if place == len(room):
            passes.append([])
            room.append(width)
        passes[place].append(index)
        room[place] = room[place] - need if len(passes[place]) < max_rows else 0
    return [Pass(width, tuple(rows), tuple(lengths[row] for row in rows)) for rows in passes]


class Choice(Struct, frozen=True):
    """The cheapest way to run a batch: ``width`` None means every row on its own rung. Cost in the table's unit."""

    width: int | None
    passes: tuple[Pass, ...]
    single: tuple[int, ...]
    """Rows that run alone, on their rung."""
    cost: float


def choose(
    lengths: Sequence[int],
    *,
    single_cost: Mapping[int, float],
    packed_cost: Mapping[int, float],
    max_rows: int,
) -> Choice:
    """Return the cheapest of: no packing, or packing at one of the measured widths.

    *single_cost*: bucket -> measured cost of one row; *packed_cost*: width -> measured cost of one pass. The width is
    never assumed: two 100-token rows in one 256 pass cost 9.0 ms against 7.0 ms on two 128 rungs by the M5 table, two
    of 64 tokens in one 128 pass win twofold (ane.md 3.2). Ties go to no packing, then to the narrower width. Every
    length must fit the ladder. The kept passes planned again on their own give the same passes: a bin that is gone
    took no other row's place.
    """
    from bisect import bisect_left

    ladder = sorted(single_cost)
    alone = [single_cost[ladder[bisect_left(ladder, length)]] for length in lengths]
    best = Choice(None, (), tuple(range(len(lengths))), sum(alone))
    for width in sorted(packed_cost):
        fits = [index for index, length in enumerate(lengths) if length <= width]
        passes = plan([lengths[index] for index in fits], width=width, max_rows=max_rows)
        kept: list[Pass] = []
        single = [index for index, length in enumerate(lengths) if length > width]
        for one in passes:
            rows = tuple(fits[row] for row in one.rows)
            # A pass that costs more than its rows alone is undone: usually the last, half-empty one.
            if packed_cost[width] < sum(alone[row] for row in rows):
                kept.append(Pass(width, rows, one.lengths))
            else:
                single.extend(rows)
        total = packed_cost[width] * len(kept) + sum(alone[row] for row in single)
        if total < best.cost:
            best = Choice(width if kept else None, tuple(kept), tuple(sorted(single)), total)
    return best
