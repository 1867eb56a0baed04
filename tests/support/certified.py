"""Certificates for tests: a clean document as a run on this machine would have written it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from engines.bundle import manifest
from engines.bundle.manifest import Bundle, FileRef
from synapse_host import certificates, gates, hardware, lane_certificates
from synapse_host.certificates import Binding, Identity
from synapse_host.evidence import Evidence
from synapse_host.matrix import HardwareMatrix
from tests.support.evidence import DIGEST, evidence
from tests.support.small_bundle import write_bundle

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
    identity = identity or certificates.identity_of(certificates.version_line(matrix, engine))
    now = certificates.present(matrix, engine, bundle, artifact, profile, identity)
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
    return gates.judge(changed)


def grant(matrix: HardwareMatrix, engine_id: str, bundle: Bundle, data: Path | None, **options: Any) -> Path:
    """Store a valid certificate and return its file."""
    path = lane_certificates.settle(document(matrix, engine_id, bundle, **options), matrix, data)
    assert path is not None
    return path
