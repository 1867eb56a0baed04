"""BERT encoders and cross-encoders for Core ML."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from engines.ane.build.graph import Graph

EPSILON: Final = "layer_norm_eps"


def encode(g: Graph, inputs: Any, bias: Any, local: Any) -> Any:
    """Return the last hidden states: learned positions, norms behind each half of a layer."""
    mb, get = g.mb, g.get
    positions = get("embeddings.position_embeddings.weight")[: g.width]
    types = get("embeddings.token_type_embeddings.weight")
    words = g.lookup(get("embeddings.word_embeddings.weight"), inputs["input_ids"])
    if not g.rules.token_types:
        positions = positions + types[0]
    if "position_ids" in inputs:
        words = mb.add(x=words, y=g.lookup(positions, inputs["position_ids"]))
    else:
        words = mb.add(x=words, y=g.half(positions[None]))
    if g.rules.token_types:
        words = mb.add(x=words, y=g.lookup(types, inputs["token_type_ids"]))
    x = g.layer_norm(g.channels_first(words), "embeddings.LayerNorm")
    scale = 1.0 / math.sqrt(g.head_dim)
    for n in range(g.config["num_hidden_layers"]):
        layer = f"encoder.layer.{n}"
        attention = f"{layer}.attention.self"
        query = g.linear(x, get(f"{attention}.query.weight") * scale, get(f"{attention}.query.bias") * scale)
        key, value = g.dense(x, f"{attention}.key"), g.dense(x, f"{attention}.value")
        query, key, value = (g.heads(part, g.query_heads) for part in (query, key, value))
        out = g.dense(g.attend(query, key, value, bias), f"{layer}.attention.output.dense")
        x = g.layer_norm(mb.add(x=out, y=x), f"{layer}.attention.output.LayerNorm")
        inner = mb.gelu(x=g.dense(x, f"{layer}.intermediate.dense"), mode="EXACT")
        x = g.layer_norm(mb.add(x=g.dense(inner, f"{layer}.output.dense"), y=x), f"{layer}.output.LayerNorm")
    return x


def pooled(g: Graph, x: Any, mask: Any) -> Any:
    """Return what a cross-encoder's classifier reads: the first token's state through the pooler."""
    return g.mb.tanh(x=g.dense(g.first(x), "pooler.dense"))
