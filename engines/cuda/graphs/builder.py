"""ONNX graphs written node by node with the ``onnx`` helpers, in memory, at LOAD: no exporter, no torch.

What every family shares lives here: the builder, dense layers, norms, masks, pooling, the L2 form and the read-outs.
The families' own modules import this one.

Rules of every graph (llama-cuda.md 8.5): int32 inputs; no Shape node and no arithmetic on shapes (reshapes are
constants of 0 and -1), so no node needs the host; heads, L2 and logits in float32; raw logits out, never a sigmoid.
Weights are external initializers handed over as arrays, so a graph of any size serialises to a few kilobytes and mapped
tensors aren't copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from engines.protocol.errors import EngineError, ErrorCode

Array = npt.NDArray[Any]

OPSET: Final = 20
"""Standard operators: 20 brought Gelu; LayerNormalization is older."""
OPSET_INT8: Final = 21
"""21 brought quantisation in blocks: a range a row."""
IR_VERSION: Final = 10
CONTRIB: Final = "com.microsoft"

Precision = Literal["f32", "f16"]
Attention = Literal["plain", "fused", "packed"]
MASKED: Final = -10000.0
"""Additive mask value (llama-cuda.md 6.4.4): finite in float16, and exp() of it is 0."""


@dataclass(frozen=True, slots=True)
class Variant:
    """Which graph of a model: *precision* of storage and products, *attention* operators, *window* layers present.

    ``plain``: standard operators only. ``fused``: the CUDA provider's attention and skip-norm operators, right-padded
    rows. ``packed``: the same for rows end to end without padding (BERT). ``window``: ModernBERT's local layers run in
    blocks, S is a multiple of the half window; without it S must be so small that the window covers every pair.
    """

    precision: Precision = "f32"
    attention: Attention = "plain"
    window: bool = False
    int8: bool = False
    """The layers' matrices are int8 (:mod:`engines.cuda.graphs.int8`); BERT, plain, float32 otherwise."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the builders need to know of a manifest: plain values, so that tests make them by hand."""

    family: str
    task: str
    dims: int
    config: Mapping[str, Any]
    pooling: str = "mean"
    normalize: bool = True
    token_types: bool = False
    head: Mapping[str, Any] = field(default_factory=dict)

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number of the checkpoint's config."""
        return int(self.value(key, default))

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number; manifests store non-integers as strings."""
        return float(self.value(key, default))

    def value(self, key: str, default: Any = None) -> Any:
        """Return a config value; a missing one without a default is ``artifact_invalid``."""
        found = self.config.get(key)
        if found is None:
            if default is None:
                raise EngineError(ErrorCode.ARTIFACT_INVALID, f"the model's config lacks {key!r}")
            return default
        return found


@dataclass(frozen=True, slots=True)
class Graph:
    """A finished graph. ``model``: serialised ModelProto; ``weights``: name -> array, the external initializers.

    ``inputs``: only what a node reads. An input that no node reads would be copied to the host in every run on CUDA.
    """

    model: bytes
    weights: dict[str, Array]
    inputs: tuple[str, ...]
    output: str
    variant: Variant


class WeightStore:
    """Tensors of one checkpoint, converted once and shared by every graph of the model.

    ``on_tensor`` is called after each finished conversion: one unit of LOAD's progress.
    """

    def __init__(self, tensors: Mapping[str, Array], precision: Precision, on_tensor: Callable[[], None] | None = None):
        self.tensors = tensors
        self.dtype = np.dtype(np.float16 if precision == "f16" else np.float32)
        self._cache: dict[str, Array] = {}
        self._on_tensor = on_tensor

    def raw(self, name: str, shape: tuple[int, ...] | None = None) -> Array:
        """Return a stored tensor, its shape checked; a missing or misshapen one is ``artifact_invalid``."""
        try:
            array = self.tensors[name]
        except KeyError:
            raise EngineError(ErrorCode.ARTIFACT_INVALID, f"head_tensor_missing: the package lacks {name}") from None
        if shape is not None and tuple(array.shape) != shape:
            raise EngineError(
                ErrorCode.ARTIFACT_INVALID, f"head_tensor_missing: {name} is {tuple(array.shape)}, expected {shape}"
            )
        return array

    def get(self, key: str, make: Callable[[], Array], *, f32: bool = False, int8: bool = False) -> Array:
        """Return the array cached as *key*, else make it in the storage dtype (float32 or int8 where asked)."""
        array = self._cache.get(key)
        if array is None:
            array = np.asarray(make())
            dtype = np.dtype(np.int8) if int8 else np.dtype(np.float32) if f32 else self.dtype
            if dtype == np.float16 and array.dtype != np.float16:
                # 6.4.6: beyond 65504 a float16 is infinity without a word. Refuse it here, by name.
                peak = float(np.abs(array).max(initial=0.0))
                if not peak <= 65504.0:
                    raise EngineError(ErrorCode.ARTIFACT_INVALID, f"{key} holds {peak:g}, beyond float16's range")
            array = np.require(array, dtype, "C")
            self._cache[key] = array
            if self._on_tensor is not None:
                self._on_tensor()
        return array

    def not_finite(self) -> str | None:
        """Return the name of a converted tensor that holds NaN or infinity; None where all are finite."""
        for name, array in self._cache.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                return name
        return None


class GraphBuilder:
    """Collects nodes and weights; every method returns the name of a value."""

    def __init__(self, spec: ModelSpec, store: WeightStore, variant: Variant) -> None:
        from onnx import TensorProto, helper, numpy_helper

        self.spec = spec
        self.store = store
        self.variant = variant
        self._helper, self._numpy, self._proto = helper, numpy_helper, TensorProto
        self.float_type: int = TensorProto.FLOAT16 if variant.precision == "f16" else TensorProto.FLOAT
        self._nodes: list[Any] = []
        self._initializers: dict[str, Any] = {}
        self._weights: dict[str, Array] = {}
        self._inputs: list[Any] = []
        self._counter = 0
        self._shared: dict[Any, str] = {}

    # -- values ------------------------------------------------------------------------------------------------------

    def input(self, name: str, shape: Sequence[str | int]) -> str:
        """Return an int32 graph input, declared where a node reads it."""
        if all(info.name != name for info in self._inputs):
            self._inputs.append(self._helper.make_tensor_value_info(name, self._proto.INT32, list(shape)))
        return name

    def ints(self, *values: int) -> str:
        """Return an int64 vector constant (axes, shapes, starts)."""
        return self.constant("i_" + "_".join(str(v).replace("-", "m") for v in values), np.array(values, np.int64))

    def scalar(self, value: float, kind: Literal["f", "f32", "f64", "i32"] = "f") -> str:
        """Return a constant of shape (1,), in the compute dtype unless *kind* says otherwise."""
        names = {"f": self.store.dtype.name, "f32": "float32", "f64": "float64", "i32": "int32"}
        array = np.array([value], np.dtype(names[kind]))
        return self.constant(f"c_{array.dtype.name}_{value!r}", array)

    def constant(self, name: str, array: Array) -> str:
        """Return a small constant stored inside the graph."""
        if name not in self._initializers:
            self._initializers[name] = self._numpy.from_array(array, name)
        return name

    def weight(self, name: str, shape: tuple[int, ...] | None = None, *, f32: bool = False) -> str:
        """Return a checkpoint tensor as it is stored."""
        return self.derived(name, lambda: self.store.raw(name, shape), f32=f32)

    def derived(self, key: str, make: Callable[[], Array], *, f32: bool = False, int8: bool = False) -> str:
        """Return a tensor made of checkpoint tensors once (transposed, joined, scaled) under *key*."""
        key = key + ":f32" if f32 and self.variant.precision == "f16" else key
        array = self.store.get(key, make, f32=f32, int8=int8)
        if key not in self._weights:
            self._weights[key] = array
            proto = self._proto(name=key, data_type=self._helper.np_dtype_to_tensor_dtype(array.dtype))
            proto.dims.extend(array.shape)
            proto.data_location = self._proto.EXTERNAL
            for k, v in (("location", "memory"), ("offset", "0"), ("length", str(array.nbytes))):
                proto.external_data.add(key=k, value=v)
            self._initializers[key] = proto
        return key

    def op(self, kind: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """Add a node with one output and return the output's name."""
        return self.ops(kind, *inputs, outputs=1, domain=domain, **attributes)[0]

    def once(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Like :meth:`op`, but the same call returns the same value."""
        key = (kind, *inputs, *sorted(attributes.items()))
        if key not in self._shared:
            self._shared[key] = self.op(kind, *inputs, **attributes)
        return self._shared[key]

    def ops(
        self, kind: str, *inputs: str, outputs: int, domain: str = "", unused: Sequence[int] = (), **attributes: Any
    ) -> list[str]:
        """Add a node with several outputs; those in *unused* are left empty."""
        self._counter += 1
        names = [f"{kind}_{self._counter}" + (f"_{i}" if outputs > 1 else "") for i in range(outputs)]
        names = ["" if i in unused else name for i, name in enumerate(names)]
        node = self._helper.make_node(kind, list(inputs), names, name=f"n{self._counter}_{kind}", domain=domain)
        for key, value in attributes.items():
            node.attribute.append(self._helper.make_attribute(key, value))
        self._nodes.append(node)
        return names

    def finish(self, value: str, name: str, shape: Sequence[str | int]) -> Graph:
        """Name the float32 output and serialise what leads to it: nodes, inputs and weights that nothing reads go."""
        self._nodes.append(self._helper.make_node("Identity", [value], [name], name="output"))
        read, nodes = {name}, []
        for node in reversed(self._nodes):  # they are in the order of their making: a reader comes after its inputs
            if read.intersection(node.output):
                nodes.append(node)
                read.update(node.input)
        inputs = [info for info in self._inputs if info.name in read]
        output = self._helper.make_tensor_value_info(name, self._proto.FLOAT, list(shape))
        initializers = [initializer for key, initializer in self._initializers.items() if key in read]
        title = f"{self.spec.family}-{self.spec.task}"
        graph = self._helper.make_graph(nodes[::-1], title, inputs, [output], initializers)
        opset = OPSET_INT8 if self.variant.int8 else OPSET
        opsets = [self._helper.make_opsetid("", opset), self._helper.make_opsetid(CONTRIB, 1)]
        model = self._helper.make_model(
            graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="synapse-workers"
        )
        weights = {key: array for key, array in self._weights.items() if key in read}
        names = tuple(info.name for info in inputs)
        return Graph(model.SerializeToString(deterministic=True), weights, names, name, self.variant)

    # -- layers ------------------------------------------------------------------------------------------------------

    def linear(self, x: str, name: str, *, out: int, into: int, f32: bool = False, factor: float = 1.0) -> str:
        """Multiply by a dense layer's weight, stored (out, in) by the checkpoint, times *factor*; no bias."""
        key = f"{name}:T" if factor == 1.0 else f"{name}:T*{factor!r}"
        return self.op("MatMul", x, self.derived(key, lambda: self._scaled(name, (out, into), factor).T, f32=f32))

    def bias(self, x: str, name: str, out: int, *, factor: float = 1.0) -> str:
        """Add a dense layer's bias, stored (out,), times *factor*."""
        key = name if factor == 1.0 else f"{name}*{factor!r}"
        return self.add(x, self.derived(key, lambda: self._scaled(name, (out,), factor)))

    def _scaled(self, name: str, shape: tuple[int, ...], factor: float) -> Array:
        array = self.store.raw(name, shape)
        return array if factor == 1.0 else np.asarray(array, np.float32) * np.float32(factor)

    def add(self, x: str, y: str) -> str:
        """Add two values."""
        return self.op("Add", x, y)

    def layer_norm(self, x: str, prefix: str, *, eps: float, bias: bool, f32: bool = False) -> str:
        """Normalise over the last axis, statistics in float32."""
        hidden = self.spec.integer("hidden_size")
        inputs = [x, self.weight(prefix + ".weight", (hidden,), f32=f32)]
        if bias:
            inputs.append(self.weight(prefix + ".bias", (hidden,), f32=f32))
        return self.op("LayerNormalization", *inputs, axis=-1, epsilon=float(eps), stash_type=1)

    def skip_layer_norm(self, x: str, skip: str, prefix: str, *, eps: float, bias: str | None) -> str:
        """Normalise ``x + skip (+ bias)``: one kernel where the variant has it."""
        hidden = self.spec.integer("hidden_size")
        gamma, beta = self.weight(prefix + ".weight", (hidden,)), self.weight(prefix + ".bias", (hidden,))
        if self.variant.attention == "plain":
            total = self.add(self.add(x, bias) if bias else x, skip)
            return self.op("LayerNormalization", total, gamma, beta, axis=-1, epsilon=float(eps), stash_type=1)
        inputs = [x, skip, gamma, beta] + ([bias] if bias else [])
        return self.op("SkipLayerNormalization", *inputs, domain=CONTRIB, epsilon=float(eps))

    def gelu(self, x: str) -> str:
        """Gelu by the exact error function."""
        return self.op("Gelu", x, approximate="none")

    def float32(self, x: str) -> str:
        """Cast to float32 where the body computes in float16."""
        return x if self.variant.precision == "f32" else self.op("Cast", x, to=self._proto.FLOAT)

    def cast(self, x: str, to: Literal["f", "f32", "f64", "i32", "i64"]) -> str:
        """Cast to the compute dtype or a named one."""
        kinds = {
            "f": self.float_type, "f32": self._proto.FLOAT, "f64": self._proto.DOUBLE,
            "i32": self._proto.INT32, "i64": self._proto.INT64,
        }  # fmt: skip
        return self.op("Cast", x, to=kinds[to])

    # -- masks -------------------------------------------------------------------------------------------------------

    def real_positions(self, positions: str, lens: str) -> str:
        """Return bool (B, S): column < length. Never derived from the pad id (6.4.1)."""
        return self.op("Less", positions, self.op("Unsqueeze", lens, self.ints(1)))

    def additive(self, real: str) -> str:
        """Return 0 where *real*, the finite mask value elsewhere, in the compute dtype."""
        return self.op("Where", real, self.scalar(0.0), self.scalar(MASKED))

    # -- output stage (6.6) ------------------------------------------------------------------------------------------

    def pool(self, states: str, real: str, lens: str, pooling: str) -> str:
        """Return float32 (B, H) of states (B, S, H): ``cls``, ``mean`` over real positions, or the ``last``."""
        if pooling == "cls":
            return self.float32(self.op("Gather", states, self.constant("zero", np.array(0, np.int64)), axis=1))
        if pooling == "mean":
            # Weights 1/len at real positions and 0 elsewhere: one small product, and padding can't leak into it.
            count = self.op("Unsqueeze", self.cast(lens, "f32"), self.ints(1))
            weights = self.op("Div", self.cast(real, "f32"), count)
            pooled = self.op("MatMul", self.op("Unsqueeze", weights, self.ints(1)), self.float32(states))
            return self.op("Squeeze", pooled, self.ints(1))
        if pooling == "last":
            return self.float32(self.last_states(states, lens))
        raise EngineError(ErrorCode.MODEL_UNSUPPORTED, f"pooling {pooling!r} is not mean, cls or last")

    def last_states(self, states: str, lens: str) -> str:
        """Return (B, H): each row's state at its last real position."""
        last = self.cast(self.op("Sub", lens, self.scalar(1, "i32")), "i64")
        return self.op("GatherND", states, self.op("Unsqueeze", last, self.ints(1)), batch_dims=1)

    def embedding(self, pooled: str) -> Graph:
        """Finish an embedding graph, with L2 where the manifest asks: norm in float64, at least 1e-12 (6.6)."""
        if self.spec.normalize:
            # v·v as a product: the GPU's reductions would need cuDNN, which nothing else here does.
            wide = self.cast(pooled, "f64")
            square = self.op(
                "MatMul", self.op("Unsqueeze", wide, self.ints(1)), self.op("Unsqueeze", wide, self.ints(2))
            )
            norm = self.op("Sqrt", self.op("Squeeze", square, self.ints(2)))
            norm = self.cast(self.op("Max", norm, self.scalar(1e-12, "f64")), "f32")
            pooled = self.op("Div", pooled, norm)
        return self.finish(pooled, "embedding", ["B", self.spec.dims])

    def logit(self, values: str) -> Graph:
        """Finish a reranking graph with raw logits (B, 1)."""
        return self.finish(values, "logits", ["B", 1])

    # -- attention ---------------------------------------------------------------------------------------------------

    def heads_first(self, x: str) -> str:
        """(B, S, heads, d) -> (B, heads, S, d)."""
        return self.op("Transpose", x, perm=[0, 2, 1, 3])

    def attend(self, q: str, k: str, v: str, mask: str, *, rank: int = 4) -> str:
        """Plain attention on (…, S, d) operands of *rank*; *q* is already scaled, *mask* additive and broadcast."""
        scores = self.op("MatMul", q, self.op("Transpose", k, perm=[*range(rank - 2), rank - 1, rank - 2]))
        scores = self.add(scores, mask)
        return self.op("MatMul", self.op("Softmax", scores, axis=-1), v)

    def attend_by_length(self, q: str, k: str, v: str, lens: str, *more: str, **attributes: Any) -> str:
        """GroupQueryAttention on right-padded (B, S, heads·d): keys beyond a row's length are left out, no mask.

        *more*: the operator's further inputs, rotary tables first. Keeps the flash kernel, which a mask would not.
        """
        # The CUDA kernel refuses a node without present_key and present_value, though nothing here reads them.
        seqlens = self.once("Sub", lens, self.scalar(1, "i32"))
        total = self.input("max_len", [1])
        inputs = (q, k, v, "", "", seqlens, total, *more)
        return self.ops("GroupQueryAttention", *inputs, outputs=3, domain=CONTRIB, **attributes)[0]

    def join_heads(self, x: str, hidden: int) -> str:
        """(B, heads, S, d) -> (B, S, heads·d)."""
        return self.op("Reshape", self.heads_first(x), self.ints(0, 0, hidden))


def rope_tables(theta: float, head_dim: int, length: int) -> tuple[Array, Array]:
    """Return cos and sin, float32 (length, head_dim / 2), of half-split rotation: frequency_i = theta ** (-2i / d).

    Angles are computed in float64 and rounded once (6.4.5).
    """
    frequencies = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    angles = np.arange(length, dtype=np.float64)[:, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
