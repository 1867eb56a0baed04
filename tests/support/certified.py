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
from synapse_host.certificates.binding import Identity
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
    profile = hardware.detect(hardware.floor_keys(matrix, [engine_id]))
    said = identity or binding.identity_of(binding.version_line(matrix, engine))
    made, expected = evidence(bundle.manifest.task, **clean), bundle.manifest.fixtures
    assert made.fixture is not None and isinstance(expected, FileRef)
    facts = binding.engine_facts(
        matrix,
        engine,
        runtime_config={"threads": "1", **engine.runtime_config},
        observed=said.engine,
        version=said.engine_version,
        kernel_revision=said.kernel_revision,
        build_flags={"device": engine.device},
    )
    changed = msgspec.structs.replace(
        made,
        fixture=msgspec.structs.replace(made.fixture, expected_digest=expected.digest, digest=expected.digest),
        software=binding.software_facts(),
        model=binding.model_of(bundle, bundle.artifacts(engine.format)[0], made.model.name),
        engine=facts,
        machine=binding.machine_facts(engine, profile),
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
    bundle, matrix = toy(folder / "toy", task=task), load(write_matrix(folder, engine="ane" if on_ane else "llama"))
    identity = Identity("ane-coreml-worker" if on_ane else "llama.cpp-worker", "scripted-1", None)
    if on_ane:
        digest = "sha256:" + "0" * 64
        package = Artifact("coreml", "m.mlpackage", digest, "f16", tree=digest, functions=[Function("s16", bucket=16)])
        rewrite(bundle.root, artifacts=[package])
        bundle = manifest.read(bundle.root)
    made = document(matrix, "scripted", bundle, identity=identity, ane=on_ane, **clean)
    kept = standing.settle(made, matrix, folder / "data")
    assert kept is not None, made.reasons
    case = Case(matrix, bundle, folder / "data", kept, made, identity, hardware.detect())
    assert case.why() == ()
    return case
