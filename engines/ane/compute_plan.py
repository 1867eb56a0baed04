"""MLComputePlan as plain data: what Core ML intends to run where, one label an operation.

The walker takes the framework's objects by duck typing, so it runs here on hand-built ones. The view is JSON-ready
(msgspec) and goes into the evidence document, from which every placement number can be computed again anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Any

from msgspec import Struct, field


class Device(StrEnum):
    """Where an operation is preferred; UNKNOWN when the plan gives no usage, or a device of another kind."""

    CPU = "cpu"
    GPU = "gpu"
    ANE = "neuralEngine"
    UNKNOWN = "unknown"


class Operation(Struct, frozen=True, omit_defaults=True):
    """One operation.

    ``cost``: Core ML's estimated share of the run in [0, 1], None where it gives none. ``inputs`` and ``outputs``:
    names of the values it reads and makes, constants included; they tell what an operation is there for.
    """

    operator: str = field(name="op")
    preferred: Device = field(name="on")
    cost: float | None = None
    outputs: tuple[str, ...] = ()
    blocks: tuple[tuple[Operation, ...], ...] = ()
    inputs: tuple[str, ...] = field(default=(), name="in")

    @property
    def is_const(self) -> bool:
        """True for constants, which the framework never dispatches."""
        operator = self.operator.rpartition(".")[2]
        return operator == "const" or operator.startswith("constexpr_")


class Function(Struct, frozen=True):
    """One function of a program: its operations in program order, and the names of what it takes and returns."""

    inputs: tuple[str, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[str, ...] = ()

    def walk(self) -> Iterator[Operation]:
        """Yield every operation, those of nested blocks (loops, conditionals) after their own operation."""
        for operation in self.operations:
            yield operation
            for block in operation.blocks:
                yield from Function((), block).walk()


class PlanView(Struct, frozen=True):
    """A plan of one model. ``kind``: program, or other (a pipeline, a neural network), which has no functions."""

    kind: str
    functions: dict[str, Function] = {}


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


def from_objc(plan: Any, *, only: str | None = None) -> PlanView:
    """Convert a PyObjC ``MLComputePlan`` proxy; *only* limits the walk to one function.

    Selectors (Apple, CoreML/MLComputePlan.h and MLModelStructure.h, macOS 14.4): ``modelStructure``, ``program``,
    ``functions``, ``inputs``, ``block``, ``outputNames``, ``operations``; of an operation ``operatorName``,
    ``outputs``, ``inputs``, ``bindings``, ``name``, ``blocks``; ``computeDeviceUsageForMLProgramOperation:``,
    ``preferredComputeDevice``, ``estimatedCostOfMLProgramOperation:``, ``weight``.
    """
    program = plan.modelStructure().program()
    if program is None:
        return PlanView("other")

    def names(op: Any) -> tuple[str, ...]:
        bound = [binding.name() for argument in op.inputs().values() for binding in argument.bindings()]
        return tuple(str(name) for name in bound if name is not None)  # a binding to a literal value has no name

    def convert(op: Any) -> Operation:
        usage = plan.computeDeviceUsageForMLProgramOperation_(op)
        cost = plan.estimatedCostOfMLProgramOperation_(op)
        return Operation(
            str(op.operatorName()),
            device_of(None if usage is None else usage.preferredComputeDevice()),
            None if cost is None else float(cost.weight()),
            tuple(str(output.name()) for output in op.outputs()),
            tuple(tuple(convert(inner) for inner in block.operations()) for block in op.blocks()),
            names(op),
        )

    def function(found: Any) -> Function:
        block = found.block()
        return Function(
            tuple(str(one.name()) for one in found.inputs()),
            tuple(convert(op) for op in block.operations()),
            tuple(str(name) for name in block.outputNames()),
        )

    found = {str(name): one for name, one in program.functions().items() if only is None or str(name) == only}
    return PlanView("program", {name: function(one) for name, one in found.items()})
