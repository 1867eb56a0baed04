"""Encoder graphs in MIL, one function per bucket or packed width, straight from the checkpoint; no torch.

What all families share is here; ``engines/ane/build/<family>.py`` writes a family's layers with it.

Layout. Activations are channels-first ``[1, C, 1, S]`` with the sequence last, linear layers are 1x1 convolutions,
attention runs head by head, and a head's scores come from one matmul each without a transpose. That is Apple's own
guidance ("Deploying Transformers on the Apple Neural Engine", 2022,
machinelearning.apple.com/research/neural-engine-transformers, and its reference code apple/ml-ane-transformers): the
engine's buffers are 4-D with a packed channel axis and a last axis padded to 64 bytes, so a long last axis wastes
nothing and a last axis of 1 wastes 32-fold; convolution is its native product; small per-head blocks stay in its cache
and spread over its cores; reshapes and transposes of the sequence cost copies. What no Mac has measured for this
builder: whether a head-by-head split still pays on today's chips.

Numbers. Everything is fp16 as written here, so the saved program is this graph and nothing a precision pass made of it.
The query scale is folded into the query weights in fp32. Masks are finite (:data:`engines.ane.inputs.MASKED`). A layer
norm's epsilon is at least 1e-7: 1e-12 is zero in fp16. RMS norm is a layer norm of ``[x, -x]``: that has mean 0 and
variance mean(x^2), and no square of a large activation is ever an fp16 value.

Rotary and position tables are constants of the function, cut or gathered by ``position_ids`` in the graph: single and
packed functions read the very same fp16 values (ane.md 3.1, the rounding trap).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from engines.ane.families import FAMILIES
from engines.ane.inputs import MASKED, InputRules
from engines.ane.inputs import bias as attention_bias
from engines.ane.signature import HIDDEN, SCORE, FunctionSpec, Key, expected

if TYPE_CHECKING:
    import numpy.typing as npt

    from engines.checkpoint.read import Checkpoint

    F32 = npt.NDArray[np.float32]

MIN_EPSILON: Final = 1e-7


class Graph:
    """One function under construction. Weights come as fp32 by their canonical names and leave as fp16 constants.

    Attributes:
        mb: coremltools' builder, whose calls append operations.
        get: a tensor of the checkpoint by name, fp32.
        config: the checkpoint's complete config.
        epsilon: of every norm.
    """

    def __init__(self, checkpoint: Checkpoint, width: int, epsilon: float) -> None:
        from coremltools.converters.mil.mil import Builder

        c = checkpoint.config
        self.mb, self.get, self.tensors, self.config = Builder, checkpoint.f32, checkpoint.tensors, c
        self.rules, self.width, self.epsilon = _rules(checkpoint), width, epsilon
        self.head_dim, self.query_heads = c["head_dim"], c["num_attention_heads"]
        self.key_heads = c.get("num_key_value_heads") or self.query_heads

    def half(self, array: Any) -> Any:
        """Return an fp16 constant; ValueError where a weight is too large for fp16."""
        with np.errstate(over="ignore"):
            value = np.ascontiguousarray(array, np.float16)
        if not np.isfinite(value).all():
            raise ValueError("a weight isn't finite in fp16 (largest 65,504): this checkpoint can't be built")
        return value

    def linear(self, x: Any, weight: F32, bias: F32 | None) -> Any:
        """1x1 convolution; *weight* (out, in), *x* [1, in, 1, S]."""
        extra = {} if bias is None else {"bias": self.half(bias)}
        return self.mb.conv(x=x, weight=self.half(weight[:, :, None, None]), pad_type="valid", **extra)

    def dense(self, x: Any, name: str) -> Any:
        """Apply the linear layer of this name, with its bias if it has one."""
        return self.linear(x, self.get(f"{name}.weight"), self.bias(f"{name}.bias"))

    def bias(self, name: str) -> F32 | None:
        """Return a tensor that a checkpoint may leave out."""
        return self.get(name) if name in self.tensors else None

    def layer_norm(self, x: Any, name: str) -> Any:
        """Apply the layer norm of this name over the channels."""
        return self.normed(x, self.get(f"{name}.weight"), self.bias(f"{name}.bias"))

    def normed(self, x: Any, weight: F32, bias: F32 | None = None, axis: int = 1) -> Any:
        """Apply a layer norm with these weights over one axis."""
        extra = {} if bias is None else {"beta": self.half(bias)}
        epsilon = np.float16(max(self.epsilon, MIN_EPSILON))
        return self.mb.layer_norm(x=x, axes=[axis], gamma=self.half(weight), epsilon=epsilon, **extra)

    def lookup(self, table: F32, ids: Any) -> Any:
        """Return the rows of a table by ids [1, S]: [1, S, C]."""
        return self.mb.gather(x=self.half(table), indices=ids, axis=0, validate_indices=False)

    def channels_first(self, x: Any) -> Any:
        """[1, S, C] -> [1, C, 1, S]."""
        return self.mb.expand_dims(x=self.mb.transpose(x=x, perm=[0, 2, 1]), axes=[2])

    def rotary(self, theta: float, position_ids: Any | None) -> tuple[Any, Any]:
        """Cosine and sine [1, 1, head_dim / 2, S]: a constant for a bucket, gathered from it for a packed width."""
        mb, half = self.mb, self.head_dim // 2
        frequencies = theta ** (-np.arange(half, dtype=np.float64) / half)
        angles = np.arange(self.width, dtype=np.float64)[:, None] * frequencies[None]
        if position_ids is None:
            cos, sin = (self.half(f(angles).T[None, None]) for f in (np.cos, np.sin))
            return cos, sin

        def gathered(table: Any) -> Any:
            rows = self.lookup(table, position_ids)
            return mb.expand_dims(x=mb.transpose(x=rows, perm=[0, 2, 1]), axes=[1])

        return gathered(np.cos(angles)), gathered(np.sin(angles))

    def rotate(self, x: Any, tables: tuple[Any, Any]) -> Any:
        """Rotate halves of the head axis; *x* [1, heads, head_dim, S]."""
        mb, (cos, sin) = self.mb, tables
        first, second = mb.split(x=x, num_splits=2, axis=2)
        turned = mb.sub(x=mb.mul(x=first, y=cos), y=mb.mul(x=second, y=sin))
        other = mb.add(x=mb.mul(x=second, y=cos), y=mb.mul(x=first, y=sin))
        return mb.concat(values=[turned, other], axis=2)

    def heads(self, x: Any, count: int) -> Any:
        """[1, count * head_dim, 1, S] -> [1, count, head_dim, S]."""
        return self.mb.reshape(x=x, shape=[1, count, self.head_dim, self.width])

    def attend(self, query: Any, key: Any, value: Any, bias: Any) -> Any:
        """Scaled queries, keys and values [1, heads, head_dim, S], *bias* (query, key) -> [1, C, 1, S].

        *bias* may be a list, of one for each head.
        """
        mb = self.mb
        queries, keys, values = (
            mb.split(x=x, num_splits=count, axis=1) if count > 1 else (x,)
            for x, count in ((query, self.query_heads), (key, self.key_heads), (value, self.key_heads))
        )
        group = self.query_heads // self.key_heads
        outs = []
        for n, one in enumerate(queries):
            scores = mb.matmul(x=one, y=keys[n // group], transpose_x=True)
            weights = mb.softmax(x=mb.add(x=scores, y=bias[n] if isinstance(bias, list) else bias), axis=-1)
            outs.append(mb.matmul(x=values[n // group], y=weights, transpose_y=True))
        joined = mb.concat(values=outs, axis=1) if len(outs) > 1 else outs[0]
        return mb.reshape(x=joined, shape=[1, self.query_heads * self.head_dim, 1, self.width])

    def key_mask(self, mask: Any) -> Any:
        """int32 [1, S] of 1 and 0 -> fp16 [1, 1, 1, S] of 0 and -10,000."""
        mb = self.mb
        kept = mb.cast(x=mask, dtype="fp16")
        return mb.expand_dims(x=mb.mul(x=mb.sub(x=kept, y=np.float16(1)), y=np.float16(-MASKED)), axes=[1, 2])

    def forbidden(self, window: int | None) -> Any:
        """Constant [1, 1, S, S]: the causal triangle or the local window, None where neither applies."""
        table = attention_bias((self.width,), self.width, causal=self.rules.causal, window=window)
        return table if table.any() else None

    def hidden(self, x: Any) -> Any:
        """[1, C, 1, S] -> the output of an embedder, fp16 [1, S, C]."""
        return self.mb.transpose(x=self.mb.squeeze(x=x, axes=[2]), perm=[0, 2, 1], name=HIDDEN)

    def first(self, x: Any) -> Any:
        """[1, C, 1, S] -> the first token's state, [1, C, 1, 1]."""
        return self.mb.slice_by_size(x=x, begin=[0, 0, 0, 0], size=[1, self.config["hidden_size"], 1, 1])

    def score(self, pooled: Any) -> Any:
        """A cross-encoder's pooled state [1, C, 1, 1] -> one raw logit, fp16 [1]."""
        return self.mb.reshape(x=self.dense(pooled, "classifier"), shape=[1], name=SCORE)


def _rules(checkpoint: Checkpoint) -> InputRules:
    family, c = checkpoint.family, checkpoint.config
    types = FAMILIES[family].token_types and checkpoint.task == "rerank" and c["type_vocab_size"] > 1
    return InputRules.of(family, c, token_types=types)


def signature(checkpoint: Checkpoint, key: Key) -> FunctionSpec:
    """Return the inputs and the output of one function of a checkpoint."""
    return expected(key, _rules(checkpoint), task=checkpoint.task, hidden=checkpoint.config["hidden_size"])


def function(checkpoint: Checkpoint, key: Key, opset: Any) -> Any:
    """Return the MIL function of one bucket or one packed width, with the inputs and output of :func:`signature`.

    The family's own file writes the layers: ``EPSILON`` names its norms' epsilon in the config, ``encode`` makes the
    last hidden states [1, C, 1, S] of the inputs and the attention biases (*local* for layers with a window),
    ``pooled`` what a reranker's classifier reads. Raises ValueError for a packed reranker or a bucket above the
    position table.
    """
    from coremltools.converters.mil.mil import Builder, Function, types

    network = import_module(f"engines.ane.build.{checkpoint.family}")
    packed, width, embed = key.kind == "packed", key.tokens, checkpoint.task == "embed"
    positions = checkpoint.config["max_position_embeddings"]
    if packed and not embed:
        raise ValueError("packed functions exist for embedding models only")
    if width > positions and not packed:
        raise ValueError(f"bucket {width} is above the model's {positions} positions")
    dtypes = {"int32": types.int32, "float16": types.fp16}
    placeholders = {
        name: Builder.placeholder(shape=one.shape, dtype=dtypes[one.dtype])
        for name, one in signature(checkpoint, key).inputs.items()
    }
    graph = Graph(checkpoint, width, checkpoint.config[network.EPSILON])
    with Function(placeholders, opset_version=opset) as built:
        inputs = built.inputs
        if packed:
            bias, local = inputs["attention_bias"], inputs.get("local_bias")
        else:
            bias = graph.key_mask(inputs["attention_mask"])
            near = graph.forbidden(graph.rules.window) if graph.rules.window is not None else None
            local = bias if near is None else Builder.add(x=bias, y=near)
            far = graph.forbidden(None)
            bias = bias if far is None else Builder.add(x=bias, y=far)
        x = network.encode(graph, inputs, bias, local)
        out = graph.hidden(x) if embed else graph.score(network.pooled(graph, x, inputs["attention_mask"]))
        built.set_outputs([out])
    return built
