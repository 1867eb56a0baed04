"""The families this engine builds, and which graphs of a model each device runs.

A new family is one module of this folder with ``build(builder) -> Graph``, and one row of :data:`FAMILIES`. Its module
may reuse another's parts: :func:`engines.cuda.graphs.bert.encoder` takes a family's own embeddings and head.

Float32 on the GPU is the oracle, so it takes standard operators only: onnxruntime's GroupQueryAttention has no float32
kernel there, and its PackedMultiHeadAttention waits for the device in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from engines.cuda.graphs import bert, gemma3_text, modernbert, mpnet, nomic_bert, qwen3
from engines.cuda.graphs.builder import Graph, GraphBuilder, ModelSpec, Precision, Variant, WeightStore


@dataclass(frozen=True, slots=True)
class Family:
    """What a family can do beyond its plain and fused graphs.

    ``packed``: rows end to end on the GPU. ``fused``: there is a graph of fused operators. ``half_window``: how far
    local layers look to each side; 0 for a model without any. Wider rows run in blocks of it.
    (engines.checkpoint.layout says which families have int8 packages.)
    """

    build: Callable[[GraphBuilder], Graph]
    packed: bool = False
    fused: bool = True
    half_window: Callable[[ModelSpec], int] = lambda spec: 0


FAMILIES: Final[Mapping[str, Family]] = {
    "bert": Family(bert.build, packed=True),
    "modernbert": Family(modernbert.build, half_window=modernbert.half_window),
    "mpnet": Family(mpnet.build, fused=False),
    "nomic_bert": Family(nomic_bert.build),
    "gemma3_text": Family(gemma3_text.build, fused=False),
    "qwen3": Family(qwen3.build),
    "qwen2": Family(qwen3.build),
}
UNLIMITED: Final = 2**31 - 1
"""A width that no row reaches."""


def build(spec: ModelSpec, store: WeightStore, variant: Variant) -> Graph:
    """Build one graph of a model whose family and task LOAD has checked."""
    return FAMILIES[spec.family].build(GraphBuilder(spec, store, variant))


def cpu_variants(spec: ModelSpec, *, int8: bool = False) -> list[tuple[Variant, int]]:
    """Return the graphs of a model on the CPU, each with the widest row it takes, in rising order.

    Standard operators: as fast as the fused ones on this provider or faster (models.md 2).
    """
    return _by_width(spec, Variant("f32", "plain", int8=int8))


def cuda_variants(spec: ModelSpec, precision: Precision) -> list[tuple[Variant, int]]:
    """Return the graphs of a model on the GPU: rows end to end where the family can, else :func:`recorded_variants`."""
    if FAMILIES[spec.family].packed and precision == "f16":
        return [(Variant(precision, "packed"), UNLIMITED)]
    return recorded_variants(spec, precision)


def recorded_variants(spec: ModelSpec, precision: Precision) -> list[tuple[Variant, int]]:
    """Return the graphs whose launches are recorded for latency: padded rows, since a recording's shapes are fixed."""
    fused = precision == "f16" and FAMILIES[spec.family].fused
    return _by_width(spec, Variant(precision, "fused" if fused else "plain"))


def block(spec: ModelSpec) -> int:
    """Return the length whose multiples a row's width must be once it is beyond ``block + 1`` tokens; 1: any width."""
    return FAMILIES[spec.family].half_window(spec) or 1


def _by_width(spec: ModelSpec, variant: Variant) -> list[tuple[Variant, int]]:
    half_window = FAMILIES[spec.family].half_window(spec)
    if not half_window:
        return [(variant, UNLIMITED)]
    # Up to one half window plus one token, every pair is inside the window: local layers need no blocks there.
    return [(variant, half_window + 1), (replace(variant, window=True), UNLIMITED)]
