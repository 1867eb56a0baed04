"""Artifacts: what was hashed is what the engine loads.

Spec: "Worker re-verifies digest before mmap". Checking a path and opening it again would leave room for a swap between
the two, so the file is opened once, hashed through that descriptor and loaded from it. The bytes behind a descriptor
can still be overwritten in place, so a LOAD ends with :meth:`ArtifactFile.recheck`.
"""

from __future__ import annotations

import io
import os
import re
import stat
from typing import TYPE_CHECKING, Final

from engines.protocol.errors import EngineError, ErrorCode

if TYPE_CHECKING:
    from engines.runtime.progress import ProgressReporter

_HEX: Final = re.compile(r"[0-9a-f]{64}")


class ArtifactFile(io.FileIO):
    """A regular file that was opened for one LOAD, unbuffered: :meth:`verify`, load from it, :meth:`recheck`."""

    def __init__(self, descriptor: int, path: str) -> None:
        super().__init__(descriptor, "rb")
        self._path = path
        self._opened = os.fstat(descriptor)
        self._digest = ""

    def verify(self, digest: str, progress: ProgressReporter) -> None:
        """Hash the file, compare with LOAD's *digest* and rewind; EngineError(artifact_invalid) names both digests.

        One unit of progress per MiB hashed; the last, partial one counts as one.
        """
        from engines.bundle.digest import file_digest

        self._digest = expected_digest(digest)  # a malformed one is refused before a gigabyte is read
        self.seek(0)
        observed = file_digest(self, lambda done, total: progress.advance())
        if observed != self._digest:
            raise EngineError(
                ErrorCode.ARTIFACT_INVALID,
                f"digest mismatch: expected sha256:{self._digest}, observed sha256:{observed}",
            )
        self.seek(0)

    def recheck(self, progress: ProgressReporter) -> None:
        """Raise EngineError(artifact_invalid) when the file was written to since it was opened.

        An engine calls this once it has read the weights, none of which may stay mapped. Where only the time of the
        last change differs (the file was unlinked, or its time of modification set back) the content is hashed again.
        """
        then, now = self._opened, os.fstat(self.fileno())
        if (then.st_size, then.st_mtime_ns) != (now.st_size, now.st_mtime_ns):
            raise EngineError(
                ErrorCode.ARTIFACT_INVALID, f"{self._path!r} was written to while it was loaded; load it again"
            )
        if then.st_ctime_ns != now.st_ctime_ns:
            self.verify(self._digest, progress)


def open_artifact(path: str | os.PathLike[str]) -> ArtifactFile:
    """Open a regular file for reading; EngineError(artifact_invalid) when there is none. The caller closes it.

    A symbolic link is followed: what was opened is what gets hashed. O_NONBLOCK keeps a FIFO from blocking the open.
    """
    name = os.fspath(path)
    if not name:
        raise EngineError(ErrorCode.ARTIFACT_INVALID, "artifact_path is empty")
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(name, flags)
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise EngineError(ErrorCode.ARTIFACT_INVALID, f"can't open {name!r}: {reason}") from exc
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise EngineError(ErrorCode.ARTIFACT_INVALID, f"{name!r} is not a regular file")
    return ArtifactFile(descriptor, name)


def expected_digest(text: str) -> str:
    """Return LOAD's ``artifact_digest`` as 64 lowercase hex digits; ``sha256:`` may precede them.

    EngineError(artifact_invalid) when it is empty or no SHA-256: an unverified artifact is never loaded.
    """
    if not text:
        raise EngineError(ErrorCode.ARTIFACT_INVALID, "artifact_digest is empty; LOAD must name the file's SHA-256")
    digest = text.removeprefix("sha256:").lower()
    if not _HEX.fullmatch(digest):
        raise EngineError(ErrorCode.ARTIFACT_INVALID, f"artifact_digest {text[:80]!r} is not a SHA-256 (64 hex digits)")
    return digest
