"""One worker generation: handshake, one exchange at a time under its watchdog, and its end with a diagnosis.

Theory of operation. A :class:`Session` owns one process and one connection from spawn to reaping, and is used for
nothing after that. It has three phases:

1. the birth (`startup`): listen, spawn, admit exactly this child, check HELLO, answer with ACK, under one deadline.
   What arrives before the ACK goes to the birth; its errors come out of :meth:`Session.start`;
2. the exchanges: :meth:`Session.begin` writes a request and starts the watchdog. The protocol's callbacks read the
   reply whether or not a caller still waits, so an abandoned request needs no task to drain it. One timer serves the
   silence window and the caller's deadline; the deadline ends the wait, the window ends the worker;
3. the end, for the first reason that appears: a broken rule, the end of the stream, the process's exit, silence, or a
   planned stop. ``dead`` is set at once, later signs are consequences. A task kills the process group before the leader
   is reaped, drains both pipes for a moment and describes the death; only then the owner learns of it.

The owner hears of an exchange or of the end by the methods of :class:`Owner`, once for each cause, on the loop's
thread. The end of the stream and the exit explain each other, so each waits :data:`EXIT_GRACE` for the other. What runs
at the same time is at most one exchange, the reading of both output pipes, and one ending task.

Nothing here runs per call but plain functions and one Future.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any, Final, Protocol

from msgspec import Struct

from engines.protocol.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from engines.protocol.messages import LLAMA_ENGINE, Hello, Ping, Progress, Shutdown
from engines.protocol.rules import Event, ReplyReceived, ReplyStarted, State
from synapse_host.worker.exchange import Exchange
from synapse_host.worker.handshake import HandshakeFault
from synapse_host.worker.listener import safe_id
from synapse_host.worker.output import LineForwarder, Stream
from synapse_host.worker.process import DUMP_GRACE, Cause, Death, StartFailed, WorkerProcess, diagnose
from synapse_host.worker.refusals import no_resources
from synapse_host.worker.startup import Birth, LaneContext
from synapse_host.worker.transport import Channel
from synapse_host.worker.watchdog import Watchdog

EXIT_GRACE: Final = 0.5
"""Seconds between the end of the stream and the exit that explains it, or the other way round: on a busy machine a
worker that dies of an exception needs a while to write its traceback and to be gone."""

_log = logging.getLogger(__name__)


class Underway(Struct, frozen=True):
    """How far an exchange is: operation, phase and count of the last progress, seconds since it was sent."""

    stage: str
    phase: str | None
    completed: int
    running_s: float


class Owner(Protocol):
    """What a session reports to whoever started it; each call comes once for its cause, on the loop's thread."""

    def overdue(self, exchange: Exchange) -> None:
        """The caller's deadline has passed; the exchange goes on."""

    def replied(self, session: Session, exchange: Exchange, reply: Any, payload: Any) -> None:
        """The reply is read to its last byte."""

    def alive(self, session: Session) -> None:
        """A PONG or validated progress has come."""

    def starved(self, session: Session, exchange: Exchange | None) -> None:
        """The host has no memory for what comes; the worker goes and is charged with nothing."""

    def died(self, session: Session, death: Death, exchange: Exchange | None) -> None:
        """The worker is reaped and its pipes are drained; *exchange* has no reply."""

    def stopped(self, exchange: Exchange) -> None:
        """A planned stop has ended an exchange."""


class Session:
    """A worker process and its connection. Made for one spawn; :meth:`start` it, then :meth:`begin` exchanges."""

    def __init__(
        self,
        context: LaneContext,
        *,
        generation: int,
        forwarder: LineForwarder,
        owner: Owner,
        revision: str | None,
    ) -> None:
        config = context.config
        self.spec = context.spec
        self.generation = generation
        self.worker_id = f"{safe_id(self.spec.lane_id)}-{generation}"
        self.model_ref: str | None = None
        self.open: Exchange | None = None
        self.dead = False
        """True from the first sign of a fault or of a planned stop."""
        self.began = 0.0
        """When the last exchange was sent, in loop time."""
        self.progress: Progress | None = None
        """The open exchange's last progress."""
        self._counters = context.counters
        self._journal = context.journal
        self._handshake = config.handshake
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._log_start = context.journal.written
        self._forwarder = forwarder
        self._watchdog = Watchdog(config.windows, self._counters.gaps)
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._engine = ""
        self._eof = False
        self._ending: asyncio.Task[None] | None = None
        self._serial = 0
        self._channel = Channel(
            max_frame=config.max_frame,
            on_event=self._event,
            on_fault=self._violated,
            on_lost=self._lost,
            counters=self._counters,
        )
        self._birth = Birth(
            context,
            worker_id=self.worker_id,
            channel=self._channel,
            revision=revision,
            output=self._output,
            on_exit=self._exited,
        )

    @property
    def process(self) -> WorkerProcess | None:
        """The worker's process; None before the spawn."""
        return self._birth.process

    async def start(self) -> Hello:
        """Spawn and shake hands within one deadline.

        Raises StartFailed (a strike), LaneRefused (a deployment error), BackendMissing (no such program),
        InvalidRequest (the socket's path is taken) or EngineCrashed without a strike (no descriptors, no memory).
        Whatever it raises, the child is dead and reaped, also when this was cancelled in the middle of a diagnosis.
        """
        try:
            hello = await self._greeted()
        except StartFailed:
            raise
        except BaseException as exc:
            await self._abandon()
            if isinstance(exc, OSError):
                raise no_resources(self.spec.lane_id, exc) from exc
            raise
        self._engine = hello.engine.engine
        return hello

    async def _greeted(self) -> Hello:
        """Return the worker's HELLO; StartFailed, with the worker's end diagnosed, where a strike is due."""
        try:
            return await self._birth.run()
        except (HandshakeFault, ProtocolError) as exc:
            text = f"the handshake failed: {exc}"
            raise StartFailed(await self._end("handshake", text)) from exc
        except TimeoutError as exc:
            reached = "connected, but sent no HELLO" if self._channel.connected else "did not connect"
            text = f"the worker {reached} within {self._handshake:g} s"
            raise StartFailed(await self._end("handshake", text)) from exc

    # --- exchanges ---------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """True when a model is loaded and nothing is wrong."""
        return self.model_ref is not None and not self.dead

    @property
    def serving(self) -> bool:
        """True while the worker has a request; a PING is none."""
        return self.open is not None and type(self.open.request) is not Ping

    @property
    def max_frame(self) -> int:
        """The largest frame that both ends take."""
        return self._channel.connection.max_frame

    def next_req_id(self) -> str:
        """Return a fresh request id of this generation."""
        self._serial += 1
        return f"{self.generation}-{self._serial}"

    def underway(self, now: float) -> Underway | None:
        """Return how far the open exchange is; None when idle."""
        exchange, last = self.open, self.progress
        if exchange is None or not self.serving:
            return None
        phase, completed = (None, 0) if last is None else (last.phase.value, last.completed)
        return Underway(exchange.stage, phase, completed, now - self.began)

    def begin(self, exchange: Exchange) -> None:
        """Send a request; its waiter resolves through its owner. LocalProtocolError: nothing was written."""
        assert self.open is None
        request = exchange.request
        if type(request) is Ping:
            exchange.sent = time.monotonic()
        self._channel.send(request, exchange.payload)
        self.open = exchange
        watchdog = self._watchdog
        self.began = now = self._loop.time()
        self.progress = None
        watchdog.start(type(request), self._engine, now)
        # One timer for watchdog and deadline of many exchanges: it is moved only when it would fire too late.
        due = now + watchdog.window
        deadline = exchange.deadline
        if deadline is not None and deadline < due:
            due = deadline
        if self._timer is None or self._due > due:
            self._arm(due)

    def _arm(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._timer = self._loop.call_at(due, self._tick)

    def _tick(self) -> None:
        self._timer = None
        exchange = self.open
        if exchange is None:
            return
        now = self._loop.time()
        if exchange.deadline is not None and now >= exchange.deadline:
            exchange.deadline = None
            self._owner.overdue(exchange)
        if self._watchdog.expired(now, late=now - self._due):
            self._fail("silence", f"the worker showed no completed work for {self._watchdog.window:g} s")
        self._rearm()

    def _rearm(self) -> None:
        """Set the timer to what comes first: the end of the silence window, or the deadline of the open request."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = None if self.open is None else self.open.deadline
        due = [moment for moment in (self._watchdog.deadline, deadline) if moment is not None]
        if due:
            self._arm(min(due))

    def _event(self, event: Event) -> None:
        if self.dead:
            return
        match event:
            case ReplyReceived():
                self._watchdog.stop(self._loop.time())
                if self._channel.sending:
                    self._counters.rejected["out_of_turn"] += 1
                    self._fail("protocol", "the worker answered before it had read the whole request")
                    return
                exchange, self.open = self.open, None
                assert exchange is not None
                self._owner.replied(self, exchange, event.reply, event.payload)
            case Progress():
                self.progress = event
                self._watchdog.progress(event.phase, self._loop.time())
                due = self._watchdog.deadline
                if due is not None and self._due > due:
                    # The switch from a long window to a short one.
                    self._arm(due)
                self._owner.alive(self)
            case ReplyStarted():
                self._watchdog.header(self._loop.time())
            case Hello():
                self._birth.greet(event)

    # --- death -------------------------------------------------------------------------------------------------------

    def _violated(self, exc: RemoteProtocolError | MemoryError) -> None:
        self._channel.abort()
        if isinstance(exc, RemoteProtocolError):
            self._counters.rejected[exc.reason] += 1
        if not self._birth.over:
            self._birth.fault(exc)
        elif isinstance(exc, MemoryError):
            self._starve()
        else:
            self._fail("protocol", f"the worker broke the protocol: {exc}")

    def _starve(self) -> None:
        """End this generation, without a strike: the host had no memory for a reply and can't find the next one."""
        if self.dead or self.process is None:
            return
        self._unwatch()
        self._ending = self._loop.create_task(self._stop(self.process, 0.0))
        self._owner.starved(self, self._cut_off())

    def _lost(self) -> None:
        self._eof = True
        if self._birth.over:
            where = "during a request" if self.open is not None else "while idle"
            torn = ", inside a frame" if self._channel.connection.mid_frame else ""
            if torn:
                self._counters.rejected["torn"] += 1
            self._fail("eof", f"the worker's connection ended {where}{torn}")
        else:
            self._birth.fault(None)

    def _exited(self) -> None:
        """The process is reaped and its group killed; the end of the stream, with any last reply before it, follows."""
        if self._birth.over and not self.dead:
            self._loop.call_later(EXIT_GRACE, self._fail, "exit", "the worker exited")

    def _fail(self, cause: Cause, message: str) -> None:
        """End this generation for the first fault; later ones are consequences."""
        if self.dead or not self._birth.over:
            return
        self._unwatch()
        self._channel.deafen()
        self._ending = self._loop.create_task(self._die(cause, message))

    async def _die(self, cause: Cause, message: str) -> None:
        death = await self._end(cause, message)
        self._owner.died(self, death, self._cut_off())

    def _cut_off(self) -> Exchange | None:
        """Return the exchange that the end of this generation left without a reply; the owner answers it."""
        exchange, self.open = self.open, None
        self._rearm()
        return exchange

    async def _end(self, cause: Cause, message: str) -> Death:
        """Kill, reap, drain the pipes and write the diagnosis."""
        process = self.process
        assert process is not None
        if cause == "silence" and self.spec.own_worker:
            # Before the connection closes: a worker whose peer is gone ends at once, without a word.
            process.dump()
            await process.wait(DUMP_GRACE)
        self._shut()
        if self._eof and await process.wait(EXIT_GRACE) and cause == "eof":
            cause, message = "exit", message.replace("connection ended", "process ended")
        llama = self.spec.expected_engine == LLAMA_ENGINE
        death = await diagnose(process, cause, message, generation=self.generation, llama=llama)
        death.log_tail = self._journal.render(self._log_start)
        if not death.reaped:
            _log.error("worker can't be killed: lane=%s pid=%d", self.spec.lane_id, process.pid)
        self._forwarder.restart()
        _log.warning(
            "worker lost: lane=%s generation=%d pid=%d cause=%s %s",
            self.spec.lane_id,
            self.generation,
            process.pid,
            death.cause,
            death.describe(),
        )
        return death

    async def _abandon(self) -> None:
        """Close, kill and reap without a strike."""
        self._shut()
        if self.process is not None:
            await self.process.destroy()

    async def stop(self, grace: float) -> None:
        """Planned end: SHUTDOWN to an idle worker and *grace* seconds to obey, else SIGKILL. Never a strike.

        It goes on to its end when its caller leaves: see :meth:`ended`.
        """
        if (ending := self.leave(grace)) is not None:
            await asyncio.shield(ending)

    def leave(self, grace: float) -> asyncio.Task[None] | None:
        """Begin what :meth:`stop` waits for and return it; None where no process was started."""
        if self._ending is None:
            self._unwatch()
            if self.process is not None:
                self._ending = self._loop.create_task(self._stop(self.process, grace))
        return self._ending

    async def _stop(self, process: WorkerProcess, grace: float) -> None:
        if not self.serving and not self._channel.closed and self._channel.connection.state in (State.IDLE, State.BUSY):
            with suppress(LocalProtocolError):
                self._channel.send(Shutdown())
                await process.wait(grace)
        self._channel.abort()
        await process.destroy()
        if (exchange := self._cut_off()) is not None:
            self._owner.stopped(exchange)

    async def ended(self, timeout: float | None = None) -> None:
        """Wait until the end, planned or not, is complete (and charged), at most *timeout* seconds."""
        if self._ending is not None:
            await asyncio.wait({self._ending}, timeout=timeout)

    @property
    def has_ended(self) -> bool:
        """True once the end is complete; the process may still be unconfirmed (``Death.reaped``)."""
        return self._ending is not None and self._ending.done()

    def _shut(self) -> None:
        self._unwatch()
        self._channel.abort()
        self._birth.give_up()

    def _unwatch(self) -> None:
        """End the silence window: the worker is on its way out. The caller's deadline holds, for that takes seconds."""
        self.dead = True
        self._watchdog.stop()
        self._rearm()

    def _output(self, stream: Stream, data: bytes) -> None:
        self._journal.write(stream, data)
        self._forwarder.feed(self.worker_id, stream, data, self._loop.time())
