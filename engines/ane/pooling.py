"""Token states -> one vector a row, in fp32 on the CPU (ane.md 2.5).

On the host side of Core ML because sums of several hundred fp16 values lose bits on the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import Pooling

if TYPE_CHECKING:
    import numpy as np

    from engines.runtime.batch import FloatArray

MIN_NORM: Final = 1e-12


def pool(states: FloatArray, pooling: Pooling) -> FloatArray:
    """Pool one row's token states, float32 (tokens, dims) without padding, to float32 (dims,)."""
    import numpy as np

    match pooling:
        case Pooling.CLS:
            row: FloatArray = states[0]
        case Pooling.LAST:
            row = states[-1]
        case Pooling.MEAN:
            # Summed in float64: the order of a float32 sum depends on the array's stride, and a row must not change
            # with the bucket it ran in.
            row = (states.sum(axis=0, dtype=np.float64) / len(states)).astype(np.float32)
    return row


def finish(vectors: FloatArray, *, normalize: bool) -> FloatArray:
    """Check every row and divide by its L2 norm when *normalize*; float32 (rows, dims) in place.

    A NaN, an infinity, or an all-zero row is ``nonfinite_output``: the Neural Engine is known to return zeros or
    garbage on internal overflow (apple/coremltools#1229, #1380), and such a row must not be served.
    """
    import numpy as np

    norms: np.ndarray = np.sqrt(np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64))
    bad = np.flatnonzero(~np.isfinite(norms) | (norms <= 0.0))
    if len(bad):
        what = "is all zeros" if np.isfinite(norms[bad[0]]) else "holds NaN or infinity"
        raise EngineError(ErrorCode.NONFINITE_OUTPUT, f"{len(bad)} of {len(vectors)} rows; row {bad[0]} {what}")
    if normalize:
        vectors /= np.maximum(norms, MIN_NORM)[:, None].astype(np.float32)
    return vectors
