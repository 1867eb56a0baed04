"""A real worker loop on a thread of this process, and the host's end of its socketpair."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType

from engines.protocol.messages import DEFAULT_MAX_FRAME, Load, Loaded
from engines.runtime import main as runtime_main
from engines.runtime.engine import Engine
from engines.runtime.transport import SocketTransport
from engines.runtime.worker import Worker
from tests.support.peer import DIGEST, NONCE, HostEnd

JOIN_S = 30.0


class WorkerThread:
    """``status`` is what the process would end with, ``exits`` what os._exit would have been called with."""

    def __init__(
        self,
        engine: Engine,
        *,
        clock: Callable[[], float] | None = None,
        wrap: Callable[[socket.socket], socket.socket] = lambda sock: sock,
        max_frame: int = DEFAULT_MAX_FRAME,
    ) -> None:
        ours, theirs = socket.socketpair()
        self.end = HostEnd(ours)
        self.worker_socket = theirs
        self.exits: list[int] = []
        self.status: int | None = None
        self.bug: BaseException | None = None
        extra = {} if clock is None else {"clock": clock}
        self.worker = Worker(
            SocketTransport(wrap(theirs)),
            engine,
            engine.identity(),
            max_frame=max_frame,
            exit=self.exits.append,
            **extra,
        )
        self._thread = threading.Thread(target=self._run, name="worker-under-test", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.status = runtime_main._guarded("worker-under-test", self._serve, self.exits.append)
        except BaseException as exc:  # a bug of an engine: the test asks for it
            self.bug = exc

    def _serve(self) -> None:
        with contextlib.closing(self.worker.channel):
            self.worker.greet(NONCE)
            if self.worker.await_ack():
                self.worker.serve()

    def ready(self) -> WorkerThread:
        """Shake hands and load one model."""
        self.end.shake_hands()
        reply = self.end.call(Load("load", "path", DIGEST, "gguf")).reply
        assert isinstance(reply, Loaded)
        return self

    def join(self) -> int | None:
        """Wait for the worker's end and return its status."""
        self._thread.join(JOIN_S)
        assert not self._thread.is_alive(), "the worker hangs"
        return self.status

    def __enter__(self) -> WorkerThread:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end.close()
        self.join()
        self.worker_socket.close()
