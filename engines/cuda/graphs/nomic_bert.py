"""Nomic's BERT: norms behind each half of a layer, rotary positions, SwiGLU.

Tensor names as :mod:`engines.checkpoint.families.nomic_bert` has them.
"""

from __future__ import annotations

import numpy as np

from engines.cuda.graphs.builder import CONTRIB, Array, Graph, GraphBuilder

TYPES = "embeddings.token_type_embeddings.weight"


def build(b: GraphBuilder) -> Graph:
    """Build a graph on right-padded rows."""
    eps = b.config["layer_norm_eps"]
    lens = b.input("lens", ["B"])
    ids, positions = b.input("input_ids", ["B", "S"]), b.input("positions", ["S"])
    real = b.real_positions(positions, lens)
    mask = b.op("Unsqueeze", b.additive(real), b.ints(1, 2)) if b.variant.attention == "plain" else ""
    words = b.op("Gather", b.weight("embeddings.word_embeddings.weight"), ids, axis=0)
    # Every token has type 0.
    states = b.norm(b.add(words, b.derived(f"{TYPES}:0", lambda: b.store.tensors[TYPES][0])), "emb_ln", eps=eps)
    for layer in range(b.config["num_hidden_layers"]):
        prefix = f"layers.{layer}."
        mixed = _attention(b, states, prefix + "attn.", positions, lens, mask)
        _, states = b.add_and_norm(mixed, states, prefix + "norm1", eps=eps)
        _, states = b.add_and_norm(_mlp(b, states, prefix + "mlp."), states, prefix + "norm2", eps=eps)
    return b.embedding(b.pool(states, real, lens, b.spec.pooling))


def _attention(b: GraphBuilder, x: str, prefix: str, positions: str, lens: str, mask: str) -> str:
    hidden, heads = b.config["hidden_size"], b.config["num_attention_heads"]
    head_dim, name = hidden // heads, prefix + "Wqkv"
    tables = b.rotary(b.config["rope_theta"], head_dim, b.config["max_position_embeddings"])
    if not mask:
        q, k, v = b.ops("Split", b.product(x, name), axis=2, num_outputs=3, outputs=3)
        context = b.attend_by_length(
            q, k, v, lens, *tables,
            num_heads=heads, kv_num_heads=heads, do_rotary=1, causal=0, scale=head_dim**-0.5,
        )  # fmt: skip
        return b.product(context, prefix + "out_proj")

    def scaled() -> Array:
        """Fold the softmax scale into the query's part; rotation is linear, so it commutes."""
        array = np.array(b.store.tensors[name + ".weight"], np.float32)
        array[:hidden] *= np.float32(head_dim**-0.5)
        return array.T

    qkv = b.op("MatMul", x, b.derived(name + ".weight:T:scaled", scaled))
    parts = b.ops("Split", qkv, axis=2, num_outputs=3, outputs=3)
    q, k, v = (b.split_heads(part, heads, head_dim) for part in parts)
    q, k = (b.rotate(part, tables, positions) for part in (q, k))
    return b.product(b.join_heads(b.attend(q, k, v, mask), hidden), prefix + "out_proj")


def _mlp(b: GraphBuilder, x: str, prefix: str) -> str:
    """SwiGLU: both halves in one product."""
    both, _ = b.joined(x, prefix + "both", prefix + "fc12", prefix + "fc11")
    gate, up = b.ops("Split", both, axis=2, num_outputs=2, outputs=2)
    if b.variant.attention == "fused":
        active = b.op("QuickGelu", gate, domain=CONTRIB, alpha=1.0)
    else:
        active = b.op("Mul", gate, b.op("Sigmoid", gate))
    return b.product(b.op("Mul", active, up), prefix + "fc2")
