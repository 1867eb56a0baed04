"""``python -m engines.ane plan ARTIFACT --manifest F``: where the framework would run every function of an artifact.

For certification, in a process of its own: it loads each function, counts what its plan says, and lets it go again. The
result line carries ``functions`` (operator -> device -> count, estimated cost by device) and ``cpu_allowed``. What
prefers the CPU and may stay there is counted with its stage, ``ios18.mul@mask_position``; ``cpu_allowed`` lists those.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines.ane import artifact as files
from engines.ane.compute_plan import CPU_ALLOWED, Device, Function, stages
from engines.ane.coreml import CoreML
from engines.bundle import manifest


def counted(function: Function | None) -> dict[str, Any]:
    """Return ``operations``, ``cost`` and ``ops_sha256`` of one function; all empty where there is no plan."""
    operations: dict[str, dict[str, int]] = {}
    cost: dict[str, float] = {}
    lines: list[str] = []
    for operation, stage in stages(function) if function else ():
        label = operation.preferred
        device = "const" if label is Device.UNKNOWN and operation.is_const else label.value
        allowed = label is Device.CPU and stage is not None
        counts = operations.setdefault(f"{operation.operator}@{stage}" if allowed else operation.operator, {})
        counts[device] = counts.get(device, 0) + 1
        if operation.cost is not None and label is not Device.UNKNOWN:
            cost[device] = cost.get(device, 0.0) + operation.cost
        lines.append(f"{operation.operator} {label.value}")
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return {"operations": operations, "cost": cost, "ops_sha256": digest}


def plan(path: Path, manifest_path: Path, *, progress: Callable[[str, int, int], None]) -> dict[str, Any]:
    """Return the result line for the compiled artifact at *path* (what LOAD names) of the bundle's manifest.

    EngineError backend_missing off a Mac, and what finding and loading a function raises.
    """
    backend = CoreML()
    backend.require()
    artifacts = {artifact.digest: artifact for artifact in manifest.read(manifest_path).artifacts("coreml")}
    record = files.prepared(path, source_digests=artifacts, os_build=backend.os_build(), allow_cold=True)
    functions = artifacts[record.source_digest].functions or []
    found = files.sources(path, [function.name for function in functions], record)
    rows = []
    for done, function in enumerate(functions):
        progress("plan", done, len(functions))
        source, _ = found[function.name]
        program = backend.open(source, units="cpu_and_ne")
        try:
            counts = counted(program.plan())
        finally:
            program.close()
        kind, tokens = "packed" if function.packed_width else "bucket", function.packed_width or function.bucket
        rows.append({"name": function.name, "kind": kind, "tokens": tokens, **counts})
    return {"functions": rows, "cpu_allowed": sorted(CPU_ALLOWED)}
