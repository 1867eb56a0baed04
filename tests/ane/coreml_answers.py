"""What each message of the stand-in framework does, and what a loaded function is there. See ``coreml_standin.py``."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from engines.ane.signature import FunctionSpec, Tensor
from engines.protocol.errors import EngineError
from tests.ane.make_interfaces import TABLE
from tests.support import mil_reference

if TYPE_CHECKING:
    from tests.ane.coreml_standin import Framework

FACTS = json.loads(TABLE.read_text())
PLACES = {"ane": "MLNeuralEngineComputeDevice", "cpu": "MLCPUComputeDevice", "gpu": "MLGPUComputeDevice"}
DTYPES = {
    FACTS["enums"][f"MLMultiArrayDataType{name}"]: np.dtype(name.lower())
    for name in ("Int32", "Float16", "Float32", "Float64")
}


@dataclass(frozen=True)
class Op:
    """One operation as a plan shows it."""

    operator: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    blocks: tuple[tuple[Op, ...], ...] = ()


class Loaded(Protocol):
    """One function of a bundle, as far as this framework looks into it."""

    spec: FunctionSpec

    @property
    def operations(self) -> Sequence[Op]: ...

    def run(self, feeds: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]: ...


class Refusal(Exception):
    """What a load answers with an NSError of this text."""


class MilFunction:
    """A function of a real package, computed by the numpy evaluator."""

    def __init__(self, path: Path, function: str | None) -> None:
        try:
            self.spec = mil_reference.read_spec(path)[function or "main"]
        except (EngineError, KeyError) as exc:
            raise Refusal(f"no function {function} in {path.name}") from exc
        self._program = mil_reference.load(path, function or "main")
        self.run = self._program.run
        self.operations = [
            Op(
                "const" if op.op_type == "const" else f"ios18.{op.op_type}",
                tuple(
                    one.name
                    for var in op.inputs.values()
                    for one in (var if isinstance(var, (list, tuple)) else [var])
                    if op.op_type != "const" and one is not None
                ),
                tuple(var.name for var in op.outputs),
            )
            for op in self._program.operations
        ]


class Array:
    """Memory of an MLMultiArray; a Neural Engine pads the last axis (200 to 224 elements)."""

    def __init__(self, shape: list[int], dtype: np.dtype[Any], pad: int) -> None:
        whole = np.zeros([*shape[:-1], shape[-1] + pad], dtype)
        self.values = whole[..., : shape[-1]]
        self.memory = whole.reshape(-1).view(np.uint8).data


class Varlist:
    """What the bridge makes of a ``void *`` result; ``as_buffer`` of void counts bytes."""

    def __init__(self, framework: Framework, memory: memoryview) -> None:
        self._framework, self._memory = framework, memory

    def as_buffer(self, count: int) -> memoryview:
        self._framework.buffers += 1
        return self._memory[:count]


def _cost(op: Op) -> float:
    """Return an invented cost: products are dear, constants free."""
    heavy = op.operator.rpartition(".")[2] in ("conv", "matmul")
    return 0.0 if op.operator == "const" else 1.0 if heavy else 0.1


class Answers:
    """What each message does; every one that isn't in :attr:`table` reads or sets a property."""

    def __init__(self, framework: Framework) -> None:
        self._make = framework.make
        self._framework = framework
        self.table: dict[str, Callable[..., Any]] = {
            "+[NSURL fileURLWithPath:]": lambda _, path: self._url(Path(path)),
            "+[NSMutableDictionary dictionary]": lambda _: {},
            "+[MLModel compileModelAtURL:error:]": self._compile,
            "+[MLModel modelWithContentsOfURL:configuration:error:]": self._load,
            "-[MLModel predictionFromFeatures:error:]": self._predict,
            "-[MLModelConfiguration optimizationHints]": self._hints,
            "-[MLMultiArray initWithShape:dataType:error:]": self._allocate,
            "-[MLMultiArray dataPointer]": lambda made: Varlist(framework, made._state["array"].memory),
            "-[MLMultiArray getBytesWithHandler:]": self._bytes,
            "+[MLFeatureValue featureValueWithMultiArray:]": lambda _, one: self._value(one),
            "-[MLDictionaryFeatureProvider initWithDictionary:error:]": self._provider,
            "-[MLDictionaryFeatureProvider featureNames]": lambda made: set(made._state["values"]),
            "-[MLDictionaryFeatureProvider featureValueForName:]": lambda made, name: made._state["values"].get(name),
            "+[MLComputePlan loadContentsOfURL:configuration:completionHandler:]": self._plan,
            "-[MLComputePlan computeDeviceUsageForMLProgramOperation:]": self._usage,
            "-[MLComputePlan estimatedCostOfMLProgramOperation:]": self._cost,
        }

    def error(self, text: str) -> tuple[None, Any]:
        """Return what a message gives that fails with an NSError."""
        return None, self._make("NSError", localizedDescription=text)

    def _url(self, path: Path) -> Any:
        return self._make("NSURL", path=str(path), lastPathComponent=path.name)

    # --- models ------------------------------------------------------------------------------------------------------

    def _compile(self, _: Any, package: Any) -> tuple[Any, Any]:
        source = Path(package._state["path"])
        target = Path(tempfile.mkdtemp(dir=self._framework.scratch)) / f"{source.stem}.mlmodelc"
        try:
            shutil.copytree(source, target)
        except OSError as exc:
            return self.error(str(exc))
        return self._url(target), None

    def _load(self, _: Any, where: Any, config: Any) -> tuple[Any, Any]:
        state = dict(config._state)
        try:
            loaded = self._framework.load(Path(where._state["path"]), state.get("functionName"))
        except Refusal as exc:
            return self.error(str(exc))
        inputs, outputs = (self._described(one) for one in (loaded.spec.inputs, loaded.spec.outputs))
        about = self._make("MLModelDescription", inputDescriptionsByName=inputs, outputDescriptionsByName=outputs)
        units = state["computeUnits"]
        return self._make("MLModel", loaded=loaded, units=units, modelDescription=about), None

    def _described(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        codes = {dtype.name: code for code, dtype in DTYPES.items()}

        def one(tensor: Tensor) -> Any:
            found = self._make("MLMultiArrayConstraint", shape=list(tensor.shape), dataType=codes[tensor.dtype])
            return self._make("MLFeatureDescription", multiArrayConstraint=found)

        return {name: one(tensor) for name, tensor in tensors.items()}

    def _predict(self, model: Any, provider: Any) -> tuple[Any, Any]:
        loaded = model._state["loaded"]
        values = provider._state["values"]
        feeds = {name: value._state["multiArrayValue"]._state["array"] for name, value in values.items()}
        for name, one in loaded.spec.inputs.items():
            if name not in feeds or feeds[name].values.shape != one.shape or feeds[name].values.dtype != one.dtype:
                return self.error(f"feature {name} is not what the model takes")
        self._framework.predicted(model._state["units"])
        results = loaded.run({name: array.values.copy() for name, array in feeds.items()})
        outputs = {name: self._output(value) for name, value in results.items()}
        return self._make("MLDictionaryFeatureProvider", values=outputs), None

    # --- arrays and features -----------------------------------------------------------------------------------------

    def _output(self, value: np.ndarray) -> Any:
        made = self._array(list(value.shape), value.dtype, self._framework.pad if value.ndim > 1 else 0)
        made._state["array"].values[...] = value
        return self._value(made)

    def _array(self, shape: list[int], dtype: np.dtype[Any], pad: int = 0) -> Any:
        code = next(code for code, known in DTYPES.items() if known == dtype)
        made = Array(shape, dtype, pad)
        strides = [step // dtype.itemsize for step in made.values.strides]
        return self._make("MLMultiArray", array=made, shape=shape, strides=strides, dataType=code)

    def _allocate(self, made: Any, shape: list[int], kind: int) -> tuple[Any, Any]:
        made._state.update(self._array([int(n) for n in shape], DTYPES[kind])._state)
        return made, None

    def _value(self, made: Any) -> Any:
        return self._make("MLFeatureValue", multiArrayValue=made)

    def _provider(self, made: Any, values: dict[str, Any]) -> tuple[Any, Any]:
        made._state["values"] = dict(values)
        return made, None

    def _bytes(self, made: Any, handler: Callable[..., Any]) -> None:
        memory = made._state["array"].memory
        handler(bytes(memory), len(memory))

    def _hints(self, config: Any) -> Any:  # a copied property: changing what was got changes nothing
        kept = config._state.get("optimizationHints")
        return self._make("MLOptimizationHints", **({} if kept is None else kept._state))

    # --- plans -------------------------------------------------------------------------------------------------------

    def _plan(self, _: Any, where: Any, config: Any, handler: Callable[..., Any]) -> None:
        framework, state, path = self._framework, dict(config._state), Path(where._state["path"])

        def answer() -> None:  # on a queue of Core ML's, never on the caller's thread
            with framework.pool():
                try:
                    made = self.error(framework.no_plan) if framework.no_plan else (self._planned(path, state), None)
                except Exception as exc:
                    made = self.error(str(framework.fault(RuntimeError, f"no plan: {exc!r}")))
                handler(*made)

        thread = threading.Thread(target=answer)
        thread.start()
        thread.join()

    def _planned(self, path: Path, state: dict[str, Any]) -> Any:
        name = state.get("functionName")
        loaded = self._framework.load(path, name)
        weights = [_cost(op) for op in loaded.operations]
        operations = [
            self._operation(op, state["computeUnits"], weight / sum(weights))
            for op, weight in zip(loaded.operations, weights, strict=True)
        ]
        function = self._make(
            "MLModelStructureProgramFunction",
            inputs=[self._named(name) for name in loaded.spec.inputs],
            block=self._block(operations, list(loaded.spec.outputs)),
        )
        program = self._make("MLModelStructureProgram", functions={name or "main": function})
        return self._make("MLComputePlan", modelStructure=self._make("MLModelStructure", program=program))

    def _operation(self, op: Op, units: int, weight: float) -> Any:
        place = None if op.operator == "const" else self._framework.place(op, units)
        inner = [self._block([self._operation(one, units, weight) for one in block], []) for block in op.blocks]
        return self._make(
            "MLModelStructureProgramOperation",
            operatorName=op.operator,
            inputs={f"x{n}": self._argument(name) for n, name in enumerate(op.inputs)},
            outputs=[self._named(name) for name in op.outputs],
            blocks=inner,
            place=place,
            weight=None if place is None else weight,
        )

    def _block(self, operations: list[Any], outputs: list[str]) -> Any:
        return self._make("MLModelStructureProgramBlock", operations=operations, outputNames=outputs)

    def _named(self, name: str) -> Any:
        return self._make("MLModelStructureProgramNamedValueType", name=name)

    def _argument(self, name: str) -> Any:
        binding = self._make("MLModelStructureProgramBinding", name=name)
        return self._make("MLModelStructureProgramArgument", bindings=[binding])

    def _usage(self, _: Any, op: Any) -> Any:
        place = op._state["place"]
        device = None if place is None else self._make(PLACES[place])
        return None if device is None else self._make("MLComputePlanDeviceUsage", preferredComputeDevice=device)

    def _cost(self, _: Any, op: Any) -> Any:
        weight = op._state["weight"]
        return None if weight is None else self._make("MLComputePlanCost", weight=weight)
