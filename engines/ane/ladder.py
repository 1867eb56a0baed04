"""The ladder of fixed buckets, and which rows run on which rung (ane.md 2.3).

Every Core ML function has one fixed sequence length, so a row pays for its bucket, not for its tokens. Rows are
therefore grouped one by one: the smallest rung that fits each row, rungs in ascending order. One bucket for a whole
batch would let a single long row make every short one as dear as itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from engines.protocol.errors import EngineError, ErrorCode


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that share a rung; ``rows`` are batch indices in ascending order."""

    bucket: int
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ladder:
    """Buckets in tokens, strictly ascending, at least one."""

    rungs: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.rungs or self.rungs[0] < 1 or any(a >= b for a, b in pairwise(self.rungs)):
            raise ValueError(f"a ladder needs strictly ascending positive buckets, got {list(self.rungs)}")

    @classmethod
    def of(cls, buckets: Iterable[int]) -> Ladder:
        """Return the ladder of *buckets* in any order; a bucket that occurs twice is a ValueError."""
        return cls(tuple(sorted(buckets)))

    @property
    def top(self) -> int:
        """The longest row this ladder takes, in tokens."""
        return self.rungs[-1]

    def rung(self, tokens: int) -> int:
        """Return the smallest bucket >= *tokens*; EngineError invalid_request for 0 or more than :attr:`top`."""
        if tokens < 1:
            raise EngineError(ErrorCode.INVALID_REQUEST, "a row has no tokens")
        if tokens > self.top:
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"a row has {tokens} tokens, the largest bucket takes {self.top} (buckets: {list(self.rungs)})",
            )
        return self.rungs[bisect_left(self.rungs, tokens)]

    def group(self, lengths: Sequence[int]) -> list[Group]:
        """Group rows by their smallest fitting rung, rungs ascending; nothing is truncated.

        Raises EngineError before any group exists when one row fits nowhere.
        """
        rows: dict[int, list[int]] = {}
        for index, tokens in enumerate(lengths):
            rows.setdefault(self.rung(tokens), []).append(index)
        return [Group(bucket, tuple(rows[bucket])) for bucket in sorted(rows)]


def cost(groups: Iterable[Group], per_row: Mapping[int, float]) -> float:
    """Return the summed cost of *groups* under a table bucket -> cost of one row."""
    return sum(per_row[group.bucket] * len(group.rows) for group in groups)
