"""Plans that spoil one frame of a live session, in either direction; a plan is JSON and can be kept."""

from __future__ import annotations

import json
import random
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.faults.fuzz_codec import mutate, seeds
from tests.faults.inprocess import Wire

LENGTH = struct.Struct("<I")
MAX = 64 * 1024 * 1024
WAYS = (
    *("flip", "byte", "delete", "insert", "cut", "stall", "length", "twice", "drop", "swap", "req_id", "generation"),
    *("field", "type", "alien", "progress", "resize", "nonfinite", "split", "trickle"),
)
HARMLESS = {"split", "trickle"}
LENGTHS = (0, 1, 3, MAX, MAX + 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 65536, 65537)
_SEEDS = [payload for _, payload in seeds()]
_SEED_PAIRS = seeds()


@dataclass(frozen=True)
class Plan:
    """Spoil frame number *frame* (from 0) of what *sender* sends, in this *way*; *seed* settles the rest."""

    sender: str
    frame: int
    way: str
    seed: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def draw(rng: random.Random, *, frames: dict[str, int]) -> Plan:
    """Return a random plan for a session of so many frames by each sender."""
    sender = rng.choice(("worker", "worker", "host"))
    return Plan(sender, rng.randrange(frames[sender]), rng.choice(WAYS), rng.randrange(2**32))


@dataclass
class Spoiled:
    """What becomes of a frame: pieces to send one by one, and what happens to the frames after it."""

    pieces: list[bytes]
    hold: bytes = b""
    """To be sent behind the next frame."""
    then: str = "go on"
    """``go on``, ``close`` or ``swallow`` (nothing more gets through, and nothing is closed)."""


def spoil(frame: bytes, plan: Plan) -> Spoiled:
    """Return what becomes of *frame*, its length prefix included."""
    rng = random.Random(plan.seed)
    payload = frame[LENGTH.size :]
    data = bytearray(frame)
    at = rng.randrange(len(data))
    match plan.way:
        case "flip":
            data[at] ^= 1 << rng.randrange(8)
        case "byte":
            data[at] = rng.randrange(256)
        case "delete":
            del data[at : at + rng.randrange(1, 9)]
        case "insert":
            data[at:at] = rng.randbytes(rng.randrange(1, 9))
        case "cut":
            return Spoiled([frame[:at]], then="close")
        case "stall":
            return Spoiled([frame[:at]], then="swallow")
        case "length":
            size = rng.choice((*LENGTHS, len(payload) - 1, len(payload) + 1, len(payload) // 2))
            data[: LENGTH.size] = LENGTH.pack(max(0, size))
        case "twice":
            data += frame
        case "drop":
            data = bytearray()
        case "swap":
            return Spoiled([], hold=frame)
        case "req_id":
            return Spoiled([_json(payload, req_id=rng.choice(("", "x", "1-999", "0-1", "é" * 33, "x" * 65, None, 7)))])
        case "generation":
            return Spoiled([_other_generation(payload, rng)])
        case "field":
            return Spoiled([_framed(mutate(payload, rng, _SEED_PAIRS))])
        case "type":
            words = "VECTORS SCORES LOADED PONG ERR PROGRESS PING SHUTDOWN HELLO vectors"
            kinds = (*words.split(), 1)
            return Spoiled([_json(payload, type=rng.choice(kinds))])
        case "alien":
            other = _framed(rng.choice(_SEEDS))
            data = bytearray(other + frame if rng.random() < 0.5 else frame + other)
        case "progress":
            extra = _framed(
                json.dumps(
                    {
                        "type": "PROGRESS",
                        "req_id": rng.choice(("1-1", "1-2", "1-3", "2-1")),
                        "completed": rng.choice((0, 1, 2, 3, 100, 2**64 - 1, 2**64)),
                        "phase": rng.choice(("setup", "inference", "control")),
                    }
                ).encode()
            )
            data = bytearray(extra + frame if rng.random() < 0.3 else frame + extra)
        case "resize":
            size = max(0, len(payload) + rng.choice((-len(payload), -4, -1, 1, 4, 4096)))
            data = bytearray(_framed((payload + bytes(size))[:size]))
        case "nonfinite":
            if len(payload) >= 4 and not payload.startswith(b"{"):
                place = LENGTH.size + 4 * rng.randrange(len(payload) // 4)
                data[place : place + 4] = struct.pack("<f", rng.choice((float("nan"), float("inf"), float("-inf"))))
        case "split":
            return Spoiled([frame[:at], frame[at:]])
        case "trickle":
            return Spoiled([bytes((byte,)) for byte in frame])
    return Spoiled([bytes(data)])


def _framed(payload: bytes) -> bytes:
    return LENGTH.pack(len(payload)) + payload


def _json(payload: bytes, **fields: Any) -> bytes:
    try:
        message = json.loads(payload)
        return _framed(json.dumps({**message, **fields}).encode())
    except (ValueError, TypeError):
        return _framed(payload[::-1])


def _other_generation(payload: bytes, rng: random.Random) -> bytes:
    """The req_id of another generation's or of the last request."""
    try:
        message = json.loads(payload)
        generation, _, serial = message["req_id"].partition("-")
    except (ValueError, TypeError, KeyError):
        return _framed(payload + b" ")
    other = rng.choice((f"{int(generation) + 1}-{serial}", f"0-{serial}", f"{generation}-{int(serial) - 1}"))
    return _framed(json.dumps({**message, "req_id": other}).encode())


class SpoiledWire(Wire):
    """A worker's socket that carries out a plan, once."""

    def __init__(self, sock: socket.socket, plan: Plan | None) -> None:
        super().__init__(sock)
        self.plan = plan
        self.struck = False
        """True from just before the first spoiled byte."""
        self.struck_at: float | None = None
        """time.monotonic() of the last byte of the spoiled frame."""
        self.on_strike: Callable[[], None] = lambda: None
        self._sent = self._read = 0
        self._outgoing = self._held = b""
        self._incoming = bytearray()
        self._ready: list[bytes] = []
        self._swallow = {"worker": False, "host": False}
        self._closed = False

    # --- worker to host ----------------------------------------------------------------------------------------------

    def send(self, view: memoryview) -> int:
        return self.sendmsg([view])

    def sendmsg(self, views: Sequence[memoryview]) -> int:
        size = sum(len(view) for view in views)
        if self.plan is None or self.plan.sender != "worker" or (self.struck_at is not None and not self._held):
            if self._swallow["worker"]:
                return size
            for view in views:
                self.socket.sendall(view)
            return size
        self._outgoing += b"".join(views)
        while (frame := _first_frame(self._outgoing)) is not None:
            self._outgoing = self._outgoing[len(frame) :]
            self._send_frame(frame)
        return size

    def _send_frame(self, frame: bytes) -> None:
        assert self.plan is not None
        held, self._held = self._held, b""
        if self._sent == self.plan.frame and self.struck_at is None:
            result = spoil(frame, self.plan)
            self.struck = True
            if not result.hold:
                self.on_strike()
            for piece in result.pieces:
                self.socket.sendall(piece)
            self._held = result.hold
            self._then(result.then, "worker")
            self.struck_at = time.monotonic()
        elif not self._swallow["worker"]:
            if held:
                self.on_strike()
            self.socket.sendall(frame + held)
            if held:
                self.struck_at = time.monotonic()
        self._sent += 1

    def _then(self, what: str, sender: str) -> None:
        if what == "close":
            self._closed = True
            self.socket.shutdown(socket.SHUT_RDWR)
        elif what == "swallow":
            self._swallow[sender] = True

    # --- host to worker ----------------------------------------------------------------------------------------------

    def recv_into(self, view: memoryview) -> int:
        if self.plan is None or self.plan.sender != "host":
            return super().recv_into(view)
        while not self._ready:
            piece = bytearray(65536)
            count = super().recv_into(memoryview(piece))
            if count == 0:
                return 0
            if self._swallow["host"]:
                continue
            self._incoming += piece[:count]
            while (frame := _first_frame(self._incoming)) is not None:
                del self._incoming[: len(frame)]
                self._read_frame(bytes(frame))
        data = self._ready[0]
        count = min(len(view), len(data))
        view[:count] = data[:count]
        if count == len(data):
            self._ready.pop(0)
        else:
            self._ready[0] = data[count:]
        return count

    def _read_frame(self, frame: bytes) -> None:
        assert self.plan is not None
        held, self._held = self._held, b""
        if self._read == self.plan.frame and self.struck_at is None:
            result = spoil(frame, self.plan)
            self.struck = True
            self.on_strike()
            self._ready += [piece for piece in result.pieces if piece]
            self._held = result.hold
            self._then(result.then, "host")
            self.struck_at = time.monotonic()
        elif not self._swallow["host"]:
            self._ready.append(frame + held)
        self._read += 1


def _first_frame(data: bytes | bytearray) -> bytes | None:
    """Return the first whole frame of *data*; what is spoiled comes whole from a correct sender."""
    if len(data) < LENGTH.size:
        return None
    size = LENGTH.size + LENGTH.unpack_from(data)[0]
    return bytes(data[:size]) if len(data) >= size else None
