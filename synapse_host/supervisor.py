"""One lane: turns, permits, lazy start and LOAD, strikes and quarantine, unload, shutdown.

The order of a request: own the stream (one exchange per connection), have a loaded worker, take the device's execution
permit (inference only), check the deadline again, send, watch. Stream and permit belong to the exchange, not to the
caller: they are given back when the reply is drained, even if the caller left long ago.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeAlias

from engines.protocol.errors import ErrorCode, LocalProtocolError
from engines.protocol.messages import (
    SERVING,
    AnyReply,
    AnyRequest,
    Err,
    Load,
    Loaded,
    Ping,
    Pong,
    Request,
    Unload,
    type_name,
)
from synapse_host.config import HostConfig
from synapse_host.counters import LaneCounters
from synapse_host.errors import (
    WORKER_ERRORS,
    DeadlineExceeded,
    EngineCrashed,
    InvalidRequest,
    LaneRefused,
    ModelInUse,
    ProbeRequired,
    QueueFull,
    SynapseError,
)
from synapse_host.health import LaneHealth, Refresher, monotonic
from synapse_host.lane import LaneSpec
from synapse_host.listener import RuntimeDirectory
from synapse_host.logring import LineForwarder, LogRing
from synapse_host.permits import Permits
from synapse_host.quarantine import Fingerprint, Quarantine, Strike
from synapse_host.session import Death, Exchange, Session, StartFailed

Build: TypeAlias = Callable[[str, str], tuple[AnyRequest, Any]]
"""``build(req_id, model_ref)`` returns the request and its raw buffer or None. It may be called again when the worker
was replaced while the request waited, so it must not have side effects."""

Outcome: TypeAlias = tuple[AnyReply, Any]
"""The reply and its payload: float32 (n * dims,) or (candidates,), writable and owned by the caller; or None."""

NOT_READY: Final = ", before its worker was ready"

_BLOCK = 131072
"""Floats whose flags stay in the cache; flags of tens of megabytes at once cost twice as much."""

_log = logging.getLogger(__name__)


class Supervisor:
    """Runs one lane with one worker at a time. Use it from one event loop.

    *kind* and everything else about the lane stand in *spec*. Nothing is spawned before the first request or load.
    """

    def __init__(
        self,
        spec: LaneSpec,
        *,
        config: HostConfig,
        runtime: RuntimeDirectory,
        permits: Permits | None = None,
        counters: LaneCounters | None = None,
        journal: LogRing | None = None,
    ) -> None:
        self.spec = spec
        self.counters = counters or LaneCounters()
        """Plain integers, for :mod:`synapse_host.metrics`."""
        # An empty ring is falsy.
        self.journal = LogRing(config.log_ring_bytes) if journal is None else journal
        """The last output of the lane's workers, across generations."""
        self.lost: Callable[[], None] | None = None
        """Called on the loop when a worker died that nobody waited for; its strike is charged by then."""
        self.advertised: tuple[int, ...] | None = None
        """Packed widths of the last HELLO; None before the first."""
        self._ended: str | None = None
        self._config = config
        self._runtime = runtime
        self._permits = permits or Permits(config.permits)
        self._loop = asyncio.get_running_loop()
        self._quarantine = Quarantine(spec.kind, cool_down=config.cool_down)
        self._refusal: LaneRefused | None = None
        self._session: Session | None = None
        self._starting: asyncio.Task[Session] | None = None
        self._undead: Session | None = None
        self._last_crash: EngineCrashed | None = None
        self._generation = 0
        self._revision: str | None = None
        self.loaded: Loaded | None = None
        """The last LOADED of this lane, with its dims and buckets."""
        self._held = False
        self._turns: deque[asyncio.Future[None]] = deque()
        self._closing = False
        self._closer: asyncio.Task[None] | None = None
        self._drain_until = float("inf")
        self._wake = asyncio.Event()
        self._health = LaneHealth()
        self._refresher = Refresher(config.ping_interval, self._refresh)
        self._forwarder = LineForwarder(spec.lane_id, per_second=config.log_lines_per_s)

    @property
    def late_replies(self) -> int:
        """Replies that were drained after their caller had left."""
        return self.counters.abandoned

    # --- requests ----------------------------------------------------------------------------------------------------

    async def submit(
        self, build: Build, *, deadline: float | None = None, stage: str, generation: int | None = None
    ) -> Outcome:
        """Run one exchange and return its reply with the payload.

        *generation*: only on this worker, which holds what the request needs; engine_crashed where it is gone, and
        nothing is started. *deadline* is absolute loop time. Raises what interfaces.md lists: engine_crashed,
        probe_required, lane_refused, deadline_exceeded, queue_full, nonfinite_output, and the class of the worker's ERR
        code. A caller that leaves (deadline, cancellation) neither harms the worker nor frees the lane early.
        """
        started = monotonic()
        try:
            self._admit()
            if self._held:
                await self._wait_turn(deadline, stage)
            else:
                self._held = True
            # None: a start or a permit has to be waited for, or the worker is another one than asked for.
            waiter = None
            if generation is None or generation == self._generation:
                waiter = self._at_once(build, deadline, stage)
            if waiter is None:
                outcome = await self._serve(build, deadline, stage, generation=generation)
            else:
                outcome = await waiter
        except BaseException as exc:
            self.counters.failed(stage, exc)
            raise
        self.counters.served(stage, monotonic() - started)
        return outcome

    async def load(self, deadline: float | None = None) -> int:
        """Make sure that a worker is up and the model is loaded; return its dims.

        On a quarantined catalog lane or a refused lane this is the reload that clears it at once.
        """
        with self.counters.call("load"):
            return await self._load(deadline)

    def reopen(self) -> None:
        """Clear a quarantine or a refusal at once, as a reload does."""
        if self._refusal is not None or not self._quarantine.admits(self._loop.time()):
            self._refusal = None
            self._quarantine.clear()

    async def _load(self, deadline: float | None) -> int:
        self.reopen()
        self._admit()
        if self._held:
            await self._wait_turn(deadline, "load")
        else:
            self._held = True
        try:
            await self._ready(deadline, "load")
        finally:
            self._pass_turn()
        assert self.loaded is not None
        return self.loaded.dims

    async def unload(self) -> None:
        """Unload the model and clear quarantine and refusal; ModelInUse while requests run, wait or drain."""
        with self.counters.call("unload"):
            await self._unload()

    async def _unload(self) -> None:
        if self._starting is not None or (self._held and not self._pinging()):
            raise ModelInUse(
                f"lane {self.spec.lane_id}: {self.spec.model} is in use; try again when its requests are done",
                details={"lane_id": self.spec.lane_id, "model": self.spec.model, "waiting": len(self._turns)},
            )
        if self._held:
            await self._wait_turn(None, "unload", probing=True)
        else:
            self._held = True
        self._refusal = None
        self._quarantine.clear()
        session = self._session
        if session is None or not session.ready:
            self._pass_turn()
            return
        ref = session.model_ref
        assert ref is not None
        session.model_ref = None
        try:
            await self._begin(session, Unload(req_id=session.next_req_id(), model_ref=ref), None, "unload")
        except EngineCrashed as exc:
            # The model went with its process, which is what was asked for; the strike stands.
            _log.warning("the worker was lost while unloading: lane=%s %s", self.spec.lane_id, exc.message)
        except SynapseError as exc:
            if exc.code != ErrorCode.MODEL_NOT_LOADED:
                raise

    async def probe(self, build: Build, *, deadline: float | None = None) -> Outcome:
        """Try a shut lane: a fresh worker, LOAD and the request of *build*; success opens the lane."""
        with self.counters.call("probe"):
            return await self._probe(build, deadline)

    async def _probe(self, build: Build, deadline: float | None) -> Outcome:
        if self._closing:
            raise self._stopping()
        if self._held:
            await self._wait_turn(deadline, "probe", probing=True)
        else:
            self._held = True
        try:
            if self._starting is None and self._session is not None:
                session, self._session = self._session, None
                self._ended = "probe"
                await session.stop(self._config.shutdown_grace)
        except BaseException:
            self._pass_turn()
            raise
        outcome = await self._serve(build, deadline, "probe", probing=True)
        self._quarantine.probed()
        return outcome

    async def recycle(self) -> bool:
        """Take the worker down, in turn behind what runs; True once its exit is confirmed. Planned: never a strike.

        Nothing is started: the next request does that.
        """
        if self._held:
            await self._wait_turn(None, "recycle", probing=True)
        else:
            self._held = True
        try:
            if self._starting is not None:
                await asyncio.wait({self._starting})
            session, self._session = self._session, None
            if session is not None:
                try:
                    await session.stop(self._config.shutdown_grace)
                except BaseException:
                    # Left in the middle: whoever closes the lane ends it.
                    self._session = self._session or session
                    raise
            undead = self._undead.process if self._undead is not None else None
            mine = session.process if session is not None else None
            return not any(process is not None and process.running for process in (undead, mine))
        finally:
            self._pass_turn()

    @property
    def generation(self) -> int:
        """The worker's generation; 0 before the first spawn."""
        return self._generation

    async def ping(self, deadline: float | None = None) -> dict[str, Any]:
        """Refresh health now, in turn behind what runs; spawns nothing. Returns :meth:`health`."""
        with self.counters.call("ping"):
            return await self._ping(deadline)

    async def _ping(self, deadline: float | None) -> dict[str, Any]:
        if self._held:
            await self._wait_turn(deadline, "ping")
        else:
            self._held = True
        session = self._session
        if session is None or session.dead:
            self._pass_turn()
        else:
            await self._begin(session, Ping(req_id=session.next_req_id()), None, "ping", deadline=deadline)
        return self.health()

    def _at_once(self, build: Build, deadline: float | None, stage: str) -> asyncio.Future[Outcome] | None:
        """Send a request that nothing keeps waiting, without a coroutine of its own; None when something does.

        The caller holds the turn, and still does after None.
        """
        session = self._session
        if session is None or session.dead or session.model_ref is None:
            return None
        if deadline is not None and self._loop.time() >= deadline:
            return None
        try:
            request, payload = build(session.next_req_id(), session.model_ref)
        except BaseException:
            self._pass_turn()
            raise
        permit = type(request) in SERVING
        if permit and not self._permits.try_acquire(self.spec.device):
            return None
        return self._begin(session, request, payload, stage, deadline=deadline, permit=permit)

    async def _serve(
        self,
        build: Build,
        deadline: float | None,
        stage: str,
        *,
        probing: bool = False,
        generation: int | None = None,
    ) -> Outcome:
        """Run one exchange; the caller holds the turn, which this gives back in every case."""
        permit = False
        try:
            while True:
                session = self._session
                if session is None or not session.ready or generation not in (None, self._generation):
                    if generation is not None:
                        raise self._replaced(stage)
                    session = await self._ready(deadline, stage, probing=probing)
                ref = session.model_ref
                assert ref is not None
                request, payload = build(session.next_req_id(), ref)
                if not permit and type(request) in SERVING:
                    device = self.spec.device
                    if not self._permits.try_acquire(device):
                        await self._permits.acquire(device, deadline=deadline)
                    permit = True
                if deadline is not None and self._loop.time() >= deadline:
                    raise self._late(stage)
                if self._closing:
                    raise self._stopping()
                if session is self._session and session.ready:
                    break
                # The worker died while this waited for its permit: never hold one through a start.
                if permit:
                    self._permits.release(self.spec.device)
                    permit = False
                self._admit(probing=probing)
        except BaseException:
            if permit:
                self._permits.release(self.spec.device)
            self._pass_turn()
            raise
        return await self._begin(session, request, payload, stage, deadline=deadline, permit=permit)

    def _begin(
        self,
        session: Session,
        request: AnyRequest,
        payload: Any,
        stage: str,
        *,
        deadline: float | None = None,
        permit: bool = False,
    ) -> asyncio.Future[Outcome]:
        """Send a request and return what its caller awaits; from here on the exchange owns turn and permit."""
        waiter: asyncio.Future[Outcome] = self._loop.create_future()
        exchange = Exchange(request, payload, waiter, stage, deadline, permit)
        try:
            session.begin(exchange)
        except BaseException as exc:
            self._release(exchange)
            if isinstance(exc, LocalProtocolError):
                raise self._unsendable(exc, stage) from exc
            raise
        return waiter

    def _expire(self, waiter: asyncio.Future[Any], stage: str) -> None:
        if not waiter.done():
            waiter.set_exception(self._late(stage))

    # --- turns: who owns the stream ----------------------------------------------------------------------------------

    async def _wait_turn(self, deadline: float | None, stage: str, *, probing: bool = False) -> None:
        if len(self._turns) >= self._config.queue_limit:
            raise QueueFull(
                f"lane {self.spec.lane_id}: {len(self._turns)} requests wait already",
                details={"lane_id": self.spec.lane_id, "waiting": len(self._turns)},
            )
        if deadline is not None and self._loop.time() >= deadline:
            raise self._late(stage)
        turn: asyncio.Future[None] = self._loop.create_future()
        self._turns.append(turn)
        timer = None if deadline is None else self._loop.call_at(deadline, self._expire, turn, stage)
        try:
            await turn
        except BaseException:
            if turn in self._turns:
                self._turns.remove(turn)
            elif turn.done() and not turn.cancelled() and turn.exception() is None:
                # Granted and cancelled in the same turn of the loop: pass it on.
                self._pass_turn()
            raise
        finally:
            if timer is not None:
                timer.cancel()
        try:
            # The lane may have been shut or refused while this waited: it gets that answer, not a new worker.
            self._admit(probing=probing)
        except BaseException:
            self._pass_turn()
            raise

    def _pass_turn(self) -> None:
        turns = self._turns
        while turns:
            turn = turns.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._held = False
        if self._closing:
            self._wake.set()

    def _release(self, exchange: Exchange) -> None:
        if exchange.permit:
            self._permits.release(self.spec.device)
        if exchange.turn:
            self._pass_turn()

    def _admit(self, *, probing: bool = False) -> None:
        """Raise what a closed, refused or quarantined lane answers; a probe or unload asks only if it is closed."""
        if self._refusal is None and not self._closing and self._quarantine.open:
            return
        if self._closing:
            raise self._stopping()
        if probing:
            return
        if self._refusal is not None:
            raise LaneRefused(self._refusal.message, details=dict(self._refusal.details))
        now = self._loop.time()
        if self._quarantine.admits(now):
            return
        lane_id = self.spec.lane_id
        remaining = self._quarantine.remaining(now)
        same = "; both on the same input" if self._quarantine.same_input else ""
        if remaining is None:
            raise ProbeRequired(
                f"lane {lane_id} is shut after repeated worker failures{same}; probe it or start a new host",
                details={"lane_id": lane_id, "quarantined": True},
            )
        raise EngineCrashed(
            f"lane {lane_id} is quarantined after repeated worker failures{same}; wait {remaining:.0f} s, or unload or "
            "reload it",
            details={"lane_id": lane_id, "quarantined": True},
            retry_after_ms=max(1, round(remaining * 1000)),
        )

    def _late(self, stage: str, where: str = "") -> DeadlineExceeded:
        return DeadlineExceeded(
            f"lane {self.spec.lane_id}: the deadline passed during {stage}{where}",
            details={"lane_id": self.spec.lane_id, "stage": stage},
        )

    def _unsendable(self, exc: LocalProtocolError, stage: str) -> InvalidRequest:
        return InvalidRequest(
            f"lane {self.spec.lane_id}: the request can't be sent: {exc}",
            details={"lane_id": self.spec.lane_id, "stage": stage},
        )

    def _replaced(self, stage: str) -> EngineCrashed:
        lane_id = self.spec.lane_id
        return EngineCrashed(
            f"lane {lane_id}: the worker that held what this request needs is gone",
            details={"lane_id": lane_id, "stage": stage, "cause": "exit", "quarantined": False},
        )

    def _stopping(self) -> QueueFull:
        return QueueFull(
            f"lane {self.spec.lane_id}: the host is stopping",
            details={"lane_id": self.spec.lane_id, "reason": "stopping"},
        )

    # --- start and LOAD ----------------------------------------------------------------------------------------------

    async def _ready(self, deadline: float | None, stage: str, *, probing: bool = False) -> Session:
        """Return a session with the model loaded. The start goes on for the next caller when *deadline* passes."""
        while True:
            session = self._session
            if session is not None and session.ready:
                return session
            if deadline is not None and self._loop.time() >= deadline:
                raise self._late(stage, NOT_READY)
            timeout = None if deadline is None else deadline - self._loop.time()
            if session is not None and session.dead:
                # Never a new worker before the old one is reaped, and its strike may have shut the lane.
                await session.buried(timeout)
                if session.buried_now and self._session is session:
                    self._session = None
                self._admit(probing=probing)
                continue
            task = self._starting
            if task is None:
                task = self._starting = self._loop.create_task(self._start())
                task.add_done_callback(self._started)
            await asyncio.wait({task}, timeout=timeout)
            if not task.done():
                raise self._late(stage, NOT_READY)
            if task.cancelled():
                raise self._stopping()
            return task.result()

    def _started(self, task: asyncio.Task[Session]) -> None:
        self._starting = None
        if not task.cancelled():
            # Looked at, so that a failure nobody waited for is not reported as never retrieved.
            task.exception()

    async def _start(self) -> Session:
        session = self._session
        if session is None:
            session = await self._spawn()
        if session.dead:
            # It died between its ACK and now; that is charged by its burial.
            await session.buried()
            self._session = None
            assert self._last_crash is not None
            raise self._last_crash
        spec = self.spec
        request = Load(
            req_id=session.next_req_id(),
            artifact_path=spec.load.artifact_path,
            artifact_digest=spec.load.artifact_digest,
            format=spec.load.format,
            runtime_config=spec.load.runtime_config,
        )
        waiter: asyncio.Future[Outcome] = self._loop.create_future()
        try:
            session.begin(Exchange(request, None, waiter, "load", turn=False))
            reply, _ = await waiter
            self.counters.loaded(self._loop.time() - session.began)
        except LocalProtocolError as exc:
            raise self._unsendable(exc, "load") from exc
        except asyncio.CancelledError:
            await self._drop(session)
            raise
        assert isinstance(reply, Loaded)
        session.model_ref = reply.model_ref
        self.loaded = reply
        return session

    async def _spawn(self) -> Session:
        if self._undead is not None:
            process = self._undead.process
            if process is not None and process.running:
                # Never before the old process is reaped.
                raise EngineCrashed(
                    f"lane {self.spec.lane_id}: the last worker (pid {process.pid}) can't be killed yet",
                    details={"lane_id": self.spec.lane_id, "stage": "spawn", "cause": "exit", "quarantined": False},
                )
            self._undead = None
        self._generation += 1
        if self._ended is not None:
            self.counters.restarted(self._ended)
            self._ended = None
        session = Session(
            self.spec,
            generation=self._generation,
            config=self._config,
            runtime=self._runtime,
            forwarder=self._forwarder,
            sink=self,
            revision=self._revision,
            counters=self.counters,
            journal=self.journal,
        )
        try:
            await session.start()
        except StartFailed as exc:
            raise self._charge(session, exc.death, "handshake", None) from exc
        except LaneRefused as exc:
            self._refusal = exc
            _log.error("lane refused: %s", exc.message)
            raise
        hello = session.hello
        assert hello is not None
        self._session = session
        self._health.greeted(hello, monotonic())
        self.advertised = tuple(self._health.packed_widths)
        self._revision = self._health.kernel_revision or self._revision
        self._refresher.start()
        return session

    async def _drop(self, session: Session) -> None:
        if self._session is session:
            self._session = None
        await session.stop(0.0)

    # --- what sessions tell ------------------------------------------------------------------------------------------

    def replied(self, session: Session, exchange: Exchange, reply: AnyReply, payload: memoryview | None) -> None:
        """Resolve the waiter (unless it left), then hand on permit and stream."""
        self._health.age_from = now = monotonic()
        waiter = exchange.waiter
        left = waiter.done()
        array = None
        error: SynapseError | None = None
        if type(reply) is Err:
            error = self._worker_error(reply, exchange.stage)
        else:
            if payload is not None:
                array, finite = _floats(payload)
                if not finite:
                    error = self._nonfinite(exchange.stage)
            if error is None and type(exchange.request) in SERVING:
                self._quarantine.served(session.generation)
            elif type(reply) is Pong:
                self._health.pong(reply, now)
                self.counters.ponged(now - session.began)
        if left:
            if type(reply) is not Pong:
                self.counters.abandoned += 1
        elif error is None:
            waiter.set_result((reply, array))
        else:
            waiter.set_exception(error)
        self._release(exchange)

    def overdue(self, exchange: Exchange) -> None:
        """Answer the caller; its exchange keeps stream and permit until the reply is drained."""
        self._expire(exchange.waiter, exchange.stage)

    def alive(self, session: Session) -> None:
        """Validated progress: health is fresh."""
        self._health.age_from = monotonic()

    def died(self, session: Session, death: Death, exchange: Exchange | None) -> None:
        """Charge the strike and give the open request its answer."""
        error = self._last_crash = self._charge(session, death, exchange.stage if exchange else "idle", exchange)
        if self._session is session:
            self._session = None
        alone = exchange is None or type(exchange.request) is Ping
        if self.lost is not None and alone and session.generation == self._generation:
            self.lost()
        if exchange is None:
            return
        if not exchange.waiter.done():
            exchange.waiter.set_exception(error)
        self._release(exchange)

    def _charge(self, session: Session, death: Death, stage: str, exchange: Exchange | None) -> EngineCrashed:
        now = self._loop.time()
        self._ended = death.cause
        fingerprint = None if exchange is None else fingerprint_of(exchange.request, exchange.payload, self.spec.model)
        self._quarantine.strike(Strike(death.generation, death.cause, now, fingerprint))
        if not death.reaped:
            self._undead = session
        shut = not self._quarantine.admits(now)
        remaining = self._quarantine.remaining(now)
        details: dict[str, Any] = {
            "lane_id": self.spec.lane_id,
            "stage": stage,
            "cause": death.cause,
            "exit_status": death.exit_status,
            "signal": death.signal,
            "log_tail": death.log_tail,
            "quarantined": shut,
            "fingerprint": None if fingerprint is None else fingerprint.to_dict(),
        }
        if self._quarantine.same_input:
            details["same_input"] = True
        self._health.forget()
        self._health.last_fault = {
            "generation": death.generation,
            "worker_pid": death.pid,
            **{key: details[key] for key in ("stage", "cause", "exit_status", "signal", "fingerprint")},
        }
        return EngineCrashed(
            f"lane {self.spec.lane_id}: {death.describe()}",
            details=details,
            retry_after_ms=round(remaining * 1000) if shut and remaining is not None else None,
        )

    def _worker_error(self, reply: Err, stage: str) -> SynapseError:
        return WORKER_ERRORS[reply.code](
            f"lane {self.spec.lane_id}: {reply.msg or reply.code.value}",
            details={"lane_id": self.spec.lane_id, "stage": stage, "model": self.spec.model},
        )

    def _nonfinite(self, stage: str) -> SynapseError:
        return WORKER_ERRORS[ErrorCode.NONFINITE_OUTPUT](
            f"lane {self.spec.lane_id}: the worker's reply holds NaN or infinity; it was discarded",
            details={"lane_id": self.spec.lane_id, "stage": stage, "model": self.spec.model},
        )

    # --- health ------------------------------------------------------------------------------------------------------

    def _pinging(self) -> bool:
        session = self._session
        return session is not None and session.open is not None and type(session.open.request) is Ping

    def _refresh(self) -> None:
        """PING an idle worker; a busy lane is alive, and a missing one is nobody's business here."""
        session = self._session
        if self._held or self._starting is not None or session is None or session.dead or session.open is not None:
            return
        self._held = True
        waiter: asyncio.Future[Outcome] = self._loop.create_future()
        # Nobody awaits it: the reply's worth is what `replied` stamps.
        waiter.cancel()
        exchange = Exchange(Ping(req_id=session.next_req_id()), None, waiter, "ping")
        try:
            session.begin(exchange)
        except LocalProtocolError:
            self._release(exchange)

    def health(self) -> dict[str, Any]:
        """Return the cached state of the lane: no I/O, from any thread."""
        now = monotonic()
        session = self._session
        process = None if session is None else session.process
        remaining = self._quarantine.remaining(now)
        loaded = session is not None and session.model_ref is not None
        return {
            "state": self._state(now, session, remaining),
            "engine": self.spec.engine_id,
            "device": self.spec.device,
            "kind": self.spec.kind,
            "worker_pid": None if process is None else process.pid,
            "generation": self._generation,
            "strikes": self._quarantine.strikes(now),
            "quarantine_remaining_s": remaining,
            "waiting": len(self._turns),
            "models": [self.spec.model] if loaded else [],
            "load_s": self.counters.last_load_s if loaded else None,
            "progress": _progress(session),
            **self._health.fields(now),
        }

    def _state(self, now: float, session: Session | None, remaining: float | None) -> str:
        if self._closing:
            return "stopped"
        if self._refusal is not None:
            return "refused"
        if remaining != 0.0:
            return "quarantined"
        if self._starting is not None:
            return "loading"
        if session is None:
            return "stopped"
        if session.open is not None and type(session.open.request) is not Ping:
            return "serving"
        return "unknown" if self._health.stale(now, self._config.health_stale) else "idle"

    # --- end ---------------------------------------------------------------------------------------------------------

    async def aclose(self, *, drain: float = 0.0) -> None:
        """Stop: queued requests are answered at once, the running one may finish within *drain* seconds.

        Idempotent and safe to call concurrently; a later call with a shorter *drain* hurries an earlier one.
        """
        self._closing = True
        self._drain_until = min(self._drain_until, self._loop.time() + drain)
        self._refresher.stop()
        for turn in self._turns:
            if not turn.done():
                turn.set_exception(self._stopping())
        self._turns.clear()
        self._wake.set()
        if self._closer is None:
            self._closer = self._loop.create_task(self._close())
        await asyncio.shield(self._closer)

    async def _close(self) -> None:
        while self._held and not self._pinging() and self._drain_until > self._loop.time():
            self._wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._drain_until):
                    await self._wake.wait()
        starting = self._starting
        if starting is not None:
            starting.cancel()
            await asyncio.wait({starting})
        session, self._session = self._session, None
        if session is None:
            return
        await session.stop(self._config.shutdown_grace)
        exchange, session.open = session.open, None
        if exchange is not None:
            if not exchange.waiter.done():
                exchange.waiter.set_exception(
                    EngineCrashed(
                        f"lane {self.spec.lane_id}: the host stopped while the request ran",
                        details={
                            "lane_id": self.spec.lane_id,
                            "stage": exchange.stage,
                            "cause": "exit",
                            "exit_status": None,
                            "signal": None,
                            "log_tail": "",
                            "quarantined": False,
                            "reason": "stopping",
                        },
                    )
                )
            self._release(exchange)


def _progress(session: Session | None) -> dict[str, Any] | None:
    """Return how far the open exchange is: its operation, phase and count of finished work; None when idle."""
    if session is None or session.open is None or type(session.open.request) is Ping:
        return None
    last = session.progress
    return {
        "stage": session.open.stage,
        "phase": None if last is None else last.progress.phase.value,
        "completed": 0 if last is None else last.progress.completed,
        "running_s": monotonic() - session.began,
    }


def fingerprint_of(request: Request, payload: Any, model: str) -> Fingerprint:
    """Return what identifies a request's content: operation, model, digest of the ids."""
    digest = None if payload is None else hashlib.sha256(memoryview(payload).tobytes()).hexdigest()
    return Fingerprint(type_name(request), model, digest)


def _floats(payload: memoryview) -> tuple[Any, bool]:
    """Return the payload as float32 (n,) without a copy, and whether every value is finite."""
    import numpy as np

    array = np.frombuffer(payload, np.float32)
    if len(array) <= 4096:
        # Searching the flags' bytes takes half the time of `all()`.
        return array, np.isfinite(array).tobytes().find(b"\0") < 0
    flags = np.empty(min(len(array), _BLOCK), np.bool_)
    for start in range(0, len(array), _BLOCK):
        part = array[start : start + _BLOCK]
        if not np.isfinite(part, flags[: len(part)]).all():
            return array, False
    return array, True
