"""The file of a result while it grows: its own lock, a partial file, a record of how much of it is good.

The rows go to ``<out>.partial``, which is renamed to *out* when the last one is there: nothing under a result's name
is ever half a result. ``<out>.progress.json`` says how many of them are good, for a run that goes on from there, and
its lock keeps a second run away.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Self

import msgspec
from msgspec import Struct, structs

from synapse_host.errors import InvalidRequest, of_os
from synapse_host.locks import lock_exclusive
from synapse_host.worker.runtime_dir import holder

if TYPE_CHECKING:
    from synapse_host.placement.assignment import Assignment

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


ZEROS: Final = 1 << 20
"""Bytes written at once where the system has no call to reserve them."""


class Record(Struct):
    """How far a result is: *rows_done* good rows in its first *bytes* bytes, made of the first *read* entries.

    *truncated*: rows that were cut. *skipped*: entries that have none.
    """

    rows_done: int = 0
    read: int = 0
    bytes: int = 0
    truncated: list[int] = []
    skipped: list[Left] = []


class Growing:
    """A result while it grows: ``<out>.partial``, and the record of how much of it is good. A context manager.

    *key* is what a record and a run that goes on from it must have in common; ``key["rows"]`` counts the entries.
    *source* is what errors call them. *head* and *width*: the bytes before the rows and of each one, where all have
    the same number: such a file has its final size from the start. Nothing is written before the first row, so that a
    run that fails at once leaves an older one's rows alone.
    """

    def __init__(self, out: Path, key: dict[str, Any], source: str, *, head: bytes = b"", width: int = 0) -> None:
        self.out = out
        self.path = out.with_name(out.name + ".partial")
        self._key, self._source, self._head, self._width = key, source, head, width
        self._file: IO[bytes] | None = None
        self.record = self._noted() or Record()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            if kind is not None and not self.record.read:
                self.path.unlink(missing_ok=True)  # no row of it is good: nothing is left to resume

    def _noted(self) -> Record | None:
        """Return what a run of the same key noted; None where there is nothing, or nothing to be trusted."""
        try:
            document = json.loads(progress_path(self.out).read_bytes())
            record = msgspec.convert(document, Record)
            size = 0 if self.path.is_symlink() else self.path.stat().st_size  # no run of ours makes a link
        except (OSError, ValueError, MemoryError, RecursionError, msgspec.ValidationError):
            return None
        done = record.rows_done
        good = (
            all(document.get(name) == value for name, value in self._key.items())
            and 0 <= done <= record.read <= self._key["rows"]
            and record.read - done == len(record.skipped)
            and 0 <= record.bytes <= size
            and (not self._width or record.bytes == len(self._head) + self._width * done)
            and all(0 <= row < done for row in record.truncated)
        )
        return record if good else None

    def append(
        self,
        data: bytes | memoryview,
        *,
        rows: int = 1,
        read: int = 1,
        truncated: Sequence[int] = (),
        skipped: Sequence[Left] = (),
    ) -> None:
        """Write the next *rows* rows, made of *read* entries. *truncated* and *skipped* count from the first of each.

        InvalidRequest where there are more entries than were counted, or the file can't be written.
        """
        old = self.record
        if old.read + read > self._key["rows"]:
            raise InvalidRequest(f"{self._source} grew while it was read", details={"file": self._source})
        with writing(self.out):
            file = self._opened()
            file.write(data)
            file.flush()
            if self._width:
                os.fsync(file.fileno())  # its size doesn't say how much of it reached the disk
            record = Record(
                old.rows_done + rows,
                old.read + read,
                file.tell(),
                old.truncated + [old.rows_done + row for row in truncated],
                old.skipped + [structs.replace(one, entry=old.read + one.entry) for one in skipped],
            )
            with replacing(progress_path(self.out)) as note:
                note.write(json.dumps({**self._key, **msgspec.to_builtins(record)}).encode())
            self.record = record

    def _opened(self) -> IO[bytes]:
        if self._file is not None:
            return self._file
        good = self.record.bytes
        if not good:
            progress_path(self.out).unlink(missing_ok=True)  # what it counts is gone now
            self.path.unlink(missing_ok=True)
        self._file = file = self.path.open("r+b" if good else "xb")
        size = max(good, len(self._head) + self._width * self._key["rows"])
        file.truncate(size)
        # A disk without room for all of it is told now.
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.seek(good)
            for at in range(good, size, ZEROS):
                file.write(bytes(min(ZEROS, size - at)))
            file.seek(0)
        file.write(self._head)
        file.seek(max(good, len(self._head)))
        return file

    def whole(self, head: bytes = b"") -> None:
        """End the file behind its last good row, with its final *head*. InvalidRequest where entries are missing."""
        if self.record.read != self._key["rows"]:
            raise InvalidRequest(f"{self._source} shrank while it was read", details={"file": self._source})
        with writing(self.out), self._opened() as file:
            file.truncate(max(self.record.bytes, len(head)))
            file.seek(0)
            file.write(head)


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


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Give a file new content in one step: what the block writes; where it fails the old one stays."""
    part = path.with_name(path.name + ".part")
    try:
        part.unlink(missing_ok=True)  # where it is a link, its target isn't ours to write
        with part.open("xb") as file:
            yield file
        os.replace(part, path)  # noqa: PTH105
    except BaseException:
        part.unlink(missing_ok=True)
        raise


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
