"""What a certificate is bound to: everything that changes an engine's numbers on one machine.

A run records these facts in its document; the same functions tell them now, and :func:`void_because` says what differs.
Where certificates lie and who asks for one is :mod:`synapse_host.certificates.standing`' business.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

from msgspec import UNSET, Struct

from engines.bundle.manifest import Artifact, Bundle, FileRef
from synapse_host.certificates.document import Evidence
from synapse_host.certificates.engine_build import build_id
from synapse_host.errors import BackendMissing
from synapse_host.placement import interpreter
from synapse_host.placement import probe as floors
from synapse_host.placement.child import worker_environment
from synapse_host.placement.hardware import HostProfile
from synapse_host.placement.matrix import Engine, HardwareMatrix

SOFTWARE: Final = ("synapse-workers", "numpy", "tokenizers")
"""What computes or prepares numbers beside the engine's own distributions."""
BESIDE: Final = ("python", "msgspec")
"""What a document names too, and no number depends on."""
_HARMLESS: Final = frozenset({"PATH", "HOME", "USER", "LANG", "TMPDIR", "SYSTEMROOT", "SYNAPSE_WORKER_ID"})


class Binding(Struct, frozen=True, forbid_unknown_fields=True):
    """What a certificate is bound to: the bundle, the engine's installation and configuration, the machine.

    Attributes:
        artifact_digest: of a Core ML package the tree digest.
        runtime_config: what the matrix puts into LOAD; ``threads`` only where the matrix names it, since the host
            divides the cores among its lanes otherwise.
        env: variables that may change numbers, name to a digest of the value.
        engine, engine_version, kernel_revision: what HELLO says, or ``--version`` before there is one. None for an
            engine or version that isn't told, and then nothing holds.
        build: see :mod:`synapse_host.certificates.engine_build`.
    """

    manifest_digest: str
    artifact_digest: str
    format: str
    dtype: str
    tokenizer: str | None
    device: str
    runtime_config: dict[str, str]
    env: dict[str, str]
    engine: str | None
    engine_version: str | None
    kernel_revision: str | None
    build: str | None
    packages: dict[str, str]
    software: dict[str, str]
    os: str
    os_build: str
    arch: str
    cpu: str
    cpu_features: list[str]
    accelerator: str | None
    driver: str | None


_NOUNS: Final[Mapping[str, str]] = {
    "manifest_digest": "the bundle",
    "artifact_digest": "the artifact",
    "format": "the artifact's format",
    "dtype": "the artifact's dtype",
    "tokenizer": "the tokenizer",
    "device": "the device",
    "runtime_config": "runtime_config.",
    "env": "the variable ",
    "engine": "the engine",
    "engine_version": "the engine version",
    "kernel_revision": "the kernel revision",
    "build": "the engine's build",
    "packages": "",
    "software": "",
    "os": "the operating system",
    "os_build": "the operating system build",
    "arch": "the architecture",
    "cpu": "the processor",
    "cpu_features": "the processor's instruction sets",
    "accelerator": "the accelerator",
    "driver": "the driver",
}


class Identity(Struct, frozen=True):
    """What a worker's ``--version`` line says; None where it says nothing of it."""

    engine: str | None = None
    engine_version: str | None = None
    kernel_revision: str | None = None


def bound(evidence: Evidence, engine: Engine) -> Binding:
    """Return what a document is bound to, from what it recorded; *engine*: the matrix's."""
    model, facts, machine = evidence.model, evidence.engine, evidence.machine
    sent = dict(facts.runtime_config)
    if "threads" not in engine.runtime_config:
        sent.pop("threads", None)
    return Binding(
        manifest_digest=model.manifest_digest,
        artifact_digest=model.tree or model.artifact_digest,
        format=model.format,
        dtype=model.dtype,
        tokenizer=model.tokenizer,
        device=facts.device,
        runtime_config=sent,
        env=facts.env,
        engine=facts.observed,
        engine_version=facts.version,
        kernel_revision=facts.kernel_revision,
        build=facts.build,
        packages=facts.packages,
        software={name: version for name, version in evidence.software.items() if name not in BESIDE},
        os=machine.os,
        os_build=machine.os_build,
        arch=machine.arch,
        cpu=machine.cpu,
        cpu_features=machine.cpu_features,
        accelerator=machine.accelerator,
        driver=machine.driver,
    )


def present(
    matrix: HardwareMatrix,
    engine: Engine,
    bundle: Bundle,
    artifact: Artifact,
    profile: HostProfile,
    identity: Identity,
) -> Binding:
    """Return what a certificate of this engine and artifact would be bound to now."""
    return Binding(
        manifest_digest=bundle.digest,
        artifact_digest=artifact.digest if artifact.tree is UNSET else artifact.tree,
        format=artifact.format,
        dtype=artifact.dtype,
        tokenizer=bundle.manifest.tokenizer.digest if isinstance(bundle.manifest.tokenizer, FileRef) else None,
        device=engine.device,
        runtime_config=engine.runtime_config,
        env=environment_of(engine),
        engine=identity.engine,
        engine_version=identity.engine_version,
        kernel_revision=identity.kernel_revision,
        build=build_id(engine, matrix),
        packages=packages_of(engine),
        software=floors.versions(SOFTWARE),
        os=profile.os,
        os_build=profile.os_build,
        arch=profile.arch,
        cpu=profile.cpu_model,
        cpu_features=sorted(profile.cpu_features),
        accelerator=accelerator_of(engine, profile),
        driver=driver_of(engine, profile),
    )


def void_because(bound: Binding, now: Binding) -> list[str]:
    """Return what changed since, as ``noun changed old → new``; empty while the certificate holds."""
    if now.engine is None or now.engine_version is None:
        return ["its worker doesn't say which engine and version it is (--version)"]
    if now.build is None:
        return ["the files of the engine's installation can't be found or read"]
    reasons = []
    for field, noun in _NOUNS.items():
        old, new = getattr(bound, field), getattr(now, field)
        if isinstance(old, dict):
            names = sorted({*old, *new})
            pairs = [(f"{noun}{name}", old.get(name), new.get(name)) for name in names]
        else:
            pairs = [(noun, old, new)]
        reasons += [_changed(what, before, after) for what, before, after in pairs if before != after]
    return reasons


def _changed(noun: str, old: Any, new: Any) -> str:
    if isinstance(old, list):
        gone, come = sorted({*old} - {*new}), sorted({*new} - {*old})
        return f"{noun} changed: without {', '.join(gone) or 'none'}, with {', '.join(come) or 'none'}"
    return f"{noun} changed {_short(old)} → {_short(new)}"


def _short(value: str | None) -> str:
    if value is None:
        return "none"
    return value if len(value) <= 64 or " " in value else f"{value[:19]}…"


# --- facts, for the document of a run and for now alike --------------------------------------------------------------


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


def packages_of(engine: Engine) -> dict[str, str]:
    """Return the versions of what an engine stands on; on a GPU with the wheels of the CUDA libraries."""
    if engine.command:
        return {}
    return floors.installed(engine.engine) | (floors.cuda_wheels() if engine.device_kind == "cuda" else {})


def environment_of(engine: Engine) -> dict[str, str]:
    """Return the variables that a worker gets and that may change numbers: name to a digest of the value.

    Values stay out of documents: a path names this machine, and what a matrix passes on may be a secret.
    """
    sent = worker_environment("", engine.env)
    telling = {
        name: value
        for name, value in sent.items()
        if name in engine.env or not (name.upper() in _HARMLESS or name.startswith("LC_"))
    }
    return {name: hashlib.sha256(value.encode()).hexdigest()[:16] for name, value in sorted(telling.items())}


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
