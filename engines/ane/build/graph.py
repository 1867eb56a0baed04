"""Encoder graphs in MIL, one function per bucket or packed width, straight from the checkpoint; no torch.

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
variance mean(x^2), and no square of a large activation ever stands in fp16.

Rotary and position tables are constants of the function, cut or gathered by ``position_ids`` in the graph: single and
packed functions read the very same fp16 values (ane.md 3.1, the rounding trap).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from engines.ane.inputs import MASKED, InputRules
from engines.ane.signature import HIDDEN, SCORE, Key, expected

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from engines.checkpoint.read import Checkpoint

    F32 = npt.NDArray[np.float32]

MIN_EPSILON: Final = 1e-7


@dataclass(frozen=True, slots=True)
class Arch:
    """What the graph needs to know, family differences spelled out."""

    family: str
    task: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    positions: int
    rules: InputRules
    local_layers: frozenset[int] = frozenset()
    """Those with an attention window; every other layer is global."""
    theta: float = 0.0
    local_theta: float = 0.0
    mean_pooled: bool = False
    """A ModernBERT reranker's head reads the mean over real positions, not the first state."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Arch:
        """Read the architecture of an encoder checkpoint (bert, modernbert, qwen3 embedding)."""
        c = checkpoint.config
        token_types = checkpoint.family == "bert" and checkpoint.task == "rerank" and c["type_vocab_size"] > 1
        common: dict[str, Any] = {
            "family": checkpoint.family,
            "task": checkpoint.task,
            "layers": c["num_hidden_layers"],
            "hidden": c["hidden_size"],
            "heads": c["num_attention_heads"],
            "kv_heads": c.get("num_key_value_heads") or c["num_attention_heads"],
            "head_dim": c["head_dim"],
            "positions": c["max_position_embeddings"],
            "rules": InputRules.of(checkpoint.family, c, token_types=token_types),
        }
        if checkpoint.family == "bert":
            return cls(**common, epsilon=c["layer_norm_eps"])
        if checkpoint.family == "modernbert":
            local = frozenset(n for n, kind in enumerate(c["layer_types"]) if kind == "sliding_attention")
            return cls(
                **common,
                epsilon=c["norm_eps"],
                local_layers=local,
                theta=c["global_rope_theta"],
                local_theta=c["local_rope_theta"],
                mean_pooled=c["classifier_pooling"] == "mean",
            )
        return cls(**common, epsilon=c["rms_norm_eps"], theta=c["rope_theta"])


class _Graph:
    """One function under construction. Weights come as fp32 by their canonical names and leave as fp16 constants."""

    def __init__(self, arch: Arch, checkpoint: Checkpoint, width: int) -> None:
        import numpy as np
        from coremltools.converters.mil.mil import Builder

        self.np, self.mb = np, Builder
        self.arch, self.get, self.tensors, self.width = arch, checkpoint.f32, checkpoint.tensors, width

    def half(self, array: Any) -> Any:
        with self.np.errstate(over="ignore"):
            value = self.np.ascontiguousarray(array, self.np.float16)
        if not self.np.isfinite(value).all():
            raise ValueError("a weight isn't finite in fp16 (largest 65,504): this checkpoint can't be built")
        return value

    def linear(self, x: Any, weight: F32, bias: F32 | None) -> Any:
        """1x1 convolution; *weight* (out, in), *x* [1, in, 1, S]."""
        extra = {} if bias is None else {"bias": self.half(bias)}
        return self.mb.conv(x=x, weight=self.half(weight[:, :, None, None]), pad_type="valid", **extra)

    def dense(self, x: Any, name: str) -> Any:
        return self.linear(x, self.get(f"{name}.weight"), self.bias(f"{name}.bias"))

    def bias(self, name: str) -> F32 | None:
        return self.get(name) if name in self.tensors else None

    def layer_norm(self, x: Any, name: str) -> Any:
        return self.normed(x, self.get(f"{name}.weight"), self.bias(f"{name}.bias"))

    def normed(self, x: Any, weight: F32, bias: F32 | None = None, axis: int = 1) -> Any:
        extra = {} if bias is None else {"beta": self.half(bias)}
        epsilon = self.np.float16(max(self.arch.epsilon, MIN_EPSILON))
        return self.mb.layer_norm(x=x, axes=[axis], gamma=self.half(weight), epsilon=epsilon, **extra)

    def rms_norm(self, x: Any, weight: F32, axis: int = 1) -> Any:
        mb, np = self.mb, self.np
        doubled = mb.concat(values=[x, mb.mul(x=x, y=np.float16(-1))], axis=axis)
        normed = self.normed(doubled, np.concatenate([weight, weight]), axis=axis)
        return mb.split(x=normed, num_splits=2, axis=axis)[0]

    def lookup(self, table: F32, ids: Any) -> Any:
        return self.mb.gather(x=self.half(table), indices=ids, axis=0, validate_indices=False)

    def channels_first(self, x: Any) -> Any:
        """[1, S, C] -> [1, C, 1, S]."""
        return self.mb.expand_dims(x=self.mb.transpose(x=x, perm=[0, 2, 1]), axes=[2])

    def rotary(self, theta: float, position_ids: Any | None) -> tuple[Any, Any]:
        """Cosine and sine [1, 1, head_dim / 2, S]: a constant for a bucket, gathered from it for a packed width."""
        np, mb, half = self.np, self.mb, self.arch.head_dim // 2
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
        return self.mb.reshape(x=x, shape=[1, count, self.arch.head_dim, self.width])

    def attend(self, query: Any, key: Any, value: Any, bias: Any) -> Any:
        """Scaled queries, keys and values [1, heads, head_dim, S], *bias* (query, key) -> [1, C, 1, S]."""
        mb, arch = self.mb, self.arch
        queries, keys, values = (
            mb.split(x=x, num_splits=count, axis=1) if count > 1 else (x,)
            for x, count in ((query, arch.heads), (key, arch.kv_heads), (value, arch.kv_heads))
        )
        group = arch.heads // arch.kv_heads
        outs = []
        for n, one in enumerate(queries):
            scores = mb.matmul(x=one, y=keys[n // group], transpose_x=True)
            weights = mb.softmax(x=mb.add(x=scores, y=bias), axis=-1)
            outs.append(mb.matmul(x=values[n // group], y=weights, transpose_y=True))
        joined = mb.concat(values=outs, axis=1) if len(outs) > 1 else outs[0]
        return mb.reshape(x=joined, shape=[1, arch.heads * arch.head_dim, 1, self.width])

    def bert(self, inputs: Any, bias: Any, local: Any) -> Any:
        mb, arch, get = self.mb, self.arch, self.get
        positions = get("embeddings.position_embeddings.weight")[: self.width]
        types = get("embeddings.token_type_embeddings.weight")
        words = self.lookup(get("embeddings.word_embeddings.weight"), inputs["input_ids"])
        if not arch.rules.token_types:
            positions = positions + types[0]
        if "position_ids" in inputs:
            words = mb.add(x=words, y=self.lookup(positions, inputs["position_ids"]))
        else:
            words = mb.add(x=words, y=self.half(positions[None]))
        if arch.rules.token_types:
            words = mb.add(x=words, y=self.lookup(types, inputs["token_type_ids"]))
        x = self.layer_norm(self.channels_first(words), "embeddings.LayerNorm")
        scale = 1.0 / math.sqrt(arch.head_dim)
        for n in range(arch.layers):
            layer = f"encoder.layer.{n}"
            attention = f"{layer}.attention.self"
            query = self.linear(x, get(f"{attention}.query.weight") * scale, get(f"{attention}.query.bias") * scale)
            key, value = self.dense(x, f"{attention}.key"), self.dense(x, f"{attention}.value")
            query, key, value = (self.heads(part, arch.heads) for part in (query, key, value))
            out = self.dense(self.attend(query, key, value, bias), f"{layer}.attention.output.dense")
            x = self.layer_norm(mb.add(x=out, y=x), f"{layer}.attention.output.LayerNorm")
            inner = mb.gelu(x=self.dense(x, f"{layer}.intermediate.dense"), mode="EXACT")
            x = self.layer_norm(mb.add(x=self.dense(inner, f"{layer}.output.dense"), y=x), f"{layer}.output.LayerNorm")
        return x

    def modernbert(self, inputs: Any, bias: Any, local: Any) -> Any:
        mb, arch, get, np = self.mb, self.arch, self.get, self.np
        words = self.lookup(get("embeddings.tok_embeddings.weight"), inputs["input_ids"])
        x = self.layer_norm(self.channels_first(words), "embeddings.norm")
        position_ids = inputs.get("position_ids")
        tables = {False: self.rotary(arch.theta, position_ids), True: self.rotary(arch.local_theta, position_ids)}
        scale = np.repeat(np.float32([1.0 / math.sqrt(arch.head_dim), 1.0, 1.0]), arch.hidden)
        for n in range(arch.layers):
            layer, near = f"layers.{n}", n in arch.local_layers
            normed = x if n == 0 else self.layer_norm(x, f"{layer}.attn_norm")
            stacked = self.bias(f"{layer}.attn.Wqkv.bias")
            weight = get(f"{layer}.attn.Wqkv.weight") * scale[:, None]
            qkv = self.linear(normed, weight, None if stacked is None else stacked * scale)
            query, key, value = (self.heads(part, arch.heads) for part in mb.split(x=qkv, num_splits=3, axis=1))
            mixed = self.attend(
                self.rotate(query, tables[near]), self.rotate(key, tables[near]), value, local if near else bias
            )
            x = mb.add(x=x, y=self.dense(mixed, f"{layer}.attn.Wo"))
            inner = self.dense(self.layer_norm(x, f"{layer}.mlp_norm"), f"{layer}.mlp.Wi")
            active, gate = mb.split(x=inner, num_splits=2, axis=1)
            x = mb.add(x=x, y=self.dense(mb.mul(x=mb.gelu(x=active, mode="EXACT"), y=gate), f"{layer}.mlp.Wo"))
        return self.layer_norm(x, "final_norm")

    def qwen3(self, inputs: Any, bias: Any, local: Any) -> Any:
        mb, arch, get = self.mb, self.arch, self.get
        x = self.channels_first(self.lookup(get("embed_tokens.weight"), inputs["input_ids"]))
        tables = self.rotary(arch.theta, inputs.get("position_ids"))
        scale = 1.0 / math.sqrt(arch.head_dim)
        for n in range(arch.layers):
            layer = f"layers.{n}"
            normed = self.rms_norm(x, get(f"{layer}.input_layernorm.weight"))
            query = self.heads(self.dense(normed, f"{layer}.self_attn.q_proj"), arch.heads)
            key = self.heads(self.dense(normed, f"{layer}.self_attn.k_proj"), arch.kv_heads)
            value = self.heads(self.dense(normed, f"{layer}.self_attn.v_proj"), arch.kv_heads)
            # Rotation keeps lengths, so the query scale can sit in the norm's weight.
            query = self.rotate(self.rms_norm(query, get(f"{layer}.self_attn.q_norm.weight") * scale, 2), tables)
            key = self.rotate(self.rms_norm(key, get(f"{layer}.self_attn.k_norm.weight"), 2), tables)
            x = mb.add(x=x, y=self.dense(self.attend(query, key, value, bias), f"{layer}.self_attn.o_proj"))
            normed = self.rms_norm(x, get(f"{layer}.post_attention_layernorm.weight"))
            gate = mb.silu(x=self.dense(normed, f"{layer}.mlp.gate_proj"))
            inner = mb.mul(x=gate, y=self.dense(normed, f"{layer}.mlp.up_proj"))
            x = mb.add(x=x, y=self.dense(inner, f"{layer}.mlp.down_proj"))
        return self.rms_norm(x, get("norm.weight"))

    def key_mask(self, mask: Any) -> Any:
        """int32 [1, S] of 1 and 0 -> fp16 [1, 1, 1, S] of 0 and -10,000."""
        mb, np = self.mb, self.np
        kept = mb.cast(x=mask, dtype="fp16")
        return mb.expand_dims(x=mb.mul(x=mb.sub(x=kept, y=np.float16(1)), y=np.float16(-MASKED)), axes=[1, 2])

    def forbidden(self, window: int | None) -> Any:
        """Constant [1, 1, S, S]: the causal triangle or the local window, None where neither applies."""
        np = self.np
        place = np.arange(self.width)
        allowed = np.ones((self.width, self.width), bool)
        if self.arch.rules.causal:
            allowed &= place[None, :] <= place[:, None]
        if window is not None:
            allowed &= np.abs(place[:, None] - place[None, :]) <= window
        return None if allowed.all() else self.half(np.where(allowed, 0.0, MASKED)[None, None])

    def hidden(self, x: Any) -> Any:
        return self.mb.transpose(x=self.mb.squeeze(x=x, axes=[2]), perm=[0, 2, 1], name=HIDDEN)

    def score(self, x: Any, mask: Any) -> Any:
        """The cross-encoder's head: [1, C, 1, S] -> one raw logit, fp16 [1]."""
        mb, arch = self.mb, self.arch
        first = mb.slice_by_size(x=x, begin=[0, 0, 0, 0], size=[1, arch.hidden, 1, 1])
        if arch.family == "bert":
            pooled = mb.tanh(x=self.dense(first, "pooler.dense"))
        else:
            if arch.mean_pooled:
                kept = mb.expand_dims(x=mb.cast(x=mask, dtype="fp16"), axes=[1, 2])
                count = mb.reduce_sum(x=kept, axes=[-1], keep_dims=True)
                # Divided before it is summed, so that no partial sum outgrows fp16.
                first = mb.reduce_sum(x=mb.mul(x=x, y=mb.real_div(x=kept, y=count)), axes=[-1], keep_dims=True)
            pooled = self.layer_norm(mb.gelu(x=self.dense(first, "head.dense"), mode="EXACT"), "head.norm")
        return mb.reshape(x=self.dense(pooled, "classifier"), shape=[1], name=SCORE)


def function(checkpoint: Checkpoint, key: Key, opset: Any) -> Any:
    """Return the MIL function of one bucket or one packed width.

    Its inputs and output are those of :func:`engines.ane.signature.expected`. Raises ValueError for a packed reranker
    or a bucket above the position table.
    """
    from coremltools.converters.mil.mil import Builder, Function, types

    arch = Arch.of(checkpoint)
    packed, width = key.kind == "packed", key.tokens
    if packed and arch.task != "embed":
        raise ValueError("packed functions exist for embedding models only")
    if width > arch.positions and not packed:
        raise ValueError(f"bucket {width} is above the model's {arch.positions} positions")
    spec = expected(key, arch.rules, task=arch.task, hidden=arch.hidden)
    dtypes = {"int32": types.int32, "float16": types.fp16}
    placeholders = {
        name: Builder.placeholder(shape=one.shape, dtype=dtypes[one.dtype]) for name, one in spec.inputs.items()
    }
    graph = _Graph(arch, checkpoint, width)
    with Function(placeholders, opset_version=opset) as built:
        inputs = built.inputs
        if packed:
            bias, local = inputs["attention_bias"], inputs.get("local_bias")
        else:
            bias = graph.key_mask(inputs["attention_mask"])
            near = graph.forbidden(arch.rules.window) if arch.rules.window is not None else None
            local = bias if near is None else Builder.add(x=bias, y=near)
            far = graph.forbidden(None)
            bias = bias if far is None else Builder.add(x=bias, y=far)
        x = getattr(graph, arch.family)(inputs, bias, local)
        built.set_outputs([graph.hidden(x) if arch.task == "embed" else graph.score(x, inputs["attention_mask"])])
    return built
