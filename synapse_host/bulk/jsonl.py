"""JSON lines from a file or stdin, one at a time: bad ones are refused by file and line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

from synapse_host.errors import InvalidRequest

MAX_LINE: Final = 64 * 1024 * 1024


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


def lines(file: BinaryIO, name: str) -> Iterator[tuple[int, Any]]:
    """Yield (line number, value); blank lines are skipped."""
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise _bad(name, number, f"longer than {MAX_LINE} bytes")
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except UnicodeDecodeError as exc:
            raise _bad(name, number, "not UTF-8 text") from exc
        except ValueError as exc:
            raise _bad(name, number, f"not valid JSON: {exc}") from exc
        except RecursionError as exc:
            raise _bad(name, number, "nested too deep") from exc


def text_of(value: Any, name: str, number: int) -> str:
    """Return the text of one line of an embedding file: a string, or ``{"id"?, "text"}``."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and isinstance(value.get("text"), str) and set(value) <= {"id", "text"}:
        return str(value["text"])
    raise _bad(name, number, 'must be a JSON string or {"id"?, "text"}')


def pair_of(value: Any, name: str, number: int) -> tuple[str, list[str]]:
    """Return query and documents of one line of a reranking file: ``{"query", "docs"}``."""
    if (
        isinstance(value, dict)
        and set(value) == {"query", "docs"}
        and isinstance(value["query"], str)
        and isinstance(value["docs"], list)
        and value["docs"]
        and all(isinstance(doc, str) for doc in value["docs"])
    ):
        return value["query"], value["docs"]
    raise _bad(name, number, 'must be {"query": text, "docs": [text, …]}')


@contextmanager
def read_texts(source: str) -> Iterator[Iterator[str]]:
    """Open *source* and iterate over its texts."""
    name = "stdin" if source == "-" else source
    with opened(source) as file:
        yield (text_of(value, name, number) for number, value in lines(file, name))


def _bad(name: str, number: int, what: str) -> InvalidRequest:
    return InvalidRequest(f"{name}:{number}: {what}", details={"file": name, "line": number})
