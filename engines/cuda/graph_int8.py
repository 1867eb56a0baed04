"""Dense layers of an int8 package on the CPU: 8-bit activations times 8-bit weights, everything else in float32.

Activations are quantised while the graph runs, each token by its own range: onnxruntime's DynamicQuantizeLinear knows
one range a tensor, with which a row's values would depend on its batch, and loses the ranking (docs/performance.md).
Here a row is the same alone and in a batch. Weights are symmetric with a scale an output channel; the few large
channels of a norm's output are multiplied apart in float32 (:mod:`engines.bundle.quantize`).

The products are exact in int32 on processors with AVX-512 VNNI or AVX-VNNI; older x86 kernels of onnxruntime
saturate pairs at 16 bits, so the matrix should ask for the instruction set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from engines.bundle.layout import APART, CHANNELS, SCALE, is_after_norm
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


def dense(b: GraphBuilder, x: str, parts: Sequence[Part], *, into: int, floor: float | None = None) -> str:
    """Multiply (…, into) by the *parts* side by side and add their biases.

    ``floor``: a bound below which no value of *x* lies; without one the levels are symmetric around zero.
    """
    import numpy as np

    key = "+".join(part.name for part in parts)
    weight = b.derived(key + ":int8", lambda: _joined([_values(b, part, into) for part in parts]).T, int8=True)
    scales = b.derived(key + SCALE, lambda: _joined([_scale(b, part) for part in parts]))

    def biases() -> Array:
        bias = _joined([_floats(b, part, ".bias", (part.out,)) for part in parts])
        if floor is None:
            return bias
        sums = [_values(b, part, into).sum(axis=1, dtype=np.int64) * _scale(b, part) for part in parts]
        return (bias + floor * _joined(sums)).astype(np.float32)  # x = (x - floor) + floor

    rest = b.derived(f"{key}.bias:int8", biases)
    if all(is_after_norm(part.name + ".weight") for part in parts):
        few = b.store.raw(CHANNELS)
        columns = [_floats(b, part, ".weight" + APART, (part.out, len(few))) for part in parts]
        apart = b.op("Gather", x, b.constant(CHANNELS, _channels(few, into)), axis=-1)
        apart = b.op("MatMul", apart, b.derived(key + APART, lambda: _joined(columns).T))
        rest = b.add(apart, rest)
        others = np.ones(into, np.float32)
        others[few] = 0
        x = b.op("Mul", x, b.constant("others", others))
    if floor is None:
        reach, top, zero = b.op("ReduceMax", b.op("Abs", x), b.ints(-1), keepdims=1), 127.0, 128
    else:
        x = b.add(x, b.scalar(-floor))
        reach, top, zero = b.op("ReduceMax", x, b.ints(-1), keepdims=1), 255.0, 0
    reach = b.add(reach, b.scalar(TINY))
    one, middle = b.constant("one", np.array(1, np.float32)), b.constant(f"level_{zero}", np.array(zero, np.uint8))
    levels = b.op("QuantizeLinear", b.op("Mul", x, b.op("Div", b.scalar(top), reach)), one, middle)
    y = b.op("MatMulIntegerToFloat", levels, weight, one, scales, middle, domain=CONTRIB)
    return b.add(b.op("Mul", y, b.op("Div", reach, b.scalar(top))), rest)


def _joined(arrays: Sequence[Array]) -> Array:
    import numpy as np

    return np.concatenate(arrays, axis=0) if len(arrays) > 1 else arrays[0]


def _values(b: GraphBuilder, part: Part, into: int) -> Array:
    return b.store.raw(part.name + ".weight", (part.out, into))


def _channels(few: Array, into: int) -> Array:
    import numpy as np

    if not (few >= 0).all() or not (few < into).all() or len(np.unique(few)) != len(few):
        raise EngineError(
            ErrorCode.ARTIFACT_INVALID, f"{CHANNELS} holds {few.tolist()}, not different channels below {into}"
        )
    return few.astype(np.int64)


def _scale(b: GraphBuilder, part: Part) -> Array:
    scale = _floats(b, part, ".weight" + SCALE, (part.out,))
    if not (scale > 0).all():
        raise EngineError(ErrorCode.ARTIFACT_INVALID, f"{part.name}.weight{SCALE} holds a value that isn't above 0")
    return scale


def _floats(b: GraphBuilder, part: Part, suffix: str, shape: tuple[int, ...]) -> Array:
    """Return a stored float tensor times the part's factor.

    What integer levels would swallow is refused: a NaN inside this graph needn't come out at its end.
    """
    import numpy as np

    array = b.store.raw(part.name + suffix, shape)
    if not np.isfinite(array).all():
        raise EngineError(
            ErrorCode.ARTIFACT_INVALID, f"{part.name}{suffix} holds NaN or infinity; the package is damaged"
        )
    return array * np.float32(part.factor)
