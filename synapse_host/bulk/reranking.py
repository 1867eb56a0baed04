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

from msgspec import UNSET

from synapse_host.bulk import output
from synapse_host.bulk.corpus import Corpus, Query, opened, queries
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
        with output.Growing(file, key, source) as growing:
            if first := growing.record.read:
                display.note(f"going on at query {first} of {count}")
            with display.bar("reranking", count, unit="queries") as advance, opened(source) as lines:
                advance(first)
                for number, query in islice(queries(lines, source), first, None):
                    growing.append(await _line(ask, query, f"{source}:{number}"))
                    advance(1)
            growing.whole()
        with output.writing(out):
            os.replace(growing.path, file)  # noqa: PTH105
            output.progress_path(file).unlink(missing_ok=True)
    return {**output.maker(assignment), "n": count, "out": str(out), "resumed_at": first}


async def _line(ask: Callable[[str, list[str]], Awaitable[RerankResult]], query: Query, where: str) -> bytes:
    """Return the line of scores for one line of the source; the error of its query names *where*, ``file:line``."""
    try:
        result = await ask(query.query, query.docs)
    except SynapseError as exc:
        raise exc.located(where) from exc
    scores = {"scores": result.scores.tolist(), "order": result.order, "truncated": result.truncated}
    return json.dumps(({} if query.id is UNSET else {"id": str(query.id)}) | scores).encode() + b"\n"


def _survey(source: str) -> tuple[int, str]:
    """Return how many queries a file holds and its digest; InvalidRequest at the first line that is none."""
    with opened(source) as lines:
        count = sum(1 for _ in queries(lines, source))
    return count, Corpus(files=(source,)).digest()
