"""Qwen3 and Qwen2: grouped queries, rotary positions, SwiGLU, last-token read-out; Qwen3 norms each head's q and k.

Tensor names as transformers writes them, without a leading ``model.``. Rows are padded on the right, so the causal mask
alone hides padding from every real token; an embedder that isn't causal has a mask of keys instead.
"""

from __future__ import annotations

import numpy as np

from engines.cuda.graphs.builder import CONTRIB, Array, Graph, GraphBuilder
from engines.protocol.errors import EngineError, ErrorCode


def build(b: GraphBuilder) -> Graph:
    """Build a graph on right-padded rows: embedding, or the yes-minus-no logit of a reranker."""
    lens = b.input("lens", ["B"])
    ids, positions = b.input("input_ids", ["B", "S"]), b.input("positions", ["S"])
    layers = b.config["num_hidden_layers"]
    attention = _Attention(b, positions, lens)
    states = b.op("Gather", b.weight("embed_tokens.weight"), ids, axis=0)
    normed = _norm(b, states, "layers.0.input_layernorm.weight")
    for layer in range(layers):
        prefix = f"layers.{layer}."
        delta = attention.layer(normed, prefix + "self_attn.")
        states, normed = _add_and_norm(b, states, delta, prefix + "post_attention_layernorm.weight")
        mlp = prefix + "mlp."
        delta = b.dense(b.swiglu(normed, mlp + "gate_up", mlp + "gate_proj", mlp + "up_proj"), mlp + "down_proj")
        if layer + 1 < layers:
            states, normed = _add_and_norm(b, states, delta, f"layers.{layer + 1}.input_layernorm.weight")
        else:
            states = b.add(states, delta)
    if b.spec.task == "embed" and b.spec.pooling != "last":
        real = b.real_positions(positions, lens)
        return b.embedding(b.pool(_norm(b, states, "norm.weight"), real, lens, b.spec.pooling))
    # The read-out needs one row: gather it before the final norm.
    last = _norm(b, b.float32(b.last_states(states, lens)), "norm.weight", f32=True)
    if b.spec.task == "embed":
        return b.embedding(last)
    return b.logit(b.op("MatMul", last, b.derived("readout", lambda: _readout(b), f32=True)))


def _readout(b: GraphBuilder) -> Array:
    """W_yes - W_no of the output matrix, float32 (H, 1): h·W_yes - h·W_no in one product (6.6)."""
    table = b.store.tensors["embed_tokens.weight" if b.config["tie_word_embeddings"] else "lm_head.weight"]
    yes, no = (b.spec.head.get(word) for word in ("yes", "no"))
    if not all(isinstance(token, int) and 0 <= token < len(table) for token in (yes, no)):
        raise EngineError(
            ErrorCode.ARTIFACT_INVALID,
            f"head_tensor_missing: a qwen3 reranker's manifest names head.yes and head.no in [0, {len(table)}), "
            f"this one {yes!r} and {no!r}",
        )
    return (np.asarray(table[yes], np.float32) - np.asarray(table[no], np.float32))[:, None]


def _norm(b: GraphBuilder, x: str, name: str, *, f32: bool = False, scale: float = 1.0) -> str:
    """Divide by the root mean square of the last axis, times the weight (and *scale*)."""
    key, eps = name if scale == 1.0 else f"{name}:{scale:g}", float(b.config["rms_norm_eps"])
    gamma = b.derived(key, lambda: np.asarray(b.store.tensors[name], np.float32) * np.float32(scale), f32=f32)
    return b.op("SimplifiedLayerNormalization", x, gamma, axis=-1, epsilon=eps, stash_type=1)


def _add_and_norm(b: GraphBuilder, states: str, delta: str, name: str) -> tuple[str, str]:
    """Return (states + delta, its norm): one kernel in the fused variant."""
    if b.variant.attention == "plain":
        states = b.add(states, delta)
        return states, _norm(b, states, name)
    out = b.ops(
        "SkipSimplifiedLayerNormalization", delta, states, b.weight(name), outputs=4, domain=CONTRIB,
        epsilon=float(b.config["rms_norm_eps"]), unused=(1, 2),
    )  # fmt: skip
    return out[3], out[0]


class _Attention:
    """Attention of query groups; mask and rotary tables are made once."""

    def __init__(self, b: GraphBuilder, positions: str, lens: str) -> None:
        self.b, self.positions, self.lens = b, positions, lens
        self.heads, self.groups = b.config["num_attention_heads"], b.config["num_key_value_heads"]
        self.head_dim = b.config["head_dim"]
        self.tables = b.rotary(b.config["rope_theta"], self.head_dim, b.config["max_position_embeddings"])
        self.normed = "layers.0.self_attn.q_norm.weight" in b.store.tensors
        if b.variant.attention == "plain" and not b.config["is_causal"]:
            self.mask = b.op("Unsqueeze", b.additive(b.real_positions(positions, lens)), b.ints(1, 2))
        elif b.variant.attention == "plain":
            before = b.op(
                "LessOrEqual", b.op("Unsqueeze", positions, b.ints(0)), b.op("Unsqueeze", positions, b.ints(1))
            )
            # Query heads that share a key head lie below each other, so the mask repeats for each of them.
            self.mask = b.op("Concat", *[b.additive(before)] * (self.heads // self.groups), axis=0)

    def layer(self, x: str, prefix: str) -> str:
        """Attention of one layer on normed states (B, S, H)."""
        b, d = self.b, self.head_dim
        qkv, bias = b.joined(x, prefix + "qkv", *(f"{prefix}{part}_proj" for part in "qkv"))
        lengths = b.ints(self.heads * d, self.groups * d, self.groups * d)
        q, k, v = b.ops("Split", b.add(qkv, bias) if bias else qkv, lengths, axis=2, outputs=3)
        context = self._fused(q, k, v, prefix) if b.variant.attention == "fused" else self._plain(q, k, v, prefix)
        return b.dense(context, prefix + "o_proj")

    def _fused(self, q: str, k: str, v: str, prefix: str) -> str:
        """The operator norms and rotates by itself; five optional inputs before the norm weights stay empty."""
        b, norms, epsilon = self.b, [], {}
        if self.normed:
            norms = [""] * 5 + [b.weight(f"{prefix}{name}_norm.weight") for name in "qk"]
            epsilon = {"qk_norm_epsilon": float(b.config["rms_norm_eps"])}
        return b.attend_by_length(
            q, k, v, self.lens, *self.tables, *norms, num_heads=self.heads, kv_num_heads=self.groups,
            do_rotary=1, causal=int(b.config["is_causal"]), scale=float(self.head_dim**-0.5), **epsilon,
        )  # fmt: skip

    def _plain(self, q: str, k: str, v: str, prefix: str) -> str:
        b, d = self.b, self.head_dim
        q, k = b.split_heads(q, self.heads, d), b.split_heads(k, self.groups, d)
        if self.normed:  # per head; the softmax scale is folded into q's
            q, k = _norm(b, q, prefix + "q_norm.weight", scale=d**-0.5), _norm(b, k, prefix + "k_norm.weight")
        else:
            q = b.op("Mul", q, b.scalar(d**-0.5))
        v = b.split_heads(v, self.groups, d)
        q, k = (b.rotate(part, self.tables, self.positions) for part in (q, k))
        # Queries of one key head as one matrix. Broadcasting keys over them instead makes onnxruntime copy tables of
        # pointers to the GPU in every run, and a recorded run would read them from host memory that it has given back.
        q = b.op("Reshape", q, b.ints(0, self.groups, -1, d))
        context = b.attend(q, k, v, self.mask)
        return b.join_heads(b.op("Reshape", context, b.ints(0, self.heads, -1, d)), self.heads * d)
