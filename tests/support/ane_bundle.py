"""Core ML bundles for tests: built by the real builder, described by a real manifest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from engines.ane.build import build
from engines.ane.package import Target
from engines.ane.shapes import Key
from engines.bundle import facts, manifest
from engines.bundle.checkpoint import Checkpoint, plain_numbers
from engines.bundle.manifest import Artifact, Bundle, Manifest


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
    known = facts.of_checkpoint(checkpoint)
    fields: dict[str, Any] = {
        "pooling": known.pooling,
        "normalize": known.normalize,
        "score": "sigmoid" if checkpoint.task == "rerank" else None,
        "special_ids": known.special_ids,
        "head": known.head,
        "token_types": known.token_types,
        "config": plain_numbers(checkpoint.config),
    }
    manifest.write(
        out,
        Manifest(
            manifest_version=1,
            model_id=model_id,
            family=checkpoint.family,
            task=checkpoint.task,
            dims=known.dims,
            max_tokens=known.max_tokens,
            artifacts=[msgspec.convert(entry, Artifact)],
            **{key: value for key, value in fields.items() if value is not None},
        ),
    )
    return manifest.read(out)
