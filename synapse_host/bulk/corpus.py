"""Where texts come from: files of several kinds, folders of them, stdin, or a list at hand; each text keeps its id.

Kinds, by a file's suffix: ``.jsonl`` (a JSON string or ``{"id"?, "text"}`` a line), ``.txt`` (one text a line),
``.csv`` (``--column``, default ``text``; a column ``id`` where there is one), ``.parquet`` (the same columns), ``.md``
(the whole file is one text). Anything else, stdin included, is read by its first line: as JSON lines where that is a
JSON string or begins with a brace, else as lines of text. A folder stands for all such files below it, in the order of
their names.

Reading is lazy and in bounded memory, one line at a time. Every text knows where it comes from (``corpus.jsonl:12``),
which is what errors name, and what serves as its id where the file gives none.
"""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated, Any, BinaryIO, Final, Protocol, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from synapse_host.errors import BackendMissing, InvalidRequest

OnBad: TypeAlias = Callable[[InvalidRequest], None] | None
"""Gets the error of a line that can't be read, which is left out then; None: the error is raised."""

MAX_SKIPPED: Final = 10_000
"""Texts that a run leaves out; with more it is the wrong file."""
MAX_LINE: Final = 64 * 1024 * 1024
PARQUET_ROWS: Final = 1024
"""Rows of a parquet file in memory at once."""
SUFFIXES: Final = (".jsonl", ".txt", ".csv", ".parquet", ".md")
"""What a folder is searched for."""
WRITTEN: Final = (".npy.ids.txt", ".npy.errors.jsonl", ".parquet.errors.jsonl")
"""What of these is none of its texts: an earlier run wrote it beside its vectors."""


class Lines(Protocol):
    """What lines are read from: a binary file, or a part of one."""

    def readline(self, limit: int, /) -> bytes:
        """Return the next line with its end, or *limit* bytes of it; empty at the end."""


@dataclass(frozen=True, slots=True)
class Text:
    """One text: its id, and where it is (``file:line``, or ``file:row`` of a table)."""

    text: str
    id: str
    where: str
    named: bool = False
    """The id is the file's own."""
    blank: bool = False
    """A blank line of a file with a text on each line: it is one only where every line is to have a row."""


class _Line(Struct, forbid_unknown_fields=True):
    text: str
    id: str | int | UnsetType = UNSET


class Query(Struct, forbid_unknown_fields=True):
    """One line of a reranking file."""

    query: str
    docs: Annotated[list[str], Meta(min_length=1)]
    id: str | int | UnsetType = UNSET


_TEXT: Final = msgspec.json.Decoder(str | _Line)
_QUERY: Final = msgspec.json.Decoder(Query)


@dataclass(frozen=True, slots=True)
class Corpus:
    """Texts that can be read more than once: of files, or at hand. ``column``: which one of a table holds the text.

    ``bad``: the errors of those that could be read only once, and weren't texts.
    """

    files: tuple[str, ...] = ()
    texts: tuple[Text, ...] = ()
    column: str = "text"
    bad: tuple[InvalidRequest, ...] = ()

    @classmethod
    def of(cls, source: str | Path | Iterable[str], *, column: str = "text", skip: bool = False) -> Corpus:
        """Return the corpus of a file, a folder, ``-`` (stdin), or texts.

        What can't be read twice (stdin, a pipe) is read whole, and waits for whoever writes to it; *skip* keeps the
        errors of what is no text there. InvalidRequest where there is nothing to read.
        """
        if not isinstance(source, str | Path):
            return cls(texts=tuple(Text(text, str(row), f"text {row}") for row, text in enumerate(source)))
        path = Path(source)
        if str(source) != "-" and path.is_dir():
            found = (file for file in path.rglob("*") if file.suffix in SUFFIXES and not file.name.endswith(WRITTEN))
            files = sorted(str(file) for file in found if file.is_file())
            if not files:
                raise InvalidRequest(
                    f"{source}: no {', '.join(SUFFIXES)} file is in this folder", details={"file": str(source)}
                )
            return cls(files=tuple(files), column=column)
        corpus = cls(files=(str(source),), column=column)
        if str(source) != "-" and path.is_file():
            return corpus
        bad: list[InvalidRequest] = []

        def keep(error: InvalidRequest) -> None:
            bad.append(error)
            check_skipped(len(bad), error.message)

        return cls(texts=tuple(corpus.read(keep if skip else None)), column=column, bad=tuple(bad))

    def __iter__(self) -> Iterator[Text]:
        """Iterate over the texts. InvalidRequest {file, line} where one can't be read."""
        return self.read()

    def read(self, on_bad: OnBad = None) -> Iterator[Text]:
        """Iterate over the texts. *on_bad* gets the error of one that can't be read, and may raise it."""
        for error in self.bad:
            refuse(error, on_bad)
        yield from self.texts
        for name in self.files:
            # Names and ids are written as UTF-8, and a file's name may be other bytes.
            shown = "stdin" if name == "-" else name.encode("utf-8", "backslashreplace").decode()
            with opened(name) as file:
                yield from read(file, shown, self.column, on_bad)

    def digest(self) -> str:
        """Return the SHA-256 of all that is read: what tells a changed corpus from the one of an earlier run."""
        digest = hashlib.sha256()
        for text in self.texts:
            digest.update(json.dumps([text.id, text.text]).encode() + b"\n")
        for name in self.files:
            with opened(name) as file:
                digest.update(json.dumps(["file", self.column]).encode())  # not its name: it may be moved
                while block := file.read(1 << 20):
                    digest.update(block)
        return digest.hexdigest()


@contextmanager
def opened(source: str) -> Iterator[BinaryIO]:
    """Open a file by name, or stdin for ``-``. InvalidRequest says why it can't be read."""
    if source == "-":
        yield sys.stdin.buffer
        return
    try:
        file = Path(source).open("rb")  # noqa: SIM115 - closed below; only opening may be told as 'can't be read'
    except OSError as exc:
        raise InvalidRequest(f"{source}: can't be read: {exc.strerror or exc}", details={"file": source}) from exc
    with file:
        yield file


def read(file: Lines, name: str, column: str, on_bad: OnBad = None, *, before: int = 0) -> Iterator[Text]:
    """Iterate over the texts of an open file, of the kind that its *name* says; it has *before* lines before it."""
    suffix = PurePath(name).suffix.lower()
    if suffix in _TABLES:
        yield from _TABLES[suffix](file, name, column, on_bad)
        return
    kind = suffix if suffix in (".jsonl", ".txt") else ""
    for number, line in _lines(file, name, on_bad, before=before):
        where = f"{name}:{number}"
        if not line.strip():
            if kind != ".jsonl":
                yield Text("", where, where, blank=True)
            continue
        if not kind:
            if suffix == ".json" and line.lstrip().startswith("["):
                # Its lines read as texts would have vectors of brackets and quotes.
                raise _bad(name, number, "a JSON array isn't read; write one value a line, as .jsonl")
            kind = ".jsonl" if line.lstrip().startswith("{") or _is_json_string(line) else ".txt"
        if kind == ".txt":
            yield Text(line.rstrip("\r\n"), where, where)
            continue
        try:
            value = _value(line, _TEXT, 'a JSON string or {"id"?, "text"}', name, number)
        except InvalidRequest as exc:
            refuse(exc, on_bad, exc.__cause__)
        else:
            if isinstance(value, str):
                yield Text(value, where, where)
            else:
                yield Text(value.text, where if value.id is UNSET else str(value.id), where, value.id is not UNSET)


def _lines(file: Lines, name: str, on_bad: OnBad = None, *, before: int = 0) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, line with its end). InvalidRequest for a line that isn't text."""
    number = before
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise _bad(name, number, f"longer than {MAX_LINE} bytes")
        try:
            # A mark at the beginning of a file is none of its text.
            yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as exc:
            refuse(_bad(name, number, "not UTF-8 text"), on_bad, exc)


def queries(file: Lines, name: str) -> Iterator[tuple[int, Query]]:
    """Yield (line number, query) of a reranking file. InvalidRequest {file, line}."""
    for number, line in _lines(file, name):
        if line.strip():
            yield number, _value(line, _QUERY, '{"query": text, "docs": [text, …]}', name, number)


def _value(line: str, decoder: msgspec.json.Decoder[Any], must: str, name: str, number: int) -> Any:
    """Return what one line of JSON holds, which is called *must*."""
    try:
        return decoder.decode(line)
    except msgspec.ValidationError as exc:
        raise _bad(name, number, f"must be {must}: {exc}") from exc
    except (msgspec.DecodeError, RecursionError) as exc:
        why = "half a surrogate pair" if "\\ud" in line.lower() and "truncated" in str(exc) else exc
        raise _bad(name, number, f"not valid JSON: {why}") from exc


def _is_json_string(line: str) -> bool:
    try:
        msgspec.json.decode(line, type=str)
    except msgspec.DecodeError:
        return False
    return True


def _md(file: Any, name: str, column: str, on_bad: OnBad) -> Iterator[Text]:
    try:
        text = whole(file, name)
    except InvalidRequest as exc:
        refuse(exc, on_bad)
    else:
        yield Text(text, name, name, named=True)


def whole(file: Any, name: str) -> str:
    """Return all of an open file as one text. InvalidRequest where it is none, or too long."""
    data: bytes = file.read(MAX_LINE + 1)
    if len(data) > MAX_LINE:
        raise _bad(name, 1, f"longer than {MAX_LINE} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise _bad(name, data[: exc.start].count(b"\n") + 1, "not UTF-8 text") from exc


def _csv(file: Any, name: str, column: str, on_bad: OnBad) -> Iterator[Text]:
    csv.field_size_limit(MAX_LINE)
    # Blank lines within quotes belong to the text, so they aren't left out.
    table = csv.reader((line for _, line in _lines(file, name)), strict=True)
    try:
        head = next(table, [])
        at = _column(name, head, column)
        id_at = head.index("id") if "id" in head and column != "id" else None
        for row in table:
            if not row:
                continue
            where = f"{name}:{table.line_num}"
            if len(row) != len(head):
                refuse(_bad(name, table.line_num, f"has {len(row)} fields, the head has {len(head)}"), on_bad)
                continue
            yield Text(row[at], where if id_at is None else row[id_at], where, id_at is not None)
    except csv.Error as exc:
        raise _bad(name, table.line_num, f"not valid CSV: {exc}") from exc


def table_rows(file: Any, name: str, column: str, on_bad: OnBad, groups: range | None = None) -> Iterator[Text]:
    """Iterate over the texts of a parquet table: of all its row groups, or of *groups*."""
    arrow, parquet = arrow_modules()
    try:
        table = parquet.ParquetFile(file)
        head = table.schema_arrow.names
        _column(name, head, column)
        columns = [column, "id"] if "id" in head and column != "id" else [column]
        chosen = range(table.num_row_groups) if groups is None else groups
        row = sum(table.metadata.row_group(group).num_rows for group in range(chosen.start))
        for batch in table.iter_batches(PARQUET_ROWS, row_groups=list(chosen), columns=columns):
            for fields in zip(*map(batch.column, range(len(columns))), strict=True):
                row += 1
                where = f"{name}:{row}"
                try:
                    text, id = (*(field.as_py() for field in fields), None)[:2]
                except UnicodeDecodeError as exc:
                    refuse(_bad(name, row, "not UTF-8 text"), on_bad, exc)
                    continue
                if isinstance(text, str):
                    yield Text(text, where if id is None else str(id), where, len(columns) > 1)
                else:
                    refuse(_bad(name, row, f"column {column} holds {type(text).__name__}, not text"), on_bad)
    except (arrow.ArrowException, OSError) as exc:
        raise InvalidRequest(f"{name}: can't be read as parquet: {exc}", details={"file": name}) from exc


def arrow_modules() -> tuple[Any, Any]:
    """Return ``pyarrow`` and ``pyarrow.parquet``. BackendMissing says what to install."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as exc:
        raise BackendMissing(
            "parquet files need pyarrow. Install it: pip install 'synapse-workers[parquet]'",
            details={"missing": "pyarrow"},
        ) from exc
    return pyarrow, pyarrow.parquet


_TABLES: Final = {".csv": _csv, ".parquet": table_rows, ".md": _md}


def _column(name: str, head: list[str], column: str) -> int:
    if column not in head:
        have = ", ".join(head[:20]) or "none"
        raise InvalidRequest(
            f"{name}: there is no column {column!r} (have: {have}).",
            details={"file": name, "column": column},
            advice={
                "python": "Name the one with the texts: Corpus.of(…, column=NAME).",
                "command": "Name the one with the texts: --column NAME.",
            },
        )
    return head.index(column)


def check_skipped(count: int, last: str) -> None:
    """Refuse to leave out more than MAX_SKIPPED texts; *last* is what the newest of them had."""
    if count > MAX_SKIPPED:
        raise InvalidRequest(
            f"more than {MAX_SKIPPED} texts can't be embedded: is this the right file? The last: {last}"
        )


def _bad(name: str, number: int, what: str) -> InvalidRequest:
    return InvalidRequest(f"{name}:{number}: {what}", details={"file": name, "line": number})


def refuse(error: InvalidRequest, on_bad: OnBad, cause: BaseException | None = None) -> None:
    """Hand the error of a text to *on_bad*, which leaves the text out; without one raise it."""
    if on_bad is None:
        raise error from cause
    on_bad(error)
