"""MLComputePlan as plain data, and what follows from it: the placement share, the CPU operations allowed, inventories.

The reader takes PyObjC's objects by duck typing. A function is JSON-ready (msgspec) and goes into the evidence
document, from which every number here can be computed again anywhere. What isn't known is None, never 0 and never 1, so
a gate on it fails. :func:`share` is upstream's ``placement_share`` exactly (ane.md 1.1) and what PONG carries.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Any, Final, NoReturn

from msgspec import Struct, field

from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import Executable, Inventory

_RESHAPING: Final = frozenset({"cast", "expand_dims", "slice_by_index", "squeeze", "tile"})
_MASK: Final = _RESHAPING | {"add", "greater_equal", "mul", "select", "sub"}
_LOOKUP: Final = frozenset({"gather", "gather_along_axis", "gather_nd"})
_READOUT: Final = frozenset({"cast", "expand_dims", "slice_by_index", "squeeze"})
_STAGES: Final = {"mask_position": _MASK, "token_embedding": _LOOKUP | _RESHAPING, "pooling": _READOUT}
CPU_ALLOWED: Final = frozenset(f"{operator}@{stage}" for stage, operators in _STAGES.items() for operator in operators)
"""Operations that may stay on the CPU, each with the stage it is for: making the mask, looking up ids, taking the
output apart. Ids cast for a gather stay there by nature (apple/coremltools#2222, #2365). See :func:`stages`."""
STAGE_LIMIT: Final = 16
"""CPU operations a function may keep: set-up is a handful (5 in the reference packages), more means it fell apart."""


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
    def kind(self) -> str:
        """The operator without its opset, such as ``mul`` for ``ios18.mul``."""
        return self.operator.rpartition(".")[2]

    @property
    def is_const(self) -> bool:
        """True for constants, which the framework never dispatches."""
        return self.kind == "const" or self.kind.startswith("constexpr_")


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


def device_of(device: object | None) -> Device:
    """Map a device of either binding to a label by its class: ML{CPU,GPU,NeuralEngine}ComputeDevice, Apple's names."""
    name = type(device).__name__
    for part, label in (("NeuralEngine", Device.ANE), ("CPU", Device.CPU), ("GPU", Device.GPU)):
        if part in name:
            return label
    return Device.UNKNOWN


def from_objc(plan: Any, name: str | None) -> Function | None:
    """Convert a function of a PyObjC ``MLComputePlan``; None for a pipeline or a neural network, which has none.

    *name* says which one of a multi-function package; else it is ``main`` or, without one, that with the fewest inputs
    (upstream's rule). The selectors are those of Apple's CoreML/MLComputePlan.h and MLModelStructure.h, macOS 14.4.
    """
    program = plan.modelStructure().program()
    if program is None:
        return None
    functions = {str(key): one for key, one in program.functions().items()}
    found = functions.get(name or "main")
    if found is None and name is None:
        found = min(functions.values(), key=lambda one: len(one.inputs()), default=None)
    if found is None:
        return None

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

    block = found.block()
    return Function(
        tuple(str(one.name()) for one in found.inputs()),
        tuple(convert(op) for op in block.operations()),
        tuple(str(name) for name in block.outputNames()),
    )


def share(function: Function | None) -> float | None:
    """Return count(preferred Neural Engine) / count(operations with a known preferred device).

    Unweighted, nested blocks included, ``unknown`` left out on both sides; constants drop out because the plan reports
    no usage for them, not by name. None for no plan, for anything but an ML Program, and for zero dispatchable
    operations.
    """
    if function is None:
        return None
    labels = [operation.preferred for operation in function.walk()]
    dispatchable = sum(label is not Device.UNKNOWN for label in labels)
    return sum(label is Device.ANE for label in labels) / dispatchable if dispatchable else None


def worst(shares: Iterable[float | None]) -> float | None:
    """Return the wire value over resident functions: the minimum, absent when there is none or any is absent."""
    values = list(shares)
    known = [value for value in values if value is not None]
    return min(known) if known and len(known) == len(values) else None


def stages(function: Function) -> Iterator[tuple[Operation, str | None]]:
    """Yield every operation with the stage for which it may run on the CPU; None where it belongs on the engine.

    The way an operation lies on decides, not its name alone: a ``mul`` that makes the mask is set-up, the same ``mul``
    in a layer is the model's work. Followed from the function's inputs: what is computed from them by mask operations
    only is ``mask_position``; what a gather looks up with such values, still only reshaped, is ``token_embedding``.
    Followed back from the outputs: operations that only take results apart are ``pooling``. A value whose origin the
    plan doesn't tell counts as the model's work.
    """
    operations = list(function.walk())
    readers: dict[str, list[int]] = {}
    for index, operation in enumerate(operations):
        for name in operation.inputs:
            readers.setdefault(name, []).append(index)
    takes_apart: set[int] = set()
    for index, operation in reversed(list(enumerate(operations))):
        used = [name in function.outputs or name in readers for name in operation.outputs]
        after = [reader for name in operation.outputs for reader in readers.get(name, [])]
        if operation.kind in _READOUT and used and all(used) and takes_apart.issuperset(after):
            takes_apart.add(index)
    origin: dict[str, str | None] = dict.fromkeys(function.inputs, "mask_position")
    for index, operation in enumerate(operations):
        if operation.is_const:
            origin.update(dict.fromkeys(operation.outputs, "const"))
            yield operation, None
            continue
        stage = _from_inputs(operation, {origin.get(name) for name in operation.inputs} - {"const"})
        origin.update(dict.fromkeys(operation.outputs, stage))
        yield operation, stage or ("pooling" if index in takes_apart else None)


def _from_inputs(operation: Operation, origins: set[str | None]) -> str | None:
    """Return the stage of an operation by where the values come from that it reads; None for the model's work."""
    operator = operation.kind
    if origins == {"mask_position"}:
        return "mask_position" if operator in _MASK else "token_embedding" if operator in _LOOKUP else None
    if operator in _RESHAPING and origins == {"token_embedding"}:
        return "token_embedding"
    return None


def cpu_stages(function: Function) -> list[str]:
    """Map every CPU-preferred operation to its stage; return the stages in order, without repeats.

    EngineError ``invalid_placement`` names the first operation that is the model's work, or says that there are too
    many: then the share alone would hide real work on the CPU. GPU-preferred operations are refused too (the units
    exclude it).
    """
    found: dict[str, None] = {}
    count = 0
    for operation, stage in stages(function):
        if operation.preferred is Device.GPU:
            _refuse(operation, "prefers the GPU")
        if operation.preferred is not Device.CPU:
            continue
        count += 1
        if stage is None:
            _refuse(operation, "prefers the CPU and is neither mask, look-up nor read-out")
        found[stage] = None
    if count > STAGE_LIMIT:
        why = f"{count} operations prefer the CPU, at most {STAGE_LIMIT} belong there"
        raise EngineError(ErrorCode.INVALID_PLACEMENT, why)
    return list(found)


def _refuse(operation: Operation, why: str) -> NoReturn:
    name = f" ({operation.outputs[0]})" if operation.outputs else ""
    raise EngineError(ErrorCode.INVALID_PLACEMENT, f"operation {operation.operator}{name} {why}")


def inventory(*, layers: int, stages: list[str], **identity: str) -> Inventory:
    """Return what ADMITTED carries: one executable for the function, covering every layer once (ane.md 7).

    Core ML shows nobody the private programs below a function, so the id names the function and all that selects it:
    *identity* holds bundle (its digest), function, units, hints, os_build and version.
    """
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    return Inventory([Executable(digest, list(range(layers)))], stages)
