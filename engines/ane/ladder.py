"""The ladder of fixed buckets, and which rows run on which rung (ane.md 2.3).

Every Core ML function has one fixed sequence length, so a row pays for its bucket, not for its tokens. Rows are
therefore grouped one by one: the smallest rung that fits each row, rungs in ascending order. One bucket for a whole
batch would let a single long row make every short one as dear as itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from engines.protocol.errors import EngineError, ErrorCode


def rung(tokens: int, rungs: Sequence[int]) -> int:
    """Return the smallest of *rungs* (ascending) >= *tokens*; EngineError invalid_request for 0 or above the last."""
    if tokens < 1:
        raise EngineError(ErrorCode.INVALID_REQUEST, "a row has no tokens")
    if tokens > rungs[-1]:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"a row has {tokens} tokens, the largest bucket takes {rungs[-1]} (buckets: {list(rungs)})",
        )
    return rungs[bisect_left(rungs, tokens)]


def group(lengths: Sequence[int], rungs: Sequence[int]) -> dict[int, list[int]]:
    """Return rung -> indices of the rows that run on it, both ascending; nothing is truncated.

    Raises EngineError before any group exists when one row fits nowhere.
    """
    rows: dict[int, list[int]] = {}
    for index, tokens in enumerate(lengths):
        rows.setdefault(rung(tokens, rungs), []).append(index)
    return dict(sorted(rows.items()))
