"""Where a machine keeps its compiled Core ML bundles, and the record that says what they were made from.

``<cache>/ane-coreml/<source digest>/preparation.json`` beside ``compiled/``. The path is stable on purpose: Apple's
specialisation cache is keyed by full path and configuration, so a bundle that moves pays its whole first load again
(ane.md 5 and 6). The preparer (``python -m engines.ane prepare``) writes it on a Mac; host and worker read it.
"""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from engines.bundle.manifest import BundleError, Digest, read_plain

FOLDER: Final = "ane-coreml"
COMPILED: Final = "compiled"
RECORD: Final = "preparation.json"
MAX_BYTES: Final = 1024 * 1024
STALE_S: Final = 24 * 3600.0


class TensorRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """One input or output of a compiled function: fixed shape and dtype."""

    shape: tuple[int, ...]
    dtype: str


class FunctionRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """One compiled function: its signature, read from the package before it was compiled, and its first load."""

    inputs: dict[str, TensorRecord]
    outputs: dict[str, TensorRecord]
    bundle: str
    """Name of the ``.mlmodelc`` inside ``compiled/``."""
    multi: bool
    first_load_ms: int | None = None
    """What specialisation took; None when this function was compiled but not loaded yet."""


class Preparation(Struct, frozen=True, forbid_unknown_fields=True):
    """``preparation.json``. An OS update makes it void: specialisation belongs to one OS build."""

    source_digest: Digest
    compiled_digest: Digest
    os_build: str
    functions: dict[str, FunctionRecord]


def folder(cache: Path, source_digest: str) -> Path:
    """Return the stable folder of one source artifact; *source_digest* with or without ``sha256:``."""
    return cache / FOLDER / source_digest.removeprefix("sha256:")


def read(record: Path) -> Preparation:
    """Read a ``preparation.json``. BundleError when it is missing or isn't one."""
    try:
        data = read_plain(record, MAX_BYTES)
    except OSError as exc:
        raise BundleError(f"{record}: {exc.strerror or exc}; prepare the model on this machine first") from exc
    except ValueError as exc:
        raise BundleError(f"{record} is larger than {MAX_BYTES} bytes") from exc
    try:
        return msgspec.json.decode(data, type=Preparation)
    except msgspec.DecodeError as exc:
        raise BundleError(f"{record}: {exc}") from exc


def find(cache: Path, source_digest: str) -> tuple[Path, Preparation]:
    """Return (the ``compiled`` folder to name in LOAD, its record); BundleError says what to do when there is none."""
    root = folder(cache, source_digest)
    found = read(root / RECORD)
    if found.source_digest.removeprefix("sha256:") != source_digest.removeprefix("sha256:"):
        raise BundleError(f"{root / RECORD}: prepared from {found.source_digest}, not from {source_digest}")
    return root / COMPILED, found


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


def default_cache() -> Path:
    """Return the user's cache folder, the same for preparer, host and doctor; BundleError without a home."""
    from platformdirs import user_cache_path

    try:
        return user_cache_path("synapse")
    except RuntimeError as exc:
        raise BundleError(f"no place for prepared models: {exc}") from exc
