"""Certificates for tests: a clean document as a run on this machine would have written it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from engines.bundle import manifest
from engines.bundle.manifest import Artifact, Bundle, FileRef, Function
from synapse_host.certificates import binding, standing, verdict
from synapse_host.certificates import document as documents
from synapse_host.certificates.binding import Binding, Identity
from synapse_host.certificates.document import Evidence
from synapse_host.placement import hardware
from synapse_host.placement.hardware import HostProfile
from synapse_host.placement.matrix import HardwareMatrix, load
from tests.support.evidence import DIGEST, evidence
from tests.support.sabotage import rewrite
from tests.support.small_bundle import write_bundle, write_matrix

FIXTURES = FileRef("fixtures.npz", DIGEST)


def toy(folder: Path, **options: Any) -> Bundle:
    """Write a toy bundle whose manifest names the fixtures of the clean documents; the file itself is not there."""
    return manifest.read(write_bundle(folder, fixtures=FIXTURES, **options))


def document(
    matrix: HardwareMatrix, engine_id: str, bundle: Bundle, *, identity: Identity | None = None, **clean: Any
) -> Evidence:
    """Return a clean document about the bundle's first artifact for that engine. *identity*: None asks the worker."""
    engine = matrix.engines[engine_id]
    artifact = bundle.artifacts(engine.format)[0]
    profile = hardware.detect(hardware.floor_keys(matrix, [engine_id]))
    identity = identity or binding.identity_of(binding.version_line(matrix, engine))
    now = binding.present(matrix, engine, bundle, artifact, profile, identity)
    return bound_to(evidence(bundle.manifest.task, **clean), now, engine_id, bundle, expected=engine.worker_engine)


def bound_to(clean: Evidence, now: Binding, engine_id: str, bundle: Bundle, *, expected: str) -> Evidence:
    """Return a document with the facts of a binding in their places."""
    described, artifact = bundle.manifest, bundle.artifacts(now.format)[0]
    replace = msgspec.structs.replace
    assert clean.fixture is not None and isinstance(described.fixtures, FileRef)
    changed = replace(
        clean,
        fixture=replace(clean.fixture, expected_digest=described.fixtures.digest, digest=described.fixtures.digest),
        software={**clean.software, **now.software},
        model=replace(
            clean.model,
            model_id=described.model_id,
            family=described.family,
            dims=described.dims,
            max_tokens=described.max_tokens,
            manifest_digest=now.manifest_digest,
            artifact_digest=artifact.digest,
            tree=artifact.tree or None,
            format=now.format,
            dtype=now.dtype,
            bytes=artifact.bytes or None,
            tokenizer=now.tokenizer,
        ),
        engine=replace(
            clean.engine,
            id=engine_id,
            device=now.device,
            runtime_config={"threads": "1", **now.runtime_config},
            packages=now.packages,
            expected=expected,
            observed=now.engine,
            version=now.engine_version,
            kernel_revision=now.kernel_revision,
            build_flags={"device": now.device},
            env=now.env,
            build=now.build,
        ),
        machine=replace(
            clean.machine,
            os=now.os,
            os_build=now.os_build,
            arch=now.arch,
            cpu=now.cpu,
            cpu_features=now.cpu_features,
            driver=now.driver,
            accelerator=now.accelerator,
        ),
    )
    return verdict.judge(changed)


def grant(matrix: HardwareMatrix, engine_id: str, bundle: Bundle, data: Path | None, **options: Any) -> Path:
    """Store a valid certificate and return its file."""
    path = standing.settle(document(matrix, engine_id, bundle, **options), matrix, data)
    assert path is not None
    return path


@dataclasses.dataclass
class Case:
    """A valid certificate in a folder of its own, and what is against it after something was changed."""

    matrix: HardwareMatrix
    bundle: Bundle
    data: Path
    path: Path
    evidence: Evidence
    identity: Identity
    profile: HostProfile

    def why(
        self, identity: Identity | None = None, profile: HostProfile | None = None, **engine: Any
    ) -> tuple[str, ...]:
        """Return what is against the certificate; *engine*: fields of the matrix's engine that are others now."""
        described = msgspec.structs.replace(self.matrix.engines["scripted"], **engine)
        return standing.look_up(
            msgspec.structs.replace(self.matrix, engines={"scripted": described}),
            described,
            self.bundle,
            self.bundle.artifacts(described.format)[0],
            profile or self.profile,
            data_dir=self.data,
            identity=identity or self.identity,
        ).why

    def settle(self, matrix: HardwareMatrix | None = None, **changes: Any) -> Path | None:
        """Let a run end with this document, changed."""
        return standing.settle(msgspec.structs.replace(self.evidence, **changes), matrix or self.matrix, self.data)

    def edit(self, change: Callable[[dict[str, Any]], object], *, sign: bool = True) -> None:
        """Change the stored document; *sign*: with a digest that fits."""
        plain = json.loads(self.path.read_text())
        change(plain)
        if sign:
            plain["digest"] = documents.digest_of(plain)
        self.path.write_text(json.dumps(plain))


def certified(folder: Path, *, task: str = "embed", on_ane: bool = False, **clean: Any) -> Case:
    """Store a certificate for the scripted engine, on the CPU or as if it drove a Neural Engine."""
    bundle, path = toy(folder / "toy", task=task), write_matrix(folder)
    identity = Identity("ane-coreml-worker" if on_ane else "llama.cpp-worker", "scripted-1", None)
    if on_ane:
        digest = "sha256:" + "0" * 64
        package = Artifact("coreml", "m.mlpackage", digest, "f16", tree=digest, functions=[Function("s16", bucket=16)])
        rewrite(bundle.root, artifacts=[package])
        bundle = manifest.read(bundle.root)
        plain = json.loads(path.read_text())
        plain["engines"]["scripted"].update(engine="ane", device="ane", format="coreml")
        plain["lanes"] = {"embed": plain["lanes"]["embed"]}
        path.write_text(json.dumps(plain))
    matrix = load(path)
    made = document(matrix, "scripted", bundle, identity=identity, ane=on_ane, **clean)
    kept = standing.settle(made, matrix, folder / "data")
    assert kept is not None, made.reasons
    case = Case(matrix, bundle, folder / "data", kept, made, identity, hardware.detect())
    assert case.why() == ()
    return case
