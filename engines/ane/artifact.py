"""From LOAD's path to the functions behind it: digest, record of preparation, signatures; nothing is loaded here.

LOAD names the ``compiled`` folder that the preparer made on this machine. A compiled bundle has no documented
signature, so ``preparation.json`` beside it holds those of its functions, read from the package before it was compiled.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from engines.ane.backend import Source
from engines.ane.signature import FunctionSpec
from engines.bundle import preparation
from engines.bundle.digest import BLOCK, same, tree_digest, tree_identity
from engines.bundle.manifest import BundleError
from engines.protocol.errors import EngineError, ErrorCode
from engines.runtime.artifact import expected_digest

if TYPE_CHECKING:
    from engines.runtime.progress import ProgressReporter

MAIN: Final = "main"
"""The function of a bundle that holds only one."""


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
            units = -(-done // BLOCK)
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
    root: Path, names: Iterable[str], record: preparation.Preparation
) -> dict[str, tuple[Source, FunctionSpec]]:
    """Find each function and its signature. EngineError artifact_invalid when one is missing."""
    sources = {}
    for name in names:
        found = record.functions.get(name)
        if found is None or found.bundle != Path(found.bundle).name or not (root / found.bundle).is_dir():
            raise EngineError(ErrorCode.ARTIFACT_INVALID, f"{root.name}: no compiled function {name!r}")
        source = Source(root / found.bundle, name if found.multi else MAIN, found.multi)
        sources[name] = source, FunctionSpec(found.inputs, found.outputs)
    return sources
