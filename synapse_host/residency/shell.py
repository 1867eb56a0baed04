"""The thin asyncio shell around :class:`synapse_host.residency.core.Residency`: it does what the core decides.

Every admission, eviction and restart runs in a task of its own, so a caller that leaves never loses accounting. A
caller waits on a future under its deadline; when that passes while its function compiles, it gets ``shape_compiling``
and the compilation goes on for the next caller.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Final, Protocol, TypeVar, assert_never

from engines.protocol.errors import ErrorCode
from synapse_host.errors import WORKER_ERRORS, DeadlineExceeded, EngineCrashed, ShapeCompiling, SynapseError
from synapse_host.residency.core import Residency
from synapse_host.residency.types import (
    Action,
    Admit,
    Evict,
    Granted,
    Key,
    Limits,
    Model,
    Phase,
    Refusal,
    Refused,
    Restart,
    Revive,
)
from synapse_host.worker import refusals
from synapse_host.worker.exchange import Lease

EXIT_S: Final = 30.0
"""How long an exit may take to be confirmed; after it the lane stays shut and its charges stand."""

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Withdrawn(SynapseError):
    """An admission that nobody waits for any more, before anything of it was sent; no caller meets it."""

    code = "cancelled"


class Lane(Protocol):
    """What the shell needs of one worker's lane. Exchanges raise SynapseError; EngineCrashed means the channel
    broke."""

    async def admit(self, key: Key, wanted: Callable[[], bool]) -> None:
        """Send ANE_ADMIT_SHAPE or ANE_ADMIT_PACKED and return after ADMITTED; Withdrawn where it isn't *wanted* by
        the time it would be sent."""

    async def evict(self, key: Key) -> None:
        """Send ANE_EVICT_* and return after EVICTED."""

    async def stop(self) -> bool:
        """Kill the worker now, whatever runs; True once its exit is confirmed."""

    async def start(self) -> None:
        """Start a worker and LOAD its model."""


class ResidencyShell:
    """Leases for requests on Neural Engine lanes. Use it from one event loop."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self.core = Residency(limits)
        self._lanes: dict[str, Lane] = {}
        self._futures: dict[int, asyncio.Future[None]] = {}
        self._error: SynapseError | None = None
        """What failed last, for those whom the core refuses on account of it."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._restarts: dict[str, asyncio.Task[None]] = {}
        """The last restart of each worker."""
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False

    def add(self, lane_id: str, lane: Lane, model: Model) -> None:
        """Announce a worker; it starts with the first request, once what its LOAD brings fits the budget."""
        self._lanes[lane_id] = lane
        self.core.open_worker(lane_id, model)

    async def lease(self, key: Key, *, deadline: float | None = None) -> Lease:
        """Return a lease that holds *key* resident. One at a time: take the next rung's after this one ended.

        *deadline* is absolute loop time. Raises ShapeCompiling, DeadlineExceeded, ane_resources_exhausted, the
        admission's own error, EngineCrashed, or QueueFull of a host that stops.
        """
        if self._closing:
            raise refusals.stopping(key.worker)
        now = self._loop.time()
        if deadline is not None and now >= deadline:
            raise refusals.late(key.worker, "ane_admit")
        ticket = self.core.request(key, now)
        future: asyncio.Future[None] = self._loop.create_future()
        self._futures[ticket] = future
        self._act()
        timer = None if deadline is None else self._loop.call_at(deadline, self._late, ticket, key)
        try:
            await future
        except BaseException:
            self._give_back(ticket)
            raise
        finally:
            if timer is not None:
                timer.cancel()
            del self._futures[ticket]
        return Lease(partial(self._give_back, ticket))

    def _give_back(self, ticket: int) -> None:
        self.core.release(ticket)
        self._act()

    def prefetch(self, key: Key) -> None:
        """Admit *key* in the background, where there is room for a guess; the next request may find it resident."""
        if not self._closing:
            self.core.prefetch(key)
            self._act()

    def fault(self, worker: str, generation: int) -> None:
        """Tell that an exchange outside (serving, idle death) broke the channel of one generation."""
        if not self._closing:
            self.core.fault(worker, generation, self._loop.time())
            self._act()

    def park(self, worker: str) -> None:
        """Take a worker down until the next request for it: no new leases from now on, who holds one is waited for."""
        self.core.park(worker, self._loop.time())
        self._act()

    async def parked(self, worker: str) -> None:
        """Take a worker down that nobody uses, and wait for its end. EngineCrashed where that can't be confirmed."""
        self.park(worker)
        if (restart := self._restarts.get(worker)) is not None:
            await asyncio.wait({restart})
        found = self.core.workers[worker]
        if found.phase is Phase.CLOSED:
            raise self._refusal(Refusal.CLOSED, Key(worker, "shape", found.model.smallest))

    async def aclose(self) -> None:
        """Refuse who waits and let running exchanges end; stopping the workers is their supervisors' business."""
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        for ticket in list(self.core.tickets.values()):
            self._answer(ticket.id, refusals.stopping(ticket.key.worker))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- acting ------------------------------------------------------------------------------------------------------

    def _act(self) -> None:
        while actions := self.core.take():
            for action in actions:
                self._do(action)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        expiry = self.core.next_expiry()
        if expiry is not None and not self._closing:
            self._timer = self._loop.call_at(expiry, self._expire)

    def _expire(self) -> None:
        self.core.expire(self._loop.time())
        self._act()

    def _do(self, action: Action) -> None:
        match action:
            case Granted(ticket):
                self._answer(ticket, None)
            case Refused(ticket, why, key):
                self._answer(ticket, self._refusal(why, key))
            case Admit():
                self._spawn(self._admit, action)
            case Evict():
                self._spawn(self._evict, action)
            case Restart():
                self._restarts[action.worker] = self._spawn(self._restart, action)
            case Revive():
                self._spawn(self._revive, action)
            case _:
                assert_never(action)

    def _answer(self, ticket: int, error: SynapseError | None) -> None:
        future = self._futures.get(ticket)
        if future is not None and not future.done():
            future.set_result(None) if error is None else future.set_exception(error)

    def _late(self, ticket: int, key: Key) -> None:
        error: SynapseError
        if self.core.compiling(ticket):
            error = ShapeCompiling(
                f"lane {key.worker} is compiling {key.kind} {key.tokens}; it goes on, try again",
                details={"lane_id": key.worker, "shape": key.tokens},
            )
        else:
            error = DeadlineExceeded(
                f"lane {key.worker}: the deadline passed waiting for {key.kind} {key.tokens}",
                details={"lane_id": key.worker, "stage": "ane_admit"},
            )
        self._answer(ticket, error)

    def _spawn(self, exchange: Callable[[T], Awaitable[None]], action: T) -> asyncio.Task[None]:
        async def run() -> None:
            await exchange(action)
            self._act()

        task = self._loop.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _failure(self, worker: str, what: str, work: Awaitable[None]) -> SynapseError | None:
        """Return the error that *work* ends with. A bug of ours is one as well: no slot may wait for ever."""
        try:
            await work
        except SynapseError as exc:
            return exc
        except (Exception, asyncio.CancelledError):
            if self._closing:
                raise
            _log.exception("%s failed by a fault of the host: lane=%s", what, worker)
            return refusals.broken(worker, what)
        return None

    async def _admit(self, action: Admit) -> None:
        slot, lane = action.slot, action.key.worker
        work = self._lanes[lane].admit(action.key, partial(self.core.wanted, slot))
        error = await self._failure(lane, "ane_admit", work)
        if error is None:
            self.core.admitted(slot)
        elif isinstance(error, Withdrawn):
            self.core.withdrawn(slot)
        else:
            self._error = error
            exhausted = error.code == ErrorCode.ANE_RESOURCES_EXHAUSTED
            self.core.admit_failed(slot, self._loop.time(), exhausted=exhausted)

    async def _evict(self, action: Evict) -> None:
        lane = action.key.worker
        error = await self._failure(lane, "ane_evict", self._lanes[lane].evict(action.key))
        if error is None:
            self.core.evicted(action.slot)
        else:
            _log.warning("eviction failed, the worker restarts: %s %s", action.key, error.message)
            self.core.evict_failed(action.slot, self._loop.time())

    async def _restart(self, action: Restart) -> None:
        lane, confirmed = action.worker, False

        async def stop() -> None:
            nonlocal confirmed
            with suppress(TimeoutError):
                async with asyncio.timeout(EXIT_S):
                    confirmed = await self._lanes[lane].stop()

        await self._failure(lane, "restart", stop())
        if confirmed:
            self.core.exited(lane)
        else:
            _log.error("worker exit unconfirmed, the lane stays shut: %s", lane)
            self.core.unconfirmed(lane)

    async def _revive(self, action: Revive) -> None:
        error = await self._failure(action.worker, "load", self._lanes[action.worker].start())
        if error is None:
            self.core.restored(action.worker)
        else:
            _log.warning("worker did not come up: %s %s", action.worker, error.message)
            self._error = error
            self.core.revive_failed(action.worker)

    # --- errors ------------------------------------------------------------------------------------------------------

    def _refusal(self, why: Refusal, key: Key) -> SynapseError:
        lane = key.worker
        details = {"lane_id": lane, "stage": "ane_admit", "kind": key.kind, "tokens": key.tokens}
        match why:
            case Refusal.EXHAUSTED:
                return WORKER_ERRORS[ErrorCode.ANE_RESOURCES_EXHAUSTED](
                    f"lane {lane}: the Neural Engine has no room for another function now; try again", details=details
                )
            case Refusal.NEVER_FITS:
                limits = self.core.limits
                return WORKER_ERRORS[ErrorCode.ANE_RESIDENCY_LIMIT](
                    f"lane {lane}: one function of its model is larger than the whole Neural Engine budget "
                    f"({limits.executables} executables, {limits.nbytes} bytes); use another engine for it",
                    details={**details, "executables": limits.executables, "bytes": limits.nbytes},
                )
            case Refusal.CLOSED:
                return EngineCrashed(
                    f"lane {lane}: the worker is shut: it was retired or its exit could not be confirmed",
                    details={**details, "cause": "exit"},
                )
            case Refusal.FAILED:
                assert self._error is not None
                return self._error
            case _:
                assert_never(why)
