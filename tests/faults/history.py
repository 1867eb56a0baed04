"""The history of a campaign and its checker, after Jepsen: what was asked, what was answered, and whether it can be.

A client writes down its request before it asks and the outcome when it has one. The checker then wants: every request
has exactly one outcome, and the content of every reply is a function of its own request (never of another's).
"""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from engines.protocol.messages import Generate, Rerank, Segment
from synapse_host.errors import SynapseError
from synapse_host.supervision.supervisor import Supervisor
from tests.support.lanes import embed
from tests.support.scripted import expected_score, expected_text, expected_vector

FIRST_ORDINARY = 1_000_000
"""Ids from here on choose no rule of a script."""


@dataclass
class Call:
    """One request of the history and the outcomes it got: ``ok`` with a content, or an error's code."""

    number: int
    lane: str
    ids: tuple[int, ...]
    expected: Any
    outcomes: list[tuple[str, Any]] = field(default_factory=list)


class History:
    """Clients' requests against scripted lanes, and the check at the end."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._fresh = count(FIRST_ORDINARY)

    def fresh(self) -> int:
        """Return an id that no other request of this history has."""
        return next(self._fresh)

    def begin(self, lane: str, ids: tuple[int, ...], expected: Any) -> Call:
        """Write a request down."""
        call = Call(len(self.calls), lane, ids, expected)
        self.calls.append(call)
        return call

    async def embed(self, lane: Supervisor, first: int | None = None, *, deadline: float | None = None) -> Any:
        """Embed two rows of ids that nobody else uses, the first beginning with *first*; raise what the lane raises."""
        rows = ([self.fresh() if first is None else first, self.fresh()], [self.fresh()])
        expected = [*expected_vector(rows[0]), *expected_vector(rows[1])]
        call = self.begin(lane.spec.lane_id, (*rows[0], *rows[1]), expected)
        return await self._ask(lane, call, embed(*rows), deadline, lambda reply, array: array.tolist())

    async def generate(self, lane: Supervisor, *, deadline: float | None = None) -> Any:
        """Generate from ids that nobody else uses."""
        ids = (self.fresh(), self.fresh())
        call = self.begin(lane.spec.lane_id, ids, expected_text(ids, 8)[0])

        def build(req_id: str, ref: str) -> Any:
            return Generate(req_id=req_id, model_ref=ref, max_tokens=8), struct.pack("<2i", *ids)

        return await self._ask(lane, call, build, deadline, lambda reply, array: reply.text)

    async def rerank(self, lane: Supervisor, *, deadline: float | None = None) -> Any:
        """Score two candidates that nobody else uses."""
        query, one, two = [self.fresh()], [self.fresh(), self.fresh()], [self.fresh()]
        ids = (*query, *one, *two)
        call = self.begin(lane.spec.lane_id, ids, [expected_score(query, one), expected_score(query, two)])

        def build(req_id: str, ref: str) -> Any:
            candidates = [Segment(n_tokens=2), Segment(n_tokens=1)]
            request = Rerank(req_id=req_id, model_ref=ref, query_n_tokens=1, candidates=candidates)
            return request, struct.pack("<4i", *ids)

        return await self._ask(lane, call, build, deadline, lambda reply, array: array.tolist())

    async def _ask(
        self, lane: Supervisor, call: Call, build: Any, deadline: float | None, content: Callable[[Any, Any], Any]
    ) -> Any:
        try:
            reply, array = await lane.submit(build, deadline=deadline, stage="campaign")
        except SynapseError as exc:
            call.outcomes.append((exc.code, None))
            raise
        except asyncio.CancelledError:
            call.outcomes.append(("cancelled", None))
            raise
        call.outcomes.append(("ok", content(reply, array)))
        return reply

    # --- the checker -------------------------------------------------------------------------------------------------

    def lost(self) -> list[Call]:
        """Return the requests without exactly one outcome."""
        return [call for call in self.calls if len(call.outcomes) != 1]

    def mismatched(self) -> list[Call]:
        """Return the requests with a reply that isn't theirs."""
        return [
            call for call in self.calls if any(kind == "ok" and got != call.expected for kind, got in call.outcomes)
        ]

    def counts(self) -> dict[str, int]:
        """Return how often each kind of outcome occurred."""
        found = Counter(kind for call in self.calls for kind, _ in call.outcomes)
        return dict(sorted(found.items()))
