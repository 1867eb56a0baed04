"""The real session against the real worker loop in one process: a worker on a thread stands in for the child.

Only the process is played. Runtime directory, listener, accept, peer credentials, asyncio transport, session, watchdog
and supervisor are the product's own, so is the worker's transport, loop and dispatcher. :class:`SteppedLoop` can jump
in time: a stall is found by the real watchdog without waiting for its window.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar
from unittest import mock

from engines.protocol.errors import EngineError, RemoteProtocolError
from engines.runtime.engine import WorkerOptions
from engines.runtime.main import identify
from engines.runtime.transport import PeerGone, SocketTransport, TransportFailed, connect_socket
from engines.runtime.worker import DeviceLostExit
from synapse_host.worker import startup as birth_module
from tests.support.scripted import Actions, Script, ScriptedWorker, scripted_engine

JOIN_S = 10.0


class SteppedLoop(asyncio.SelectorEventLoop):
    """A loop whose clock can be moved on."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = 0.0

    def time(self) -> float:
        return super().time() + self.offset

    async def step(self, seconds: float) -> None:
        """Let *seconds* pass at once, then run what is due."""
        self.offset += seconds
        for _ in range(5):
            await asyncio.sleep(0)


def stepped() -> SteppedLoop:
    """Return the running loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SteppedLoop)
    return loop


class Wire:
    """The worker's socket; a subclass spoils what goes through. ``waiting`` is true while the worker reads nothing."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.waiting = False

    def recv_into(self, view: memoryview) -> int:
        self.waiting = True
        try:
            return self.socket.recv_into(view)
        finally:
            self.waiting = False

    def send(self, view: memoryview) -> int:
        return self.socket.send(view)

    def sendmsg(self, views: Sequence[memoryview]) -> int:
        return self.socket.sendmsg(views)

    def quiet(self) -> bool:
        """True when the worker waits for bytes and none are on their way to it."""
        try:
            return self.waiting and fcntl.ioctl(self.socket.fileno(), termios.FIONREAD, bytes(4)) == bytes(4)
        except OSError:
            return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.socket, name)


class ThreadProcess:
    """What a session knows of its worker's process, over a thread of this one."""

    script: ClassVar[Script] = {}
    wrap: Callable[[socket.socket], Any] = Wire
    made: ClassVar[list[ThreadProcess]] = []

    def __init__(
        self,
        command: Sequence[str],
        *,
        on_exit: Callable[[], None] = lambda: None,
        **_: Any,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_exit = on_exit
        self.exited: asyncio.Future[int] = self._loop.create_future()
        self.pid = os.getpid()
        self.worker_pid: int | None = None
        self.killed_at: float | None = None
        self.bug: BaseException | None = None
        self.wire: Any = None
        self._socket: socket.socket | None = None
        options = dict(zip(command[-6::2], command[-5::2], strict=True))
        self._thread = threading.Thread(target=self._run, args=(options,), name="worker-on-a-thread", daemon=True)
        self.made.append(self)
        self._thread.start()

    def _run(self, options: dict[str, str]) -> None:
        status = 1
        try:
            self._serve(options)
            status = 0
        except PeerGone:
            status = 0
        except (RemoteProtocolError, TransportFailed, DeviceLostExit, EngineError):
            pass
        except BaseException as exc:
            self.bug = exc
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end, status)

    def _serve(self, options: dict[str, str]) -> None:
        chosen = WorkerOptions(device=options["--device"])
        engine = scripted_engine(self.script, chosen)
        identity = identify(engine, chosen)
        transport = connect_socket(options["--socket"])
        self._socket = transport._socket
        if self.killed_at is not None:
            transport.shutdown()
        self.wire = type(self).wrap(transport._socket)
        worker = ScriptedWorker(SocketTransport(self.wire), engine, identity, exit=lambda status: None)
        with contextlib.closing(worker.channel):
            worker.greet(options["--nonce"])
            if worker.await_ack():
                worker.serve()

    def _end(self, status: int) -> None:
        self._thread.join(JOIN_S)
        self.exited.set_result(status)
        self._on_exit()

    # --- what WorkerProcess offers -----------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return not self.exited.done()

    @property
    def returncode(self) -> int | None:
        return self.exited.result() if self.exited.done() else None

    def owns(self, pid: int | None) -> bool:
        return pid == os.getpid()

    def dump(self) -> None:
        pass

    def kill(self) -> None:
        if self.killed_at is None:
            self.killed_at = time.monotonic()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    async def wait(self, limit: float) -> bool:
        # The grace after the end of a stream: a thread ends within a few turns of the loop, or not by itself.
        await asyncio.wait({self.exited}, timeout=limit if limit > 0.15 else 0.02)
        return not self.running

    async def destroy(self) -> bool:
        self.kill()
        return await self.wait(JOIN_S)


@contextlib.contextmanager
def threads_for_processes(script: Script) -> Iterator[type[ThreadProcess]]:
    """Let sessions start threads instead of processes; yields the class, whose ``wrap`` may be set."""

    class Made(ThreadProcess):
        made: ClassVar[list[ThreadProcess]] = []

    Made.script = Actions.script = script
    with mock.patch.object(birth_module, "WorkerProcess", Made):
        yield Made
