"""Artifacts: the digest is verified on the open descriptor that the engine then loads from.

Spec: "Worker re-verifies digest before mmap". Checking a path and opening it again would leave room for a swap between
the two, so the file is opened once, hashed through that descriptor, rewound, and handed back.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from typing import TYPE_CHECKING, BinaryIO, Final

from engines.protocol.errors import EngineError, ErrorCode

if TYPE_CHECKING:
    from engines.runtime.progress import ProgressReporter

BLOCK_BYTES: Final = 1024 * 1024
"""Read at once, and one unit of progress."""

_HEX: Final = re.compile(r"[0-9a-f]{64}")


def open_artifact(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading, unbuffered; EngineError(artifact_invalid) when there is none.

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
    return os.fdopen(descriptor, "rb", buffering=0)


def hash_artifact(file: BinaryIO, progress: ProgressReporter) -> str:
    """Return the lowercase hex SHA-256 of *file* from its start; one unit of progress per MiB hashed.

    The last, partial MiB counts as one. The file position is at the end afterwards.
    """
    from engines.bundle.digest import file_digest

    file.seek(0)
    return file_digest(file, lambda done, total: progress.advance())


def expected_digest(text: str) -> str:
    """Return LOAD's ``artifact_digest`` as 64 lowercase hex digits; ``sha256:`` may stand before them.

    EngineError(artifact_invalid) when it is empty or no SHA-256: an unverified artifact is never loaded.
    """
    if not text:
        raise EngineError(ErrorCode.ARTIFACT_INVALID, "artifact_digest is empty; LOAD must name the file's SHA-256")
    digest = text.removeprefix("sha256:").lower()
    if not _HEX.fullmatch(digest):
        raise EngineError(ErrorCode.ARTIFACT_INVALID, f"artifact_digest {text[:80]!r} is not a SHA-256 (64 hex digits)")
    return digest


def verify(file: BinaryIO, digest: str, progress: ProgressReporter) -> None:
    """Hash *file*, compare with LOAD's *digest* and rewind; EngineError(artifact_invalid) names both digests."""
    expected = expected_digest(digest)
    observed = hash_artifact(file, progress)
    if observed != expected:
        raise EngineError(
            ErrorCode.ARTIFACT_INVALID, f"digest mismatch: expected sha256:{expected}, observed sha256:{observed}"
        )
    file.seek(0)


def open_verified(path: str | os.PathLike[str], digest: str, progress: ProgressReporter) -> BinaryIO:
    """Open an artifact, verify it, and return the same descriptor, rewound; the caller closes it."""
    expected_digest(digest)  # refuse a malformed digest before a gigabyte is read
    file = open_artifact(path)
    try:
        verify(file, digest, progress)
    except BaseException:
        file.close()
        raise
    return file


def descriptor_path(file: BinaryIO) -> str | None:
    """Return a path that opens the very file behind *file*, for a library that only takes paths.

    Linux opens the same inode anew; macOS duplicates the descriptor, position included, so keep it rewound. None on
    Windows, where an open file can't be replaced anyway.
    """
    if sys.platform == "win32":
        return None
    prefix = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
    return f"{prefix}/{file.fileno()}"
