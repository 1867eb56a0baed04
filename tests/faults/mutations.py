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
from tests.faults.arena import Arena, campaign_row, outcome_of
from tests.faults.frames import HARMLESS, LENGTH, Plan, draw, mutate, seeds, spoil
from tests.faults.inprocess import SteppedLoop, ThreadProcess, Wire, stepped, threads_for_processes
from tests.faults.ledger import Check, Row
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
WORKERS = 2
"""Processes that share R5."""
TYPED = EngineCrashed | LaneRefused | WorkerError
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

    def __init__(self, sock: socket.socket, plan: Plan) -> None:
        super().__init__(sock)
        self.plan = plan
        self.size = 0
        """Bytes of the spoiled frame; 0 until it passes."""
        self.struck_at: float | None = None
        """time.monotonic() of its last byte."""
        self._seen = 0
        self._partial = b""
        self._ready: list[bytes] = []

    def _pass(self, data: bytes) -> list[bytes]:
        """Return the pieces that get through, frame by frame."""
        self._partial += data
        through: list[bytes] = []
        while len(self._partial) >= LENGTH.size:
            size = LENGTH.size + LENGTH.unpack_from(self._partial)[0]
            if len(self._partial) < size:
                break
            frame, self._partial = self._partial[:size], self._partial[size:]
            if self._seen == self.plan.frame:
                self.size, self.struck_at = size, time.monotonic()
                through += filter(None, spoil(frame, self.plan))
            elif not self.size or self.plan.way not in ("cut", "stall"):
                through.append(frame)
            self._seen += 1
        return through

    def _passed(self, struck_before: bool) -> None:
        """What follows the spoiled frame once it is through."""
        if self.size and not struck_before:
            self.struck_at = time.monotonic()
            if self.plan.way == "cut":
                self.socket.shutdown(socket.SHUT_RDWR)

    def send(self, view: memoryview) -> int:
        return self.sendmsg([view])

    def sendmsg(self, views: Sequence[memoryview]) -> int:
        data, struck = b"".join(views), bool(self.size)
        for piece in self._pass(data) if self.plan.sender == "worker" else [data]:
            self.socket.sendall(piece)
        self._passed(struck)
        return len(data)

    def recv_into(self, view: memoryview) -> int:
        if self.plan.sender == "worker":
            return super().recv_into(view)
        while not self._ready:
            piece, struck = bytearray(65536), bool(self.size)
            count = super().recv_into(memoryview(piece))
            if count == 0:
                return 0
            self._ready += self._pass(bytes(piece[:count]))
            self._passed(struck)
        data = self._ready.pop(0)
        count = min(len(view), len(data))
        view[:count] = data[:count]
        if data[count:]:
            self._ready.insert(0, data[count:])
        return count


class SpoiledSession:
    """Three requests over a connection whose bytes a plan spoils, and over the sound one that replaces it."""

    def __init__(self, ground: Arena, factory: type[ThreadProcess], plan: Plan, check: Check) -> None:
        self.history = ground.history
        self.factory = factory
        self.check = check
        self.outcomes: list[str] = []
        self.wire: SpoiledWire | None = None
        self.waited = False
        """True when the clock was moved on: then the time until the kill says nothing."""
        factory.made.clear()

        def wrap(sock: socket.socket) -> Wire:
            if self.wire is not None:
                return Wire(sock)
            self.wire = SpoiledWire(sock, plan)
            return self.wire

        factory.wrap = staticmethod(wrap)
        self.lane = ground.lanes(SCRIPT, config=PATIENCE, lane_id="spoiled")

    @property
    def struck(self) -> bool:
        """True from just before the first spoiled byte."""
        return self.wire is not None and self.wire.size > 0

    async def run(self) -> None:
        """Make the requests, one after another."""
        strikes = 0
        for ask in (self.history.embed, self.history.generate, self.history.rerank):
            struck_before = self.struck
            outcome = await self._patiently(ask(self.lane))
            call = self.history.calls[-1]
            if isinstance(outcome, BaseException):
                self.check(isinstance(outcome, TYPED), f"untyped {outcome!r:.200}")
                self.check(self.struck, f"{outcome!r:.200} before anything was spoiled")
                crashed = isinstance(outcome, EngineCrashed)
                code = getattr(outcome, "code", "untyped")
                self.outcomes.append(f"{code} {outcome.details['cause']}" if crashed else code)
                strikes += crashed
            else:
                own = call.outcomes == [("ok", call.expected)]
                self.check(own or self.struck is not struck_before, f"another's answer: {call}")
                # Bits of a payload have no checksum: what was spoiled itself may differ, and nothing else.
                call.expected = call.outcomes[0][1]
                self.outcomes.append("ok")
                strikes = 0
            if isinstance(outcome, LaneRefused):  # and stays refused: nothing more to ask it
                break
            observed = self.lane.health()["strikes"]
            self.check(observed <= max(1, strikes), f"{observed} strikes after {self.outcomes}")

    async def end(self, ground: Arena) -> None:
        """Close the lane and look at what is left of its workers."""
        await self._patiently(ground.end(self.lane))
        made = self.factory.made
        self.check(len(made) <= 2, f"{len(made)} workers for one spoiled connection")
        for process in made:
            self.check(not process.running, "a worker is left running")
            self.check(process.bug is None, f"uncaught in the worker: {process.bug!r}")

    @property
    def kill_s(self) -> float | None:
        """From the spoiled frame to the kill, where one led to the other."""
        struck_at = self.wire.struck_at if self.wire else None
        killed_at = self.factory.made[0].killed_at if self.factory.made else None
        crashed = any(kind.startswith("engine_crashed") for kind in self.outcomes)
        if not crashed or struck_at is None or killed_at is None or self.waited:
            return None
        return killed_at - struck_at

    async def _patiently(self, request: Any) -> Any:
        """Return what *request* ends with; when both ends wait for each other, let time pass until the host acts."""
        task = asyncio.ensure_future(request)
        start = time.monotonic()
        while not (await asyncio.wait({task}, timeout=STALL_S))[0]:
            if time.monotonic() - start > LIMIT_S:
                self.check(False, "hangs")
                task.cancel()
            # What is killed already needs real time to end, not more silence.
            if any(each.killed_at is None and each.wire and each.wire.quiet() for each in self.factory.made[-1:]):
                self.waited = True
                await stepped().step(STEP_S)
        return await outcome_of(task)


async def spoiled_session(ground: Arena, factory: type[ThreadProcess], plan: Plan) -> SpoiledSession:
    """Run one plan and enter it into the row."""
    with ground.row.fault(str(plan)) as check:
        # What is slow by itself is slow again; a busy machine is not.
        times: list[float] = []
        while len(times) <= TRIES:
            session = SpoiledSession(ground, factory, plan, check)
            await session.run()
            await session.end(ground)
            if session.kill_s is None:
                break
            times.append(session.kill_s)
            if session.kill_s <= KILL_S:
                break
        if times:
            ground.row.took(min(times))
        if min(times, default=0.0) > KILL_S:
            ground.row.notes.setdefault("slow_plans", []).append(str(plan))
        check(plan.way not in HARMLESS or session.outcomes == ["ok"] * 3, f"the outcomes are {session.outcomes}")
    if len(ground.history.calls) > 500:
        ground.check_history()
    return session


@campaign_row("R5", "{header_count:,} mutated headers, {sessions:,} mutated sessions", limit=KILL_S)
def r5(row: Row, sessions: int, header_count: int) -> None:
    """Every mutation ends in a typed fault, close and kill within 100 ms, or is harmless; nothing is uncaught."""
    share = [str(sessions // WORKERS), str(header_count // WORKERS)]
    commands = [[sys.executable, "-m", "tests.faults.mutations", *share, str(5 + n)] for n in range(WORKERS)]
    jobs = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for command in commands]
    outcomes: Counter[str] = Counter()
    for job in jobs:
        text, _ = job.communicate()
        if job.returncode != 0:
            row.problems.append(f"a fuzzing process ended with {job.returncode}: {text[-500:]}")
            continue
        part = json.loads(text)
        for name in ("injected", "survived", "times", "lost", "mismatched", "leaked", "problems"):
            setattr(row, name, getattr(row, name) + part[name])
        row.notes.setdefault("slow_plans", []).extend(part["notes"].get("slow_plans", [])[:10])
        outcomes.update(part["notes"]["ends"])
    row.notes["ends"] = dict(outcomes.most_common(30))


@campaign_row("R5", "part", limit=KILL_S, loop=SteppedLoop)
async def share(ground: Arena, sessions: int, header_count: int, seed: int) -> None:
    """One process's part of R5."""
    row = ground.row
    outcomes, findings = headers(header_count, seed)
    row.injected += header_count
    row.survived += header_count - len(findings)
    row.problems += [finding[:300] for finding in findings[:5]]
    rng = random.Random(seed)
    with threads_for_processes(SCRIPT) as factory:
        for _ in range(sessions):
            session = await spoiled_session(ground, factory, draw(rng, frames=FRAMES))
            outcomes[", ".join(session.outcomes)] += 1
    row.notes["ends"] = dict(outcomes)
    row.times[:] = sorted(row.times)[-200:]


@campaign_row("R6", "every byte split of a live session, each {step}th", loop=SteppedLoop)
async def r6(ground: Arena, step: int = 1) -> None:
    """Every cut point of every frame of a session, and every frame byte by byte: the same replies."""
    with threads_for_processes(SCRIPT) as factory:
        for sender, count in FRAMES.items():
            for frame in range(count):
                whole = await spoiled_session(ground, factory, Plan(sender, frame, "trickle"))
                size = whole.wire.size if whole.wire else 0
                ground.row.check(size > 4, f"{sender} has no frame {frame}")
                for at in range(1 + frame % step, size, step):
                    await spoiled_session(ground, factory, Plan(sender, frame, "split", at=at))


if __name__ == "__main__":
    # Warnings and tracebacks of the product would be noise here; findings are in the document.
    sessions, header_count, seed = map(int, sys.argv[1:])
    row = share(sessions=sessions, header_count=header_count, seed=seed)
    print(json.dumps(dataclasses.asdict(row)), flush=True)
