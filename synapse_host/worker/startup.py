"""The birth of a worker generation: spawn, connection, HELLO and its ACK, within one deadline."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import sys
from asyncio import FIRST_COMPLETED
from collections.abc import Callable
from contextlib import suppress

from msgspec import Struct, field

from engines.protocol.errors import LocalProtocolError, RemoteProtocolError, VersionMismatch
from engines.protocol.messages import VERSION, Hello, HelloAck
from synapse_host.config import HostConfig
from synapse_host.errors import BackendMissing, SynapseError
from synapse_host.placement import interpreter
from synapse_host.placement.child import worker_environment
from synapse_host.placement.spec import LaneSpec
from synapse_host.worker.counters import LaneCounters
from synapse_host.worker.handshake import HandshakeFault, Peer, refusal, refused_release, verify
from synapse_host.worker.listener import Listener, RuntimeDirectory
from synapse_host.worker.output import LogRing
from synapse_host.worker.process import Output, WorkerProcess
from synapse_host.worker.transport import Channel
from synapse_host.worker.watchdog import JUMP


class LaneContext(Struct, frozen=True):
    """What everything that runs one lane works with.

    Attributes:
        spec: what the worker is started with; a generation may have another one than the lane itself.
        runtime: where the worker's socket lies.
        counters: plain integers, for :mod:`synapse_host.serve.metrics`.
        journal: the last output of the lane's workers, across generations.
    """

    spec: LaneSpec
    config: HostConfig
    runtime: RuntimeDirectory
    counters: LaneCounters = field(default_factory=LaneCounters)
    journal: LogRing = field(default_factory=LogRing)


class Birth:
    """One spawn up to its ACK. What arrives on *channel* before that goes to :meth:`greet` or :meth:`fault`.

    *revision*: the kernel revision of the lane's previous generation, if there was one.
    """

    def __init__(
        self,
        context: LaneContext,
        *,
        worker_id: str,
        channel: Channel,
        revision: str | None,
        output: Output,
        on_exit: Callable[[], None],
    ) -> None:
        self.process: WorkerProcess | None = None
        self._spec = context.spec
        self._limit = context.config.handshake
        self._runtime = context.runtime
        self._worker_id = worker_id
        self._channel = channel
        self._revision = revision
        self._output = output
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._nonce = secrets.token_hex(8)
        self._peer = Peer(None, None)
        self._opened: asyncio.Future[Hello] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def over(self) -> bool:
        """True once HELLO was answered, or can't be any more."""
        return self._opened.done()

    async def run(self) -> Hello:
        """Spawn and shake hands; whatever it raises, the listener is closed, and the child is the caller's to end.

        Raises HandshakeFault, ProtocolError or TimeoutError (a strike), LaneRefused (a deployment error),
        BackendMissing (no such program), InvalidRequest (the socket's path is taken) or OSError (no descriptors, no
        memory).
        """
        deadline = self._loop.time() + self._limit
        listener = self._listen()
        try:
            self.process = self._spawn(listener)
            return await self._shake_hands(listener, self.process, deadline)
        finally:
            listener.close()

    def _listen(self) -> Listener:
        if sys.platform == "win32":
            from synapse_host.worker import windows

            return windows.listen(self._runtime.path, self._worker_id)
        return self._runtime.listen(self._worker_id)

    def _spawn(self, listener: Listener) -> WorkerProcess:
        spec = self._spec
        if spec.own_worker and (versions := interpreter.changed_release()) is not None:
            raise refused_release(spec, *versions)
        command = [*spec.command, *listener.arguments, "--nonce", self._nonce, "--device", spec.device]
        if spec.owned and spec.manifest_path is not None:
            command += ["--manifest", str(spec.manifest_path)]
        if spec.packed_widths:
            command += ["--packed", ",".join(str(width) for width in spec.packed_widths)]
        try:
            return WorkerProcess(
                command,
                env=worker_environment(self._worker_id, spec.env),
                cwd=spec.cwd,
                output=self._output,
                on_exit=self._on_exit,
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

    async def _shake_hands(self, listener: Listener, process: WorkerProcess, deadline: float) -> Hello:
        try:
            async with asyncio.timeout(None) as limit:
                self._timer = self._loop.call_at(deadline, self._late, limit, deadline)
                connecting = self._loop.create_task(listener.connect(self._channel, self._admit))
                try:
                    await asyncio.wait((connecting, process.exited), return_when=FIRST_COMPLETED)
                    if not connecting.done():
                        raise HandshakeFault("the worker exited before it connected")
                    connecting.result()
                finally:
                    if not connecting.done():
                        connecting.cancel()
                        with suppress(asyncio.CancelledError):
                            await connecting
                await asyncio.wait((self._opened, process.exited), return_when=FIRST_COMPLETED)
                if not self._opened.done():
                    raise HandshakeFault("the worker exited before the handshake was over")
                return self._opened.result()
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _late(self, limit: asyncio.Timeout, due: float) -> None:
        now = self._loop.time()
        if now - due > JUMP:
            # The host stood still (a suspended machine, a blocked loop): that says nothing about the worker.
            due = now + self._limit
            self._timer = self._loop.call_at(due, self._late, limit, due)
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

    def greet(self, hello: Hello) -> None:
        """Check HELLO and answer it, in the very callback that read it."""
        process = self.process
        if self.over or process is None:
            return
        try:
            verify(
                hello,
                spec=self._spec,
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
        self._opened.set_result(hello)

    def fault(self, exc: RemoteProtocolError | MemoryError | None) -> None:
        """The worker broke the protocol before its ACK, or closed the connection (None); or the host has no memory."""
        if isinstance(exc, VersionMismatch):
            self._opened.set_exception(refusal(self._spec, "version", exc.expected, exc.observed))
        elif isinstance(exc, MemoryError):
            self._opened.set_exception(exc)
        else:
            what = "the worker closed the connection before HELLO" if exc is None else str(exc)
            self._opened.set_exception(HandshakeFault(what))

    def give_up(self) -> None:
        """Nobody waits for HELLO any more."""
        if not self._opened.cancel() and not self._opened.cancelled():
            self._opened.exception()  # looked at, so that it isn't reported as never retrieved


def _uid() -> int | None:
    return os.getuid() if sys.platform != "win32" else None
