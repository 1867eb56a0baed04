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
from synapse_host.worker.exchange import Build
from tests.support.lanes import embed
from tests.support.scripted import expected_score, expected_text, expected_vector

FIRST_ORDINARY = 1_000_000
"""Ids from here on choose no rule of a script."""


@dataclass
class Call:
    """One request of the history and the outcomes it got: ``ok`` with a content, or an error's code."""

    expected: Any
    outcomes: list[tuple[str, Any]] = field(default_factory=list)


def _numbers(reply: Any, array: Any) -> Any:
    return array.tolist()


class History:
    """Clients' requests against scripted lanes, and the check at the end."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._fresh = count(FIRST_ORDINARY)

    def fresh(self, number: int) -> list[int]:
        """Return ids that no other request of this history has."""
        return [next(self._fresh) for _ in range(number)]

    async def embed(self, lane: Supervisor, first: int | None = None, *, deadline: float | None = None) -> Any:
        """Embed two rows of ids that nobody else uses, the first beginning with *first*; raise what the lane raises."""
        rows = (self.fresh(1) if first is None else [first]) + self.fresh(1), self.fresh(1)
        expected = [number for row in rows for number in expected_vector(row)]
        return await self.ask(lane, embed(*rows), expected, deadline=deadline)

    async def generate(self, lane: Supervisor) -> Any:
        """Generate from ids that nobody else uses."""
        ids = self.fresh(2)

        def build(req_id: str, ref: str) -> Any:
            return Generate(req_id=req_id, model_ref=ref, max_tokens=8), struct.pack("<2i", *ids)

        return await self.ask(lane, build, expected_text(ids, 8)[0], lambda reply, array: reply.text)

    async def rerank(self, lane: Supervisor) -> Any:
        """Score two candidates that nobody else uses."""
        query, one, two = self.fresh(1), self.fresh(2), self.fresh(1)

        def build(req_id: str, ref: str) -> Any:
            request = Rerank(req_id, ref, 1, [Segment(len(one)), Segment(len(two))])
            return request, struct.pack("<4i", *query, *one, *two)

        return await self.ask(lane, build, [expected_score(query, one), expected_score(query, two)])

    async def ask(
        self,
        lane: Supervisor,
        build: Build,
        expected: Any,
        content: Callable[[Any, Any], Any] = _numbers,
        *,
        deadline: float | None = None,
    ) -> Any:
        """Make one request and write down what became of it; *content* is what is compared with *expected*."""
        call = Call(expected)
        self.calls.append(call)
        try:
            reply, array = await lane.submit(build, deadline=deadline, stage="campaign")
        except (SynapseError, asyncio.CancelledError) as exc:
            call.outcomes.append((exc.code if isinstance(exc, SynapseError) else "cancelled", None))
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
        return dict(sorted(Counter(kind for call in self.calls for kind, _ in call.outcomes).items()))
