"""The families this engine builds, and which graphs of a model each device runs.

Float32 on the GPU is the oracle, so it takes standard operators only: onnxruntime's GroupQueryAttention has no float32
kernel there, and its PackedMultiHeadAttention waits for the device in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from engines.cuda.graphs import bert, modernbert, qwen3
from engines.cuda.graphs.builder import Graph, GraphBuilder, ModelSpec, Precision, Variant, WeightStore
from engines.protocol.errors import EngineError, ErrorCode

BUILDERS: Final[Mapping[str, Callable[[GraphBuilder], Graph]]] = {
    "bert": bert.build,
    "modernbert": modernbert.build,
    "qwen3": qwen3.build,
}
UNLIMITED: Final = 2**31 - 1
"""A width that no row reaches."""


def build(spec: ModelSpec, store: WeightStore, variant: Variant) -> Graph:
    """Build one graph of a model whose family and task LOAD has checked; ``model_unsupported`` for what it can't."""
    if variant.int8 and (spec.family != "bert" or variant.attention != "plain"):
        raise EngineError(ErrorCode.MODEL_UNSUPPORTED, f"int8 is built for bert on the CPU, not for {spec.family}")
    return BUILDERS[spec.family](GraphBuilder(spec, store, variant))


def cpu_variants(spec: ModelSpec, *, int8: bool = False) -> list[tuple[Variant, int]]:
    """Return the graphs of a model on the CPU, each with the widest row it takes, in rising order.

    Standard operators: as fast as the fused ones on this provider or faster (models.md 2).
    """
    return _by_width(spec, Variant("f32", "plain", int8=int8))


def cuda_variants(spec: ModelSpec, attention: str, precision: Precision) -> list[tuple[Variant, int]]:
    """Return the graphs of a model on the GPU, unless *attention* says which: packed for BERT, fused for the others."""
    if attention == "plain":
        return _by_width(spec, Variant(precision, "plain"))
    if attention == "auto" and spec.family == "bert" and precision == "f16":
        return _by_width(spec, Variant(precision, "packed"))
    return recorded_variants(spec, precision)


def recorded_variants(spec: ModelSpec, precision: Precision) -> list[tuple[Variant, int]]:
    """Return the graphs whose launches are recorded for latency: padded rows, since a recording's shapes are fixed."""
    if precision == "f32":
        return _by_width(spec, Variant(precision, "plain"))
    return _by_width(spec, Variant(precision, "fused"))


def _by_width(spec: ModelSpec, variant: Variant) -> list[tuple[Variant, int]]:
    if spec.family != "modernbert" or "sliding_attention" not in spec.value("layer_types", []):
        return [(variant, UNLIMITED)]
    # Up to one half window plus one token, every pair is inside the window: local layers need no blocks there.
    short = modernbert.half_window(spec.number("local_attention", 128)) + 1
    return [(variant, short), (replace(variant, window=True), UNLIMITED)]
