"""Who is next: a line of waiters, the turns of a stream, permits to run on a device; first come, first served."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from msgspec import Struct

from engines.machine import usable_cores
from synapse_host.errors import SynapseError
from synapse_host.supervision.standing import Standing
from synapse_host.worker import refusals


class Waiter(Struct, eq=False):
    """One who waits: its place among the others, and what it will build."""

    place: int
    build: Any
    deadline: float | None
    late: Callable[[], SynapseError]
    future: asyncio.Future[Any]


class Line:
    """Who waits, in order of arrival. Its length is how many."""

    def __init__(self) -> None:
        self._waiters: list[Waiter] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiters)

    def arrive(self) -> int:
        """Return a place behind all given out before; the first one is 1."""
        self._arrivals += 1
        return self._arrivals

    async def wait(
        self,
        deadline: float | None,
        late: Callable[[], SynapseError],
        pass_on: Callable[[], object],
        *,
        place: int | None = None,
        build: Any = None,
    ) -> Any:
        """Wait to be served, and return None; from *deadline* (loop time) on *late* makes the answer.

        *place*: its place from :meth:`arrive`, also an earlier one. *pass_on* serves the next one where this caller was
        served and cancelled in the same turn of the loop. A caller who was taken along by :meth:`board` returns what
        its future got.
        """
        loop = asyncio.get_running_loop()
        waiter = Waiter(self.arrive() if place is None else place, build, deadline, late, loop.create_future())
        insort(self._waiters, waiter, key=attrgetter("place"))
        timer = None if deadline is None else loop.call_at(deadline, refuse, waiter.future, late)
        try:
            return await waiter.future
        except BaseException:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif _has_turn(waiter.future):
                pass_on()
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def serve(self) -> bool:
        """Wake the longest waiter; False when nobody waits."""
        while self._waiters:
            waiter = self._waiters.pop(0)
            if not waiter.future.done():
                waiter.future.set_result(None)
                return True
        return False

    def board(self, now: float, choose: Callable[[Sequence[Any]], int]) -> list[Waiter]:
        """Take the first of those who wait out of the line, as many as *choose* says of their builds.

        Their futures are the caller's to answer; the deadline and the cancellation of each still end its own wait.
        """
        for waiter in self._waiters:
            if waiter.deadline is not None and now >= waiter.deadline:
                refuse(waiter.future, waiter.late)
        self._waiters = [waiter for waiter in self._waiters if not waiter.future.done()]
        count = choose([waiter.build for waiter in self._waiters])
        riders, self._waiters = self._waiters[:count], self._waiters[count:]
        return riders

    def close(self, why: Callable[[], SynapseError]) -> None:
        """Refuse all who wait."""
        for waiter in self._waiters:
            refuse(waiter.future, why)
        self._waiters.clear()


def _has_turn(future: asyncio.Future[Any]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None and future.result() is None


def refuse(waiter: asyncio.Future[Any], why: Callable[[], SynapseError]) -> None:
    """Answer a waiter that has no answer yet."""
    if not waiter.done():
        waiter.set_exception(why())


class Turns:
    """The turn on one lane's stream; at most *limit* callers wait for it.

    Where :attr:`held` is False a caller may set it instead of calling :meth:`take`.
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

    def arrive(self) -> int:
        """Return a caller's place in the line, behind all who have one."""
        return self._waiters.arrive()

    async def take(
        self,
        deadline: float | None,
        stage: str,
        *,
        probing: bool = False,
        place: int | None = None,
        limited: bool = True,
        build: Any = None,
    ) -> Any:
        """Wait for the turn until *deadline*; whoever has waited gets the answer of a lane that was shut meanwhile.

        Returns None with the turn; or without it what :meth:`board` got for the rows of *build*. *place*: from
        :meth:`arrive`; without it the last one. Not *limited*: however many wait.
        Raises QueueFull, DeadlineExceeded and what :meth:`Standing.admit` raises.
        """
        if not self.held:
            self.held = True
            return None
        if limited and len(self._waiters) >= self._limit:
            raise refusals.full(self._lane_id, len(self._waiters))
        if deadline is not None and self._loop.time() >= deadline:
            raise refusals.late(self._lane_id, stage)
        late = partial(refusals.late, self._lane_id, stage)
        outcome = await self._waiters.wait(deadline, late, self.pass_on, place=place, build=build)
        if outcome is not None:
            return outcome
        try:
            # The lane may have been shut or refused while this waited: it gets that answer, not a new worker.
            self._standing.admit(probing=probing)
        except BaseException:
            self.pass_on()
            raise
        return None

    def board(self, choose: Callable[[Sequence[Any]], int]) -> list[Waiter]:
        """As :meth:`Line.board`; only for who has the turn."""
        return self._waiters.board(self._loop.time(), choose)

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


class _Pool:
    def __init__(self, size: int) -> None:
        self.size = self.free = size
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
        pool = self._pool(device)
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
        pool = self._pool(device)
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
