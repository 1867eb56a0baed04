"""Search by meaning over an embedded corpus: the nearest rows of a file of vectors, by cosine.

Brute force: every row is compared, in blocks of a memory-mapped file, so that memory stays small and the answer is
exact. A million rows of 384 numbers take a fraction of a second once the file is in the page cache. The file says which
model made it (its ``meta.json``, or the metadata of a parquet table), and a query is embedded by that model only:
vectors of two models can't be compared, and nothing in the numbers would show it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NotRequired, TypedDict

import msgspec
import numpy as np

from synapse_host.bulk.corpus import Corpus, arrow_modules
from synapse_host.bulk.embedding import Reader, beside_of
from synapse_host.bulk.entries import Chunking, Empty, OnError, Policy
from synapse_host.errors import InvalidRequest

if TYPE_CHECKING:
    from engines.bundle.manifest import Bundle
    from synapse_host.arrays import FloatArray

ROWS: Final = 32_768
"""Rows compared at once: 50 MB for 384 numbers a row."""
SLICE: Final = 1024
MAX_META: Final = 16 * 1024 * 1024


class Facts(TypedDict):
    """What an index says of itself: which model made it, and how its texts are read again."""

    model: str
    manifest_digest: str
    dims: int
    n: int
    files: list[str]
    column: str
    input_digest: str
    truncate: bool
    empty: Empty
    on_error: OnError
    chunk: tuple[int, int] | None
    left_out: list[int]
    prompt: NotRequired[str | None]


@dataclass(frozen=True, slots=True)
class Hit:
    """One row of the index that was found: its number, its id, and its cosine with the query."""

    row: int
    id: str
    score: float


class Index:
    """The vectors of a corpus in a file, and what is known of them."""

    def __init__(self, path: Path) -> None:
        """Open ``x.npy`` or ``x.parquet`` as :mod:`synapse_host.bulk.embedding` writes them. InvalidRequest."""
        self.path = path
        self._real = Path(os.path.realpath(path))  # what lies beside a result lies there where the path is a link
        self._table: Any = None
        self._vectors: Any = None
        with _read(path):
            if path.suffix == ".parquet":
                arrow, parquet = arrow_modules()
                self._table = parquet.ParquetFile(path, memory_map=True)
                schema = self._table.schema_arrow
                raw = (self._table.metadata.metadata or {}).get(b"synapse", b"")
                ids, vectors = (schema.field(name).type for name in ("id", "vector"))
                listed = arrow.types.is_fixed_size_list(vectors) and vectors.value_type == arrow.float32()
                held = self._table.metadata.num_rows, vectors.list_size if listed and ids == arrow.string() else 0
            else:
                self._vectors = np.lib.format.open_memmap(path, mode="r")
                with beside_of(self._real, "meta.json").open("rb") as file:
                    raw = file.read(MAX_META)
                held = self._vectors.shape if self._vectors.dtype == np.float32 else (0, 0)
            self.facts = msgspec.convert(json.loads(raw), Facts)
            self.dims, self.rows = self.facts["dims"], self.facts["n"]
            if held != (self.rows, self.dims):
                raise ValueError(f"its rows aren't the {self.rows} x {self.dims} that it speaks of")

    def check_model(self, bundle: Bundle, model: str) -> None:
        """Raise InvalidRequest where the index was made by another model than this bundle."""
        if bundle.digest != self.facts.get("manifest_digest"):
            raise InvalidRequest(
                f"{self.path} was made by another model than {model} is now ({self.facts.get('model')}, another "
                "manifest digest).",
                details={"file": str(self.path), "expected": self.facts.get("manifest_digest"), "got": bundle.digest},
                advice={
                    "python": "Embed the corpus again, or take the model it was made by.",
                    "command": "Embed the corpus again, or name the model it was made by: --model.",
                },
            )

    def nearest(self, queries: FloatArray, count: int) -> list[list[Hit]]:
        """Return, for each query vector (float32 (q, dims)), the *count* rows of the greatest cosine, best first.

        Equal scores keep the order of the rows.
        """
        with _read(self.path):
            return self._nearest(_unit(queries), count)

    def _nearest(self, queries: FloatArray, count: int) -> list[list[Hit]]:
        best = [(np.empty(0, np.float32), np.empty(0, np.int64)) for _ in queries]
        first = 0
        for block in self._blocks():
            scores = _cosines(queries, block)
            if not np.isfinite(scores).all():
                raise ValueError("it holds what is no number")
            for at, row in enumerate(scores):
                # All that are no worse than the last of the best: a partition takes any of equal ones.
                least = np.partition(row, -count)[-count] if len(row) > count else -np.inf
                few = np.flatnonzero(row >= least)
                values = np.concatenate([best[at][0], row[few]])
                rows = np.concatenate([best[at][1], few + first])
                order = np.lexsort((rows, -values))[:count]
                best[at] = values[order], rows[order]
            first += len(block)
        names = self._ids(sorted({int(row) for _, rows in best for row in rows}))
        return [
            [Hit(int(row), names[int(row)], float(score)) for score, row in zip(scores, rows, strict=True)]
            for scores, rows in best
        ]

    def _blocks(self) -> Iterator[FloatArray]:
        if self._vectors is not None:
            for first in range(0, self.rows, ROWS):
                yield np.asarray(self._vectors[first : first + ROWS])
            return
        for batch in self._table.iter_batches(ROWS, columns=["vector"]):
            if batch.column(0).null_count:
                raise ValueError("it has a row without a vector")
            yield batch.column(0).flatten().to_numpy(zero_copy_only=True).reshape(-1, self.dims)

    def _ids(self, rows: Sequence[int]) -> dict[int, str]:
        """Return the ids of some rows, given in order; a row's number where the corpus gave no ids."""
        names = {row: str(row) for row in rows}
        if self._table is not None:
            first = 0
            for batch in self._table.iter_batches(ROWS, columns=["id"]):
                column = batch.column(0)
                names |= {row: column[row - first].as_py() for row in rows if first <= row < first + len(column)}
                first += len(column)
            return names
        file = beside_of(self._real, "ids.txt")
        if file.is_file():
            with file.open(encoding="utf-8") as lines:
                wanted = set(rows)
                for row, line in enumerate(islice(lines, rows[-1] + 1 if rows else 0)):
                    if row in wanted:
                        line = line.rstrip("\n")
                        names[row] = json.loads(line) if line.startswith('"') else line
                        wanted.remove(row)
            if wanted:
                raise ValueError(f"{file.name} has fewer lines than there are rows")
        return names

    def texts(self, rows: Sequence[int], bundle: Bundle) -> dict[int, str]:
        """Return the texts of some rows, read from the corpus again; InvalidRequest where it has changed."""
        facts = self.facts
        cut = facts.get("chunk")
        chunking = Chunking(*cut) if cut else None
        policy = Policy(facts["truncate"], facts["empty"], facts["on_error"], chunking, facts.get("prompt"))
        corpus = Corpus(files=tuple(facts["files"]), column=facts["column"])
        if not corpus.files or not all(Path(file).is_file() for file in corpus.files):
            raise InvalidRequest(f"{self.path}: its texts are in no file that could be read again")
        if corpus.digest() != facts["input_digest"]:
            raise InvalidRequest(f"{self.path}: the texts it was made from have changed. Embed them again")
        reader = Reader(corpus, policy, bundle, facts["model"])
        kept = islice(reader.kept(set(facts["left_out"])), max(rows, default=-1) + 1)
        wanted = set(rows)
        return {row: text.text for row, text in enumerate(kept) if row in wanted}


@contextmanager
def _read(path: Path) -> Iterator[None]:
    """Tell what is wrong with a file that is being read as an index. InvalidRequest."""
    try:
        yield
    except (OSError, ValueError, KeyError, EOFError, RecursionError, msgspec.MsgspecError) as exc:
        said = exc.strerror if isinstance(exc, OSError) and exc.strerror else exc
        raise InvalidRequest(
            f"{path}: is no index ({said}).",
            details={"file": str(path)},
            advice={
                "python": "Make one: embed_file(host, model, corpus, path).",
                "command": f"Make one: synapse embed --file CORPUS --out {path}.",
            },
        ) from exc


def _cosines(queries: FloatArray, block: FloatArray) -> FloatArray:
    """Return the cosines of *queries*, which have length 1, with the rows of *block*, float32 (queries, rows).

    In slices that stay in the processor's cache: each row is read from memory once, for its length and for all
    queries. Not by a product of matrices: its threads wait for each other at every block, for seconds on a machine
    that has other work.
    """
    scores: FloatArray = np.empty((len(queries), len(block)), np.float32)
    for first in range(0, len(block), SLICE):
        rows = block[first : first + SLICE]
        lengths = np.sqrt(np.einsum("ij,ij->i", rows, rows))
        lengths[lengths == 0] = 1
        for query, some in zip(queries, scores[:, first : first + SLICE], strict=True):
            np.divide(np.einsum("ij,j->i", rows, query), lengths, out=some)
    return scores


def _unit(vectors: FloatArray) -> FloatArray:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)
