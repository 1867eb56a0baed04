"""SHA-256 of files and of directory trees.

Two digests of a tree (ane.md 5). The *compatible* one is what LOAD carries: every regular file below the root, sorted
by its relative path as UTF-8 bytes, contributes path, one zero byte, content. That stream has no lengths, so two
different trees can share it; identity is therefore the *injective* one: a count, then for each file path length, path,
size and content hash.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias

from engines.bundle.manifest import BundleError, open_plain

PREFIX: Final = "sha256:"
BLOCK: Final = 1024 * 1024
MAX_FILES: Final = 100_000
_TREE_MARK: Final = b"synapse-tree-v2\0"

Progress: TypeAlias = Callable[[int, int], None]
"""Called as ``progress(bytes_done, bytes_total)`` after each block that was hashed."""


@dataclass(frozen=True, slots=True)
class TreeDigest:
    """Digests of a directory, lowercase hex without a prefix, and what was hashed."""

    compatible: str
    injective: str
    files: int
    nbytes: int


def file_digest(source: Path | str | BinaryIO, progress: Progress | None = None) -> str:
    """Return the lowercase hex SHA-256 of a file, read in 1 MiB blocks; an open file from where it stands."""
    if isinstance(source, (str, os.PathLike)):
        try:
            with open_plain(Path(source)) as file:
                return file_digest(file, progress)
        except OSError as exc:
            raise BundleError(f"{source}: {exc.strerror or exc}") from exc
    total = os.fstat(source.fileno()).st_size
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(BLOCK))
    done = 0
    while n := source.readinto(buffer):  # type: ignore[attr-defined]
        digest.update(buffer[:n])
        done += n
        if progress is not None:
            progress(done, total)
    return digest.hexdigest()


def same(stated: str, actual_hex: str) -> bool:
    """Compare a stated digest (``sha256:`` prefix optional, any case) with a computed one; empty never matches."""
    return stated.lower().removeprefix(PREFIX) == actual_hex != ""


def verify_file(path: Path, stated: str, progress: Progress | None = None) -> None:
    """Raise BundleError unless the file has the stated digest."""
    actual = file_digest(path, progress)
    if not same(stated, actual):
        raise BundleError(f"{path}: digest is sha256:{actual}, expected {stated}; build or install it again")


def tree_digest(root: Path | str, progress: Progress | None = None) -> TreeDigest:
    """Digest every regular file below *root*, hidden ones included, reading each once.

    Raises BundleError for a symlink or any other special file, a name that isn't UTF-8, a file that changes meanwhile,
    more than 100,000 files, or a root that isn't a directory.
    """
    root = Path(root)
    files = sorted(_regular_files(root), key=lambda item: item[0])
    total = sum(info.st_size for _, _, info in files)
    compatible = hashlib.sha256()
    injective = hashlib.sha256(_TREE_MARK + len(files).to_bytes(8, "little"))
    buffer = memoryview(bytearray(BLOCK))
    done = 0
    for name, path, info in files:
        compatible.update(name + b"\0")
        content = hashlib.sha256()
        read = 0
        with path.open("rb", buffering=0) as file:
            while n := file.readinto(buffer):
                compatible.update(buffer[:n])
                content.update(buffer[:n])
                read += n
                done += n
                if progress is not None:
                    progress(done, total)
        if read != info.st_size:
            raise BundleError(f"{path}: changed while it was read ({info.st_size} bytes, then {read})")
        injective.update(len(name).to_bytes(8, "little") + name + read.to_bytes(8, "little") + content.digest())
    return TreeDigest(compatible.hexdigest(), injective.hexdigest(), len(files), total)


def tree_identity(root: Path | str) -> list[tuple[bytes, int, int, int, int, int]]:
    """Return what shows that a file below *root* was replaced or written to, without reading any.

    Name, device, inode, size, and the times of modification and change of each file. The kernel alone sets the last
    one, so a write stays visible after its time of modification was put back. Raises BundleError as tree_digest does.
    """
    return sorted(
        (name, info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)
        for name, _, info in _regular_files(Path(root))
    )


def _regular_files(root: Path) -> Iterator[tuple[bytes, Path, os.stat_result]]:
    """Yield (relative path as UTF-8 with ``/``, path, state) of each file; only files and folders may be there."""
    pending = [(b"", root)]
    count = 0
    while pending:
        prefix, folder = pending.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError as exc:
            raise BundleError(f"{folder}: {exc.strerror or exc}") from exc
        for entry in entries:
            try:
                name = prefix + entry.name.encode("utf-8")
            except UnicodeEncodeError:
                raise BundleError(f"{folder}: the file name {entry.name!r} is not UTF-8") from None
            info = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(info.st_mode):
                pending.append((name + b"/", Path(entry.path)))
            elif stat.S_ISREG(info.st_mode):
                count += 1
                if count > MAX_FILES:
                    raise BundleError(f"{root}: more than {MAX_FILES} files")
                yield name, Path(entry.path), info
            else:
                kind = "a symbolic link" if stat.S_ISLNK(info.st_mode) else "a special file"
                raise BundleError(f"{entry.path} is {kind}; a bundle holds plain files only")
