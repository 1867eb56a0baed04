"""Dense layers of an int8 package on the CPU: 8-bit activations times 8-bit weights, everything else in float32.

Activations are quantised while the graph runs, each token by its own range: onnxruntime's DynamicQuantizeLinear knows
one range a tensor, with which a row's values would depend on its batch, and loses the ranking (docs/performance.md).
Here a row is the same alone and in a batch. Weights are symmetric with a scale an output channel; the few large
channels of a norm's output are multiplied apart in float32 (:mod:`engines.checkpoint.quantize`).

The products are exact in int32 on processors with AVX-512 VNNI or AVX-VNNI; older x86 kernels of onnxruntime
saturate pairs at 16 bits, so the matrix should ask for the instruction set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np

from engines.checkpoint.layout import APART, CHANNELS, SCALE
from engines.cuda.graphs.builder import CONTRIB, Array, GraphBuilder
from engines.protocol.errors import EngineError, ErrorCode

After: TypeAlias = Literal["norm", "attention", "gelu"]
"""What a dense layer's input comes out of: it decides how the input is quantised."""
TINY: Final = 1e-9
"""Added to a row's reach, so that a row of zeros divides by something."""
SYMMETRIC: Final = (127, 128)
"""Levels up to a row's reach, and the level of zero."""
ABOVE_FLOOR: Final = (255, 0)
"""The same for values of which none is below zero."""
GELU_FLOOR: Final = -0.17
"""No value of gelu is below: counted from here, its outputs use all 256 levels."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokens quantised once for every matrix that multiplies them: ``levels`` uint8 (…, into) of ``reach`` (…, 1).

    ``few``: after a norm, float32 (…, K + 1) of the channels multiplied apart and a one, which the bias multiplies.
    """

    levels: str
    reach: str
    scale: tuple[int, int]
    few: str = ""


class Int8Dense:
    """Dense layers of :mod:`engines.cuda.graphs.bert` with int8 matrices."""

    def __init__(self, b: GraphBuilder) -> None:
        self.b = b

    def rows(self, x: str, *, into: int, after: After) -> Rows:
        """Quantise *x*, float32 (…, into), each row by its largest value."""
        b = self.b
        if after == "gelu":
            x = b.add(x, b.scalar(-GELU_FLOOR))
            reach = self._reach(x)
            # One range a row in one pass; where zero isn't level 0, the zero points would need such an array as well.
            step = b.op("Mul", reach, self._step(ABOVE_FLOOR))
            return Rows(b.op("QuantizeLinear", x, step, axis=2, block_size=into), reach, ABOVE_FLOOR)
        few, kept = "", x
        if after == "norm":
            channels = self._channels(into)
            others = np.ones(into, np.float32)
            others[channels] = 0
            kept = b.op("Mul", x, b.constant("others", others))
            few = b.op("Gather", x, b.constant(CHANNELS, channels), axis=-1)
        reach = self._reach(b.op("Abs", kept))
        if few:
            few = b.op("Concat", few, b.op("Sign", reach), axis=-1)
        # Channels apart may lie beyond the reach; their levels saturate and meet zeros in the matrix.
        ratio = b.op("Mul", x, b.op("Reciprocal", reach))
        levels = b.op("QuantizeLinear", ratio, self._step(SYMMETRIC), self._zero(SYMMETRIC))
        return Rows(levels, reach, SYMMETRIC, few)

    def _reach(self, x: str) -> str:
        return self.b.add(self.b.op("ReduceMax", x, self.b.ints(-1), keepdims=1), self.b.scalar(TINY))

    def dense(self, rows: Rows, name: str, factor: float = 1.0) -> str:
        """Apply a layer times *factor*: float32 (…, out)."""
        b, tensors = self.b, self.b.store.tensors
        step, zero = self._step(rows.scale), self._zero(rows.scale)
        values = b.derived(name + ":int8", lambda: tensors[name + ".weight"].T)
        scales = b.derived(name + SCALE, lambda: self._floats(name + ".weight" + SCALE, factor))
        y = b.op("MatMulIntegerToFloat", rows.levels, values, step, scales, zero, domain=CONTRIB)
        y = b.op("Mul", y, rows.reach)

        def bias() -> Array:
            """With what the values lost when they were counted from the floor."""
            stored = self._floats(name + ".bias", factor)
            if rows.scale != ABOVE_FLOOR:
                return stored
            sums = tensors[name + ".weight"].sum(axis=1, dtype=np.int64)
            lost: Array = GELU_FLOOR * sums * self._floats(name + ".weight" + SCALE, factor)
            return stored + lost

        def columns() -> Array:
            """The columns apart and below them the bias, (K + 1, out)."""
            return np.concatenate([self._floats(name + ".weight" + APART, factor).T, bias()[None]])

        if rows.few:
            return b.add(y, b.op("MatMul", rows.few, b.derived(name + APART, columns)))
        return b.add(y, b.derived(name + ".bias:int8", bias))

    def _step(self, scale: tuple[int, int]) -> str:
        return self.b.constant(f"step_{scale[0]}", np.array(1 / scale[0], np.float32))

    def _zero(self, scale: tuple[int, int]) -> str:
        return self.b.constant(f"level_{scale[1]}", np.array(scale[1], np.uint8))

    def _channels(self, into: int) -> Array:
        few = self.b.store.tensors[CHANNELS]
        if not (few >= 0).all() or not (few < into).all() or len(np.unique(few)) != len(few):
            raise EngineError(
                ErrorCode.ARTIFACT_INVALID, f"{CHANNELS} holds {few.tolist()}, not different channels below {into}"
            )
        return few.astype(np.int64)

    def _floats(self, name: str, factor: float) -> Array:
        """Return a stored float tensor times *factor*.

        What integer levels would swallow is refused: a NaN inside this graph needn't come out at its end.
        """
        array = self.b.store.tensors[name]
        if not np.isfinite(array).all() or (name.endswith(SCALE) and not (array > 0).all()):
            raise EngineError(
                ErrorCode.ARTIFACT_INVALID,
                f"{name} holds NaN or infinity, or a scale that isn't above 0; the package is damaged",
            )
        return array * np.float32(factor)
