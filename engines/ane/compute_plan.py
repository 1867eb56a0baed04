"""MLComputePlan as plain data: what Core ML intends to run where, one label an operation.

The walkers take the framework's objects by duck typing, so they run here on hand-built ones: the coremltools
dataclasses and PyObjC's proxies differ in spelling only. The view is JSON-ready and goes into the evidence document,
from which every placement number can be computed again anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Device(StrEnum):
    """Where an operation is preferred; UNKNOWN when the plan gives no usage, or a device of another kind."""

    CPU = "cpu"
    GPU = "gpu"
    ANE = "neuralEngine"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation. ``cost``: Core ML's estimated share of the run in [0, 1], None where it gives none."""

    operator: str
    preferred: Device
    cost: float | None = None
    outputs: tuple[str, ...] = ()
    blocks: tuple[tuple[Operation, ...], ...] = ()

    @property
    def is_const(self) -> bool:
        """True for constants, which the framework never dispatches."""
        operator = self.operator.rpartition(".")[2]
        return operator == "const" or operator.startswith("constexpr_")


@dataclass(frozen=True, slots=True)
class Function:
    """One function of a program: its operations in program order."""

    inputs: tuple[str, ...]
    operations: tuple[Operation, ...]

    def walk(self) -> Iterator[Operation]:
        """Yield every operation, those of nested blocks (loops, conditionals) after their own operation."""
        yield from _walk(self.operations)


def _walk(operations: tuple[Operation, ...]) -> Iterator[Operation]:
    for operation in operations:
        yield operation
        for block in operation.blocks:
            yield from _walk(block)


@dataclass(frozen=True, slots=True)
class PlanView:
    """A plan of one model. ``kind``: program, neuralNetwork, pipeline or other."""

    kind: str
    functions: Mapping[str, Function] = field(default_factory=dict)
    """By name; a neural network is one function ``main`` whose operations are its layers."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready form; :func:`from_json` is its inverse."""

        def operation(op: Operation) -> dict[str, Any]:
            obj: dict[str, Any] = {"op": op.operator, "on": op.preferred.value}
            if op.cost is not None:
                obj["cost"] = op.cost
            if op.outputs:
                obj["outputs"] = list(op.outputs)
            if op.blocks:
                obj["blocks"] = [[operation(inner) for inner in block] for block in op.blocks]
            return obj

        return {
            "kind": self.kind,
            "functions": {
                name: {"inputs": list(f.inputs), "operations": [operation(op) for op in f.operations]}
                for name, f in self.functions.items()
            },
        }


def from_json(document: Mapping[str, Any]) -> PlanView:
    """Rebuild a recorded plan; KeyError or ValueError when it is not one."""

    def operation(obj: Mapping[str, Any]) -> Operation:
        return Operation(
            obj["op"],
            Device(obj["on"]),
            obj.get("cost"),
            tuple(obj.get("outputs", ())),
            tuple(tuple(operation(inner) for inner in block) for block in obj.get("blocks", ())),
        )

    return PlanView(
        document["kind"],
        {
            name: Function(tuple(f["inputs"]), tuple(operation(op) for op in f["operations"]))
            for name, f in document["functions"].items()
        },
    )


def device_of(device: object | None) -> Device:
    """Map a device object of either binding to a label by its class name.

    Apple: MLCPUComputeDevice, MLGPUComputeDevice, MLNeuralEngineComputeDevice (CoreML, MLComputeDeviceProtocol);
    coremltools 9.0, models/compute_device.py keeps the names.
    """
    name = type(device).__name__ if device is not None else ""
    for part, label in (("NeuralEngine", Device.ANE), ("CPU", Device.CPU), ("GPU", Device.GPU)):
        if part in name:
            return label
    return Device.UNKNOWN


def from_coremltools(plan: Any) -> PlanView:
    """Convert ``coremltools.models.compute_plan.MLComputePlan`` (9.0, models/compute_plan.py)."""
    structure = plan.model_structure
    if structure.program is not None:

        def convert(op: Any) -> Operation:
            usage = plan.get_compute_device_usage_for_mlprogram_operation(op)
            cost = plan.get_estimated_cost_for_mlprogram_operation(op)
            return Operation(
                op.operator_name,
                device_of(None if usage is None else usage.preferred_compute_device),
                None if cost is None else float(cost.weight),
                tuple(output.name for output in op.outputs),
                tuple(tuple(convert(inner) for inner in block.operations) for block in op.blocks),
            )

        return PlanView(
            "program",
            {
                name: Function(tuple(i.name for i in f.inputs), tuple(convert(op) for op in f.block.operations))
                for name, f in structure.program.functions.items()
            },
        )
    if structure.neuralnetwork is not None:
        layers = []
        for layer in structure.neuralnetwork.layers:
            usage = plan.get_compute_device_usage_for_neuralnetwork_layer(layer)
            preferred = device_of(None if usage is None else usage.preferred_compute_device)
            layers.append(Operation(layer.type, preferred, None, tuple(layer.output_names)))
        return PlanView("neuralNetwork", {"main": Function((), tuple(layers))})
    return PlanView("pipeline" if structure.pipeline is not None else "other")


def from_objc(plan: Any, *, only: str | None = None, on_operation: Callable[[], None] = lambda: None) -> PlanView:
    """Convert a PyObjC ``MLComputePlan`` proxy; *only* limits the walk to one function.

    Selectors (Apple, CoreML/MLComputePlan.h and MLModelStructure.h, macOS 14.4): ``modelStructure``, ``program``,
    ``functions``, ``block``, ``operations``, ``operatorName``, ``outputs``, ``blocks``,
    ``computeDeviceUsageForMLProgramOperation:``, ``preferredComputeDevice``, ``estimatedCostOfMLProgramOperation:``,
    ``weight``, ``computeDeviceUsageForNeuralNetworkLayer:``.
    """
    structure = plan.modelStructure()
    program = structure.program()
    if program is not None:

        def convert(op: Any) -> Operation:
            usage = plan.computeDeviceUsageForMLProgramOperation_(op)
            cost = plan.estimatedCostOfMLProgramOperation_(op)
            on_operation()
            return Operation(
                str(op.operatorName()),
                device_of(None if usage is None else usage.preferredComputeDevice()),
                None if cost is None else float(cost.weight()),
                tuple(str(output.name()) for output in op.outputs()),
                tuple(tuple(convert(inner) for inner in block.operations()) for block in op.blocks()),
            )

        return PlanView(
            "program",
            {
                str(name): Function(
                    tuple(str(i.name()) for i in f.inputs()), tuple(convert(op) for op in f.block().operations())
                )
                for name, f in program.functions().items()
                if only is None or str(name) == only
            },
        )
    network = structure.neuralNetwork()
    if network is not None:
        layers = []
        for layer in network.layers():
            usage = plan.computeDeviceUsageForNeuralNetworkLayer_(layer)
            preferred = device_of(None if usage is None else usage.preferredComputeDevice())
            layers.append(Operation(str(layer.type()), preferred, None, tuple(str(n) for n in layer.outputNames())))
        return PlanView("neuralNetwork", {"main": Function((), tuple(layers))})
    return PlanView("pipeline" if structure.pipeline() is not None else "other")
