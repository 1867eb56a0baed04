"""The evidence document of a Neural Engine hardware run, ``ane-evidence-v1``: its gates, computed from what it records.

Pure, so that a verdict written on a Mac can be computed again anywhere: recorded plans give the placement, recorded
numbers the rest. ``tests/ane/test_hardware_evidence.py`` does that with every committed document.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

import msgspec

from engines.ane import compute_plan
from engines.ane.build.plan import counted as count
from engines.ane.compute_plan import Device, Function, Operation, PlanView, device_of
from engines.protocol.errors import EngineError

FORMAT = "ane-evidence-v1"
THRESHOLDS = {
    "min_cosine": 0.999,
    "packed_cosine": 0.9999,
    "neighbour_leak": 1e-3,
    "share": 0.90,
    "cost_share": 0.98,
    "speedup": 1.5,
    "leak_mib": 64.0,
    "gil_gap_s": 0.25,
    "coremltools_share": 0.02,
    "coremltools_cosine": 0.9999,
}
MAX_UNKNOWN = 0.02
"""Above this share of non-const operations without usage, the placement counts as unreported (ane.md 1.4)."""
GIL_CALLS = ("compile", "load", "signature", "plan", "predict", "close")
PREDICTIONS, READMISSIONS, PACKED_ROWS, PACKED_MIXES = 10_000, 20, 64, 8
Gate = dict[str, Any]
Judged = tuple[str, float | None, float, bool]
"""Name, value, threshold, passed."""


def gates(document: Mapping[str, Any]) -> list[Gate]:
    """Return every gate with its value; what a document doesn't record has value None and fails."""
    return [
        {"name": name, "value": value, "threshold": threshold, "passed": bool(value is not None and passed)}
        for name, value, threshold, passed in _gates(document)
    ]


def verdict(document: Mapping[str, Any]) -> str:
    """Return ``pass`` where every gate passes, else ``fail``."""
    return "pass" if all(gate["passed"] for gate in gates(document)) else "fail"


def problems(document: Mapping[str, Any]) -> list[str]:
    """Return what a written document claims and its records deny; empty for an honest one."""
    found = []
    if document.get("format") != FORMAT:
        found.append(f"format is {document.get('format')!r}")
    if document.get("thresholds") != THRESHOLDS:
        found.append("other thresholds than these")
    if document.get("gates") != gates(document):
        found.append("gates don't follow from the records")
    if document.get("verdict") != verdict(document):
        found.append("the verdict doesn't follow from the gates")
    return found


def _gates(document: Mapping[str, Any]) -> Iterator[Judged]:
    limit = THRESHOLDS
    functions: Mapping[str, Any] = document.get("functions", {})
    buckets = [one for one in functions.values() if one.get("kind") == "bucket"]
    packed = [one for one in functions.values() if one.get("kind") == "packed"]

    def at_least(
        name: str, values: list[float | None], key: str | None = None
    ) -> tuple[str, float | None, float, bool]:
        value = min(values) if values and None not in values else None  # type: ignore[type-var]
        bound = limit[key or name]
        return name, value, bound, value is not None and value >= bound

    def at_most(name: str, values: list[float | None]) -> Judged:
        value = max(values) if values and None not in values else None  # type: ignore[type-var]
        return name, value, limit[name], value is not None and value <= limit[name]

    def counted(name: str, value: float | None, bound: float) -> Judged:
        return name, value, bound, value is not None and value >= bound

    quality = [one.get("quality", {}) for one in functions.values()]
    yield at_least("min_cosine", [one.get("min_cosine") for one in quality])
    bad = [one.get("non_finite") for one in quality]
    worst = max(bad) if bad and None not in bad else None
    yield "non_finite", worst, 0, worst == 0
    rows = [_row(name, one) for name, one in functions.items()]
    yield at_least("share", [None if row is None else row["share"] for row in rows])
    yield at_least("cost_share", [None if row is None else row["cost_share"] for row in rows])
    silent = sum(row is None or row["unreported"] for row in rows) if rows else None
    yield "placement_reported", silent, 0, silent == 0
    wrong = sum(not _allowed(name, one) for name, one in functions.items()) if functions else None
    yield "cpu_operations", wrong, 0, wrong == 0
    trials = [one.get("packing", {}) for one in packed]
    yield counted("packed_rows", min((one.get("rows", 0) for one in trials), default=None), PACKED_ROWS)
    yield counted("packed_mixes", min((one.get("mixes", 0) for one in trials), default=None), PACKED_MIXES)
    yield at_least("packed_cosine", [one.get("min_cosine") for one in trials])
    yield at_most("neighbour_leak", [one.get("max_difference") for one in trials])
    yield at_least("speedup", [_ratio(one.get("cpu_ms"), one.get("ane_ms")) for one in buckets])
    gaps: Mapping[str, Any] = document.get("gil_longest_gap_s", {})
    yield at_most("gil_gap_s", [gaps.get(call) for call in GIL_CALLS])
    residency: Mapping[str, Any] = document.get("residency", {})
    refused = residency.get("refused")
    yield (
        "residency_limit",
        None if refused is None else float(refused == "ane_residency_limit"),
        1,
        (refused == "ane_residency_limit"),
    )
    yield counted("readmissions", residency.get("readmissions"), READMISSIONS)
    yield at_least("share_after_evictions", [residency.get("share_after_evictions")], "share")
    leak: Mapping[str, Any] = document.get("leak", {})
    yield counted("predictions", leak.get("predictions"), PREDICTIONS)
    yield at_most("leak_mib", [leak.get("grown_mib")])
    theirs: Mapping[str, Any] = document.get("coremltools", {})
    yield at_most("coremltools_share", [theirs.get("share_difference")])
    yield at_least("coremltools_cosine", [theirs.get("min_cosine")])
    if document.get("weights") != "seeded":
        certified = document.get("certification", {}).get("verdict")
        yield "certified", None if certified is None else float(certified == "certified"), 1, certified == "certified"


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None


def _plan(name: str, one: Mapping[str, Any]) -> tuple[PlanView, str | None] | None:
    recorded = one.get("placement", {}).get("recorded_plan")
    if not recorded:
        return None
    view = msgspec.convert(recorded, PlanView)
    return view, name if name in view.functions else None


def _row(name: str, one: Mapping[str, Any]) -> dict[str, Any] | None:
    found = _plan(name, one)
    return None if found is None else table(*found)


def _allowed(name: str, one: Mapping[str, Any]) -> bool:
    found = _plan(name, one)
    try:
        return found is not None and compute_plan.cpu_stages(*found) is not None
    except EngineError:
        return False


def table(plan: PlanView, name: str | None = None) -> dict[str, Any] | None:
    """Return one function's line of ane.md 1.4, or None where the plan has nothing to count.

    Counts are operations; ``runs``: maximal runs on the Neural Engine in program order.
    """
    function = compute_plan.main_function(plan, name)
    if function is None or plan.kind not in ("program", "neuralNetwork"):
        return None
    told = count(plan, name)
    devices = Counter[str]()
    for counts in told["operations"].values():
        devices.update(counts)
    placed = [operation.preferred for operation in function.walk() if operation.preferred is not Device.UNKNOWN]
    costs, unknown = told["cost"], devices[Device.UNKNOWN]
    return {
        "ane": devices[Device.ANE],
        "cpu": devices[Device.CPU],
        "gpu": devices[Device.GPU],
        "unknown_nonconst": unknown,
        "const": devices["const"],
        "share": compute_plan.share(plan, name),
        "cost_share": costs.get(Device.ANE, 0.0) / sum(costs.values()) if sum(costs.values()) > 0 else None,
        "runs": sum(label is Device.ANE for label, _ in groupby(placed)),
        "ops_sha256": told["ops_sha256"],
        "unreported": unknown > MAX_UNKNOWN * (len(placed) + unknown),
    }


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
