"""Dense layers in int8: how an int8 package's matrices, scales and columns apart come out of a float checkpoint.

A matrix W (out, in) becomes int8 values and one float32 scale an output row. A few channels of what BERT's norms put
out are many times larger than the others; quantised with them, a token's other channels keep three or four bits. So
these channels are multiplied apart in float32: their columns are zero in the int8 matrix and stored beside it (the
decomposition of LLM.int8(), Dettmers et al. 2022, with fixed channels). Which ones is read off the norms before the
feed-forward layers, where the weight of such a channel stands out; no calibration text is needed. It's the same few
channels in every layer, since the residual stream carries them.

Weights that lie on an int8 grid already, such as those recovered from a quantised model, keep their exact values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

import numpy as np

from engines.checkpoint import layout

if TYPE_CHECKING:
    from engines.checkpoint.read import Checkpoint
    from engines.checkpoint.safetensors import Array, FloatArray

LARGEST: Final = 127  # symmetric: -128 is not used
COARSEST: Final = 16  # a grid with fewer steps up to a row's largest weight isn't looked for
ON_GRID: Final = 1e-3  # in steps


class Quantised(Mapping[str, "Array"]):
    """The tensors of an int8 package by name, each made when asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.shapes = layout.required_int8(checkpoint.family, checkpoint.task, checkpoint.config)
        self._channels = outstanding(checkpoint, self.shapes[layout.CHANNELS][0])
        self._made: tuple[str, Array, FloatArray] | None = None

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def kind(self, name: str) -> str:
        """Return how a tensor is stored, as safetensors spells it."""
        return layout.stored_int8(name, self.shapes[name])

    def __getitem__(self, name: str) -> Array:
        if name == layout.CHANNELS:
            return self._channels
        if name.endswith(layout.APART):
            return self._checkpoint.f32(name.removesuffix(layout.APART))[:, self._channels]
        if name.endswith(layout.SCALE):
            return self._rows(name.removesuffix(layout.SCALE))[1]
        return self._rows(name)[0] if self.kind(name) == "I8" else self._checkpoint.f32(name)

    def _rows(self, name: str) -> tuple[Array, FloatArray]:
        if self._made is None or self._made[0] != name:  # a matrix and its scales follow each other in the file
            weight = self._checkpoint.f32(name)
            if layout.is_after_norm(name):
                weight = weight.copy()
                weight[:, self._channels] = 0
            self._made = (name, *quantise_rows(weight))
        return self._made[1:]


def outstanding(checkpoint: Checkpoint, count: int) -> Array:
    """Return the *count* channels, int32 ascending, whose norm weight before a feed-forward layer stands out most."""
    layers = range(checkpoint.config["num_hidden_layers"])
    names = [f"encoder.layer.{n}.attention.output.LayerNorm.weight" for n in layers]
    weights = np.abs([checkpoint.f32(name) for name in names])
    typical = np.maximum(np.median(weights, axis=1, keepdims=True), np.float32(1e-6))
    most = (weights / typical).max(axis=0)
    return np.sort(np.argsort(-most, kind="stable")[:count]).astype(np.int32)


def quantise_rows(weight: FloatArray) -> tuple[Array, FloatArray]:
    """Return int8 values and float32 scales (out,) of a matrix (out, in): values * scale is within half a scale of it.

    A row that is whole multiples of some step, at most 127 of them, keeps that step and so its values. A row of zeros
    has scale 1.
    """
    peak: FloatArray = np.abs(weight).max(axis=1)
    scale = np.where(peak > 0, peak / LARGEST, 1.0).astype(np.float32)
    open_rows = np.flatnonzero(peak > 0)
    for steps in range(LARGEST, COARSEST - 1, -1):
        step = peak / np.float32(steps)
        rows = open_rows[_on_grid(weight[open_rows, :16], step[open_rows])]  # a glance refuses most rows
        rows = rows[_on_grid(weight[rows], step[rows])]
        scale[rows] = step[rows]
        open_rows = np.setdiff1d(open_rows, rows)
    values = np.clip(np.rint(weight / scale[:, None]), -LARGEST, LARGEST).astype(np.int8)
    return values, scale


def _on_grid(rows: FloatArray, step: FloatArray) -> Array:
    ratio = rows / step[:, None]
    fits: Array = (np.abs(ratio - np.rint(ratio)) < ON_GRID).all(axis=1)
    return fits
