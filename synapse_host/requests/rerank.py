"""Reranking on a lane: a query and candidates, or rows composed of both, to scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engines.protocol.messages import ITEM_BYTES, Rerank, Segment
from synapse_host.requests.batching import Batch
from synapse_host.requests.parts import Part, buffer, collect, cut
from synapse_host.results import sigmoid
from synapse_host.text.encoders import checked
from synapse_host.text.limits import check_lengths
from synapse_host.text.rows import compose_ids
from synapse_host.text.validate import id_rows

if TYPE_CHECKING:
    from engines.bundle.manifest import Manifest
    from synapse_host.arrays import FloatArray, IntArray
    from synapse_host.lanes import Lanes
    from synapse_host.placement.assignment import Assignment
    from synapse_host.text.rows import Frame, Rows
    from synapse_host.worker.exchange import Build


def request(query: IntArray | None, part: Part) -> Build:
    """Return RERANK of bare candidates, for a worker that composes the pairs; without *query* RERANK_SEQUENCES."""
    if query is None:
        return Batch(part.lengths, part.ids)
    import numpy as np

    n, ids = len(query), np.concatenate([query, part.ids])
    segments = [Segment(n_tokens=length) for length in part.lengths]

    def candidates(req_id: str, model_ref: str) -> tuple[Rerank, memoryview]:
        message = Rerank(req_id=req_id, model_ref=model_ref, query_n_tokens=n, candidates=segments)
        return message, buffer(ids)

    return candidates


async def score(
    lanes: Lanes, assignment: Assignment, query: IntArray | None, rows: Rows, until: float | None
) -> FloatArray:
    """Return the rows' logits, float32 (n,), in as many exchanges as they need. Arguments as :func:`request`."""
    limits = {
        "reply_row_bytes": ITEM_BYTES,
        "max_frame": lanes.config.max_frame,
        "common_tokens": 0 if query is None else len(query),
    }
    parts = await checked(rows.lengths, until, lambda: cut(rows, **limits, noun="document"))
    serving = lanes.serving(assignment)

    async def send(part: Part) -> FloatArray:
        _, logits = await serving.submit(request(query, part), deadline=until, stage="rerank")
        scores: FloatArray = logits
        return scores

    return await collect(parts, send)


def composed(
    assignment: Assignment, frame: Frame, query_ids: Sequence[int], candidates: Sequence[Any]
) -> tuple[IntArray | None, Rows]:
    """Return what :func:`score` takes for bare segments of ids, for an owned worker rows of query and candidate in one.

    *frame*: the special ids of a pair, whoever composes it. Raises InvalidRequest, SequenceTooLong.
    """
    limits: dict[str, Any] = {"max_tokens": assignment.bundle.manifest.max_tokens, "model": assignment.model}
    query = id_rows([query_ids], **limits, noun="query").ids
    rows = id_rows(candidates, **limits, noun="candidate")
    # Checked before it is composed: every row would hold the query once more.
    common = len(query) + (len(frame) or 3)
    check_lengths([length + common for length in rows.lengths], **limits, noun="candidate")
    return (None, compose_ids(frame, query, rows)) if assignment.require().owned else (query, rows)


def scaled(manifest: Manifest, logits: FloatArray, *, raw: bool) -> FloatArray:
    """Return the scores that a caller sees: probabilities where the bundle says so, the logits with *raw*."""
    # SCORES are raw logits on every engine; the sigmoid is applied here, once (protocol-v3, 1).
    return sigmoid(logits) if not raw and manifest.score == "sigmoid" else logits
