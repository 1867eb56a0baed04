"""From a zipped Core ML model to a folder at a stable path, unpacked once a machine (ane.md 5).

``<cache>/ane-coreml/<archive digest>/`` holds the unpacked tree and ``materialization.json``. The path is stable, since
Apple's specialisation cache is keyed by it. Everything happens in a private sibling folder that is renamed when it is
whole; who loses that race takes the winner's. A folder as source passes through untouched.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final, Literal

import msgspec
from msgspec import Struct

from engines.bundle import archive, preparation
from engines.bundle.digest import same, tree_digest, verify_file
from engines.bundle.manifest import BundleError, Digest, open_plain

RECORD: Final = "materialization.json"
MAX_RECORD: Final = 64 * 1024
MARKS: Final = ("model.mil", "model.mlmodel")
"""What the root of a compiled bundle, or the heart of a package, holds."""
HEART: Final = ("Data", "com.apple.CoreML")
STALE_S: Final = 24 * 3600.0


class Record(Struct, frozen=True, forbid_unknown_fields=True):
    """``materialization.json``."""

    format: Literal["synapse-ane-coreml-materialization-v1"]
    source_digest: Digest
    model_relative_path: str
    materialized_digest: Digest


def materialize(
    source: Path,
    digest: str,
    cache: Path,
    *,
    limits: archive.Limits = archive.DEFAULT_LIMITS,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Return the folder that *source* stands for: itself, or what its archive holds, unpacked in *cache*.

    *digest*: the folder's compatible digest, or the archive's SHA-256; it is checked before anything is unpacked.
    *progress*: ``(bytes_done, bytes_total)``. BundleError (ArchiveError): wrong digest, a refused archive, no model in
    it, a record or tree that was changed since.
    """
    if source.is_dir() and not source.is_symlink():
        found = tree_digest(source, progress).compatible
        if not same(digest, found):
            raise BundleError(f"{source}: digest is sha256:{found}, expected {digest}; install it again")
        return source
    bare = digest.lower().removeprefix("sha256:")
    if len(bare) != 64 or not set(bare) <= set("0123456789abcdef"):
        raise BundleError(f"{source}: {digest[:80]!r} is no SHA-256")
    target = preparation.folder(cache, bare)
    if not (target / RECORD).exists():
        verify_file(source, digest, progress)
        target.parent.mkdir(parents=True, exist_ok=True)
        sweep(target.parent)
        _unpack(source, digest, target, limits, progress)
    return _opened(target, digest, progress)


def _unpack(
    source: Path, digest: str, target: Path, limits: archive.Limits, progress: Callable[[int, int], None] | None
) -> None:
    staging = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp"))  # mode 0700
    try:
        tree = staging / "tree"
        tree.mkdir()
        archive.unpack(source, tree, limits=limits, progress=progress)
        model = _model(tree, source)
        record = Record(
            format="synapse-ane-coreml-materialization-v1",
            source_digest=f"sha256:{target.name}",
            model_relative_path=model.relative_to(staging).as_posix(),
            materialized_digest=f"sha256:{tree_digest(model).compatible}",
        )
        with (staging / RECORD).open("xb") as out:
            out.write(msgspec.json.format(msgspec.json.encode(record), indent=1))
            out.flush()
            os.fsync(out.fileno())
        for folder in (tree, staging):
            _sync(folder)
        try:
            staging.rename(target)
        except OSError:
            # Another process was quicker: its tree was made from the same bytes.
            if not (target / RECORD).exists():
                raise
        _sync(target.parent)
    except OSError as exc:
        raise BundleError(f"{exc.filename or target}: {exc.strerror or exc}") from exc
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _model(tree: Path, source: Path) -> Path:
    """Return the first folder, by sorted path, that holds a model; of a package that is the package's own folder."""
    for folder in sorted(_folders(tree), key=lambda path: path.relative_to(tree).as_posix()):
        if any((folder / mark).is_file() for mark in MARKS):
            return folder.parents[1] if folder.parts[-2:] == HEART and folder.parents[1] != tree else folder
    raise archive.ArchiveError(f"{source}: holds no Core ML model ({' or '.join(MARKS)})")


def _folders(root: Path) -> Iterator[Path]:
    yield root
    for folder, names, _ in os.walk(root):
        for name in names:
            yield Path(folder, name)


def _opened(target: Path, digest: str, progress: Callable[[int, int], None] | None) -> Path:
    """Check the record and the tree behind it: the cache is a place where anything may have happened."""
    file = target / RECORD
    try:
        with open_plain(file) as opened:
            data = opened.read(MAX_RECORD + 1)
        record = msgspec.json.decode(data, type=Record) if len(data) <= MAX_RECORD else None
    except (OSError, msgspec.DecodeError) as exc:
        raise BundleError(f"{file}: {exc}; remove the folder and install the model again") from exc
    relative = PurePosixPath(record.model_relative_path) if record is not None else PurePosixPath("/")
    normal = not relative.is_absolute() and ".." not in relative.parts and "\\" not in str(relative)
    if record is None or not normal or not relative.parts or str(relative) != record.model_relative_path:
        raise BundleError(f"{file}: not a record of this format; remove the folder and install the model again")
    if not same(digest, record.source_digest.removeprefix("sha256:")):
        raise BundleError(f"{file}: made from {record.source_digest}, not from {digest}")
    model = target.joinpath(*relative.parts)
    if not model.resolve().is_relative_to(target.resolve()):
        raise BundleError(f"{file}: {relative} leaves the folder")
    found = tree_digest(model, progress).compatible
    if not same(record.materialized_digest, found):
        raise BundleError(f"{model}: changed since it was unpacked; remove {target} and install the model again")
    return model


def sweep(folder: Path, now: float | None = None, *, pattern: str = ".*.tmp") -> list[Path]:
    """Remove what crashes left more than 24 hours ago, entries named like *pattern*; return what was removed."""
    limit = (time.time() if now is None else now) - STALE_S
    removed = []
    for path in folder.glob(pattern):
        with suppress(FileNotFoundError):  # swept by somebody else meanwhile
            if path.lstat().st_mtime < limit:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() and not path.is_symlink() else path.unlink()
                removed.append(path)
    return removed


def _sync(folder: Path) -> None:
    """Make a folder's entries durable, where the platform can."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
