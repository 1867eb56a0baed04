"""Random legal and illegal scripts through both ends, judged by a small model written from the spec alone.

The model knows plain JSON objects and byte counts; it shares no table, type or function with ``engines.protocol``.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engines.protocol.connection import Connection, ReplyStarted, Role, State
from engines.protocol.errors import LocalProtocolError, RemoteProtocolError
from tests.protocol.test_vectors import build, snapshot
from tests.support.pair import Cut, byte_by_byte, joined, random_cuts, whole

LIMIT = 400
RAW_REQUESTS = {"EMBED_BATCH": "VECTORS", "RERANK": "SCORES", "RERANK_SEQUENCES": "SCORES", "GENERATE": "TEXT"}
ANSWERS = RAW_REQUESTS | {
    "LOAD": "LOADED",
    "UNLOAD": "UNLOADED",
    "PING": "PONG",
    "ANE_ADMIT_SHAPE": "ADMITTED",
    "ANE_EVICT_PACKED": "EVICTED",
}
START = {"LOAD": "setup", "ANE_ADMIT_SHAPE": "setup"} | dict.fromkeys(RAW_REQUESTS, "inference")


class Model:
    """What the spec says about one connection, from a bird's view."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.greeted = self.acked = self.stopping = self.closed = False
        self.open: dict[str, Any] | None = None
        self.completed = 0
        self.phases: list[str] = []
        self.dims: dict[str, int] = {}

    def judge(self, sender: str, message: dict[str, Any], raw: bytes | None) -> str:
        """Return ``ok``, ``worker answers`` (a host must not send it, a worker copes) or ``wrong``; move when ok."""
        kind = message.get("type", "HELLO" if "nonce" in message else "ACK")
        size = None if raw is None else len(raw)
        verdict = "wrong"
        if (
            self.closed
            or ((size or 0) > LIMIT and self.acked)
            or len(json.dumps(message, separators=(",", ":"))) > LIMIT
        ):
            return "wrong"
        if kind == "HELLO":
            if sender == "worker" and not self.greeted and message["v"] == 3 and message["max_frame"] == LIMIT:
                self.greeted, verdict = True, "ok"
        elif kind == "ACK":
            good = message["v"] == 3 and message["accept"] and message["max_frame"] == LIMIT
            if sender == "host" and self.greeted and not self.acked and good:
                self.acked, verdict = True, "ok"
        elif not self.acked:
            pass
        elif kind == "SHUTDOWN":
            if sender == "host" and not self.stopping:
                self.stopping, verdict = True, "ok"
                self.closed = self.open is None
        elif kind in ANSWERS:
            if sender == "host" and self.open is None and not self.stopping:
                verdict = self._request(kind, message, size)
        elif sender == "worker" and self.open is not None:
            verdict = self._progress(message, size) if kind == "PROGRESS" else self._reply(kind, message, size)
        return verdict

    def _request(self, kind: str, message: dict[str, Any], size: int | None) -> str:
        if (kind in RAW_REQUESTS) != (size is not None):
            return "wrong"
        if size is not None and (size % 4 or (self._tokens(kind, message) not in (None, size // 4))):
            return "worker answers"
        self.open, self.completed = message, 0
        self.phases = [START.get(kind, "control")]
        if self.phases == ["inference"] and self.engine == "owned-cuda":
            self.phases = ["setup", "inference"]
        return "ok"

    @staticmethod
    def _tokens(kind: str, message: dict[str, Any]) -> int | None:
        if kind == "GENERATE":
            return None
        rows = message.get("items") or message.get("candidates") or message.get("sequences") or []
        return sum(row["n_tokens"] for row in rows) + message.get("query_n_tokens", 0)

    def _progress(self, message: dict[str, Any], size: int | None) -> str:
        assert self.open is not None
        fresh = message["completed"] > self.completed and message["req_id"] == self.open["req_id"]
        if size is not None or not fresh or message["phase"] not in self.phases:
            return "wrong"
        self.completed = message["completed"]
        self.phases = self.phases[self.phases.index(message["phase"]) :]
        return "ok"

    def _reply(self, kind: str, message: dict[str, Any], size: int | None) -> str:
        assert self.open is not None
        asked = self.open["type"]
        rows = len(self.open.get("items") or self.open.get("candidates") or self.open.get("sequences") or [])
        needs: int | None = None
        if message.get("req_id", self.open["req_id"]) != self.open["req_id"]:
            return "wrong"
        if kind != "ERR" and kind != ANSWERS[asked]:
            return "wrong"
        if kind == "VECTORS":
            known = self.dims.get(self.open["model_ref"], message["dims"])
            if message["n"] != rows or message["dims"] != known or message["dims"] == 0:
                return "wrong"
            needs = 4 * rows * message["dims"]
        elif kind == "SCORES":
            needs = 4 * rows
        elif kind == "LOADED" and message["dims"] == 0:
            return "wrong"
        if size != needs:
            return "wrong"
        if kind == "LOADED":
            self.dims[message["model_ref"]] = message["dims"]
        if asked == "UNLOAD" and (kind == "UNLOADED" or message["code"] == "model_not_loaded"):
            self.dims.pop(self.open["model_ref"], None)
        self.open, self.closed = None, self.stopping
        return "ok"


# Small domains, so that wrong and right meet often.
idents = st.sampled_from(["a", "a", "a", "b"])
refs = st.sampled_from(["m:0", "m:0", "m:1"])
counts = st.lists(st.integers(0, 3), max_size=3)
small = st.integers(0, 3)


@st.composite
def requests(draw: st.DrawFn) -> tuple[dict[str, Any], bytes | None]:
    kind = draw(st.sampled_from([*ANSWERS, "EMBED_BATCH", "EMBED_BATCH", "RERANK"]))
    message: dict[str, Any] = {"type": kind, "req_id": draw(idents)}
    tokens = draw(st.integers(0, 4))
    if kind == "LOAD":
        message |= {"artifact_path": "p", "artifact_digest": "d", "format": "f", "runtime_config": {}}
    elif kind != "PING":
        message["model_ref"] = draw(refs)
    lengths = draw(counts)
    if kind == "EMBED_BATCH":
        items = [{"id": str(index), "n_tokens": length} for index, length in enumerate(lengths)]
        message |= {"pooling": "mean", "normalize": True, "items": items}
        tokens = sum(lengths)
    elif kind == "RERANK":
        message |= {"query_n_tokens": tokens, "candidates": [{"n_tokens": length} for length in lengths]}
        tokens += sum(lengths)
    elif kind == "RERANK_SEQUENCES":
        message["sequences"] = [{"n_tokens": length} for length in lengths]
        tokens = sum(lengths)
    elif kind == "GENERATE":
        message["max_tokens"] = 4
    elif kind == "ANE_ADMIT_SHAPE":
        message["shape"] = 128
    elif kind == "ANE_EVICT_PACKED":
        message["width"] = 256
    raw = bytes(4 * tokens) if kind in RAW_REQUESTS else None
    if draw(st.integers(0, 9)) == 0:
        raw = draw(st.sampled_from([None, b"", bytes(4), bytes(5), bytes(LIMIT), bytes(LIMIT + 4)]))
    return message, raw


@st.composite
def replies(draw: st.DrawFn, model: Model) -> tuple[dict[str, Any], bytes | None]:
    asked = model.open or {"type": "PING", "req_id": "a"}
    ident = asked["req_id"] if draw(st.integers(0, 5)) else draw(idents)
    likely = ANSWERS[asked["type"]]
    kind = draw(st.sampled_from([likely] * 6 + ["ERR", "ERR", "PROGRESS", "PROGRESS", "PROGRESS", *ANSWERS.values()]))
    message: dict[str, Any] = {"type": kind, "req_id": ident}
    rows = len(asked.get("items") or asked.get("candidates") or asked.get("sequences") or [])
    raw: bytes | None = None
    if kind == "PROGRESS":
        phase = draw(st.sampled_from(["setup", "inference", "control", *model.phases * 3]))
        completed = model.completed + draw(st.sampled_from([1, 1, 1, 2, 0, -1]))
        message |= {"completed": max(0, completed), "phase": phase}
    elif kind == "VECTORS":
        dims = model.dims.get(asked.get("model_ref", ""), 2) if draw(st.integers(0, 4)) else draw(small)
        count = rows if draw(st.integers(0, 4)) else draw(small)
        message |= {"dims": dims, "n": count}
        raw = bytes(4 * dims * count)
    elif kind == "SCORES":
        raw = bytes(4 * rows)
    elif kind == "LOADED":
        message |= {"model_ref": draw(refs), "dims": draw(st.sampled_from([2, 2, 3, 0])), "cold_load_ms": 1}
    elif kind == "TEXT":
        message |= {"text": "t", "n_prompt": 1, "n_gen": 1, "finish_reason": "stop"}
    elif kind == "ADMITTED":
        message["inventory"] = {"executables": [], "cpu_stages": []}
    elif kind == "PONG":
        message |= {"rss_mb": 1, "models_loaded": 0}
    elif kind == "ERR":
        message |= {
            "code": draw(st.sampled_from(["oom", "model_not_loaded"])),
            "msg": draw(st.sampled_from(["", "m" * LIMIT])),
        }
        if draw(st.booleans()):
            del message["req_id"]
    if draw(st.integers(0, 9)) == 0:
        raw = draw(st.sampled_from([None, b"", bytes(4), bytes(LIMIT + 4)]))
    return message, raw


def wire(message: dict[str, Any], raw: bytes | None) -> bytes:
    """Return the bytes of a message without asking the product."""
    payloads = [json.dumps(message, separators=(",", ":")).encode()] + ([] if raw is None else [raw])
    return b"".join(struct.pack("<I", len(payload)) + payload for payload in payloads)


class Wire(RuleBasedStateMachine):
    """Both ends and the model see the same script."""

    @initialize(
        engine=st.sampled_from(["llama.cpp-worker", "owned-cuda"]),
        cut=st.one_of(st.just(whole), st.just(byte_by_byte), st.integers(0, 99).map(random_cuts)),
        greet=st.integers(0, 9),
    )
    def start(self, engine: str, cut: Cut, greet: int) -> None:
        self.cut = cut
        self.model = Model(engine)
        self.ends = {"host": Connection(Role.HOST, max_frame=LIMIT), "worker": Connection(Role.WORKER, max_frame=LIMIT)}
        self.over = False
        if greet:
            self.step("worker", self.hello(engine), None, force=False)
            self.step("host", {"v": 3, "accept": True, "max_frame": LIMIT}, None, force=False)

    @staticmethod
    def hello(engine: str, version: int = 3, max_frame: int = LIMIT) -> dict[str, Any]:
        named = {"engine": engine, "version": "1"}
        return {"v": version, "nonce": "n", "engine": named, "pid": 1, "max_frame": max_frame}

    def step(self, sender: str, message: dict[str, Any], raw: bytes | None, *, force: bool) -> None:
        """Let *sender* send; an illegal message is refused there, and with *force* put on the wire all the same."""
        receiver = "worker" if sender == "host" else "host"
        before_open = self.model.open
        verdict = self.model.judge(sender, message, raw)
        end = self.ends[sender]
        if verdict == "ok":
            data = joined(end.send(build(message), raw))
            assert data == wire(message, raw)
            events = self.feed(receiver, data)
            assert len(events) == 1, events
            self.compare(events[0], message, raw, before_open)
            return
        before = snapshot(end)
        with pytest.raises(LocalProtocolError):
            end.send(build(message), raw)
        assert snapshot(end) == before
        if not force:
            return
        self.over = True  # the two ends no longer share a history
        expects_raw = message.get("type") in ("VECTORS", "SCORES", *RAW_REQUESTS)
        if expects_raw != (raw is not None):
            return  # such a stream is not wrong yet, only unfinished or followed by something
        if verdict == "worker answers":
            (event,) = self.feed(receiver, wire(message, raw))
            assert bytes(event.payload) == raw
            return
        if message.get("type") is None and message.get("max_frame", LIMIT) not in (0, LIMIT):
            return  # what a well-behaved end doesn't promise may still be legal to read
        with pytest.raises(RemoteProtocolError):
            self.feed(receiver, wire(message, raw))
        assert self.ends[receiver].state is State.CLOSED
        assert self.feed(receiver, b"\1\2\3\4\5\6") == []

    def feed(self, receiver: str, data: bytes) -> list[Any]:
        events = []
        for piece in self.cut(data):
            events += self.ends[receiver].receive(piece)
        return [event for event in events if not isinstance(event, ReplyStarted)]

    def compare(self, event: Any, message: dict[str, Any], raw: bytes | None, asked: dict[str, Any] | None) -> None:
        kind = message.get("type")
        name = type(event).__name__
        if kind is None:
            assert name == ("HelloReceived" if "nonce" in message else "AckReceived")
        elif kind == "SHUTDOWN":
            assert name == "ShutdownReceived"
        elif kind == "PROGRESS":
            assert name == "ProgressReceived" and event.progress == build(message)
        else:
            assert name == ("RequestReceived" if kind in ANSWERS else "ReplyReceived")
            if name == "ReplyReceived":
                assert event.reply == build(message) and event.request == build(asked or {})
            else:
                assert event.request == build(message)
            assert (None if event.payload is None else bytes(event.payload)) == raw

    @precondition(lambda self: self.over)
    @rule(engine=st.sampled_from(["llama.cpp-worker", "owned-cuda"]), seed=st.integers(0, 99))
    def next_generation(self, engine: str, seed: int) -> None:
        self.start(engine, random_cuts(seed), 1)

    @precondition(lambda self: not self.over)
    @rule(data=requests(), force=st.booleans())
    def host_requests(self, data: tuple[dict[str, Any], bytes | None], force: bool) -> None:
        self.step("host", *data, force=force)

    @precondition(lambda self: not self.over)
    @rule(data=st.data(), force=st.booleans())
    def worker_speaks(self, data: st.DataObject, force: bool) -> None:
        self.step("worker", *data.draw(replies(self.model)), force=force)

    @precondition(lambda self: not self.over and self.model.open is not None)
    @rule(data=st.data())
    def worker_answers(self, data: st.DataObject) -> None:
        self.step("worker", *data.draw(replies(self.model)), force=False)

    @precondition(lambda self: not self.over)
    @rule(dice=st.integers(0, 5), force=st.booleans())
    def host_stops(self, dice: int, force: bool) -> None:
        if dice == 0:
            self.step("host", {"type": "SHUTDOWN"}, None, force=force)

    @precondition(lambda self: not self.over)
    @rule(version=st.sampled_from([3, 3, 2]), size=st.sampled_from([LIMIT, 0]), force=st.booleans())
    def worker_greets(self, version: int, size: int, force: bool) -> None:
        self.step("worker", self.hello(self.model.engine, version, size), None, force=force)

    @precondition(lambda self: not self.over)
    @rule(accept=st.sampled_from([True, True, False]), version=st.sampled_from([3, 3, 2]), force=st.booleans())
    def host_acks(self, accept: bool, version: int, force: bool) -> None:
        self.step("host", {"v": version, "accept": accept, "max_frame": LIMIT}, None, force=force)

    @precondition(lambda self: not self.over)
    @rule(who=st.sampled_from(["host", "worker"]), torn=st.booleans(), dice=st.integers(0, 9))
    def somebody_leaves(self, who: str, torn: bool, dice: int) -> None:
        if dice:
            return
        end = self.ends[who]
        self.over = True
        waits = end.state in (State.IDLE, State.BUSY)
        if torn and waits:
            end.receive(b"\7\0")
            with pytest.raises(RemoteProtocolError):
                end.receive_eof()
        end.receive_eof()
        assert end.state is State.CLOSED

    @invariant()
    def both_ends_agree_with_the_model(self) -> None:
        if getattr(self, "over", True):
            return
        host, worker = self.ends["host"], self.ends["worker"]
        assert host.state is worker.state
        assert (host.request is not None) == (self.model.open is not None)
        if self.model.open is not None:
            assert host.completed == worker.completed == self.model.completed
            assert host.phase is worker.phase and host.phase == self.model.phases[0]
        assert (host.state is State.CLOSED) == self.model.closed


TestWire = Wire.TestCase
TestWire.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
