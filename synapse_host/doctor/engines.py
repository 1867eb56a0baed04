"""The matrix's engines and lanes on this machine."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from synapse_host.doctor.machine import Finding, Severity
from synapse_host.errors import BackendMissing
from synapse_host.placement import interpreter
from synapse_host.placement import probe as floors
from synapse_host.placement.hardware import HostProfile
from synapse_host.placement.matrix import Engine, HardwareMatrix
from synapse_host.placement.probe import Floor
from synapse_host.placement.select import floor_text, hardware_reason, has_no_code

_INSTALL: Final = {
    "llama": "pip install 'synapse-workers[llama]'   (compiles for about 4 minutes on 2 cores)",
    "cuda": "pip install 'synapse-workers[cuda,cuda-libraries]'",
    "ane": "pip install 'synapse-workers[ane]'",
}
_FIXABLE: Final = ("llama_missing", "bindings_missing", "cuda_runtime_missing", "cpu_unsupported")
REBUILD: Final = "pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python llama-cpp-python"


@dataclass(frozen=True, slots=True)
class EngineReport:
    """One engine of the matrix on this machine. ``status``: ok, passed_over (hardware) or failed (fixable)."""

    id: str
    status: Literal["ok", "passed_over", "failed"]
    what: str
    device: str
    versions: dict[str, str]
    floor: dict[str, Any] | None
    worker: str
    """The worker's ``--version`` line, empty where it gave none."""


def report_on(
    matrix: HardwareMatrix, engine: Engine, profile: HostProfile, foreign: Floor | None, worker: str
) -> EngineReport:
    """Return how an engine does here. *foreign*: the floor of a foreign worker command."""
    floor = foreign or profile.floors.get(f"{engine.engine}:{engine.device_kind}")
    hardware_no = hardware_reason(matrix.hardware[engine.requires], profile)
    versions = {} if engine.command else floors.installed(engine.engine)
    status: Literal["ok", "passed_over", "failed"]
    if floor is not None and floor.status == "failed":
        status, what = "failed", floor.why
    elif hardware_no is not None:
        status, what = "passed_over", hardware_no
    elif floor is None or floor.status == "ok":
        status, what = "ok", _described(engine, versions, profile)
    else:
        fixable = floor.code.partition(":")[0] in _FIXABLE and not has_no_code(floor)
        status, what = ("failed" if fixable else "passed_over"), floor_text(floor)
    asked = msgspec.structs.asdict(floor) if floor else None
    return EngineReport(engine.id, status, what, engine.device, versions, asked, worker)


def _described(engine: Engine, versions: dict[str, str], profile: HostProfile) -> str:
    if engine.command is not None:
        return f"worker command {shlex.join(engine.command)}"
    parts = [f"{name} {number}" for name, number in list(versions.items())[:1]]
    if engine.device_kind == "cpu":
        parts += profile.summary().split(", ")[2:]
        if engine.engine == "cuda":
            parts.append("CPU provider")
        threads = engine.runtime_config.get("threads")
        cores = f"{profile.cores} core{'s' if profile.cores != 1 else ''} shared by the lanes"
        parts.append(f"{threads} threads" if threads else cores)
    elif engine.device_kind == "cuda" and profile.compute_capability:
        major, minor = profile.compute_capability
        parts.append(f"compute capability {major}.{minor}, driver API {profile.driver_api}")
    return ", ".join(parts)


def foreign_floors(matrix: HardwareMatrix, limit: float) -> dict[str, Floor]:
    """Ask foreign worker commands too: doctor is where a broken one should show."""
    answers = {}
    for engine in matrix.engines.values():
        if engine.command is not None:
            command = (*engine.command, "--probe-floor", "--device", engine.device)
            answers[engine.id] = floors.probe(command, cwd=matrix.path.parent, limit=limit, env=engine.env)
    return answers


def engine_findings(matrix: HardwareMatrix, engines: Iterable[EngineReport]) -> Iterator[Finding]:
    """Report engines whose probe failed or that lack something which can be installed."""
    severity: Severity
    for report in engines:
        if report.status != "failed" or report.floor is None:
            continue
        engine = matrix.engines[report.id]
        code = report.floor["code"].partition(":")[0]
        broken = report.floor["status"] == "failed"
        if code == "cpu_unsupported" or (broken and "SIGILL" in report.what and engine.engine == "llama"):
            severity, fix = "failure", REBUILD
        elif broken:
            severity, fix = "failure", _again(engine)
        else:
            severity, fix = "warning", _INSTALL[engine.engine]
        yield Finding(f"engine.{report.id}.{code}", severity, f"{report.id}: {report.what}", fix)


def _again(engine: Engine) -> str:
    """Return the line that runs an engine's probe where its words are seen."""
    try:
        command = engine.command or floors.worker_command(engine.engine)
    except BackendMissing:
        return f"export {interpreter.VARIABLE}=/path/to/python"
    return f"see what it says: {shlex.join((*command, '--probe-floor'))}"


def lane_findings(matrix: HardwareMatrix, engines: Iterable[EngineReport]) -> Iterator[Finding]:
    """Report lanes that nothing on this machine can serve."""
    status = {report.id: report.status for report in engines}
    for lane in matrix.lanes.values():
        choices = (lane.pin,) if lane.pin else lane.engines
        if not any(status.get(id) == "ok" for id in choices):
            broken = ", ".join(id for id in choices if status.get(id) == "failed")
            what = f"lane {lane.id}: none of its engines runs on this machine ({', '.join(choices)})"
            fix = f"see the findings above: {broken}" if broken else f"synapse matrix explain {lane.id}"
            yield Finding(f"lane.{lane.id}.no_engine", "failure", what, fix)
