"""Qwen3: causal layers with grouped queries, per-head norms on q and k, rotary positions, SwiGLU; last-token read-out.

Tensor names as transformers writes them, without a leading ``model.``. Rows are padded on the right, so the causal mask
alone hides padding from every real token: no key mask exists here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from engines.cuda.graphs.builder import CONTRIB, Graph, GraphBuilder
from engines.cuda.graphs.modernbert import dense, rope_weights, rotate
from engines.protocol.errors import EngineError, ErrorCode


def build(b: GraphBuilder) -> Graph:
    """Build a Qwen3 graph on right-padded rows: embedding, or the yes-minus-no logit of a reranker."""
    spec = b.spec
    hidden, eps = spec.integer("hidden_size"), spec.number("rms_norm_eps", 1e-6)
    lens = b.input("lens", ["B"])
    ids, positions = b.input("input_ids", ["B", "S"]), b.input("positions", ["S"])
    layers = spec.integer("num_hidden_layers")
    vocab = (spec.integer("vocab_size"), hidden)
    attention = _Attention(b, positions, lens, eps)
    states = b.op("Gather", b.weight("embed_tokens.weight", vocab), ids, axis=0)
    normed = rms_norm(b, states, "layers.0.input_layernorm.weight", hidden, eps)
    for layer in range(layers):
        prefix = f"layers.{layer}."
        delta = attention.layer(normed, prefix + "self_attn.")
        states, normed = _add_and_norm(b, states, delta, prefix + "post_attention_layernorm.weight", eps)
        delta = _mlp(b, normed, prefix + "mlp.")
        if layer + 1 < layers:
            states, normed = _add_and_norm(b, states, delta, f"layers.{layer + 1}.input_layernorm.weight", eps)
        else:
            states = b.add(states, delta)
    if spec.task == "embed" and spec.pooling != "last":
        real = b.real_positions(positions, lens)
        return b.embedding(b.pool(rms_norm(b, states, "norm.weight", hidden, eps), real, lens, spec.pooling))
    # The read-out needs one row: gather it before the final norm.
    last = b.float32(b.last_states(states, lens))
    last = rms_norm(b, last, "norm.weight", hidden, eps, f32=True)
    if spec.task == "embed":
        return b.embedding(last)
    return b.logit(b.op("MatMul", last, b.derived("readout", lambda: _readout(b, vocab), f32=True)))


def _readout(b: GraphBuilder, vocab: tuple[int, int]) -> npt.NDArray[Any]:
    """W_yes - W_no of the output matrix, float32 (H, 1): h·W_yes - h·W_no in one product (6.6)."""
    try:
        yes, no = int(b.spec.head["yes"]), int(b.spec.head["no"])
    except (KeyError, TypeError, ValueError):
        raise EngineError(
            ErrorCode.ARTIFACT_INVALID, "head_tensor_missing: a qwen3 reranker's manifest names head.yes and head.no"
        ) from None
    if not (0 <= yes < vocab[0] and 0 <= no < vocab[0]):
        raise EngineError(ErrorCode.ARTIFACT_INVALID, f"head.yes {yes} and head.no {no} must lie in [0, {vocab[0]})")
    tied = b.spec.value("tie_word_embeddings", True)
    table = b.store.raw("embed_tokens.weight" if tied else "lm_head.weight", vocab)
    return (np.asarray(table[yes], np.float32) - np.asarray(table[no], np.float32))[:, None]


def rms_norm(
    b: GraphBuilder, x: str, name: str, size: int, eps: float, *, f32: bool = False, scale: float = 1.0
) -> str:
    """Divide by the root mean square of the last axis, times the weight (and *scale*)."""
    key = name if scale == 1.0 else f"{name}:{scale:g}"
    gamma = b.derived(key, lambda: np.asarray(b.store.raw(name, (size,)), np.float32) * np.float32(scale), f32=f32)
    if b.variant.attention == "fused":
        return b.op("SimplifiedLayerNormalization", x, gamma, axis=-1, epsilon=float(eps), stash_type=1)
    half = b.variant.precision == "f16" and not f32
    wide = b.cast(x, "f32") if half else x
    mean = b.op("ReduceMean", b.op("Pow", wide, b.scalar(2.0, "f32")), b.ints(-1), keepdims=1)
    wide = b.op("Div", wide, b.op("Sqrt", b.add(mean, b.scalar(eps, "f32"))))
    return b.op("Mul", b.cast(wide, "f") if half else wide, gamma)


def _add_and_norm(b: GraphBuilder, states: str, delta: str, name: str, eps: float) -> tuple[str, str]:
    hidden = b.spec.integer("hidden_size")
    if b.variant.attention == "plain":
        states = b.add(states, delta)
        return states, rms_norm(b, states, name, hidden, eps)
    out = b.ops(
        "SkipSimplifiedLayerNormalization", delta, states, b.weight(name, (hidden,)), outputs=4, domain=CONTRIB,
        epsilon=float(eps), unused=(1, 2),
    )  # fmt: skip
    return out[3], out[0]


class _Attention:
    """Causal attention of query groups; mask and lengths are made once."""

    def __init__(self, b: GraphBuilder, positions: str, lens: str, eps: float) -> None:
        spec = b.spec
        self.b, self.positions, self.lens, self.eps = b, positions, lens, eps
        self.heads, self.groups = spec.integer("num_attention_heads"), spec.integer("num_key_value_heads")
        self.head_dim = spec.integer("head_dim", spec.integer("hidden_size") // self.heads)
        self.cos, self.sin = rope_weights(b, spec.number("rope_theta", 1e6), self.head_dim)
        self.biased = spec.value("attention_bias", False)
        if b.variant.attention == "plain":
            before = b.op(
                "LessOrEqual", b.op("Unsqueeze", positions, b.ints(0)), b.op("Unsqueeze", positions, b.ints(1))
            )
            # Query heads that share a key head lie below each other, so the mask repeats for each of them.
            self.mask = b.op("Concat", *[b.additive(before)] * (self.heads // self.groups), axis=0)

    def layer(self, x: str, prefix: str) -> str:
        """Attention of one layer on normed states (B, S, H)."""
        b, d = self.b, self.head_dim
        hidden = b.spec.integer("hidden_size")
        sizes = {"q_proj": self.heads * d, "k_proj": self.groups * d, "v_proj": self.groups * d}

        def joined(part: str) -> npt.NDArray[Any]:
            shapes = {name: (size, hidden) if part == "weight" else (size,) for name, size in sizes.items()}
            return np.concatenate([b.store.raw(f"{prefix}{n}.{part}", shape) for n, shape in shapes.items()], axis=0).T

        qkv = b.op("MatMul", x, b.derived(prefix + "qkv.weight:T", lambda: joined("weight")))
        if self.biased:
            qkv = b.add(qkv, b.derived(prefix + "qkv.bias", lambda: joined("bias")))
        lengths = b.ints(*sizes.values())
        q, k, v = b.ops("Split", qkv, lengths, axis=2, outputs=3)
        context = self._fused(q, k, v, prefix) if b.variant.attention == "fused" else self._plain(q, k, v, prefix)
        return dense(b, context, prefix + "o_proj", out=hidden, into=self.heads * d, biased=self.biased)

    def _normed(self, x: str, name: str, heads: int, scale: float) -> str:
        """Per-head norm: (B, S, heads·d) -> (B, S, heads, d)."""
        b, d = self.b, self.head_dim
        return rms_norm(b, b.op("Reshape", x, b.ints(0, 0, heads, d)), name, d, self.eps, scale=scale)

    def _fused(self, q: str, k: str, v: str, prefix: str) -> str:
        """The operator norms and rotates by itself; five optional inputs before the norm weights stay empty."""
        b, d = self.b, self.head_dim
        norms = [b.weight(f"{prefix}{name}_norm.weight", (d,)) for name in "qk"]
        return b.attend_by_length(
            q, k, v, self.lens, self.cos, self.sin, *[""] * 5, *norms, num_heads=self.heads, kv_num_heads=self.groups,
            do_rotary=1, scale=float(d**-0.5), qk_norm_epsilon=float(self.eps),
        )  # fmt: skip

    def _plain(self, q: str, k: str, v: str, prefix: str) -> str:
        b, d = self.b, self.head_dim
        q = b.heads_first(self._normed(q, prefix + "q_norm.weight", self.heads, d**-0.5))
        k = b.heads_first(self._normed(k, prefix + "k_norm.weight", self.groups, 1.0))
        v = b.heads_first(b.op("Reshape", v, b.ints(0, 0, self.groups, d)))
        q, k = (rotate(b, part, self.cos, self.sin, self.positions) for part in (q, k))
        # Queries of one key head as one matrix. Broadcasting keys over them instead makes onnxruntime copy tables of
        # pointers to the GPU in every run, and a recorded run would read them from host memory that it has given back.
        q = b.op("Reshape", q, b.ints(0, self.groups, -1, d))
        context = b.attend(q, k, v, self.mask)
        return b.join_heads(b.op("Reshape", context, b.ints(0, self.heads, -1, d)), self.heads * d)


def _mlp(b: GraphBuilder, x: str, prefix: str) -> str:
    """SwiGLU: gate and up projections in one product."""
    hidden, ffn = b.spec.integer("hidden_size"), b.spec.integer("intermediate_size")
    names = (prefix + "gate_proj.weight", prefix + "up_proj.weight")
    both = b.derived(
        prefix + "gate_up.weight:T", lambda: np.concatenate([b.store.raw(n, (ffn, hidden)) for n in names], axis=0).T
    )
    gate, up = b.ops("Split", b.op("MatMul", x, both), axis=2, num_outputs=2, outputs=2)
    if b.variant.attention == "fused":
        active = b.op("QuickGelu", gate, domain=CONTRIB, alpha=1.0)
    else:
        active = b.op("Mul", gate, b.op("Sigmoid", gate))
    return b.linear(b.op("Mul", active, up), prefix + "down_proj.weight", out=hidden, into=ffn)
