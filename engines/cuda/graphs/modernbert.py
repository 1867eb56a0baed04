"""ModernBERT: pre-norm layers, rotary positions, GeGLU, local layers with a sliding window, optional rerank head.

Tensor names as transformers writes them, without a leading ``model.``. A local layer's query sees keys at a distance of
at most ``local_attention // 2``, inclusive (6.4.4). Rows longer than that window run block-local: blocks of one half
window of queries against the block before, their own and the next, so a row of S tokens costs S·3w scores, not S².
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from engines.cuda.graphs.builder import CONTRIB, MASKED, Graph, GraphBuilder, rope_tables
from engines.protocol.errors import EngineError, ErrorCode


def half_window(config_local_attention: float) -> int:
    """Return how far a local layer looks to each side, in tokens."""
    return int(config_local_attention) // 2


def build(b: GraphBuilder) -> Graph:
    """Build a ModernBERT graph on right-padded rows."""
    spec = b.spec
    hidden, eps = spec.integer("hidden_size"), spec.number("norm_eps", 1e-5)
    biased = spec.value("norm_bias", False)
    lens = b.input("lens", ["B"])
    ids, positions = b.input("input_ids", ["B", "S"]), b.input("positions", ["S"])
    real = b.real_positions(positions, lens)
    masks = _Masks(b, real, lens, positions)
    states = b.op(
        "Gather", b.weight("embeddings.tok_embeddings.weight", (spec.integer("vocab_size"), hidden)), ids, axis=0
    )
    states = b.layer_norm(states, "embeddings.norm", eps=eps, bias=biased)
    normed = states  # layer 0 has no attention norm
    layers = spec.integer("num_hidden_layers")
    kinds = spec.value("layer_types", [])
    if len(kinds) != layers:
        raise EngineError(ErrorCode.ARTIFACT_INVALID, f"config.layer_types names {len(kinds)} of {layers} layers")
    for layer in range(layers):
        prefix = f"layers.{layer}."
        delta = _attention(b, normed, prefix + "attn.", masks, local=kinds[layer] == "sliding_attention")
        states, normed = add_and_norm(b, states, delta, prefix + "mlp_norm", eps=eps, bias=biased)
        delta = _mlp(b, normed, prefix + "mlp.")
        following = f"layers.{layer + 1}.attn_norm" if layer + 1 < layers else "final_norm"
        states, normed = add_and_norm(b, states, delta, following, eps=eps, bias=biased)
    if spec.task == "embed":
        return b.embedding(b.pool(normed, real, lens, spec.pooling))
    pooled = b.pool(normed, real, lens, str(spec.head.get("pooling", spec.value("classifier_pooling", "cls"))))
    return b.logit(_head(b, pooled, eps=eps, biased=biased))


def add_and_norm(b: GraphBuilder, states: str, delta: str, prefix: str, *, eps: float, bias: bool) -> tuple[str, str]:
    """Return (states + delta, its LayerNorm): one kernel in the fused variant."""
    if b.variant.attention == "plain":
        states = b.add(states, delta)
        return states, b.layer_norm(states, prefix, eps=eps, bias=bias)
    hidden = b.spec.integer("hidden_size")
    inputs = [delta, states, b.weight(prefix + ".weight", (hidden,))]
    if bias:
        inputs.append(b.weight(prefix + ".bias", (hidden,)))
    out = b.ops("SkipLayerNormalization", *inputs, outputs=4, domain=CONTRIB, epsilon=float(eps), unused=(1, 2))
    return out[3], out[0]


def dense(b: GraphBuilder, x: str, name: str, *, out: int, into: int, biased: bool) -> str:
    """Apply a dense layer with or without bias."""
    y = b.linear(x, name + ".weight", out=out, into=into)
    return b.add(y, b.weight(name + ".bias", (out,))) if biased else y


class _Masks:
    """Masks made once and shared by all layers of their kind."""

    def __init__(self, b: GraphBuilder, real: str, lens: str, positions: str) -> None:
        self.b, self.real, self.lens, self.positions = b, real, lens, positions
        self.window = half_window(b.spec.number("local_attention", 128))

    @cached_property
    def dense(self) -> str:
        """(B, 1, 1, S)."""
        return self.b.op("Unsqueeze", self.b.additive(self.real), self.b.ints(1, 2))

    @cached_property
    def blocks(self) -> str:
        """(B, 1, S / w, w, 3w): the band, and padding or missing keys, in one additive mask."""
        b, w = self.b, self.window
        query, key = np.arange(w)[:, None] + w, np.arange(3 * w)[None, :]
        band = np.where(abs(query - key) <= w, 0.0, MASKED).astype(b.store.dtype)
        keys = self.neighbours(b.op("Reshape", b.additive(self.real), b.ints(0, -1, w)), axis=1, fill=MASKED)
        return b.op("Min", b.op("Unsqueeze", keys, b.ints(1, 3)), b.constant("band", band))

    def neighbours(self, x: str, *, axis: int, fill: float = 0.0) -> str:
        """Join each block along *axis* with the one before and after it; the blocks' own axis is the next one."""
        b = self.b
        pads = [0] * (2 * (axis + (3 if axis == 2 else 2)))
        half = len(pads) // 2
        pads[axis] = pads[half + axis] = 1
        fill_name = b.constant(f"fill_{fill!r}", np.array(fill, b.store.dtype))
        wide = b.op("Pad", x, b.ints(*pads), fill_name, mode="constant")
        far = 2**31 - 1
        parts = [
            b.op("Slice", wide, b.ints(start), b.ints(end), b.ints(axis)) for start, end in ((0, -2), (1, -1), (2, far))
        ]
        return b.op("Concat", *parts, axis=axis + 1)


def _attention(b: GraphBuilder, x: str, prefix: str, masks: _Masks, *, local: bool) -> str:
    spec = b.spec
    hidden, heads = spec.integer("hidden_size"), spec.integer("num_attention_heads")
    head_dim = hidden // heads
    biased = spec.value("attention_bias", False)
    theta = spec.number("local_rope_theta" if local else "global_rope_theta", 10000.0 if local else 160000.0)
    cos, sin = rope_weights(b, theta, head_dim)
    windowed = local and b.variant.window
    fused = b.variant.attention == "fused" and not windowed
    scale = 1.0 if fused else head_dim**-0.5

    def scaled(part: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Fold the softmax scale into the query's part; rotation is linear, so it commutes."""
        array = np.array(b.store.raw(prefix + "Wqkv." + part, shape), np.float32)
        array[:hidden] *= np.float32(scale)
        return array.T

    suffix = "" if scale == 1.0 else ":scaled"
    qkv = b.op(
        "MatMul", x, b.derived(prefix + "Wqkv.weight:T" + suffix, lambda: scaled("weight", (3 * hidden, hidden)))
    )
    if biased:
        qkv = b.add(qkv, b.derived(prefix + "Wqkv.bias" + suffix, lambda: scaled("bias", (3 * hidden,))))
    if fused:
        q, k, v = b.ops("Split", qkv, axis=2, num_outputs=3, outputs=3)
        context = b.attend_by_length(
            q, k, v, masks.lens, cos, sin,
            num_heads=heads, kv_num_heads=heads, do_rotary=1, causal=0, scale=float(head_dim**-0.5),
        )  # fmt: skip
    else:
        parts = b.ops("Split", qkv, axis=2, num_outputs=3, outputs=3)
        q, k, v = (b.heads_first(b.op("Reshape", part, b.ints(0, 0, heads, head_dim))) for part in parts)
        q, k = rotate(b, q, cos, sin, masks.positions), rotate(b, k, cos, sin, masks.positions)
        if windowed:
            w = masks.window
            q, k, v = (b.op("Reshape", part, b.ints(0, 0, -1, w, head_dim)) for part in (q, k, v))
            k, v = masks.neighbours(k, axis=2), masks.neighbours(v, axis=2)
            context = b.attend(q, k, v, masks.blocks, rank=5)
            context = b.op("Reshape", context, b.ints(0, 0, -1, head_dim))
        else:
            context = b.attend(q, k, v, masks.dense)
        context = b.join_heads(context, hidden)
    return dense(b, context, prefix + "Wo", out=hidden, into=hidden, biased=biased)


def rope_weights(b: GraphBuilder, theta: float, head_dim: int) -> tuple[str, str]:
    """Return the (max positions, head_dim / 2) tables; one pair for each theta."""
    # Widths are rounded up to a whole block, so a padding position may lie just past the last real one.
    length = b.spec.integer("max_position_embeddings", 8192) + half_window(b.spec.number("local_attention", 2))
    cos = b.derived(f"rope.cos.{theta:g}", lambda: rope_tables(theta, head_dim, length)[0])
    sin = b.derived(f"rope.sin.{theta:g}", lambda: rope_tables(theta, head_dim, length)[1])
    return cos, sin


def rotate(b: GraphBuilder, x: str, cos: str, sin: str, positions: str) -> str:
    """Rotate (B, heads, S, d) by position, half-split."""
    cos, sin = (b.once("Gather", table, positions, axis=0) for table in (cos, sin))
    first, second = b.ops("Split", x, axis=-1, num_outputs=2, outputs=2)
    left = b.op("Sub", b.op("Mul", first, cos), b.op("Mul", second, sin))
    right = b.add(b.op("Mul", second, cos), b.op("Mul", first, sin))
    return b.op("Concat", left, right, axis=-1)


def _mlp(b: GraphBuilder, x: str, prefix: str) -> str:
    """GeGLU: one product for both halves, the first activated, the second its gate."""
    hidden, ffn = b.spec.integer("hidden_size"), b.spec.integer("intermediate_size")
    biased = b.spec.value("mlp_bias", False)
    wide = dense(b, x, prefix + "Wi", out=2 * ffn, into=hidden, biased=biased)
    active, gate = b.ops("Split", wide, axis=2, num_outputs=2, outputs=2)
    return dense(b, b.op("Mul", b.gelu(active), gate), prefix + "Wo", out=hidden, into=ffn, biased=biased)


def _head(b: GraphBuilder, pooled: str, *, eps: float, biased: bool) -> str:
    """Dense, gelu, LayerNorm, classifier on float32 (B, H): the logit (6.6, without its sigmoid)."""
    hidden = b.spec.integer("hidden_size")
    x = b.linear(pooled, "head.dense.weight", out=hidden, into=hidden, f32=True)
    if b.spec.value("classifier_bias", False):
        x = b.add(x, b.weight("head.dense.bias", (hidden,), f32=True))
    x = b.layer_norm(b.gelu(x), "head.norm", eps=eps, bias=biased, f32=True)
    x = b.linear(x, "classifier.weight", out=1, into=hidden, f32=True)
    return b.add(x, b.weight("classifier.bias", (1,), f32=True))
