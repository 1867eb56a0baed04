"""Who owns a lane's stream: one holder, everybody else in line."""

from __future__ import annotations

import asyncio
from functools import partial

from synapse_host.supervision.line import Line, refuse
from synapse_host.supervision.standing import Standing
from synapse_host.worker import refusals


class Turns:
    """The turn on one lane's stream; at most *limit* callers wait for it.

    Where :attr:`held` is False a caller may set it instead of calling :meth:`take`: the hot path does.
    """

    def __init__(self, standing: Standing, *, limit: int) -> None:
        self.held = False
        self._standing = standing
        self._lane_id = standing.spec.lane_id
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._waiters = Line()
        self._freed = asyncio.Event()
        self._until = float("inf")

    @property
    def waiting(self) -> int:
        """How many callers wait."""
        return len(self._waiters)

    async def take(self, deadline: float | None, stage: str, *, probing: bool = False) -> None:
        """Wait for the turn until *deadline*; whoever has waited gets the answer of a lane that was shut meanwhile.

        Raises QueueFull, DeadlineExceeded and what :meth:`Standing.admit` raises.
        """
        if not self.held:
            self.held = True
            return
        if len(self._waiters) >= self._limit:
            raise refusals.full(self._lane_id, len(self._waiters))
        if deadline is not None and self._loop.time() >= deadline:
            raise refusals.late(self._lane_id, stage)
        await self._waiters.wait(deadline, partial(refusals.late, self._lane_id, stage), self.pass_on)
        try:
            # The lane may have been shut or refused while this waited: it gets that answer, not a new worker.
            self._standing.admit(probing=probing)
        except BaseException:
            self.pass_on()
            raise

    def pass_on(self) -> None:
        """Give the turn to the longest waiter, or back."""
        if self._waiters.serve():
            return
        self.held = False
        if self._standing.closing:
            self._freed.set()

    def close(self, until: float) -> None:
        """Answer all who wait; :meth:`drain` lasts to the earliest *until* (loop time)."""
        self._until = min(self._until, until)
        self._waiters.close(partial(refusals.stopping, self._lane_id))
        self._freed.set()

    async def drain(self) -> None:
        """Wait, once closed, until the turn is given back or the time is over."""
        while self.held and self._until > self._loop.time():
            self._freed.clear()
            try:
                async with asyncio.timeout_at(self._until):
                    await self._freed.wait()
            except TimeoutError:
                return


def expire(waiter: asyncio.Future[None], lane_id: str, stage: str) -> None:
    """Answer a waiter whose deadline passed."""
    refuse(waiter, partial(refusals.late, lane_id, stage))
