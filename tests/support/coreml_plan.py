"""coremltools' compute plan in the shape of ours, for a second opinion."""

from __future__ import annotations

from typing import Any

from engines.ane.compute_plan import Function, Operation, PlanView, device_of


def from_coremltools(plan: Any) -> PlanView:
    """Convert the plan of an ML Program by coremltools 9.0, ``models.compute_plan.MLComputePlan``."""

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
            for name, f in plan.model_structure.program.functions.items()
        },
    )
