"""A tensor on its way from a checkpoint into a GGUF, made only when it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engines.checkpoint.read import Checkpoint

if TYPE_CHECKING:
    from engines.checkpoint.safetensors import FloatArray


@dataclass(frozen=True)
class GgufTensor:
    """One tensor to write: its GGUF name, its shape, whether it follows the file's dtype, and how to make it."""

    name: str
    shape: tuple[int, ...]
    matrix: bool
    make: Callable[[], FloatArray]


def same(checkpoint: Checkpoint, name: str, source: str, *, matrix: bool = True) -> GgufTensor:
    """Return a tensor that is stored as the checkpoint has it, under another name."""
    return GgufTensor(name, checkpoint.shape(source), matrix, lambda: checkpoint.f32(source))


def both(
    checkpoint: Checkpoint, name: str, source: str, *, matrix: bool = True, bias: bool = True
) -> Iterator[GgufTensor]:
    """Yield the weight of a layer or norm, and its bias."""
    yield same(checkpoint, f"{name}.weight", f"{source}.weight", matrix=matrix)
    if bias:
        yield same(checkpoint, f"{name}.bias", f"{source}.bias", matrix=False)
