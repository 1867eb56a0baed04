"""What this machine can run and what is wrong with it, as findings that each carry their fix.

Every check is a function from facts to findings; the facts that need a child process (floors, worker versions) are
gathered first, side by side, each with a limit. Nothing here raises for what it finds.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from engines.bundle import manifest
from engines.bundle.manifest import BundleError
from synapse_host import certificates, hardware, remains
from synapse_host import floor as floors
from synapse_host.errors import SynapseError
from synapse_host.floor import Floor
from synapse_host.listener import SUN_PATH
from synapse_host.placement import floor_text, hardware_reason

if TYPE_CHECKING:
    from engines.bundle.manifest import Bundle
    from synapse_host.hardware import HostProfile
    from synapse_host.matrix import Engine, HardwareMatrix

Severity: TypeAlias = Literal["info", "warning", "failure"]

WORKERS: Final = 4
GIB: Final = 1024**3
MIN_DESCRIPTORS: Final = 256
MIN_FREE_RAM: Final = 1 * GIB
MIN_FREE_DISK: Final = 1 * GIB
PYTHONS: Final = ((3, 11), (3, 14))
"""From the first, below the second: what coremltools and llama-cpp-python have wheels or builds for."""

_INSTALL: Final = {
    "llama": "pip install 'synapse-workers[llama]'   (compiles for about 4 minutes on 2 cores)",
    "cuda": "pip install 'synapse-workers[cuda,cuda-libraries]'",
    "ane": "pip install 'synapse-workers[ane]'",
}
_REBUILD: Final = "pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python llama-cpp-python"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found. ``fix`` is a line to type or do, empty where nothing needs doing."""

    id: str
    severity: Severity
    what: str
    fix: str = ""


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


@dataclass(frozen=True, slots=True)
class Report:
    """Everything ``synapse doctor`` shows."""

    host: dict[str, Any]
    engines: list[EngineReport]
    findings: list[Finding]

    def worst(self) -> Severity:
        """Return the gravest severity."""
        grave = {finding.severity for finding in self.findings}
        return "failure" if "failure" in grave else "warning" if "warning" in grave else "info"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "findings": [asdict(finding) for finding in self.findings],
            "engines": [asdict(engine) for engine in self.engines],
            "host": self.host,
        }


def examine(
    matrix: HardwareMatrix,
    *,
    host_version: str,
    models_dir: Path,
    runtime_dir: Path | None = None,
    cache_dir: Path | None = None,
    data_dir: Path | None = None,
    probe_limit: float = floors.TIME_LIMIT,
) -> Report:
    """Examine this machine against *matrix*; blocks for seconds at most, plus *probe_limit* where a probe hangs."""
    keys = hardware.floor_keys(matrix, matrix.engines)
    with ThreadPoolExecutor(WORKERS) as pool:
        profile_job = pool.submit(hardware.detect)
        cache = floors.FloorCache(cache_dir or hardware.default_cache_dir(), hardware.machine_id())
        floor_job = pool.submit(floors.ask, keys, cache=cache, fresh=True, limit=probe_limit)
        foreign_job = pool.submit(_foreign_floors, matrix, probe_limit)
        version_jobs = {
            id: pool.submit(certificates.version_line, matrix, engine) for id, engine in matrix.engines.items()
        }
        bundle_job = pool.submit(lambda: list(bundle_findings(models_dir)))
        profile = replace(profile_job.result(), floors=floor_job.result())
        foreign = foreign_job.result()
        versions = {id: job.result() for id, job in version_jobs.items()}
        bundles = bundle_job.result()
    engines = [
        _engine_report(matrix, engine, profile, foreign.get(engine.id), versions[engine.id])
        for engine in matrix.engines.values()
    ]
    runtime = runtime_dir or Path(tempfile.gettempdir())
    findings = [
        *engine_findings(matrix, engines),
        *version_findings(engines, host_version),
        *python_findings(sys.version_info[:2], profile.os),
        *onnxruntime_findings(_installed("onnxruntime", "onnxruntime-gpu", "onnxruntime-directml")),
        *resource_findings(profile.ram_free, _free_disk(models_dir), models_dir),
        *descriptor_findings(_descriptor_limit()),
        *socket_findings(runtime),
        *abandoned_findings(remains.roots() if runtime_dir is None else [runtime]),
        *stale_findings(runtime),
        *bundles,
        *certificate_findings(matrix, profile, versions, models_dir, data_dir),
        *lane_findings(matrix, engines),
    ]
    host = {
        "version": host_version,
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
        "models_dir": str(models_dir),
        "disk_free_bytes": _free_disk(models_dir),
        "descriptor_limit": _descriptor_limit(),
        "socket_path_room": SUN_PATH - 1 - _socket_length(runtime),
    }
    return Report(host, engines, findings)


# --- engines ---------------------------------------------------------------------------------------------------------


def _engine_report(
    matrix: HardwareMatrix, engine: Engine, profile: HostProfile, foreign: Floor | None, worker: str
) -> EngineReport:
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
        code = floor.code.partition(":")[0]
        fixable = code in ("llama_missing", "bindings_missing", "cuda_runtime_missing", "cpu_unsupported")
        status, what = ("failed" if fixable else "passed_over"), floor_text(floor)
    return EngineReport(engine.id, status, what, engine.device, versions, asdict(floor) if floor else None, worker)


def _described(engine: Engine, versions: dict[str, str], profile: HostProfile) -> str:
    if engine.command is not None:
        return f"worker command {shlex.join(engine.command)}"
    parts = [f"{name} {number}" for name, number in list(versions.items())[:1]]
    if engine.device_kind == "cpu":
        best = profile.summary().split(", ")[2:]
        parts += best
        if engine.engine == "cuda":
            parts.append("CPU provider")
        threads = engine.runtime_config.get("threads")
        cores = f"{profile.cores} core{'s' if profile.cores != 1 else ''} shared by the lanes"
        parts.append(f"{threads} threads" if threads else cores)
    elif engine.device_kind == "cuda" and profile.compute_capability:
        major, minor = profile.compute_capability
        parts.append(f"compute capability {major}.{minor}, driver API {profile.driver_api}")
    return ", ".join(parts)


def _foreign_floors(matrix: HardwareMatrix, limit: float) -> dict[str, Floor]:
    """Ask foreign worker commands too: doctor is where a broken one should show."""
    answers = {}
    for engine in matrix.engines.values():
        if engine.command is not None:
            command = (*engine.command, "--probe-floor", "--device", engine.device)
            answers[engine.id] = floors.probe(command, cwd=matrix.path.parent, limit=limit, env=engine.env)
    return answers


def engine_findings(matrix: HardwareMatrix, engines: Iterable[EngineReport]) -> Iterator[Finding]:
    """Report engines whose probe failed or that lack something which can be installed."""
    for report in engines:
        engine = matrix.engines[report.id]
        floor = report.floor or {}
        if report.status != "failed":
            continue
        code = str(floor.get("code", ""))
        if floor.get("status") == "failed":
            command = shlex.join((*(engine.command or floors.worker_command(engine.engine)), "--probe-floor"))
            illegal = "SIGILL" in report.what and engine.engine == "llama"
            yield Finding(
                f"engine.{report.id}.{code}",
                "failure",
                f"{report.id}: {report.what}",
                _REBUILD if illegal else f"see what it says: {command}",
            )
        elif code == "cpu_unsupported":
            yield Finding(f"engine.{report.id}.cpu_unsupported", "failure", f"{report.id}: {report.what}", _REBUILD)
        else:
            yield Finding(
                f"engine.{report.id}.{code.partition(':')[0]}",
                "warning",
                f"{report.id}: {report.what}",
                _INSTALL[engine.engine],
            )


def version_findings(engines: Iterable[EngineReport], host_version: str) -> Iterator[Finding]:
    """Report workers of another version: host and workers are deployed together."""
    for report in engines:
        words = report.worker.split()
        if len(words) >= 2 and words[1] != host_version:
            yield Finding(
                f"engine.{report.id}.version",
                "failure",
                f"{report.id}: its worker is version {words[1]}, this host is {host_version}",
                "install host and workers together: pip install --force-reinstall synapse-workers",
            )


def lane_findings(matrix: HardwareMatrix, engines: Iterable[EngineReport]) -> Iterator[Finding]:
    """Report lanes that nothing on this machine can serve."""
    reports = list(engines)
    usable = {report.id for report in reports if report.status == "ok"}
    fixable = {report.id for report in reports if report.status == "failed"}
    for lane in matrix.lanes.values():
        choices = (lane.pin,) if lane.pin else lane.engines
        if not usable.intersection(choices):
            broken = [id for id in choices if id in fixable]
            yield Finding(
                f"lane.{lane.id}.no_engine",
                "failure",
                f"lane {lane.id}: none of its engines runs on this machine ({', '.join(choices)})",
                "see the findings above: " + ", ".join(broken) if broken else f"synapse matrix explain {lane.id}",
            )


# --- the machine and its Python --------------------------------------------------------------------------------------


def python_findings(python: tuple[int, ...], os: str) -> Iterator[Finding]:
    """Report a Python that the engines' packages don't support."""
    if not PYTHONS[0] <= python < PYTHONS[1]:
        shown = ".".join(map(str, python))
        what = f"Python {shown} is not supported; coremltools has packages for 3.11 to 3.13 only"
        yield Finding(
            "python.version", "failure" if os == "darwin" else "warning", what, "make a .venv with Python 3.13"
        )


def onnxruntime_findings(found: Mapping[str, str]) -> Iterator[Finding]:
    """Report two distributions that own the same module."""
    if len(found) > 1:
        names = " and ".join(sorted(found))
        yield Finding(
            "onnxruntime.clash",
            "failure",
            f"both {names} are installed; they own the same module and one hides the other",
            "pip uninstall -y " + " ".join(sorted(found)) + " && pip install --force-reinstall onnxruntime-gpu",
        )


def resource_findings(ram_free: int, disk_free: int | None, models_dir: Path) -> Iterator[Finding]:
    """Report little memory or disk."""
    if ram_free < MIN_FREE_RAM:
        yield Finding(
            "memory.low",
            "warning",
            f"{ram_free / GIB:.1f} GB of memory are free",
            "close something before loading models",
        )
    if disk_free is not None and disk_free < MIN_FREE_DISK:
        yield Finding(
            "disk.low",
            "warning",
            f"{disk_free / GIB:.1f} GB are free where bundles are made ({models_dir})",
            "free some space or pass --models-dir",
        )


def descriptor_findings(limit: int | None) -> Iterator[Finding]:
    """Report a low limit of open files."""
    if limit is not None and limit < MIN_DESCRIPTORS:
        yield Finding(
            "descriptors.low",
            "warning",
            f"only {limit} files may be open at once; lanes need about 8 each",
            "ulimit -n 1024",
        )


def _socket_length(runtime: Path) -> int:
    # mkdtemp adds synapse-xxxxxxxx, a worker's name its lane and generation.
    return len(os.fsencode(str(runtime / "synapse-12345678" / "synapse" / "workers" / "generate-1000.sock")))


def socket_findings(runtime: Path) -> Iterator[Finding]:
    """Report a runtime directory whose socket paths don't fit a socket address."""
    if os.name != "posix":
        return
    longest = _socket_length(runtime)
    if longest >= SUN_PATH:
        yield Finding(
            "socket.path",
            "info",
            f"{runtime} is so long that socket paths ({longest} bytes, {SUN_PATH - 1} fit) move to short names in /tmp",
            "set TMPDIR to a shorter directory to avoid it",
        )


def abandoned_findings(roots: Iterable[Path]) -> Iterator[Finding]:
    """Report private runtime directories whose hosts were killed; the next one-shot verb removes them."""
    found = [path for root in roots for path in remains.abandoned(root)]
    if found:
        number = "1 runtime directory" if len(found) == 1 else f"{len(found)} runtime directories"
        what = f"{number} of hosts that were killed, first {found[0]}; the next synapse embed removes what is left"
        yield Finding("runtime.abandoned", "warning", what, f"rm -r {shlex.join(map(str, found))}")


def stale_findings(runtime: Path) -> Iterator[Finding]:
    """Report what hosts that were killed left behind: sockets of ours that nobody listens on."""
    if os.name != "posix":
        return
    known = set(remains.abandoned(runtime))
    stale = [path for path in _sockets(runtime) if path.parents[2] not in known and not _listening(path)]
    if stale:
        roots = sorted({str(path.parents[2]) for path in stale})
        what = f"{len(stale)} sockets of hosts that are gone, first {stale[0]}"
        removable = [root for root in roots if Path(root).name.startswith("synapse-")]
        fix = f"rm -r {shlex.join(removable)}" if removable else f"rm {shlex.join(map(str, stale))}"
        yield Finding("socket.stale", "warning", what, fix)


def _sockets(runtime: Path) -> Iterator[Path]:
    for pattern in ("synapse-*/synapse/workers/*.sock", "synapse/workers/*.sock"):
        for path in sorted(runtime.glob(pattern))[:256]:
            try:
                entry = path.lstat()
            except OSError:
                continue
            if stat.S_ISSOCK(entry.st_mode) and entry.st_uid == os.getuid():
                yield path


def _listening(path: Path) -> bool:
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.settimeout(0.2)
        probe.connect(str(path))
    except ConnectionRefusedError:
        return False
    except OSError:
        return True
    finally:
        probe.close()
    return True


def bundle_findings(models_dir: Path) -> Iterator[Finding]:
    """Re-check every installed bundle: manifest and digests."""
    from synapse_host import builder, catalogue

    try:
        installed = catalogue.installed(models_dir)
    except OSError as exc:
        yield Finding("models.unreadable", "warning", f"{models_dir}: {exc.strerror or exc}", "pass --models-dir")
        return
    for name, path in installed.items():
        fix = f"synapse models install {name}" if name in catalogue.DEFAULTS else f"build the bundle again: {path}"
        try:
            bundle: Bundle = manifest.read(path)
            wrong = builder.verify(bundle)
        except (BundleError, SynapseError, OSError) as exc:
            wrong = [str(exc)]
        for what in wrong:
            yield Finding(f"model.{name}.invalid", "failure", f"model {name}: {what}", fix)
        if not wrong:
            formats = ", ".join(f"{artifact.format} {artifact.dtype}" for artifact in bundle.manifest.artifacts)
            yield Finding(f"model.{name}.ok", "info", f"model {name}: digests match ({formats})")


def certificate_findings(
    matrix: HardwareMatrix,
    profile: HostProfile,
    versions: Mapping[str, str],
    models_dir: Path,
    data_dir: Path | None = None,
) -> Iterator[Finding]:
    """Say of every certificate on this machine whether it still holds, and what voided it. *versions*: worker lines."""
    from synapse_host import catalogue

    bundles: dict[str, tuple[str, Bundle]] = {}
    with suppress(OSError):
        for name, path in catalogue.installed(models_dir).items():
            with suppress(BundleError):
                bundle = manifest.read(path)
                bundles[bundle.digest] = (name, bundle)
    for path, found in certificates.stored(data_dir):
        if found is None:
            yield Finding(f"certificate.{path.stem[:12]}.unreadable", "warning", f"{path} can't be read", f"rm {path}")
            continue
        name, known = bundles.get(found.manifest_digest, (found.model_id, None))
        what = f"certificate {found.lane}/{found.engine_id}/{name}"
        id = f"{found.lane}.{found.engine_id}.{name}"
        if known is None:
            why = f"{what}: its bundle is not installed here, or was made anew since"
            yield Finding(f"certificate.{id}.unused", "info", why)
            continue
        again = f"synapse certify {found.lane} --model {name} --engine {found.engine_id}"
        engine = matrix.engines.get(found.engine_id)
        if engine is None:
            why = f"{what}: the matrix has no engine {found.engine_id}"
            yield Finding(f"certificate.{id}.void", "warning", why, f"rm {path}")
            continue
        artifacts = known.artifacts(engine.format)
        artifact = next((one for one in artifacts if one.dtype == found.binding.dtype), None)
        if artifact is None:
            reasons = [f"the bundle has no {engine.format} {found.binding.dtype} any more"]
        else:
            identity = certificates.identity_of(versions.get(engine.id, ""))
            now = certificates.present(engine, artifact, profile, identity)
            reasons = certificates.void_because(found.binding, now)
        if reasons:
            yield Finding(f"certificate.{id}.void", "warning", f"{what}: void since {'; '.join(reasons)}", again)
        else:
            kind = ", approximate" if found.precision == "approximate" else ""
            yield Finding(f"certificate.{id}.valid", "info", f"{what}: holds (since {found.certified_at[:10]}{kind})")


def _installed(*names: str) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _free_disk(folder: Path) -> int | None:
    for place in (folder, *folder.parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return None


def _descriptor_limit() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft
