"""The request loop: one thread receives, computes and replies.

Theory of operation. A :class:`Worker` owns the channel to its host, the dispatcher with the loaded models, and the peer
watcher. The main thread does everything but watch: signals, faulthandler and native contexts are at home there, and no
event loop lies between a request and the model. The order of an exchange:

1. the JSON and its raw frame are read completely, also of a request that will be refused;
2. the dispatcher answers; finished work leaves as PROGRESS, from whatever thread reports it, under the channel's lock;
3. the reporter is closed and header and payload are sent in one hold of that same lock, so that no frame follows the
   reply or comes between its two parts;
4. the next frame is read. SHUTDOWN is simply one of them, and closes the models before the process ends.

At the same time runs one daemon thread, the peer watcher. It sleeps until the host's end of the connection is closed,
reads nothing, and acts only while the dispatcher answers a request: then it ends the process with status 0, also in the
middle of a C call that released the GIL. Outside of that the main thread is in a read and sees the end itself, so that
a torn frame still exits with 1. A send that fails inside a native callback may have left half a frame, and the callback
loses the exception: it is kept, nothing more is written, and the terminal reply raises it instead.

An EngineError is answered and the worker lives. Any other exception is a bug or a lost device: the process ends, and
the host starts another one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import UNSET

from engines.protocol.connection import Connection
from engines.protocol.framing import ReusedBuffer
from engines.protocol.messages import (
    DEFAULT_MAX_FRAME,
    VERSION,
    AnyRequest,
    EngineInfo,
    Hello,
    HelloAck,
    Phase,
    Progress,
    Shutdown,
    phases,
)
from engines.protocol.rules import PeerClosed, RequestReceived, Role
from engines.runtime.dispatch import Answer, Dispatcher
from engines.runtime.progress import ProgressReporter
from engines.runtime.transport import (
    HANDSHAKE_S,
    Channel,
    PeerGone,
    PeerWatcher,
    SocketTransport,
    Transport,
    TransportFailed,
)

if TYPE_CHECKING:
    from engines.runtime.engine import Engine, EngineIdentity


class DeviceLostExit(Exception):
    """The last answer said that the device is gone; the process ends with status 1."""


def hello(identity: EngineIdentity, nonce: str) -> Hello:
    """Return the HELLO of *identity*; absent fields are omitted, never null."""
    return Hello(
        v=VERSION,
        nonce=nonce,
        engine=EngineInfo(engine=identity.engine, version=identity.version, build_flags=identity.build_flags),
        pid=os.getpid(),
        max_frame=DEFAULT_MAX_FRAME,
        manifest_digest=identity.manifest_digest if identity.manifest_digest is not None else UNSET,
        kernel_revision=identity.kernel_revision if identity.kernel_revision is not None else UNSET,
        packed=identity.packed if identity.packed is not None else UNSET,
    )


class Worker:
    """One worker on one connection.

    *exit* ends the process at once (``os._exit``). It is used when the host is gone: there may be a native call that
    can't be interrupted, and nobody is left to clean up for. SHUTDOWN is the end that closes models first.
    """

    def __init__(
        self,
        transport: Transport,
        engine: Engine,
        identity: EngineIdentity,
        *,
        clock: Callable[[], float] = time.monotonic,
        exit: Callable[[int], object] = os._exit,
    ) -> None:
        self.channel = Channel(transport, Connection(Role.WORKER, allocate=ReusedBuffer()))
        self.engine = engine
        self.identity = identity
        self.dispatcher = Dispatcher(engine, identity, clock=clock)
        self._clock = clock
        self._exit = exit
        self._watcher = PeerWatcher(transport.wait_gone, exit, wakes=not isinstance(transport, SocketTransport))
        self._fault: BaseException | None = None

    def greet(self, nonce: str) -> None:
        """Send HELLO. Raises PeerGone."""
        self.channel.send(hello(self.identity, nonce))

    def await_ack(self, *, deadline: float | None = None) -> bool:
        """Wait for HELLO_ACK; False when the host closed instead, which is an orderly end.

        *deadline* is a ``time.monotonic()`` value, by default 10 s from now; after it TransportFailed is raised.
        Raises RemoteProtocolError when the host refuses or sends anything else.
        """
        transport = self.channel.transport
        transport.set_deadline(time.monotonic() + HANDSHAKE_S if deadline is None else deadline)
        try:
            event = self.channel.receive()
        except TimeoutError as exc:
            raise TransportFailed("no HELLO_ACK within the handshake deadline") from exc
        transport.set_deadline(None)
        if isinstance(event, PeerClosed):
            return False
        assert isinstance(event, HelloAck), f"{event} before HELLO_ACK"
        self.dispatcher.max_frame = event.max_frame
        return True

    def serve(self) -> None:
        """Answer requests until SHUTDOWN, then close the models. The end of the stream ends the process at once.

        Raises RemoteProtocolError when the stream can't be trusted, DeviceLostExit after a sticky device error, and
        whatever bug an engine has.
        """
        self._watcher.start()
        try:
            self._serve()
        except PeerGone:
            # Spec (protocol-v3, 1): EOF between frames is orderly, "also when it comes in mid-exchange".
            self._exit(0)
        finally:
            self.channel.transport.shutdown()
            self._watcher.stop()

    def _serve(self) -> None:
        while True:
            event = self.channel.receive()
            match event:
                case RequestReceived(request=request, payload=payload):
                    self.exchange(request, payload)
                case Shutdown():
                    self.dispatcher.close()
                    self.engine.close()
                    return
                case PeerClosed():
                    self._exit(0)
                    return
                case _:
                    raise AssertionError(f"{event} while serving")

    def exchange(self, request: AnyRequest, payload: memoryview | None) -> None:
        """Compute and send the terminal reply of one request."""

        def emit(completed: int, phase: Phase) -> None:
            self._emit(request.req_id, completed, phase)

        first = phases(type(request), self.identity.engine)[0]
        progress = ProgressReporter(emit, phase=first, clock=self._clock, lock=self.channel.lock)
        # The watcher covers the computing alone: once the host has the reply it may send and close as it likes, and a
        # frame torn by that must still be seen by the next read. A send finds out by itself that the host is gone.
        with self._watcher:
            answer = self.dispatcher.handle(request, payload, progress)
        self.finish(progress, answer)

    def finish(self, progress: ProgressReporter, answer: Answer) -> None:
        """Close *progress* and send *answer* in one hold of the lock, so that no frame follows or splits the reply."""
        with self.channel.lock:
            progress.close()
            if self._fault is not None:
                raise self._fault
            self.channel.send(answer.reply, answer.payload)
        if self.dispatcher.device_lost:
            raise DeviceLostExit("the device is lost; a fresh worker is needed")

    def _emit(self, req_id: str, completed: int, phase: Phase) -> None:
        if self._fault is not None:
            raise self._fault
        try:
            self.channel.send(Progress(req_id=req_id, completed=completed, phase=phase))
        except PeerGone:
            # We may be inside a native callback, where an exception would be lost and the call run to its end.
            self._exit(0)
            raise
        except BaseException as exc:
            # Lost in a native callback too, after half a frame perhaps: nothing more is written, and the terminal
            # reply raises this instead.
            self._fault = exc
            raise
