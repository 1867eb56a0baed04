"""Gemma 3 as an embedder: norms before and behind each part of a layer, grouped queries, windows in most layers, GeGLU.

Standard operators only. The sum that goes from layer to layer is float32 also where products are float16: it outgrows
float16. Tensor names as transformers writes them, without a leading ``model.``.
"""

from __future__ import annotations

import numpy as np

from engines.cuda.graphs.builder import Graph, GraphBuilder


def build(b: GraphBuilder) -> Graph:
    """Build a graph on right-padded rows."""
    lens = b.input("lens", ["B"])
    ids, positions = b.input("input_ids", ["B", "S"]), b.input("positions", ["S"])
    real = b.real_positions(positions, lens)
    attention = _Attention(b, positions, real)
    words = b.float32(b.op("Gather", b.weight("embed_tokens.weight"), ids, axis=0))
    states = b.op("Mul", words, b.scalar(b.config["hidden_size"] ** 0.5, "f32"))
    for layer, kind in enumerate(b.config["layer_types"]):
        prefix = f"layers.{layer}."
        normed = b.narrow(_norm(b, states, prefix + "input_layernorm"))
        mixed = b.float32(attention.layer(normed, prefix + "self_attn.", kind))
        states = b.add(states, _norm(b, mixed, prefix + "post_attention_layernorm"))
        normed = b.narrow(_norm(b, states, prefix + "pre_feedforward_layernorm"))
        gate = b.op("Gelu", b.product(normed, prefix + "mlp.gate_proj"), approximate="tanh")
        inner = b.op("Mul", gate, b.product(normed, prefix + "mlp.up_proj"))
        wide = b.float32(b.product(inner, prefix + "mlp.down_proj"))
        states = b.add(states, _norm(b, wide, prefix + "post_feedforward_layernorm"))
    return b.embedding(b.pool(_norm(b, states, "norm"), real, lens, b.spec.pooling))


def _norm(b: GraphBuilder, x: str, name: str, *, f32: bool = True, scale: float = 1.0) -> str:
    """Divide by the root mean square of the last axis, times one plus the weight (and *scale*)."""
    name += ".weight"
    gamma = b.derived(
        f"{name}+1*{scale:g}", lambda: (np.asarray(b.store.tensors[name], np.float32) + 1) * np.float32(scale), f32=f32
    )
    return b.op(
        "SimplifiedLayerNormalization", x, gamma, axis=-1, epsilon=float(b.config["rms_norm_eps"]), stash_type=1
    )


class _Attention:
    """Attention of query groups; a mask and rotary tables for each kind of layer are made once."""

    def __init__(self, b: GraphBuilder, positions: str, real: str) -> None:
        c = b.config
        self.b, self.positions, self.head_dim = b, positions, c["head_dim"]
        self.heads, self.groups = c["num_attention_heads"], c["num_key_value_heads"]
        kinds = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
        longest = c["max_position_embeddings"]
        self.tables = {kind: b.rotary(c[theta], self.head_dim, longest) for kind, theta in kinds.items()}
        every = b.op("Unsqueeze", b.additive(real), b.ints(1, 2))
        apart = b.op("Sub", b.op("Unsqueeze", positions, b.ints(0)), b.op("Unsqueeze", positions, b.ints(1)))
        near = b.op("LessOrEqual", b.op("Abs", apart), b.scalar(c["sliding_window"] // 2, "i32"))
        # Query heads that share a key head lie below each other, so the window repeats for each of them.
        windows = b.op("Concat", *[b.additive(near)] * (self.heads // self.groups), axis=0)
        self.masks = {"full_attention": every, "sliding_attention": b.op("Min", every, windows)}

    def layer(self, x: str, prefix: str, kind: str) -> str:
        """Attention of one layer on normed states (B, S, H)."""
        b, d = self.b, self.head_dim
        q, k, v = (
            b.split_heads(b.product(x, f"{prefix}{name}_proj"), heads, d)
            for name, heads in (("q", self.heads), ("k", self.groups), ("v", self.groups))
        )
        q = _norm(b, q, prefix + "q_norm", f32=False, scale=float(b.config["query_pre_attn_scalar"]) ** -0.5)
        k = _norm(b, k, prefix + "k_norm", f32=False)
        q, k = (b.rotate(part, self.tables[kind], self.positions) for part in (q, k))
        # As in qwen3: queries of one key head as one matrix, never keys broadcast over them.
        q = b.op("Reshape", q, b.ints(0, self.groups, -1, d))
        context = b.op("Reshape", b.attend(q, k, v, self.masks[kind]), b.ints(0, self.heads, -1, d))
        return b.product(b.join_heads(context, self.heads * d), prefix + "o_proj")
