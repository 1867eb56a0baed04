"""Mutated control frames and mutated sessions through the protocol, in memory.

``run`` sends mutated headers through one end of a connection, ``run_sessions`` whole scripts through both ends with
somebody in the middle who spoils the bytes. Every case must end in a typed fault, an orderly end or a legal
completion; anything else is a finding. Both are deterministic for a seed, need no process and no network, and return a
dict that can go into a report. By hand: ``python -m tests.faults.fuzz_codec --headers 1000000 --sessions 20000``.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines.protocol import messages as m
from engines.protocol.connection import Connection, PeerClosed, ReplyReceived, RequestReceived, Role, State
from engines.protocol.errors import LocalProtocolError, RemoteProtocolError

VECTORS = Path(__file__).parents[1] / "vectors"
CORPUS = Path(__file__).parent / "corpus" / "headers.json"
MAX_EVENTS = 200
"""No input of ours completes more events than this; a loop that passes it would never end."""

Target = tuple[str, bytes]
"""What a header is aimed at (``hello``, ``ack``, ``host``, ``worker``) and its payload."""

_WORDS: tuple[bytes, ...] = (
    *(b"null", b"true", b"[]", b"{}", b'""', b"-1", b"0", b"1.0", b"1e999", b"-0", b"4294967296", b"65535", b"NaN"),
    *(b"18446744073709551615", b"18446744073709551616", b"9" * 400, b"[" * 200, b'{"a":' * 100, b'"\\ud800"', b"\xff"),
    *(b"\\u0000", b"\\u00e9", b"\x00", b'"type"', b'"req_id"', b'"x":1,', b",", b":", b'"', b"}", b"]", b" ", b"\xe9"),
    *(b'"PING"', b'"ERR"', b'"PROGRESS"', b'"setup"', b'"inference"', b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"/**/"),
)


def seeds(*, legal: bool = False) -> list[Target]:
    """Return every control frame of the wire vectors, or the *legal* ones, with the end it is meant for."""
    found: dict[Target, None] = {}
    for path in sorted(VECTORS.glob("*.json")):
        for vector in json.loads(path.read_text("utf-8"))["vectors"]:
            for step in vector["steps"]:
                frames = step.get("frames")
                if not frames or len(frames[0]) < 10 or (legal and step["receiver"] != "ok"):
                    continue
                payload = bytes.fromhex(frames[0])[4:]
                first = payload[:40]
                if step["from"] == "host":
                    aim = "ack" if b'"type"' not in payload and b"accept" in payload else "worker"
                else:
                    aim = "hello" if first.startswith(b'{"v"') else "host"
                if len(payload) < 4000:
                    found[aim, payload] = None
    return list(found)


def mutate(data: bytes, rng: random.Random, others: list[Target]) -> bytes:
    """Return *data* with one to four small accidents."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 4))):
        size = len(out)
        at = rng.randrange(size + 1)
        kind = rng.randrange(12)
        if kind == 0 and size:
            out[at % size] ^= 1 << rng.randrange(8)
        elif kind == 1 and size:
            out[at % size] = rng.randrange(256)
        elif kind == 2:
            del out[at : at + rng.randrange(1, 9)]
        elif kind == 3:
            out[at:at] = rng.choice(_WORDS)
        elif kind == 4:
            # Replace one JSON value or name by a word: the grammar mostly survives, the types don't.
            tokens = list(_TOKEN.finditer(out))
            if tokens:
                start, end = rng.choice(tokens).span()
                out[start:end] = rng.choice(_WORDS)
        elif kind == 5:
            end = at + rng.randrange(1, 30)
            out[at:at] = out[at:end]
        elif kind == 6:
            del out[at:]
        elif kind == 7:
            other = rng.choice(others)[1]
            out[at:] = other[rng.randrange(len(other) + 1) :]
        elif kind == 8:
            out[at:at] = bytes((rng.randrange(256),))
        else:
            # Gentle ones, that leave the grammar whole: another number, another order of letters, more space.
            tokens = list(_TOKEN.finditer(out))
            if tokens:
                token = rng.choice(tokens)
                start, end = token.span()
                if kind == 9 and token[0].isdigit():
                    out[start:end] = b"%d" % max(0, int(token[0][:20]) + rng.choice((-1, 1, 255, 2**32, 2**63)))
                elif kind == 10 and end - start > 3:
                    inner = rng.randrange(start + 1, end - 1)
                    out[inner:inner] = rng.choice((b"a", b"\\u00e9", "é".encode(), b"\\n", b"_"))
                else:
                    out[start:start] = rng.choice((b" ", b"\n\t", b"\r"))
    return bytes(out)


_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?|true|false|null')
_REQUESTS: dict[bytes, m.AnyRequest] = {
    b"LOADED": m.Load(req_id="load-0", artifact_path="", artifact_digest="", format=""),
    b"SCORES": m.RerankSequences(req_id="rerank-7", model_ref="owned:0", sequences=[m.Segment(n_tokens=1)] * 3),
    b"TEXT": m.Generate(req_id="generate-1", model_ref="llama:0", max_tokens=8),
    b"UNLOADED": m.Unload(req_id="unload-1", model_ref="llama:0"),
    b"ADMITTED": m.AneAdmitShape(req_id="admit-1", model_ref="ane:0", shape=128),
    b"EVICTED": m.AneEvictShape(req_id="evict-1", model_ref="ane:0", shape=128),
    b"PONG": m.Ping(req_id="ping-1"),
}
PROMPT_BYTES = 12
"""The raw frame of the request that the end at hand waits for: three ids, as the vectors of GENERATE send."""
_EMBED = m.EmbedBatch(
    req_id="embed-1",
    model_ref="llama:0",
    pooling=m.Pooling.MEAN,
    normalize=True,
    items=[m.Item(id="0", n_tokens=3), m.Item(id="1", n_tokens=2)],
)
_TYPE = re.compile(rb'"type":\s*"([A-Z_]+)"')


def _end(aim: str, payload: bytes) -> Connection:
    """Return a connection that waits for a frame like *payload*."""
    if aim == "hello":
        return Connection(Role.HOST)
    if aim == "ack":
        worker = Connection(Role.WORKER)
        worker.state = State.ACK
        return worker
    if aim == "worker":
        worker = Connection(Role.WORKER)
        worker.state = State.IDLE
        return worker
    host = Connection(Role.HOST, engine=m.CUDA_ENGINE)
    named = _TYPE.search(payload)
    host.expectation.open(_REQUESTS.get(named[1] if named else b"", _EMBED), PROMPT_BYTES, m.CUDA_ENGINE)
    host.state = State.BUSY
    return host


def probe(aim: str, payload: bytes, *, detail: bool = True) -> str:
    """Feed one header to a fresh end; return its outcome, or raise what no input may raise.

    ``fault: <reason>`` with everything particular left out, ``event: <kind>``, or ``waiting``; the first word alone
    without *detail*.
    """
    connection = _end(aim, payload)
    before = connection.state
    data = memoryview(struct.pack("<I", len(payload)) + payload)
    events: list[Any] = []
    try:
        while data:
            target = connection.get_buffer()
            count = min(len(target), len(data))
            target[:count] = data[:count]
            connection.buffer_updated(count)
            data = data[count:]
            while (event := connection.next_event()) is not None:
                events.append(event)
                if len(events) > MAX_EVENTS:
                    raise AssertionError("events without end")
    except RemoteProtocolError as exc:
        if connection.state is not State.CLOSED or connection.next_event() is not None or connection.mid_frame:
            raise AssertionError("a fault that did not close") from exc
        return f"fault: {aim}: {_shape(str(exc))}" if detail else "fault"
    if not events:
        if connection.state is before:
            raise AssertionError("a whole control frame moved nothing")
        return f"waiting: {aim}: {connection.state.name}"
    message = next((getattr(events[0], name) for name in events[0].__struct_fields__ if name != "payload"), None)
    if isinstance(events[0], ReplyReceived):
        message = events[0].reply
    if message is not None:
        # What was understood can be said again, and means the same then.
        again = m.encode_checked(message)
        decode: Callable[[bytes], Any] = {
            "hello": m.decode_hello,
            "ack": m.decode_ack,
            "worker": m.decode_from_host,
            "host": m.decode_from_worker,
        }[aim]
        if decode(again) != message:
            raise AssertionError(f"{message} came back as {decode(again)}")
    return f"event: {aim}: {type(events[0]).__name__} {type(message).__name__}"


def _shape(reason: str) -> str:
    """Return an error text without its particulars, so that equal faults count as one."""
    reason = reason.split(" - at ")[0].split(" unknown field")[0].split("Invalid value")[0]
    reason = re.sub(r"0x[0-9a-f]+", "#", re.sub(r"'[^']*'|`[^`]*`", "_", reason))
    return re.sub(r"\d+", "#", reason)[:90]


def run(cases: int, seed: int, *, keep: dict[str, Target] | None = None) -> dict[str, Any]:
    """Send *cases* mutated headers; return counts and the findings (empty when all is well).

    *keep* collects one input of every distinct outcome: the corpus.
    """
    rng = random.Random(seed)
    corpus = seeds()
    legal = seeds(legal=True)
    outcomes: Counter[str] = Counter()
    findings: list[dict[str, Any]] = []
    started = time.perf_counter()
    slowest = 0.0
    for index in range(cases):
        # Most start from a legal frame: what is wrong already gets no further than its first fault.
        aim, original = legal[index % len(legal)] if index % 5 else corpus[index // 5 % len(corpus)]
        payload = mutate(original, rng, corpus)
        if rng.random() < 0.05:
            aim = rng.choice(("hello", "ack", "host", "worker"))
        before = time.perf_counter()
        try:
            outcome = probe(aim, payload, detail=keep is not None)
        except Exception as exc:  # everything that arrives here is a finding, whatever it is
            findings.append({"case": index, "aim": aim, "hex": payload.hex(), "error": f"{type(exc).__name__}: {exc}"})
            outcome = "uncaught"
        slowest = max(slowest, time.perf_counter() - before)
        outcomes[outcome.split(":")[0]] += 1
        if keep is not None and outcome not in keep:
            keep[outcome] = (aim, payload)
    return {
        "what": "mutated headers",
        "cases": cases,
        "seed": seed,
        "outcomes": dict(outcomes),
        "findings": findings,
        "slowest_ms": round(slowest * 1000, 3),
        "seconds": round(time.perf_counter() - started, 2),
    }


# --- sessions ---------------------------------------------------------------------------------------------------------


def scripts() -> list[tuple[str, list[dict[str, Any]]]]:
    """Return every legal vector with at least one exchange: what a session says when nobody spoils it."""
    found = []
    for path in sorted(VECTORS.glob("*.json")):
        group = json.loads(path.read_text("utf-8"))
        for vector in group["vectors"]:
            steps = vector["steps"]
            fine = all(step["sender"] == step["receiver"] == "ok" and step.get("canonical", True) for step in steps)
            if fine and len(steps) > 2 and "host_max_frame" not in vector and "worker_max_frame" not in vector:
                size = sum(len(frame) for step in steps for frame in step["frames"])
                if size < 20_000:
                    found.append((f"{group['group']}/{vector['name']}", steps))
    return found


ACCIDENTS = (
    *("length", "zero", "huge", "cut", "twice", "again", "junk", "header", "drop", "swap", "between", "payload"),
    "flip",
)


def spoil(frames: list[bytes], past: list[bytes], rng: random.Random, others: list[Target]) -> tuple[str, bytes, bool]:
    """Return a kind of accident, the bytes that arrive instead of *frames*, and whether the stream ends there."""
    whole = b"".join(frames)
    kind = rng.choice(ACCIDENTS)
    first = frames[0]
    if kind == "length":
        wrong = max(0, len(first) - 4 + rng.choice((-3, -1, 1, 2, 200)))
        return kind, struct.pack("<I", wrong) + whole[4:], False
    if kind == "zero":
        return kind, bytes(4) + rng.choice((b"", whole)), False
    if kind == "huge":
        return kind, struct.pack("<I", rng.choice((m.DEFAULT_MAX_FRAME + 1, 2**31, 2**32 - 1))) + whole[4:], False
    if kind == "cut":
        return kind, whole[: rng.randrange(len(whole) + 1)], True
    if kind == "twice":
        return kind, whole + whole, False
    if kind == "again" and past:
        return kind, rng.choice(past) + rng.choice((b"", whole)), False
    if kind == "junk":
        return kind, rng.randbytes(rng.randrange(1, 60)) + whole, False
    if kind == "drop":
        return kind, b"", False
    if kind == "swap" and len(frames) > 1:
        return kind, b"".join(reversed(frames)), False
    if kind == "between":
        extra = m.encode(m.Progress(req_id="embed-1", completed=rng.randrange(9), phase=rng.choice(list(m.Phase))))
        return kind, first + struct.pack("<I", len(extra)) + extra + b"".join(frames[1:]), False
    if kind == "payload" and len(frames) > 1:
        raw = frames[1][4:]
        raw = raw[: rng.randrange(len(raw) + 1)] + bytes(rng.randrange(9))
        return kind, first + struct.pack("<I", len(raw)) + raw, False
    if kind == "flip":
        spoilt = bytearray(whole)
        spoilt[rng.randrange(len(spoilt))] ^= 1 << rng.randrange(8)
        return kind, bytes(spoilt), False
    header = mutate(first[4:], rng, others)
    return "header", struct.pack("<I", len(header)) + header + b"".join(frames[1:]), False


def session(steps: list[dict[str, Any]], rng: random.Random, others: list[Target]) -> str:
    """Run one script through two ends, one of its frames spoilt; return how it ended.

    Raises AssertionError where an end neither faults, nor closes, nor carries on by the rules.
    """
    ends = {role.value: Connection(role) for role in Role}
    spoilt_at = rng.randrange(len(steps))
    past: list[bytes] = []
    accident = "none"
    for index, step in enumerate(steps):
        if step.get("eof"):
            break
        sender, receiver = step["from"], "worker" if step["from"] == "host" else "host"
        kind = m.decode_from_host if sender == "host" else m.decode_from_worker
        frames = [bytes.fromhex(frame) for frame in step["frames"]]
        payload = bytes.fromhex(step["raw"]) if "raw" in step else None
        message: Any
        if "type" in step["json"]:
            message = kind(frames[0][4:])
        else:
            message = (m.decode_hello if "nonce" in step["json"] else m.decode_ack)(frames[0][4:])
        try:
            data = b"".join(ends[sender].send(message, payload))
        except LocalProtocolError:
            # After an accident the two ends may have different ideas of what comes next; this one noticed.
            if accident == "none":
                raise
            return _finish(ends, f"local: {accident}")
        ends_here = False
        if index == spoilt_at:
            accident, data, ends_here = spoil(frames, past, rng, others)
        past.append(b"".join(frames))
        try:
            _deliver(ends[receiver], data, rng)
            if ends_here:
                ends[receiver].receive_eof()
        except RemoteProtocolError:
            if accident == "none":
                raise
            return _finish(ends, f"fault: {accident}")
        if ends_here:
            return _finish(ends, f"closed: {accident}")
    return _finish(ends, f"completed: {accident}")


def _deliver(end: Connection, data: bytes, rng: random.Random) -> None:
    count = 0
    while data:
        size = rng.choice((1, 3, 17, 64, 4096, len(data)))
        for event in end.receive(data[:size]):
            count += 1
            if isinstance(event, ReplyReceived):
                _consistent(event)
            elif isinstance(event, RequestReceived) and (event.payload is None) != (event.request.payload is None):
                raise AssertionError(f"{event.request} with the wrong kind of payload")
        data = data[size:]
    if count > MAX_EVENTS:
        raise AssertionError("events without end")


def _consistent(event: ReplyReceived) -> None:
    """Check that what passes for a reply answers its own request."""
    req_id = event.reply.req_id
    if req_id is not m.UNSET and req_id != event.request.req_id:
        raise AssertionError(f"{event.reply} in answer to {event.request}")
    size = None if event.payload is None else len(event.payload)
    rows = m.n_rows(event.request)
    if isinstance(event.reply, m.Vectors):
        expected: int | None = 4 * rows * event.reply.dims
    else:
        expected = 4 * rows if isinstance(event.reply, m.Scores) else None
    if size != expected:
        raise AssertionError(f"{event.reply} with {size} bytes")


def _finish(ends: dict[str, Connection], outcome: str) -> str:
    """Close both streams: each end must come to rest, with an orderly close or one typed fault."""
    for end in ends.values():
        try:
            if end.receive_eof() != PeerClosed():
                raise AssertionError("an end of stream that is no event")
        except RemoteProtocolError:
            pass
        if end.state is not State.CLOSED or end.next_event() is not None:
            raise AssertionError("an end that does not come to rest")
    return outcome


def run_sessions(cases: int, seed: int) -> dict[str, Any]:
    """Run *cases* spoilt sessions; return counts and the findings (empty when all is well)."""
    rng = random.Random(seed)
    legal = scripts()
    others = seeds()
    outcomes: Counter[str] = Counter()
    findings: list[dict[str, Any]] = []
    started = time.perf_counter()
    for index in range(cases):
        name, steps = legal[index % len(legal)]
        case_seed = rng.getrandbits(64)
        try:
            outcome = session(steps, random.Random(case_seed), others)
        except Exception as exc:  # everything that arrives here is a finding, whatever it is
            findings.append({"case": index, "script": name, "seed": case_seed, "error": f"{type(exc).__name__}: {exc}"})
            outcome = "uncaught"
        outcomes[outcome] += 1
    ends: Counter[str] = Counter()
    for outcome, count in outcomes.items():
        ends[outcome.split(":")[0]] += count
    return {
        "what": "mutated sessions",
        "cases": cases,
        "seed": seed,
        "outcomes": dict(ends),
        "accidents": dict(sorted(outcomes.items())),
        "findings": findings,
        "seconds": round(time.perf_counter() - started, 2),
    }


def write_corpus(kept: dict[str, Target]) -> None:
    """Write one input of every distinct outcome, the known ones first."""
    CORPUS.parent.mkdir(exist_ok=True)
    rows = [{"outcome": outcome, "aim": aim, "hex": data.hex()} for outcome, (aim, data) in sorted(kept.items())]
    CORPUS.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", "ascii")


def read_corpus() -> list[dict[str, str]]:
    """Return the kept inputs."""
    rows: list[dict[str, str]] = json.loads(CORPUS.read_text("ascii")) if CORPUS.exists() else []
    return rows


def main(argv: list[str] | None = None) -> int:
    """Run both from the command line; exit 1 when there are findings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--headers", type=int, default=1_000_000)
    parser.add_argument("--sessions", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="add inputs with a new outcome to the corpus")
    given = parser.parse_args(argv)
    kept = {row["outcome"]: (row["aim"], bytes.fromhex(row["hex"])) for row in read_corpus()} if given.keep else None
    reports = [run(given.headers, given.seed, keep=kept), run_sessions(given.sessions, given.seed)]
    if kept is not None:
        write_corpus(kept)
    json.dump(reports, sys.stdout, indent=1)
    sys.stdout.write("\n")
    return 1 if any(report["findings"] for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
