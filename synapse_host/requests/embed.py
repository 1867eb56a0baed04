"""Embedding on a lane: rows of ids to vectors."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from msgspec import UNSET

from engines.bundle import tight
from engines.bundle.manifest import BundleError
from engines.protocol.errors import ErrorCode
from engines.protocol.messages import ITEM_BYTES, Pooling, Vectors
from synapse_host.errors import WORKER_ERRORS, BundleInvalid, InvalidRequest
from synapse_host.requests.batching import Batch
from synapse_host.requests.parts import Part, collect, cut, whole
from synapse_host.results import EmbedResult
from synapse_host.text.background import beside
from synapse_host.text.encoders import checked
from synapse_host.text.validate import width

if TYPE_CHECKING:
    from engines.bundle.manifest import Manifest
    from engines.checkpoint.dense import Weights
    from synapse_host.arrays import FloatArray
    from synapse_host.lanes import Lanes
    from synapse_host.placement.assignment import Assignment
    from synapse_host.text.rows import Rows


def request(manifest: Manifest, part: Part) -> Batch:
    """Return the EMBED_BATCH of some rows; an item's id is the row's number."""
    pooling = Pooling(manifest.pooling) if manifest.pooling is not UNSET else Pooling.MEAN
    return Batch(part.lengths, part.ids, pooling, manifest.worker_normalizes, part.rows.start)


async def embed(
    lanes: Lanes, assignment: Assignment, rows: Rows, until: float | None, dimensions: int | None = None
) -> FloatArray:
    """Return the rows' vectors, float32 (n, dims), in as many exchanges as they need; see :func:`shortened`."""
    manifest = assignment.bundle.manifest
    dims = manifest.worker_dims
    limits = {"reply_row_bytes": ITEM_BYTES * dims, "max_frame": lanes.config.max_frame}
    columns = width(manifest, dimensions)
    layers = await _layers(lanes, assignment)
    parts = await checked(rows.lengths, until, lambda: cut(rows, **limits, noun="text"))
    serving = lanes.serving(assignment)

    async def send(part: Part) -> FloatArray:
        reply, raw = await serving.submit(request(manifest, part), deadline=until, stage="embed")
        assert isinstance(reply, Vectors)
        if reply.dims != dims:
            raise BundleInvalid(
                f"bundle {assignment.model} says dims {dims}, its artifact gives {reply.dims}. Rebuild the bundle",
                details={"expected": dims, "observed": reply.dims},
            )
        vectors = await _finished(assignment, layers, raw.reshape(len(part.rows), dims))
        return shortened(vectors, columns, normalize=manifest.normalize is True)

    return await collect(parts, send, columns)


def shortened(vectors: FloatArray, columns: int, *, normalize: bool) -> FloatArray:
    """Return the first *columns* numbers of each vector, for models trained so that these alone mean the same.

    With *normalize* they get length 1 again, as OpenAI's and TEI's servers do, and sentence-transformers with
    ``truncate_dim`` and ``normalize_embeddings=True``: a caller who compares by dot product would else compare lengths.
    """
    if columns == vectors.shape[1]:
        return vectors
    import numpy as np

    short: FloatArray = np.ascontiguousarray(vectors[:, :columns])
    if normalize:
        lengths = np.linalg.norm(short, axis=1, keepdims=True)
        short /= np.where(lengths > 0, lengths, 1)
    return short


async def embed_chunks(
    lanes: Lanes,
    assignment: Assignment,
    chunks: AsyncGenerator[Rows, None],
    count: int,
    until: float | None,
    dimensions: int,
) -> EmbedResult:
    """Return the vectors of *count* rows that come in *chunks*, one after another."""
    import numpy as np

    answer: FloatArray = np.empty((count, dimensions), np.float32)
    truncated = list[int]()
    done = tokens = 0
    async with aclosing(chunks):
        async for rows in chunks:
            vectors = await embed(lanes, assignment, rows, until, dimensions)
            answer[done : done + len(vectors)] = vectors
            truncated += rows.truncated
            done += len(vectors)
            tokens += len(rows.ids)
    return EmbedResult(answer, truncated, *assignment.served_by(), tokens)


async def embed_packed(lanes: Lanes, assignment: Assignment, rows: Rows, width: int, until: float | None) -> FloatArray:
    """Return the vectors of rows that share passes of one packed width; InvalidRequest where the lane has none."""
    if not 1 <= len(rows.lengths) <= tight.MAX_ROWS:
        raise InvalidRequest(f"{len(rows.lengths)} rows to be packed, one exchange takes 1 to {tight.MAX_ROWS}")
    from synapse_host.residency.lane import RungedLane

    serving = lanes.serving(assignment)
    if not isinstance(serving, RungedLane):
        raise InvalidRequest(f"lane {assignment.lane_id} has no packed functions: it is not on the Neural Engine")
    layers = await _layers(lanes, assignment)
    manifest = assignment.bundle.manifest
    build = request(manifest, whole(rows))
    _, raw = await serving.submit_packed(width, build, deadline=until, stage="embed")
    return await _finished(assignment, layers, raw.reshape(len(rows.lengths), manifest.worker_dims))


async def _layers(lanes: Lanes, assignment: Assignment) -> Sequence[Weights]:
    """Return the model's dense layers, read in a thread at its first request; BundleInvalid for a file that changed."""
    from engines.checkpoint import dense

    if assignment.model not in lanes.dense:
        try:
            lanes.dense[assignment.model] = await beside(lambda: dense.read(assignment.bundle))
        except BundleError as exc:
            raise BundleInvalid(str(exc)) from exc
    return lanes.dense[assignment.model]


async def _finished(assignment: Assignment, layers: Sequence[Weights], pooled: FloatArray) -> FloatArray:
    """Return what the layers make of a worker's vectors, normalised where the model is; without layers as they are."""
    if not layers:
        return pooled
    import numpy as np

    from engines.checkpoint import dense

    normalize = assignment.bundle.manifest.normalize is True
    vectors = await beside(lambda: dense.apply(layers, pooled, normalize=normalize))
    if not np.isfinite(vectors).all():
        raise WORKER_ERRORS[ErrorCode.NONFINITE_OUTPUT](f"the dense layers of {assignment.model} overflow")
    return vectors
