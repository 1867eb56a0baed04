"""ONNX graphs written node by node with the ``onnx`` helpers, in memory, at LOAD: no exporter, no torch.

What every family shares lives here: the builder, dense layers, norms, masks, pooling, the L2 form and the read-outs.
The families' own modules import this one.

Rules of every graph (llama-cuda.md 8.5): int32 inputs; no Shape node and no arithmetic on shapes (reshapes are
constants of 0 and -1), so no node needs the host; heads, L2 and logits in float32; raw logits out, never a sigmoid.
Weights are external initializers handed over as arrays, so a graph of any size serialises to a few kilobytes and mapped
tensors aren't copied.

The config and the tensors come from :mod:`engines.checkpoint`, which refuses a missing or misshapen one: every key that
a family needs is in the config, and exactly the tensors that the config calls for are in the store. So a layer has a
bias where the store has one, and no shape is stated here again.
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
FLOAT16_MAX: Final = 65504.0


@dataclass(frozen=True, slots=True)
class Variant:
    """Which graph of a model: *precision* of storage and products, *attention* operators, *window* layers present.

    ``plain``: standard operators only. ``fused``: the CUDA provider's attention and skip-norm operators, right-padded
    rows. ``packed``: the same for rows end to end without padding. ``window``: layers with a sliding window run in
    blocks, S is a multiple of the half window; without it S must be so small that the window covers every pair.
    ``int8``: the layers' matrices are int8 (:mod:`engines.cuda.graphs.int8`); plain, and float32 otherwise.
    """

    precision: Precision = "f32"
    attention: Attention = "plain"
    window: bool = False
    int8: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as its manifest describes it, in plain values: what graphs are built and requests are checked by.

    ``config`` is completed by :mod:`engines.checkpoint.read`. ``pooling`` and ``normalize`` are an embedder's, ``head``
    is a reranker's. ``separator`` is the id after which token type 1 begins, None where token types don't matter.
    """

    family: str
    task: str
    dims: int
    config: Mapping[str, Any]
    max_tokens: int
    pooling: str = "cls"
    normalize: bool = False
    head: Mapping[str, Any] = field(default_factory=dict)
    pad_id: int = 0
    separator: int | None = None


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

    def __init__(
        self, tensors: Mapping[str, Array], precision: Precision, on_tensor: Callable[[], object] = lambda: None
    ) -> None:
        self.tensors = tensors
        self.dtype = np.dtype(np.float16 if precision == "f16" else np.float32)
        self._cache: dict[str, Array] = {}
        self._on_tensor = on_tensor

    def get(self, key: str, make: Callable[[], Array], *, f32: bool = False) -> Array:
        """Return the array cached as *key*, else make it, in the storage dtype (float32 where asked; int8 stays)."""
        if key not in self._cache:
            array = np.asarray(make())
            dtype = array.dtype if array.dtype == np.int8 else np.dtype(np.float32) if f32 else self.dtype
            if dtype == np.float16 and array.dtype != np.float16:
                # 6.4.6: beyond 65504 a float16 is infinity without a word. Refuse it here, by name.
                peak = float(np.abs(array).max(initial=0.0))
                if not peak <= FLOAT16_MAX:
                    raise EngineError(ErrorCode.ARTIFACT_INVALID, f"{key} holds {peak:g}, beyond float16's range")
            self._cache[key] = np.require(array, dtype, "C")
            self._on_tensor()
        return self._cache[key]

    def not_finite(self) -> str | None:
        """Return the name of a converted tensor that holds NaN or infinity; None where all are finite."""
        floats = ((name, array) for name, array in self._cache.items() if array.dtype.kind == "f")
        return next((name for name, array in floats if not np.isfinite(array).all()), None)


class GraphBuilder:
    """Collects nodes and weights; every method returns the name of a value."""

    def __init__(self, spec: ModelSpec, store: WeightStore, variant: Variant) -> None:
        from onnx import TensorProto, helper, numpy_helper

        self.spec, self.config, self.store, self.variant = spec, spec.config, store, variant
        self._helper, self._numpy, self._proto = helper, numpy_helper, TensorProto
        self._nodes: list[Any] = []
        self._initializers: dict[str, Any] = {}
        self._weights: dict[str, Array] = {}
        self._inputs: dict[str, Any] = {}
        self._counter = 0
        self._shared: dict[Any, str] = {}

    # -- values ------------------------------------------------------------------------------------------------------

    def input(self, name: str, shape: Sequence[str | int]) -> str:
        """Return an int32 graph input, declared where a node reads it."""
        self._inputs[name] = self._helper.make_tensor_value_info(name, self._proto.INT32, list(shape))
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

    def weight(self, name: str, *, f32: bool = False) -> str:
        """Return a checkpoint tensor as it is stored."""
        return self.derived(name, lambda: self.store.tensors[name], f32=f32)

    def derived(self, key: str, make: Callable[[], Array], *, f32: bool = False) -> str:
        """Return a tensor made of checkpoint tensors once (transposed, joined, scaled) under *key*."""
        key = key + ":f32" if f32 and self.variant.precision == "f16" else key
        if key not in self._weights:
            array = self._weights[key] = self.store.get(key, make, f32=f32)
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
                if node.op_type == "SkipLayerNormalization" and node.output[3] not in read:
                    del node.output[1:]  # else the kernel writes the sum as well
                nodes.append(node)
                read.update(node.input)
        inputs = {key: info for key, info in self._inputs.items() if key in read}
        output = self._helper.make_tensor_value_info(name, self._proto.FLOAT, list(shape))
        initializers = [initializer for key, initializer in self._initializers.items() if key in read]
        graph = self._helper.make_graph(nodes[::-1], "model", list(inputs.values()), [output], initializers)
        opset = OPSET_INT8 if self.variant.int8 else OPSET
        opsets = [self._helper.make_opsetid("", opset), self._helper.make_opsetid(CONTRIB, 1)]
        model = self._helper.make_model(
            graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="synapse-workers"
        )
        weights = {key: array for key, array in self._weights.items() if key in read}
        return Graph(model.SerializeToString(deterministic=True), weights, tuple(inputs), name, self.variant)

    # -- layers ------------------------------------------------------------------------------------------------------

    def product(self, x: str, name: str, *, factor: float = 1.0, f32: bool = False) -> str:
        """Multiply by a dense layer's weight, stored (out, in) by the checkpoint, times *factor*; no bias."""
        return self.op("MatMul", x, self._scaled(name + ".weight", ":T", factor, f32=f32))

    def dense(self, x: str, name: str, *, factor: float = 1.0, f32: bool = False) -> str:
        """Apply a dense layer times *factor*, with its bias where it has one."""
        y = self.product(x, name, factor=factor, f32=f32)
        return self.add(y, self._scaled(name + ".bias", "", factor, f32=f32)) if self.biased(name) else y

    def _scaled(self, name: str, suffix: str, factor: float, *, f32: bool) -> str:
        def make() -> Array:
            array = self.store.tensors[name]
            return (array if factor == 1.0 else np.asarray(array, np.float32) * np.float32(factor)).T

        return self.derived(name + suffix + ("" if factor == 1.0 else f"*{factor!r}"), make, f32=f32)

    def joined(self, x: str, key: str, *names: str) -> tuple[str, str]:
        """Return one product with several layers' weights side by side, and their biases likewise, "" without any."""

        def make(part: str) -> Array:
            return np.concatenate([self.store.tensors[name + part] for name in names], axis=0).T

        y = self.op("MatMul", x, self.derived(key + ".weight:T", lambda: make(".weight")))
        return y, self.derived(key + ".bias", lambda: make(".bias")) if self.biased(names[0]) else ""

    def biased(self, name: str) -> bool:
        """Return whether a layer has a bias."""
        return name + ".bias" in self.store.tensors

    def add(self, x: str, y: str) -> str:
        """Add two values."""
        return self.op("Add", x, y)

    def norm(self, x: str, name: str, *, eps: float, f32: bool = False) -> str:
        """LayerNorm over the last axis, statistics in float32."""
        inputs = [x, self.weight(name + ".weight", f32=f32)]
        if self.biased(name):
            inputs.append(self.weight(name + ".bias", f32=f32))
        return self.op("LayerNormalization", *inputs, axis=-1, epsilon=float(eps), stash_type=1)

    def add_and_norm(self, x: str, skip: str, name: str, *, eps: float, bias: str | None = None) -> tuple[str, str]:
        """Return the sum of *x*, *skip* and *bias*, and its LayerNorm: one kernel where the variant has it."""
        if self.variant.attention == "plain":
            total = self.add(self.add(x, bias) if bias else x, skip)
            return total, self.norm(total, name, eps=eps)
        beta = self.weight(name + ".bias") if self.biased(name) else ""
        inputs = [x, skip, self.weight(name + ".weight"), beta, bias or ""]
        out = self.ops("SkipLayerNormalization", *inputs, outputs=4, unused=(1, 2), domain=CONTRIB, epsilon=float(eps))
        return out[3], out[0]

    def gelu(self, x: str) -> str:
        """Gelu by the exact error function."""
        return self.op("Gelu", x, approximate="none")

    def swiglu(self, x: str, key: str, gate: str, up: str) -> str:
        """Return the activated gate times the other half: both layers in one product, stored under *key*."""
        both, bias = self.joined(x, key, gate, up)
        first, second = self.ops("Split", self.add(both, bias) if bias else both, axis=2, num_outputs=2, outputs=2)
        if self.variant.attention == "fused":
            active = self.op("QuickGelu", first, domain=CONTRIB, alpha=1.0)
        else:
            active = self.op("Mul", first, self.op("Sigmoid", first))
        return self.op("Mul", active, second)

    def float32(self, x: str) -> str:
        """Cast to float32 where the body computes in float16."""
        return x if self.variant.precision == "f32" else self.cast(x, "f32")

    def narrow(self, x: str) -> str:
        """Cast float32 to the dtype that the body computes in."""
        return x if self.variant.precision == "f32" else self.cast(x, "f16")

    def cast(self, x: str, to: Literal["f16", "f32", "f64", "i32", "i64"]) -> str:
        """Cast to a named dtype."""
        proto = self._proto
        kinds = {"f16": proto.FLOAT16, "f32": proto.FLOAT, "f64": proto.DOUBLE, "i32": proto.INT32, "i64": proto.INT64}
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
        if pooling == "last":
            return self.float32(self.last_states(states, lens))
        # Weights 1/len at real positions and 0 elsewhere: one small product, and padding can't leak into it.
        count = self.op("Unsqueeze", self.cast(lens, "f32"), self.ints(1))
        weights = self.op("Div", self.cast(real, "f32"), count)
        pooled = self.op("MatMul", self.op("Unsqueeze", weights, self.ints(1)), self.float32(states))
        return self.op("Squeeze", pooled, self.ints(1))

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

    def split_heads(self, x: str, heads: int, head_dim: int) -> str:
        """(B, S, heads·d) -> (B, heads, S, d)."""
        return self.op("Transpose", self.op("Reshape", x, self.ints(0, 0, heads, head_dim)), perm=[0, 2, 1, 3])

    def join_heads(self, x: str, width: int) -> str:
        """(B, heads, S, d) -> (B, S, heads·d)."""
        return self.op("Reshape", self.op("Transpose", x, perm=[0, 2, 1, 3]), self.ints(0, 0, width))

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

    def rotary(self, theta: float, head_dim: int, length: int) -> tuple[str, str]:
        """Return cos and sin, float (length, head_dim / 2), of half-split rotation: frequency_i = theta ** (-2i / d).

        Angles are computed in float64 and rounded once (6.4.5); one pair for each theta.
        """

        def table(wave: Callable[[Array], Array]) -> Array:
            frequencies = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
            return wave(np.arange(length, dtype=np.float64)[:, None] * frequencies).astype(np.float32)

        cos = self.derived(f"rope.cos.{theta:g}", lambda: table(np.cos))
        return cos, self.derived(f"rope.sin.{theta:g}", lambda: table(np.sin))

    def rotate(self, x: str, tables: tuple[str, str], positions: str) -> str:
        """Rotate (B, heads, S, d) by position, half-split."""
        cos, sin = (self.once("Gather", table, positions, axis=0) for table in tables)
        first, second = self.ops("Split", x, axis=-1, num_outputs=2, outputs=2)
        left = self.op("Sub", self.op("Mul", first, cos), self.op("Mul", second, sin))
        right = self.add(self.op("Mul", second, cos), self.op("Mul", first, sin))
        return self.op("Concat", left, right, axis=-1)
