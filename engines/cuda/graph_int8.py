"""Dense layers of an int8 package on the CPU: 8-bit activations times 8-bit weights, everything else in float32.

Activations are quantised while the graph runs, each token by its own range: onnxruntime's DynamicQuantizeLinear knows
one range a tensor, with which a row's values would depend on its batch, and loses the ranking (docs/performance.md).
Here a row is the same alone and in a batch. Weights are symmetric with a scale an output channel; where the package
has a smoothing vector, activations are divided by it (:mod:`engines.bundle.quantize`).

The products are exact in int32 on processors with AVX-512 VNNI or AVX-VNNI; older x86 kernels of onnxruntime
saturate pairs at 16 bits, so the matrix should ask for the instruction set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from engines.bundle.layout import SCALE
from engines.cuda.graph import CONTRIB, GraphBuilder
from engines.protocol.errors import EngineError, ErrorCode

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

GELU_FLOOR: Final = -0.17
"""No value of gelu is below: counted from here, its outputs use all 256 levels."""
TINY: Final = 1e-9
"""Added to a row's range, so that a row of zeros divides by something."""


@dataclass(frozen=True, slots=True)
class Part:
    """One stored layer: ``name`` without .weight and .bias, its outputs, and a factor folded into both."""

    name: str
    out: int
    factor: float = 1.0


def dense(
    b: GraphBuilder, x: str, parts: Sequence[Part], *, into: int, smooth: str | None = None, floor: float | None = None
) -> str:
    """Multiply (…, into) by the *parts* side by side and add their biases.

    ``smooth``: the stored smoothing vector of these channels. ``floor``: a bound below which no value of *x* lies;
    without one the levels are symmetric around zero.
    """
    import numpy as np

    key = "+".join(part.name for part in parts)
    weight = b.derived(key + ":int8", lambda: _joined([_values(b, part, into) for part in parts]).T, int8=True)
    scales = b.derived(key + SCALE, lambda: _joined([_vector(b, part, ".weight" + SCALE) for part in parts]))

    def biases() -> Array:
        bias = _joined([_vector(b, part, ".bias") for part in parts])
        if floor is None:
            return bias
        sums = [_values(b, p, into).sum(axis=1, dtype=np.int64) * _vector(b, p, ".weight" + SCALE) for p in parts]
        return (bias + floor * _joined(sums)).astype(np.float32)  # x = (x - floor) + floor

    if smooth is not None:
        inverse = b.derived(smooth + ":inverse", lambda: 1 / _checked(b.store.raw(smooth, (into,)), smooth, above=0.0))
        x = b.op("Mul", x, inverse)
    if floor is None:
        reach, top, zero = b.op("ReduceMax", b.op("Abs", x), b.ints(-1), keepdims=1), 127.0, 128
    else:
        x = b.add(x, b.scalar(-floor))
        reach, top, zero = b.op("ReduceMax", x, b.ints(-1), keepdims=1), 255.0, 0
    reach = b.add(reach, b.scalar(TINY))
    one, middle = b.constant("one", np.array(1, np.float32)), b.constant(f"level_{zero}", np.array(zero, np.uint8))
    levels = b.op("QuantizeLinear", b.op("Mul", x, b.op("Div", b.scalar(top), reach)), one, middle)
    y = b.op("MatMulIntegerToFloat", levels, weight, one, scales, middle, domain=CONTRIB)
    y = b.op("Mul", y, b.op("Div", reach, b.scalar(top)))
    return b.add(y, b.derived(f"{key}.bias:int8", biases))


def _joined(arrays: Sequence[Array]) -> Array:
    import numpy as np

    return np.concatenate(arrays, axis=0) if len(arrays) > 1 else arrays[0]


def _values(b: GraphBuilder, part: Part, into: int) -> Array:
    return b.store.raw(part.name + ".weight", (part.out, into))


def _vector(b: GraphBuilder, part: Part, suffix: str) -> Array:
    import numpy as np

    name = part.name + suffix
    above = 0.0 if suffix.endswith(SCALE) else None
    return _checked(b.store.raw(name, (part.out,)), name, above=above) * np.float32(part.factor)


def _checked(vector: Array, name: str, *, above: float | None = None) -> Array:
    """Refuse what integer levels would swallow: a NaN of a graph's inside needn't come out of its end."""
    import numpy as np

    if not np.isfinite(vector).all() or (above is not None and not (vector > above).all()):
        what = "NaN or infinity" if above is None else "a value that isn't a positive number"
        raise EngineError(ErrorCode.ARTIFACT_INVALID, f"{name} holds {what}; the package is damaged")
    return vector
