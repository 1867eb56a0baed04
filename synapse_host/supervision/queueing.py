"""Who is next: a line of waiters, the turns of a stream, permits to run on a device; first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from engines.machine import usable_cores
from synapse_host.errors import SynapseError
from synapse_host.supervision.standing import Standing
from synapse_host.worker import refusals


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

    async def take(
        self, deadline: float | None, stage: str, *, probing: bool = False, again: bool = False
    ) -> None:
        """Wait for the turn until *deadline*; whoever has waited gets the answer of a lane that was shut meanwhile.

        *again*: however many wait.

        Raises QueueFull, DeadlineExceeded and what :meth:`Standing.admit` raises.
        """
        if not self.held:
            self.held = True
            return
        if len(self._waiters) >= self._limit and not again:
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


class _Pool:
    __slots__ = ("free", "size", "waiters")

    def __init__(self, size: int) -> None:
        self.size = size
        self.free = size
        self.waiters = Line()


class Permits:
    """First come, first served, per device. Compilation, LOAD and eviction take none.

    *limits* names permits by device (``cuda:1``) or device kind (``cuda``); the default is the usable cores for
    ``cpu`` and 1 for each accelerator.
    """

    def __init__(self, limits: Mapping[str, int] | None = None) -> None:
        self._limits = dict(limits or {})
        for name, limit in self._limits.items():
            if limit < 1:
                raise ValueError(f"permits for {name} must be at least 1, not {limit}")
        self._pools: dict[str, _Pool] = {}

    def limit(self, device: str) -> int:
        """Return how many permits *device* has."""
        kind = device.partition(":")[0]
        default = usable_cores() if kind == "cpu" else 1
        return self._limits.get(device, self._limits.get(kind, default))

    def in_use(self, device: str) -> int:
        """Return how many permits are held now."""
        pool = self._pool(device)
        return pool.size - pool.free

    def try_acquire(self, device: str) -> bool:
        """Take a permit if one is free and nobody waits."""
        pool = self._pools.get(device) or self._pool(device)
        if pool.free > 0:
            pool.free -= 1
            return True
        return False

    async def acquire(self, device: str, *, lane_id: str, stage: str, deadline: float | None = None) -> None:
        """Wait for a permit until *deadline* (loop time); DeadlineExceeded names lane and stage then."""
        if not self.try_acquire(device):
            late = partial(refusals.late, lane_id, stage, f", while it waited for {device}")
            await self._pool(device).waiters.wait(deadline, late, partial(self.release, device))

    def release(self, device: str) -> None:
        """Give a permit back; the longest waiter gets it."""
        pool = self._pools.get(device) or self._pool(device)
        if not pool.waiters.serve():
            pool.free += 1

    def _pool(self, device: str) -> _Pool:
        pool = self._pools.get(device)
        if pool is None:
            # `cuda` and `cuda:0` are the same accelerator.
            name = device.removesuffix(":0")
            pool = self._pools.get(name) or _Pool(self.limit(device))
            self._pools[device] = self._pools[name] = pool
        return pool
