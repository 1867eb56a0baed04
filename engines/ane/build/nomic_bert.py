"""Nomic's BERT for Core ML."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from engines.ane.build.graph import Graph

EPSILON: Final = "layer_norm_eps"


def encode(g: Graph, inputs: Any, bias: Any, local: Any) -> Any:
    """Return the last hidden states: rotary positions, norms behind each half of a layer, a gated MLP."""
    mb, get, c = g.mb, g.get, g.config
    words = g.lookup(get("embeddings.word_embeddings.weight"), inputs["input_ids"])
    words = mb.add(x=words, y=g.half(get("embeddings.token_type_embeddings.weight")[0][None, None]))
    x = g.layer_norm(g.channels_first(words), "emb_ln")
    tables = g.rotary(c["rope_theta"], inputs.get("position_ids"))
    scale = np.repeat(np.array([1.0 / math.sqrt(g.head_dim), 1.0, 1.0], np.float32), c["hidden_size"])
    for n in range(c["num_hidden_layers"]):
        layer = f"layers.{n}"
        qkv = g.linear(x, get(f"{layer}.attn.Wqkv.weight") * scale[:, None], None)
        query, key, value = (g.heads(part, g.query_heads) for part in mb.split(x=qkv, num_splits=3, axis=1))
        mixed = g.attend(g.rotate(query, tables), g.rotate(key, tables), value, bias)
        x = g.layer_norm(mb.add(x=g.dense(mixed, f"{layer}.attn.out_proj"), y=x), f"{layer}.norm1")
        gate = mb.silu(x=g.dense(x, f"{layer}.mlp.fc12"))
        inner = mb.mul(x=gate, y=g.dense(x, f"{layer}.mlp.fc11"))
        x = g.layer_norm(mb.add(x=g.dense(inner, f"{layer}.mlp.fc2"), y=x), f"{layer}.norm2")
    return x
