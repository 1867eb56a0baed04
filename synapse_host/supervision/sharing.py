"""An exchange that several callers share: who goes along, and what each of them hears.

The caller whose turn it is leads: before its request is sent, callers who wait behind it may get in with their rows.
Nobody's answer depends on another's rows. A reply is split; an ERR or a NaN may be about one of them, so each is served
alone; of a crash all of them hear, and none of them shares again, so that whoever did it harms nobody else.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, Final, Protocol, runtime_checkable

from engines.protocol.messages import ITEM_BYTES, AnyReply, AnyRequest, Err, Loaded
from synapse_host.errors import EngineCrashed, SynapseError
from synapse_host.placement.spec import LaneSpec
from synapse_host.supervision.queueing import Turns
from synapse_host.text.limits import most_rows
from synapse_host.worker import refusals
from synapse_host.worker.exchange import Build, Exchange, Outcome
from synapse_host.worker.session import Session

USEFUL_TOKENS: Final = 4096
"""Tokens up to which an exchange is filled; ``batch_size`` in a lane's ``runtime_config`` says otherwise."""
MAX_SUSPECTS: Final = 1024
"""Calls whose shared exchange ended with a crash; the latest ones are remembered."""
ALONE: Final[Any] = ("alone",)
"""What a caller gets from a shared exchange when it is to be served by itself."""


@runtime_checkable
class Shareable(Protocol):
    """A build that can share an exchange: :class:`synapse_host.requests.batching.Batch`."""

    def fingerprint(self) -> bytes:
        """Return what identifies the content of the call."""

    def __call__(self, req_id: str, model_ref: str) -> tuple[AnyRequest, Any]:
        """Build the request of this call alone."""

    def company(self, waiting: Sequence[Any], *, rows: int, tokens: int, alone: Container[bytes]) -> int:
        """Return how many of the waiting builds go along."""

    def joined(self, others: Sequence[Any]) -> Build:
        """Return the build of all their rows."""

    def shares(self, others: Sequence[Any], reply: Any, array: Any) -> list[Outcome]:
        """Return each call's own part of the reply to :meth:`joined`."""


class Sharing:
    """The shared exchanges of one lane."""

    def __init__(self, turns: Turns, spec: LaneSpec) -> None:
        self._turns = turns
        self._spec = spec
        self._useful_tokens = spec.load.number("batch_size", USEFUL_TOKENS)
        self._suspects: dict[bytes, None] = {}

    def board(self, exchange: Exchange, session: Session, loaded: Loaded | None) -> None:
        """Let callers who wait get into an exchange that is about to be sent, where its build can be shared."""
        build = exchange.build
        if not self._turns.waiting or not isinstance(build, Shareable) or loaded is None or session.model_ref is None:
            return
        rows = most_rows(session.max_frame, ITEM_BYTES * loaded.dims)
        tokens = min(self._useful_tokens, session.max_frame // ITEM_BYTES)
        suspects = self._suspects
        riders = self._turns.board(lambda waiting: build.company(waiting, rows=rows, tokens=tokens, alone=suspects))
        if riders:
            exchange.riders = riders
            together = build.joined([rider.build for rider in riders])
            exchange.request, exchange.payload = together(exchange.request.req_id, session.model_ref)

    def outcomes(self, exchange: Exchange, reply: AnyReply, payload: memoryview | None) -> list[Outcome]:
        """Return what each caller of an exchange gets from its reply, in the order of their rows.

        Raises the error that an ERR, a NaN or a lack of memory for the numbers becomes.
        """
        if isinstance(reply, Err):
            raise refusals.answered(self._spec, exchange.stage, reply)
        if payload is None:
            return [(reply, None)]
        from engines.finite import floats  # numpy with the first reply, not with the host

        try:
            array, finite = floats(payload)
            if not finite:
                raise refusals.nonfinite(self._spec, exchange.stage)
            if not exchange.riders:
                return [(reply, array)]
            shares: list[Outcome] = exchange.build.shares([rider.build for rider in exchange.riders], reply, array)
        except MemoryError:
            raise refusals.no_memory(self._spec.lane_id, exchange.stage) from None
        return shares

    def answer(self, exchange: Exchange, outcomes: Sequence[Outcome], error: SynapseError | None) -> int:
        """Give every caller its outcome, or what follows from *error*; return how many had left."""
        waiters = [exchange.waiter, *(rider.future for rider in exchange.riders)]
        left = 0
        for index, waiter in enumerate(waiters):
            if waiter.done():
                left += 1
            elif error is None:
                waiter.set_result(outcomes[index])
            elif len(waiters) == 1:
                waiter.set_exception(error)
            elif isinstance(error, EngineCrashed):
                waiter.set_exception(error.with_details(joined=len(waiters)))
            else:
                waiter.set_result(ALONE)
        return left

    def suspect(self, exchange: Exchange) -> None:
        """Let none of an exchange's callers share again: one of them may have ended the worker."""
        if exchange.riders:
            for build in (exchange.build, *(rider.build for rider in exchange.riders)):
                self._suspects[build.fingerprint()] = None
            while len(self._suspects) > MAX_SUSPECTS:
                del self._suspects[next(iter(self._suspects))]
