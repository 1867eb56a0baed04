"""R5 mutated headers and mutated live sessions, R6 every byte split, over the real session and worker loop.

A header goes to one end of a connection in memory. A session runs over sockets in one process (``inprocess``); one of
its frames is spoiled on the way, in either direction (``frames``).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engines.protocol import messages as m
from engines.protocol.connection import Connection
from engines.protocol.errors import RemoteProtocolError
from engines.protocol.rules import Role, State
from synapse_host.config import Windows
from synapse_host.errors import EngineCrashed, LaneRefused, WorkerError
from tests.faults.arena import Arena, arena, run
from tests.faults.frames import HARMLESS, LENGTH, Plan, draw, mutate, seeds, spoil
from tests.faults.history import History
from tests.faults.inprocess import SteppedLoop, ThreadProcess, Wire, threads_for_processes
from tests.faults.ledger import Row
from tests.support.lanes import FAST
from tests.support.pair import receive

ROOT = Path(__file__).parents[2]
SCRIPT: dict[str, Any] = {"rules": [{"on": "EMBED_BATCH", "do": [{"progress": {"completed": [1, 2]}}]}]}
PATIENCE = dataclasses.replace(
    FAST, windows=Windows(setup=2.0, control=2.0, ping=2.0, inference=2.0), handshake=2.0, shutdown_grace=1.0
)
"""Short windows: a stall costs a few steps of the clock."""
FRAMES = {"worker": 9, "host": 8}
"""HELLO, LOADED, PROGRESS x2, VECTORS and raw, TEXT, SCORES and raw; ACK, LOAD, then three requests with raw."""
STALL_S = 0.003
KILL_S = 0.1
TRIES = 4
LIMIT_S = 15.0
STEP_S = 0.9
"""Below the watchdog's idea of a jump: these are seconds of silence, not of a suspended machine."""


# --- mutated headers --------------------------------------------------------------------------------------------------

EMBED = m.EmbedBatch("embed-1", "llama:0", m.Pooling.MEAN, True, [m.Item("0", 3), m.Item("1", 2)])
REQUESTS: dict[str, m.AnyRequest] = {
    "LOADED": m.Load(req_id="load-0", artifact_path="", artifact_digest="", format=""),
    "SCORES": m.RerankSequences(req_id="rerank-7", model_ref="owned:0", sequences=[m.Segment(n_tokens=1)] * 3),
    "TEXT": m.Generate(req_id="generate-1", model_ref="llama:0", max_tokens=8),
    "PONG": m.Ping(req_id="ping-1"),
}


def waiting_end(aim: str, payload: bytes) -> Connection:
    """Return a connection that waits for a frame like *payload*."""
    end = Connection(Role.HOST if aim in ("hello", "host") else Role.WORKER)
    if aim == "host":
        kind = next((name for name in REQUESTS if name.encode() in payload), "")
        end.expectation.open(REQUESTS.get(kind, EMBED), 12, m.CUDA_ENGINE)  # three ids, as the vectors of GENERATE
    end.state = {"hello": State.HELLO, "ack": State.ACK, "worker": State.IDLE, "host": State.BUSY}[aim]
    return end


def headers(count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Send *count* mutated headers; return how they ended (fault, event, waiting for a raw frame) and the findings."""
    rng = random.Random(seed)
    legal, every = seeds(legal=True), seeds()
    outcomes: Counter[str] = Counter()
    findings: list[str] = []
    for index in range(count):
        # Most start from a legal frame: what is wrong already gets no further than its first fault.
        aim, original = legal[index % len(legal)] if index % 5 else every[index // 5 % len(every)]
        payload = mutate(original, rng)
        end = waiting_end(aim, payload)
        before = end.state
        try:
            events = receive(end, LENGTH.pack(len(payload)) + payload)
            outcomes["event" if events else "waiting"] += 1
            if end.state is before and not events:
                findings.append(f"{aim} {payload.hex()}: a whole control frame moved nothing")
        except RemoteProtocolError:
            outcomes["fault"] += 1
            if end.state is not State.CLOSED or end.next_event() is not None or end.mid_frame:
                findings.append(f"{aim} {payload.hex()}: a fault that did not close")
        except Exception as exc:  # whatever arrives here is a finding
            findings.append(f"{aim} {payload.hex()}: {exc!r}")
    return outcomes, findings


# --- mutated sessions -------------------------------------------------------------------------------------------------


class SpoiledWire(Wire):
    """A worker's socket that carries out a plan, once."""

    def __init__(self, sock: socket.socket, plan: Plan | None) -> None:
        super().__init__(sock)
        self.plan = plan
        self.struck = False
        """True from just before the first spoiled byte."""
        self.struck_at: float | None = None
        """time.monotonic() of the last byte of the spoiled frame."""
        self.size = 0
        """Bytes of the spoiled frame."""
        self._seen = 0
        self._partial = bytearray()
        self._ready: list[bytes] = []
        self._swallows = False

    def _pass(self, data: bytes | bytearray) -> list[bytes]:
        """Return the pieces that get through, frame by frame."""
        assert self.plan is not None
        self._partial += data
        through: list[bytes] = []
        while len(self._partial) >= LENGTH.size:
            size = LENGTH.size + LENGTH.unpack_from(self._partial)[0]
            if len(self._partial) < size:
                break
            frame = bytes(self._partial[:size])
            del self._partial[:size]
            if self._seen == self.plan.frame:
                self.struck, self.size = True, size
                pieces, then = spoil(frame, self.plan)
                through += [piece for piece in pieces if piece]
                self._swallows = then != "go on"
                self.struck_at = time.monotonic()
            elif not self._swallows:
                through.append(frame)
            self._seen += 1
        return through

    def _close(self) -> None:
        """Close after the spoiled frame where the plan says so."""
        assert self.plan is not None
        if self.plan.way == "cut" and self._swallows:
            self.socket.shutdown(socket.SHUT_RDWR)

    def send(self, view: memoryview) -> int:
        return self.sendmsg([view])

    def sendmsg(self, views: Sequence[memoryview]) -> int:
        data = b"".join(views)
        if self.plan is None or self.plan.sender != "worker":
            self.socket.sendall(data)
            return len(data)
        before = self.struck
        for piece in self._pass(data):
            self.socket.sendall(piece)
        if self.struck and not before:
            self.struck_at = time.monotonic()
            self._close()
        return len(data)

    def recv_into(self, view: memoryview) -> int:
        if self.plan is None or self.plan.sender != "host":
            return super().recv_into(view)
        while not self._ready:
            piece = bytearray(65536)
            count = super().recv_into(memoryview(piece))
            if count == 0:
                return 0
            before = self.struck
            self._ready += self._pass(piece[:count])
            if self.struck and not before:
                self._close()
        data = self._ready.pop(0)
        count = min(len(view), len(data))
        view[:count] = data[:count]
        if data[count:]:
            self._ready.insert(0, data[count:])
        return count


class Verdict:
    """What became of one spoiled session."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []
        self.findings: list[str] = []
        self.stepped = False
        self.kill_s: float | None = None
        self.size = 0


async def spoiled_session(ground: Arena, factory: type[ThreadProcess], plan: Plan | None, number: int) -> Verdict:
    """Serve three requests over a connection whose bytes *plan* spoils; then once more over a sound one."""
    verdict = Verdict()
    history = ground.history
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SteppedLoop)
    factory.made.clear()
    first_wire: list[SpoiledWire] = []

    def wrap(sock: Any) -> Wire:
        wire = SpoiledWire(sock, plan if not first_wire else None)
        first_wire.append(wire)
        return wire

    factory.wrap = staticmethod(wrap)
    lane = ground.lanes(dict(SCRIPT), config=PATIENCE, lane_id=f"s{number % 8}")
    asks = (history.embed, history.generate, history.rerank)
    strikes = 0
    for ask in asks:
        before = len(history.calls)
        struck_before = _struck(first_wire)
        task = asyncio.ensure_future(ask(lane))
        outcome = await _patiently(task, factory, verdict)
        call = history.calls[before]
        struck_now = _struck(first_wire) and not struck_before
        if isinstance(outcome, BaseException):
            kind = _typed(outcome)
            verdict.outcomes.append(kind)
            if kind.startswith("untyped"):
                verdict.findings.append(kind)
            if not struck_now and not struck_before:
                verdict.findings.append(f"{kind} before anything was spoiled")
            if kind.startswith("engine_crashed"):
                strikes += 1
        else:
            verdict.outcomes.append("ok")
            if call.outcomes != [("ok", call.expected)] and not struck_now:
                verdict.findings.append(f"another's answer: {call.outcomes} for {call.expected}")
            if call.outcomes != [("ok", call.expected)]:
                # Bits of a payload have no checksum: what was spoiled itself may differ, and nothing else.
                call.expected = call.outcomes[0][1]
            strikes = 0
        if isinstance(outcome, LaneRefused):  # and stays refused: nothing more to ask it
            break
        if (observed := lane.health()["strikes"]) > max(1, strikes):
            verdict.findings.append(f"{observed} strikes after {verdict.outcomes}")
    await _ends(ground, factory, lane, first_wire[0] if first_wire else None, verdict)
    return verdict


async def _ends(
    ground: Arena, factory: type[ThreadProcess], lane: Any, wire: SpoiledWire | None, verdict: Verdict
) -> None:
    """Close the lane and look at what is left of its workers."""
    closing = asyncio.ensure_future(lane.aclose())
    await _patiently(closing, factory, verdict)
    ground.lanes.made.remove(lane)
    if len(factory.made) > 2:
        verdict.findings.append(f"{len(factory.made)} workers for one spoiled connection")
    for process in factory.made:
        if process.running:
            verdict.findings.append("a worker is left running")
        if process.bug is not None:
            verdict.findings.append(f"uncaught in the worker: {process.bug!r}")
    crashed = any(kind.startswith("engine_crashed") for kind in verdict.outcomes)
    verdict.size = wire.size if wire else 0
    struck_at = wire.struck_at if wire else None
    killed_at = factory.made[0].killed_at if factory.made else None
    if crashed and struck_at is not None and killed_at is not None and not verdict.stepped:
        verdict.kill_s = killed_at - struck_at


def _struck(wires: list[SpoiledWire]) -> bool:
    return bool(wires) and wires[0].struck


def _typed(outcome: BaseException) -> str:
    if isinstance(outcome, EngineCrashed):
        return f"engine_crashed {outcome.details.get('cause')}"
    if isinstance(outcome, LaneRefused | WorkerError):
        return outcome.code
    return f"untyped {outcome!r:.200}"


async def _patiently(task: asyncio.Future[Any], factory: type[ThreadProcess], verdict: Verdict) -> Any:
    """Wait for *task*; when both ends wait for each other, let time pass until the host does something about it."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SteppedLoop)
    start = time.monotonic()
    while not task.done():
        await asyncio.wait({task}, timeout=STALL_S)
        if task.done():
            break
        if time.monotonic() - start > LIMIT_S:
            verdict.findings.append("hangs")
            task.cancel()
            await asyncio.wait({task})
            break
        process = factory.made[-1] if factory.made else None
        if process is None or process.wire is None or process.killed_at is not None:
            # What is killed already needs real time to end, not more silence.
            continue
        if process.running and process.wire.quiet():
            verdict.stepped = True
            await loop.step(STEP_S)
    return task.exception() or task.result() if not task.cancelled() else asyncio.CancelledError()


def r5(sessions: int, header_count: int, *, seed: int = 5, workers: int = 2) -> Any:
    """Every mutation ends in a typed fault, close and kill within 100 ms, or is harmless; nothing is uncaught."""
    row = Row("R5", f"{header_count:,} mutated headers, {sessions:,} mutated sessions", limit=KILL_S)

    def body() -> None:
        shares = [[str(sessions // workers), str(header_count // workers), str(seed + n)] for n in range(workers)]
        command = [sys.executable, "-m", "tests.faults.mutations"]
        jobs = [subprocess.Popen([*command, *share], cwd=ROOT, stdout=subprocess.PIPE, text=True) for share in shares]
        outcomes: Counter[str] = Counter()
        for job in jobs:
            text, _ = job.communicate()
            if job.returncode != 0:
                row.problems.append(f"a fuzzing process ended with {job.returncode}: {text[-500:]}")
                continue
            part = json.loads(text)
            for name in ("injected", "survived", "times", "lost", "mismatched", "leaked", "problems"):
                setattr(row, name, getattr(row, name) + part[name])
            row.notes.setdefault("slow_plans", []).extend(part["slow"][:10])
            outcomes.update(part["outcomes"])
        row.notes["outcomes"] = dict(outcomes.most_common(30))

    return row, body


def share(sessions: int, header_count: int, seed: int) -> dict[str, Any]:
    """One process's part of R5."""
    row = Row("R5", "part", limit=KILL_S)
    outcomes, findings = headers(header_count, seed)
    row.injected += header_count
    row.survived += header_count - len(findings)
    row.problems += [finding[:300] for finding in findings[:5]]

    async def body() -> None:
        rng = random.Random(seed)
        with threads_for_processes(dict(SCRIPT)) as factory:
            async with arena(row) as ground:
                for number in range(sessions):
                    await judge(row, ground, factory, draw(rng, frames=FRAMES), number, outcomes)

    run(row, body, loop_factory=SteppedLoop)
    counts = {name: getattr(row, name) for name in ("injected", "survived", "lost", "mismatched", "leaked", "problems")}
    return {**counts, "times": sorted(row.times)[-200:], "slow": row.notes.get("slow", []), "outcomes": dict(outcomes)}


async def judge(
    row: Row, ground: Arena, factory: type[ThreadProcess], plan: Plan, number: int, outcomes: Counter[str]
) -> Verdict:
    """Run one plan and enter it into *row*."""
    verdict = await spoiled_session(ground, factory, plan, number)
    row.injected += 1
    row.survived += not verdict.findings
    row.problems += [f"{plan.to_dict()}: {finding}" for finding in verdict.findings]
    if verdict.kill_s is not None:
        # What is slow by itself is slow again; a busy machine is not.
        again = 0
        while verdict.kill_s > KILL_S and again < TRIES:
            again += 1
            repeated = await spoiled_session(ground, factory, plan, number)
            row.problems += [f"{plan.to_dict()}, again: {finding}" for finding in repeated.findings]
            verdict.kill_s = min(verdict.kill_s, repeated.kill_s or verdict.kill_s)
        row.notes["times_measured_again"] = row.notes.get("times_measured_again", 0) + again
        if verdict.kill_s > KILL_S:
            row.notes.setdefault("slow", []).append(plan.to_dict())
        row.took(verdict.kill_s)
    if plan.way in HARMLESS and verdict.outcomes != ["ok"] * 3:
        row.problems.append(f"{plan.to_dict()}: splitting changed the outcome: {verdict.outcomes}")
    outcomes[", ".join(verdict.outcomes)] += 1
    history = ground.history
    if len(history.calls) > 500:
        row.lost += len(history.lost())
        row.mismatched += len(history.mismatched())
        ground.history = History()
    return verdict


def r6(step: int = 1) -> Any:
    """Every cut point of every frame of a session, and every frame byte by byte: the same replies."""
    row = Row("R6", "every byte split of a live session" + (f", each {step}th" if step > 1 else ""))

    async def body() -> None:
        with threads_for_processes(dict(SCRIPT)) as factory:
            async with arena(row) as ground:
                number = 0
                for sender, count in FRAMES.items():
                    for frame in range(count):
                        trickle = await judge(
                            row, ground, factory, Plan(sender, frame, "trickle", 0), number, Counter()
                        )
                        row.check(trickle.size > 4, f"{sender} has no frame {frame}")
                        for at in range(1 + frame % step, trickle.size, step):
                            number += 1
                            plan = Plan(sender, frame, "split", 0, at)
                            await judge(row, ground, factory, plan, number, Counter())

    return row, body


if __name__ == "__main__":
    # Warnings and tracebacks of the product would be noise here; findings are in the document.
    print(json.dumps(share(*map(int, sys.argv[1:4]))), flush=True)
