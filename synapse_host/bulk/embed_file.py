"""``synapse embed --out``: a preallocated .npy file filled chunk by chunk, resumable, in bounded memory.

The rows go to ``<out>.partial``, which is renamed to *out* when the last one is there: nothing under a result's name
is ever half a result. ``<out>.progress.json`` says how many of them are good, for a run that goes on from there.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from synapse_host.bulk.jsonl import MAX_LINE, opened, read_texts
from synapse_host.errors import InvalidRequest, of_os
from synapse_host.locks import lock_exclusive
from synapse_host.worker.runtime_dir import holder

if TYPE_CHECKING:
    import numpy as np

    from synapse_host.host import Host
    from synapse_host.results import EmbedResult


class Display(Protocol):
    """Where a run shows how far it is; the command's console is one."""

    def note(self, text: str) -> None:
        """Say a sentence."""

    def bar(self, label: str, total: int, *, unit: str) -> AbstractContextManager[Callable[[int], None]]:
        """Show a bar until the block ends; the block's value adds finished rows to it."""


@dataclass(frozen=True, slots=True)
class Texts:
    """What is embedded: a file that can be read again, or texts at hand. ``digest``: SHA-256 of what was counted."""

    file: str | None
    texts: list[str]
    rows: int
    digest: str

    @classmethod
    def survey(cls, source: str | None, texts: list[str]) -> Texts:
        """Count and digest a JSONL file, or *texts*. Blocks as long as nobody writes to stdin or a pipe.

        Two passes are needed, so stdin, a pipe or ``<(command)`` is read whole: it can't be read twice.
        """
        if source is not None and (source == "-" or not Path(source).is_file()):
            with read_texts(source) as stream:
                texts, source = list(stream), None
        rows, digest = _survey_file(source) if source else _survey_texts(texts)
        if not rows:
            raise InvalidRequest("there is no text to embed", details={"file": source})
        return cls(source, texts, rows, digest)

    def read(self) -> AbstractContextManager[Iterator[str]]:
        """Iterate over the texts."""
        return read_texts(self.file) if self.file is not None else nullcontext(iter(self.texts))


async def embed_to_file(
    host: Host,
    model: str,
    *,
    source: Texts,
    out: Path,
    lane: str | None,
    deadline: float | None,
    truncate: bool,
    display: Display,
) -> dict[str, Any]:
    """Embed *source* into *out* and return the result's document.

    A run with the same input, model and engine goes on where the last one stopped. One run at a time has *out*; a
    second gets InvalidRequest.
    """
    with alone(out):
        file = place(out, source.file)
        assignment = host.lane_of(model, lane)
        spec = assignment.require()
        shape = (source.rows, assignment.bundle.manifest.dims)
        key = {
            "input_digest": source.digest,
            "manifest_digest": assignment.bundle.digest,
            "artifact_digest": spec.load.artifact_digest,
            "engine": spec.engine_id,
            "truncate": truncate,
            "rows": source.rows,
        }
        first, truncated = resume_point(file, key, shape)
        if first:
            display.note(f"going on at text {first} of {source.rows}")
        started = time.monotonic()
        with display.bar("embedding", source.rows, unit="texts") as advance, source.read() as stream:
            advance(first)
            rest = islice(stream, first, None)
            chunks = host.embed_stream(model, rest, lane=lane, deadline=deadline, truncate=truncate, offset=first)
            tokens = await _fill(file, chunks, key, shape, first, truncated, advance, source.file)
    elapsed = max(time.monotonic() - started, 1e-9)
    return {
        "model": model,
        "lane": assignment.lane_id,
        "engine": spec.engine_id,
        "device": spec.device,
        "dims": shape[1],
        "n": source.rows,
        "out": str(out),
        "resumed_at": first,
        "truncated": truncated,
        "texts_per_s": (source.rows - first) / elapsed,
        "tokens_per_s": tokens / elapsed,
    }


async def _fill(
    out: Path,
    chunks: AsyncGenerator[EmbedResult, None],
    key: dict[str, Any],
    shape: tuple[int, int],
    done: int,
    truncated: list[int],
    advance: Callable[[int], None],
    source: str | None,
) -> int:
    """Write *chunks* from row *done* on, noting each in the record, and give *out* its name; return their tokens.

    *truncated* is added to. InvalidRequest where *source* no longer has the texts that were counted.
    """
    array: np.memmap[Any, np.dtype[np.float32]] | None = None
    tokens = 0
    try:
        async with aclosing(chunks) as results:
            async for result in results:
                rows = len(result.vectors)
                if done + rows > shape[0]:
                    raise InvalidRequest(f"{source} grew while it was read", details={"file": source})
                truncated += result.truncated
                with _writing(out):
                    if array is None:
                        # Not before there is something to write: a run that fails at once leaves older rows alone.
                        array = _opened(out, shape, resumed=done > 0)
                    array[done : done + rows] = result.vectors
                    array.flush()
                    _record(out, key, done + rows, truncated)
                done += rows
                tokens += result.tokens
                advance(rows)
        if done != shape[0]:
            raise InvalidRequest(f"{source} shrank while it was read", details={"file": source})
    except BaseException:
        if array is not None and not done:
            # No row of it is good: nothing is left to resume.
            partial_path(out).unlink(missing_ok=True)
        raise
    array = None  # Windows renames no file that is mapped
    with _writing(out):
        os.replace(partial_path(out), out)  # noqa: PTH105
        progress_path(out).unlink(missing_ok=True)
    return tokens


def _opened(out: Path, shape: tuple[int, int], *, resumed: bool) -> np.memmap[Any, np.dtype[np.float32]]:
    """Map the rows' file, float32 of *shape*: as it is where *resumed*, else anew and with all its blocks. OSError."""
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


def place(out: Path, source: str | None) -> Path:
    """Return the file that *out* names: where it is a link, what the link points to, which is the larger disk's file.

    InvalidRequest where the result can't be there, or where making it would destroy something else.
    """
    if not out.name:
        raise InvalidRequest(f"--out {out}: is not a file name", details={"file": str(out)})
    if out.exists() and not out.is_file():
        # It would be replaced: as root even /dev/null.
        raise InvalidRequest(f"{out}: can't be written: it is not a regular file", details={"file": str(out)})
    real = Path(os.path.realpath(out)) if out.is_symlink() else out
    if real.is_symlink():
        raise InvalidRequest(f"{out}: can't be written: it is a link to itself", details={"file": str(out)})
    for path in (real, progress_path(real), partial_path(real)):
        if source not in (None, "-") and path.exists() and Path(source).exists() and path.samefile(source):
            raise InvalidRequest(f"{out}: --out would overwrite the input", details={"file": str(out)})
    return real


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Hold ``<out>.progress.json.lock`` for the block; InvalidRequest where another run writes *out*."""
    # The record itself is replaced at every step, so it can't be locked; one file by another name has one lock.
    record = progress_path(Path(os.path.realpath(out)))
    lock = record.with_name(record.name + ".lock")
    with _writing(out):
        file = _locked(lock, out)
    with file:
        try:
            yield
        finally:
            with suppress(OSError):
                lock.unlink()


@contextmanager
def _writing(out: Path) -> Iterator[None]:
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
                f"{out} is being written by {whom}. Wait for it, or pass another --out",
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
            start = file.seek(np_header_bytes(out))
            zeros = bytes(1 << 20)
            for at in range(start, size, len(zeros)):
                file.write(zeros[: size - at])
        except OSError:
            out.unlink(missing_ok=True)
            raise


def np_header_bytes(out: Path) -> int:
    """Return where the numbers of a .npy file begin."""
    import numpy as np

    return int(np.lib.format.open_memmap(out, mode="r").offset)


def _survey_file(source: str) -> tuple[int, str]:
    """Return how many texts a file holds and its SHA-256, in one pass."""
    digest = hashlib.sha256()
    rows = 0
    with opened(source) as file:
        while line := file.readline(MAX_LINE + 1):
            if len(line) > MAX_LINE:
                raise InvalidRequest(f"{source}: a line is longer than {MAX_LINE} bytes", details={"file": source})
            digest.update(line)
            rows += bool(line.strip())
    return rows, digest.hexdigest()


def _survey_texts(texts: list[str]) -> tuple[int, str]:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(json.dumps(text).encode() + b"\n")
    return len(texts), digest.hexdigest()


def resume_point(out: Path, key: dict[str, Any], shape: tuple[int, int]) -> tuple[int, list[int]]:
    """Return how many rows for *out* are good already; 0 unless everything that shapes the numbers is the same."""
    import numpy as np

    try:
        record = json.loads(progress_path(out).read_bytes())
        # Not np.load: that takes archives too.
        array = np.lib.format.open_memmap(partial_path(out), mode="r")
    except (OSError, ValueError, EOFError, OverflowError, MemoryError, RecursionError):
        return 0, []
    if not isinstance(record, dict) or any(record.get(name) != value for name, value in key.items()):
        return 0, []
    done, truncated = record.get("rows_done"), record.get("truncated")
    if (
        array.shape != shape
        or array.dtype != np.float32
        or type(done) is not int
        or not isinstance(truncated, list)
        or not all(type(index) is int and 0 <= index < done for index in truncated)
    ):
        return 0, []
    return (done, truncated) if 0 <= done < shape[0] else (0, [])


def _record(out: Path, key: dict[str, Any], done: int, truncated: list[int]) -> None:
    """Write the resume file in one step: a kill leaves the old one or the new one."""
    progress = progress_path(out)
    part = progress.with_name(progress.name + ".part")
    try:
        part.write_text(json.dumps({**key, "rows_done": done, "truncated": truncated}))
        os.replace(part, progress)  # noqa: PTH105
    except OSError:
        part.unlink(missing_ok=True)
        raise
