"""ModernBERT encoders and cross-encoders for Core ML."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from engines.ane.build.graph import Graph

EPSILON: Final = "norm_eps"


def encode(g: Graph, inputs: Any, bias: Any, local: Any) -> Any:
    """Return the last hidden states: rotary positions, norms before each half of a layer, some layers local."""
    mb, get, c = g.mb, g.get, g.config
    words = g.lookup(get("embeddings.tok_embeddings.weight"), inputs["input_ids"])
    x = g.layer_norm(g.channels_first(words), "embeddings.norm")
    position_ids = inputs.get("position_ids")
    tables = {
        False: g.rotary(c["global_rope_theta"], position_ids),
        True: g.rotary(c["local_rope_theta"], position_ids),
    }
    scale = np.repeat(np.array([1.0 / math.sqrt(g.head_dim), 1.0, 1.0], np.float32), c["hidden_size"])
    for n in range(c["num_hidden_layers"]):
        layer, near = f"layers.{n}", c["layer_types"][n] == "sliding_attention"
        normed = x if n == 0 else g.layer_norm(x, f"{layer}.attn_norm")
        stacked = g.bias(f"{layer}.attn.Wqkv.bias")
        weight = get(f"{layer}.attn.Wqkv.weight") * scale[:, None]
        qkv = g.linear(normed, weight, None if stacked is None else stacked * scale)
        query, key, value = (g.heads(part, g.query_heads) for part in mb.split(x=qkv, num_splits=3, axis=1))
        mixed = g.attend(g.rotate(query, tables[near]), g.rotate(key, tables[near]), value, local if near else bias)
        x = mb.add(x=x, y=g.dense(mixed, f"{layer}.attn.Wo"))
        inner = g.dense(g.layer_norm(x, f"{layer}.mlp_norm"), f"{layer}.mlp.Wi")
        active, gate = mb.split(x=inner, num_splits=2, axis=1)
        x = mb.add(x=x, y=g.dense(mb.mul(x=mb.gelu(x=active, mode="EXACT"), y=gate), f"{layer}.mlp.Wo"))
    return g.layer_norm(x, "final_norm")


def pooled(g: Graph, x: Any, mask: Any) -> Any:
    """Return what a reranker's classifier reads: the first state or the mean over real positions, through the head."""
    mb, state = g.mb, g.first(x)
    if g.config["classifier_pooling"] == "mean":
        kept = mb.expand_dims(x=mb.cast(x=mask, dtype="fp16"), axes=[1, 2])
        count = mb.reduce_sum(x=kept, axes=[-1], keep_dims=True)
        # Divided before it is summed, so that no partial sum outgrows fp16.
        state = mb.reduce_sum(x=mb.mul(x=x, y=mb.real_div(x=kept, y=count)), axes=[-1], keep_dims=True)
    return g.layer_norm(mb.gelu(x=g.dense(state, "head.dense"), mode="EXACT"), "head.norm")
