"""One worker generation: handshake, one exchange at a time under its watchdog, death with its diagnosis.

Nothing here runs per call but plain functions and one Future: reading goes on in the protocol's callbacks whether or
not the caller still waits, so a caller who leaves needs no task to drain the reply for it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeAlias

from msgspec import Struct

from engines.protocol.connection import (
    Event,
    HelloReceived,
    ProgressReceived,
    ReplyReceived,
    ReplyStarted,
    State,
)
from engines.protocol.errors import LocalProtocolError, ProtocolError, RemoteProtocolError, VersionMismatch
from engines.protocol.messages import VERSION, AnyReply, AnyRequest, Hello, HelloAck, Ping, Shutdown
from synapse_host.channel import Channel
from synapse_host.config import HostConfig
from synapse_host.counters import LaneCounters
from synapse_host.errors import BackendMissing, EngineCrashed, SynapseError
from synapse_host.handshake import HandshakeFault, Peer, refused_version, verify
from synapse_host.lane import LaneSpec
from synapse_host.listener import Listener, RuntimeDirectory, safe_id
from synapse_host.logring import LineForwarder, LogRing, Stream
from synapse_host.process import DUMP_GRACE, WorkerProcess, signal_name, worker_environment
from synapse_host.watchdog import JUMP, Watchdog

Cause: TypeAlias = Literal["exit", "eof", "protocol", "silence", "handshake"]

EXIT_GRACE: Final = 0.1
"""Seconds between the end of the stream and the exit that explains it, or the other way round."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Death:
    """How a worker generation ended, with what it left behind."""

    generation: int
    cause: Cause
    message: str
    pid: int | None
    exit_status: int | None
    signal: str | None
    log_tail: str
    reaped: bool
    """False when the process could not be confirmed dead: nothing may replace it yet."""

    def describe(self) -> str:
        """Return one sentence for people."""
        if self.signal == "SIGILL":
            return f"{self.message}: llama-cpp-python was built for another CPU, rebuild it"
        if self.signal is not None and self.cause in ("exit", "eof", "handshake"):
            return f"{self.message} ({self.signal})"
        if self.exit_status is not None and self.cause in ("exit", "eof", "handshake"):
            return f"{self.message} (exit status {self.exit_status})"
        return self.message


class StartFailed(Exception):
    """The worker died, hung or talked nonsense before the ACK: a strike."""

    def __init__(self, death: Death) -> None:
        super().__init__(death.describe())
        self.death = death


class Exchange(Struct, eq=False):
    """One request on its way: who waits for it, and what it holds until the reply is drained."""

    request: AnyRequest
    payload: Any
    waiter: asyncio.Future[Any]
    stage: str
    deadline: float | None = None
    """When the caller stops waiting, in loop time; the exchange goes on."""
    permit: bool = False
    """It holds an execution permit."""
    turn: bool = True
    """It holds the stream's turn; the LOAD of a start doesn't, whoever waits for the start does."""


class Sink(Protocol):
    """What a session tells its supervisor."""

    def replied(self, session: Session, exchange: Exchange, reply: AnyReply, payload: memoryview | None) -> None:
        """The exchange is over and drained."""

    def overdue(self, exchange: Exchange) -> None:
        """The caller's deadline passed; the exchange goes on without it."""

    def alive(self, session: Session) -> None:
        """The worker sent validated progress."""

    def died(self, session: Session, death: Death, exchange: Exchange | None) -> None:
        """The generation ended unplanned; it is reaped (or can't be)."""


class Session:
    """A worker process and its connection. Made for one spawn; :meth:`start` it, then :meth:`begin` exchanges."""

    def __init__(
        self,
        spec: LaneSpec,
        *,
        generation: int,
        config: HostConfig,
        runtime: RuntimeDirectory,
        forwarder: LineForwarder,
        sink: Sink,
        revision: str | None = None,
        counters: LaneCounters | None = None,
        journal: LogRing | None = None,
    ) -> None:
        self.spec = spec
        self.generation = generation
        self.worker_id = f"{safe_id(spec.lane_id)}-{generation}"
        self.hello: Hello | None = None
        self.model_ref: str | None = None
        self.open: Exchange | None = None
        self.dead = False
        """True from the first sign of a fault or of a planned stop."""
        self.process: WorkerProcess | None = None
        self.began = 0.0
        """When the last exchange was sent, in loop time."""
        self.progress: ProgressReceived | None = None
        """The open exchange's last progress."""
        self._counters = counters or LaneCounters()
        self._journal = journal
        self._config = config
        self._runtime = runtime
        self._sink = sink
        self._revision = revision
        self._loop = asyncio.get_running_loop()
        self._nonce = secrets.token_hex(8)
        self._ring = LogRing(config.log_ring_bytes)
        self._forwarder = forwarder
        self._watchdog = Watchdog(config.windows, self._counters.gaps)
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._engine = ""
        self._ended = False
        self._peer = Peer(None, None)
        self._opened: asyncio.Future[Hello] = self._loop.create_future()
        self._burial: asyncio.Task[None] | None = None
        self._serial = 0
        self._channel = Channel(
            max_frame=config.max_frame,
            on_event=self._event,
            on_fault=self._violated,
            on_lost=self._lost,
            counters=self._counters,
        )

    # --- birth -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Spawn and shake hands within one deadline.

        Raises StartFailed (a strike), LaneRefused (a deployment error), BackendMissing (no such program),
        InvalidRequest (the socket's path is taken) or EngineCrashed without a strike (no descriptors, no memory).
        Whatever it raises, the child is dead and reaped.
        """
        deadline = self._loop.time() + self._config.handshake
        listener = None
        try:
            listener = self._listen()
            self.process = self._spawn(listener)
            await self._shake_hands(listener, self.process, deadline)
        except (SynapseError, asyncio.CancelledError):
            await self._abandon()
            raise
        except (HandshakeFault, ProtocolError) as exc:
            raise StartFailed(await self._bury("handshake", f"the handshake failed: {exc}")) from exc
        except TimeoutError as exc:
            reached = "connected, but sent no HELLO" if self._channel.connected else "did not connect"
            text = f"the worker {reached} within {self._config.handshake:g} s"
            raise StartFailed(await self._bury("handshake", text)) from exc
        except OSError as exc:
            await self._abandon()
            raise self._no_resources(exc) from exc
        finally:
            if listener is not None:
                listener.close()

    def _listen(self) -> Listener:
        if sys.platform == "win32":
            from synapse_host import pipe

            return pipe.listen(self._runtime.path, self.worker_id)
        return self._runtime.listen(self.worker_id)

    def _spawn(self, listener: Listener) -> WorkerProcess:
        spec = self.spec
        command = [*spec.command, *listener.arguments, "--nonce", self._nonce, "--device", spec.device]
        if spec.owned and spec.manifest_path is not None:
            command += ["--manifest", str(spec.manifest_path)]
        if spec.packed_widths:
            command += ["--packed", ",".join(str(width) for width in spec.packed_widths)]
        try:
            return WorkerProcess(
                command,
                env=worker_environment(self.worker_id, spec.env),
                cwd=spec.cwd,
                output=self._output,
                on_exit=self._exited,
                stdin=spec.stdin,
            )
        except OSError as exc:
            if exc.errno in (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR):
                raise BackendMissing(
                    f"lane {spec.lane_id}: the worker program {spec.command[0]} can't be started: {exc}; install it or "
                    "correct the matrix",
                    details={"lane_id": spec.lane_id, "command": list(spec.command)},
                ) from exc
            raise

    async def _shake_hands(self, listener: Listener, process: WorkerProcess, deadline: float) -> None:
        async with asyncio.timeout(None) as limit:
            self._timer = self._loop.call_at(deadline, self._handshake_over, limit, deadline)
            connecting = self._loop.create_task(listener.connect(self._channel, self._admit))
            try:
                await _first(connecting, process.exited)
                if not connecting.done():
                    raise HandshakeFault("the worker exited before it connected")
                connecting.result()
            finally:
                if not connecting.done():
                    connecting.cancel()
                    with suppress(asyncio.CancelledError):
                        await connecting
            await _first(self._opened, process.exited)
            if not self._opened.done():
                raise HandshakeFault("the worker exited before the handshake was over")
            self.hello = self._opened.result()
        self._stop_timer()

    def _handshake_over(self, limit: asyncio.Timeout, due: float) -> None:
        now = self._loop.time()
        if now - due > JUMP:
            # The host stood still (a suspended machine, a blocked loop): that says nothing about the worker.
            due = now + self._config.handshake
            self._timer = self._loop.call_at(due, self._handshake_over, limit, due)
        else:
            limit.reschedule(now)

    def _admit(self, peer: Peer) -> bool:
        """Return whether a connection comes from our child; any other process is not the worker's fault."""
        assert self.process is not None
        if peer.uid is not None and peer.uid != _uid():
            return False
        if peer.pid is not None and not self.process.owns(peer.pid):
            return False
        self._peer = peer
        return True

    def _hello(self, hello: Hello) -> None:
        """Check HELLO and answer it, in the very callback that read it."""
        process = self.process
        if self._opened.done() or process is None:
            return
        try:
            verify(
                hello,
                spec=self.spec,
                nonce=self._nonce,
                peer=self._peer,
                uid=_uid(),
                descends=process.owns(hello.pid),
                revision=self._revision,
            )
            self._channel.send(HelloAck(v=VERSION, accept=True, max_frame=self._channel.connection.max_frame))
        except (HandshakeFault, SynapseError, LocalProtocolError) as exc:
            self._channel.abort()
            self._opened.set_exception(exc)
            return
        process.worker_pid = hello.pid
        self._engine = hello.engine.engine
        self._opened.set_result(hello)

    # --- exchanges ---------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """True when a model is loaded and nothing is wrong."""
        return self.model_ref is not None and not self.dead

    def next_req_id(self) -> str:
        """Return a fresh request id of this generation."""
        self._serial += 1
        return f"{self.generation}-{self._serial}"

    def begin(self, exchange: Exchange) -> None:
        """Send a request; its waiter resolves through the sink. LocalProtocolError: nothing was written."""
        assert self.open is None
        request = exchange.request
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
        if self.dead or exchange is None:
            return
        now = self._loop.time()
        if exchange.deadline is not None and now >= exchange.deadline:
            exchange.deadline = None
            self._sink.overdue(exchange)
        if self._watchdog.expired(now, late=now - self._due):
            self._fail("silence", f"the worker showed no completed work for {self._watchdog.window:g} s")
            return
        due = self._watchdog.deadline
        assert due is not None
        self._arm(due if exchange.deadline is None else min(due, exchange.deadline))

    def _event(self, event: Event) -> None:
        if self.dead:
            return
        match event:
            case ReplyReceived():
                exchange, self.open = self.open, None
                self._watchdog.stop(self._loop.time())
                if exchange is None:
                    return
                if self._channel.sending:
                    self.open = exchange
                    self._counters.reject("out_of_turn")
                    self._fail("protocol", "the worker answered before it had read the whole request")
                    return
                self._sink.replied(self, exchange, event.reply, event.payload)
            case ProgressReceived():
                self.progress = event
                self._watchdog.progress(event.progress.phase, self._loop.time())
                due = self._watchdog.deadline
                if due is not None and self._due > due:
                    # The switch from a long window to a short one.
                    self._arm(due)
                self._sink.alive(self)
            case ReplyStarted():
                self._watchdog.header(self._loop.time())
            case HelloReceived():
                self._hello(event.hello)

    # --- death -------------------------------------------------------------------------------------------------------

    def _violated(self, exc: RemoteProtocolError) -> None:
        self._counters.reject(exc.reason)
        self._channel.abort()
        if self._opened.done():
            self._fail("protocol", f"the worker broke the protocol: {exc}")
        elif isinstance(exc, VersionMismatch):
            self._opened.set_exception(refused_version(self.spec, exc))
        else:
            self._opened.set_exception(HandshakeFault(str(exc)))

    def _lost(self) -> None:
        self._ended = True
        if self._opened.done():
            where = "during a request" if self.open is not None else "while idle"
            torn = ", inside a frame" if self._channel.connection.mid_frame else ""
            if torn:
                self._counters.reject("torn")
            self._fail("eof", f"the worker's connection ended {where}{torn}")
        else:
            self._opened.set_exception(HandshakeFault("the worker closed the connection before HELLO"))

    def _exited(self) -> None:
        """The process is reaped and its group killed; the end of the stream, with any last reply before it, follows."""
        if self._opened.done() and not self.dead:
            self._loop.call_later(EXIT_GRACE, self._fail, "exit", "the worker exited")

    def _fail(self, cause: Cause, message: str) -> None:
        """End this generation for the first fault; later ones are consequences."""
        if self.dead or not self._opened.done():
            return
        self.dead = True
        self._channel.deafen()
        self._burial = self._loop.create_task(self._die(cause, message))

    async def _die(self, cause: Cause, message: str) -> None:
        exchange = self.open
        timer = None
        if exchange is not None and exchange.deadline is not None:
            # A burial may take seconds; the caller's deadline holds all the same.
            timer = self._loop.call_at(exchange.deadline, self._sink.overdue, exchange)
        death = await self._bury(cause, message)
        if timer is not None:
            timer.cancel()
        self.open = None
        self._sink.died(self, death, exchange)

    async def _bury(self, cause: Cause, message: str) -> Death:
        """Kill, reap, drain the pipes and write the diagnosis."""
        self.dead = True
        self._stop_timer()
        process = self.process
        assert process is not None
        if cause == "silence" and self.spec.own_worker:
            # Before the connection closes: a worker whose peer is gone ends at once, without a word.
            process.dump()
            await process.wait(DUMP_GRACE)
        self._shut()
        if self._ended and await process.wait(EXIT_GRACE) and cause == "eof":
            cause, message = "exit", message.replace("connection ended", "process ended")
        own_end = cause != "silence" and not process.running
        reaped = await process.destroy()
        returncode = process.returncode
        if not reaped:
            _log.error("worker can't be killed: lane=%s pid=%d", self.spec.lane_id, process.pid)
        death = Death(
            generation=self.generation,
            cause=cause,
            message=message,
            pid=process.pid,
            # What we did to it explains nothing: only its own end is told.
            exit_status=returncode if own_end and returncode is not None and returncode >= 0 else None,
            signal=signal_name(returncode) if own_end else None,
            log_tail=self._ring.render(),
            reaped=reaped,
        )
        self._forwarder.restart()
        _log.warning(
            "worker lost: lane=%s generation=%d pid=%d cause=%s %s",
            self.spec.lane_id,
            self.generation,
            process.pid,
            cause,
            death.describe(),
        )
        return death

    async def _abandon(self) -> None:
        """Close, kill and reap without a strike."""
        self._shut()
        if self.process is not None:
            await self.process.destroy()

    async def stop(self, grace: float) -> None:
        """Planned end: SHUTDOWN to an idle worker and *grace* seconds to obey, else SIGKILL. Never a strike."""
        if self._burial is not None:
            await self.buried()
            return
        self.dead = True
        self._stop_timer()
        process = self.process
        if process is None:
            return
        idle = self.open is None or isinstance(self.open.request, Ping)
        if idle and not self._channel.closed and self._channel.connection.state in (State.IDLE, State.BUSY):
            with suppress(LocalProtocolError):
                self._channel.send(Shutdown())
                await process.wait(grace)
        self._channel.abort()
        await process.destroy()

    async def buried(self, timeout: float | None = None) -> None:
        """Wait until an unplanned death is complete and charged, at most *timeout* seconds."""
        if self._burial is not None:
            await asyncio.wait({self._burial}, timeout=timeout)

    @property
    def buried_now(self) -> bool:
        """True once an unplanned death is charged; the process may still be unconfirmed (``Death.reaped``)."""
        return self._burial is not None and self._burial.done()

    def _shut(self) -> None:
        self.dead = True
        self._channel.abort()
        self._stop_timer()
        if not self._opened.cancel():
            # Looked at, so that it isn't reported as never retrieved.
            self._opened.cancelled() or self._opened.exception()

    def _stop_timer(self) -> None:
        self._watchdog.stop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _no_resources(self, exc: OSError) -> EngineCrashed:
        return EngineCrashed(
            f"lane {self.spec.lane_id}: the host could not start a worker: {exc.strerror or exc}",
            details={
                "lane_id": self.spec.lane_id,
                "stage": "spawn",
                "cause": "handshake",
                "errno": errno.errorcode.get(exc.errno or 0),
                "quarantined": False,
            },
        )

    def _output(self, stream: Stream, data: bytes) -> None:
        self._ring.write(stream, data)
        if self._journal is not None:
            self._journal.write(stream, data)
        self._forwarder.feed(self.worker_id, stream, data, self._loop.time())


async def _first(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of *futures* is done; cancels none."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def _uid() -> int | None:
    return os.getuid() if sys.platform != "win32" else None
