"""One lane: who may send what and when.

Theory of operation. A :class:`Supervisor` runs one lane and owns its four parts: the standing (may the lane serve, what
counts against it), the turns (who is next), the generations (is there a worker, is the model loaded) and the health
(what PONG and progress said last). The execution permits belong to the device and are shared with other lanes.

A request passes, in this order:

1. the standing: a closed, refused or quarantined lane answers at once;
2. the turn: one exchange a connection, in order of arrival; whoever waited asks the standing again;
3. the worker: spawned and loaded if there is none, never before its predecessor is reaped;
4. the device's permit, for inference only: a LOAD or a compilation holds none, and no permit is held through a start;
5. the deadline, once more: nothing is written for a caller who has left;
6. the session, which sends, watches for silence and reads the reply.

From step 6 on the exchange owns turn, permit and lease, not its caller. They return in :meth:`Supervisor.replied`,
``died``, ``starved`` or ``stopped``, each called once by the session, even if the caller left long ago: the next
request can't meet the reply of an abandoned one. A caller awaits a plain Future under its deadline.

Everything runs on one event loop and nothing here blocks. What may run at the same time: any number of waiting callers,
at most one start (a task that outlives whoever asked for it), one open exchange, one background PING in the turn's
place (:class:`~synapse_host.supervision.lifecycle.Idle`), and the end of a worker (a task of its session).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from engines.protocol.errors import ErrorCode, LocalProtocolError
from engines.protocol.messages import SERVING, AnyReply, Ping, Pong, Unload
from synapse_host.errors import EngineCrashed, SynapseError
from synapse_host.placement.spec import LaneSpec
from synapse_host.supervision.health import LaneHealth
from synapse_host.supervision.lifecycle import Generations, Idle
from synapse_host.supervision.queueing import Permits, Turns, refuse
from synapse_host.supervision.sharing import ALONE, Sharing
from synapse_host.supervision.standing import Standing
from synapse_host.worker import refusals
from synapse_host.worker.exchange import Build, Exchange, Lease, Outcome
from synapse_host.worker.process import Death
from synapse_host.worker.session import Session
from synapse_host.worker.startup import LaneContext

_log = logging.getLogger(__name__)


class Supervisor:
    """Runs one lane with one worker at a time. Use it from one event loop.

    Nothing is spawned before the first request or load.
    *admit* is asked before each start of a worker: it returns the spec to start it with, or raises why it may not run.
    """

    def __init__(
        self,
        context: LaneContext,
        *,
        permits: Permits | None = None,
        admit: Callable[[LaneSpec], Awaitable[LaneSpec]] | None = None,
    ) -> None:
        config = context.config
        self.spec = spec = context.spec
        self.counters = context.counters
        self.lost: Callable[[], None] | None = None
        """Called on the loop when the current worker is lost and nobody hears engine_crashed; it is charged by then."""
        self._permits = permits or Permits(config.permits)
        self._loop = asyncio.get_running_loop()
        self._standing = Standing(spec, cool_down=config.cool_down)
        self._quarantine = self._standing.quarantine
        self._turns = Turns(self._standing, limit=config.queue_limit)
        self._health = LaneHealth(spec)
        self._workers = Generations(context, self._standing, owner=self, health=self._health, admit=admit)
        self.idle = Idle(context, self._turns, self._workers, self._health)
        self._closer: asyncio.Task[None] | None = None
        self._sharing = Sharing(self._turns, spec)

    @property
    def generation(self) -> int:
        """The worker's generation; 0 before the first spawn."""
        return self._workers.number

    @property
    def advertised(self) -> tuple[int, ...] | None:
        """Packed widths of the last HELLO; None before the first."""
        return self._workers.advertised

    # --- requests ----------------------------------------------------------------------------------------------------

    async def submit(
        self,
        build: Build,
        *,
        deadline: float | None = None,
        stage: str,
        generation: int | None = None,
        lease: Lease | None = None,
    ) -> Outcome:
        """Run one exchange and return its reply with the payload.

        *generation*: only on this worker, which holds what the request needs; engine_crashed where it is gone, and
        nothing is started. *lease*: the exchange takes it over once it is sent. *deadline* is absolute loop time.
        Raises what interfaces.md lists: engine_crashed, probe_required, lane_refused, deadline_exceeded, queue_full,
        nonfinite_output, oom, and the class of the worker's ERR code. A caller that leaves (deadline, cancellation)
        neither harms the worker nor frees the lane early.
        """
        with self.counters.call(stage):
            return await self.exchange(build, deadline=deadline, stage=stage, generation=generation, lease=lease)

    async def exchange(
        self,
        build: Build,
        *,
        deadline: float | None = None,
        stage: str,
        generation: int | None = None,
        lease: Lease | None = None,
        again: bool = False,
    ) -> Outcome:
        """As :meth:`submit`, for one of several exchanges that are counted as one request.

        *again*: a later one, which no full queue refuses, since its request was let in before.
        """
        turns = self._turns
        self._standing.admit()
        place = turns.arrive()
        outcome: Outcome | None = await turns.take(deadline, stage, place=place, limited=not again, build=build)
        if outcome is None:
            outcome = await self._serve(build, deadline, stage, generation=generation, lease=lease)
        if outcome is ALONE:
            # A shared exchange failed, and nobody knows for whose rows: each call once more, by itself, in its place.
            self._standing.admit()
            await turns.take(deadline, stage, place=place, limited=False)
            return await self._serve(lambda *names: build(*names), deadline, stage)
        return outcome

    async def _serve(
        self,
        build: Build,
        deadline: float | None,
        stage: str,
        *,
        probing: bool = False,
        generation: int | None = None,
        lease: Lease | None = None,
    ) -> Outcome:
        """Run one exchange; the caller holds the turn, which this gives back in every case."""
        workers, device, lane_id = self._workers, self.spec.device, self.spec.lane_id
        permit = False
        try:
            while True:
                session = workers.session
                if session is None or not session.ready or generation not in (None, workers.number):
                    if generation is not None:
                        raise refusals.replaced(lane_id, stage)
                    session = await workers.ready(deadline, stage, probing=probing)
                ref = session.model_ref
                assert ref is not None
                request, payload = build(session.next_req_id(), ref)
                if not permit and type(request) in SERVING:
                    await self._permits.acquire(device, lane_id=lane_id, stage=stage, deadline=deadline)
                    permit = True
                if deadline is not None and self._loop.time() >= deadline:
                    raise refusals.late(lane_id, stage)
                if self._standing.closing:
                    raise refusals.stopping(lane_id)
                if session is workers.session and session.ready:
                    break
                # The worker died while this waited for its permit: never hold one through a start.
                if permit:
                    self._permits.release(device)
                    permit = False
                self._standing.admit(probing=probing)
        except BaseException:
            if permit:
                self._permits.release(device)
            self._turns.pass_on()
            raise
        waiter, shared = self._loop.create_future(), None if probing else build
        return await self._begin(session, Exchange(request, payload, waiter, stage, deadline, permit, lease, shared))

    def _begin(self, session: Session, exchange: Exchange) -> asyncio.Future[Outcome]:
        """Send a request and return what its caller awaits; from here on the exchange owns turn, permit and lease.

        Callers who wait go along where its build can be shared.
        """
        if exchange.lease is not None:
            exchange.lease.taken = True
        try:
            self._sharing.board(exchange, session, self._workers.loaded)
            session.begin(exchange)
            if exchange.permit:
                self.counters.shared.add(1 + len(exchange.riders))
        except LocalProtocolError as exc:
            self._answer(exchange, refusals.unsendable(self.spec.lane_id, exchange.stage, exc))
        except MemoryError:
            self._answer(exchange, refusals.no_memory(self.spec.lane_id, exchange.stage))
        except BaseException:
            self._release(exchange)
            raise
        return exchange.waiter

    def _release(self, exchange: Exchange) -> None:
        if exchange.permit:
            self._permits.release(self.spec.device)
        if exchange.turn:
            self._turns.pass_on()
        if exchange.lease is not None:
            exchange.lease.release()

    # --- load, unload, probe, ping -----------------------------------------------------------------------------------

    async def load(self, deadline: float | None = None) -> None:
        """Make sure that a worker is up and the model is loaded.

        On a quarantined catalog lane or a refused lane this is the reload that clears it at once.
        """
        with self.counters.call("load"):
            self.reopen()
            self._standing.admit()
            await self._turns.take(deadline, "load")
            try:
                await self._workers.ready(deadline, "load")
            finally:
                self._turns.pass_on()

    def reopen(self) -> None:
        """Clear a quarantine or a refusal at once, as a reload does."""
        self._standing.reopen()

    def clear(self) -> None:
        """Clear strikes and refusal, as an unload does."""
        self._standing.clear()

    async def unload(self) -> None:
        """Unload the model and clear quarantine and refusal; ModelInUse while requests run, wait or drain."""
        with self.counters.call("unload"):
            if self._workers.start_under_way() or (self._turns.held and not self._pinging()):
                raise refusals.in_use(self.spec, self._turns.waiting)
            await self._turns.take(None, "unload", probing=True)
            if self._workers.start_under_way():
                # Behind a PING there was a request that began a start and left: its LOAD owns the connection.
                self._turns.pass_on()
                raise refusals.in_use(self.spec, self._turns.waiting)
            self._standing.clear()
            session = self._workers.session
            if session is None or not session.ready:
                self._turns.pass_on()
                return
            ref, session.model_ref = session.model_ref, None
            assert ref is not None
            try:
                request = Unload(req_id=session.next_req_id(), model_ref=ref)
                await self._begin(session, Exchange(request, None, self._loop.create_future(), "unload"))
            except EngineCrashed as exc:
                # The model went with its process, which is what was asked for; the strike remains.
                _log.warning("the worker was lost while unloading: lane=%s %s", self.spec.lane_id, exc.message)
            except SynapseError as exc:
                if exc.code != ErrorCode.MODEL_NOT_LOADED:
                    raise

    async def probe(self, build: Build, *, deadline: float | None = None) -> Outcome:
        """Try a shut lane: a fresh worker, LOAD and the request of *build*; success opens the lane."""
        with self.counters.call("probe"):
            self._standing.admit(probing=True)
            await self._turns.take(deadline, "probe", probing=True)
            try:
                await self._workers.retire(deadline, "probe")
            except BaseException:
                self._turns.pass_on()
                raise
            outcome = await self._serve(build, deadline, "probe", probing=True)
            self._quarantine.probed()
            return outcome

    async def recycle(self) -> bool:
        """Take the worker down now; True once its exit is confirmed. Planned: never a strike.

        A request that runs ends as engine_crashed. Nothing is started: the next request does that.
        """
        return await self._workers.stop()

    async def ping(self, deadline: float | None = None) -> dict[str, Any]:
        """Refresh health now, in turn behind what runs, a start included; spawns nothing. Returns :meth:`health`."""
        with self.counters.call("ping"):
            await self._turns.take(deadline, "ping")
            try:
                # Whoever wanted the start may have left with his turn, but its LOAD still owns the connection.
                await self._workers.started(deadline, "ping")
            except BaseException:
                self._turns.pass_on()
                raise
            session = self._workers.session
            if session is None or session.dead:
                self._turns.pass_on()
            else:
                request = Ping(req_id=session.next_req_id())
                await self._begin(session, Exchange(request, None, self._loop.create_future(), "ping", deadline))
            return self.health()

    def _pinging(self) -> bool:
        session = self._workers.session
        return session is not None and session.open is not None and not session.serving

    # --- what sessions report ----------------------------------------------------------------------------------------

    def replied(self, session: Session, exchange: Exchange, reply: AnyReply, payload: memoryview | None) -> None:
        """Resolve the waiter (unless it left), then hand on permit and stream."""
        self._health.age_from = now = self._loop.time()
        if type(exchange.request) is not Ping:
            self._health.used = now
        outcomes: list[Outcome] = []
        error: SynapseError | None = None
        try:
            outcomes = self._sharing.outcomes(exchange, reply, payload)
        except SynapseError as exc:
            error = exc
        else:
            if type(exchange.request) in SERVING:
                self._quarantine.served(session.generation)
            elif type(reply) is Pong:
                self._health.pong(reply, now)
                self.counters.ipc.add(time.monotonic() - exchange.sent)
        left = self._sharing.answer(exchange, outcomes, error)
        if type(reply) is not Pong:
            self.counters.abandoned += left
        self._release(exchange)

    def overdue(self, exchange: Exchange) -> None:
        """Answer the caller; its exchange keeps stream and permit until the reply is drained."""
        refuse(exchange.waiter, lambda: refusals.late(self.spec.lane_id, exchange.stage))

    def alive(self, session: Session) -> None:
        """Validated progress: health is fresh."""
        self._health.age_from = self._loop.time()

    def died(self, session: Session, death: Death, exchange: Exchange | None) -> None:
        """Charge the strike and give the open request its answer."""
        if exchange is not None:
            self._sharing.suspect(exchange)
        error = self._workers.charge(session, death, exchange.stage if exchange else "idle", exchange)
        self._workers.forget(session)
        self._lost(session, exchange, error)

    def starved(self, session: Session, exchange: Exchange | None) -> None:
        """The host had no memory for a reply. Its worker is being stopped; whoever comes next waits for that."""
        self._lost(session, exchange, refusals.no_memory(self.spec.lane_id, exchange.stage if exchange else "idle"))

    def _lost(self, session: Session, exchange: Exchange | None, error: SynapseError) -> None:
        # Whoever waits for engine_crashed draws the conclusion from it.
        informed = exchange is not None and type(exchange.request) is not Ping and not exchange.waiter.done()
        current = session.generation == self._workers.number
        if self.lost is not None and current and not (informed and isinstance(error, EngineCrashed)):
            self.lost()
        if exchange is not None:
            self._answer(exchange, error)

    def stopped(self, exchange: Exchange) -> None:
        """A planned end cut off what ran."""
        why = refusals.stopped if self._standing.closing else refusals.replaced
        self._answer(exchange, why(self.spec.lane_id, exchange.stage))

    def _answer(self, exchange: Exchange, error: SynapseError) -> None:
        self._sharing.answer(exchange, (), error)
        self._release(exchange)

    def health(self) -> dict[str, Any]:
        """Return the cached state of the lane: no I/O. On the loop's thread, like everything here."""
        document: dict[str, Any] = msgspec.to_builtins(
            self._workers.health(self._loop.time(), waiting=self._turns.waiting)
        )
        return document

    async def aclose(self, *, drain: float = 0.0) -> None:
        """Stop: queued requests are answered at once, the running one may finish within *drain* seconds.

        Idempotent and safe to call concurrently; a later call with a shorter *drain* hurries an earlier one.
        """
        self._standing.closing = True
        self.idle.stop()
        self._turns.close(self._loop.time() + drain)
        if self._closer is None:
            self._closer = self._loop.create_task(self._close())
        await asyncio.shield(self._closer)

    async def _close(self) -> None:
        if not self._pinging():
            await self._turns.drain()
        await self._workers.close()
