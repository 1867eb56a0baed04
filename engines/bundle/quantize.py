"""Dense layers in int8: how an int8 package's matrices, scales and smoothing vectors come out of a float checkpoint.

A matrix W (out, in) becomes int8 values and one float32 scale an output row: W * smooth is about values * scale. The
activation that meets it is divided by ``smooth`` (in) first, so the product is the same; it moves range from the few
large channels of a LayerNorm's output into the weights (SmoothQuant, Xiao et al. 2022, with exponent 0.5). The range
of a channel isn't measured: after a norm it is taken as |bias| + 3 * |weight|, so no calibration text is needed.
Matrices without a norm before them have no smoothing vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from engines.bundle import layout

if TYPE_CHECKING:
    from engines.bundle.checkpoint import Checkpoint
    from engines.bundle.safetensors import Array, FloatArray

LARGEST: Final = 127
"""Symmetric: -128 is not used."""
DEVIATIONS: Final = 3.0


class Quantised(Mapping[str, "Array"]):
    """The tensors of an int8 package by name, each made when asked for: int8 matrices, everything else float32."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.shapes = layout.required_int8(checkpoint.family, checkpoint.task, checkpoint.config)
        self._smooth = {matrix: name for name, _, matrices in layout.smoothed(checkpoint.config) for matrix in matrices}
        self._source = {name: (norm, matrices) for name, norm, matrices in layout.smoothed(checkpoint.config)}

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def kind(self, name: str) -> str:
        """Return how a tensor is stored, as safetensors spells it."""
        return "I8" if layout.is_dense(name, self.shapes[name]) else "F32"

    def __getitem__(self, name: str) -> Array:
        if name in self._source:
            return self._smoothing(name)
        if name.endswith(layout.SCALE) and name not in self._checkpoint.tensors:
            return self._rows(name.removesuffix(layout.SCALE))[1]
        if self.kind(name) == "I8":
            return self._rows(name)[0]
        return self._checkpoint.f32(name)

    def _rows(self, name: str) -> tuple[Array, FloatArray]:
        weight = self._checkpoint.f32(name)
        smooth = self._smooth.get(name)
        return quantise_rows(weight if smooth is None else weight * self._smoothing(smooth))

    def _smoothing(self, name: str) -> FloatArray:
        import numpy as np

        norm, matrices = self._source[name]
        f32 = self._checkpoint.f32
        reach = np.abs(f32(norm + ".bias")) + np.float32(DEVIATIONS) * np.abs(f32(norm + ".weight"))
        peak = np.max([np.abs(f32(matrix)).max(axis=0) for matrix in matrices], axis=0)
        tiny = np.float32(1e-6)
        smooth = np.sqrt(np.maximum(reach, tiny) / np.maximum(peak, tiny))
        made: FloatArray = (smooth / np.exp(np.log(smooth).mean())).astype(np.float32)
        return made


def quantise_rows(weight: FloatArray) -> tuple[Array, FloatArray]:
    """Return int8 values and float32 scales (out,) of a matrix (out, in): values * scale is within half a scale of it.

    A row of zeros has scale 1.
    """
    import numpy as np

    peak = np.abs(weight).max(axis=1)
    scale = np.where(peak > 0, peak / LARGEST, 1.0).astype(np.float32)
    values = np.clip(np.rint(weight / scale[:, None]), -LARGEST, LARGEST).astype(np.int8)
    return values, scale
