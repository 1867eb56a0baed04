"""A lane's worker generations: one at a time, started and loaded when somebody needs one, never replaced alive.

:class:`Idle` is what happens while nobody uses the lane: its worker is asked how it is, and ends where it rests too
long.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from msgspec import structs

from engines.protocol.errors import LocalProtocolError
from engines.protocol.messages import AnyReply, Load, Loaded, Ping
from synapse_host.errors import EngineCrashed, LaneRefused
from synapse_host.placement.spec import LaneSpec
from synapse_host.supervision.health import Health, LaneHealth
from synapse_host.supervision.queueing import Turns
from synapse_host.supervision.standing import Standing
from synapse_host.worker import refusals
from synapse_host.worker.exchange import Exchange
from synapse_host.worker.output import LineForwarder
from synapse_host.worker.process import Death, StartFailed
from synapse_host.worker.refusals import NOT_READY
from synapse_host.worker.session import Owner, Session
from synapse_host.worker.startup import LaneContext

LEAST_S: Final = 0.05
"""Seconds between two looks for a worker that rests, at least."""

_log = logging.getLogger(__name__)


class Generations:
    """The current session of one lane, how it came about and what its predecessors left."""

    def __init__(
        self,
        context: LaneContext,
        standing: Standing,
        *,
        owner: Owner,
        health: LaneHealth,
        admit: Callable[[LaneSpec], Awaitable[LaneSpec]] | None = None,
    ) -> None:
        self.number = 0
        """The newest generation; 0 before the first spawn."""
        self.session: Session | None = None
        self.starting: asyncio.Task[Session] | None = None
        self.loaded: Loaded | None = None
        """The last LOADED of this lane, with its dims and buckets."""
        self.advertised: tuple[int, ...] | None = None
        """Packed widths of the last HELLO; None before the first."""
        self._spec = standing.spec
        """What the newest worker was started with; *admit* makes it anew from the lane's own for each start."""
        self._context = context
        self._grace = context.config.shutdown_grace
        self._admit = admit
        self._standing = standing
        self._owner = owner
        self._counters = context.counters
        self._health = health
        self._loop = asyncio.get_running_loop()
        self._forwarder = LineForwarder(self._spec.lane_id, per_second=context.config.log_lines_per_s)
        self._revision: str | None = None
        self._undead: Session | None = None
        self._ended: str | None = None

    # --- start and LOAD ----------------------------------------------------------------------------------------------

    async def ready(self, deadline: float | None, stage: str, *, probing: bool = False) -> Session:
        """Return a session with the model loaded. The start goes on for the next caller when *deadline* passes."""
        while True:
            session = self.session
            if session is not None and session.ready:
                return session
            if deadline is not None and self._loop.time() >= deadline:
                raise refusals.late(self._spec.lane_id, stage, NOT_READY)
            timeout = None if deadline is None else deadline - self._loop.time()
            if session is not None and session.dead:
                # Never a new worker before the old one is reaped, and its strike may have shut the lane.
                await session.ended(timeout)
                if session.has_ended:
                    self.forget(session)
                self._standing.admit(probing=probing)
                continue
            task = self.starting
            if task is None:
                task = self.starting = self._loop.create_task(self._start())
                task.add_done_callback(self._start_over)
            await self.started(deadline, stage)
            if task.cancelled():
                raise refusals.stopping(self._spec.lane_id)
            return task.result()

    def start_under_way(self) -> bool:
        """Return whether a worker is spawned or loaded now, for whoever still waits for it."""
        return self.starting is not None

    async def started(self, deadline: float | None, stage: str) -> None:
        """Wait until no start is under way, whatever became of it. The start goes on when *deadline* passes."""
        task = self.starting
        if task is None:
            return
        await asyncio.wait({task}, timeout=None if deadline is None else deadline - self._loop.time())
        if not task.done():
            raise refusals.late(self._spec.lane_id, stage, NOT_READY)

    def _start_over(self, task: asyncio.Task[Session]) -> None:
        self.starting = None
        if not task.cancelled():
            # Looked at, so that a failure nobody waited for is not reported as never retrieved.
            task.exception()

    async def _start(self) -> Session:
        session = self.session or await self._spawn()
        if session.dead:
            # It died between its ACK and now; its end charges that.
            await session.ended()
            self.session = None
            assert self._standing.last_crash is not None
            raise self._standing.last_crash
        load = self._spec.load
        request = Load(
            req_id=session.next_req_id(),
            artifact_path=load.artifact_path,
            artifact_digest=load.artifact_digest,
            format=load.format,
            runtime_config=load.runtime_config,
        )
        waiter: asyncio.Future[tuple[AnyReply, Any]] = self._loop.create_future()
        try:
            session.begin(Exchange(request, None, waiter, "load", turn=False))
            reply, _ = await waiter
        except LocalProtocolError as exc:
            raise refusals.unsendable(self._spec.lane_id, "load", exc) from exc
        except asyncio.CancelledError:
            self.forget(session)
            await session.stop(0.0)
            raise
        assert isinstance(reply, Loaded)
        self._counters.last_load_s = seconds = self._loop.time() - session.began
        self._counters.loads.add(seconds)
        session.model_ref = reply.model_ref
        self.loaded = reply
        return session

    async def _spawn(self) -> Session:
        if self._undead is not None:
            process = self._undead.process
            if process is not None and process.running:
                # Never before the old process is reaped.
                raise refusals.unkillable(self._spec.lane_id, process.pid)
            self._undead = None
        if self._admit is not None:
            self._spec = await self._admit(self._standing.spec)
        self.number += 1
        if self._ended is not None:
            self._counters.restarts[self._ended] += 1
            self._ended = None
        session = Session(
            structs.replace(self._context, spec=self._spec),
            generation=self.number,
            forwarder=self._forwarder,
            owner=self._owner,
            # A pinned revision is the one that counts, also where its predecessor had another.
            revision=self._revision if self._spec.kernel_revision is None else None,
        )
        try:
            hello = await session.start()
        except StartFailed as exc:
            raise self.charge(session, exc.death, "handshake", None) from exc
        except LaneRefused as exc:
            self._standing.refusal = exc
            _log.error("lane refused: %s", exc.message)
            raise
        self.session = session
        self._health.greeted(hello, self._loop.time())
        self._revision = self._health.facts.kernel_revision or self._revision
        self.advertised = tuple(self._health.facts.packed_widths)
        return session

    # --- the end of one ----------------------------------------------------------------------------------------------

    def charge(self, session: Session, death: Death, stage: str, exchange: Exchange | None) -> EngineCrashed:
        """Charge an unplanned death and return what its caller hears."""
        self._ended = death.cause
        if not death.reaped:
            self._undead = session
        error = self._standing.charge(death, stage, exchange)
        self._health.struck(death, error.details)
        return error

    def forget(self, session: Session) -> None:
        """No request goes to *session* any more."""
        if self.session is session:
            self.session = None
            self._health.ended()
            if session.process is not None and session.process.running:
                self._undead = session

    def rest(self) -> None:
        """Begin the planned end of the worker; whoever comes meanwhile waits for it and starts the next one."""
        session = self.session
        if session is not None and (ending := session.leave(self._grace)) is not None:
            ending.add_done_callback(lambda _: self.forget(session))

    async def retire(self, deadline: float | None, stage: str) -> None:
        """Stop the current worker so that a probe runs on a fresh one; one that is still starting counts as fresh.

        Past *deadline* its end goes on, and the next request waits for it.
        """
        session = self.session
        if self.starting is None and session is not None:
            self._ended = "probe"
            # Kept until it is gone: left in the middle, its successor or whoever closes the lane waits for it.
            try:
                async with asyncio.timeout_at(deadline):
                    await session.stop(self._grace)
            except TimeoutError as exc:
                raise refusals.late(self._spec.lane_id, stage, NOT_READY) from exc
            self.forget(session)

    async def stop(self) -> bool:
        """Stop the worker, after its start where one is under way; True once no process of this lane is left."""
        if self.starting is not None:
            await asyncio.wait({self.starting})
        session = self.session
        if session is not None:
            # Kept until it is gone, as above.
            await session.stop(self._grace)
            self.forget(session)
        process = None if self._undead is None else self._undead.process
        return process is None or not process.running

    async def close(self) -> None:
        """Stop for ever, a start under way included."""
        if self.starting is not None:
            self.starting.cancel()
            await asyncio.wait({self.starting})
        session, self.session = self.session, None
        if session is not None:
            await session.stop(self._grace)

    # --- how it is ---------------------------------------------------------------------------------------------------

    def health(self, now: float, *, waiting: int) -> Health:
        """Return the lane's record: the stamped facts, and what is true now; no worker is asked.

        *waiting*: requests in line.
        """
        session, quarantine, age = self.session, self._standing.quarantine, self._health.age(now)
        process = None if session is None else session.process
        loaded = session is not None and session.model_ref is not None
        return structs.replace(
            self._health.facts,
            state=self._state(now, stale=age is None or age > self._context.config.health_stale),
            worker_pid=None if process is None else process.pid,
            generation=self.number,
            strikes=quarantine.strikes(now),
            quarantine_remaining_s=quarantine.remaining(now),
            waiting=waiting,
            models=[self._spec.model] if loaded else [],
            load_s=self._counters.last_load_s if loaded else None,
            progress=None if session is None else session.underway(now),
            age_s=age,
        )

    def _state(self, now: float, *, stale: bool) -> str:
        if self._standing.closing:
            return "stopped"
        if self._standing.refusal is not None:
            return "refused"
        if not self._standing.quarantine.admits(now):
            return "quarantined"
        if self.starting is not None:
            return "loading"
        if self.session is None:
            return "stopped"
        if self.session.serving:
            return "serving"
        return "unknown" if stale else "idle"


class Idle:
    """Looks after one lane while nobody uses it, from its making until :meth:`stop`."""

    def __init__(self, context: LaneContext, turns: Turns, workers: Generations, health: LaneHealth) -> None:
        self.rest: Callable[[], None] = workers.rest
        """Ends a worker that has had nothing to do for ``HostConfig.idle_unload`` seconds; the Neural Engine's lanes
        put their own here."""
        self._spec = context.spec
        self._turns = turns
        self._workers = workers
        self._health = health
        self._loop = asyncio.get_running_loop()
        self._timers: dict[Callable[[], None], asyncio.TimerHandle] = {}
        self._again(context.config.ping_interval, self._ping)
        if (after := context.config.idle_unload) is not None:
            self._again(max(after / 4, LEAST_S), partial(self._end, after))

    def stop(self) -> None:
        """Look no more; idempotent."""
        for timer in self._timers.values():
            timer.cancel()

    def _again(self, interval: float, look: Callable[[], None]) -> None:
        self._timers[look] = self._loop.call_later(interval, self._look, interval, look)

    def _look(self, interval: float, look: Callable[[], None]) -> None:
        self._again(interval, look)
        look()

    def _session(self) -> Session | None:
        """Return the living worker's session while nobody uses or wants the lane."""
        session = self._workers.session
        if self._turns.held or self._workers.starting is not None or session is None or session.dead or session.open:
            return None
        return session

    def _ping(self) -> None:
        """PING an idle worker. A busy one is alive as its exchange proves, and PING never starts a missing one."""
        session = self._session()
        if session is None:
            return
        self._turns.held = True
        waiter: asyncio.Future[Any] = self._loop.create_future()
        # Nobody awaits it: the supervisor's `replied` stamps what the reply says.
        waiter.cancel()
        try:
            session.begin(Exchange(Ping(req_id=session.next_req_id()), None, waiter, "ping"))
        except (LocalProtocolError, MemoryError):
            self._turns.pass_on()

    def _end(self, after: float) -> None:
        """End a worker that has had nothing to do for *after* seconds; the next request starts another one."""
        if self._session() is not None and self._health.rests(self._loop.time(), after):
            _log.info("idle worker ends: lane=%s model=%s", self._spec.lane_id, self._spec.model)
            self.rest()
