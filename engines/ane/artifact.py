"""From LOAD's path to the functions behind it: digest, record of preparation, signatures; nothing is loaded here.

Three shapes of artifact: one multi-function package or bundle, a folder of single-function packages
``<name>.mlpackage`` (what macOS 14 runs), and the preparer's ``compiled`` folder with ``preparation.json`` beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from engines.ane.backend import Source
from engines.ane.signature import FunctionSpec
from engines.bundle import preparation
from engines.bundle.digest import same, tree_digest, tree_identity
from engines.bundle.manifest import BundleError
from engines.protocol.errors import EngineError, ErrorCode
from engines.runtime.artifact import BLOCK_BYTES, expected_digest

if TYPE_CHECKING:
    from engines.ane.backend import Backend
    from engines.bundle.manifest import Artifact
    from engines.protocol.messages import Load
    from engines.runtime.progress import ProgressReporter

SUFFIX: Final = ".mlpackage"
MAIN: Final = "main"
SPEC: Final = Path("Data", "com.apple.CoreML", "model.mlmodel")


class Verified:
    """A folder of plain files that had LOAD's directory digest, and the state its files were in then.

    Core ML opens what lies at a path, at LOAD and at every later admission, so the digest alone says nothing of what
    it gets: after each native load :meth:`recheck` compares the files with those that were hashed.
    """

    def __init__(self, path: str, digest: str, progress: ProgressReporter) -> None:
        """Hash the folder; one unit of progress a MiB.

        EngineError artifact_invalid: empty or wrong digest, no such folder, a symbolic link or other special file in
        it, a file that was written to while it was hashed.
        """
        expected = expected_digest(digest)
        self.root = Path(path)
        if not path or self.root.is_symlink() or not self.root.is_dir():
            raise EngineError(ErrorCode.ARTIFACT_INVALID, f"{path!r} is not a folder; a Core ML artifact is one")
        reported = 0

        def hashed(done: int, total: int) -> None:
            nonlocal reported
            units = -(-done // BLOCK_BYTES)
            if units > reported:
                progress.advance(units - reported)
                reported = units

        try:
            self._identity = tree_identity(self.root)
            found = tree_digest(self.root, hashed)
        except BundleError as exc:
            raise EngineError(ErrorCode.ARTIFACT_INVALID, str(exc)) from exc
        if not same(expected, found.compatible):
            why = f"digest mismatch: expected sha256:{expected}, observed sha256:{found.compatible}"
            raise EngineError(ErrorCode.ARTIFACT_INVALID, why)

    def recheck(self) -> None:
        """Raise EngineError artifact_invalid unless every file is the one that was hashed, untouched since."""
        try:
            unchanged = tree_identity(self.root) == self._identity
        except BundleError as exc:
            raise EngineError(ErrorCode.ARTIFACT_INVALID, str(exc)) from exc
        if not unchanged:
            why = f"{str(self.root)!r} was written to since LOAD verified it; load it again"
            raise EngineError(ErrorCode.ARTIFACT_INVALID, why)


def find(
    request: Load, artifacts: list[Artifact], backend: Backend, *, allow_cold: bool, progress: ProgressReporter
) -> tuple[Artifact, Verified, preparation.Preparation | None]:
    """Return LOAD's artifact, its verified folder, and for a compiled one the record that it was prepared with.

    EngineError artifact_invalid, package_digest_mismatch (not one of the manifest's *artifacts*), and what
    :class:`Verified` and :func:`prepared` raise.
    """
    if backend.reads_packages:
        # Before the folder is opened: a package that isn't this bundle's is not worth hashing.
        chosen = _named(artifacts, request.artifact_digest)
        return chosen, Verified(request.artifact_path, request.artifact_digest, progress), None
    folder = Verified(request.artifact_path, request.artifact_digest, progress)
    digests = [one.digest for one in artifacts]
    record = prepared(folder.root, source_digests=digests, os_build=backend.os_build(), allow_cold=allow_cold)
    return _named(artifacts, record.source_digest), folder, record


def _named(artifacts: list[Artifact], digest: str) -> Artifact:
    wanted = f"sha256:{expected_digest(digest)}"
    for artifact in artifacts:
        if artifact.digest == wanted:
            return artifact
    raise EngineError(ErrorCode.PACKAGE_DIGEST_MISMATCH, f"{wanted} is no coreml artifact of this bundle")


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
        why = f"{record}: made from {found.source_digest}, not from this bundle"
        raise EngineError(ErrorCode.PACKAGE_DIGEST_MISMATCH, why)
    if not allow_cold:
        if found.os_build != os_build:
            why = (
                f"prepared on OS build {found.os_build}, this is {os_build}: run `python -m engines.ane prepare` again"
            )
            raise EngineError(ErrorCode.SPECIALIZATION_MISSING, why)
        cold = [name for name, function in found.functions.items() if function.first_load_ms is None]
        if cold:
            why = f"function {cold[0]} was compiled but never loaded on this machine"
            raise EngineError(ErrorCode.SPECIALIZATION_MISSING, why)
    return found


def sources(
    root: Path, names: Iterable[str], backend: Backend, record: preparation.Preparation | None
) -> dict[str, tuple[Source, FunctionSpec]]:
    """Find each function and its signature. EngineError artifact_invalid when one is missing."""
    return {
        name: (_packaged(root, name, backend) if record is None else _compiled(root, name, record)) for name in names
    }


def _compiled(root: Path, name: str, record: preparation.Preparation) -> tuple[Source, FunctionSpec]:
    found = record.functions.get(name)
    if found is None or found.bundle != Path(found.bundle).name or not (root / found.bundle).is_dir():
        raise EngineError(ErrorCode.ARTIFACT_INVALID, f"{root.name}: no compiled function {name!r}")
    source = Source(root / found.bundle, name if found.multi else MAIN, found.multi)
    return source, FunctionSpec(found.inputs, found.outputs)


def _packaged(root: Path, name: str, backend: Backend) -> tuple[Source, FunctionSpec]:
    multi = (root / SPEC).exists()
    package, inner = (root, name) if multi else (root / f"{name}{SUFFIX}", MAIN)
    specs = backend.specs(package)
    if inner not in specs:
        why = f"{package.name} has no function {inner!r} (it has: {sorted(specs)})"
        raise EngineError(ErrorCode.ARTIFACT_INVALID, why)
    return Source(package, inner, multi), specs[inner]
