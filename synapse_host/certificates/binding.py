"""What a certificate is bound to: everything that changes an engine's numbers on one machine.

The functions of this module gather the facts of a document (model, engine, machine, software): a run does it for its
document, :func:`present` for now. :func:`bound` picks from either what numbers depend on, by the words that people
read, and :func:`void_because` says what differs. Where certificates lie and who asks for one is in
:mod:`synapse_host.certificates.standing`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeAlias

from msgspec import UNSET, Struct

from engines.bundle.manifest import Artifact, Bundle, FileRef
from synapse_host.certificates.document import EngineFacts, Evidence, Machine, Model
from synapse_host.errors import BackendMissing
from synapse_host.placement import interpreter
from synapse_host.placement import probe as floors
from synapse_host.placement.child import worker_environment
from synapse_host.placement.hardware import HostProfile
from synapse_host.placement.matrix import WORKER_ENGINES, Engine, HardwareMatrix

SOFTWARE: Final = ("synapse-workers", "numpy", "tokenizers")
"""What computes or prepares numbers beside the engine's own distributions."""
BESIDE: Final = ("python", "msgspec")
"""What a document names too, and no number depends on."""
_NATIVE: Final = re.compile(r"\.(so|dylib|dll|pyd|metallib)(\.[0-9.]+)?$")
_HARMLESS: Final = frozenset({"PATH", "HOME", "USER", "LANG", "TMPDIR", "SYSTEMROOT", "SYNAPSE_WORKER_ID"})

Binding: TypeAlias = dict[str, str | None]
"""What numbers depend on, each by what it is called when it changed."""


class Identity(Struct, frozen=True):
    """What a worker's ``--version`` line says; None where it says nothing of it."""

    engine: str | None = None
    engine_version: str | None = None
    kernel_revision: str | None = None


def bound(model: Model, facts: EngineFacts, machine: Machine, software: Mapping[str, str], *, threads: bool) -> Binding:
    """Return what these facts bind a certificate to.

    *threads*: the matrix names the number of threads; otherwise the host divides the cores among its lanes.
    """
    sent = {name: value for name, value in facts.runtime_config.items() if threads or name != "threads"}
    return {
        "the bundle": model.manifest_digest,
        "the artifact": model.tree or model.artifact_digest,
        "the artifact's format": model.format,
        "the artifact's dtype": model.dtype,
        "the tokenizer": model.tokenizer,
        "the device": facts.device,
        **{f"runtime_config.{name}": value for name, value in sent.items()},
        **{f"the variable {name}": value for name, value in facts.env.items()},
        "the engine": facts.observed,
        "the engine version": facts.version,
        "the kernel revision": facts.kernel_revision,
        "the engine's build": facts.build,
        **facts.packages,
        **{name: version for name, version in software.items() if name not in BESIDE},
        "the operating system": machine.os,
        "the operating system build": machine.os_build,
        "the architecture": machine.arch,
        "the processor": machine.cpu,
        "the accelerator": machine.accelerator,
        "the driver": machine.driver,
    }


def recorded(evidence: Evidence, engine: Engine) -> Binding:
    """Return what a document is bound to, from what its run recorded; *engine*: the matrix's."""
    threads = "threads" in engine.runtime_config
    return bound(evidence.model, evidence.engine, evidence.machine, evidence.software, threads=threads)


def present(
    matrix: HardwareMatrix,
    engine: Engine,
    bundle: Bundle,
    artifact: Artifact,
    profile: HostProfile,
    identity: Identity,
) -> Binding:
    """Return what a certificate of this engine and artifact would be bound to now."""
    facts = engine_facts(
        matrix,
        engine,
        runtime_config=engine.runtime_config,
        observed=identity.engine,
        version=identity.engine_version,
        kernel_revision=identity.kernel_revision,
    )
    return bound(model_of(bundle, artifact), facts, machine_facts(engine, profile), software_facts(), threads=True)


def void_because(before: Binding, now: Binding) -> list[str]:
    """Return what changed since, as ``noun changed old → new``; empty while the certificate holds."""
    if now["the engine"] is None or now["the engine version"] is None:
        return ["its worker doesn't say which engine and version it is (--version)"]
    if now["the engine's build"] is None:
        return ["the files of the engine's installation can't be found or read"]
    return [
        f"{what} changed {_short(before.get(what))} → {_short(now.get(what))}"
        for what in dict.fromkeys([*before, *now])
        if before.get(what) != now.get(what)
    ]


def _short(value: str | None) -> str:
    if value is None:
        return "none"
    return value if len(value) <= 64 or " " in value else f"{value[:19]}…"


# --- facts, for the document of a run and for now alike --------------------------------------------------------------


def model_of(bundle: Bundle, artifact: Artifact, name: str = "") -> Model:
    """Return what a document says of a bundle's model and the artifact that was loaded."""
    manifest = bundle.manifest
    return Model(
        name=name or manifest.model_id,
        model_id=manifest.model_id,
        family=manifest.family,
        task=manifest.task,
        dims=manifest.dims,
        max_tokens=manifest.max_tokens,
        manifest_digest=bundle.digest,
        artifact_digest=artifact.digest,
        format=artifact.format,
        dtype=artifact.dtype,
        bytes=None if artifact.bytes is UNSET else artifact.bytes,
        tree=None if artifact.tree is UNSET else artifact.tree,
        source=None if manifest.source is UNSET else manifest.source,
        tokenizer=manifest.tokenizer.digest if isinstance(manifest.tokenizer, FileRef) else None,
    )


def engine_facts(matrix: HardwareMatrix, engine: Engine, **said: Any) -> EngineFacts:
    """Return what a document says of an engine and its installation; *said*: what LOAD sent and the worker answered."""
    return EngineFacts(
        id=engine.id,
        device=engine.device,
        # The program's own name only: a document names no place on this machine.
        command=[os.path.basename(word) for word in engine.command or ()],  # noqa: PTH119
        packages=packages_of(engine),
        expected=engine.worker_engine,
        env=environment_of(engine),
        build=build_id(engine, matrix),
        **said,
    )


def machine_facts(engine: Engine, profile: HostProfile) -> Machine:
    """Return what a document says of the machine, as far as the engine depends on it."""
    return Machine(
        os=profile.os,
        os_version=profile.os_version,
        os_build=profile.os_build,
        arch=profile.arch,
        cpu=profile.cpu_model,
        cpu_features=sorted(profile.cpu_features),
        cores=profile.cores,
        cores_total=profile.cores_total,
        quota=profile.quota,
        ram_bytes=profile.ram_total,
        driver=_driver(engine, profile),
        accelerator=_accelerator(engine, profile),
    )


def software_facts() -> dict[str, str]:
    """Return the versions of what computes beside the engine."""
    return {"python": ".".join(map(str, sys.version_info[:3])), **floors.versions((*SOFTWARE, *BESIDE))}


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
    """Return the versions of the packages an engine needs; on a GPU with the wheels of the CUDA libraries."""
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


def _driver(engine: Engine, profile: HostProfile) -> str | None:
    """Return the driver an engine depends on; None on the CPU and on Apple silicon, where the OS build says it."""
    if engine.device_kind == "cuda" and profile.driver_api is not None:
        return ", ".join(filter(None, (f"cuda {profile.driver_api}", profile.nvidia_driver)))
    return None


def _accelerator(engine: Engine, profile: HostProfile) -> str | None:
    """Return what kind of accelerator an engine runs on, None on the CPU."""
    if engine.device_kind == "cuda":
        capability = profile.compute_capability
        if capability is None:
            return None
        return ", ".join((*profile.nvidia_models, f"compute capability {capability[0]}.{capability[1]}"))
    return profile.cpu_model if engine.device_kind in ("ane", "metal") else None


# --- which build of an engine is installed ---------------------------------------------------------------------------
#
# A version says too little: llama-cpp-python built again against OpenBLAS keeps its version and gives other numbers. So
# the native libraries of an engine's distributions are hashed, with the sources of our own worker; of a foreign worker
# the files that its command names. Hashing hundreds of megabytes takes a second, so a process remembers the digest of a
# file until its size, times or inode are others.


def build_id(engine: Engine, matrix: HardwareMatrix) -> str | None:
    """Return ``sha256:<hex>`` of an engine's native libraries and sources; None where they can't be found."""
    try:
        files = sorted(_foreign(engine.command, matrix.path.parent) if engine.command else _own(engine.engine))
        stats = [(path, path.stat()) for _, path in files]
        digests = [_digest(path, of.st_size, of.st_mtime_ns, of.st_ctime_ns, of.st_ino) for path, of in stats]
    except OSError:
        return None
    named = sorted((name, digest) for (name, _), digest in zip(files, digests, strict=True))
    words = json.dumps([list(engine.command or ()), named])
    return "sha256:" + hashlib.sha256(words.encode()).hexdigest() if files else None


def _own(engine: str) -> Iterator[tuple[str, Path]]:
    """Yield name and path of the files behind one of our engines. OSError where pip left no list of them."""
    root = interpreter.package_root()
    others = {name for name in WORKER_ENGINES if name != engine}
    for path in sorted((root / "engines").rglob("*.py")):
        inside = path.relative_to(root)
        if inside.parts[1] not in others:
            yield inside.as_posix(), path
    for name in floors.installed(engine):
        yield from _native(name)


def _native(name: str) -> Iterator[tuple[str, Path]]:
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        found = distribution(name)
    except PackageNotFoundError:
        return
    if found.files is None:
        raise FileNotFoundError(f"{name}: its installed files are not recorded")
    for file in found.files:
        if _NATIVE.search(file.name):
            yield file.as_posix(), Path(str(found.locate_file(file)))


def _foreign(command: Iterable[str], cwd: Path) -> Iterator[tuple[str, Path]]:
    """Yield the program and every other file that the words of a command name."""
    for number, word in enumerate(command):
        program = (
            shutil.which(word, path=os.environ.get("PATH")) if number == 0 and not Path(word).parent.name else None
        )
        path = Path(program) if program else cwd / word
        try:
            if path.is_file():
                yield word, path
        except (OSError, ValueError):
            continue  # no path at all: a script of JSON, say


@lru_cache(maxsize=4096)
def _digest(path: Path, size: int, modified: int, changed: int, inode: int) -> str:
    """Return the SHA-256 of a file; it is hashed again once its size, times or inode are others."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
