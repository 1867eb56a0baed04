"""Core ML bundles for tests: built by the real builder, described by a real manifest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from engines.ane.build.convert import build
from engines.ane.build.package import Target
from engines.ane.signature import Key
from engines.bundle import manifest
from engines.bundle.manifest import Artifact, Bundle, Manifest
from engines.checkpoint.read import Checkpoint
from tests.support.owned_bundle import described


def shape(*buckets: int) -> list[Key]:
    """Return the keys of buckets."""
    return [Key("shape", bucket) for bucket in buckets]


def packed(*widths: int) -> list[Key]:
    """Return the keys of packed widths."""
    return [Key("packed", width) for width in widths]


def write_bundle(
    checkpoint: Checkpoint, out: Path, keys: Sequence[Key], *, target: Target = "macos15", model_id: str = "toy"
) -> Bundle:
    """Build the artifact and its manifest in the new folder *out*."""
    out.mkdir(parents=True)
    name = "model.mlpackage" if target == "macos15" else "model-macos14"
    entry = build(checkpoint, out / name, keys=keys, target=target)
    manifest.write(out, Manifest(artifacts=[msgspec.convert(entry, Artifact)], **described(checkpoint, model_id)))
    return manifest.read(out)
