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
import io
import json
import os
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterator
from contextlib import AbstractContextManager, aclosing, closing, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from engines.bundle.manifest import Bundle
from synapse_host.bulk import output
from synapse_host.bulk.corpus import Corpus, Text, arrow_modules, check_skipped
from synapse_host.bulk.entries import Policy
from synapse_host.bulk.output import Growing, Left
from synapse_host.bulk.parts import VectorTable
from synapse_host.errors import InvalidRequest, SequenceTooLong, SynapseError
from synapse_host.text.background import beside
from synapse_host.text.validate import absolute, width

if TYPE_CHECKING:
    from synapse_host.host import Host
    from synapse_host.results import FloatArray

BLOCK: Final = 1024
"""Texts of one call."""
AHEAD: Final = 2
"""Blocks under way: one computes, the next is tokenised."""
PARQUET_GROUP: Final = 65_536


class Display(Protocol):
    """Where a run shows how far it is; the command's console is one."""

    def note(self, text: str) -> None:
        """Say a sentence."""

    def bar(self, label: str, total: int, *, unit: str) -> AbstractContextManager[Callable[[int], None]]:
        """Show a bar until the block ends; the block's value adds finished rows to it."""


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
    dims = width(assignment.bundle.manifest, policy.dimensions)
    reader = Reader(corpus, policy, assignment.bundle, model)
    with output.alone(out):
        file = output.place(out, corpus.files)
        if file.suffix == ".parquet":
            arrow_modules()
        count, digest, bad = await beside(reader.survey)
        key = {**output.key_of(assignment, digest, count), **policy.facts()}
        source = corpus.files[0] if len(corpus.files) == 1 else "the corpus"
        with Growing(file, key, source, head=_head(count, dims), width=4 * dims) as growing:
            started, first = time.monotonic(), growing.record
            tokens = await _fill(growing, Job(host, model, lane, until, policy), reader, count, display)
            elapsed = max(time.monotonic() - started, 1e-9)
            record = growing.record
            facts = {"model": model, "dims": dims, "n": record.rows_done, **_origin(corpus, key)}
            facts["left_out"] = [one.entry for one in record.skipped]
            growing.whole(_head(record.rows_done, dims))
            with output.writing(out):
                finishing = beside(lambda: _finish(growing, reader, facts, bad))
                try:
                    await asyncio.shield(finishing)
                finally:
                    await asyncio.wait([finishing])  # a caller who leaves keeps the place until the thread has left it
    return {
        **output.maker(assignment),
        "dims": dims,
        "n": record.rows_done,
        "out": str(out),
        "resumed_at": first.rows_done,
        "truncated": record.truncated,
        "skipped": len(bad) + len(record.skipped),
        "texts_per_s": (record.rows_done - first.rows_done) / elapsed,
        "tokens_per_s": tokens / elapsed,
    }


async def _fill(growing: Growing, job: Job, reader: Reader, count: int, display: Display | None) -> int:
    """Embed what of the *count* texts is missing and return how many tokens that were."""
    done, tokens = growing.record.read, 0
    if done and display:
        display.note(f"going on at text {done} of {count}")
    bar = display.bar("embedding", count, unit="texts") if display else nullcontext(lambda rows: None)
    async with aclosing(job.blocks(reader.read(done))) as blocks:
        with bar as advance:
            advance(done)
            async for block in blocks:
                if block.skipped:
                    check_skipped(len(growing.record.skipped) + len(block.skipped), block.skipped[-1].message)
                growing.append(
                    block.joined().data,
                    rows=len(block.kept),
                    read=block.read,
                    truncated=block.truncated,
                    skipped=block.skipped,
                )
                tokens += block.tokens
                advance(block.read)
    return tokens


def _origin(corpus: Corpus, key: dict[str, Any]) -> dict[str, Any]:
    """Return what of a run's key and corpus a reader of the result needs."""
    files = [os.path.abspath(name) for name in corpus.files]  # noqa: PTH100 - links stay as they are
    return {"files": files, "column": corpus.column, **key}


def _head(rows: int, dims: int) -> bytes:
    """Return how a .npy file of so many rows begins; numpy pads it so that any number of them has one length."""
    import numpy as np

    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": (rows, dims)})
    return head.getvalue()


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
        texts = self.corpus.read(on_bad)
        return islice(self._policy.entries(texts, self._tokenizer, on_bad), first, None)

    def kept(self, left_out: Collection[int]) -> Iterator[Text]:
        """Iterate over the entries that have a row: all but those of the numbers *left_out*."""
        return (text for number, text in enumerate(self.read()) if number not in left_out)

    def survey(self) -> tuple[int, str, list[Left]]:
        """Return how many entries there are, the corpus's digest, and what is left out."""
        bad: list[Left] = []

        def note(error: SynapseError) -> None:
            bad.append(described(error))
            check_skipped(len(bad), error.message)

        skip = self._policy.on_error == "skip"
        count = sum(1 for _ in self.read(on_bad=note if skip else None))
        return count, self.corpus.digest(), bad


def described(error: SynapseError, entry: int = 0) -> Left:
    """Return what a run says of an entry that has this error."""
    where = error.details.get("where") or f"{error.details.get('file')}:{error.details.get('line')}"
    return Left(where, error.code, error.message, entry)


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


def _finish(growing: Growing, reader: Reader, facts: dict[str, Any], bad: list[Left]) -> None:
    """Write what belongs beside the rows and give the result its name. OSError."""
    file, left_out = growing.out, set(facts["left_out"])
    errors = [*bad, *growing.record.skipped]
    with output.replacing_lines(beside_of(file, "errors.jsonl"), (one.line() for one in errors)):
        if file.suffix == ".parquet":
            _write_table(growing, reader.kept(left_out), facts)
            growing.path.unlink()
        else:
            _rename(growing.path, file, _ids(reader.kept(left_out), several=len(reader.corpus.files) > 1), facts)
    output.progress_path(file).unlink(missing_ok=True)


def _rename(partial: Path, file: Path, ids: Iterator[str], facts: dict[str, Any]) -> None:
    """Give rows, ids and what is said of them their names, over an older result's.

    All are written before anything is renamed. Without its meta.json a result is no index, so the old one goes
    first and the new one comes last: a run that is killed in between leaves nothing that reads as one result.
    """
    about = beside_of(file, "meta.json")
    with output.replacing(about) as meta:
        meta.write(json.dumps(facts).encode())
        with output.replacing_lines(beside_of(file, "ids.txt"), ids):
            about.unlink(missing_ok=True)
            os.replace(partial, file)  # noqa: PTH105


def _write_table(growing: Growing, kept: Iterator[Text], facts: dict[str, Any]) -> None:
    import numpy as np

    dims, done = facts["dims"], growing.record.rows_done
    with output.replacing(growing.out) as sink, closing(VectorTable(sink, dims)) as table:
        for first in range(0, done, PARQUET_GROUP):
            rows = range(first, min(done, first + PARQUET_GROUP))
            ids = [text.id for text in islice(kept, len(rows))]
            vectors = np.lib.format.open_memmap(growing.path, mode="r")[first : rows.stop]
            table.write(ids, vectors, [row - first for row in growing.record.truncated if row in rows])
        table.end(facts)


def beside_of(file: Path, what: str) -> Path:
    """Return the path of a file that belongs to the result *file*: ``x.npy.ids.txt``."""
    return file.with_name(f"{file.name}.{what}")


def _ids(texts: Iterator[Text], *, several: bool) -> Iterator[str]:
    """Yield the ids, JSON strings where they have a line break; none where the corpus gives no id of its own."""
    for row, text in enumerate(texts):
        if row == 0 and not (text.named or several):
            return
        yield json.dumps(text.id) if text.id.splitlines() != [text.id] or text.id.startswith('"') else text.id
