"""float32 values looked at for NaN and infinity: by a worker before it replies, by the host before a caller has them.

Each form is the cheapest exact one that was measured for its size (docs/performance.md). numpy comes with this module,
so neither end imports it before there are numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    FloatArray = npt.NDArray[np.float32]

FEW: Final = 4096
"""Elements up to which searching the flags' bytes beats a reduction, whose call alone costs more."""
BLOCK: Final = 131072
"""Elements whose flags stay in the cache; flags of tens of megabytes at once cost twice as much."""


def floats(payload: memoryview) -> tuple[FloatArray, bool]:
    """Return the payload as float32 (n,) without a copy, and whether every value is finite."""
    array = np.frombuffer(payload, np.float32)
    return array, all_finite(array)


def all_finite(array: FloatArray) -> bool:
    """Return whether no element is NaN or infinite; *array* is C-contiguous."""
    size = array.size
    if size <= FEW:
        return np.isfinite(array).tobytes().find(b"\0") < 0
    if size <= BLOCK:
        return bool(np.isfinite(array).all())
    flat = array.reshape(-1)
    flags = np.empty(BLOCK, np.bool_)
    for start in range(0, size, BLOCK):
        part = flat[start : start + BLOCK]
        if not np.isfinite(part, flags[: len(part)]).all():
            return False
    return True
