"""Greedy generation on a lane."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from engines.protocol.messages import ITEM_BYTES, Generate, Text
from synapse_host.errors import InvalidRequest, SequenceTooLong
from synapse_host.requests.parts import buffer
from synapse_host.results import Generation
from synapse_host.text.validate import id_rows

if TYPE_CHECKING:
    from synapse_host.arrays import IntArray
    from synapse_host.lanes import Lanes
    from synapse_host.placement.assignment import Assignment
    from synapse_host.supervision.supervisor import Build


def request(ids: IntArray, max_tokens: int) -> Build:
    """Return the GENERATE of a prompt."""

    def build(req_id: str, model_ref: str) -> tuple[Generate, memoryview]:
        return Generate(req_id=req_id, model_ref=model_ref, max_tokens=max_tokens), buffer(ids)

    return build


async def generate(lanes: Lanes, assignment: Assignment, ids: Any, max_tokens: int, until: float | None) -> Generation:
    """Continue a prompt of token ids by at most *max_tokens*. Raises InvalidRequest, SequenceTooLong."""
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or not 1 <= max_tokens <= 2**32 - 1:
        raise InvalidRequest(f"max_tokens is {max_tokens!r}, must be a whole number from 1")
    limit = assignment.bundle.manifest.max_tokens
    row = id_rows([ids], max_tokens=limit, model=assignment.model, noun="prompt").ids
    if len(row) + max_tokens > limit:
        raise SequenceTooLong(
            f"the prompt has {len(row)} tokens and {max_tokens} are to follow, {assignment.model} takes {limit} "
            "for both. Shorten it or ask for fewer",
            details={"index": 0, "tokens": len(row), "max_tokens": limit},
        )
    if ITEM_BYTES * len(row) > lanes.config.max_frame:
        raise InvalidRequest(f"the prompt does not fit a frame of {lanes.config.max_frame} bytes")
    supervisor = lanes.supervisor(assignment)
    reply, _ = await supervisor.submit(request(row, max_tokens), deadline=until, stage="generate")
    assert isinstance(reply, Text)
    generated = reply.generated_token_ids
    return Generation(
        reply.text,
        reply.n_prompt,
        reply.n_gen,
        str(reply.finish_reason),
        tuple(generated) if generated is not UNSET else (),
        *assignment.served_by(),
    )
