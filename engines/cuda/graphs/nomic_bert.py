"""Nomic's BERT: norms behind each half of a layer, rotary positions, SwiGLU.

Tensor names as :mod:`engines.checkpoint.families.nomic_bert` has them.
"""

from __future__ import annotations

from engines.cuda.graphs.builder import Graph, GraphBuilder
from engines.cuda.graphs.modernbert import attention

TYPES = "embeddings.token_type_embeddings.weight"


def build(b: GraphBuilder) -> Graph:
    """Build a graph on right-padded rows."""
    c, eps = b.config, b.config["layer_norm_eps"]
    lens = b.input("lens", ["B"])
    ids, positions = b.input("input_ids", ["B", "S"]), b.input("positions", ["S"])
    real = b.real_positions(positions, lens)
    mask = b.op("Unsqueeze", b.additive(real), b.ints(1, 2)) if b.variant.attention == "plain" else ""
    words = b.op("Gather", b.weight("embeddings.word_embeddings.weight"), ids, axis=0)
    # Every token has type 0.
    states = b.norm(b.add(words, b.derived(f"{TYPES}:0", lambda: b.store.tensors[TYPES][0])), "emb_ln", eps=eps)
    for layer in range(c["num_hidden_layers"]):
        prefix = f"layers.{layer}."
        tables = b.rotary(c["rope_theta"], c["hidden_size"] // c["num_attention_heads"], c["max_position_embeddings"])
        mixed = attention(
            b, states, prefix + "attn.Wqkv", prefix + "attn.out_proj", tables, positions, lens,
            attend=lambda q, k, v: b.attend(q, k, v, mask), fused=not mask,
        )  # fmt: skip
        _, states = b.add_and_norm(mixed, states, prefix + "norm1", eps=eps)
        mlp = prefix + "mlp."
        wide = b.product(b.swiglu(states, mlp + "both", mlp + "fc12", mlp + "fc11"), mlp + "fc2")
        _, states = b.add_and_norm(wide, states, prefix + "norm2", eps=eps)
    return b.embedding(b.pool(states, real, lens, b.spec.pooling))
