"""A corpus into a file of vectors: resumable, in bounded memory, with its ids kept.

The theory of operation. A run goes over the corpus twice or three times: once to count its entries and to take its
digest, so that the result can be laid out; once to embed them, block by block; and, where there are ids to write, once
more for these. Two blocks are under way at a time: while the worker computes one, the next is read and tokenised in
threads. Their results are written in order: the rows first, then the record of how many are good
(:mod:`synapse_host.bulk.output`). A run with the same corpus, model, engine and policy goes on from that record.

What a run leaves: ``x.npy`` (float32 (n, dims)), ``x.npy.meta.json`` (which model and corpus it is of, for
:mod:`synapse_host.bulk.search`), ``x.npy.ids.txt`` where the corpus has ids, ``x.npy.errors.jsonl`` where texts were
skipped. With ``x.parquet`` one table has all but the errors: columns ``id``, ``vector``, ``truncated``.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias

from msgspec import structs

from engines.bundle.manifest import Bundle
from synapse_host.bulk import output
from synapse_host.bulk.corpus import Corpus, OnBad, Text, arrow_modules, vector_schema, vector_table
from synapse_host.bulk.entries import Chunking, Empty, entries
from synapse_host.bulk.output import Left
from synapse_host.errors import InvalidRequest, SequenceTooLong, SynapseError
from synapse_host.text.background import beside
from synapse_host.text.tokenizer import TextTokenizer
from synapse_host.text.validate import absolute, prompt_text, width

if TYPE_CHECKING:
    import numpy as np

    from synapse_host.host import Host
    from synapse_host.results import FloatArray

BLOCK: Final = 1024
"""Texts of one call."""
AHEAD: Final = 2
"""Blocks under way: one computes, the next is tokenised."""
PARQUET_GROUP: Final = 65_536
MAX_SKIPPED: Final = 10_000
"""Texts that a run leaves out before it takes the corpus for the wrong file."""

OnError: TypeAlias = Literal["stop", "skip"]


class Display(Protocol):
    """Where a run shows how far it is; the command's console is one."""

    def note(self, text: str) -> None:
        """Say a sentence."""

    def bar(self, label: str, total: int, *, unit: str) -> AbstractContextManager[Callable[[int], None]]:
        """Show a bar until the block ends; the block's value adds finished rows to it."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What becomes of each text: cut where too long, cut into chunks, left out where empty or bad, put behind a prompt.

    ``prompt`` and ``dimensions``: as :meth:`synapse_host.host.Host.embed`.
    """

    truncate: bool = False
    empty: Empty = "error"
    on_error: OnError = "stop"
    chunking: Chunking | None = None
    prompt: str | None = None
    dimensions: int | None = None

    def tokenizer(self, bundle: Bundle, model: str) -> TextTokenizer | None:
        """Return what cuts chunks for a model, None where none are cut. InvalidRequest for one it can't follow."""
        prompt_text(bundle.manifest, self.prompt)
        if self.chunking is None:
            return None
        tokenizer = TextTokenizer(bundle, model=model)
        self.chunking.check(tokenizer, self.prompt)
        return tokenizer

    def entries(self, texts: Iterable[Text], tokenizer: TextTokenizer | None, on_bad: OnBad) -> Iterator[Text]:
        """Iterate over the entries of *texts*; see :func:`synapse_host.bulk.entries.entries`."""
        cut: dict[str, Any] = {"chunking": self.chunking, "tokenizer": tokenizer, "prompt": self.prompt}
        return entries(texts, empty=self.empty, on_bad=on_bad, **cut)

    def facts(self) -> dict[str, Any]:
        """Return what of it shapes the rows, for records and for who reads the corpus again."""
        cut = self.chunking and [self.chunking.tokens, self.chunking.overlap]
        policy = {"truncate": self.truncate, "empty": self.empty, "on_error": self.on_error, "chunk": cut}
        # A key that older records don't have: without it a run still goes on from one of theirs.
        short = {} if self.dimensions is None else {"dimensions": self.dimensions}
        return policy | {"prompt": self.prompt} | short


@dataclass(slots=True)
class Block:
    """Entries of one call and what came of them."""

    read: int
    kept: list[Text] = field(default_factory=list)
    vectors: list[FloatArray] = field(default_factory=list)
    truncated: list[int] = field(default_factory=list)
    skipped: list[Left] = field(default_factory=list)
    tokens: int = 0

    def joined(self) -> FloatArray:
        """Return all its vectors in one array."""
        import numpy as np

        return np.concatenate(self.vectors)


async def embed_file(
    host: Host,
    model: str,
    corpus: Corpus,
    out: Path,
    *,
    policy: Policy | None = None,
    lane: str | None = None,
    deadline: float | None = None,
    display: Display | None = None,
) -> dict[str, Any]:
    """Embed *corpus* into *out* (``.npy``, or ``.parquet`` by its suffix) and return the command's document.

    One run at a time has *out*. Raises InvalidRequest where it can't be written, another run has it, or the corpus
    changed while it was read; the error of a text with ``where`` (``file:line``) under ``on_error="stop"``.
    """
    policy = policy or Policy()
    until = absolute(deadline)
    assignment = host.lane_of(model, lane)
    assignment.require()
    reader = Reader(corpus, policy, assignment.bundle, model)
    with output.alone(out):
        file = output.place(out, corpus.files)
        if file.suffix == ".parquet":
            arrow_modules()
        count, digest, bad = await beside(reader.survey)
        shape = (count, width(assignment.bundle.manifest, policy.dimensions))
        key = {**output.key_of(assignment, digest, count), **policy.facts()}
        growing = Growing(file, key, shape, display.note if display else None)
        started, first = time.monotonic(), growing.done
        job = Job(host, model, lane, until, policy)
        bar = display.bar("embedding", count, unit="texts") if display else nullcontext(lambda rows: None)
        async with aclosing(job.blocks(reader.read(growing.read))) as blocks:
            with bar as advance:
                advance(growing.read)
                await growing.fill(blocks, advance, corpus.name)
        elapsed = max(time.monotonic() - started, 1e-9)
        facts = {"model": model, "dims": shape[1], "n": growing.done, **_origin(corpus, key)}
        errors = [*bad, *growing.skipped]
        with output.writing(out):
            facts["left_out"] = [one.entry for one in growing.skipped]
            await beside(lambda: growing.finish(reader, facts, errors))
    return {
        **output.maker(assignment),
        "dims": shape[1],
        "n": growing.done,
        "out": str(out),
        "resumed_at": first,
        "truncated": growing.truncated,
        "skipped": len(errors),
        "texts_per_s": (growing.done - first) / elapsed,
        "tokens_per_s": growing.tokens / elapsed,
    }


def _origin(corpus: Corpus, key: dict[str, Any]) -> dict[str, Any]:
    """Return what of a run's key and corpus a reader of the result needs."""
    files = [os.path.abspath(name) for name in corpus.files]  # noqa: PTH100 - links stay as they are
    return {"files": files, "column": corpus.column, **key}


class Reader:
    """Reads a corpus as entries, again and again the same ones."""

    def __init__(self, corpus: Corpus, policy: Policy, bundle: Bundle, model: str) -> None:
        self.corpus = corpus
        self._policy = policy
        self._tokenizer = policy.tokenizer(bundle, model)

    def read(self, first: int = 0, on_bad: Callable[[SynapseError], None] | None = None) -> Iterator[Text]:
        """Iterate over the entries from number *first* on. *on_bad* gets the error of each text that is left out."""
        if self._policy.on_error == "skip":
            on_bad = on_bad or (lambda error: None)
        corpus = replace(self.corpus, on_bad=on_bad)
        return islice(self._policy.entries(corpus, self._tokenizer, on_bad), first, None)

    def survey(self) -> tuple[int, str, list[Left]]:
        """Return how many entries there are, the corpus's digest, and what is left out."""
        bad: list[Left] = []

        def note(error: SynapseError) -> None:
            bad.append(described(error))
            _check_skipped(len(bad), error)

        skip = self._policy.on_error == "skip"
        count = sum(1 for _ in self.read(on_bad=note if skip else None))
        return count, self.corpus.digest(), bad


def described(error: SynapseError, entry: int = 0) -> Left:
    """Return what a run says of an entry that has this error."""
    where = error.details.get("where") or f"{error.details.get('file')}:{error.details.get('line')}"
    return Left(where, error.code, error.message, entry)


def _check_skipped(count: int, error: SynapseError) -> None:
    if count > MAX_SKIPPED:
        raise InvalidRequest(
            f"more than {MAX_SKIPPED} texts can't be embedded: is this the right file? The last: {error.message}"
        )


class Job:
    """The calls of one run: blocks of entries to one model."""

    def __init__(self, host: Host, model: str, lane: str | None, until: float | None, policy: Policy) -> None:
        self._host = host
        self._model = model
        self._lane = lane
        self._until = until
        self._policy = policy
        self._dims = width(host.lane_of(model, lane).bundle.manifest, policy.dimensions)

    async def blocks(self, texts: Iterator[Text]) -> AsyncGenerator[Block, None]:
        """Yield the texts' results in their order; the next block is under way meanwhile."""
        waiting: deque[asyncio.Task[Block]] = deque()
        try:
            while True:
                while len(waiting) < AHEAD and (block := await beside(lambda: list(islice(texts, BLOCK)))):
                    waiting.append(asyncio.ensure_future(self.block(block)))
                if not waiting:
                    return
                yield await waiting.popleft()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def block(self, texts: list[Text]) -> Block:
        """Embed one block of texts. Raises the error of a text with its place, unless bad ones are left out."""
        block = Block(len(texts))
        entry = 0
        while entry < len(texts):
            rest = texts[entry:]
            try:
                await self._embed(block, rest)
                break
            except (SequenceTooLong, InvalidRequest) as exc:
                index = exc.details.get("index")
                if not isinstance(index, int):
                    raise
                at = _sent(rest)[index]
                error = exc.located(rest[at].where, f"text {index} ")
                if self._policy.on_error == "stop":
                    raise error from exc
                await self._embed(block, rest[:at])
                block.skipped.append(described(error, entry + at))
                entry += at + 1
        return block

    async def _embed(self, block: Block, texts: list[Text]) -> None:
        """Add the vectors of *texts* to *block*: zeros for empty ones."""
        import numpy as np

        sent = _sent(texts)
        vectors: FloatArray = np.zeros((len(texts), self._dims), np.float32)
        if sent:
            left = None if self._until is None else max(0.001, self._until - asyncio.get_running_loop().time())
            result = await self._host.embed_result(
                self._model,
                [texts[at].text for at in sent],
                lane=self._lane,
                deadline=left,
                truncate=self._policy.truncate,
                prompt=self._policy.prompt,
                dimensions=self._policy.dimensions,
            )
            vectors[sent] = result.vectors
            block.truncated += [len(block.kept) + sent[index] for index in result.truncated]
            block.tokens += result.tokens
        block.kept += texts
        block.vectors.append(vectors)


def _sent(texts: list[Text]) -> list[int]:
    """Return the indices of those that aren't empty."""
    return [at for at, text in enumerate(texts) if text.text.strip()]


class Growing:
    """A result while it grows, and how much of it is good."""

    def __init__(
        self, file: Path, key: dict[str, Any], shape: tuple[int, int], note: Callable[[str], None] | None
    ) -> None:
        self._file = file
        self._key = key
        self._shape = shape
        self._array: np.memmap[Any, np.dtype[np.float32]] | None = None
        record = output.good_rows(file, key, shape) or output.Rows()
        self.done, self.read = record.rows_done, record.read
        self.truncated, self.skipped = record.truncated, record.skipped
        self.tokens = 0
        if self.read and note:
            note(f"going on at text {self.read} of {shape[0]}")

    async def fill(self, blocks: AsyncIterator[Block], advance: Callable[[int], None], source: str | None) -> None:
        """Write *blocks*, noting each in the record. InvalidRequest where they aren't the texts that were counted."""
        try:
            async for block in blocks:
                if self.read + block.read > self._shape[0]:
                    raise InvalidRequest(f"{source} grew while it was read", details={"file": source})
                with output.writing(self._file):
                    self._write(block)
                advance(block.read)
            if self.read != self._shape[0]:
                raise InvalidRequest(f"{source} shrank while it was read", details={"file": source})
        except BaseException:
            if self._array is not None and not self.done:
                # No row of it is good: nothing is left to resume.
                output.partial_path(self._file).unlink(missing_ok=True)
            raise

    def _write(self, block: Block) -> None:
        if self._array is None:
            # Not before there is something to write: a run that fails at once leaves older rows alone.
            self._array = output.rows_file(self._file, self._shape, resumed=self.done > 0)
        done = self.done
        for vectors in block.vectors:
            self._array[done : done + len(vectors)] = vectors
            done += len(vectors)
        self.truncated += [self.done + row for row in block.truncated]
        self.skipped += [structs.replace(one, entry=self.read + one.entry) for one in block.skipped]
        if block.skipped:
            _check_skipped(len(self.skipped), InvalidRequest(block.skipped[-1].message))
        self._array.flush()
        record = output.Rows(done, self.read + block.read, self.truncated, self.skipped)
        output.write_record(self._file, self._key, record)
        self.done, self.read = done, self.read + block.read
        self.tokens += block.tokens

    def finish(self, reader: Reader, facts: dict[str, Any], errors: list[Left]) -> None:
        """Write what belongs beside the rows and give the result its name. OSError."""
        file, partial = self._file, output.partial_path(self._file)
        if self._array is None:  # an earlier run wrote the last row, or there is none to write
            self._array = output.rows_file(file, self._shape, resumed=self.read > 0)
        skipped = {one.entry for one in self.skipped}
        kept = (text for number, text in enumerate(reader.read()) if number not in skipped)
        with output.replacing_lines(beside_of(file, "errors.jsonl"), (one.line() for one in errors)):
            if file.suffix == ".parquet":
                self._parquet(kept, facts)
                self._array = None
                partial.unlink()
            else:
                self._array = None  # Windows renames no file that is mapped
                self._rename(_ids(kept, several=len(reader.corpus.files) > 1), facts)
        output.progress_path(file).unlink(missing_ok=True)

    def _rename(self, ids: Iterator[str], facts: dict[str, Any]) -> None:
        """Give rows, ids and what is said of them their names, over an older result's.

        All are written before anything is renamed. Without its meta.json a result is no index, so the old one goes
        first and the new one comes last: a run that is killed in between leaves nothing that reads as one result.
        """
        file = self._file
        if self.done < self._shape[0]:
            output.shorten(file, (self.done, self._shape[1]))
        about = beside_of(file, "meta.json")
        with output.replacing(about) as meta:
            meta.write(json.dumps(facts).encode())
            with output.replacing_lines(beside_of(file, "ids.txt"), ids):
                about.unlink(missing_ok=True)
                os.replace(output.partial_path(file), file)  # noqa: PTH105

    def _parquet(self, kept: Iterator[Text], facts: dict[str, Any]) -> None:
        _, parquet = arrow_modules()
        assert self._array is not None
        cut = set(self.truncated)
        schema = vector_schema(self._shape[1]).with_metadata({"synapse": json.dumps(facts)})
        with output.replacing(self._file) as place, parquet.ParquetWriter(place, schema) as writer:
            for first in range(0, self.done, PARQUET_GROUP):
                rows = range(first, min(self.done, first + PARQUET_GROUP))
                ids = [text.id for text in islice(kept, len(rows))]
                vectors = self._array[first : rows.stop]
                writer.write_table(vector_table(schema, ids, vectors, (row in cut for row in rows)))


def beside_of(file: Path, what: str) -> Path:
    """Return the path of a file that belongs to the result *file*: ``x.npy.ids.txt``."""
    return file.with_name(f"{file.name}.{what}")


def _ids(texts: Iterator[Text], *, several: bool) -> Iterator[str]:
    """Yield the ids, JSON strings where they have a line break; none where the corpus gives no id of its own."""
    for row, text in enumerate(texts):
        if row == 0 and not (text.named or several):
            return
        yield json.dumps(text.id) if text.id.splitlines() != [text.id] or text.id.startswith('"') else text.id
