"""Writes the wire vectors beside it: ``python tests/vectors/make_vectors.py``.

It knows JSON and struct and nothing of the product's own encoder, so that comparing the two means something. The files
are committed; a test fails when they differ from what this script writes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MIB64 = 64 * 1024 * 1024
DEEPEST = 32
"""Levels of objects and arrays that HELLO may have."""
FAR = 12_000
"""Deeper than any Python recurses in C: 3.13 goes to 10,000."""
NONCE = "0123456789abcdef"
Step = dict[str, Any]


def frame(payload: bytes) -> str:
    """Return one frame in hex, its length prefix included."""
    return (struct.pack("<I", len(payload)) + payload).hex()


def text(message: Any) -> bytes:
    """Return the canonical JSON of a control frame: no spaces, non-ASCII characters as they are."""
    return json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode()


def i32(*ids: int) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


def f32(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def _step(sender: str, message: Any, raw: bytes | None, events: list[str]) -> Step:
    step: Step = {"from": sender, "json": message, "frames": [frame(text(message))]}
    if raw is not None:
        step["raw"] = raw.hex()
        step["frames"].append(frame(raw))
    step |= {"sender": "ok", "receiver": "ok", "events": events}
    return step


def host(message: Any, raw: bytes | None = None) -> Step:
    """A legal frame of the host."""
    kind = message.get("type")
    event = "ack_received" if kind is None else "shutdown_received" if kind == "SHUTDOWN" else "request_received"
    return _step("host", message, raw, [event])


def worker(message: Any, raw: bytes | None = None) -> Step:
    """A legal frame of the worker."""
    kind = message.get("type")
    event = "hello_received" if kind is None else "progress_received" if kind == "PROGRESS" else "reply_received"
    return _step("worker", message, raw, [event])


def loose(step: Step, payload: bytes | str) -> Step:
    """The same message in JSON that our own encoder would not write."""
    data = payload.encode() if isinstance(payload, str) else payload
    return step | {"frames": [frame(data), *step["frames"][1:]], "canonical": False}


def tolerated(step: Step) -> Step:
    """A well-behaved sender refuses to send it, the receiver takes it."""
    return step | {"sender": "local_error"}


def wrong(step: Step, outcome: str = "remote_error") -> Step:
    """A violation that both ends see: one refuses to send it, the other to receive it."""
    return step | {"sender": "local_error", "receiver": outcome, "events": []}


def alien(sender: str, *frames: bytes | str, outcome: str = "remote_error") -> Step:
    """Bytes that no message of ours encodes to; str payloads are taken as JSON text."""
    data = [frame(part.encode() if isinstance(part, str) else part) for part in frames]
    return {"from": sender, "frames": data, "sender": "impossible", "receiver": outcome, "events": []}


def stream(sender: str, data: bytes, outcome: str = "remote_error") -> Step:
    """Bytes that are no whole frames."""
    return {"from": sender, "frames": [data.hex()], "sender": "impossible", "receiver": outcome, "events": []}


def eof(sender: str, outcome: str) -> Step:
    """The sender closes its stream: ``closed`` between two frames, ``remote_error`` inside one."""
    events = ["peer_closed"] if outcome == "ok" else []
    return {"from": sender, "eof": True, "sender": "impossible", "receiver": outcome, "events": events}


def hello(**changes: Any) -> dict[str, Any]:
    fields = {
        "v": 3,
        "nonce": NONCE,
        "engine": {"engine": "llama.cpp-worker", "version": "0.3.0", "build_flags": {"device": "cpu"}},
        "pid": 4242,
        "max_frame": MIB64,
    }
    merged = fields | changes
    return {key: value for key, value in merged.items() if value is not ...}


def ack(**changes: Any) -> dict[str, Any]:
    return {"v": 3, "accept": True, "max_frame": MIB64} | changes


OWNED = {
    "engine": {"engine": "owned-cuda", "version": "0.3.0", "build_flags": {"device": "cuda:0"}},
    "manifest_digest": "ab" * 32,
    "kernel_revision": "graph-1+ort-1.31.1+cuda+f16",
}
ANE = {
    "engine": {"engine": "ane-coreml-worker", "version": "0.3.0", "build_flags": {"device": "ane"}},
    "manifest_digest": "cd" * 32,
    "kernel_revision": "mil-1+macos15+f16",
    "packed": {"layout": "tight-v1", "widths": [256, 512], "max_rows": 64},
}

LLAMA_UP = [worker(hello()), host(ack())]
CUDA_UP = [worker(hello(**OWNED)), host(ack())]
ANE_UP = [worker(hello(**ANE)), host(ack())]


def request(kind: str, req_id: str = "r-1", **fields: Any) -> dict[str, Any]:
    return {"type": kind, "req_id": req_id, **fields}


def load(req_id: str = "load-0") -> dict[str, Any]:
    return request(
        "LOAD",
        req_id,
        artifact_path="/models/m.gguf",
        artifact_digest="sha256:" + "0f" * 32,
        format="gguf",
        runtime_config={"ctx_size": "512"},
    )


def loaded(req_id: str = "load-0", **changes: Any) -> dict[str, Any]:
    return request("LOADED", req_id, model_ref="llama:0", dims=3, cold_load_ms=812) | changes


def embed(*lengths: int, req_id: str = "embed-1", **more: Any) -> dict[str, Any]:
    items = [{"id": str(index), "n_tokens": length} for index, length in enumerate(lengths)]
    return request("EMBED_BATCH", req_id, model_ref="llama:0", pooling="mean", normalize=True, items=items, **more)


def vectors(n: int, dims: int = 3, req_id: str = "embed-1") -> dict[str, Any]:
    return request("VECTORS", req_id, dims=dims, n=n)


def rerank(query: int, *lengths: int) -> dict[str, Any]:
    candidates = [{"n_tokens": length} for length in lengths]
    return request("RERANK", "rerank-2", model_ref="llama:0", query_n_tokens=query, candidates=candidates)


def sequences(*lengths: int) -> dict[str, Any]:
    return request(
        "RERANK_SEQUENCES", "rerank-7", model_ref="owned:0", sequences=[{"n_tokens": length} for length in lengths]
    )


def generate(**more: Any) -> dict[str, Any]:
    return request("GENERATE", "generate-1", model_ref="llama:0", max_tokens=8, **more)


def progress(completed: Any, phase: Any, req_id: str = "embed-1") -> dict[str, Any]:
    return request("PROGRESS", req_id, completed=completed, phase=phase)


def err(code: str, req_id: str | None = "embed-1", msg: str = "no") -> dict[str, Any]:
    named = {} if req_id is None else {"req_id": req_id}
    return {"type": "ERR", **named, "code": code, "msg": msg}


TWO = embed(3, 2)
TWO_IDS = i32(101, 7592, 102, 0, 2147483647)
TWO_ROWS = f32(0.0, -0.0, 1.5, -3.4028234663852886e38, 1e-45, 2.0)
EMBEDDING = [*LLAMA_UP, host(TWO, TWO_IDS)]
PING = request("PING", "ping-1")
PONG = request("PONG", "ping-1", rss_mb=12, models_loaded=1)
SHUTDOWN = {"type": "SHUTDOWN"}
UNLOAD = request("UNLOAD", "unload-1", model_ref="llama:0")

CODES = [
    "artifact_invalid",
    "config_invalid",
    "oom",
    "model_unsupported",
    "operation_mismatch",
    "package_digest_mismatch",
    "unsupported_request",
    "invalid_request",
    "model_not_loaded",
    "inference_failed",
    "nonfinite_output",
    "backend_missing",
    "shape_not_admitted",
    "invalid_shape",
    "ane_residency_limit",
    "ane_resources_exhausted",
    "invalid_placement",
    "placement_unreported",
    "specialization_missing",
    "layout_unqualified",
    "unsupported_packed_width",
    "packed_rows_too_wide",
]


class Group:
    """One file of vectors."""

    def __init__(self, name: str, about: str) -> None:
        self.name = name
        self.about = about
        self.vectors: list[dict[str, Any]] = []

    def add(self, name: str, rule: str, steps: Iterable[Step], **more: Any) -> None:
        """Add one vector; *more* may set host_max_frame and worker_max_frame."""
        self.vectors.append({"name": name, "rule": rule, **more, "steps": list(steps)})

    def write(self) -> None:
        """Write the file, one step a line, so that a change shows in a diff."""
        lines = ["{", f' "format": 1, "group": {json.dumps(self.name)},', f' "about": {json.dumps(self.about)},']
        lines.append(' "vectors": [')
        for index, vector in enumerate(self.vectors):
            steps = vector["steps"]
            head = json.dumps({key: value for key, value in vector.items() if key != "steps"})
            lines.append(f'  {head[:-1]}, "steps": [')
            lines += [f"    {json.dumps(step)}{',' if step is not steps[-1] else ''}" for step in steps]
            lines.append("  ]}" + ("," if index + 1 < len(self.vectors) else ""))
        lines += [" ]", "}"]
        (HERE / f"{self.name}.json").write_text("\n".join(lines) + "\n", encoding="ascii")


def handshake() -> Group:
    group = Group("handshake", "HELLO and HELLO_ACK that are accepted.")
    group.add("llama", "seed: worker connects and sends HELLO, module replies HELLO_ACK", LLAMA_UP)
    bare = hello(engine={"engine": "llama.cpp-worker", "version": "0.3.0"})
    group.add("no-build-flags", "v3 2: build_flags omitted when empty", [worker(bare), host(ack())])
    empty = json.dumps(bare | {"engine": bare["engine"] | {"build_flags": {}}})
    group.add("empty-build-flags", "an empty map is read like an absent one", [loose(worker(bare), empty), host(ack())])
    group.add("owned", "v3 2: owned workers report manifest_digest and kernel_revision", CUDA_UP)
    group.add("packed-tight", "v3 3: packed with layout, widths, max_rows", ANE_UP)
    varlen = OWNED | {"packed": {"layout": "varlen-v1", "widths": [], "max_rows": 256}}
    group.add("packed-varlen", "v3 3: owned-cuda may advertise varlen-v1", [worker(hello(**varlen)), host(ack())])
    extra = json.dumps(hello() | {"protocol_version": 2, "x": [1, {"y": None}]})
    group.add("extra-field", "v3 2: unknown fields in HELLO are ignored", [loose(worker(hello()), extra), host(ack())])
    nested = text(hello() | {"x": "@"}).replace(b'"@"', b"[" * (DEEPEST - 1) + b'"[[{"' + b"]" * (DEEPEST - 1))
    group.add("deepest-extra-field", "32 levels, strings not counted", [loose(worker(hello()), nested), host(ack())])
    inner = hello()
    widened = json.dumps(inner | {"engine": inner["engine"] | {"commit": "abc"}})
    group.add("extra-field-in-engine", "v3 2: also inside engine", [loose(worker(inner), widened), host(ack())])
    shuffled = json.dumps(dict(reversed(list(hello().items()))), indent=2)
    group.add("any-order", "JSON objects have no order and may hold spaces", [loose(worker(hello()), shuffled)])
    group.add(
        "host-is-smaller",
        "v3 1: ACK names min(host, worker)",
        [worker(hello()), host(ack(max_frame=4096))],
        host_max_frame=4096,
    )
    group.add(
        "worker-is-smaller",
        "v3 1: ACK names min(host, worker)",
        [worker(hello(max_frame=4096)), host(ack(max_frame=4096))],
        worker_max_frame=4096,
    )
    group.add("other-nonce", "the nonce is the host's to compare, not the codec's", [worker(hello(nonce="f" * 16))])
    group.add(
        "one-read",
        "frames may be merged: HELLO, ACK, PING and PONG arrive as they like",
        [*LLAMA_UP, host(PING), worker(PONG)],
    )
    return group


def handshake_violations() -> Group:
    group = Group("handshake_violations", "What a host or worker refuses before an exchange can begin.")
    add = group.add
    for name, version in (("v2", 2), ("v1", 1), ("v4", 4), ("v0", 0), ("v255", 255)):
        add(
            f"version-{name}",
            "seed: module accepts only an exact match",
            [wrong(worker(hello(v=version)), "version_mismatch")],
        )
    for name, raw in (
        ("float", "3.0"),
        ("exponent", "3e0"),
        ("string", '"3"'),
        ("true", "true"),
        ("null", "null"),
        ("above-a-byte", "259"),
        ("negative", "-3"),
        ("huge", "3" * 5000),
    ):
        body = json.dumps(hello()).replace('"v": 3', f'"v": {raw}')
        add(f"version-{name}", "v3 2: v is a JSON integer; seed: a byte", [alien("worker", body)])
    for field in ("v", "nonce", "engine", "pid", "max_frame"):
        add(f"without-{field}", "seed: HELLO's fields", [alien("worker", json.dumps(hello(**{field: ...})))])
    for name, change in {
        "nonce-number": {"nonce": 1},
        "nonce-null": {"nonce": None},
        "engine-string": {"engine": "llama.cpp-worker"},
        "engine-without-version": {"engine": {"engine": "x"}},
        "pid-negative": {"pid": -1},
        "pid-2-32": {"pid": 2**32},
        "pid-string": {"pid": "1"},
        "max-frame-negative": {"max_frame": -1},
        "max-frame-2-32": {"max_frame": 2**32},
        "max-frame-float": {"max_frame": 4096.0},
        "manifest-null": {"manifest_digest": None},
        "kernel-null": {"kernel_revision": None},
        "packed-null": {"packed": None},
        "packed-true": {"packed": True},
        "packed-without-widths": {"packed": {"layout": "tight-v1", "max_rows": 1}},
        "packed-negative-width": {"packed": {"layout": "tight-v1", "widths": [-1], "max_rows": 1}},
        "build-flags-number": {"engine": {"engine": "x", "version": "1", "build_flags": {"a": 1}}},
        "build-flags-null": {"engine": {"engine": "x", "version": "1", "build_flags": None}},
    }.items():
        add(name, "v3 2 and 3: types; optional fields are never null", [alien("worker", json.dumps(hello(**change)))])
    add("max-frame-zero", "nothing could be sent to such a worker", [wrong(worker(hello(max_frame=0)))])
    add("hello-too-long", "v3 1: HELLO is read under 64 KiB", [stream("worker", struct.pack("<I", 65537))])
    add(
        "hello-over-the-hosts-own-maximum",
        "v3 1: min(64 KiB, own maximum)",
        [stream("worker", struct.pack("<I", 101))],
        host_max_frame=100,
    )
    add("hello-4-gib", "the length is checked before anything is allocated", [stream("worker", b"\xff\xff\xff\xff")])
    for name, junk in {
        "empty-frame": b"",
        "not-json": b"GET / HTTP/1.1",
        "array": b"[3]",
        "string": b'"HELLO"',
        "number": b"3",
        "null": b"null",
        "cut-json": text(hello())[:-1],
        "trailing-bytes": text(hello()) + b"x",
        "two-objects": text(hello()) * 2,
        "byte-order-mark": b"\xef\xbb\xbf" + text(hello()),
        "utf-16": json.dumps(hello()).encode("utf-16-le"),
        "nul-bytes": b"\0" * 16,
        "bad-utf-8-value": text(hello(nonce="@")).replace(b"@", b"\xff"),
        "bad-utf-8-ignored-field": text(hello() | {"x": "@"}).replace(b"@", b"\xff"),
        "lone-surrogate": text(hello(nonce="@")).replace(b"@", b"\\ud800"),
        "deep-nesting": text(hello() | {"x": "@"}).replace(b'"@"', b"[" * DEEPEST + b"]" * DEEPEST),
        "deep-nesting-in-engine": text(hello()).replace(
            b'"engine":{', b'"engine":{"x":' + b'{"y":' * 31 + b"0" + b"}" * 31 + b","
        ),
        "far-nesting": text(hello() | {"x": "@"}).replace(b'"@"', b"[" * FAR + b"]" * FAR),
        "single-quotes": str(hello()).encode(),
    }.items():
        add(f"hello-{name}", "v3 1: a payload is one JSON object in UTF-8", [alien("worker", junk)])
    for name, message in {"pong": PONG, "progress": progress(1, "setup"), "err": err("oom")}.items():
        add(f"{name}-before-hello", "seed: anything else before HELLO_ACK is a violation", [wrong(worker(message))])
    add("hello-twice", "seed: HELLO, then ACK", [LLAMA_UP[0], wrong(LLAMA_UP[0])])
    add(
        "progress-before-ack",
        "seed: anything else before HELLO_ACK is a violation",
        [LLAMA_UP[0], wrong(worker(progress(1, "setup")))],
    )
    add("first-byte-before-ack", "it needs no whole frame to be wrong", [LLAMA_UP[0], stream("worker", b"\x01")])
    add("hello-after-ack", "seed: one handshake", [*LLAMA_UP, wrong(LLAMA_UP[0])])
    add("request-before-hello", "seed: the worker speaks first", [wrong(host(PING))])
    add("ack-before-hello", "seed: the worker speaks first", [wrong(host(ack()))])
    add("ping-instead-of-ack", "seed: module replies HELLO_ACK", [LLAMA_UP[0], wrong(host(PING))])
    add("ack-twice", "seed: one handshake", [*LLAMA_UP, wrong(host(ack()))])
    for name, change in {
        "version-2": {"v": 2},
        "refused": {"accept": False},
        "max-frame-zero": {"max_frame": 0},
        "max-frame-above-the-workers": {"max_frame": MIB64 + 1},
    }.items():
        add(f"ack-{name}", "v3 1 and 2: an ACK the worker refuses", [LLAMA_UP[0], wrong(host(ack(**change)))])
    add(
        "ack-below-the-minimum-of-both",
        "v3 1: ACK names min(host, worker)",
        [LLAMA_UP[0], tolerated(host(ack(max_frame=4096)))],
    )
    for name, body in {
        "extra-field": ack(x=1),
        "accept-1": ack(accept=1),
        "version-float": ack(v=3.0),
        "max-frame-null": ack(max_frame=None),
        "without-accept": {"v": 3, "max_frame": MIB64},
        "empty-object": {},
    }.items():
        add(
            f"ack-{name}",
            "v3 2: unknown fields are refused, types are exact",
            [LLAMA_UP[0], alien("host", json.dumps(body))],
        )
    add("ack-malformed", "v3 1: one JSON object", [LLAMA_UP[0], alien("host", "{")])
    return group


def exchanges() -> Group:
    group = Group("exchanges", "Every request with its answer, its raw frames and its progress.")
    add = group.add
    add("load", "seed: LOAD -> LOADED", [*LLAMA_UP, host(load()), worker(loaded())])
    no_config = {key: value for key, value in load().items() if key != "runtime_config"}
    add(
        "load-without-config",
        "an absent runtime_config is an empty one",
        [*LLAMA_UP, loose(host(load() | {"runtime_config": {}}), json.dumps(no_config)), worker(loaded())],
    )
    add(
        "load-with-buckets",
        "v3 3: LOADED + optional buckets",
        [
            *ANE_UP,
            host(load()),
            worker(progress(1, "setup", "load-0")),
            worker(progress(9, "setup", "load-0")),
            worker(loaded(model_ref="ane:0", buckets=[128, 256, 512])),
        ],
    )
    add(
        "load-refused",
        "seed: ERR artifact_invalid",
        [*LLAMA_UP, host(load()), worker(err("artifact_invalid", "load-0"))],
    )
    add("embed", "seed: EMBED_BATCH + i32 -> VECTORS + f32", [*EMBEDDING, worker(vectors(2), TWO_ROWS)])
    add("embed-one-token", "the smallest batch", [*LLAMA_UP, host(embed(1), i32(5)), worker(vectors(1), f32(1, 2, 3))])
    for pooling in ("cls", "last"):
        add(
            f"embed-{pooling}",
            "pooling mean, cls or last",
            [
                *LLAMA_UP,
                host(embed(1) | {"pooling": pooling, "normalize": False}, i32(5)),
                worker(vectors(1, 1), f32(-1)),
            ],
        )
    add(
        "embed-nonfinite",
        "v3 1: NaN and infinity pass the codec unchanged, the host refuses the result",
        [*LLAMA_UP, host(embed(1), i32(5)), worker(vectors(1), struct.pack("<3I", 0x7FC00000, 0x7F800000, 0xFF800000))],
    )
    add(
        "embed-progress",
        "seed: PROGRESS before the terminal reply",
        [*EMBEDDING, worker(progress(1, "inference")), worker(progress(2, "inference")), worker(vectors(2), TWO_ROWS)],
    )
    add(
        "embed-progress-u64",
        "seed: completed is u64",
        [
            *EMBEDDING,
            worker(progress(2**63, "inference")),
            worker(progress(2**64 - 1, "inference")),
            worker(vectors(2), TWO_ROWS),
        ],
    )
    add(
        "embed-progress-gaps",
        "strictly increasing, not by one",
        [*EMBEDDING, worker(progress(7, "inference")), worker(progress(1000, "inference")), worker(err("oom"))],
    )
    add(
        "embed-after-load",
        "v3 1: dims as LOADED named them",
        [*LLAMA_UP, host(load()), worker(loaded()), host(TWO, TWO_IDS), worker(vectors(2), TWO_ROWS)],
    )
    add(
        "embed-empty",
        "v3 3: an empty batch is the request's fault (invalid_request), not the stream's",
        [*LLAMA_UP, host(embed(), b""), worker(err("invalid_request"))],
    )
    add(
        "embed-empty-answered",
        "zero rows need zero bytes and still a raw frame",
        [*LLAMA_UP, host(embed(), b""), worker(vectors(0), b"")],
    )
    add(
        "embed-empty-item",
        "v3 3: a zero-token item is invalid_request",
        [*LLAMA_UP, host(embed(1, 0), i32(5)), worker(err("invalid_request"))],
    )
    add(
        "embed-count-short",
        "the worker drains and answers invalid_request; a host never sends it",
        [*LLAMA_UP, tolerated(host(embed(3), i32(1, 2))), worker(err("invalid_request"))],
    )
    add(
        "embed-count-long",
        "the worker drains and answers invalid_request; a host never sends it",
        [*LLAMA_UP, tolerated(host(embed(1), i32(1, 2))), worker(err("invalid_request"))],
    )
    add(
        "embed-not-divisible-by-4",
        "the worker drains and answers invalid_request; a host never sends it",
        [*LLAMA_UP, tolerated(host(embed(1), b"\1\2\3")), worker(err("invalid_request"))],
    )
    add(
        "embed-257-items",
        "v3 1: the host sends at most 256 items; a worker answers invalid_request",
        [*LLAMA_UP, tolerated(host(embed(*[1] * 257), i32(*range(257)))), worker(err("invalid_request"))],
    )
    add(
        "embed-256-items",
        "v3 1: 256 items are allowed",
        [*LLAMA_UP, host(embed(*[1] * 256), i32(*range(256))), worker(vectors(256, 1), f32(*range(256)))],
    )
    add(
        "embed-packed",
        "v3 3: packed_width",
        [
            *ANE_UP,
            host(embed(3, 2, packed_width=256), TWO_IDS),
            worker(progress(2, "inference")),
            worker(vectors(2), TWO_ROWS),
        ],
    )
    add(
        "embed-packed-refused",
        "v3 3: unsupported_packed_width",
        [*ANE_UP, host(embed(1, packed_width=384), i32(5)), worker(err("unsupported_packed_width"))],
    )
    add(
        "embed-unicode-ids",
        "ids are 1 to 64 bytes of UTF-8",
        [
            *LLAMA_UP,
            host(embed(1, req_id="é" * 32) | {"items": [{"id": "日" * 21, "n_tokens": 1}]}, i32(5)),
            worker(vectors(1, 1, "é" * 32), f32(1)),
        ],
    )
    add(
        "req-id-64-bytes",
        "v3 3: req_id of 1 to 64 bytes",
        [*LLAMA_UP, host(request("PING", "x" * 64)), worker(PONG | {"req_id": "x" * 64})],
    )
    add(
        "rerank",
        "seed: RERANK + ids, the query first -> SCORES + f32",
        [
            *LLAMA_UP,
            host(rerank(2, 3, 4), i32(*range(9))),
            worker(progress(1, "inference", "rerank-2")),
            worker(request("SCORES", "rerank-2"), f32(0.5, -7.25)),
        ],
    )
    add(
        "rerank-sequences",
        "v3 3: RERANK_SEQUENCES -> SCORES",
        [*ANE_UP, host(sequences(4, 3, 5), i32(*range(12))), worker(request("SCORES", "rerank-7"), f32(1, 2, 3))],
    )
    add(
        "rerank-unserved",
        "v3 3: known but unserved, drained, the connection lives",
        [
            *LLAMA_UP,
            host(sequences(2), i32(1, 2)),
            worker(err("unsupported_request", "rerank-7")),
            host(PING),
            worker(PONG),
        ],
    )
    answer = request("TEXT", "generate-1", text='yes "é"\n', n_prompt=3, n_gen=2, finish_reason="stop")
    add(
        "generate",
        "seed: GENERATE + prompt ids -> TEXT",
        [*LLAMA_UP, host(generate(), i32(1, 2, 3)), worker(progress(1, "inference", "generate-1")), worker(answer)],
    )
    add(
        "generate-ids",
        "v3 3: TEXT + generated_token_ids",
        [
            *LLAMA_UP,
            host(generate(), i32(1)),
            worker(answer | {"n_prompt": 1, "finish_reason": "length", "generated_token_ids": [9693, 2]}),
        ],
    )
    add(
        "generate-empty-ids",
        "an empty list is read like an absent one",
        [
            *LLAMA_UP,
            host(generate(), i32(1, 2, 3)),
            loose(worker(answer), json.dumps(answer | {"generated_token_ids": []})),
        ],
    )
    add(
        "generate-grammar",
        "seed: a non-empty grammar is rejected, not ignored",
        [*LLAMA_UP, host(generate(grammar="root ::= [0-9]+"), i32(1)), worker(err("invalid_request", "generate-1"))],
    )
    add(
        "unload",
        "seed: UNLOAD -> UNLOADED",
        [
            *LLAMA_UP,
            host(load()),
            worker(loaded()),
            host(UNLOAD),
            worker(progress(1, "control", "unload-1")),
            worker(request("UNLOADED", "unload-1")),
        ],
    )
    add(
        "unload-unknown",
        "v3 3: model_not_loaded",
        [*LLAMA_UP, host(UNLOAD), worker(err("model_not_loaded", "unload-1"))],
    )
    add(
        "unload-then-other-dims",
        "dims belong to a loaded model, not to its name for ever",
        [
            *LLAMA_UP,
            host(load()),
            worker(loaded()),
            host(UNLOAD),
            worker(err("model_not_loaded", "unload-1")),
            host(embed(1), i32(5)),
            worker(vectors(1, 2), f32(1, 2)),
        ],
    )
    add("ping", "seed: PING -> PONG", [*LLAMA_UP, host(PING), worker(PONG)])
    full = PONG | {
        "placement_share": 0.98,
        "buckets": [128, 256, 512],
        "ane_resident_shapes": {"ane:0": [128]},
        "ane_resident_packed": {"ane:0": [256]},
    }
    add(
        "ping-ane",
        "v3 3: PONG's optional fields",
        [*ANE_UP, host(PING), worker(progress(1, "control", "ping-1")), worker(full)],
    )
    add(
        "ping-integer-share",
        "an integer is a JSON number too",
        [
            *ANE_UP,
            host(PING),
            loose(worker(PONG | {"placement_share": 1.0}), json.dumps(PONG | {"placement_share": 1})),
        ],
    )
    add(
        "ping-u64",
        "v3 3: rss_mb and models_loaded are u64",
        [*LLAMA_UP, host(PING), worker(PONG | {"rss_mb": 2**64 - 1, "models_loaded": 2**64 - 1})],
    )
    inventory = {"executables": [{"id": "exe-0", "layers": [0, 1, 2]}], "cpu_stages": ["token_embedding", "pooling"]}
    for kind, field in (("SHAPE", "shape"), ("PACKED", "width")):
        ask = request(f"ANE_ADMIT_{kind}", "admit-1", model_ref="ane:0", **{field: 256})
        add(
            f"ane-admit-{kind.lower()}",
            "v3 3: ANE_ADMIT -> ADMITTED, progress in setup",
            [
                *ANE_UP,
                host(ask),
                worker(progress(1, "setup", "admit-1")),
                worker(request("ADMITTED", "admit-1", inventory=inventory)),
            ],
        )
        drop = request(f"ANE_EVICT_{kind}", "evict-1", model_ref="ane:0", **{field: 256})
        add(
            f"ane-evict-{kind.lower()}",
            "v3 3: ANE_EVICT -> EVICTED, progress in control",
            [*ANE_UP, host(drop), worker(progress(1, "control", "evict-1")), worker(request("EVICTED", "evict-1"))],
        )
    empty = {"executables": [], "cpu_stages": []}
    add(
        "ane-admit-empty-inventory",
        "v3 3: ADMITTED",
        [
            *ANE_UP,
            host(request("ANE_ADMIT_SHAPE", "admit-1", model_ref="ane:0", shape=128)),
            worker(request("ADMITTED", "admit-1", inventory=empty)),
        ],
    )
    add(
        "cuda-phases",
        "v3 4: on owned-cuda setup, then inference",
        [
            *CUDA_UP,
            host(TWO, TWO_IDS),
            worker(progress(1, "setup")),
            worker(progress(2, "inference")),
            worker(progress(4, "inference")),
            worker(vectors(2), TWO_ROWS),
        ],
    )
    add(
        "cuda-straight-to-inference",
        "v3 4: the first frame may already be the switch",
        [*CUDA_UP, host(TWO, TWO_IDS), worker(progress(2, "inference")), worker(vectors(2), TWO_ROWS)],
    )
    add(
        "cuda-reply-in-setup",
        "v3 4: the host accepts a terminal reply in either phase",
        [*CUDA_UP, host(TWO, TWO_IDS), worker(progress(1, "setup")), worker(err("oom"))],
    )
    add(
        "cuda-load",
        "v3 4: LOAD stays in setup on every engine",
        [*CUDA_UP, host(load()), worker(progress(1, "setup", "load-0")), worker(loaded(model_ref="owned-cuda:0"))],
    )
    add(
        "err-without-req-id",
        "v3 3: omitted only when unknown; accepted",
        [*EMBEDDING, worker(err("inference_failed", None))],
    )
    for code in CODES:
        add(f"err-{code}", "v3 3: the closed list of codes", [*EMBEDDING, worker(err(code))])
    add("shutdown-idle", "seed: SHUTDOWN -> the worker exits 0", [*LLAMA_UP, host(SHUTDOWN), eof("worker", "ok")])
    add(
        "two-exchanges",
        "one exchange after the other; the counter starts anew",
        [
            *EMBEDDING,
            worker(progress(5, "inference")),
            worker(vectors(2), TWO_ROWS),
            host(embed(1, req_id="embed-2"), i32(5)),
            worker(progress(1, "inference", "embed-2")),
            worker(vectors(1, 3, "embed-2"), f32(1, 2, 3)),
        ],
    )
    add(
        "any-field-order",
        "JSON objects have no order",
        [
            *LLAMA_UP,
            loose(host(PING), '{"req_id": "ping-1", "type": "PING"}'),
            loose(worker(PONG), '{ "models_loaded":1, "rss_mb":12,\n"req_id":"ping-1", "type":"PONG" }'),
        ],
    )
    return group


def shutdowns() -> Group:
    group = Group("endings", "SHUTDOWN and the end of the stream.")
    add = group.add
    add(
        "shutdown-busy",
        "seed: exits 0 after the current request",
        [
            *EMBEDDING,
            host(SHUTDOWN),
            worker(progress(1, "inference")),
            worker(vectors(2), TWO_ROWS),
            eof("worker", "ok"),
        ],
    )
    add("shutdown-busy-err", "the current request may also fail", [*EMBEDDING, host(SHUTDOWN), worker(err("oom"))])
    add(
        "shutdown-busy-ping",
        "an exchange without raw frames ends the same way",
        [*LLAMA_UP, host(PING), host(SHUTDOWN), worker(PONG)],
    )
    add("shutdown-twice", "nothing follows SHUTDOWN", [*LLAMA_UP, host(SHUTDOWN), wrong(host(SHUTDOWN))])
    add("shutdown-twice-busy", "nothing follows SHUTDOWN", [*EMBEDDING, host(SHUTDOWN), wrong(host(SHUTDOWN))])
    add("request-after-shutdown", "nothing follows SHUTDOWN", [*LLAMA_UP, host(SHUTDOWN), wrong(host(PING))])
    add("request-after-busy-shutdown", "nothing follows SHUTDOWN", [*EMBEDDING, host(SHUTDOWN), wrong(host(PING))])
    add(
        "worker-speaks-after-shutdown",
        "there is no exchange to speak for",
        [*LLAMA_UP, host(SHUTDOWN), wrong(worker(PONG))],
    )
    add(
        "second-reply-after-shutdown",
        "one terminal reply",
        [*LLAMA_UP, host(PING), host(SHUTDOWN), worker(PONG), wrong(worker(PONG))],
    )
    add("shutdown-before-hello", "seed: the worker speaks first", [wrong(host(SHUTDOWN))])
    add(
        "shutdown-with-field",
        "v3 2: unknown fields are refused",
        [*LLAMA_UP, alien("host", '{"type":"SHUTDOWN","now":true}')],
    )
    for sender in ("host", "worker"):
        add(f"eof-idle-{sender}", "v3 1: EOF between frames is an orderly close", [*LLAMA_UP, eof(sender, "ok")])
        add(
            f"eof-exchange-open-{sender}",
            "v3 1: also in mid-exchange, by the codec; a host counts a crash",
            [*EMBEDDING, eof(sender, "ok")],
        )
        add(
            f"eof-in-length-{sender}",
            "v3 1: EOF inside a frame is a fault",
            [*EMBEDDING, stream(sender, b"\1\0", "pending"), eof(sender, "remote_error")],
        )
        add(
            f"eof-after-length-{sender}",
            "v3 1: EOF inside a frame is a fault",
            [*EMBEDDING, stream(sender, b"\1\0\0\0", "pending"), eof(sender, "remote_error")],
        )
    cut = bytes.fromhex(frame(text(PING)))[:-1]
    add(
        "eof-in-json",
        "v3 1: EOF inside a frame is a fault",
        [*LLAMA_UP, stream("host", cut, "pending"), eof("host", "remote_error")],
    )
    add("eof-before-hello", "no frame has begun", [eof("worker", "ok")])
    add(
        "eof-in-hello",
        "v3 1: EOF inside a frame is a fault",
        [stream("worker", bytes.fromhex(frame(text(hello())))[:40], "pending"), eof("worker", "remote_error")],
    )
    add("eof-after-hello", "no frame has begun", [LLAMA_UP[0], eof("worker", "ok")])
    header = bytes.fromhex(frame(text(TWO)))
    add(
        "eof-before-raw-host",
        "between two frames: orderly",
        [*LLAMA_UP, stream("host", header, "pending"), eof("host", "ok")],
    )
    raw = bytes.fromhex(frame(TWO_IDS))
    add(
        "eof-in-raw-host",
        "v3 1: EOF inside a frame is a fault",
        [*LLAMA_UP, stream("host", header + raw[:-1], "pending"), eof("host", "remote_error")],
    )
    reply = bytes.fromhex(frame(text(vectors(2))))
    add(
        "eof-before-raw-worker",
        "between two frames; the host has an exchange open: a crash",
        [*EMBEDDING, stream("worker", reply, "pending"), eof("worker", "ok")],
    )
    add(
        "eof-in-raw-worker",
        "v3 1: EOF inside a frame is a fault",
        [
            *EMBEDDING,
            stream("worker", reply + bytes.fromhex(frame(TWO_ROWS))[:-1], "pending"),
            eof("worker", "remote_error"),
        ],
    )
    return group


def progress_violations() -> Group:
    group = Group("progress_violations", "Progress that is not completed work of the running exchange.")
    add = group.add
    counter = "seed: counters strictly increase for completed work"
    add("zero-first", "v3 4: completed is at least 1", [*EMBEDDING, wrong(worker(progress(0, "inference")))])
    add("equal", counter, [*EMBEDDING, worker(progress(2, "inference")), wrong(worker(progress(2, "inference")))])
    add("decreasing", counter, [*EMBEDDING, worker(progress(2, "inference")), wrong(worker(progress(1, "inference")))])
    add(
        "reset-by-phase",
        "v3 4: a phase change doesn't reset the counter",
        [*CUDA_UP, host(TWO, TWO_IDS), worker(progress(2, "setup")), wrong(worker(progress(1, "inference")))],
    )
    add(
        "equal-at-switch",
        "v3 4: a phase change doesn't reset the counter",
        [*CUDA_UP, host(TWO, TWO_IDS), worker(progress(2, "setup")), wrong(worker(progress(2, "inference")))],
    )
    for name, raw in (
        ("2-64", str(2**64)),
        ("negative", "-1"),
        ("float", "1.0"),
        ("null", "null"),
        ("string", '"1"'),
        ("5000-digits", "9" * 5000),
    ):
        body = json.dumps(progress(0, "inference")).replace('"completed": 0', f'"completed": {raw}')
        add(f"counter-{name}", "seed: completed is u64", [*EMBEDDING, alien("worker", body)])
    add(
        "other-req-id",
        "seed: each frame belongs to the current request",
        [*EMBEDDING, wrong(worker(progress(1, "inference", "embed-0")))],
    )
    add(
        "no-req-id",
        "seed: PROGRESS has a req_id",
        [*EMBEDDING, alien("worker", '{"type":"PROGRESS","completed":1,"phase":"inference"}')],
    )
    for phase in ("warmup", "SETUP", "", None, 1):
        add(
            f"phase-{phase}",
            "seed: setup, inference or control",
            [*EMBEDDING, alien("worker", json.dumps(progress(1, phase)))],
        )
    rule = "v3 4: the phases accepted in each exchange"
    shape = request("ANE_ADMIT_SHAPE", "admit-1", model_ref="ane:0", shape=128)
    evict = request("ANE_EVICT_PACKED", "evict-1", model_ref="ane:0", width=256)
    for name, opening, ident, bad in (
        ("load", [*LLAMA_UP, host(load())], "load-0", ("inference", "control")),
        ("ping", [*LLAMA_UP, host(PING)], "ping-1", ("inference", "setup")),
        ("unload", [*LLAMA_UP, host(UNLOAD)], "unload-1", ("inference", "setup")),
        ("admit", [*ANE_UP, host(shape)], "admit-1", ("inference", "control")),
        ("evict", [*ANE_UP, host(evict)], "evict-1", ("inference", "setup")),
        ("embed-llama", EMBEDDING, "embed-1", ("setup", "control")),
        ("embed-ane", [*ANE_UP, host(TWO, TWO_IDS)], "embed-1", ("setup", "control")),
        ("embed-cuda", [*CUDA_UP, host(TWO, TWO_IDS)], "embed-1", ("control",)),
        ("rerank", [*LLAMA_UP, host(rerank(1, 1), i32(1, 2))], "rerank-2", ("setup",)),
        ("sequences", [*ANE_UP, host(sequences(1), i32(1))], "rerank-7", ("setup",)),
        ("generate", [*LLAMA_UP, host(generate(), i32(1))], "generate-1", ("setup",)),
        ("cuda-load", [*CUDA_UP, host(load())], "load-0", ("inference",)),
    ):
        for phase in bad:
            add(f"{name}-in-{phase}", rule, [*opening, wrong(worker(progress(1, phase, ident)))])
    add(
        "cuda-back-to-setup",
        "v3 4: setup, then inference, never back",
        [*CUDA_UP, host(TWO, TWO_IDS), worker(progress(1, "inference")), wrong(worker(progress(2, "setup")))],
    )
    add("idle", "no exchange, no progress", [*LLAMA_UP, wrong(worker(progress(1, "inference")))])
    add(
        "after-reply",
        "seed: progress precedes the terminal reply",
        [*EMBEDDING, worker(vectors(2), TWO_ROWS), wrong(worker(progress(1, "inference")))],
    )
    add(
        "after-err",
        "seed: progress precedes the terminal reply",
        [*EMBEDDING, worker(err("oom")), wrong(worker(progress(1, "inference")))],
    )
    add(
        "between-header-and-raw",
        "seed: the header is immediately followed by its raw payload",
        [*EMBEDDING, alien("worker", text(vectors(2)), text(progress(1, "inference")), TWO_ROWS)],
    )
    add(
        "extra-field",
        "v3 2: unknown fields are refused",
        [*EMBEDDING, alien("worker", json.dumps(progress(1, "inference") | {"total": 2}))],
    )
    add("from-the-host", "only a worker reports progress", [*EMBEDDING, alien("host", text(progress(1, "inference")))])
    return group


def reply_violations() -> Group:
    group = Group("reply_violations", "Terminal replies that don't belong to their request.")
    add = group.add
    add("idle-pong", "no exchange, no reply", [*LLAMA_UP, wrong(worker(PONG))])
    add("idle-err", "no exchange, no reply", [*LLAMA_UP, wrong(worker(err("oom", None)))])
    add("two-replies", "exactly one terminal reply", [*LLAMA_UP, host(PING), worker(PONG), wrong(worker(PONG))])
    add(
        "two-vectors",
        "exactly one terminal reply",
        [*EMBEDDING, worker(vectors(2), TWO_ROWS), wrong(worker(vectors(2), TWO_ROWS))],
    )
    add("other-req-id", "matching req_id", [*LLAMA_UP, host(PING), wrong(worker(PONG | {"req_id": "ping-0"}))])
    add("vectors-other-req-id", "matching req_id", [*EMBEDDING, wrong(worker(vectors(2, req_id="embed-0"), TWO_ROWS))])
    add(
        "err-other-req-id",
        "ERR: absent accepted, different refused",
        [*EMBEDDING, wrong(worker(err("oom", "embed-0")))],
    )
    for name, reply, raw in (
        ("pong", PONG | {"req_id": "embed-1"}, None),
        ("scores", request("SCORES", "embed-1"), f32(1, 2)),
        ("loaded", loaded("embed-1"), None),
        ("unloaded", request("UNLOADED", "embed-1"), None),
        ("evicted", request("EVICTED", "embed-1"), None),
        ("text", request("TEXT", "embed-1", text="", n_prompt=1, n_gen=0, finish_reason="stop"), None),
        ("admitted", request("ADMITTED", "embed-1", inventory={"executables": [], "cpu_stages": []}), None),
    ):
        add(f"{name}-to-embed", "each request has one successful reply", [*EMBEDDING, wrong(worker(reply, raw))])
    add(
        "vectors-to-rerank",
        "each request has one successful reply",
        [*LLAMA_UP, host(rerank(1, 1), i32(1, 2)), wrong(worker(vectors(1, req_id="rerank-2"), f32(1, 2, 3)))],
    )
    add("n-short", "v3 1: n unlike the items", [*EMBEDDING, wrong(worker(vectors(1), f32(1, 2, 3)))])
    add("n-long", "v3 1: n unlike the items", [*EMBEDDING, wrong(worker(vectors(3), f32(*range(9))))])
    add("n-u64", "v3 1: n unlike the items", [*EMBEDDING, alien("worker", text(vectors(2**64 - 1)))])
    add("n-2-64", "v3 3: n is u64", [*EMBEDDING, alien("worker", text(vectors(2**64)))])
    add("n-negative", "v3 3: n is u64", [*EMBEDDING, alien("worker", text(vectors(-2)))])
    add("dims-zero", "v3 1: dims 0", [*EMBEDDING, wrong(worker(vectors(2, 0), b""))])
    add(
        "dims-unlike-loaded",
        "v3 1: dims unlike LOADED.dims",
        [*LLAMA_UP, host(load()), worker(loaded()), host(TWO, TWO_IDS), wrong(worker(vectors(2, 2), f32(1, 2, 3, 4)))],
    )
    add("dims-2-32", "v3 3: dims is u32", [*EMBEDDING, alien("worker", text(vectors(2, 2**32)))])
    add(
        "dims-beyond-max-frame",
        "what can't arrive under max_frame is refused at its header",
        [*EMBEDDING, alien("worker", text(vectors(2, 2**32 - 1)))],
    )
    add("loaded-dims-zero", "LOADED.dims is a width", [*LLAMA_UP, host(load()), wrong(worker(loaded(dims=0)))])
    add(
        "loaded-ref-twice",
        "v3 3: duplicate model_refs never occur",
        [*LLAMA_UP, host(load()), worker(loaded()), host(load("load-1")), wrong(worker(loaded("load-1")))],
    )
    generated = request("TEXT", "generate-1", text="a", n_prompt=3, n_gen=2, finish_reason="stop")
    for name, change in {
        "n-prompt-short": {"n_prompt": 2},
        "n-prompt-long": {"n_prompt": 4},
        "n-gen-above-max-tokens": {"n_gen": 9},
        "ids-short": {"generated_token_ids": [5]},
        "ids-long": {"generated_token_ids": [5, 6, 7]},
        "ids-without-n-gen": {"n_gen": 0, "generated_token_ids": [5]},
    }.items():
        steps = [*LLAMA_UP, host(generate(), i32(1, 2, 3)), wrong(worker(generated | change))]
        add(f"text-{name}", "a reply that contradicts its request", steps)
    exact = "v3 1: the receiver knows the exact byte count"
    for name, reply_raw in (
        ("short", TWO_ROWS[:-4]),
        ("long", TWO_ROWS + f32(0)),
        ("odd", TWO_ROWS[:-1]),
        ("empty", b""),
    ):
        add(f"vectors-raw-{name}", exact, [*EMBEDDING, wrong(worker(vectors(2), reply_raw))])
    opening = [*LLAMA_UP, host(rerank(1, 1, 1), i32(1, 2, 3))]
    for name, reply_raw in (("short", f32(1)), ("long", f32(1, 2, 3)), ("empty", b"")):
        add(f"scores-raw-{name}", exact, [*opening, wrong(worker(request("SCORES", "rerank-2"), reply_raw))])
    add(
        "raw-length-only",
        "compared before anything is allocated",
        [*EMBEDDING, stream("worker", bytes.fromhex(frame(text(vectors(2)))) + struct.pack("<I", 23))],
    )
    add(
        "raw-over-max-frame",
        "v3 1: max_frame",
        [*EMBEDDING, stream("worker", bytes.fromhex(frame(text(vectors(2)))) + struct.pack("<I", MIB64 + 1))],
    )
    add(
        "err-then-raw",
        "v3 3: ERR is never followed by raw",
        [*EMBEDDING, worker(err("oom")), alien("worker", TWO_ROWS)],
    )
    for code in ("", "OOM", "engine_crashed", "deadline_exceeded", "sequence_too_long", "ane_private_api_unavailable"):
        add(
            f"err-code-{code or 'empty'}",
            "v3 3: an unknown code is a protocol fault",
            [*EMBEDDING, alien("worker", text(err(code)))],
        )
    add(
        "err-null-req-id",
        "v3 2: optional fields are omitted, never null",
        [*EMBEDDING, alien("worker", '{"type":"ERR","req_id":null,"code":"oom","msg":""}')],
    )
    add(
        "err-without-msg",
        "seed: ERR {req_id, code, msg}",
        [*EMBEDDING, alien("worker", '{"type":"ERR","req_id":"embed-1","code":"oom"}')],
    )
    add(
        "pong-null-share",
        "v3 2: optional fields are omitted, never null",
        [*LLAMA_UP, host(PING), alien("worker", text(PONG | {"placement_share": None}))],
    )
    add(
        "pong-infinite-share",
        "v3 3: f64",
        [*LLAMA_UP, host(PING), alien("worker", text(PONG | {"placement_share": "@"}).replace(b'"@"', b"1e999"))],
    )
    add(
        "pong-nan-share",
        "NaN is not JSON",
        [*LLAMA_UP, host(PING), alien("worker", text(PONG | {"placement_share": "@"}).replace(b'"@"', b"NaN"))],
    )
    add("pong-rss-2-64", "v3 3: u64", [*LLAMA_UP, host(PING), alien("worker", text(PONG | {"rss_mb": 2**64}))])
    add("loaded-ms-2-64", "v3 3: u64", [*LLAMA_UP, host(load()), alien("worker", text(loaded(cold_load_ms=2**64)))])
    add(
        "text-finish-reason",
        "stop or length",
        [
            *LLAMA_UP,
            host(generate(), i32(1)),
            alien("worker", text(request("TEXT", "generate-1", text="", n_prompt=1, n_gen=0, finish_reason="eos"))),
        ],
    )
    add("unknown-type", "v3 3: unknown type", [*EMBEDDING, alien("worker", '{"type":"VECTOR","req_id":"embed-1"}')])
    add(
        "no-type",
        "v3 2: every other frame has a type",
        [*EMBEDDING, alien("worker", '{"req_id":"embed-1","code":"oom","msg":""}')],
    )
    add(
        "type-twice",
        "one type",
        [*EMBEDDING, alien("worker", '{"type":"VECTORS","type":"ERR","req_id":"embed-1","code":"oom","msg":""}')],
    )
    add(
        "lower-case-type",
        "v3 2: SCREAMING_SNAKE_CASE",
        [*LLAMA_UP, host(PING), alien("worker", text(PONG | {"type": "pong"}))],
    )
    add("host-message-from-the-worker", "each end has its own messages", [*EMBEDDING, alien("worker", text(PING))])
    for name, junk in {"empty": b"", "binary": TWO_ROWS, "cut": b'{"type":"PONG"', "array": b"[]"}.items():
        add(f"malformed-{name}", "v3 1: one JSON object", [*EMBEDDING, alien("worker", junk)])
    add("frame-over-max", "v3 1: max_frame", [*EMBEDDING, stream("worker", struct.pack("<I", MIB64 + 1))])
    for kind, reply in {
        "pong": PONG,
        "loaded": loaded("ping-1"),
        "vectors": vectors(0, req_id="ping-1"),
        "scores": request("SCORES", "ping-1"),
        "unloaded": request("UNLOADED", "ping-1"),
        "evicted": request("EVICTED", "ping-1"),
        "err": err("oom", "ping-1"),
        "text": request("TEXT", "ping-1", text="", n_prompt=1, n_gen=0, finish_reason="stop"),
        "admitted": request("ADMITTED", "ping-1", inventory={"executables": [], "cpu_stages": []}),
    }.items():
        add(
            f"extra-field-{kind}",
            "v3 2: unknown fields are refused outside HELLO",
            [*LLAMA_UP, host(PING), alien("worker", text(reply | {"x": 1}))],
        )
    add(
        "extra-field-in-inventory",
        "v3 2: also inside",
        [
            *LLAMA_UP,
            host(PING),
            alien(
                "worker",
                text(
                    request(
                        "ADMITTED",
                        "ping-1",
                        inventory={"executables": [{"id": "e", "layers": [], "x": 1}], "cpu_stages": []},
                    )
                ),
            ),
        ],
    )
    return group


def request_violations() -> Group:
    group = Group(
        "request_violations", "Requests that leave the worker unable to trust the stream, or the host unable to send."
    )
    add = group.add
    add(
        "second-request",
        "seed: one in-flight request per connection",
        [*LLAMA_UP, host(PING), wrong(host(request("PING", "ping-2")))],
    )
    add(
        "second-request-raw",
        "seed: one in-flight request per connection",
        [*EMBEDDING, wrong(host(embed(1, req_id="embed-2"), i32(5)))],
    )
    add("unknown-type", "v3 3: unknown type", [*LLAMA_UP, alien("host", '{"type":"EMBED","req_id":"a"}')])
    add("no-type", "v3 2: every frame has a type", [*LLAMA_UP, alien("host", '{"req_id":"a"}')])
    add("type-number", "v3 2: the type is a string", [*LLAMA_UP, alien("host", '{"type":1,"req_id":"a"}')])
    add("worker-message-from-the-host", "each end has its own messages", [*LLAMA_UP, alien("host", text(PONG))])
    for name, junk in {
        "empty": b"",
        "binary": TWO_IDS,
        "cut": b'{"type":"PING"',
        "trailing": text(PING) + b" x",
        "array": b"[]",
        "bad-utf-8": b'{"type":"PING","req_id":"\xff"}',
        "surrogate": b'{"type":"PING","req_id":"\xed\xa0\x80"}',
        "lone-escape": b'{"type":"PING","req_id":"\\ud800"}',
        "deep": b'{"type":"PING","req_id":' + b"[" * FAR + b"]" * FAR + b"}",
        "deep-before-the-type": b'{"x":' + b"[" * 40 + b"]" * 40 + b',"type":"PING","req_id":"a"}',
        "comment": b'{"type":"PING","req_id":"a"} // no',
        "control-character": b'{"type":"PING","req_id":"a\nb"}',
    }.items():
        add(f"malformed-{name}", "v3 3: malformed JSON: the stream can't be trusted", [*LLAMA_UP, alien("host", junk)])
    size = "v3 3: req_id and item id string of 1 to 64 bytes"
    for name, ident in (
        ("empty", ""),
        ("65", "x" * 65),
        ("66-bytes-33-characters", "é" * 33),
        ("129-bytes-43-characters", "日" * 43),
    ):
        add(f"req-id-{name}", size, [*LLAMA_UP, wrong(host(request("PING", ident)))])
        add(
            f"item-id-{name}",
            size,
            [*LLAMA_UP, wrong(host(embed(1) | {"items": [{"id": ident, "n_tokens": 1}]}, i32(5)))],
        )
        add(f"embed-req-id-{name}", size, [*LLAMA_UP, wrong(host(embed(1, req_id=ident), i32(5)))])
    add(
        "item-id-66-bytes-escaped",
        size,
        [*LLAMA_UP, alien("host", json.dumps(embed(1) | {"items": [{"id": "é" * 33, "n_tokens": 1}]}))],
    )
    for name, value in (("null", None), ("number", 7), ("true", True)):
        add(f"req-id-{name}", size, [*LLAMA_UP, alien("host", json.dumps(request("PING", value)))])  # type: ignore[arg-type]
    types = "v3 3: types"
    for name, message in {
        "n-tokens-negative": embed(-1),
        "n-tokens-2-32": embed(2**32),
        "n-tokens-float": embed(1.0),  # type: ignore[arg-type]
        "pooling-unknown": embed(1) | {"pooling": "max"},
        "pooling-null": embed(1) | {"pooling": None},
        "normalize-1": embed(1) | {"normalize": 1},
        "items-object": embed(1) | {"items": {}},
        "packed-width-null": embed(1, packed_width=None),
        "packed-width-negative": embed(1, packed_width=-1),
        "item-extra-field": embed(1) | {"items": [{"id": "0", "n_tokens": 1, "text": "hi"}]},
        "item-without-id": embed(1) | {"items": [{"n_tokens": 1}]},
        "candidate-with-id": rerank(1) | {"candidates": [{"id": "0", "n_tokens": 1}]},
        "query-negative": rerank(-1, 1),
        "sequence-2-32": sequences(2**32),
        "max-tokens-negative": generate() | {"max_tokens": -1},
        "max-tokens-2-32": generate() | {"max_tokens": 2**32},
        "grammar-null": generate(grammar=None),
        "shape-negative": request("ANE_ADMIT_SHAPE", model_ref="a", shape=-1),
        "shape-2-32": request("ANE_EVICT_SHAPE", model_ref="a", shape=2**32),
        "width-string": request("ANE_ADMIT_PACKED", model_ref="a", width="256"),
        "width-null": request("ANE_EVICT_PACKED", model_ref="a", width=None),
        "config-number": load() | {"runtime_config": {"threads": 2}},
        "config-null": load() | {"runtime_config": None},
        "config-list": load() | {"runtime_config": []},
        "path-null": load() | {"artifact_path": None},
        "model-ref-number": UNLOAD | {"model_ref": 0},
    }.items():
        add(name, types, [*LLAMA_UP, alien("host", json.dumps(message))])
    everything = {
        "LOAD": load(),
        "EMBED_BATCH": embed(1),
        "RERANK": rerank(1, 1),
        "RERANK_SEQUENCES": sequences(1),
        "GENERATE": generate(),
        "UNLOAD": UNLOAD,
        "PING": PING,
        "ANE_ADMIT_SHAPE": request("ANE_ADMIT_SHAPE", model_ref="a", shape=1),
        "ANE_EVICT_SHAPE": request("ANE_EVICT_SHAPE", model_ref="a", shape=1),
        "ANE_ADMIT_PACKED": request("ANE_ADMIT_PACKED", model_ref="a", width=1),
        "ANE_EVICT_PACKED": request("ANE_EVICT_PACKED", model_ref="a", width=1),
    }
    for kind, message in everything.items():
        add(
            f"extra-field-{kind.lower()}",
            "v3 2: unknown fields are refused outside HELLO",
            [*LLAMA_UP, alien("host", json.dumps(message | {"x": 1}))],
        )
        lost = next(key for key in reversed(message) if key != "type" and key != "runtime_config")
        add(
            f"without-{lost}-{kind.lower()}",
            "every required field",
            [*LLAMA_UP, alien("host", json.dumps({key: value for key, value in message.items() if key != lost}))],
        )
    small = [worker(hello()), host(ack(max_frame=256))]
    add(
        "json-over-max-frame",
        "v3 1: both sides enforce the negotiated value in both directions",
        [*small, stream("host", struct.pack("<I", 257))],
        host_max_frame=256,
    )
    add(
        "raw-over-max-frame",
        "v3 1: a writer refuses an oversize payload before the first byte",
        [*small, wrong(host(embed(65), i32(*range(65))))],
        host_max_frame=256,
    )
    add(
        "reply-over-max-frame",
        "v3 1: in both directions",
        [*small, host(embed(1), i32(5)), wrong(worker(vectors(1, 65), f32(*range(65))))],
        host_max_frame=256,
    )
    add(
        "reply-json-over-max-frame",
        "v3 1: in both directions",
        [*small, host(embed(1), i32(5)), wrong(worker(err("oom", msg="m" * 256)))],
        host_max_frame=256,
    )
    add(
        "raw-exactly-max-frame",
        "v3 1: the limit itself is allowed",
        [*small, host(embed(64), i32(*range(64))), worker(vectors(1, 64), f32(*range(64)))],
        host_max_frame=256,
    )
    add(
        "frame-4-gib",
        "the length is checked before anything is allocated",
        [*LLAMA_UP, stream("host", b"\xff\xff\xff\xff")],
    )
    return group


GROUPS = (
    handshake,
    handshake_violations,
    exchanges,
    shutdowns,
    progress_violations,
    reply_violations,
    request_violations,
)


if __name__ == "__main__":
    for make in GROUPS:
        made = make()
        made.write()
        print(f"{made.name}: {len(made.vectors)}")
