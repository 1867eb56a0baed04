"""BERT: MiniLM, bge and cross-encoders with token types, pooler and classifier.

Tensor names as transformers writes them, without a leading ``bert.``. Post-norm layers, learned positions, exact gelu.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from engines.cuda.graphs.builder import CONTRIB, MASKED, Graph, GraphBuilder
from engines.cuda.graphs.int8 import After, Int8Dense, Part
from engines.protocol.errors import EngineError, ErrorCode


def build(b: GraphBuilder) -> Graph:
    """Build a BERT graph: padded (``plain``, ``fused``) or end to end without padding (``packed``)."""
    spec = b.spec
    if spec.value("hidden_act", "gelu") != "gelu":
        raise EngineError(ErrorCode.MODEL_UNSUPPORTED, f"hidden_act {spec.value('hidden_act')!r}: only gelu is built")
    packed = b.variant.attention == "packed"
    if packed:
        ids, positions = b.input("input_ids", ["T"]), b.input("positions", ["T"])
        offsets, cu = b.input("token_offset", ["B", "S"]), b.input("cu_seqlens", ["B1"])
        lens = real = ""
    else:
        lens = b.input("lens", ["B"])
        ids, positions = b.input("input_ids", ["B", "S"]), b.input("positions", ["S"])
        offsets = cu = ""
        real = b.real_positions(positions, lens)
    states = _embed(b, ids, positions, packed=packed)
    mask = b.op("Unsqueeze", b.additive(real), b.ints(1, 2)) if b.variant.attention == "plain" else ""
    layers = spec.integer("num_hidden_layers")
    # Where one row is read out, the last layer computes that row alone beyond its keys and values.
    reads_first = spec.task == "rerank" or spec.pooling == "cls"
    for layer in range(layers):
        prefix = f"encoder.layer.{layer}."
        if mask:
            states = _layer(b, states, prefix, mask=mask, first=reads_first and layer == layers - 1)
        else:
            states = _fused_layer(b, states, prefix, lens=lens, offsets=offsets, cu=cu)
    pooling = "cls" if spec.task == "rerank" else spec.pooling
    pooled = _pool_packed(b, states, cu, pooling) if packed else b.pool(states, real, lens, pooling)
    return b.logit(_classify(b, pooled)) if spec.task == "rerank" else b.embedding(pooled)


def _pool_packed(b: GraphBuilder, states: str, cu: str, pooling: str) -> str:
    """Pool rows that lie end to end: states (T, H) -> float32 (B, H).

    By gathers from ``cu_seqlens``: onnxruntime's RestorePadding copies a flag to the host and waits for it in each run.
    """
    starts, ends = (
        b.op("Slice", cu, b.ints(first), b.ints(last), b.ints(0)) for first, last in ((0, -1), (1, 2**31 - 1))
    )
    if pooling == "cls":
        return b.float32(b.op("Gather", states, starts, axis=0))
    # A padded view (B, S) for the mean: padding takes its own row's last token, never a neighbour's, and weighs 0.
    columns = b.input("columns", ["S"])
    last = b.op("Unsqueeze", b.op("Sub", ends, b.scalar(1, "i32")), b.ints(1))
    places = b.op("Min", b.add(b.op("Unsqueeze", starts, b.ints(1)), columns), last)
    lens = b.op("Sub", ends, starts)
    return b.pool(b.op("Gather", states, places, axis=0), b.real_positions(columns, lens), lens, pooling)


def _embed(b: GraphBuilder, ids: str, positions: str, *, packed: bool) -> str:
    """Word + position + token type, then LayerNorm. Type 1 begins at ``type_starts``: after the first SEP."""
    spec = b.spec
    hidden, types = spec.integer("hidden_size"), spec.integer("type_vocab_size", 2)
    table = "embeddings.position_embeddings.weight"
    places = (spec.integer("max_position_embeddings"), hidden)
    kinds = "embeddings.token_type_embeddings.weight"
    word = b.op(
        "Gather", b.weight("embeddings.word_embeddings.weight", (spec.integer("vocab_size"), hidden)), ids, axis=0
    )
    if spec.token_types:
        place = b.op("Gather", b.weight(table, places), positions, axis=0)
        starts = b.input("type_starts", ["T"] if packed else ["B"])
        if not packed:
            starts = b.op("Unsqueeze", starts, b.ints(1))
        second = b.cast(b.op("GreaterOrEqual", positions, starts), "i32")
        place = b.add(place, b.op("Gather", b.weight(kinds, (types, hidden)), second, axis=0))
    else:
        # Every token has type 0, so its row is part of the position table.
        folded = b.derived(
            f"{table}+type0", lambda: b.store.raw(table, places) + b.store.raw(kinds, (types, hidden))[0]
        )
        place = b.op("Gather", folded, positions, axis=0)
    return b.layer_norm(b.add(word, place), "embeddings.LayerNorm", eps=spec.number("layer_norm_eps", 1e-12), bias=True)


def _layer(b: GraphBuilder, states: str, prefix: str, *, mask: str, first: bool) -> str:
    """One layer of standard operators; *first*: only the state of the first token is wanted (B, 1, H)."""
    spec = b.spec
    hidden, ffn = spec.integer("hidden_size"), spec.integer("intermediate_size")
    heads, eps = spec.integer("num_attention_heads"), spec.number("layer_norm_eps", 1e-12)
    head_dim = hidden // heads
    dense: Any = Int8Dense(b) if b.variant.int8 else FloatDense(b)  # each takes the rows that it made
    own = prefix + "attention.self."

    def in_heads(rows: Any, name: str, factor: float = 1.0) -> str:
        parted = b.op("Reshape", dense.product(rows, Part(own + name, hidden, factor)), b.ints(0, 0, heads, head_dim))
        return b.heads_first(parted)

    every = wanted = dense.rows(states, into=hidden, after="norm")
    if first:
        states = b.op("Slice", states, b.ints(0), b.ints(1), b.ints(1))
        wanted = dense.rows(states, into=hidden, after="norm")
    q = in_heads(wanted, "query", head_dim**-0.5)  # the softmax scale is folded into the weights
    context = b.join_heads(b.attend(q, in_heads(every, "key"), in_heads(every, "value"), mask), hidden)
    rows = dense.rows(context, into=hidden, after="attention")
    projected = dense.product(rows, Part(prefix + "attention.output.dense", hidden))
    states = b.skip_layer_norm(projected, states, prefix + "attention.output.LayerNorm", eps=eps, bias=None)
    rows = dense.rows(states, into=hidden, after="norm")
    active = b.gelu(dense.product(rows, Part(prefix + "intermediate.dense", ffn)))
    narrow = dense.product(dense.rows(active, into=ffn, after="gelu"), Part(prefix + "output.dense", hidden))
    return b.skip_layer_norm(narrow, states, prefix + "output.LayerNorm", eps=eps, bias=None)


class FloatDense:
    """Dense layers in the compute dtype."""

    def __init__(self, b: GraphBuilder) -> None:
        self.b = b

    def rows(self, x: str, *, into: int, after: After) -> tuple[str, int]:
        """Return *x* itself."""
        return x, into

    def product(self, rows: tuple[str, int], part: Part) -> str:
        """Multiply by the part's matrix and add its bias: (…, out)."""
        x, into = rows
        y = self.b.linear(x, part.name + ".weight", out=part.out, into=into, factor=part.factor)
        return self.b.bias(y, part.name + ".bias", part.out, factor=part.factor)


def _fused_layer(b: GraphBuilder, states: str, prefix: str, *, lens: str, offsets: str, cu: str) -> str:
    """The same layer of onnxruntime's fused operators, rows padded or, where *offsets* are given, end to end."""
    spec = b.spec
    hidden, ffn = spec.integer("hidden_size"), spec.integer("intermediate_size")
    heads, eps = spec.integer("num_attention_heads"), spec.number("layer_norm_eps", 1e-12)
    own = prefix + "attention.self."
    scale = (hidden // heads) ** -0.5

    def joined(part: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """q, k and v side by side; the softmax scale is folded into q."""
        q, k, v = (b.store.raw(f"{own}{name}.{part}", shape) for name in ("query", "key", "value"))
        arrays = [np.asarray(q, np.float32) * np.float32(scale), np.asarray(k, np.float32), np.asarray(v, np.float32)]
        return np.concatenate(arrays, axis=0).T

    qkv = b.op("MatMul", states, b.derived(own + "qkv.weight:T", lambda: joined("weight", (hidden, hidden))))
    bias = b.derived(own + "qkv.bias", lambda: joined("bias", (hidden,)))
    if offsets:
        parts = b.ops("Split", qkv, axis=1, num_outputs=3, outputs=3)
        context = b.op(
            "PackedMultiHeadAttention", *parts, bias, offsets, cu,
            num_heads=heads, scale=1.0, mask_filter_value=MASKED, domain=CONTRIB,
        )  # fmt: skip
    else:  # MultiHeadAttention would ask for cuDNN; GroupQueryAttention takes no bias
        q, k, v = b.ops("Split", b.add(qkv, bias), axis=2, num_outputs=3, outputs=3)
        context = b.attend_by_length(q, k, v, lens, num_heads=heads, kv_num_heads=heads, causal=0, scale=1.0)
    projected = b.linear(context, prefix + "attention.output.dense.weight", out=hidden, into=hidden)
    states = b.skip_layer_norm(
        projected, states, prefix + "attention.output.LayerNorm", eps=eps,
        bias=b.weight(prefix + "attention.output.dense.bias", (hidden,)),
    )  # fmt: skip
    wide = b.linear(states, prefix + "intermediate.dense.weight", out=ffn, into=hidden)
    wide = b.op("BiasGelu", wide, b.weight(prefix + "intermediate.dense.bias", (ffn,)), domain=CONTRIB)
    narrow = b.linear(wide, prefix + "output.dense.weight", out=hidden, into=ffn)
    return b.skip_layer_norm(
        narrow, states, prefix + "output.LayerNorm", eps=eps, bias=b.weight(prefix + "output.dense.bias", (hidden,))
    )


def _classify(b: GraphBuilder, first: str) -> str:
    """Pooler (dense, tanh) and classifier on the first token, float32 (B, 1)."""
    hidden = b.spec.integer("hidden_size")
    x = b.linear(first, "pooler.dense.weight", out=hidden, into=hidden, f32=True)
    x = b.op("Tanh", b.add(x, b.weight("pooler.dense.bias", (hidden,), f32=True)))
    x = b.linear(x, "classifier.weight", out=1, into=hidden, f32=True)
    return b.add(x, b.weight("classifier.bias", (1,), f32=True))
