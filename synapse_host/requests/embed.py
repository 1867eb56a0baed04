"""Embedding on a lane: rows of ids to vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET

from engines.bundle import tight
from engines.protocol.messages import ITEM_BYTES, Pooling, Vectors
from synapse_host.errors import BundleInvalid, InvalidRequest
from synapse_host.requests.batching import Batch
from synapse_host.requests.parts import Part, collect, cut, whole
from synapse_host.residency.lane import RungedLane
from synapse_host.text.encoders import checked

if TYPE_CHECKING:
    from engines.bundle.manifest import Manifest
    from synapse_host.arrays import FloatArray
    from synapse_host.lanes import Lanes
    from synapse_host.placement.assignment import Assignment
    from synapse_host.text.rows import Rows


def request(manifest: Manifest, part: Part) -> Batch:
    """Return the EMBED_BATCH of some rows; an item's id is the row's number."""
    pooling = Pooling(manifest.pooling) if manifest.pooling is not UNSET else Pooling.MEAN
    return Batch(part.lengths, part.ids, pooling, manifest.normalize is not False, part.rows.start)


async def embed(lanes: Lanes, assignment: Assignment, rows: Rows, until: float | None) -> FloatArray:
    """Return the rows' vectors, float32 (n, dims), in as many exchanges as they need."""
    manifest = assignment.bundle.manifest
    dims = manifest.dims
    limits = {"reply_row_bytes": ITEM_BYTES * dims, "max_frame": lanes.config.max_frame}
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
        vectors: FloatArray = raw.reshape(len(part.rows), dims)
        return vectors

    return await collect(parts, send, dims)


async def embed_packed(lanes: Lanes, assignment: Assignment, rows: Rows, width: int, until: float | None) -> FloatArray:
    """Return the vectors of rows that share passes of one packed width; InvalidRequest where the lane has none."""
    if not 1 <= len(rows.lengths) <= tight.MAX_ROWS:
        raise InvalidRequest(f"{len(rows.lengths)} rows to be packed, one exchange takes 1 to {tight.MAX_ROWS}")
    serving = lanes.serving(assignment)
    if not isinstance(serving, RungedLane):
        raise InvalidRequest(f"lane {assignment.lane_id} has no packed functions: it is not on the Neural Engine")
    manifest = assignment.bundle.manifest
    build = request(manifest, whole(rows))
    _, raw = await serving.submit_packed(width, build, deadline=until, stage="embed")
    vectors: FloatArray = raw.reshape(len(rows.lengths), manifest.dims)
    return vectors
