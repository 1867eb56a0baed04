"""``synapse embed --out``: a preallocated .npy file filled chunk by chunk, resumable, in bounded memory."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from synapse_host.cli.jsonl import MAX_LINE, opened, read_texts
from synapse_host.encoding import in_thread
from synapse_host.errors import InvalidRequest
from synapse_host.remains import holder, lock_exclusive

if TYPE_CHECKING:
    import numpy as np

    from synapse_host.cli.console import Console
    from synapse_host.host import Host
    from synapse_host.results import EmbedResult


async def embed_to_file(
    host: Host,
    model: str,
    *,
    source: str | None,
    texts: list[str],
    out: Path,
    lane: str | None,
    deadline: float | None,
    truncate: bool,
    console: Console,
) -> dict[str, Any]:
    """Embed *source* (a JSONL file; stdin is read whole first) or *texts* into *out*; return the result's document.

    ``<out>.progress.json`` {input_digest, rows_done, …} is written after every chunk and removed at the end; a run with
    the same input, model and engine goes on where the last one stopped. One run at a time has *out*; a second gets
    InvalidRequest.
    """
    _check_out(out, source)
    with alone(out):
        if source is not None and (source == "-" or not Path(source).is_file()):
            # Two passes are needed, one to count and digest: stdin, a pipe or <(command) can't be read twice.
            # In a thread: nobody may ever write to it, and Ctrl-C is answered on the loop.
            texts, source = await in_thread(partial(_read_whole, source), None), None
        assignment = host.lane_of(model, lane)
        spec = assignment.require()
        dims = assignment.bundle.manifest.dims
        total, digest = _survey_file(source) if source else _survey_texts(texts)
        if not total:
            raise InvalidRequest("there is no text to embed", details={"file": source})
        key = {
            "input_digest": digest,
            "manifest_digest": assignment.bundle.digest,
            "artifact_digest": spec.load.artifact_digest,
            "engine": spec.engine_id,
            "truncate": truncate,
            "rows": total,
        }
        first, truncated = _resume(progress_path(out), out, key, (total, dims))
        if first:
            console.note(f"going on at text {first} of {total}")
        started = time.monotonic()
        with console.bar("embedding", total, unit="texts") as bar, _texts(source, texts) as stream:
            bar.advance(first)
            rest = islice(stream, first, None)
            chunks = host.embed_stream(model, rest, lane=lane, deadline=deadline, truncate=truncate, offset=first)
            tokens = await _fill(out, chunks, key, (total, dims), first, truncated, bar.advance, source)
    elapsed = max(time.monotonic() - started, 1e-9)
    return {
        "model": model,
        "lane": assignment.lane_id,
        "engine": spec.engine_id,
        "device": spec.device,
        "dims": dims,
        "n": total,
        "out": str(out),
        "resumed_at": first,
        "truncated": truncated,
        "texts_per_s": (total - first) / elapsed,
        "tokens_per_s": tokens / elapsed,
    }


def _read_whole(source: str) -> list[str]:
    with read_texts(source) as stream:
        return list(stream)


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
    """Write *chunks* to *out* from row *done* on, noting each in the record; return their tokens.

    *truncated* is added to. InvalidRequest where *source* no longer has the texts that were counted.
    """
    progress, array, tokens = progress_path(out), None, 0
    async with aclosing(chunks) as results:
        async for result in results:
            rows = len(result.vectors)
            if done + rows > shape[0]:
                raise InvalidRequest(f"{source} grew while it was read", details={"file": source})
            if array is None:
                # Not before there is something to write: a run that fails at once leaves an older result alone.
                array = _opened(out, shape, resumed=done > 0)
            array[done : done + rows] = result.vectors
            done += rows
            tokens += result.tokens
            truncated += result.truncated
            array.flush()
            _record(progress, key, done, truncated)
            advance(rows)
    if done != shape[0]:
        raise InvalidRequest(f"{source} shrank while it was read", details={"file": source})
    progress.unlink(missing_ok=True)
    return tokens


def _opened(out: Path, shape: tuple[int, int], *, resumed: bool) -> np.memmap[Any, np.dtype[np.float32]]:
    """Map *out*, float32 of *shape*: as it is where *resumed*, else anew and with all its blocks. InvalidRequest."""
    import numpy as np

    try:
        if resumed:
            return np.lib.format.open_memmap(out, mode="r+")
        progress_path(out).unlink(missing_ok=True)  # what it counts is gone now
        out.unlink(missing_ok=True)
        array = np.lib.format.open_memmap(out, mode="w+", dtype=np.float32, shape=shape)
        _allocate(out)
    except OSError as exc:
        raise InvalidRequest(f"{out}: can't be written: {exc.strerror or exc}", details={"file": str(out)}) from exc
    return array


def _check_out(out: Path, source: str | None) -> None:
    """Refuse a place where the result can't be, or where making it would destroy something else."""
    if not out.name:
        raise InvalidRequest(f"--out {out}: is not a file name", details={"file": str(out)})
    if out.exists() and not out.is_file():
        # It would be unlinked: as root even /dev/null.
        raise InvalidRequest(f"{out}: can't be written: it is not a regular file", details={"file": str(out)})
    for place in (out, progress_path(out)):
        if source not in (None, "-") and place.exists() and Path(source).exists() and place.samefile(source):
            raise InvalidRequest(f"{out}: --out would overwrite the input", details={"file": str(out)})


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Hold ``<out>.progress.json.lock`` for the block; InvalidRequest where another run writes *out*."""
    # The record itself is replaced at every step, so it can't be locked; one file by another name has one lock.
    place = progress_path(Path(os.path.realpath(out)))
    lock = place.with_name(place.name + ".lock")
    try:
        file = _locked(lock, out)
    except OSError as exc:
        raise InvalidRequest(f"{out}: can't be written: {exc.strerror or exc}", details={"file": str(out)}) from exc
    with file:
        try:
            yield
        finally:
            with suppress(OSError):
                lock.unlink()


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
                file.write(f"{os.getpid()}\n".encode())
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


def _allocate(out: Path) -> None:
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


def _texts(source: str | None, texts: list[str]) -> Any:
    if source is not None:
        return read_texts(source)
    from contextlib import nullcontext

    return nullcontext(iter(texts))


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


def _resume(progress: Path, out: Path, key: dict[str, Any], shape: tuple[int, int]) -> tuple[int, list[int]]:
    """Return how many rows of *out* are good already; 0 unless everything that shapes the numbers is the same."""
    import numpy as np

    try:
        record = json.loads(progress.read_bytes())
        # Not np.load: that takes archives too.
        array = np.lib.format.open_memmap(out, mode="r")
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


def _record(progress: Path, key: dict[str, Any], done: int, truncated: list[int]) -> None:
    """Write the resume file in one step: a kill leaves the old one or the new one."""
    part = progress.with_name(progress.name + ".part")
    part.write_text(json.dumps({**key, "rows_done": done, "truncated": truncated}))
    os.replace(part, progress)  # noqa: PTH105
