"""The file of a result while it grows: its own lock, a partial file, a record of how much of it is good.

The rows go to ``<out>.partial``, which is renamed to *out* when the last one is there: nothing under a result's name
is ever half a result. ``<out>.progress.json`` says how many of them are good, for a run that goes on from there, and
its lock keeps a second run away.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from msgspec import Struct, field

from synapse_host.errors import InvalidRequest, of_os
from synapse_host.locks import lock_exclusive
from synapse_host.worker.runtime_dir import holder

if TYPE_CHECKING:
    import numpy as np

    from synapse_host.placement.assignment import Assignment


R = TypeVar("R")
BESIDE: Final = ("partial", "progress.json", "meta.json", "ids.txt", "errors.jsonl")
"""What a run writes beside its result."""


class Left(Struct):
    """A text that has no row: why, and which of the entries it was."""

    where: str
    code: str
    message: str
    entry: int = 0

    def line(self) -> str:
        """Return its line of ``errors.jsonl``."""
        return json.dumps({"where": self.where, "code": self.code, "message": self.message})


class Rows(Struct):
    """How far a file of vectors is: *rows_done* good rows, made of the first *read* entries.

    *truncated*: rows that were cut. *skipped*: entries that have none.
    """

    rows_done: int = 0
    read: int = 0
    truncated: list[int] = field(default_factory=list)
    skipped: list[Left] = field(default_factory=list)


class Lines(Struct):
    """How far a file of scores is: its good lines, and the bytes they take."""

    rows_done: int = 0
    bytes: int = 0


def key_of(assignment: Assignment, digest: str, rows: int) -> dict[str, Any]:
    """Return what a record and a run must have in common: the input by its *digest*, and what computes it."""
    spec = assignment.require()
    return {
        "input_digest": digest,
        "manifest_digest": assignment.bundle.digest,
        "artifact_digest": spec.load.artifact_digest,
        "engine": spec.engine_id,
        "rows": rows,
    }


def maker(assignment: Assignment) -> dict[str, str]:
    """Return what a run's document says of what computed it."""
    return dict(zip(("model", "lane", "engine", "device"), assignment.served_by(), strict=True))


def place(out: Path, sources: Iterable[str] = ()) -> Path:
    """Return the file that *out* names: where it is a link, what the link points to, which is the larger disk's file.

    InvalidRequest where the result can't be there, or where making it would destroy something else.
    """
    if not out.name:
        raise InvalidRequest(f"{out}: is not a file name", details={"file": str(out)})
    if out.exists() and not out.is_file():
        # It would be replaced: as root even /dev/null.
        raise InvalidRequest(f"{out}: can't be written: it is not a regular file", details={"file": str(out)})
    real = Path(os.path.realpath(out)) if out.is_symlink() else out
    if real.is_symlink():
        raise InvalidRequest(f"{out}: can't be written: it is a link to itself", details={"file": str(out)})
    beside = (real.with_name(f"{real.name}.{what}") for what in BESIDE)
    mine = [path.stat() for path in (real, *beside) if path.exists()]
    for source in sources if mine else ():
        if source != "-" and Path(source).exists() and any(os.path.samestat(Path(source).stat(), one) for one in mine):
            raise InvalidRequest(f"{out}: would overwrite the input", details={"file": str(out)})
    return real


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Hold ``<out>.progress.json.lock`` for the block; InvalidRequest where another run writes *out*."""
    # The record itself is replaced at every step, so it can't be locked; one file by another name has one lock.
    record = progress_path(Path(os.path.realpath(out)))
    lock = record.with_name(record.name + ".lock")
    with writing(out):
        file = _locked(lock, out)
    with file:
        try:
            yield
        finally:
            with suppress(OSError):
                lock.unlink()


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Tell a failed system call of the block as *out*'s: StorageFull, or InvalidRequest."""
    try:
        yield
    except OSError as exc:
        message = f"{out}: can't be written: {exc.strerror or exc}"
        raise of_os(exc, message, otherwise=InvalidRequest, details={"file": str(out)}) from exc


def _locked(lock: Path, out: Path) -> IO[bytes]:
    while True:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        file = os.fdopen(os.open(lock, flags, 0o600), "r+b", buffering=0)
        try:
            lock_exclusive(file)
        except OSError as exc:
            pid, whom = holder(file)
            file.close()
            raise InvalidRequest(
                f"{out} is being written by {whom}. Wait for it, or write to another file",
                details={"reason": "out_busy", "file": str(out), "pid": pid},
            ) from exc
        try:
            file.seek(0)
            if file.read(64).strip(b"0123456789\n"):
                raise InvalidRequest(f"{lock} is in the way; move it away", details={"file": str(lock)})
            # The last holder may have removed it between our opening and locking it.
            if os.path.samestat(os.fstat(file.fileno()), lock.lstat()):
                file.seek(0)
                file.truncate()
                try:
                    file.write(f"{os.getpid()}\n".encode())
                except OSError:
                    lock.unlink()  # it is ours, and says nothing: a full disk
                    raise
                return file
        except FileNotFoundError:
            pass
        except BaseException:
            file.close()
            raise
        file.close()


def progress_path(out: Path) -> Path:
    """Return where a run that writes *out* notes how far it is."""
    return out.with_name(out.name + ".progress.json")


def partial_path(out: Path) -> Path:
    """Return where the rows of *out* lie until all are there."""
    return out.with_name(out.name + ".partial")


def reserve_blocks(out: Path) -> None:
    """Give the file its blocks now: writing to a mapped hole of a full disk is SIGBUS, this is an OSError."""
    with out.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
                return
            # macOS and Windows have no such call in Python: zeros after the header, which is there already.
            start = file.seek(_header_bytes(out))
            zeros = bytes(1 << 20)
            for at in range(start, size, len(zeros)):
                file.write(zeros[: size - at])
        except OSError:
            out.unlink(missing_ok=True)
            raise


def rows_file(out: Path, shape: tuple[int, int], *, resumed: bool) -> np.memmap[Any, np.dtype[np.float32]]:
    """Map the partial file of *out* as float32 of *shape*: as it is where *resumed*, else anew, its blocks reserved.

    Raises OSError; a file that can't be made isn't left.
    """
    import numpy as np

    partial = partial_path(out)
    if resumed:
        return np.lib.format.open_memmap(partial, mode="r+")
    progress_path(out).unlink(missing_ok=True)  # what it counts is gone now
    partial.unlink(missing_ok=True)
    try:
        array = np.lib.format.open_memmap(partial, mode="w+", dtype=np.float32, shape=shape)
        reserve_blocks(partial)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    return array


def shorten(out: Path, shape: tuple[int, int]) -> None:
    """Cut the partial file of *out* to its first ``shape[0]`` rows: what was skipped has none."""
    import numpy as np

    partial = partial_path(out)
    start = _header_bytes(partial)
    head = io.BytesIO()
    # numpy pads the head so that the number of rows can change in place.
    np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": shape})
    if head.tell() != start:
        raise InvalidRequest(f"{out}: the head of the file can't be rewritten in place", details={"file": str(out)})
    with partial.open("r+b") as file:
        file.write(head.getvalue())
        file.truncate(start + 4 * shape[0] * shape[1])


def record_of(out: Path, key: dict[str, Any], kind: type[R]) -> R | None:
    """Return what a run of the same *key* noted about *out*; None where there is nothing, or nothing to be trusted."""
    try:
        document = json.loads(progress_path(out).read_bytes())
        record = msgspec.convert(document, kind)
    except (OSError, ValueError, MemoryError, RecursionError, msgspec.ValidationError):
        return None
    return record if all(document.get(name) == value for name, value in key.items()) else None


def good_rows(out: Path, key: dict[str, Any], shape: tuple[int, int]) -> Rows | None:
    """Return the record of a run of the same *key* that can be gone on from; None where there is none."""
    import numpy as np

    record = record_of(out, key, Rows)
    if record is None:
        return None
    done, read = record.rows_done, record.read
    if not (0 < done <= read <= shape[0] and read - done == len(record.skipped)):
        return None
    try:
        if partial_path(out).is_symlink():
            return None  # no run of ours makes one
        # Not np.load: that takes archives too.
        array = np.lib.format.open_memmap(partial_path(out), mode="r")
    except (OSError, ValueError, EOFError, OverflowError, MemoryError):
        return None
    fits = array.shape == shape and array.dtype == np.float32 and all(0 <= row < done for row in record.truncated)
    return record if fits else None


def write_record(out: Path, key: dict[str, Any], record: Struct) -> None:
    """Write the resume file in one step: a kill leaves the old one or the new one."""
    with replacing(progress_path(out)) as file:
        file.write(json.dumps({**key, **msgspec.to_builtins(record)}).encode())


def anew(path: Path) -> IO[bytes]:
    """Open a new file of this name; what had it is removed: where that is a link, its target isn't ours to write."""
    path.unlink(missing_ok=True)
    return path.open("xb")


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Give a file new content in one step: what the block writes; where it fails the old one stays."""
    part = path.with_name(path.name + ".part")
    try:
        with anew(part) as file:
            yield file
        os.replace(part, path)  # noqa: PTH105
    except BaseException:
        part.unlink(missing_ok=True)
        raise


@contextmanager
def writing_to(out: Path, size: int) -> Iterator[IO[bytes]]:
    """Open the partial file of *out* behind its first *size* bytes, which are good; what follows them is cut off."""
    with writing(out):
        partial = partial_path(out)
        file = partial.open("r+b") if size else anew(partial)
        file.truncate(size)
        file.seek(size)
    with file:
        yield file


@contextmanager
def replacing_lines(path: Path, lines: Iterator[str]) -> Iterator[None]:
    """Write *lines*, and give them the name *path* in one step after the block.

    Without any the file is removed then: an older result's says nothing here.
    """
    first = next(lines, None)
    if first is None:
        yield
        path.unlink(missing_ok=True)
        return
    with replacing(path) as file:
        for line in chain([first], lines):
            file.write(line.encode() + b"\n")
        yield


def _header_bytes(file: Path) -> int:
    """Return where the numbers of a .npy file begin."""
    import numpy as np

    return int(np.lib.format.open_memmap(file, mode="r").offset)
