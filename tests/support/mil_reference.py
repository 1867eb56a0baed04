"""Runs a saved Core ML package op by op with numpy. Tests only: it proves graphs and wiring, never Neural Engine
numbers.

Products and sums are taken in float64 and each result is rounded to the dtype that the program declares (fp16), so
range and NaN bugs show, while the order of a sum cannot: whatever a row's neighbours or padding are, equal inputs give
equal bits unless a value really leaked. (fp32 accumulation would depend on how the BLAS cuts a matrix.)
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from engines.ane.backend import Source
from engines.ane.build.package import load_proto, read_spec
from engines.ane.signature import FunctionSpec

ENGINE = "ane-reference"
Env = dict[Any, Any]


def _wide(value: Any) -> np.ndarray:
    return np.asarray(value, np.float64)


@cache
def _gelu_table() -> np.ndarray:
    """Return what GELU makes of every fp16 number, by its bits."""
    bits = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float64)
    return np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) if math.isfinite(v) else v for v in bits])


def _gelu(x: np.ndarray) -> np.ndarray:
    return _gelu_table()[np.asarray(x, np.float16).view(np.uint16)]


def _softmax(x: np.ndarray, axis: int) -> np.ndarray:
    wide = _wide(x)
    exp = np.exp(wide - wide.max(axis=axis, keepdims=True))
    return exp / exp.sum(axis=axis, keepdims=True)


def _layer_norm(x: np.ndarray, axes: Any, gamma: Any, beta: Any, epsilon: float) -> np.ndarray:
    axes = tuple(int(a) for a in axes)
    wide = _wide(x)
    mean = wide.mean(axis=axes, keepdims=True)
    var = ((wide - mean) ** 2).mean(axis=axes, keepdims=True)
    out = (wide - mean) / np.sqrt(var + float(epsilon))
    shape = [x.shape[a] if a in axes else 1 for a in range(x.ndim)]
    if gamma is not None:
        out = out * _wide(gamma).reshape(shape)
    return out if beta is None else out + _wide(beta).reshape(shape)


class Function:
    """One function of a package, ready to run."""

    def __init__(self, operations: list[Any], inputs: dict[str, Any], outputs: list[Any]) -> None:
        self.operations, self._inputs, self.outputs = operations, inputs, outputs
        self._weights: dict[str, np.ndarray] = {}
        self.rounded = True
        """False: results keep float64, for telling what rounding to the declared dtype does."""
        self.peak = 0.0
        """Largest finite magnitude of any float result so far."""

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        if set(feeds) != set(self._inputs):
            raise ValueError(f"inputs {sorted(feeds)}, the function takes {sorted(self._inputs)}")
        values: Env = {}
        for name, var in self._inputs.items():
            declared = tuple(var.shape)
            if tuple(feeds[name].shape) != declared:
                raise ValueError(f"{name} has shape {feeds[name].shape}, declared {declared}")
            values[var] = feeds[name]
        with np.errstate(over="ignore", invalid="ignore"):
            for op in self.operations:
                self._evaluate(op, values)
        return {var.name: values[var] for var in self.outputs}

    def _evaluate(self, op: Any, values: Env) -> None:
        if op.op_type == "const":
            values[op.outputs[0]] = op.outputs[0].val
            return

        def value(name: str, default: Any = None) -> Any:
            var = op.inputs.get(name)
            if var is None:
                return default
            if isinstance(var, (list, tuple)):
                return [values.get(v, v.val) for v in var]
            return values.get(var, var.val)

        rule = _RULES.get(op.op_type)
        if rule is not None:
            result = rule(self, op, value)
        else:
            # coremltools' own inference, on the values that were fed.
            names = [v for var in op.inputs.values() for v in (var if isinstance(var, (list, tuple)) else [var])]
            saved = [(v, v._sym_val) for v in names if v in values and v.val is None]
            for var, _ in saved:
                var._sym_val = _Boxed(values[var])
            try:
                result = op.value_inference()
            finally:
                for var, old in saved:
                    var._sym_val = old
        if result is None:
            raise NotImplementedError(f"no rule for {op.op_type}")
        results = result if isinstance(result, (list, tuple)) else [result]
        for var, one in zip(op.outputs, results, strict=True):
            from coremltools.converters.mil.mil import types

            dtype = np.dtype(types.nptype_from_builtin(var.dtype))
            floating = dtype.kind == "f"
            array = np.asarray(one, np.float64 if floating and not self.rounded else dtype)
            if floating and array.size:
                self.peak = max(self.peak, float(np.abs(np.where(np.isfinite(array), array, 0)).max()))
            assert array.shape == tuple(var.shape), (op.op_type, array.shape, var.shape)
            values[var] = array

    def weight(self, op: Any, raw: Any) -> np.ndarray:
        if op.name not in self._weights:
            self._weights[op.name] = _wide(raw)
        return self._weights[op.name]


class _Boxed:
    """What ``Var.val`` unwraps: an object whose ``val`` is the array."""

    def __init__(self, val: np.ndarray) -> None:
        self.val = val


def _conv(f: Function, op: Any, value: Callable[..., Any]) -> np.ndarray:
    x, weight = value("x"), value("weight")
    assert weight.shape[2:] == (1, 1) and x.shape[2] == 1, "only 1x1 convolutions over [1, C, 1, S]"
    out = f.weight(op, weight)[:, :, 0, 0] @ _wide(x[0, :, 0, :])
    bias = value("bias")
    if bias is not None:
        out = out + _wide(bias)[:, None]
    return out[None, :, None, :]


def _matmul(f: Function, op: Any, value: Callable[..., Any]) -> np.ndarray:
    x, y = _wide(value("x")), _wide(value("y"))
    x = np.swapaxes(x, -1, -2) if value("transpose_x", False) else x
    y = np.swapaxes(y, -1, -2) if value("transpose_y", False) else y
    return x @ y


_RULES: dict[str, Callable[[Function, Any, Callable[..., Any]], Any]] = {
    "conv": _conv,
    "matmul": _matmul,
    "softmax": lambda f, op, v: _softmax(v("x"), int(v("axis"))),
    "layer_norm": lambda f, op, v: _layer_norm(v("x"), v("axes"), v("gamma"), v("beta"), v("epsilon")),
    "gelu": lambda f, op, v: _gelu(v("x")),
    "silu": lambda f, op, v: _wide(v("x")) / (1 + np.exp(-_wide(v("x")))),
    "gather": lambda f, op, v: np.take(v("x"), v("indices"), axis=int(v("axis"))),
    "reduce_sum": lambda f, op, v: _wide(v("x")).sum(axis=tuple(v("axes")), keepdims=bool(v("keep_dims"))),
    "cast": lambda f, op, v: v("x"),
}


def load(package: Path, function: str = "main") -> Function:
    """Load one function of a ``.mlpackage``."""
    from coremltools.converters.mil.frontend.milproto.load import load as load_program

    logging.getLogger("coremltools").setLevel(logging.ERROR)
    proto = load_proto(package)
    for name in [n for n in proto.mlProgram.functions if n != function]:
        del proto.mlProgram.functions[name]
    for index in reversed([i for i, f in enumerate(proto.description.functions) if f.name != function]):
        del proto.description.functions[index]
    weights = package / "Data" / "com.apple.CoreML" / "weights"
    with np.errstate(all="ignore"):
        program = load_program(proto, proto.specificationVersion, str(weights))
    built = program.functions[function]
    return Function(list(built.operations), dict(built.inputs), list(built.outputs))


# Reading a program takes coremltools most of a second; nothing of a function changes when it runs.
_loaded = lru_cache(maxsize=64)(load)


class ReferenceProgram:
    """A :class:`engines.ane.backend.Program` on numpy."""

    def __init__(self, source: Source) -> None:
        self._function: Function | None = _loaded(source.path, source.function)
        self._spec = read_spec(source.path)[source.function]

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        assert self._function is not None, "the program was closed"
        return {name: value.astype(np.float32) for name, value in self._function.run(feeds).items()}

    def plan(self) -> None:
        return None  # no Core ML, no plan, no share: certification with it must end uncertified

    def signature(self) -> FunctionSpec:
        return self._spec

    def close(self) -> None:
        self._function = None


class ReferenceBackend:
    """A :class:`engines.ane.backend.Backend` on numpy, under its own engine name."""

    engine = ENGINE
    runtime = "mil-reference"
    build = f"none-{os.name}"

    def require(self) -> None:
        return None

    def os_build(self) -> str:
        return self.build

    def open(self, source: Source, *, units: str) -> ReferenceProgram:
        return ReferenceProgram(source)
