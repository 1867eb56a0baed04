"""What the spec says about a connection, from a bird's view, and a source of legal and illegal next frames.

The model knows plain JSON objects and byte counts; it shares no table, type or function with ``engines.protocol``.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from typing import Any

Pick = Callable[[Sequence[Any]], Any]
"""Chooses one of several: ``random.Random.choice``."""

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
        self.ids = 0

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
        self.open, self.completed, self.ids = message, 0, (size or 0) // 4
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
        elif kind == "LOADED" and (message["dims"] == 0 or message["model_ref"] in self.dims):
            return "wrong"
        elif kind == "TEXT":
            named = len(message.get("generated_token_ids", [])) or message["n_gen"]
            if (
                message["n_prompt"] != self.ids
                or message["n_gen"] > self.open["max_tokens"]
                or named != message["n_gen"]
            ):
                return "wrong"
        if size != needs:
            return "wrong"
        if kind == "LOADED":
            self.dims[message["model_ref"]] = message["dims"]
        if asked == "UNLOAD" and (kind == "UNLOADED" or message["code"] == "model_not_loaded"):
            self.dims.pop(self.open["model_ref"], None)
        self.open, self.closed = None, self.stopping
        return "ok"


def wire(message: dict[str, Any], raw: bytes | None) -> bytes:
    """Return the bytes of a message without asking the product."""
    payloads = [json.dumps(message, separators=(",", ":")).encode()] + ([] if raw is None else [raw])
    return b"".join(struct.pack("<I", len(payload)) + payload for payload in payloads)


def hello(engine: str, version: int = 3, max_frame: int = LIMIT) -> dict[str, Any]:
    """Return HELLO; the two defaults are what the model takes for right."""
    named = {"engine": engine, "version": "1"}
    return {"v": version, "nonce": "n", "engine": named, "pid": 1, "max_frame": max_frame}


def ack(version: int = 3, accept: bool = True, max_frame: int = LIMIT) -> dict[str, Any]:
    """Return HELLO_ACK."""
    return {"v": version, "accept": accept, "max_frame": max_frame}


# Small domains, so that wrong and right meet often.
_IDENTS = ["a", "a", "a", "a", "b"]
_REFS = ["m:0", "m:0", "m:1"]
_SMALL = [0, 1, 2, 3]
_RAWS = [None, b"", bytes(4), bytes(5), bytes(LIMIT), bytes(LIMIT + 4)]
_TEN = range(10)


def next_frame(model: Model, pick: Pick) -> tuple[str, dict[str, Any], bytes | None]:
    """Return a sender and its next frame: mostly something that fits, often with one thing wrong."""
    stray = pick(_TEN) == 9
    # What comes next by the rules; when stray, sometimes a handshake frame at the wrong time.
    turn = "hello" if not model.greeted else "ack" if not model.acked else "exchange"
    if stray:
        turn = pick(["hello", "ack", *["exchange"] * 8])
    if turn == "hello":
        return "worker", hello(model.engine, pick([3, 3, 3, 2]), pick([LIMIT, LIMIT, LIMIT, 0])), None
    if turn == "ack":
        return "host", ack(pick([3, 3, 3, 2]), pick([True, True, True, False]), pick([LIMIT, LIMIT, 0])), None
    if pick(range(30)) == 29:
        return "host", {"type": "SHUTDOWN"}, None
    if (model.open is None) != stray:
        return ("host", *request(pick))
    return ("worker", *reply(model, pick))


def request(pick: Pick) -> tuple[dict[str, Any], bytes | None]:
    """Return a request and its raw frame."""
    kind = pick([*ANSWERS, "EMBED_BATCH", "EMBED_BATCH", "RERANK"])
    message: dict[str, Any] = {"type": kind, "req_id": pick(_IDENTS)}
    lengths = [pick(_SMALL) for _ in range(pick(_SMALL))]
    tokens = pick(_SMALL)
    if kind == "LOAD":
        message |= {"artifact_path": "p", "artifact_digest": "d", "format": "f", "runtime_config": {}}
    elif kind != "PING":
        message["model_ref"] = pick(_REFS)
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
    return message, pick(_RAWS) if pick(_TEN) == 9 else raw


def reply(model: Model, pick: Pick) -> tuple[dict[str, Any], bytes | None]:
    """Return a frame of the worker and its raw frame."""
    asked = model.open or {"type": "PING", "req_id": "a"}
    likely = ANSWERS[asked["type"]]
    kind = pick([likely] * 6 + ["ERR"] * 2 + ["PROGRESS"] * 8 + [*ANSWERS.values()])
    message: dict[str, Any] = {"type": kind, "req_id": pick(_IDENTS) if pick(_TEN) > 7 else asked["req_id"]}
    rows = len(asked.get("items") or asked.get("candidates") or asked.get("sequences") or [])
    raw: bytes | None = None
    if kind == "PROGRESS":
        phase = pick(["setup", "inference", "control", *model.phases * 5])
        message |= {"completed": max(0, model.completed + pick([1, 1, 1, 1, 2, 0, -1])), "phase": phase}
    elif kind == "VECTORS":
        dims = model.dims.get(asked.get("model_ref", ""), 2) if pick(_TEN) < 8 else pick(_SMALL)
        count = rows if pick(_TEN) < 8 else pick(_SMALL)
        message |= {"dims": dims, "n": count}
        raw = bytes(4 * dims * count)
    elif kind == "SCORES":
        raw = bytes(4 * rows)
    elif kind == "LOADED":
        message |= {"model_ref": pick([*_REFS, "m:2", "m:3"]), "dims": pick([2, 2, 3, 0]), "cold_load_ms": 1}
    elif kind == "TEXT":
        count = model.ids if pick(_TEN) < 8 else pick(_SMALL)
        message |= {"text": "t", "n_prompt": count, "n_gen": pick([1, 1, 2, 4, 5]), "finish_reason": "stop"}
        if pick([True, False, False]):
            message["generated_token_ids"] = [7] * (message["n_gen"] if pick(_TEN) < 8 else 3)
    elif kind == "ADMITTED":
        message["inventory"] = {"executables": [], "cpu_stages": []}
    elif kind == "PONG":
        message |= {"rss_mb": 1, "models_loaded": 0}
    elif kind == "ERR":
        message |= {"code": pick(["oom", "model_not_loaded"]), "msg": pick(["", "", "m" * LIMIT])}
        if pick([True, False, False]):
            del message["req_id"]
    return message, pick(_RAWS) if pick(_TEN) == 9 else raw
