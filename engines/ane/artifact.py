"""From LOAD's path to the functions behind it: digest, record of preparation, signatures; nothing is loaded here.

Three shapes of artifact: one multi-function package or bundle, a folder of single-function packages
``<name>.mlpackage`` (what macOS 14 runs), and the preparer's ``compiled`` folder with ``preparation.json`` beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from engines.ane.backend import Source
from engines.ane.package import MAIN, SPEC, SUFFIX, FunctionSpec, Tensor
from engines.bundle import preparation
from engines.bundle.digest import same, tree_digest
from engines.bundle.manifest import BundleError
from engines.protocol.errors import EngineError, ErrorCode
from engines.runtime.artifact import BLOCK_BYTES, expected_digest

if TYPE_CHECKING:
    from engines.ane.backend import Backend
    from engines.runtime.progress import ProgressReporter


def verify(path: str, digest: str, progress: ProgressReporter) -> Path:
    """Check that *path* is a folder of plain files with LOAD's directory digest; one unit of progress a MiB.

    EngineError artifact_invalid: empty or wrong digest, no such folder, a symbolic link or other special file in it.
    """
    expected = expected_digest(digest)
    root = Path(path)
    if not path or root.is_symlink() or not root.is_dir():
        raise EngineError(ErrorCode.ARTIFACT_INVALID, f"{path!r} is not a folder; a Core ML artifact is one")
    reported = 0

    def hashed(done: int, total: int) -> None:
        nonlocal reported
        units = -(-done // BLOCK_BYTES)
        if units > reported:
            progress.advance(units - reported)
            reported = units

    try:
        found = tree_digest(root, hashed)
    except BundleError as exc:
        raise EngineError(ErrorCode.ARTIFACT_INVALID, str(exc)) from exc
    if not same(expected, found.compatible):
        raise EngineError(
            ErrorCode.ARTIFACT_INVALID,
            f"digest mismatch: expected sha256:{expected}, observed sha256:{found.compatible}",
        )
    return root


def prepared(root: Path, *, source_digests: Iterable[str], os_build: str, allow_cold: bool) -> preparation.Preparation:
    """Read the record beside a ``compiled`` folder and check that it belongs to this bundle and OS build.

    EngineError: ``package_digest_mismatch`` (made from another artifact), ``specialization_missing`` (no record,
    another OS build, a function never loaded) unless *allow_cold*; the latter still needs the record's signatures.
    """
    record = root.parent / preparation.RECORD
    try:
        found = preparation.read(record)
    except BundleError as exc:
        raise EngineError(ErrorCode.SPECIALIZATION_MISSING, str(exc)) from exc
    if found.source_digest not in source_digests:
        raise EngineError(
            ErrorCode.PACKAGE_DIGEST_MISMATCH, f"{record}: made from {found.source_digest}, not from this bundle"
        )
    if not allow_cold:
        if found.os_build != os_build:
            raise EngineError(
                ErrorCode.SPECIALIZATION_MISSING,
                f"prepared on OS build {found.os_build}, this is {os_build}: run `python -m engines.ane prepare` again",
            )
        cold = [name for name, function in found.functions.items() if function.first_load_ms is None]
        if cold:
            raise EngineError(
                ErrorCode.SPECIALIZATION_MISSING, f"function {cold[0]} was compiled but never loaded on this machine"
            )
    return found


def sources(
    root: Path, names: Iterable[str], backend: Backend, record: preparation.Preparation | None
) -> dict[str, tuple[Source, FunctionSpec]]:
    """Find each function and its signature. EngineError artifact_invalid when one is missing."""
    return {name: _source(root, name, backend, record) for name in names}


def _source(
    root: Path, name: str, backend: Backend, record: preparation.Preparation | None
) -> tuple[Source, FunctionSpec]:
    if record is not None:
        found = record.functions.get(name)
        bundle = root / found.bundle if found is not None else None
        if found is None or bundle is None or found.bundle != Path(found.bundle).name or not bundle.is_dir():
            raise EngineError(ErrorCode.ARTIFACT_INVALID, f"{root.name}: no compiled function {name!r}")
        spec = FunctionSpec(
            {key: Tensor(tuple(t.shape), t.dtype) for key, t in found.inputs.items()},
            {key: Tensor(tuple(t.shape), t.dtype) for key, t in found.outputs.items()},
        )
        return Source(bundle, name if found.multi else MAIN, found.multi), spec
    single = root / f"{name}{SUFFIX}"
    package, inner = (root, name) if (root / SPEC).exists() else (single, MAIN)
    whole = backend.specs(package)
    if whole is None or inner not in whole.functions:
        have = sorted(whole.functions) if whole is not None else []
        raise EngineError(ErrorCode.ARTIFACT_INVALID, f"{package.name} has no function {inner!r} (it has: {have})")
    return Source(package, inner, package == root), whole.functions[inner]
