"""A file of queries with their documents into a file of scores, one JSON line a query; resumable.

Lines go to ``<out>.partial`` in the order of the input; ``<out>.progress.json`` says how many of its bytes are good.
The file gets its name when the last query is done.
"""

from __future__ import annotations

import json
import os
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
    spec = assignment.require()
    with output.alone(out):
        file = output.place(out, [source])
        count, digest = await beside(lambda: _survey(source))
        if not count:
            raise InvalidRequest(f"{source} holds no query", details={"file": source})
        key = {
            "input_digest": digest,
            "manifest_digest": assignment.bundle.digest,
            "artifact_digest": spec.load.artifact_digest,
            "engine": spec.engine_id,
            "raw": raw,
            "truncate": truncate,
            "rows": count,
        }
        with output.writing(out):
            done, size = _resume(file, key)
        if done:
            display.note(f"going on at query {done} of {count}")
        first = done
        with (
            display.bar("reranking", count, unit="queries") as advance,
            opened(source) as lines,
            output.writing_to(file, size) as partial,
        ):
            advance(done)
            for number, value in islice(values(lines, source), done, None):
                query, documents, name = query_of(value, source, number)
                try:
                    result = await host.rerank_result(
                        model, query, documents, raw=raw, lane=lane, deadline=deadline, truncate=truncate
                    )
                except SynapseError as exc:
                    raise exc.located(f"{source}:{number}") from exc
                scores = {"scores": result.scores.tolist(), "order": result.order, "truncated": result.truncated}
                line = json.dumps(({} if name is None else {"id": name}) | scores).encode() + b"\n"
                done += 1
                with output.writing(out):
                    partial.write(line)
                    partial.flush()
                    size += len(line)
                    output.write_record(file, {**key, "rows_done": done, "bytes": size})
                advance(1)
        if done != count:
            raise InvalidRequest(f"{source} shrank while it was read", details={"file": source})
        with output.writing(out):
            os.replace(output.partial_path(file), file)  # noqa: PTH105
            output.progress_path(file).unlink(missing_ok=True)
    return {
        "model": model,
        "lane": assignment.lane_id,
        "engine": spec.engine_id,
        "device": spec.device,
        "n": count,
        "out": str(out),
        "resumed_at": first,
    }


def _survey(source: str) -> tuple[int, str]:
    """Return how many queries a file holds and its digest; InvalidRequest at the first line that is none."""
    count = 0
    with opened(source) as lines:
        for number, value in values(lines, source):
            query_of(value, source, number)
            count += 1
    return count, Corpus(files=(source,)).digest()


def _resume(file: Path, key: dict[str, Any]) -> tuple[int, int]:
    """Return how many lines of the partial file are good, and its bytes until there."""
    try:
        if output.partial_path(file).is_symlink():
            return 0, 0  # no run of ours makes one
        record = json.loads(output.progress_path(file).read_bytes())
        size = output.partial_path(file).stat().st_size
    except (OSError, ValueError, RecursionError):
        return 0, 0
    if not isinstance(record, dict) or any(record.get(name) != value for name, value in key.items()):
        return 0, 0
    done, good = record.get("rows_done"), record.get("bytes")
    if type(done) is not int or type(good) is not int or not (0 <= done <= key["rows"] and 0 <= good <= size):
        return 0, 0
    return done, good
