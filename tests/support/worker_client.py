"""The host's side of the wire for one real worker process: blocking, strict, and on purpose not `Connection`.

It checks every reply against the rules of protocol-v3 by itself, so that it can be an oracle for a worker, and it can
send what a correct host never would.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from engines.protocol import messages as m
from engines.protocol.decoding import decode_from_worker, decode_hello

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120
_LENGTH = struct.Struct("<I")


class WorkerEnded(Exception):
    """The stream ended where a frame was due."""


@dataclass
class Exchange:
    """What a worker answered: the terminal reply, its raw frame, and the progress before it."""

    reply: m.Message
    raw: bytes | None = None
    progress: list[m.Progress] = field(default_factory=list)

    @property
    def floats(self) -> np.ndarray:
        """The raw frame as float32; (n, dims) behind VECTORS."""
        assert not isinstance(self.reply, m.Err), self.reply
        assert self.raw is not None
        values = np.frombuffer(self.raw, dtype="<f4")
        return values.reshape(-1, self.reply.dims) if isinstance(self.reply, m.Vectors) else values

    @property
    def code(self) -> str:
        """The ERR code."""
        assert isinstance(self.reply, m.Err), self.reply
        return self.reply.code.value


def ids_bytes(rows: Sequence[Sequence[int]]) -> bytes:
    """Return rows of ids end to end, int32 little-endian."""
    return np.concatenate([np.asarray(row, dtype="<i4") for row in rows]).tobytes() if rows else b""


class WorkerClient:
    """Spawns a worker, shakes hands, and talks to it. A context manager; nothing survives it.

    Without *handshake* HELLO is still to be read.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        device: str = "cpu",
        arguments: Sequence[str] = (),
        env: dict[str, str] | None = None,
        max_frame: int = m.DEFAULT_MAX_FRAME,
        handshake: bool = True,
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="sw-"))
        self._max_frame = max_frame
        self.nonce = secrets.token_hex(8)
        self.stderr_path = self._folder / "stderr"
        self.stdout_path = self._folder / "stdout"
        self._count = 0
        path = str(self._folder / "w.sock")
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.bind(path)
                listener.listen(1)
                listener.settimeout(30)
                with self.stderr_path.open("wb") as err, self.stdout_path.open("wb") as out:
                    self.process = subprocess.Popen(
                        [*command, "--socket", path, "--nonce", self.nonce, "--device", device, *arguments],
                        cwd=ROOT,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=err,
                        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
                        start_new_session=True,
                    )
                try:
                    self.socket, _ = listener.accept()
                except TimeoutError:
                    raise AssertionError(f"no connection: {self.stderr()}") from None
            self.socket.settimeout(TIMEOUT_S)
            if handshake:
                self.hello: m.Hello = decode_hello(self.read_frame())
                self.write_frame(m.encode(m.HelloAck(v=m.VERSION, accept=True, max_frame=max_frame)))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> WorkerClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # --- frames -------------------------------------------------------------------------------------------------------

    def write_frame(self, payload: bytes) -> None:
        """Send one frame, whatever is in it."""
        self.socket.sendall(_LENGTH.pack(len(payload)) + payload)

    def read_frame(self) -> bytes:
        """Receive one frame's payload."""
        (length,) = _LENGTH.unpack(self._exactly(4))
        assert length <= self._max_frame, f"a frame of {length} bytes"
        return self._exactly(length)

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            piece = self.socket.recv(min(count - len(data), 1 << 20))
            if not piece:
                raise WorkerEnded(f"stream ended after {len(data)} of {count} bytes\n{self.stderr()}")
            data += piece
        return bytes(data)

    # --- exchanges ----------------------------------------------------------------------------------------------------

    def next_id(self) -> str:
        """Return a fresh req_id."""
        self._count += 1
        return f"r{self._count}"

    def call(self, request: m.Request, raw: bytes | None = None) -> Exchange:
        """Send *request* and its raw frame, and return the answer after checking every rule of an exchange."""
        self.write_frame(m.encode(request))
        if raw is not None:
            self.write_frame(raw)
        return self.answer(request)

    def answer(self, request: m.Request) -> Exchange:
        """Read the answer to *request*."""
        allowed = list(m.phases(type(request), self.hello.engine.engine))
        seen: list[m.Progress] = []
        while isinstance(message := decode_from_worker(self.read_frame()), m.Progress):
            assert message.req_id == request.req_id
            assert message.completed > (seen[-1].completed if seen else 0), f"{message} after {seen[-1:]}"
            while allowed and message.phase is not allowed[0]:
                allowed.pop(0)
            assert allowed, f"{message.phase} in {type(request).__name__} after {[p.phase for p in seen]}"
            seen.append(message)
        if not isinstance(message, m.Err):
            assert message.req_id == request.req_id
            assert isinstance(message, m.REPLY_TO[type(request)])
        raw = None
        if type(message).payload is not None:
            raw = self.read_frame()
            if isinstance(request, m.EmbedBatch):
                assert message.n == len(request.items)
                assert len(raw) == 4 * message.n * message.dims
            elif isinstance(request, m.Rerank):
                assert len(raw) == 4 * len(request.candidates)
        return Exchange(message, raw, seen)

    def ping(self) -> m.Pong:
        """PING; the worker must answer PONG."""
        reply = self.call(m.Ping(req_id=self.next_id())).reply
        assert isinstance(reply, m.Pong), reply
        return reply

    def load(self, path: Path | str, digest: str, format: str = "gguf", **config: object) -> Exchange:
        """LOAD."""
        values = {key: str(value) for key, value in config.items()}
        return self.call(m.Load(self.next_id(), str(path), digest, format, values))

    def unload(self, model_ref: str) -> Exchange:
        """UNLOAD."""
        return self.call(m.Unload(req_id=self.next_id(), model_ref=model_ref))

    def embed(
        self,
        model_ref: str,
        rows: Sequence[Sequence[int]],
        *,
        pooling: m.Pooling = m.Pooling.MEAN,
        normalize: bool = True,
        counts: Sequence[int] | None = None,
        raw: bytes | None = None,
        packed_width: int | m.UnsetType = m.UNSET,
    ) -> Exchange:
        """EMBED_BATCH; *counts* and *raw* may lie."""
        lengths = [len(row) for row in rows] if counts is None else counts
        items = [m.Item(id=str(n), n_tokens=length) for n, length in enumerate(lengths)]
        request = m.EmbedBatch(self.next_id(), model_ref, pooling, normalize, items, packed_width=packed_width)
        return self.call(request, ids_bytes(rows) if raw is None else raw)

    def rerank(self, model_ref: str, query: Sequence[int], rows: Sequence[Sequence[int]]) -> Exchange:
        """RERANK."""
        candidates = [m.Segment(n_tokens=len(row)) for row in rows]
        return self.call(m.Rerank(self.next_id(), model_ref, len(query), candidates), ids_bytes([query, *rows]))

    # --- the end ------------------------------------------------------------------------------------------------------

    def shutdown(self) -> int:
        """Send SHUTDOWN and return the exit status."""
        self.write_frame(m.encode(m.Shutdown()))
        return self.process.wait(TIMEOUT_S)

    def hang_up(self) -> int:
        """Close the stream and return the exit status."""
        self.socket.close()
        return self.process.wait(TIMEOUT_S)

    def stderr(self) -> str:
        """What the worker wrote to stderr so far."""
        return self.stderr_path.read_text(errors="replace") if self.stderr_path.exists() else ""

    def stdout(self) -> str:
        """What the worker wrote to stdout so far."""
        return self.stdout_path.read_text(errors="replace")

    def close(self) -> None:
        """Kill what still runs and remove the files."""
        if hasattr(self, "socket"):
            self.socket.close()
        if hasattr(self, "process") and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def require_loaded(exchange: Exchange) -> m.Loaded:
    """Return LOADED or fail with the ERR."""
    assert isinstance(exchange.reply, m.Loaded), exchange.reply
    return exchange.reply


@contextlib.contextmanager
def module_worker(module: str, **keywords: Any) -> Iterator[WorkerClient]:
    """Run ``python -m <module>`` as a worker."""
    with WorkerClient([sys.executable, "-m", module], **keywords) as client:
        yield client
