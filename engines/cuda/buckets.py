"""Which rows run together: a pure function of the lengths and a policy (llama-cuda.md 8.3).

Rows are ordered by length, stably. On the GPU a row's width is the next step of a ladder, so few shapes exist;
neighbouring groups merge while that wastes less than a launch costs, and a group is cut where it passes the token
budget. On the CPU shapes cost nothing, so widths are exact, and rows are cut within a small budget (models.md 7.5)
where padding and launches together cost least. The longest rows run first there: the buckets that a request ends with
are small, and no thread waits long for another's last one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from engines.runtime.batch import IntArray

Order: TypeAlias = npt.NDArray[np.intp]

LADDER: Final = (
    16, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512, 640, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192,
)  # fmt: skip
MERGE_CELLS: Final = 128
"""Cells a merge may add in all before a launch would have been cheaper."""
LAUNCH_CELLS: Final = 10
"""Cells that a launch on the CPU counts as. It reads every weight again, for about the time of 20 tokens; a little less
keeps padding below 3 % of mixed texts at the same total time (performance.md)."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How rows become buckets.

    ``tokens``: most cells (rows x width) of a bucket; a longer row runs alone. ``ladder``: widths; empty: exact ones,
    rounded up by :func:`whole_blocks`.
    """

    tokens: int
    ladder: tuple[int, ...] = LADDER
    rows: int = 512
    block: int = 1

    def max_rows(self, width: int) -> int:
        """Rows of *width* that a bucket may hold, at least one."""
        return max(1, min(self.rows, self.tokens // width))

    def widths(self, lengths: IntArray) -> IntArray:
        """Return the width each length runs at, int32, same shape."""
        if self.ladder:
            ladder = np.asarray(self.ladder, np.int32)
            step = np.minimum(np.searchsorted(ladder, lengths), len(ladder) - 1)
            return np.maximum(ladder[step], lengths).astype(np.int32)
        return np.where(lengths <= self.block + 1, lengths, -(-lengths // self.block) * self.block).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Rows ``order[start:stop]``, right-padded to *width* tokens."""

    start: int
    stop: int
    width: int

    @property
    def rows(self) -> int:
        """Rows of this bucket."""
        return self.stop - self.start

    def halves(self) -> tuple[Bucket, Bucket]:
        """Cut in two, for a device that ran out of memory; needs two rows."""
        middle = (self.start + self.stop) // 2
        return Bucket(self.start, middle, self.width), Bucket(middle, self.stop, self.width)


@dataclass(frozen=True, slots=True)
class Plan:
    """``order``: intp (rows,), original row of each sorted place; ``buckets`` cover it once, from start to end."""

    order: Order
    buckets: tuple[Bucket, ...]


def whole_blocks(width: int, block: int) -> int:
    """Return *width* as block-local attention needs it: beyond ``block + 1`` tokens a whole number of blocks."""
    return width if width <= block + 1 else -(-width // block) * block


def ladder_up_to(widest: int, block: int = 1) -> tuple[int, ...]:
    """Return the ladder, in whole blocks, of a model whose rows are at most *widest*."""
    steps = [step for step in LADDER if step < widest] + [widest]
    return tuple(sorted({whole_blocks(step, block) for step in steps}))


def plan(lengths: IntArray, policy: Policy) -> Plan:
    """Return the plan for rows of *lengths*, int32 (rows,), each at least 1. Equal input gives an equal plan."""
    if not policy.ladder:
        order = np.argsort(-lengths, kind="stable")
        return Plan(order, tuple(_cut_cheapest(policy.widths(lengths[order]), policy)))
    order = np.argsort(lengths, kind="stable")
    widths = policy.widths(lengths[order])
    return Plan(order, tuple(bucket for group in _merged(widths) for bucket in _cut_even(widths, *group, policy)))


def _merged(widths: IntArray) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of groups of equal width, merged into the next one while all merges together stay cheap."""
    edges = [0, *(np.flatnonzero(np.diff(widths)) + 1).tolist(), len(widths)]
    start, added = 0, 0
    for edge, following in pairwise(edges[1:]):
        # Widening everything collected so far to the next group's width.
        more = (edge - start) * int(widths[following - 1] - widths[edge - 1])
        if added + more < MERGE_CELLS:
            added += more
        else:
            yield start, edge
            start, added = edge, 0
    yield start, len(widths)


def _cut_even(widths: IntArray, start: int, stop: int, policy: Policy) -> Iterator[Bucket]:
    """Cut a group of one width into as few pieces as the budget allows, of nearly equal size."""
    width, rows = int(widths[stop - 1]), stop - start
    pieces = -(-rows // policy.max_rows(width))
    edges = [start + rows * piece // pieces for piece in range(pieces + 1)]
    for low, high in pairwise(edges):
        yield Bucket(low, high, width)


def _cut_cheapest(widths: IntArray, policy: Policy) -> Iterator[Bucket]:
    """Cut falling *widths* where cells and launches together cost least; of equal cuts the larger bucket comes first.

    ``cost[i]`` is the least that the rows from *i* on take. A row's bucket has its width, so only its end is chosen.
    """
    count = len(widths)
    cost, taken = np.zeros(count + 1, np.int64), np.ones(count, np.intp)
    for start in reversed(range(count)):
        width = int(widths[start])
        rows = np.arange(min(policy.max_rows(width), count - start), 0, -1)
        costs = rows * width + cost[start + rows]
        cheapest = int(costs.argmin())
        cost[start], taken[start] = costs[cheapest] + LAUNCH_CELLS, rows[cheapest]
    start = 0
    while start < count:
        yield Bucket(start, start + int(taken[start]), int(widths[start]))
        start += int(taken[start])
