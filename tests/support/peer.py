"""A worker process and a blocking host end of its socket: the smallest host there is, for tests of workers."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

from engines.protocol.connection import Connection
from engines.protocol.events import Event, HelloReceived, PeerClosed, ProgressReceived, ReplyReceived, ReplyStarted
from engines.protocol.messages import (
    DEFAULT_MAX_FRAME,
    AnyReply,
    AnyRequest,
    Buffer,
    EmbedBatch,
    Hello,
    HelloAck,
    Item,
    Load,
    Loaded,
    Pooling,
    Progress,
    Shutdown,
)
from engines.protocol.states import Role
from tests.support.scripted import command

NONCE = "0123456789abcdef"
DIGEST = "sha256:" + "0" * 64
IDS = struct.pack("<2i", 7, 8)
"""The payload of :func:`embed`."""
TIMEOUT_S = 60.0


class Outcome(NamedTuple):
    """A finished exchange: the terminal reply, its raw frame, the progress before it."""

    reply: AnyReply
    payload: memoryview | None
    progress: list[Progress]


class HostEnd:
    """The host's end of a connected socket."""

    def __init__(self, sock: socket.socket, *, max_frame: int = DEFAULT_MAX_FRAME) -> None:
        self.socket = sock
        self.socket.settimeout(TIMEOUT_S)
        self.connection = Connection(Role.HOST, max_frame=max_frame)
        self.hello: Hello | None = None

    def event(self) -> Event:
        """Return the next event; RemoteProtocolError and PeerClosed come as the connection says."""
        while (event := self.connection.next_event()) is None:
            try:
                count = self.socket.recv_into(self.connection.get_buffer())
            except ConnectionResetError:
                count = 0
            if count == 0:
                return self.connection.receive_eof()
            self.connection.buffer_updated(count)
        return event

    def send(self, message: HelloAck | AnyRequest | Shutdown, payload: Buffer | None = None) -> None:
        """Write one message and its raw frame."""
        for buffer in self.connection.send(message, payload):
            self.socket.sendall(buffer)

    def shake_hands(self, *, max_frame: int = DEFAULT_MAX_FRAME) -> Hello:
        """Read HELLO, answer ACK, return HELLO."""
        event = self.event()
        assert isinstance(event, HelloReceived), event
        self.hello = event.hello
        self.connection.max_frame = min(max_frame, self.connection.max_frame)
        self.send(HelloAck(v=3, accept=True, max_frame=self.connection.max_frame))
        return event.hello

    def finish(self) -> Outcome:
        """Read until the terminal reply of the running exchange."""
        progress: list[Progress] = []
        while True:
            event = self.event()
            match event:
                case ProgressReceived():
                    progress.append(event.progress)
                case ReplyReceived():
                    return Outcome(event.reply, event.payload, progress)
                case ReplyStarted():
                    pass
                case _:
                    raise AssertionError(f"{event} instead of a reply")

    def call(self, request: AnyRequest, payload: Buffer | None = None) -> Outcome:
        """Run one exchange to its end."""
        self.send(request, payload)
        return self.finish()

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


class _Drain(threading.Thread):
    """Reads a child's pipe to its end, so that the child never blocks on it."""

    def __init__(self, pipe: IO[bytes] | None) -> None:
        super().__init__(daemon=True)
        assert pipe is not None
        self._pipe = pipe
        self._data = b""
        self.start()

    def run(self) -> None:
        with self._pipe:
            self._data = self._pipe.read()

    def result(self) -> bytes:
        """Wait for the end of the pipe and return what came."""
        self.join(TIMEOUT_S)
        return self._data


class WorkerProcess:
    """A spawned worker, connected. As a context manager it kills and reaps whatever is left."""

    def __init__(
        self,
        command: Sequence[str],
        directory: Path,
        *,
        device: str | None = "cpu",
        extra: Sequence[str] = (),
        env: dict[str, str] | None = None,
        nonce: str = NONCE,
    ) -> None:
        self.path = directory / "worker.sock"
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(str(self.path))
            listener.listen(1)
            listener.settimeout(TIMEOUT_S)
            flags = ["--socket", str(self.path), "--nonce", nonce, *(["--device", device] if device else []), *extra]
            self.process = subprocess.Popen(
                [*command, *flags],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env=env,
            )
            self._drains = [_Drain(self.process.stdout), _Drain(self.process.stderr)]
            try:
                sock = self._accept(listener)
            except BaseException:
                self._reap()
                raise
        finally:
            listener.close()
            self.path.unlink(missing_ok=True)
        self.end = HostEnd(sock)

    def _accept(self, listener: socket.socket) -> socket.socket:
        listener.settimeout(0.05)
        for _ in range(int(TIMEOUT_S / 0.05)):
            try:
                return listener.accept()[0]
            except TimeoutError:
                if self.process.poll() is not None:
                    text = f"the worker ended with {self.process.returncode}: {self.stderr()}"
                    raise AssertionError(text) from None
        raise AssertionError("the worker doesn't connect")

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self.process.pid

    def load(self, path: str | Path, digest: str, *, format: str = "gguf", config: dict[str, str] | None = None) -> str:
        """LOAD an artifact and return its model_ref."""
        request = Load(
            req_id="load-0",
            artifact_path=str(path),
            artifact_digest=digest,
            format=format,
            runtime_config=config or {},
        )
        reply = self.end.call(request).reply
        assert isinstance(reply, Loaded), reply
        return reply.model_ref

    def stop(self) -> int:
        """Send SHUTDOWN and return the exit status."""
        self.end.send(Shutdown())
        return self.wait()

    def wait(self, timeout: float = TIMEOUT_S) -> int:
        """Wait for the exit and return its status."""
        return self.process.wait(timeout)

    def stdout(self) -> bytes:
        """Return what the worker wrote to stdout; only after its exit."""
        return self._drains[0].result()

    def stderr(self) -> str:
        """Return what the worker wrote to stderr; only after its exit."""
        return self._drains[1].result().decode(errors="replace")

    def closed(self) -> bool:
        """Read the end of the stream; True when it is an orderly one."""
        return isinstance(self.end.event(), PeerClosed)

    def _reap(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end.close()
        self._reap()
        for drain in self._drains:
            drain.result()


def ready(script: dict[str, Any], directory: Path, **options: Any) -> WorkerProcess:
    """Return a scripted worker with the handshake and one LOAD behind it."""
    worker = WorkerProcess(command(script), directory, **options)
    worker.end.shake_hands()
    worker.load("x", DIGEST)
    return worker


def embed(ref: str = "llama:0") -> EmbedBatch:
    """Return a request to embed IDS."""
    return EmbedBatch("e", ref, Pooling.MEAN, True, [Item("0", 2)])
