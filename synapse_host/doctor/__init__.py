"""What this machine can run and what is wrong with it, as findings that each carry their fix.

Theory of operation. :func:`examine` first gathers the facts that take time, side by side: the machine's profile with
every engine's floor asked anew (a cached answer may be what is wrong), foreign workers' floors, every worker's
``--version`` line and the digests of the installed bundles. Each child has a time limit and runs alone, so one that
hangs or crashes is a finding like any other. Then every check is a function from those facts to findings: `engines`
looks at the matrix's engines and lanes, `machine` at this computer and at what killed hosts left, `models` at bundles
and certificates. Nothing here raises for what it finds, changes anything or asks a running host. The order of the
findings is the report's; the lanes come last, because they follow from the engines.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from synapse_host.certificates import binding
from synapse_host.doctor import engines, machine, models
from synapse_host.doctor.engines import EngineReport
from synapse_host.doctor.machine import Finding, Severity
from synapse_host.models import catalogue
from synapse_host.placement import hardware, places
from synapse_host.placement import probe as floors
from synapse_host.placement.interpreter import VERSION
from synapse_host.placement.matrix import HardwareMatrix
from synapse_host.placement.places import NoHome, NoTemporary
from synapse_host.worker import runtime_dir as remains
from synapse_host.worker.listener import SUN_PATH

__all__ = ["EngineReport", "Finding", "Report", "Severity", "examine"]

WORKERS: Final = 4
ONNXRUNTIMES: Final = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-directml")


@dataclass(frozen=True, slots=True)
class Report:
    """Everything ``synapse doctor`` shows."""

    findings: list[Finding]
    engines: list[EngineReport]
    host: dict[str, Any]

    def count(self, severity: Severity) -> int:
        """Return how many findings are that grave."""
        return sum(finding.severity == severity for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        return asdict(self)


def examine(
    matrix: HardwareMatrix,
    *,
    models_dir: Path | None = None,
    runtime_dir: Path | None = None,
    probe_limit: float | None = None,
) -> Report:
    """Examine this machine against *matrix*; blocks for seconds at most, plus *probe_limit* where a probe hangs.

    *models_dir*: where bundles lie; None is the user's own folder, and a finding where there is none.
    """
    nowhere: list[Finding] = []
    if models_dir is None:
        try:
            models_dir = catalogue.models_dir()
        except NoHome as exc:
            nowhere.append(Finding("home.missing", "warning", exc.message, "export HOME=/a/folder/of/this/user"))
    keys = hardware.floor_keys(matrix, matrix.engines)
    with ThreadPoolExecutor(WORKERS) as pool:
        profile_job = pool.submit(hardware.detect, keys, fresh=True, limit=probe_limit)
        foreign_job = pool.submit(engines.foreign_floors, matrix, probe_limit or floors.TIME_LIMIT)
        version_jobs = {id: pool.submit(binding.version_line, matrix, engine) for id, engine in matrix.engines.items()}
        bundle_job = pool.submit(lambda: list(models.bundle_findings(models_dir)) if models_dir else [])
        profile, foreign, bundles = profile_job.result(), foreign_job.result(), bundle_job.result()
        versions = {id: job.result() for id, job in version_jobs.items()}
    reports = [
        engines.report_on(matrix, engine, profile, foreign.get(engine.id), versions[engine.id])
        for engine in matrix.engines.values()
    ]
    runtime = runtime_dir
    if runtime is None:
        try:
            runtime = places.temporary()
        except NoTemporary as exc:
            runtime = Path("/tmp")  # noqa: S108 - where a host would look next
            nowhere.append(Finding("temporary.missing", "failure", exc.message, "export TMPDIR=/a/folder/of/this/user"))
    findings = [
        *engines.engine_findings(matrix, reports),
        *machine.onnxruntime_findings(floors.versions(ONNXRUNTIMES)),
        *machine.resource_findings(profile.ram_free, models_dir),
        *machine.descriptor_findings(machine.descriptor_limit()),
        *machine.abandoned_findings(remains.roots() if runtime_dir is None else [runtime]),
        *nowhere,
        *bundles,
        *models.certificate_findings(matrix, profile, versions, models_dir),
        *engines.lane_findings(matrix, reports),
    ]
    return Report(findings, reports, _host_facts(profile, matrix, models_dir, runtime))


def _host_facts(
    profile: hardware.HostProfile, matrix: HardwareMatrix, models_dir: Path | None, runtime: Path
) -> dict[str, Any]:
    """Return what the report says of the machine and this installation; sizes in bytes, ``cores`` after the quota."""
    return {
        "version": VERSION,
        "os": profile.os,
        "os_version": profile.os_version,
        "os_build": profile.os_build,
        "arch": profile.arch,
        "cpu": profile.cpu_model,
        "cpu_features": sorted(profile.cpu_features),
        "cores": profile.cores,
        "cores_total": profile.cores_total,
        "quota": profile.quota,
        "ram_bytes": profile.ram_total,
        "ram_free_bytes": profile.ram_free,
        "python": ".".join(map(str, sys.version_info[:3])),
        "matrix": str(matrix.path),
        "models_dir": str(models_dir) if models_dir else None,
        "disk_free_bytes": machine.free_disk(models_dir) if models_dir else None,
        "descriptor_limit": machine.descriptor_limit(),
        "socket_path_room": SUN_PATH - 1 - machine.socket_length(runtime),
    }
