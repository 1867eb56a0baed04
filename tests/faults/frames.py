"""The one generator of bad frames: mutated headers, and plans that spoil one frame of a live session."""

from __future__ import annotations

import json
import random
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VECTORS = Path(__file__).parents[1] / "vectors"
LENGTH = struct.Struct("<I")
MAX = 64 * 1024 * 1024
LENGTHS = (0, 1, 3, MAX, MAX + 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 65536, 65537)
WAYS = (
    *("bytes", "bytes", "bytes", "cut", "stall", "length", "twice", "drop", "req_id", "req_id", "field", "type"),
    *("alien", "progress", "resize", "nonfinite", "split", "trickle"),
)
HARMLESS = {"split", "trickle"}
WORDS: tuple[bytes, ...] = (
    *(b"null", b"true", b"[]", b"{}", b'""', b"-1", b"0", b"1.0", b"1e999", b"-0", b"4294967296", b"65535", b"NaN"),
    *(b"18446744073709551615", b"18446744073709551616", b"9" * 400, b"[" * 200, b'{"a":' * 100, b'"\\ud800"', b"\xff"),
    *(b"\\u0000", b"\\u00e9", b"\x00", b'"type"', b'"req_id"', b'"x":1,', b",", b":", b'"', b"}", b"]", b" ", b"\xe9"),
    *(b'"PING"', b'"ERR"', b'"PROGRESS"', b'"setup"', b'"inference"', b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"/**/"),
)
TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?|true|false|null')


def seeds(*, legal: bool = False) -> list[tuple[str, bytes]]:
    """Return (the end it is meant for, payload) of the wire vectors' control frames: of all, or of the *legal* ones.

    An end is ``hello``, ``ack``, ``host`` or ``worker``.
    """
    found: dict[tuple[str, bytes], None] = {}
    for path in sorted(VECTORS.glob("*.json")):
        for vector in json.loads(path.read_text("utf-8"))["vectors"]:
            for step in vector["steps"]:
                frames = step.get("frames")
                if not frames or not 10 <= len(frames[0]) < 8000 or (legal and step["receiver"] != "ok"):
                    continue
                payload = bytes.fromhex(frames[0])[4:]
                if step["from"] == "host":
                    aim = "ack" if b'"type"' not in payload and b"accept" in payload else "worker"
                else:
                    aim = "hello" if payload.startswith(b'{"v"') else "host"
                found[aim, payload] = None
    return list(found)


SEEDS = [payload for _, payload in seeds()]


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Return *data* with one to four small accidents, half of which leave it JSON."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 4))):
        at = rng.randrange(len(out) + 1)
        tokens = list(TOKEN.finditer(out))
        kind = rng.randrange(9 if tokens else 6)
        if kind == 0 and out:
            out[at % len(out)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del out[at : at + rng.randrange(1, 9)]
        elif kind == 2:
            out[at:at] = rng.choice((rng.choice(WORDS), rng.randbytes(1)))
        elif kind == 3:
            out[at:at] = out[at : at + rng.randrange(1, 30)]
        elif kind == 4:
            del out[at:]
        elif kind == 5:
            other = rng.choice(SEEDS)
            out[at:] = other[rng.randrange(len(other) + 1) :]
        elif tokens:
            # A value or a name by a word, a number by a neighbour or a far one, more letters or more space.
            token = rng.choice(tokens)
            start, end = token.span()
            if kind == 6:
                out[start:end] = rng.choice(WORDS)
            elif kind == 7 and token[0].isdigit():
                out[start:end] = b"%d" % max(0, int(token[0][:20]) + rng.choice((-1, 1, 255, 2**32, 2**63)))
            elif end - start > 3:
                inner = rng.randrange(start + 1, end - 1)
                out[inner:inner] = rng.choice((b"a", b"\\u00e9", "é".encode(), b"\\n", b"_"))
            else:
                out[start:start] = rng.choice((b" ", b"\n\t", b"\r"))
    return bytes(out)


@dataclass(frozen=True)
class Plan:
    """Spoil frame number *frame* (from 0) of what *sender* sends, in this *way*; *seed* settles the rest.

    *at*: where to split, for R6, which tries every place.
    """

    sender: str
    frame: int
    way: str
    seed: int = 0
    at: int | None = None


def draw(rng: random.Random, *, frames: dict[str, int]) -> Plan:
    """Return a random plan for a session of so many frames by each sender."""
    sender = rng.choice(("worker", "worker", "host"))
    return Plan(sender, rng.randrange(frames[sender]), rng.choice(WAYS), rng.randrange(2**32))


def spoil(frame: bytes, plan: Plan) -> list[bytes]:
    """Return the pieces that arrive instead of *frame*, its length prefix included.

    After ``cut`` the connection is closed; after ``stall`` nothing more gets through.
    """
    rng = random.Random(plan.seed)
    payload = frame[LENGTH.size :]
    at = rng.randrange(len(frame)) if plan.at is None else plan.at
    match plan.way:
        case "bytes":  # also in the length and in a raw frame
            return [mutate(frame, rng)]
        case "cut" | "stall":
            return [frame[:at]]
        case "length":
            size = rng.choice((*LENGTHS, len(payload) - 1, len(payload) + 1, len(payload) // 2))
            return [LENGTH.pack(max(0, size)) + payload]
        case "drop":
            return []
        case "req_id":  # of no request, of another generation, of no JSON
            wrong = ("", "x", "1-999", "0-1", "2-1", "1-0", "1-1", "1-2", "1-3", "é" * 33, "x" * 65, None, 7)
            return [_json(payload, req_id=rng.choice(wrong))]
        case "field":
            return [_framed(mutate(payload, rng))]
        case "type":
            words = "VECTORS SCORES LOADED PONG ERR PROGRESS PING SHUTDOWN HELLO vectors"
            return [_json(payload, type=rng.choice((*words.split(), 1)))]
        case "twice":
            return [frame + frame]
        case "alien" | "progress":
            other = _framed(rng.choice(SEEDS) if plan.way == "alien" else _progress(rng))
            return [other + frame if rng.random() < 0.4 else frame + other]
        case "resize":
            size = max(0, len(payload) + rng.choice((-len(payload), -4, -1, 1, 4, 4096)))
            return [_framed((payload + bytes(size))[:size])]
        case "nonfinite" if len(payload) >= 4 and not payload.startswith(b"{"):
            at = LENGTH.size + 4 * rng.randrange(len(payload) // 4)
            return [frame[:at] + struct.pack("<f", rng.choice((float("nan"), float("inf")))) + frame[at + 4 :]]
        case "split":
            return [frame[:at], frame[at:]]
        case "trickle":
            return [bytes((byte,)) for byte in frame]
    return [frame]


def _progress(rng: random.Random) -> bytes:
    fields = {
        "type": "PROGRESS",
        "req_id": rng.choice(("1-1", "1-2", "1-3", "2-1")),
        "completed": rng.choice((0, 1, 2, 3, 100, 2**64 - 1, 2**64)),
        "phase": rng.choice(("setup", "inference", "control")),
    }
    return json.dumps(fields).encode()


def _framed(payload: bytes) -> bytes:
    return LENGTH.pack(len(payload)) + payload


def _json(payload: bytes, **fields: Any) -> bytes:
    """Return the frame with *fields* set; a raw frame's bytes are turned round."""
    try:
        return _framed(json.dumps({**json.loads(payload), **fields}).encode())
    except (ValueError, TypeError):
        return _framed(payload[::-1])
