"""Safetensors-package bundles for tests: written by the real writer, described by a real manifest."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from engines.bundle import manifest
from engines.bundle.digest import PREFIX, file_digest
from engines.bundle.manifest import Artifact, Bundle, Manifest
from engines.checkpoint import facts, safetensors
from engines.checkpoint.package import profile_of, write_package
from engines.checkpoint.read import Checkpoint, plain_numbers
from engines.protocol.messages import Load


def described(checkpoint: Checkpoint, model_id: str) -> dict[str, Any]:
    """Return the manifest fields that a checkpoint says by itself."""
    known = facts.of_checkpoint(checkpoint)
    names = ("dims", "max_tokens", "pooling", "normalize", "special_ids", "head", "token_types")
    fields = {
        "manifest_version": 1,
        "model_id": model_id,
        "family": checkpoint.family,
        "task": checkpoint.task,
        "score": "sigmoid" if checkpoint.task == "rerank" else None,
        "config": plain_numbers(checkpoint.config),
        **{name: getattr(known, name) for name in names},
    }
    return {key: value for key, value in fields.items() if value is not None}


def write_bundle(
    checkpoint: Checkpoint, out: Path, *, model_id: str = "toy", dtype: str = "f32", **fields: Any
) -> Bundle:
    """Write the package and its manifest into the new folder *out*; *fields* override what the checkpoint says."""
    out.mkdir(parents=True)
    file = out / "model.safetensors"
    size = write_package(checkpoint, file, profile=profile_of(model_id), dtype=dtype)
    entry = Artifact("safetensors-package", file.name, PREFIX + file_digest(file), dtype, bytes=size)
    said = {key: value for key, value in (described(checkpoint, model_id) | fields).items() if value is not None}
    manifest.write(out, Manifest(artifacts=[entry], **said))
    return manifest.read(out)


def repackaged(source: Bundle, root: Path, change: Callable[[dict[str, np.ndarray]], object], **fields: Any) -> Bundle:
    """Copy a bundle, let *change* work on its tensors, and describe the result honestly in a new manifest.

    *fields* are of the manifest's entry; ``profile`` is of the package.
    """
    opened = safetensors.SafetensorsFile.open(source.path("model.safetensors"))
    tensors = {name: np.array(opened.array(name)) for name in opened.header.tensors}
    change(tensors)
    file = root / "model.safetensors"
    safetensors.write(file, tensors, metadata={"profile": fields.pop("profile", "toy.owned-cuda")})
    text = json.loads((source.root / manifest.FILE_NAME).read_text())
    text["artifacts"][0] |= {"digest": PREFIX + file_digest(file), **fields}
    (root / manifest.FILE_NAME).write_bytes(manifest.canonical_bytes(text))
    return manifest.read(root)


def load_request(bundle: Bundle, **config: str) -> Load:
    """Return the LOAD of a bundle's first package."""
    entry = bundle.artifacts("safetensors-package")[0]
    path = str(bundle.path(entry.path))
    return Load(
        req_id="load", artifact_path=path, artifact_digest=entry.digest, format=entry.format, runtime_config=config
    )
