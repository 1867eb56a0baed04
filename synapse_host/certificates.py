"""Certificates: that a lane passed on this machine, and what must stay as it was for that to hold.

One file per engine and bundle: ``<data dir>/synapse/certificates/<engine id>/<manifest_digest>.json``. A certificate is
void when the artifact, engine version, kernel revision, operating system build, driver or device is another one now;
:func:`void_because` says which. Protocol version and progress are no part of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import UNSET, Struct

from engines.bundle.manifest import Artifact
from synapse_host import floor as floors
from synapse_host import gates, interpreter, places
from synapse_host.errors import BackendMissing
from synapse_host.evidence import Evidence, Precision
from synapse_host.hardware import HostProfile
from synapse_host.matrix import Engine, HardwareMatrix
from synapse_host.places import NoHome


class Binding(Struct, frozen=True, forbid_unknown_fields=True):
    """What a certificate is bound to. None: not known, and then not compared."""

    artifact_digest: str
    dtype: str
    engine: str | None
    """HELLO's engine name."""
    engine_version: str | None
    kernel_revision: str | None
    packages: dict[str, str]
    os_build: str
    driver: str | None
    device: str
    """What the worker was started with, and the model of the processor or accelerator."""
    hardware: str


class Certificate(Struct, frozen=True, forbid_unknown_fields=True):
    """One file. ``evidence_digest`` is the document's; ``precision`` says ``approximate`` for an int8 artifact."""

    format: Literal["synapse-certificate-v1"]
    engine_id: str
    lane: str
    task: str
    model_id: str
    manifest_digest: str
    precision: Precision
    certified_at: str
    evidence: str
    evidence_digest: str
    binding: Binding
    packed_widths: list[int] = []
    """Packed widths that qualified; a Neural Engine worker is started with these and no others."""
    cost_ms: dict[str, float] = {}
    """Measured time of one row, or one pass, by function."""
    thresholds: dict[str, float] = {}
    """What the run was judged by; empty in an older certificate, and then not compared."""


class Identity(Struct, frozen=True):
    """What a worker's ``--version`` line says; None where it says nothing of it."""

    engine: str | None = None
    engine_version: str | None = None
    kernel_revision: str | None = None


def folder(data_dir: Path | None = None) -> Path:
    """Return where certificates lie: below *data_dir*, or the user's data directory. Raises NoHome."""
    return places.data() / "certificates" if data_dir is None else data_dir / "synapse" / "certificates"


def path_of(engine_id: str, manifest_digest: str, data_dir: Path | None = None) -> Path:
    """Return the certificate file of an engine and a bundle."""
    return folder(data_dir) / engine_id / f"{manifest_digest}.json"


def of_evidence(evidence: Evidence, *, path: Path, digest: str) -> Certificate:
    """Return the certificate that a certified document stands for."""
    engine, machine = evidence.engine, evidence.machine
    return Certificate(
        format="synapse-certificate-v1",
        engine_id=engine.id,
        lane=evidence.lane,
        task=evidence.model.task,
        model_id=evidence.model.model_id,
        manifest_digest=evidence.model.manifest_digest,
        precision=evidence.precision,
        certified_at=evidence.created,
        evidence=str(path),
        evidence_digest=digest,
        binding=Binding(
            artifact_digest=evidence.model.tree or evidence.model.artifact_digest,
            dtype=evidence.model.dtype,
            engine=engine.observed,
            engine_version=engine.version,
            kernel_revision=engine.kernel_revision,
            packages=engine.packages,
            os_build=machine.os_build,
            driver=machine.driver,
            device=engine.device,
            hardware=machine.accelerator or machine.cpu,
        ),
        packed_widths=gates.qualified_widths(evidence),
        cost_ms=evidence.cost_ms,
        thresholds=evidence.thresholds,
    )


def write(certificate: Certificate, data_dir: Path | None = None) -> Path:
    """Store a certificate in place of an older one of the same engine and bundle."""
    path = path_of(certificate.engine_id, certificate.manifest_digest, data_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(msgspec.to_builtins(certificate), indent=1, ensure_ascii=False) + "\n", "utf-8")
    part.replace(path)
    return path


def remove(engine_id: str, manifest_digest: str, data_dir: Path | None = None) -> None:
    """Withdraw a certificate, if there is one."""
    with suppress(NoHome):
        path_of(engine_id, manifest_digest, data_dir).unlink(missing_ok=True)


def read(path: Path) -> Certificate | None:
    """Return a certificate, or None where the file is none, or lies under another name than its own."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Certificate)
    except (OSError, msgspec.MsgspecError):
        return None
    own = path.stem == found.manifest_digest and path.parent.name == found.engine_id
    return found if own else None


def stored(data_dir: Path | None = None) -> Iterator[tuple[Path, Certificate | None]]:
    """Yield every certificate file, sorted, with its content or None where it can't be read."""
    try:
        found = sorted(folder(data_dir).glob("*/*.json"))
    except NoHome:
        return
    for path in found:
        if not path.name.startswith("."):
            yield path, read(path)


# --- is it still so? -------------------------------------------------------------------------------------------------


def identity_of(line: str) -> Identity:
    """Read a worker's ``--version`` line."""
    fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
    return Identity(fields.get("engine"), fields.get("engine_version"), fields.get("kernel_revision"))


def version_line(matrix: HardwareMatrix, engine: Engine) -> str:
    """Return the one line of an engine's ``--version``, asked in a child; empty where it gives none."""
    if engine.command is not None:
        command, cwd, env = engine.command, matrix.path.parent, engine.env
    else:
        try:
            command, cwd = floors.worker_command(engine.engine), interpreter.package_root()
        except BackendMissing:
            return ""
        env = {**interpreter.search_path(), **engine.env}
    return floors.version_line((*command, "--version", "--device", engine.device), cwd=cwd, env=env)


def driver_of(engine: Engine, profile: HostProfile) -> str | None:
    """Return the driver an engine depends on; None on the CPU and on Apple silicon, where the OS build says it."""
    if engine.device_kind == "cuda" and profile.driver_api is not None:
        return ", ".join(filter(None, (f"cuda {profile.driver_api}", profile.nvidia_driver)))
    return None


def accelerator_of(engine: Engine, profile: HostProfile) -> str | None:
    """Return what kind of accelerator an engine runs on, None on the CPU."""
    if engine.device_kind == "cuda":
        capability = profile.compute_capability
        if capability is None:
            return None
        return ", ".join((*profile.nvidia_models, f"compute capability {capability[0]}.{capability[1]}"))
    return profile.cpu_model if engine.device_kind in ("ane", "metal") else None


def present(engine: Engine, artifact: Artifact, profile: HostProfile, identity: Identity) -> Binding:
    """Return what a certificate of this engine and artifact would be bound to now."""
    return Binding(
        artifact_digest=artifact.digest if artifact.tree is UNSET else artifact.tree,
        dtype=artifact.dtype,
        engine=identity.engine,
        engine_version=identity.engine_version,
        kernel_revision=identity.kernel_revision,
        packages={} if engine.command else floors.installed(engine.engine),
        os_build=profile.os_build,
        driver=driver_of(engine, profile),
        device=engine.device,
        hardware=accelerator_of(engine, profile) or profile.cpu_model,
    )


def void_because(bound: Binding, now: Binding) -> list[str]:
    """Return what changed since, as ``noun changed old → new``; empty while the certificate holds."""
    reasons = []

    def compare(noun: str, old: str | None, new: str | None, *, known: bool = False) -> None:
        if old != new and (known or (old is not None and new is not None)):
            reasons.append(f"{noun} changed {_short(old)} → {_short(new)}")

    compare("the artifact", bound.artifact_digest, now.artifact_digest)
    compare("the artifact's dtype", bound.dtype, now.dtype)
    compare("the engine", bound.engine, now.engine)
    compare("the device", bound.device, now.device)
    for name in sorted({*bound.packages, *now.packages}):
        compare(name, bound.packages.get(name), now.packages.get(name), known=True)
    if bound.packages == now.packages:
        # The version is mostly the package's own: told once is enough.
        compare("the engine version", bound.engine_version, now.engine_version)
    compare("the kernel revision", bound.kernel_revision, now.kernel_revision)
    compare("the operating system build", bound.os_build, now.os_build)
    compare("the driver", bound.driver, now.driver, known=True)
    compare("the hardware", bound.hardware, now.hardware)
    return reasons


def stricter(found: Certificate, matrix: HardwareMatrix) -> list[str]:
    """Return where *matrix* asks more than the run was judged by: a matrix changed since, or a share given by hand."""
    wanted = gates.thresholds(
        matrix,
        engine=found.engine_id,
        task=found.task,
        precision=found.precision,
        placement=found.binding.device.partition(":")[0] == "ane",
    )
    names = gates.weaker(found.thresholds, wanted) if found.thresholds else []
    return [f"threshold {name} was {found.thresholds.get(name)}, the matrix asks {wanted[name]}" for name in names]


def _short(value: str | None) -> str:
    if value is None:
        return "none"
    return value if len(value) <= 64 or " " in value else f"{value[:19]}…"


def identities(matrix: HardwareMatrix, engine_ids: set[str]) -> Mapping[str, Identity]:
    """Ask engines who they are, by ``--version`` side by side; blocks for a moment. Empty for one that doesn't tell."""
    with ThreadPoolExecutor(4) as pool:
        lines = pool.map(lambda id: version_line(matrix, matrix.engines[id]), engine_ids)
        return {id: identity_of(line) for id, line in zip(engine_ids, lines, strict=True)}
