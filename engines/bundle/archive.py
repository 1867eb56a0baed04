"""Defensive unpacking of zip files and wheels: everything is judged before the first byte is written.

Refused: absolute paths, drive letters, backslashes, ``..`` and empty parts, control characters, symbolic links,
devices, encrypted entries, exotic compression, two entries for one path (also by case or Unicode form), a file where
another entry needs a folder, zip64 directories, too many entries, too many bytes, too high a compression ratio.
Declared sizes are only a first check: what really comes out is counted while it is written.
"""

from __future__ import annotations

import os
import stat
import struct
import unicodedata
import zipfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from engines.bundle.manifest import BundleError, open_plain

BLOCK: Final = 1024 * 1024
_END_RECORD: Final = b"PK\x05\x06"
_ZIP64_LOCATOR: Final = b"PK\x06\x07"
_DIRECTORY_LIMIT: Final = 32 * 1024 * 1024


class ArchiveError(BundleError):
    """An archive is refused. The message names the archive, the entry and the rule."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What an archive may hold. ``ratio`` counts for entries above ``ratio_from`` uncompressed bytes."""

    entries: int = 10_000
    entry_bytes: int = 4 * 1024**3
    total_bytes: int = 8 * 1024**3
    ratio: int = 200
    ratio_from: int = 1024 * 1024
    path_bytes: int = 512
    depth: int = 32


DEFAULT_LIMITS: Final = Limits()


def unpack(
    archive: Path | str,
    into: Path | str,
    *,
    wanted: Collection[str] | None = None,
    limits: Limits = DEFAULT_LIMITS,
    progress: Callable[[int, int], None] | None = None,
) -> list[Path]:
    """Unpack *archive* into the existing, empty folder *into* and return the files written, in archive order.

    ``wanted``: only these entry names are written (all entries are still checked), and each must be there.
    ``progress(done, total)``: uncompressed bytes written. Raises ArchiveError; then *into* may hold files and is to be
    removed by the caller, who owns it.
    """
    archive, into = Path(archive), Path(into)
    if any(into.iterdir()):
        raise ArchiveError(f"{into} is not empty; archives are unpacked into a fresh folder only")
    try:
        with open_plain(archive) as file:
            _check_directory(archive, file, limits)
            with zipfile.ZipFile(file) as opened:
                return _unpack(archive, opened, into, wanted, limits, progress)
    except (zipfile.BadZipFile, zipfile.LargeZipFile, EOFError, struct.error, NotImplementedError) as exc:
        raise ArchiveError(f"{archive}: not a readable zip file ({exc})") from exc
    except OSError as exc:
        raise ArchiveError(f"{exc.filename or archive}: {exc.strerror or exc}") from exc
    except Exception as exc:
        # zlib.error and friends have no common base; anything else a hostile stream can provoke is a refusal as well.
        if isinstance(exc, BundleError):
            raise
        raise ArchiveError(f"{archive}: damaged ({type(exc).__name__}: {exc})") from exc


def _check_directory(archive: Path, file: BinaryIO, limits: Limits) -> None:
    """Bound the central directory before zipfile builds an object for each of its entries."""
    size = file.seek(0, os.SEEK_END)
    tail = min(size, 22 + 65535)
    file.seek(size - tail)
    data = file.read(tail)
    at = data.rfind(_END_RECORD)
    if at < 0 or len(data) - at < 22:
        raise ArchiveError(f"{archive}: not a zip file")
    entries, directory = struct.unpack_from("<HI", data, at + 10)
    located = at >= 20 and data[at - 20 : at - 16] == _ZIP64_LOCATOR
    if located or entries == 0xFFFF or directory == 0xFFFFFFFF:
        raise ArchiveError(f"{archive}: zip64 archives are not accepted")
    if entries > limits.entries or directory > _DIRECTORY_LIMIT:
        raise ArchiveError(f"{archive}: {entries} entries, at most {limits.entries} are accepted")
    # The count in the end record is only a claim: 46 bytes is the least that an entry takes in the directory.
    if directory > (entries + 1) * (46 + 3 * 65535):
        raise ArchiveError(f"{archive}: its directory of {directory} bytes does not fit {entries} entries")
    file.seek(0)


def _unpack(
    archive: Path,
    opened: zipfile.ZipFile,
    into: Path,
    wanted: Collection[str] | None,
    limits: Limits,
    progress: Callable[[int, int], None] | None,
) -> list[Path]:
    infos = opened.infolist()
    if len(infos) > limits.entries:
        raise ArchiveError(f"{archive}: {len(infos)} entries, at most {limits.entries} are accepted")
    files: set[str] = set()
    folders: set[str] = set()
    total = 0
    for info in infos:
        _check_entry(archive, info, limits)
        key = _folded(info.filename.rstrip("/"))
        parents = [key[:i] for i, char in enumerate(key) if char == "/"]
        if info.is_dir():
            if key in files:
                raise ArchiveError(f"{archive}: {info.filename!r} is a file and a folder")
            folders.add(key)
        else:
            if key in files or key in folders:
                raise ArchiveError(f"{archive}: {info.filename!r} occurs twice")
            files.add(key)
        for parent in parents:
            if parent in files:
                raise ArchiveError(f"{archive}: {info.filename!r} lies inside a file")
            folders.add(parent)
        total += info.file_size
        if total > limits.total_bytes:
            raise ArchiveError(f"{archive}: more than {limits.total_bytes} bytes unpacked")
    clash = next(iter(files & folders), None)
    if clash is not None:
        raise ArchiveError(f"{archive}: {clash!r} is a file and a folder")
    chosen = [info for info in infos if not info.is_dir() and (wanted is None or info.filename in wanted)]
    missing = set(wanted or ()) - {info.filename for info in chosen}
    if missing:
        raise ArchiveError(f"{archive}: holds no {sorted(missing)[0]!r}")
    expected = sum(info.file_size for info in chosen)
    written: list[Path] = []
    done = 0
    for info in chosen:
        target = into.joinpath(*info.filename.split("/"))
        target.parent.mkdir(parents=True, exist_ok=True)
        with opened.open(info) as source, target.open("xb") as out:
            left = info.file_size
            while block := source.read(min(BLOCK, left + 1)):
                left -= len(block)
                if left < 0:
                    raise ArchiveError(f"{archive}: {info.filename!r} is longer than its directory entry says")
                out.write(block)
                done += len(block)
                if progress is not None:
                    progress(done, expected)
            if left:
                raise ArchiveError(f"{archive}: {info.filename!r} is shorter than its directory entry says")
        written.append(target)
    return written


def _check_entry(archive: Path, info: zipfile.ZipInfo, limits: Limits) -> None:
    def refuse(why: str) -> ArchiveError:
        return ArchiveError(f"{archive}: {info.filename!r} {why}")

    # orig_filename is what the file says; zipfile itself cuts names at a NUL and turns the platform's separators round.
    name = info.orig_filename
    bare = name[:-1] if name.endswith("/") else name
    parts = bare.split("/")
    if name != info.filename or not bare or any(unicodedata.category(char) in ("Cc", "Cs") for char in name):
        raise refuse("has a name with control characters")
    if name.startswith("/") or "\\" in name or ":" in name:
        raise refuse("is not a plain relative path")
    if any(part in ("", ".", "..") for part in parts):
        raise refuse("leaves its folder or has an empty part")
    if len(name.encode("utf-8", "surrogatepass")) > limits.path_bytes or len(parts) > limits.depth:
        raise refuse("has a path that is too long or too deep")
    kind = stat.S_IFMT(info.external_attr >> 16)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise refuse("is a symbolic link or another special file")
    if info.flag_bits & 0x1:
        raise refuse("is encrypted")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise refuse(f"uses compression method {info.compress_type}, only stored and deflated are accepted")
    if info.file_size > limits.entry_bytes:
        raise refuse(f"has {info.file_size} bytes, at most {limits.entry_bytes} are accepted")
    if info.file_size > limits.ratio_from and info.file_size > limits.ratio * max(info.compress_size, 1):
        raise refuse(f"grows from {info.compress_size} to {info.file_size} bytes; that is a bomb, not data")
    if info.is_dir() and info.file_size:
        raise refuse("is a folder with content")


def _folded(name: str) -> str:
    """Return the name as a case- and form-insensitive file system would see it."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
