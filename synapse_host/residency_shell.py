"""The thin asyncio shell around :class:`synapse_host.residency.Residency`: it does what the core decides.

Every admission, eviction and restart runs in a task of its own, so a caller that leaves never loses accounting. A
caller waits on a future under its deadline; when that passes while its function compiles, it gets ``shape_compiling``
and the compilation goes on for the next caller.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol, assert_never

from engines.protocol.errors import ErrorCode
from synapse_host.errors import (
    WORKER_ERRORS,
    DeadlineExceeded,
    EngineCrashed,
    ShapeCompiling,
    SynapseError,
)
from synapse_host.residency import Residency
from synapse_host.slots import (
    Action,
    Admit,
    Evict,
    Granted,
    Key,
    Limits,
    Model,
    Refusal,
    Refused,
    Restart,
    Revive,
)

EXIT_S: Final = 30.0
"""How long an exit may take to be confirmed; after it the lane stays shut and its charges stand."""

_log = logging.getLogger(__name__)


class Lane(Protocol):
    """What the shell needs of one worker's lane. Exchanges raise SynapseError; EngineCrashed means the channel
    broke."""

    lane_id: str

    async def admit(self, key: Key) -> object:
        """Send ANE_ADMIT_SHAPE or ANE_ADMIT_PACKED and return after ADMITTED."""

    async def evict(self, key: Key) -> None:
        """Send ANE_EVICT_* and return after EVICTED."""

    async def stop(self) -> bool:
        """Kill the worker; True once its exit is confirmed."""

    async def start(self) -> None:
        """Start a worker and LOAD its models."""


class ResidencyShell:
    """Leases for requests on Neural Engine lanes. Use it from one event loop."""

    def __init__(
        self, lanes: Mapping[str, Lane], models: Mapping[str, Mapping[str, Model]], *, limits: Limits | None = None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.core = Residency(limits)
        self._lanes = dict(lanes)
        self._futures: dict[int, asyncio.Future[None]] = {}
        self._errors: dict[int, SynapseError] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False
        for name, described in models.items():
            self.core.open_worker(name, described)
        self._act()

    def add(self, worker: str, lane: Lane, models: Mapping[str, Model]) -> None:
        """Announce another worker; it starts with the first request, once what its LOAD brings fits the budget."""
        self._lanes[worker] = lane
        self.core.open_worker(worker, models, dormant=True)
        self._act()

    @asynccontextmanager
    async def lease(self, key: Key, *, deadline: float | None = None) -> AsyncIterator[None]:
        """Hold *key* resident. One lease at a time: take the next rung's after this one ended.

        *deadline* is absolute loop time. Raises ShapeCompiling, DeadlineExceeded, ane_resources_exhausted, the
        admission's own error, or EngineCrashed.
        """
        worker = self.core.workers.get(key.worker)
        if worker is None or self._closing:
            raise self._closed(key)
        ticket = self.core.request(key, self._loop.time())
        future: asyncio.Future[None] = self._loop.create_future()
        self._futures[ticket] = future
        self._act()
        try:
            await self._wait(future, ticket, key, deadline)
            yield
        finally:
            self._futures.pop(ticket, None)
            self.core.release(ticket)
            self._act()

    def fault(self, worker: str, generation: int) -> None:
        """Tell that an exchange outside (serving, idle death) broke the channel of one generation."""
        self.core.fault(worker, generation, self._loop.time())
        self._act()

    def park(self, worker: str) -> None:
        """Take a worker down until the next request for it."""
        self.core.park(worker, self._loop.time())
        self._act()

    def busy(self, worker: str) -> bool:
        """True while something of *worker* is leased, waited for or on the wire."""
        return self.core.busy(worker)

    def generation(self, worker: str) -> int:
        """Return the generation that a fault has to name."""
        return self.core.workers[worker].generation

    async def aclose(self) -> None:
        """Refuse who waits and let running exchanges end; stopping the workers is their supervisors' business."""
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        for future in list(self._futures.values()):
            if not future.done():
                future.set_exception(EngineCrashed("the host is stopping", details={"stage": "ane_admit_shape"}))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- waiting -----------------------------------------------------------------------------------------------------

    async def _wait(self, future: asyncio.Future[None], ticket: int, key: Key, deadline: float | None) -> None:
        timer = None if deadline is None else self._loop.call_at(deadline, self._late, future, ticket, key)
        try:
            await future
        finally:
            if timer is not None:
                timer.cancel()

    def _late(self, future: asyncio.Future[None], ticket: int, key: Key) -> None:
        if future.done():
            return
        lane_id = self._lanes[key.worker].lane_id
        if self.core.compiling(ticket):
            future.set_exception(
                ShapeCompiling(
                    f"lane {lane_id} is compiling {key.kind} {key.tokens}; it goes on, try again",
                    details={"lane_id": lane_id, "shape": key.tokens},
                )
            )
        else:
            future.set_exception(
                DeadlineExceeded(
                    f"lane {lane_id}: the deadline passed waiting for {key.kind} {key.tokens}",
                    details={"lane_id": lane_id, "stage": "ane_admit"},
                )
            )

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
            case Refused(ticket, why, slot, key):
                self._answer(ticket, self._refusal(why, slot, key))
            case Admit() | Evict() | Restart() | Revive():
                self._spawn(self._run(action))
            case _:
                assert_never(action)

    def _answer(self, ticket: int, error: SynapseError | None) -> None:
        future = self._futures.get(ticket)
        if future is None:
            # Answered inside request(), before its future exists: the loop comes back to it at once.
            self._loop.call_soon(self._answer_later, ticket, error)
        elif not future.done():
            future.set_result(None) if error is None else future.set_exception(error)

    def _answer_later(self, ticket: int, error: SynapseError | None) -> None:
        future = self._futures.get(ticket)
        if future is not None and not future.done():
            future.set_result(None) if error is None else future.set_exception(error)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, action: Admit | Evict | Restart | Revive) -> None:
        match action:
            case Admit():
                await self._admit(action)
            case Evict():
                await self._evict(action)
            case Restart():
                await self._restart(action)
            case Revive():
                await self._revive(action)
        self._act()

    async def _admit(self, action: Admit) -> None:
        try:
            await self._lanes[action.key.worker].admit(action.key)
        except SynapseError as exc:
            self._errors[action.slot] = exc
            exhausted = exc.code == ErrorCode.ANE_RESOURCES_EXHAUSTED
            self.core.admit_failed(action.slot, action.generation, self._loop.time(), exhausted=exhausted)
            self._act()
            self._errors.pop(action.slot, None)
        else:
            self.core.admitted(action.slot, action.generation)

    async def _evict(self, action: Evict) -> None:
        try:
            await self._lanes[action.key.worker].evict(action.key)
        except SynapseError as exc:
            _log.warning("eviction failed, the worker restarts: %s %s", action.key, exc.message)
            self.core.evict_failed(action.slot, action.generation, self._loop.time())
        else:
            self.core.evicted(action.slot, action.generation)

    async def _restart(self, action: Restart) -> None:
        try:
            async with asyncio.timeout(EXIT_S):
                confirmed = await self._lanes[action.worker].stop()
        except TimeoutError:
            confirmed = False
        if confirmed:
            self.core.exited(action.worker, action.generation)
        else:
            _log.error("worker exit unconfirmed, the lane stays shut: %s", action.worker)
            self.core.unconfirmed(action.worker, action.generation)

    async def _revive(self, action: Revive) -> None:
        try:
            await self._lanes[action.worker].start()
        except SynapseError as exc:
            _log.warning("worker did not come up: %s %s", action.worker, exc.message)
            self._start_error = exc
            self.core.revive_failed(action.worker, action.generation)
        else:
            self.core.restored(action.worker, action.generation + 1)

    _start_error: SynapseError | None = None

    # --- errors ------------------------------------------------------------------------------------------------------

    def _refusal(self, why: Refusal, slot: int | None, key: Key | None) -> SynapseError:
        lane = self._lanes[key.worker].lane_id if key is not None else "ane"
        details: dict[str, Any] = {"lane_id": lane, "stage": "ane_admit"}
        if key is not None:
            details |= {"kind": key.kind, "tokens": key.tokens}
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
                known = self._errors.get(slot) if slot is not None else self._start_error
                return known or EngineCrashed(f"lane {lane}: the admission failed", details=details)
            case _:
                assert_never(why)

    def _closed(self, key: Key) -> SynapseError:
        return EngineCrashed(f"no worker {key.worker}", details={"lane_id": key.worker, "stage": "ane_admit"})
