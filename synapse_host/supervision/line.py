"""Callers in line: first come, first served, each until its own deadline."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from synapse_host.errors import SynapseError


class Line:
    """Who waits, in order of arrival. Its length is how many."""

    def __init__(self) -> None:
        self._waiters: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        return len(self._waiters)

    async def wait(
        self, deadline: float | None, late: Callable[[], SynapseError], pass_on: Callable[[], object]
    ) -> None:
        """Wait to be served; from *deadline* (loop time) on *late* makes the answer.

        *pass_on* serves the next one where this caller was served and cancelled in the same turn of the loop.
        """
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters.append(waiter)
        timer = None if deadline is None else loop.call_at(deadline, refuse, waiter, late)
        try:
            await waiter
        except BaseException:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                pass_on()
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def serve(self) -> bool:
        """Wake the longest waiter; False when nobody waits."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return True
        return False

    def close(self, why: Callable[[], SynapseError]) -> None:
        """Refuse all who wait."""
        for waiter in self._waiters:
            refuse(waiter, why)
        self._waiters.clear()


def refuse(waiter: asyncio.Future[Any], why: Callable[[], SynapseError]) -> None:
    """Answer a waiter that has no answer yet."""
    if not waiter.done():
        waiter.set_exception(why())
