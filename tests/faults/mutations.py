"""R5 mutated live sessions, R6 every byte split, over the real session and the real worker loop in one process."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from synapse_host.config import Windows
from synapse_host.errors import EngineCrashed, LaneRefused, WorkerError
from tests.faults import fuzz_codec
from tests.faults.arena import Arena, arena
from tests.faults.history import History
from tests.faults.inprocess import SteppedLoop, ThreadProcess, Wire, threads_for_processes
from tests.faults.ledger import Row
from tests.faults.spoil import HARMLESS, Plan, SpoiledWire, draw
from tests.support.lanes import FAST

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).parent / "corpus" / "sessions.json"
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


class Verdict:
    """What became of one spoiled session."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []
        self.findings: list[str] = []
        self.stepped = False
        self.kill_s: float | None = None

    def key(self, plan: Plan) -> tuple[str, ...]:
        return (plan.sender, str(plan.frame), plan.way, *self.outcomes)


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
    struck_at = first_wire[0].struck_at if first_wire else None
    killed_at = factory.made[0].killed_at if factory.made else None
    if crashed and struck_at is not None and killed_at is not None and not verdict.stepped:
        verdict.kill_s = killed_at - struck_at
    return verdict


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


def r5(sessions: int, headers: int, *, seed: int = 5, real: int = 0, workers: int = 2) -> Any:
    """Every mutation ends in a typed fault, close and kill within 100 ms, or is harmless; nothing is uncaught."""
    row = Row("R5", f"{headers:,} mutated headers, {sessions:,} mutated sessions, {real} with processes", limit=KILL_S)

    def body() -> None:
        share, rest = divmod(sessions, workers)
        jobs = []
        for n in range(workers):
            command = [sys.executable, "-m", "tests.faults.mutations", str(share + (n < rest)), str(headers // workers)]
            jobs.append(
                subprocess.Popen(
                    [*command, str(seed + n), str(real // workers)], cwd=ROOT, stdout=subprocess.PIPE, text=True
                )
            )
        outcomes: Counter[str] = Counter()
        again = 0
        for job in jobs:
            text, _ = job.communicate()
            if job.returncode != 0:
                row.problems.append(f"a fuzzing process ended with {job.returncode}: {text[-500:]}")
                continue
            part = json.loads(text)
            row.injected += part["injected"]
            row.survived += part["survived"]
            row.times += part["times"]
            row.waited = max(row.waited, part["waited"])
            row.lost += part["lost"]
            row.mismatched += part["mismatched"]
            row.leaked += part["leaked"]
            again += part["again"]
            row.notes.setdefault("slow_plans", []).extend(part["slow"][:10])
            row.problems += part["problems"]
            outcomes.update(part["outcomes"])
        row.notes |= {"outcomes": dict(outcomes.most_common(30)), "times_measured_again": again}

    return row, body


def share(sessions: int, headers: int, seed: int, real: int) -> dict[str, Any]:
    """One process's part of R5."""
    from tests.faults.arena import run

    row = Row("R5", "part", limit=KILL_S)
    outcomes: Counter[str] = Counter()
    if headers:
        report = fuzz_codec.run(headers, seed)
        row.injected += headers
        row.survived += headers - len(report["findings"])
        row.problems += [str(finding)[:300] for finding in report["findings"][:5]]
    if sessions:
        run(row, lambda: _sessions(row, sessions, seed, outcomes), loop_factory=SteppedLoop)
    if real:
        from tests.faults.real_mutations import real_sessions

        run(row, lambda: real_sessions(row, real, seed, outcomes))
    row.problems = [problem for problem in row.problems if not problem.startswith("nothing was injected")]
    return {
        **{
            name: getattr(row, name)
            for name in ("injected", "survived", "lost", "mismatched", "leaked", "problems", "waited")
        },
        "times": sorted(row.times)[-200:],
        "slow": row.notes.get("slow", []),
        "again": row.notes.get("times_measured_again", 0),
        "outcomes": dict(outcomes),
    }


async def _sessions(row: Row, count: int, seed: int, outcomes: Counter[str]) -> None:
    rng = random.Random(seed)
    with threads_for_processes(dict(SCRIPT)) as factory:
        async with arena(row) as ground:
            for number in range(count):
                plan = draw(rng, frames=FRAMES)
                await judge(row, ground, factory, plan, number, outcomes)


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
                sizes = await _frame_sizes(ground, factory)
                row.check({sender: len(found) for sender, found in sizes.items()} == FRAMES, f"frames: {sizes}")
                number = 0
                for sender, frames in sizes.items():
                    for frame, size in enumerate(frames):
                        plans = [Plan(sender, frame, "trickle", 0)]
                        plans += [_cut_at(sender, frame, size, at) for at in range(1 + frame % step, size, step)]
                        for plan in plans:
                            number += 1
                            await judge(row, ground, factory, plan, number, Counter())
                row.notes["bytes"] = {sender: sum(found) for sender, found in sizes.items()}

    return row, body


def _cut_at(sender: str, frame: int, size: int, at: int) -> Plan:
    """Return the plan that splits exactly at *at*: the seed is searched, so that a plan stays four plain fields."""
    for seed in range(100_000):
        if random.Random(seed).randrange(size) == at:
            return Plan(sender, frame, "split", seed)
    raise AssertionError("no seed")


async def _frame_sizes(ground: Arena, factory: type[ThreadProcess]) -> dict[str, list[int]]:
    """Return the sizes of the frames of a sound session."""
    sizes: dict[str, list[int]] = {"worker": [], "host": []}
    for sender, found in sizes.items():

        class Measuring(SpoiledWire):
            def _send_frame(self, frame: bytes, found: list[int] = found) -> None:
                found.append(len(frame))
                super()._send_frame(frame)

            def _read_frame(self, frame: bytes, found: list[int] = found) -> None:
                found.append(len(frame))
                super()._read_frame(frame)

        original = factory.wrap
        factory.wrap = staticmethod(lambda sock, sender=sender: Measuring(sock, Plan(sender, 10**6, "split", 0)))
        lane = ground.lanes(dict(SCRIPT))
        for ask in (ground.history.embed, ground.history.generate, ground.history.rerank):
            await ask(lane)
        # Before SHUTDOWN, which is no part of the requests.
        found[:] = found[: FRAMES[sender]] if sender == "host" else found
        await lane.aclose()
        ground.lanes.made.remove(lane)
        if sender == "host":
            found[:] = found[: FRAMES["host"]]
        factory.wrap = original
    return sizes


def write_corpus(count: int, seed: int) -> int:
    """Run *count* plans and keep one for each sender, way and outcome; return how many."""
    kept: dict[tuple[str, ...], dict[str, Any]] = {}
    row = Row("corpus", "kept sessions")

    async def body() -> None:
        rng = random.Random(seed)
        with threads_for_processes(dict(SCRIPT)) as factory:
            async with arena(row) as ground:
                for number in range(count):
                    plan = draw(rng, frames=FRAMES)
                    verdict = await judge(row, ground, factory, plan, number, Counter())
                    key = (plan.sender, plan.way, *verdict.outcomes)
                    kept.setdefault(key, {"plan": plan.to_dict(), "outcome": verdict.outcomes})

    from tests.faults.arena import run

    run(row, body, loop_factory=SteppedLoop)
    if row.problems:
        raise SystemExit("\n".join(row.problems))
    rows = [kept[key] for key in sorted(kept)]
    CORPUS.write_text("[\n" + ",\n".join(json.dumps(entry) for entry in rows) + "\n]\n")
    return len(rows)


if __name__ == "__main__":
    if sys.argv[1] == "corpus":
        print(write_corpus(int(sys.argv[2]), int(sys.argv[3])))
        sys.exit()
    # Warnings and tracebacks of the product would be noise here; findings are in the document.
    json.dump(share(*map(int, sys.argv[1:5])), sys.stdout)
    sys.stdout.flush()
    os._exit(0)
