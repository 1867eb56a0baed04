"""A real worker process that does what a script says: legal work through ``engines.runtime``, illegal bytes past it.

    python tests/support/scripted.py SCRIPT --socket PATH --nonce HEX16 [--device D] [--manifest F] [--packed W,W]

SCRIPT is a JSON object, or the path of a file that holds one. In a matrix:
``worker: {command: [python3, tests/support/scripted.py, '{"rules": [...]}']}``; :func:`command` makes that list.
``{}`` is a well-behaved worker. Legal answers are pure functions of the request's ids (:func:`expected_vector`,
:func:`expected_score`, :func:`expected_sequence_score`, :func:`expected_text`), so a checker can tell whose answer it
got.

Keys of a script (all optional)
    engine          HELLO name: ``llama.cpp-worker`` (default), ``owned-cuda``, ``ane-coreml-worker``, or any other
    version, kernel_revision, manifest_digest (default: of --manifest, or 64 zeros), device (default: echo)
    packed          ``true`` (widths of --packed), or the whole HELLO object
    dims            8; ``buckets`` []; ``placement_share`` null
    story           bytes (hex) that GENERATE says from behind the last id 256 on, an id for each
    vectors         ``hash`` (default) or ``echo`` (a row is its own ids as floats, cut or zero-padded to dims)
    ignore          list of ``SIGTERM``, ``SIGINT``: signals to ignore;  ``EOF`` to switch the peer watcher off
    state           a file that counts the spawns (one byte each); with
    generations     a list of scripts laid over this one, key by key: the first spawn takes the first, and so on; the
                    last one stays. ``"generations": [CRASHING, CRASHING, {}]`` crashes twice, then is fine
    start           actions before connecting (``[{"sleep": 3600}]`` is the connector that never comes)
    hello           actions instead of sending HELLO (``[{"hello": {"v": 2}}]``)
    ready           actions after the ACK, before the first read
    rules           what to do about requests, see below
    shutdown        actions between SHUTDOWN and the exit;  ``eof``: between the end of the stream and the exit

A rule: ``{"on": "EMBED_BATCH" | [..] | "serving" | "*", "nth": n | [n, ..], "from": n, "first_id": id, "do": [..]}``.
``nth`` and ``from`` count this process's requests of that type from 1; ``first_id`` is the payload's first token id, so
a request can choose its fate. The first rule that matches wins. If its actions sent no terminal reply
(``reply``, ``err``), the legal answer follows.

Actions (objects of one key)
    sleep S             sleep without the GIL;  ``ccall S``: inside a C call without the GIL;  ``spin true``: for ever
                        in a C loop that keeps it
    progress {..}       frames ``completed`` [1, 2, ..] or ``from``, ``to``; ``every`` S between; ``phase``, ``req_id``
    reply {..}          the legal answer, bent: ``set`` and ``drop`` fields, ``nan`` index; ``stall``
                        {after, seconds} inside the payload; ``pause`` S, ``between`` [frames] behind it; ``times`` N
    err {code, msg}     an ERR frame, with any code
    frame OBJECT        any JSON frame; "$req_id" stands for the running request's id
    bytes HEX           bytes without a frame;  ``text STR``: the same from text
    hello {..}          HELLO with fields replaced (null omits); ``engine`` may be an object
    close true          shut the connection down and go on
    exit N              os._exit;  ``signal "SIGKILL"``: to this process;  ``abort true``
    raise STR           an exception out of the engine
    stderr / stdout     {bytes: N, text: "x"} or a string (with a newline)
    grandchild {..}     a child that keeps stdout open: ``seconds``, ``new_session``, ``pid_file``
    touch PATH          create a file;  ``wait_for PATH``: until it exists
    report PATH         write pid, session, environment, argv and descriptors as JSON
    thread [..]         run actions on another thread, at the same time
"""

from __future__ import annotations

import hashlib
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import (
    ANE_ENGINE,
    CUDA_ENGINE,
    LLAMA_ENGINE,
    OWNED_ENGINES,
    SERVING,
    AneAdmitPacked,
    AneAdmitShape,
    AneEvictPacked,
    AneEvictShape,
    Executable,
    FinishReason,
    Inventory,
    Load,
    PackedCapability,
    phases,
    type_name,
)
from engines.protocol.rules import State
from engines.runtime import main as runtime_main
from engines.runtime.dispatch import Answer
from engines.runtime.engine import (
    OWNED_SERVING,
    SEGMENT_SERVING,
    Engine,
    EngineIdentity,
    Model,
    ModelStatus,
    Probe,
    WorkerOptions,
)
from engines.runtime.progress import ProgressReporter
from engines.runtime.worker import Worker, hello

LENGTH = struct.Struct("<I")
ANE_SERVING = OWNED_SERVING | {AneAdmitShape, AneEvictShape, AneAdmitPacked, AneEvictPacked}
REF_PREFIX = {LLAMA_ENGINE: "llama", CUDA_ENGINE: "owned-cuda", ANE_ENGINE: "ane"}
Script = dict[str, Any]


# --- what a legal answer is, in plain Python, for checkers ----------------------------------------------------------


def _floats(data: bytes, count: int) -> list[float]:
    """*count* numbers in [-1, 1) that float32 holds exactly."""
    return [value / 32768 for value in struct.unpack(f"<{count}h", hashlib.shake_128(data).digest(2 * count))]


def _pack(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


def expected_vector(ids: Sequence[int], dims: int = 8) -> list[float]:
    """The vector of a row in ``hash`` mode."""
    return _floats(_pack(ids), dims)


def expected_score(query: Sequence[int], candidate: Sequence[int]) -> float:
    """The logit of RERANK."""
    return _floats(_pack(query) + b"|" + _pack(candidate), 1)[0]


def expected_sequence_score(ids: Sequence[int]) -> float:
    """The logit of RERANK_SEQUENCES."""
    return _floats(_pack(ids) + b"#", 1)[0]


def expected_text(ids: Sequence[int], max_tokens: int) -> tuple[str, list[int], FinishReason]:
    """Text, generated ids and finish reason of GENERATE: at most four tokens."""
    digest = hashlib.shake_128(_pack(ids) + b"g").digest(4)
    tokens = list(digest[: min(4, max_tokens)])
    return bytes(tokens).hex(), tokens, FinishReason.STOP if max_tokens > 4 else FinishReason.LENGTH


def command(script: Script | str | None = None) -> list[str]:
    """Return the ``worker.command`` that runs *script*."""
    text = script if isinstance(script, str) else msgspec.json.encode(script or {}).decode()
    return [sys.executable, str(Path(__file__).resolve()), text]


# --- the engine ------------------------------------------------------------------------------------------------------


class ScriptedModel(Model):
    """Answers by hashing ids; resident shapes are sets."""

    def __init__(self, script: Script) -> None:
        self.dims = script.get("dims", 8)
        self.buckets = tuple(script.get("buckets", ()))
        self._script = script
        self._echo = script.get("vectors") == "echo"
        self._shapes: set[int] = set()
        self._packed: set[int] = set()

    def embed(self, batch, *, pooling, normalize, packed_width, progress):  # type: ignore[no-untyped-def]
        import numpy as np

        if packed_width is not None and packed_width not in self._packed:
            raise EngineError(ErrorCode.SHAPE_NOT_ADMITTED, f"packed width {packed_width} is not resident")
        if packed_width is not None and int(batch.lengths.max()) > packed_width:
            raise EngineError(ErrorCode.PACKED_ROWS_TOO_WIDE, f"a row is longer than {packed_width}")
        if self._echo and len(batch) == 1 and len(batch.input_ids) == self.dims:
            return batch.input_ids.astype(np.float32).reshape(1, -1)
        out = np.zeros((len(batch), self.dims), np.float32)
        for index, row in enumerate(batch.rows()):
            if self._echo:
                out[index, : len(row)] = row[: self.dims]
            else:
                data = hashlib.shake_128(row.tobytes()).digest(2 * self.dims)
                out[index] = np.frombuffer(data, "<i2") / np.float32(32768)
        return out

    def rerank(self, pairs, *, progress):  # type: ignore[no-untyped-def]
        import numpy as np

        query = pairs.query_ids.tolist()
        return np.array([expected_score(query, row.tolist()) for row in pairs.candidates.rows()], np.float32)

    def rerank_sequences(self, batch, *, progress):  # type: ignore[no-untyped-def]
        import numpy as np

        return np.array([expected_sequence_score(row.tolist()) for row in batch.rows()], np.float32)

    def generate(self, input_ids, *, max_tokens, progress):  # type: ignore[no-untyped-def]
        from engines.runtime.batch import Generation

        ids = input_ids.tolist()
        if (story := self._script.get("story")) is not None:
            said = ids[::-1].index(256)
            rest = bytes.fromhex(story)[said : said + max_tokens]
            reason = FinishReason.LENGTH if len(rest) == max_tokens else FinishReason.STOP
            return Generation(rest.decode("utf-8", "replace"), len(ids), len(rest), reason, tuple(rest))
        text, tokens, reason = expected_text(ids, max_tokens)
        return Generation(text, len(input_ids), len(tokens), reason, tuple(tokens))

    def admit_shape(self, shape: int, *, progress: ProgressReporter) -> Inventory:
        if self.buckets and shape not in self.buckets:
            raise EngineError(ErrorCode.INVALID_SHAPE, f"shape {shape} is not on the ladder")
        self._shapes.add(shape)
        return Inventory([Executable(f"s{shape}", [0])], ["pooling"])

    def evict_shape(self, shape: int, *, progress: ProgressReporter) -> None:
        self._shapes.discard(shape)

    def admit_packed(self, width: int, *, progress: ProgressReporter) -> Inventory:
        self._packed.add(width)
        return Inventory([Executable(f"packed{width}", [0])], ["pooling"])

    def evict_packed(self, width: int, *, progress: ProgressReporter) -> None:
        self._packed.discard(width)

    def status(self) -> ModelStatus:
        return ModelStatus(
            placement_share=self._script.get("placement_share"),
            buckets=self.buckets,
            resident_shapes=tuple(self._shapes),
            resident_packed=tuple(self._packed),
        )

    def close(self) -> None:
        pass


def scripted_engine(script: Script, options: WorkerOptions) -> Engine:
    """Return an engine that poses as the one the script names."""
    engine_name = script.get("engine", LLAMA_ENGINE)
    owned = engine_name in OWNED_ENGINES

    class ScriptedEngine(Engine):
        name = engine_name
        serves = ANE_SERVING if engine_name == ANE_ENGINE else OWNED_SERVING if owned else SEGMENT_SERVING
        max_models = 1 if owned else None
        ref_prefix = REF_PREFIX.get(engine_name, "scripted")

        def identity(self) -> EngineIdentity:
            flags = {"device": script["device"]} if "device" in script else {}
            packed = script.get("packed")
            if packed is True:
                packed = {"layout": "tight-v1", "widths": list(options.packed or ()), "max_rows": 64}
            return EngineIdentity(
                engine=engine_name,
                version=script.get("version", "scripted-1"),
                build_flags=flags,
                manifest_digest=_manifest_digest(script, options) if owned or "manifest_digest" in script else None,
                kernel_revision=script.get("kernel_revision", "scripted-1" if owned else None),
                packed=msgspec.convert(packed, PackedCapability) if packed else None,
            )

        def probe_floor(self) -> Probe:
            return Probe(status="ok", code="ok", required={}, observed={})

        def load(self, request: Load, *, progress: ProgressReporter) -> Model:
            return ScriptedModel(script)

    return ScriptedEngine()


def _manifest_digest(script: Script, options: WorkerOptions) -> str:
    if "manifest_digest" in script:
        return str(script["manifest_digest"])
    if options.manifest is None:
        return "0" * 64
    from engines.bundle.manifest import parse_strict

    return hashlib.sha256(parse_strict(options.manifest.read_bytes())[1]).hexdigest()


# --- the worker ------------------------------------------------------------------------------------------------------


class Actions:
    """What needs no connection."""

    script: ClassVar[Script] = {}
    stdout: ClassVar[int] = 1

    def run(self, actions: Sequence[dict[str, Any]]) -> None:
        """Do *actions* in order."""
        for action in actions:
            for name, value in action.items():
                getattr(self, f"do_{name}")(value)

    def do_sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def do_ccall(self, seconds: float) -> None:
        import ctypes

        ctypes.CDLL(None).poll(None, 0, int(seconds * 1000))

    def do_spin(self, _: Any) -> None:
        import itertools

        sum(itertools.repeat(0))

    def do_exit(self, status: int) -> None:
        os._exit(status)

    def do_signal(self, name: str) -> None:
        os.kill(os.getpid(), getattr(signal, name))

    def do_abort(self, _: Any) -> None:
        os.abort()

    def do_raise(self, text: str) -> None:
        raise RuntimeError(text)

    def do_stderr(self, spec: Any) -> None:
        _pour(2, spec)

    def do_stdout(self, spec: Any) -> None:
        _pour(self.stdout, spec)

    def do_grandchild(self, spec: dict[str, Any]) -> None:
        import subprocess

        child = subprocess.Popen(
            [sys.executable, "-c", f"import time; time.sleep({spec.get('seconds', 30)})"],
            stdout=self.stdout,
            start_new_session=spec.get("new_session", False),
        )
        if "pid_file" in spec:
            _publish(spec["pid_file"], str(child.pid))

    def do_touch(self, path: str) -> None:
        _publish(path, "")

    def do_wait_for(self, path: str) -> None:
        while not Path(path).exists():
            time.sleep(0.002)

    def do_report(self, path: str) -> None:
        folder = Path("/proc/self/fd")
        descriptors = sorted(int(entry.name) for entry in folder.iterdir()) if folder.is_dir() else []
        report = {
            "pid": os.getpid(),
            "session": os.getsid(0),
            "environment": dict(os.environ),
            "argv": sys.argv,
            "descriptors": descriptors,
        }
        _publish(path, msgspec.json.encode(report).decode())

    def do_thread(self, actions: list[dict[str, Any]]) -> None:
        threading.Thread(target=self.run, args=(actions,), daemon=True).start()


class ScriptedWorker(Actions, Worker):
    """The real worker; a matching rule takes an exchange over."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._counts: dict[str, int] = {}
        self._request: Any = None
        self._payload: memoryview | None = None
        self._progress: ProgressReporter | None = None
        self._replied = False
        self._nonce = ""
        if "EOF" in self.script.get("ignore", ()):
            self._watcher.start = lambda: None  # type: ignore[method-assign]

    def greet(self, nonce: str) -> None:
        self._nonce = nonce
        if "hello" not in self.script:
            super().greet(nonce)
        else:
            self.run(self.script["hello"])

    def await_ack(self, *, deadline: float | None = None) -> bool:
        if not super().await_ack(deadline=deadline):
            return False
        self.run(self.script.get("ready", ()))
        receive = self.channel.receive

        def receive_and_end() -> Any:
            event = receive()
            kind = type(event).__name__
            if kind in ("Shutdown", "PeerClosed"):
                self.run(self.script.get("shutdown" if kind == "Shutdown" else "eof", ()))
            return event

        self.channel.receive = receive_and_end  # type: ignore[method-assign]
        return True

    def exchange(self, request: Any, payload: memoryview | None) -> None:
        rule = self._match(request, payload)
        if rule is None:
            super().exchange(request, payload)
            return
        self._request, self._payload, self._replied = request, payload, False
        first = phases(type(request), self.identity.engine)[0]
        self._progress = ProgressReporter(
            lambda completed, phase: self._emit(request.req_id, completed, phase), phase=first, lock=self.channel.lock
        )
        with self._watcher:
            self.run(rule["do"])
            answer = None if self._replied else self._answer()
        if answer is not None:
            self.finish(self._progress, answer)

    def _match(self, request: Any, payload: memoryview | None) -> Script | None:
        kind = type_name(request)
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        first_id = struct.unpack_from("<i", payload)[0] if payload is not None and payload.nbytes >= 4 else None
        for rule in self.script.get("rules", ()):
            on = rule.get("on", "*")
            names = [on] if isinstance(on, str) else on
            if not (kind in names or "*" in names or ("serving" in names and type(request) in SERVING)):
                continue
            nth = rule.get("nth")
            if nth is not None and count not in (nth if isinstance(nth, list) else [nth]):
                continue
            if count < rule.get("from", 1) or ("first_id" in rule and rule["first_id"] != first_id):
                continue
            return dict(rule)
        return None

    def _answer(self) -> Answer:
        assert self._progress is not None
        return self.dispatcher.handle(self._request, self._payload, self._progress)

    def write(self, *chunks: bytes | memoryview) -> None:
        """Put bytes on the wire past the protocol."""
        with self.channel.lock:
            self.channel.transport.send([chunk for chunk in chunks if len(chunk)])

    def write_frame(self, frame: Any) -> None:
        data = msgspec.json.encode(_fill(frame, getattr(self._request, "req_id", "none")))
        self.write(LENGTH.pack(len(data)) + data)

    def _over(self) -> None:
        """The exchange ended past the protocol object: tell it so."""
        self._replied = True
        if self._progress is not None:
            self._progress.close()
        self.channel.connection.state = State.IDLE
        self.channel.connection.expectation.request = None

    def do_progress(self, spec: dict[str, Any]) -> None:
        completed = spec.get("completed", range(spec.get("from", 1), spec.get("to", 1) + 1))
        phase = spec.get("phase", phases(type(self._request), self.identity.engine)[0].value)
        for value in completed:
            if every := spec.get("every"):
                time.sleep(every)
            req_id = spec.get("req_id", "$req_id")
            self.write_frame({"type": "PROGRESS", "req_id": req_id, "completed": value, "phase": phase})

    def do_reply(self, spec: dict[str, Any]) -> None:
        answer = self._answer()
        header = msgspec.to_builtins(answer.reply)
        header.update(spec.get("set", {}))
        for field in spec.get("drop", ()):
            header.pop(field, None)
        data = msgspec.json.encode(_fill(header, self._request.req_id))
        head = LENGTH.pack(len(data)) + data
        raw = None if answer.payload is None else bytearray(answer.payload)
        if raw is not None and "nan" in spec:
            struct.pack_into("<f", raw, 4 * int(spec["nan"]), float("nan"))
        for _ in range(spec.get("times", 1)):
            self._reply_stream(head, raw, spec)
        self._over()

    def _reply_stream(self, head: bytes, raw: bytearray | None, spec: dict[str, Any]) -> None:
        tail = b"" if raw is None else LENGTH.pack(len(raw)) + bytes(raw)
        if "between" in spec or "pause" in spec:
            self.write(head)
            time.sleep(spec.get("pause", 0))
            for frame in spec.get("between", ()):
                self.write_frame(frame)
            self.write(tail)
        elif "stall" in spec:
            cut = LENGTH.size + spec["stall"].get("after", 0)
            self.write(head + tail[:cut])
            time.sleep(spec["stall"]["seconds"])
            self.write(tail[cut:])
        else:
            self.write(head + tail)

    def do_err(self, spec: dict[str, str]) -> None:
        self.write_frame({"type": "ERR", "req_id": "$req_id", "msg": "scripted", **spec})
        self._over()

    def do_frame(self, frame: Any) -> None:
        self.write_frame(frame)

    def do_bytes(self, text: str) -> None:
        self.write(bytes.fromhex(text))

    def do_text(self, text: str) -> None:
        self.write(text.encode())

    def do_hello(self, changes: dict[str, Any]) -> None:
        frame = msgspec.to_builtins(hello(self.identity, self._nonce))
        for key, value in changes.items():
            if key == "engine" and isinstance(value, dict):
                frame["engine"].update(value)
            elif value is None:
                frame.pop(key, None)
            else:
                frame[key] = value
        self.write_frame(frame)
        connection = self.channel.connection
        connection.engine = self.identity.engine
        connection.state = State.ACK

    def do_close(self, _: Any) -> None:
        import socket

        self.channel.transport._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]


def _fill(frame: Any, req_id: str) -> Any:
    if isinstance(frame, dict):
        return {key: _fill(value, req_id) for key, value in frame.items()}
    return req_id if frame == "$req_id" else frame


def _pour(descriptor: int, spec: Any) -> None:
    if isinstance(spec, str):
        data = spec.encode() + b"\n"
    else:
        text = spec.get("text", "x").encode()
        data = (text * (spec["bytes"] // len(text) + 1))[: spec["bytes"]]
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _publish(path: str, text: str) -> None:
    """Write a file so that whoever sees it sees all of it."""
    temporary = f"{path}.{os.getpid()}.tmp"
    Path(temporary).write_text(text)
    os.replace(temporary, path)  # noqa: PTH105


def read_script(text: str) -> Script:
    """Return the script for this spawn: decoded, with its generation laid over it."""
    data = text if text.lstrip().startswith("{") else Path(text).read_text()
    script: Script = msgspec.json.decode(data)
    generation = 1
    if "state" in script:
        descriptor = os.open(script["state"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.write(descriptor, b".")
        generation = os.fstat(descriptor).st_size
        os.close(descriptor)
    if overlays := script.get("generations"):
        script = {**script, **overlays[min(generation, len(overlays)) - 1]}
    return script


def main(argv: Sequence[str]) -> int:
    """Run the scripted worker."""
    script = read_script(argv[0])
    for name in script.get("ignore", ()):
        if name != "EOF":
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    Actions.script = script
    Actions.stdout = os.dup(1)  # the runtime points descriptor 1 to stderr

    def factory(options: WorkerOptions) -> Engine:
        Actions().run(script.get("start", ()))
        return scripted_engine(script, options)

    return runtime_main.run(factory, argv[1:], program="scripted-worker", worker=ScriptedWorker)


if __name__ == "__main__":
    sys.path.pop(0)  # tests/support is no place to import from
    sys.exit(main(sys.argv[1:]))
