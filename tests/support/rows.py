"""Token rows as a worker's loop hands them on, and how close two sets of vectors are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engines.runtime.batch import TokenBatch


def batch_of(rows: Sequence[Sequence[int] | np.ndarray]) -> TokenBatch:
    """Lay rows end to end."""
    flat = np.concatenate([np.asarray(row, np.int32) for row in rows])
    return TokenBatch(flat, np.cumsum([0, *map(len, rows)]).astype(np.int32))


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return each row's cosine, float64; NaN, which is below every bound, for a row of zeros."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
