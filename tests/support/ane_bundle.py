"""Core ML bundles for tests: built by the real builder, described by a real manifest."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from engines.ane.build.convert import build
from engines.ane.build.package import Target
from engines.ane.build.prepare import prepare
from engines.ane.signature import Key
from engines.bundle import manifest, preparation
from engines.bundle.manifest import Artifact, Bundle, Manifest
from engines.checkpoint.read import Checkpoint
from tests.support.mil_reference import ReferenceBackend
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


def compiler(package: Path) -> Path:
    """Stands in for Apple's: a copy under another name, somewhere else, as a temporary ``.mlmodelc``.

    The preparer moves it away, so nothing of it is left.
    """
    return Path(shutil.copytree(package, Path(tempfile.gettempdir(), f"{uuid.uuid4()}.mlmodelc")))


class _Unread(ReferenceBackend):
    """Opens nothing: a first load pays for a specialisation that the evaluator hasn't."""

    def open(self, source: Any, *, units: str) -> Any:
        return SimpleNamespace(close=lambda: None)


def prepared(bundle: Bundle, cache: Path | None = None) -> tuple[Path, str]:
    """Prepare a bundle for the evaluator, in its own folder unless *cache* is given; return LOAD's path and digest."""
    (artifact,) = bundle.artifacts("coreml")
    cache = cache or bundle.root / "prepared"
    if not preparation.folder(cache, artifact.digest).exists():
        prepare(bundle.root, cache, backend=_Unread(), compiler=compiler)
    path, record = preparation.find(cache, artifact.digest)
    return path, record.compiled_digest
