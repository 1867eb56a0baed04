"""The storage of a job on several machines: blocks of a corpus, and the parts that are made of them.

A *block* is a range of bytes of a line file, a range of row groups of a parquet table, or a whole file of another kind.
Its key is the digest of all that shapes its rows, so the same block has the same key in every run. A *part* is a
block's result: ``part-<key>.parquet``, written under a temporary name and renamed, so that it is there whole or not at
all. Files are on any filesystem that pyarrow knows, by URI (``s3://…``), or by path on this one.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import posixpath
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from synapse_host.bulk.corpus import (
    SUFFIXES,
    WRITTEN,
    OnBad,
    Text,
    arrow_modules,
    read,
    table_rows,
)
from synapse_host.errors import InvalidRequest

if TYPE_CHECKING:
    from synapse_host.arrays import FloatArray

BLOCK_BYTES: Final = 4 * 1024 * 1024
"""Bytes of a line file in one block: some ten thousand texts, a minute or more of work."""
LINE_FILES: Final = (".jsonl", ".txt")
CARRY: Final = 1 << 20
MANIFEST: Final = "manifest.json"


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of the corpus. ``first`` and ``last``: bytes of a line file, row groups of a table, else 0 and 0."""

    file: str
    size: int
    mtime_ns: int
    first: int = 0
    last: int = 0

    @property
    def suffix(self) -> str:
        """The file's kind."""
        return posixpath.splitext(self.file)[1].lower()

    def key(self, facts: dict[str, Any]) -> str:
        """Return what its part is called by: other content, another policy or model gives another key."""
        return hashlib.sha256(json.dumps([asdict(self), facts], sort_keys=True).encode()).hexdigest()[:32]


@contextmanager
def storage(what: str) -> Iterator[None]:
    """Raise what a filesystem fails with in the block as InvalidRequest that names *what*."""
    arrow, _ = arrow_modules()
    try:
        yield
    except (OSError, arrow.ArrowException) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else exc
        raise InvalidRequest(f"{what}: {reason}", details={"file": what}) from exc


def filesystem(where: str) -> tuple[Any, str]:
    """Return the filesystem of a URI or a local path, and the path there. InvalidRequest."""
    from pyarrow import fs

    with storage(where):
        if "://" in where:
            found: tuple[Any, str] = fs.FileSystem.from_uri(where)
            return found
        return fs.LocalFileSystem(), os.path.abspath(where)  # noqa: PTH100 - links stay as they are


def base_of(source: str) -> str:
    """Return the folder that a pattern is looked for in; a path without wildcards is its own."""
    base, _, query = _cut_pattern(source)
    return base + query


def _cut_pattern(source: str) -> tuple[str, str, str]:
    """Return a source's folder, the pattern below it, and a URI's query (``?region=…``)."""
    mark = source.find("?") if "://" in source else -1
    path, query = (source[:mark], source[mark:]) if mark >= 0 else (source, "")
    base = path
    while any(mark in base for mark in "*?["):
        base = posixpath.dirname(base)
    return base or ".", path.removeprefix(base).lstrip("/"), query


def find_blocks(source: str, *, block_bytes: int = BLOCK_BYTES, leave: str | None = None) -> list[Block]:
    """Return the blocks of *source*, in order: of a file, a folder, or a pattern (``*.jsonl``).

    What lies in the folder *leave* is none of it. InvalidRequest where there is no file that could be read.
    """
    from pyarrow import fs

    arrow_modules()
    base, pattern, query = _cut_pattern(source)
    files, folder = filesystem(base + query)
    with storage(source):
        found = files.get_file_info(folder)
        if found.type == fs.FileType.Directory:
            inside = files.get_file_info(fs.FileSelector(folder, recursive=True))
            plain = [info for info in inside if info.type == fs.FileType.File]
            plain = [info for info in plain if leave is None or not info.path.startswith(f"{leave}/")]
            found = [info for info in plain if _wanted(info.path.removeprefix(folder).lstrip("/"), pattern)]
        else:
            found = [found] if found.type == fs.FileType.File else []
        infos = sorted(found, key=lambda info: str(info.path))
        blocks = [block for info in infos for block in _cut(files, info, block_bytes)]
    if not blocks:
        raise InvalidRequest(f"{source}: holds no text file", details={"file": source})
    return blocks


def _wanted(path: str, pattern: str) -> bool:
    """True for a path below the folder that the pattern, relative to it, matches; without one, for files of texts."""
    if not pattern:
        return path.endswith(SUFFIXES) and not path.endswith(WRITTEN)
    _, deep, tail = pattern.rpartition("**/")
    return PurePosixPath(path).match(tail) and (bool(deep) or path.count("/") == tail.count("/"))


def _cut(files: Any, info: Any, block_bytes: int) -> Iterator[Block]:
    """Yield the blocks of one file."""
    whole = Block(info.path, info.size, info.mtime_ns or 0)
    if whole.suffix in LINE_FILES:
        for first in range(0, info.size, block_bytes):
            yield Block(info.path, info.size, whole.mtime_ns, first, min(first + block_bytes, info.size))
    elif whole.suffix == ".parquet":
        _, parquet = arrow_modules()
        with files.open_input_file(info.path) as file:
            groups = parquet.ParquetFile(file).metadata.num_row_groups
        for group in range(groups):
            yield Block(info.path, info.size, whole.mtime_ns, group, group + 1)
    else:
        yield whole


def count_lines(files: Any, block: Block) -> int:
    """Return how many lines begin in a block of a line file."""
    begin, end = max(block.first - 1, 0), block.last - 1
    with storage(block.file), files.open_input_file(block.file) as file:
        file.seek(begin)
        count, left = int(block.first == 0), end - begin
        while left > 0 and (data := file.read(min(CARRY, left))):
            count += data.count(b"\n")
            left -= len(data)
    return count


class _LineRange:
    """The lines of a file that begin between two of its bytes."""

    def __init__(self, file: io.BufferedReader, first: int, last: int) -> None:
        self._file = file
        self._last = last
        file.seek(max(first - 1, 0))
        if first:
            while (line := file.readline(CARRY)) and not line.endswith(b"\n"):
                pass

    def readline(self, limit: int, /) -> bytes:
        """Return the next line with its end, or *limit* bytes of it; empty at the end of the range."""
        return self._file.readline(limit) if self._file.tell() < self._last else b""


def block_texts(files: Any, block: Block, column: str, before: int, on_bad: OnBad) -> Iterator[Text]:
    """Iterate over the texts of a block, of which *before* lines of its file come before it. Raises as the corpus."""
    with storage(block.file):
        info = files.get_file_info(block.file)
        if (info.size, info.mtime_ns or 0) != (block.size, block.mtime_ns):
            raise InvalidRequest(f"{block.file}: changed while it was read", details={"file": block.file})
        source = files.open_input_file(block.file)
    # Closed by hand: what is raised while the texts are used is no fault of the filesystem's.
    try:
        if block.suffix in LINE_FILES:
            lines = _LineRange(io.BufferedReader(source, CARRY), block.first, block.last)
            yield from read(lines, block.file, column, on_bad, before=before)
        elif block.suffix == ".parquet":
            yield from table_rows(source, block.file, column, on_bad, range(block.first, block.last))
        else:
            yield from read(io.BufferedReader(source, CARRY), block.file, column, on_bad)
    finally:
        with suppress(OSError, ValueError):
            source.close()


# --- parts -----------------------------------------------------------------------------------------------------------


def part_path(out: str, block: Block, facts: dict[str, Any]) -> str:
    """Return where a block's part lies."""
    return posixpath.join(out, f"part-{block.key(facts)}.parquet")


class VectorTable:
    """A parquet table of vectors while it is written: columns ``id``, ``vector`` (*dims* float32), ``truncated``."""

    def __init__(self, sink: Any, dims: int) -> None:
        arrow, parquet = arrow_modules()
        vector = arrow.list_(arrow.float32(), dims)
        self._schema = arrow.schema([("id", arrow.string()), ("vector", vector), ("truncated", arrow.bool_())])
        # No number comes twice: a dictionary of them would add 40 % to the file.
        self._writer = parquet.ParquetWriter(sink, self._schema, use_dictionary=False)

    def write(self, ids: list[str], vectors: FloatArray, truncated: Iterable[int]) -> None:
        """Add rows: *vectors* (len(ids), dims), *truncated* indices of those that were cut."""
        arrow, _ = arrow_modules()
        cut = set(truncated)
        columns = [
            arrow.array(ids, arrow.string()),
            arrow.FixedSizeListArray.from_arrays(arrow.array(vectors.reshape(-1)), vectors.shape[1]),
            arrow.array([row in cut for row in range(len(ids))], arrow.bool_()),
        ]
        self._writer.write_table(arrow.Table.from_arrays(columns, schema=self._schema))

    def end(self, facts: dict[str, Any]) -> None:
        """End the table; *facts* are what it says of itself: its metadata's ``synapse``."""
        self._writer.add_key_value_metadata({"synapse": json.dumps(facts)})
        self.close()

    def close(self) -> None:
        """Write no more, be it whole or not."""
        self._writer.close()


class PartFile:
    """A part while it is written. It has its name from :meth:`end` on."""

    def __init__(self, files: Any, path: str, dims: int) -> None:
        self._files = files
        self._path = path
        # Not `*.parquet`: a reader of the folder doesn't take it for a part.
        self._temporary = f"{path}.{uuid.uuid4().hex}.tmp"
        with storage(path):
            self._sink = files.open_output_stream(self._temporary)
            self._table = VectorTable(self._sink, dims)

    def write(self, ids: list[str], vectors: FloatArray, truncated: Iterable[int]) -> None:
        """Add rows, as :meth:`VectorTable.write`."""
        with storage(self._path):
            self._table.write(ids, vectors, truncated)

    def end(self, facts: dict[str, Any]) -> None:
        """Give the part its name; *facts* are read by :func:`part_facts`."""
        with storage(self._path):
            self._table.end(facts)
            self._sink.close()
            self._files.move(self._temporary, self._path)

    def drop(self) -> None:
        """Leave nothing behind."""
        for step in (self._table.close, self._sink.close, lambda: self._files.delete_file(self._temporary)):
            with suppress(Exception):  # whatever the storage says now: the first failure is the one to report
                step()


def part_facts(files: Any, path: str) -> dict[str, Any] | None:
    """Return what a part says of itself; None where there is none. InvalidRequest where it can't be read."""
    from pyarrow import fs

    _, parquet = arrow_modules()
    with storage(path):
        if files.get_file_info(path).type != fs.FileType.File:
            return None
        with files.open_input_file(path) as file:
            raw = (parquet.read_metadata(file).metadata or {}).get(b"synapse")
    try:
        facts = json.loads(raw or b"")
        if isinstance(facts, dict) and isinstance(facts.get("rows"), int):
            return facts
    except ValueError:
        pass
    raise InvalidRequest(f"{path}: is no part of a result of synapse; move it away", details={"file": path})


def list_parts(files: Any, out: str) -> list[str]:
    """Return the parts in a folder, in the order of their names; makes the folder."""
    from pyarrow import fs

    with storage(out):
        files.create_dir(out, recursive=True)
        found = files.get_file_info(fs.FileSelector(out))
    paths = [str(info.path) for info in found]
    return sorted(path for path in paths if posixpath.basename(path).startswith("part-") and path.endswith(".parquet"))


def sweep(files: Any, out: str) -> None:
    """Remove what actors that were killed had begun to write; for when every part is there."""
    from pyarrow import fs

    with storage(out):
        for info in files.get_file_info(fs.FileSelector(out)):
            name = posixpath.basename(info.path)
            if name.startswith("part-") and name.endswith(".tmp"):
                files.delete_file(info.path)


def write_text(files: Any, path: str, text: str) -> None:
    """Write a small file in one step."""
    temporary = f"{path}.{uuid.uuid4().hex}.tmp"
    with storage(path):
        with files.open_output_stream(temporary) as sink:
            sink.write(text.encode())
        files.move(temporary, path)
