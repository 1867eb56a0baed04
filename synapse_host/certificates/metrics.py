"""How well two sets of numbers agree: cosines, neighbour ranks, correlation, order. Pure numpy, float64 inside.

Nothing here knows about thresholds, lanes or files. "Not finite" never enters: callers take such rows out first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[Any]
    Floats = npt.NDArray[np.float64]


def cosines(one: Array, other: Array) -> Floats:
    """Return the cosine of each row of *one* (n, dims) with the same row of *other*, float64 (n,); 0 for a zero row."""
    found: Floats = (_unit(one) * _unit(other)).sum(axis=1).clip(-1.0, 1.0)
    return found


def similarities(vectors: Array) -> Floats:
    """Return the cosine of every row with every row, float64 (n, n)."""
    unit = _unit(vectors)
    found: Floats = unit @ unit.T
    return found


def _unit(rows: Array) -> Floats:
    import numpy as np

    wide = np.asarray(rows, np.float64)
    norms = np.linalg.norm(wide, axis=1, keepdims=True)
    found: Floats = np.divide(wide, norms, out=np.zeros_like(wide), where=norms > 0)
    return found


def rank_overlaps(reference: Array, vectors: Array) -> Floats:
    """Return per row the share of its nearest neighbours that it keeps, float64 (n,).

    k = max(1, n // 10); neighbours by cosine without the row itself, equal ones by index (ane.md 8.1). With n <= 2
    there is nothing to rank: 1.0.
    """
    import numpy as np

    n = len(reference)
    if n <= 2:
        return np.ones(n)
    k = max(1, n // 10)

    def neighbours(rows: Array) -> Array:
        near = similarities(rows)
        np.fill_diagonal(near, -np.inf)
        # Rounded, so that ties of equal texts are ties in both spaces and go by index.
        return (-near.round(9)).argsort(axis=1, kind="stable")[:, :k]

    ours, theirs = neighbours(vectors), neighbours(reference)
    shared = [len(np.intersect1d(a, b, assume_unique=True)) for a, b in zip(ours, theirs, strict=True)]
    return np.array(shared, np.float64) / k


def total(values: Sequence[float]) -> float:
    """Return the sum, rounded once; infinite or NaN where it leaves the range.

    A document is judged again by equality, and ``sum`` of the same floats differs between Python 3.11 and 3.12.
    """
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return sum(values)


def worst_decile(overlaps: Sequence[float]) -> float | None:
    """Return the mean of the lowest tenth, ceil(n / 10) values; None of nothing."""
    lowest = sorted(overlaps)[: -(-len(overlaps) // 10)]
    return total(lowest) / len(lowest) if lowest else None


def neighbour_pearson(reference: Array, vectors: Array) -> Floats:
    """Return per row the correlation of its similarities to all other rows in both spaces, float64 (n,)."""
    import numpy as np

    theirs, ours = similarities(reference), similarities(vectors)
    keep = ~np.eye(len(theirs), dtype=bool)
    return np.array([pearson(t[m], o[m]) for t, o, m in zip(theirs, ours, keep, strict=True)])


def nearest(vectors: Array) -> list[int]:
    """Return each row's nearest other row by cosine, equal ones by index."""
    import numpy as np

    if not len(vectors):
        return []
    near = similarities(vectors).round(9)
    np.fill_diagonal(near, -np.inf)
    found: list[int] = near.argmax(axis=1).tolist()
    return found


def pearson(one: Array | Sequence[float], other: Array | Sequence[float]) -> float:
    """Return the Pearson correlation of two (n,) arrays; 0.0 where one is constant, which correlates with nothing."""
    import numpy as np

    a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
    if len(a) == 0:
        return 0.0
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float(np.clip((a * b).sum() / scale, -1.0, 1.0)) if scale > 0 else 0.0


def max_error(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return the largest difference of two values in the same place, None of nothing."""
    return max((abs(a - b) for a, b in zip(one, other, strict=True)), default=None)


def scale_error(reference: Sequence[float], scores: Sequence[float]) -> float | None:
    """Return the root mean square error as a share of the reference's standard deviation; None of a constant."""
    import numpy as np

    theirs, ours = np.asarray(reference, np.float64), np.asarray(scores, np.float64)
    spread = float(theirs.std()) if len(theirs) else 0.0
    return float(np.sqrt(((theirs - ours) ** 2).mean())) / spread if spread > 0 else None


def order_flips(reference: Sequence[float], scores: Sequence[float], groups: Sequence[int], *, apart: float) -> int:
    """Return how many pairs of one group changed order, of those more than *apart* apart in the reference."""
    import numpy as np

    theirs, ours, of = np.asarray(reference), np.asarray(scores), np.asarray(groups)
    flips = 0
    for group in dict.fromkeys(groups):
        t, o = theirs[of == group], ours[of == group]
        flips += int(((t[:, None] - t[None, :] > apart) & (o[:, None] <= o[None, :])).sum())
    return flips


def same_best(reference: Sequence[float], scores: Sequence[float], groups: Sequence[int]) -> float:
    """Return the share of groups whose best score belongs to the reference's best; its equals (1e-6) count as best."""
    import numpy as np

    theirs, ours, of = np.asarray(reference), np.asarray(scores), np.asarray(groups)
    same = []
    for group in dict.fromkeys(groups):
        t, o = theirs[of == group], ours[of == group]
        same.append(bool(t[int(o.argmax())] >= t.max() - 1e-6))
    return sum(same) / len(same)


def own_and_best(batch: Array, single: Array) -> tuple[Floats, Floats, Floats]:
    """Compare a batch's rows with the rows' own single answers.

    Returns per row its cosine with its own single answer, and the best cosine with any single answer of the batch: the
    two differ where rows changed places, and both are low where the numbers changed. And its length as a multiple of
    that best answer's.
    """
    import numpy as np

    own, every = cosines(batch, single), _unit(batch) @ _unit(single).T
    lengths = np.linalg.norm(np.asarray(single, np.float64), axis=1)[every.argmax(axis=1)]
    longer: Floats = np.linalg.norm(np.asarray(batch, np.float64), axis=1) / lengths.clip(1e-30)
    return own, np.maximum(own, every.max(axis=1).clip(-1.0, 1.0)), longer


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that *share* of *values* don't exceed (nearest rank); 0.0 for none."""
    if not values:
        return 0.0
    ranked = sorted(values)
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)]
