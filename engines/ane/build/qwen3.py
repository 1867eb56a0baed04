"""Qwen3 and Qwen2 embedding models for Core ML; Qwen2 has no norms of queries and keys."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from engines.ane.build.graph import F32, Graph

EPSILON: Final = "rms_norm_eps"


def rms_norm(g: Graph, x: Any, weight: F32, axis: int = 1) -> Any:
    """Return an RMS norm as the layer norm of ``[x, -x]``: no square of a large activation is ever an fp16 value."""
    mb = g.mb
    doubled = mb.concat(values=[x, mb.mul(x=x, y=np.float16(-1))], axis=axis)
    normed = g.normed(doubled, np.concatenate([weight, weight]), axis=axis)
    return mb.split(x=normed, num_splits=2, axis=axis)[0]


def encode(g: Graph, inputs: Any, bias: Any, local: Any) -> Any:
    """Return the last hidden states: rotary positions, RMS norms, fewer key heads than query heads, a gated MLP."""
    mb, get = g.mb, g.get
    x = g.channels_first(g.lookup(get("embed_tokens.weight"), inputs["input_ids"]))
    tables = g.rotary(g.config["rope_theta"], inputs.get("position_ids"))
    scale = 1.0 / math.sqrt(g.head_dim)
    for n in range(g.config["num_hidden_layers"]):
        layer = f"layers.{n}"
        normed = rms_norm(g, x, get(f"{layer}.input_layernorm.weight"))
        bias_q = g.bias(f"{layer}.self_attn.q_proj.bias")
        normed_heads = f"{layer}.self_attn.q_norm.weight" in g.tensors
        factor = 1.0 if normed_heads else scale
        weight = get(f"{layer}.self_attn.q_proj.weight") * factor
        query = g.heads(g.linear(normed, weight, None if bias_q is None else bias_q * factor), g.query_heads)
        key = g.heads(g.dense(normed, f"{layer}.self_attn.k_proj"), g.key_heads)
        value = g.heads(g.dense(normed, f"{layer}.self_attn.v_proj"), g.key_heads)
        if normed_heads:  # rotation keeps lengths, so the query scale can sit in the norm's weight
            query = rms_norm(g, query, get(f"{layer}.self_attn.q_norm.weight") * scale, 2)
            key = rms_norm(g, key, get(f"{layer}.self_attn.k_norm.weight"), 2)
        query, key = g.rotate(query, tables), g.rotate(key, tables)
        x = mb.add(x=x, y=g.dense(g.attend(query, key, value, bias), f"{layer}.self_attn.o_proj"))
        normed = rms_norm(g, x, get(f"{layer}.post_attention_layernorm.weight"))
        gate = mb.silu(x=g.dense(normed, f"{layer}.mlp.gate_proj"))
        inner = mb.mul(x=gate, y=g.dense(normed, f"{layer}.mlp.up_proj"))
        x = mb.add(x=x, y=g.dense(inner, f"{layer}.mlp.down_proj"))
    return rms_norm(g, x, get("norm.weight"))
