"""What a packed pass is fed with: attention bias and positions (ane.md 3). The plan is :mod:`engines.bundle.tight`'s.

Rows lie back to back and the rest of the pass is padding. Positions restart at 0 in every row. A query sees only keys
of its own row (earlier ones in a causal model, near ones in a window layer); a padding query sees itself alone, so its
softmax stays finite without it ever looking at a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MASKED: Final = -10_000.0
"""Additive bias of a forbidden pair. Finite on purpose: an infinity or the fp32 minimum turns a whole fp16 output into
NaN (apple/coremltools#2669)."""


@lru_cache(maxsize=64)
def bias(
    lengths: tuple[int, ...], width: int, *, causal: bool = False, window: int | None = None
) -> npt.NDArray[np.float16]:
    """Return the additive attention bias [1, 1, width, width] (query, key) as float16: 0 allowed, -10,000 forbidden.

    *window*: half-width of a local layer's window in tokens, |i - j| <= window. Read-only; the 64 most recent length
    tuples are kept (128 KiB each at width 256).
    """
    import numpy as np

    row_of = np.full(width, -1, np.int32)
    start = 0
    for row, length in enumerate(lengths):
        row_of[start : start + length] = row
        start += length
    place = np.arange(width)
    allowed = (row_of[:, None] == row_of[None, :]) & (row_of[:, None] >= 0)
    if causal:
        allowed &= place[None, :] <= place[:, None]
    if window is not None:
        allowed &= np.abs(place[:, None] - place[None, :]) <= window
    allowed |= (row_of[:, None] < 0) & (place[:, None] == place[None, :])
    table = np.where(allowed, np.float16(0), np.float16(MASKED))[None, None]
    table.setflags(write=False)
    return table


def positions(lengths: Sequence[int], width: int) -> npt.NDArray[np.int32]:
    """Return position ids [1, width] int32: 0, 1, … restarting in every row; padding is at position 0."""
    import numpy as np

    out = np.zeros((1, width), np.int32)
    start = 0
    for length in lengths:
        out[0, start : start + length] = np.arange(length, dtype=np.int32)
        start += length
    return out
