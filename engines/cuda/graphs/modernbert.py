"""ModernBERT: pre-norm layers, rotary positions, GeGLU, local layers with a sliding window, optional rerank head.

Tensor names as transformers writes them, without a leading ``model.``. A local layer's query sees keys at a distance of
at most ``local_attention // 2``, inclusive (6.4.4). Rows longer than that window run block-local: blocks of one half
window of queries against the block before, their own and the next, so a row of S tokens costs S·3w scores, not S².
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np

from engines.cuda.graphs.builder import MASKED, Array, Graph, GraphBuilder, ModelSpec


def half_window(spec: ModelSpec) -> int:
    """Return how far a local layer looks to each side, in tokens; 0 where a model has no local layers."""
    return int(spec.config["local_attention"]) // 2 if "sliding_attention" in spec.config["layer_types"] else 0


def build(b: GraphBuilder) -> Graph:
    """Build a ModernBERT graph on right-padded rows."""
    eps, layers = b.config["norm_eps"], b.config["num_hidden_layers"]
    lens = b.input("lens", ["B"])
    ids, positions = b.input("input_ids", ["B", "S"]), b.input("positions", ["S"])
    masks = _Masks(b, lens, positions)
    states = b.op("Gather", b.weight("embeddings.tok_embeddings.weight"), ids, axis=0)
    states = normed = b.norm(states, "embeddings.norm", eps=eps)  # layer 0 has no attention norm
    for layer, kind in enumerate(b.config["layer_types"]):
        prefix = f"layers.{layer}."
        delta = _layer(b, normed, prefix + "attn.", masks, local=kind == "sliding_attention")
        states, normed = b.add_and_norm(delta, states, prefix + "mlp_norm", eps=eps)
        # GeGLU: one product for both halves, the first activated, the second its gate.
        active, gate = b.ops("Split", b.dense(normed, prefix + "mlp.Wi"), axis=2, num_outputs=2, outputs=2)
        delta = b.dense(b.op("Mul", b.gelu(active), gate), prefix + "mlp.Wo")
        following = f"layers.{layer + 1}.attn_norm" if layer + 1 < layers else "final_norm"
        states, normed = b.add_and_norm(delta, states, following, eps=eps)
    if b.spec.task == "embed":
        return b.embedding(b.pool(normed, masks.real, lens, b.spec.pooling))
    # Dense, gelu, LayerNorm, classifier in float32: the logit (6.6, without its sigmoid).
    x = b.pool(normed, masks.real, lens, b.config["classifier_pooling"])
    x = b.norm(b.gelu(b.dense(x, "head.dense", f32=True)), "head.norm", eps=eps, f32=True)
    return b.logit(b.dense(x, "classifier", f32=True))


class _Masks:
    """Masks made once and shared by all layers of their kind."""

    def __init__(self, b: GraphBuilder, lens: str, positions: str) -> None:
        self.b, self.lens, self.positions = b, lens, positions
        self.real, self.window = b.real_positions(positions, lens), half_window(b.spec)

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


def _layer(b: GraphBuilder, x: str, prefix: str, masks: _Masks, *, local: bool) -> str:
    """Attention of one layer, over a window where it is *local* and rows are longer than that."""
    c = b.config
    head_dim = c["hidden_size"] // c["num_attention_heads"]
    # Widths are rounded up to a whole block, so a padding position may lie just past the last real one.
    length = c["max_position_embeddings"] + int(c["local_attention"]) // 2
    tables = b.rotary(c["local_rope_theta" if local else "global_rope_theta"], head_dim, length)
    windowed = local and b.variant.window

    def attend(q: str, k: str, v: str) -> str:
        if not windowed:
            return b.attend(q, k, v, masks.dense)
        q, k, v = (b.op("Reshape", part, b.ints(0, 0, -1, masks.window, head_dim)) for part in (q, k, v))
        k, v = masks.neighbours(k, axis=2), masks.neighbours(v, axis=2)
        return b.op("Reshape", b.attend(q, k, v, masks.blocks, rank=5), b.ints(0, 0, -1, head_dim))

    fused = b.variant.attention == "fused" and not windowed
    names = prefix + "Wqkv", prefix + "Wo"
    return attention(b, x, *names, tables, masks.positions, masks.lens, attend=attend, fused=fused)


def attention(
    b: GraphBuilder, x: str, qkv: str, out: str, tables: tuple[str, str], positions: str, lens: str, *,
    attend: Callable[[str, str, str], str], fused: bool,
) -> str:  # fmt: skip
    """Attention with rotary positions between the layers *qkv* and *out*: one operator, or *attend* of heads."""
    hidden, heads = b.config["hidden_size"], b.config["num_attention_heads"]
    head_dim = hidden // heads
    scale = head_dim**-0.5
    if fused:
        q, k, v = b.ops("Split", b.dense(x, qkv), axis=2, num_outputs=3, outputs=3)
        context = b.attend_by_length(
            q, k, v, lens, *tables, num_heads=heads, kv_num_heads=heads, do_rotary=1, causal=0, scale=scale
        )
        return b.dense(context, out)

    def scaled(name: str) -> Array:
        """Fold the softmax scale into the query's part; rotation is linear, so it commutes."""
        array = np.array(b.store.tensors[name], np.float32)
        array[:hidden] *= np.float32(scale)
        return array.T

    joined = b.op("MatMul", x, b.derived(qkv + ".weight:T:scaled", lambda: scaled(qkv + ".weight")))
    if b.biased(qkv):
        joined = b.add(joined, b.derived(qkv + ".bias:scaled", lambda: scaled(qkv + ".bias")))
    parts = b.ops("Split", joined, axis=2, num_outputs=3, outputs=3)
    q, k, v = (b.split_heads(part, heads, head_dim) for part in parts)
    q, k = (b.rotate(part, tables, positions) for part in (q, k))
    return b.dense(b.join_heads(attend(q, k, v), hidden), out)
