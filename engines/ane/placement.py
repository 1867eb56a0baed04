"""Plan view -> numbers and a verdict. Pure arithmetic, recomputable from a recorded plan.

:func:`share` is upstream's ``placement_share`` exactly (ane.md 1.1) and what PONG carries. Fail closed: what can't be
told is None, never 0 and never 1.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Final

from engines.ane.compute_plan import Device, Function, Operation, PlanView
from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import Executable, Inventory

CPU_STAGES: Final[Mapping[str, str]] = {
    "gather": "token_embedding",
    "gather_along_axis": "token_embedding",
    "gather_nd": "token_embedding",
    "cast": "mask_position",
    "expand_dims": "mask_position",
    "sub": "mask_position",
    "mul": "mask_position",
    "tile": "mask_position",
    "greater_equal": "mask_position",
    "select": "mask_position",
    "slice_by_index": "pooling",
    "squeeze": "pooling",
}
"""Operations that may stay on the CPU, by what they are for: looking up ids, making the mask, taking the output apart.
Ids cast for a gather stay there by nature (apple/coremltools#2222, #2365); a matmul, a convolution, a norm or a softmax
never may. ``mul`` and ``sub`` are allowed only on the way to the mask: see :func:`cpu_stages`."""
STAGE_LIMIT: Final = 16
"""CPU operations a function may keep: set-up is a handful (5 in the reference packages), more means it fell apart."""


def main_function(plan: PlanView, name: str | None = None) -> Function | None:
    """Return the function a plan is judged by: *name* if it is there, else ``main``, else the one with fewest inputs.

    Upstream's rule is the last two; *name* is for a multi-function package, where each function is its own bucket.
    """
    if name is not None and name in plan.functions:
        return plan.functions[name]
    if "main" in plan.functions:
        return plan.functions["main"]
    return min(plan.functions.values(), key=lambda function: len(function.inputs), default=None)


def share(plan: PlanView | None, name: str | None = None) -> float | None:
    """Return count(preferred Neural Engine) / count(operations with a known preferred device).

    Unweighted, nested blocks included, ``unknown`` left out on both sides; constants drop out because the plan reports
    no usage for them, not by name. None for no plan, a pipeline or another kind, and for zero dispatchable operations.
    """
    if plan is None or plan.kind not in ("program", "neuralNetwork"):
        return None
    function = main_function(plan, name)
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


def cpu_stages(plan: PlanView, name: str | None = None) -> list[str]:
    """Map every CPU-preferred operation to an allowed stage; return the stages in order, without repeats.

    EngineError ``invalid_placement`` names the first operation off the list, or says that there are too many: then the
    share alone would hide real work on the CPU. GPU-preferred operations are refused too (the units exclude it).
    """
    function = main_function(plan, name)
    if plan.kind != "program" or function is None:
        return []
    stages: dict[str, None] = {}
    count = 0
    for operation in function.walk():
        if operation.preferred is Device.GPU:
            _refuse(operation, "prefers the GPU")
        if operation.preferred is not Device.CPU:
            continue
        count += 1
        stage = CPU_STAGES.get(operation.operator.rpartition(".")[2])
        if stage is None:
            _refuse(operation, "prefers the CPU and is on no allow-list")
        else:
            stages[stage] = None
    if count > STAGE_LIMIT:
        raise EngineError(
            ErrorCode.INVALID_PLACEMENT, f"{count} operations prefer the CPU, at most {STAGE_LIMIT} belong there"
        )
    return list(stages)


def _refuse(operation: Operation, why: str) -> None:
    name = f" ({operation.outputs[0]})" if operation.outputs else ""
    raise EngineError(ErrorCode.INVALID_PLACEMENT, f"operation {operation.operator}{name} {why}")


def inventory(*, layers: int, stages: list[str], **identity: str) -> Inventory:
    """Return what ADMITTED carries: one executable for the function, covering every layer once (ane.md 7).

    Core ML shows nobody the private programs below a function, so the id names the function and all that selects it:
    *identity* holds bundle (its digest), function, units, hints, os_build and version.
    """
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    return Inventory([Executable(digest, list(range(layers)))], stages)
