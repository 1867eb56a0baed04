"""BERT: MiniLM, bge and cross-encoders with token types, pooler and classifier.

Tensor names as transformers writes them, without a leading ``bert.``. Post-norm layers, learned positions, exact gelu.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engines.cuda.graphs.builder import CONTRIB, MASKED, Graph, GraphBuilder
from engines.cuda.graphs.int8 import After, Int8Dense


@dataclass(frozen=True, slots=True)
class Inputs:
    """The graph's inputs. Padded rows: ``lens`` (B,). Rows end to end: ``offsets`` (B, S) and ``cu`` (B + 1,)."""

    ids: str
    positions: str
    lens: str = ""
    offsets: str = ""
    cu: str = ""


def build(b: GraphBuilder) -> Graph:
    """Build a BERT graph: padded (``plain``, ``fused``) or end to end without padding (``packed``)."""
    return encoder(b, embed=embed, classify=classify)


def encoder(
    b: GraphBuilder,
    *,
    embed: Callable[[GraphBuilder, Inputs], str],
    classify: Callable[[GraphBuilder, str], str],
    bias: Callable[[GraphBuilder, str], str] | None = None,
) -> Graph:
    """Build a graph of BERT's layers between a family's own first states (*embed*) and reranking head (*classify*).

    *embed* returns (B, S, H) or packed (T, H); *classify* takes the first tokens' states, float32 (B, H). *bias*, of
    the plain variant only, makes of positions (S,) what is added to the attention scores, (heads, S, S).
    """
    packed = b.variant.attention == "packed"
    if packed:
        inputs = Inputs(
            b.input("input_ids", ["T"]), b.input("positions", ["T"]),
            offsets=b.input("token_offset", ["B", "S"]), cu=b.input("cu_seqlens", ["B1"]),
        )  # fmt: skip
    else:
        inputs = Inputs(b.input("input_ids", ["B", "S"]), b.input("positions", ["S"]), lens=b.input("lens", ["B"]))
    states = embed(b, inputs)
    real = "" if packed else b.real_positions(inputs.positions, inputs.lens)
    mask = b.op("Unsqueeze", b.additive(real), b.ints(1, 2)) if b.variant.attention == "plain" else ""
    mask = b.add(mask, bias(b, inputs.positions)) if bias is not None else mask
    pooling = "cls" if b.spec.task == "rerank" else b.spec.pooling
    layers = b.config["num_hidden_layers"]
    for layer in range(layers):
        prefix = f"encoder.layer.{layer}."
        if mask:
            # Where one row is read out, the last layer computes that row alone beyond its keys and values.
            first = pooling == "cls" and layer == layers - 1
            if first and bias is not None:
                mask = b.op("Slice", mask, b.ints(0), b.ints(1), b.ints(2))
            states = _layer(b, states, prefix, mask=mask, first=first)
        else:
            states = _fused_layer(b, states, prefix, inputs)
    pooled = _pool_packed(b, states, inputs.cu, pooling) if packed else b.pool(states, real, inputs.lens, pooling)
    return b.logit(classify(b, pooled)) if b.spec.task == "rerank" else b.embedding(pooled)


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


def embed(b: GraphBuilder, inputs: Inputs) -> str:
    """Word + position + token type, then LayerNorm. Type 1 begins at ``type_starts``: after the first SEP."""
    table, kinds = "embeddings.position_embeddings.weight", "embeddings.token_type_embeddings.weight"
    word = b.op("Gather", b.weight("embeddings.word_embeddings.weight"), inputs.ids, axis=0)
    if b.spec.separator is not None:
        place = b.op("Gather", b.weight(table), inputs.positions, axis=0)
        starts = b.input("type_starts", ["T"] if inputs.cu else ["B"])
        if not inputs.cu:
            starts = b.op("Unsqueeze", starts, b.ints(1))
        second = b.cast(b.op("GreaterOrEqual", inputs.positions, starts), "i32")
        place = b.add(place, b.op("Gather", b.weight(kinds), second, axis=0))
    else:
        # Every token has type 0, so its row is part of the position table.
        tensors = b.store.tensors
        folded = b.derived(f"{table}+type0", lambda: tensors[table] + tensors[kinds][0])
        place = b.op("Gather", folded, inputs.positions, axis=0)
    return b.norm(b.add(word, place), "embeddings.LayerNorm", eps=b.config["layer_norm_eps"])


def _layer(b: GraphBuilder, states: str, prefix: str, *, mask: str, first: bool) -> str:
    """One layer of standard operators; *first*: only the state of the first token is wanted (B, 1, H)."""
    hidden, heads, eps = b.config["hidden_size"], b.config["num_attention_heads"], b.config["layer_norm_eps"]
    layer: Any = Int8Dense(b) if b.variant.int8 else FloatDense(b)  # each takes the rows that it made
    own = prefix + "attention.self."

    def in_heads(rows: Any, name: str, factor: float = 1.0) -> str:
        return b.split_heads(layer.dense(rows, own + name, factor), heads, hidden // heads)

    every = wanted = layer.rows(states, into=hidden, after="norm")
    if first:
        states = b.op("Slice", states, b.ints(0), b.ints(1), b.ints(1))
        wanted = layer.rows(states, into=hidden, after="norm")
    q = in_heads(wanted, "query", (hidden // heads) ** -0.5)  # the softmax scale is folded into the weights
    context = b.join_heads(b.attend(q, in_heads(every, "key"), in_heads(every, "value"), mask), hidden)
    projected = layer.dense(layer.rows(context, into=hidden, after="attention"), prefix + "attention.output.dense")
    _, states = b.add_and_norm(projected, states, prefix + "attention.output.LayerNorm", eps=eps)
    active = b.gelu(layer.dense(layer.rows(states, into=hidden, after="norm"), prefix + "intermediate.dense"))
    rows = layer.rows(active, into=b.config["intermediate_size"], after="gelu")
    return b.add_and_norm(layer.dense(rows, prefix + "output.dense"), states, prefix + "output.LayerNorm", eps=eps)[1]


class FloatDense:
    """Dense layers in the compute dtype, with the two methods of :class:`Int8Dense`."""

    def __init__(self, b: GraphBuilder) -> None:
        self.b = b

    def rows(self, x: str, *, into: int, after: After) -> str:
        """Return *x* itself."""
        return x

    def dense(self, rows: str, name: str, factor: float = 1.0) -> str:
        """Apply a dense layer times *factor*."""
        return self.b.dense(rows, name, factor=factor)


def _fused_layer(b: GraphBuilder, states: str, prefix: str, inputs: Inputs) -> str:
    """The same layer of onnxruntime's fused operators, on padded rows or on rows end to end."""
    heads, eps = b.config["num_attention_heads"], b.config["layer_norm_eps"]
    own, scale = prefix + "attention.self.", (b.config["hidden_size"] // heads) ** -0.5
    qkv, bias = b.joined(states, own + "qkv", own + "query", own + "key", own + "value")
    if inputs.offsets:
        parts = b.ops("Split", qkv, axis=1, num_outputs=3, outputs=3)
        context = b.op(
            "PackedMultiHeadAttention", *parts, bias, inputs.offsets, inputs.cu,
            num_heads=heads, scale=scale, mask_filter_value=MASKED, domain=CONTRIB,
        )  # fmt: skip
    else:  # MultiHeadAttention would ask for cuDNN; GroupQueryAttention takes no bias
        q, k, v = b.ops("Split", b.add(qkv, bias), axis=2, num_outputs=3, outputs=3)
        context = b.attend_by_length(q, k, v, inputs.lens, num_heads=heads, kv_num_heads=heads, causal=0, scale=scale)

    def add_and_norm(x: str, skip: str, name: str, norm: str) -> str:
        """Dense layer, residual and norm: its bias goes into the norm's kernel."""
        bias = b.weight(f"{prefix}{name}.bias")
        return b.add_and_norm(b.product(x, prefix + name), skip, prefix + norm, eps=eps, bias=bias)[1]

    states = add_and_norm(context, states, "attention.output.dense", "attention.output.LayerNorm")
    wide = b.product(states, prefix + "intermediate.dense")
    wide = b.op("BiasGelu", wide, b.weight(prefix + "intermediate.dense.bias"), domain=CONTRIB)
    return add_and_norm(wide, states, "output.dense", "output.LayerNorm")


def classify(b: GraphBuilder, first: str) -> str:
    """Pooler (dense, tanh) and classifier on the first token, float32 (B, 1)."""
    return b.dense(b.op("Tanh", b.dense(first, "pooler.dense", f32=True)), "classifier", f32=True)
