"""A file of queries with their documents into a file of scores, one JSON line a query; resumable.

Lines go to ``<out>.partial`` in the order of the input; ``<out>.progress.json`` says how many of its bytes are good.
The file gets its name when the last query is done.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from synapse_host.bulk import output
from synapse_host.bulk.corpus import Corpus, opened, query_of, values
from synapse_host.bulk.embedding import Display
from synapse_host.errors import InvalidRequest, SynapseError
from synapse_host.text.background import beside

if TYPE_CHECKING:
    from synapse_host.host import Host
    from synapse_host.results import RerankResult


async def rerank_file(
    host: Host,
    model: str,
    source: str,
    out: Path,
    *,
    raw: bool = False,
    truncate: bool = False,
    lane: str | None = None,
    deadline: float | None = None,
    display: Display,
) -> dict[str, Any]:
    """Score *source* (``{"id"?, "query", "docs"}`` a line) into *out*: ``{"id"?, "scores", "order", "truncated"}``.

    *deadline*: seconds for each query. Raises InvalidRequest where *out* can't be written or another run has it, and
    the error of a query with ``where`` (``file:line``). Returns the command's document.
    """
    assignment = host.lane_of(model, lane)
    assignment.require()
    ask = partial(host.rerank_result, model, raw=raw, lane=lane, deadline=deadline, truncate=truncate)
    with output.alone(out):
        file = output.place(out, [source])
        count, digest = await beside(lambda: _survey(source))
        if not count:
            raise InvalidRequest(f"{source} holds no query", details={"file": source})
        key = {**output.key_of(assignment, digest, count), "raw": raw, "truncate": truncate}
        with output.writing(out):
            record = _resume(file, key)
        if first := record.rows_done:
            display.note(f"going on at query {first} of {count}")
        with (
            display.bar("reranking", count, unit="queries") as advance,
            opened(source) as lines,
            output.writing_to(file, record.bytes) as growing,
        ):
            advance(first)
            for number, value in islice(values(lines, source), first, None):
                line = await _line(ask, value, source, number)
                with output.writing(out):
                    growing.write(line)
                    growing.flush()
                    record = output.Lines(record.rows_done + 1, record.bytes + len(line))
                    output.write_record(file, key, record)
                advance(1)
        if record.rows_done != count:
            raise InvalidRequest(f"{source} shrank while it was read", details={"file": source})
        with output.writing(out):
            os.replace(output.partial_path(file), file)  # noqa: PTH105
            output.progress_path(file).unlink(missing_ok=True)
    return {**output.maker(assignment), "n": count, "out": str(out), "resumed_at": first}


async def _line(
    ask: Callable[[str, list[str]], Awaitable[RerankResult]], value: object, source: str, number: int
) -> bytes:
    """Return the line of scores for one line of the source; the error of its query names ``file:line``."""
    query, documents, name = query_of(value, source, number)
    try:
        result = await ask(query, documents)
    except SynapseError as exc:
        raise exc.located(f"{source}:{number}") from exc
    scores = {"scores": result.scores.tolist(), "order": result.order, "truncated": result.truncated}
    return json.dumps(({} if name is None else {"id": name}) | scores).encode() + b"\n"


def _survey(source: str) -> tuple[int, str]:
    """Return how many queries a file holds and its digest; InvalidRequest at the first line that is none."""
    count = 0
    with opened(source) as lines:
        for number, value in values(lines, source):
            query_of(value, source, number)
            count += 1
    return count, Corpus(files=(source,)).digest()


def _resume(file: Path, key: dict[str, Any]) -> output.Lines:
    """Return how much of the partial file is good."""
    record = output.record_of(file, key, output.Lines) or output.Lines()
    partial = output.partial_path(file)
    # No run of ours makes a link.
    size = partial.stat().st_size if partial.exists() and not partial.is_symlink() else 0
    return record if 0 <= record.rows_done <= key["rows"] and 0 <= record.bytes <= size else output.Lines()
