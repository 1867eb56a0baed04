"""R2 hangs found by their window, R3 slow work left alone, R4 heartbeats that finish nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import time
from typing import Any

from synapse_host.config import Windows
from synapse_host.errors import EngineCrashed
from synapse_host.supervision.queueing import Permits
from tests.faults.arena import Arena, appeared, kill, lane_row, until
from tests.faults.ledger import cpu_wait
from tests.support.lanes import FAST

STOP, SPIN = 50, 51


def _windows(seconds: float) -> Any:
    return dataclasses.replace(
        FAST, windows=Windows(setup=max(20.0, seconds), control=20.0, ping=20.0, inference=seconds), cool_down=3600.0
    )


@lane_row("R2", "{count} hangs (half SIGSTOP, half GIL spin), {at_once} at a time, window {window:g} s")
async def r2(ground: Arena, count: int, *, window: float = 2.0, at_once: int = 10) -> None:
    """SIGSTOP and spins that hold the GIL: the verdict within the window + max(5 %, 100 ms), one strike each."""
    row = ground.row
    row.limit = max(0.05 * window, 0.1)
    ground.lanes.permits = Permits({"cpu": at_once})
    answers: list[float] = []
    made = []
    for n in range(at_once):
        signal_path = ground.file(f"signal{n}")
        script = {
            "rules": [
                {"first_id": STOP, "do": [{"touch": str(signal_path)}, {"sleep": 600}]},
                {"first_id": SPIN, "do": [{"touch": str(signal_path)}, {"spin": True}]},
            ]
        }
        made.append((ground.lanes(script, config=_windows(window), lane_id=f"lane{n}"), signal_path))
    for start in range(0, count, at_once):
        batch = made[: min(at_once, count - start)]
        await asyncio.gather(*(ground.history.embed(lane) for lane, _ in batch))
        answers += await asyncio.gather(
            *(_hang(ground, lane, path, STOP if n % 2 == 0 else SPIN, window) for n, (lane, path) in enumerate(batch))
        )
        for lane, _ in batch:
            await lane.unload()
    row.notes["verdict_after_window_ms"] = round((row.worst or 0) * 1000, 1)
    row.notes["callers_answer_after_window_ms"] = round(max(answers) * 1000, 1)


async def _hang(ground: Arena, lane: Any, path: Any, kind: int, window: float) -> float:
    row = ground.row
    generation = lane.health()["generation"]
    start, wait = time.monotonic(), cpu_wait()
    task = asyncio.create_task(ground.history.embed(lane, kind))
    if kind == STOP:
        await appeared(path)
        kill(ground.spy.pid(lane) or 0, signal.SIGSTOP)
    row.injected += 1
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    answered = time.monotonic() - start - window
    right = isinstance(outcome, EngineCrashed) and outcome.details["cause"] == "silence"
    row.check(right, f"a hang ends with {outcome!r}")
    verdict = ground.spy.verdict(lane, generation)
    assert verdict is not None
    row.took(verdict[0] - start - window, cpu_wait() - wait)
    row.check(verdict[0] - start >= window - 0.01, f"given up {window - verdict[0] + start:.3f} s before its window")
    row.check(lane.health()["strikes"] == 1, f"{lane.health()['strikes']} strikes for one hang")
    path.unlink(missing_ok=True)
    row.survived += right
    return answered


@lane_row("R3", "slow but working for {windows} windows, {lanes} lanes")
async def r3(ground: Arena, windows: int, *, window: float = 0.6, share: float = 0.7, lanes: int = 4) -> None:
    """Progress just inside the window for many windows: nothing is killed."""
    row = ground.row
    ground.lanes.permits = Permits({"cpu": lanes})
    every = window * share
    frames = int(windows / share) + 1
    script = {"rules": [{"first_id": 50, "do": [{"progress": {"from": 1, "to": frames, "every": every}}]}]}
    made = [ground.lanes(script, config=_windows(window), lane_id=f"lane{n}") for n in range(lanes)]
    await asyncio.gather(*(lane.load() for lane in made))
    start = time.monotonic()
    row.injected = lanes * windows
    outcomes = await asyncio.gather(*(ground.history.embed(lane, 50) for lane in made), return_exceptions=True)
    row.check(time.monotonic() - start >= windows * window, "it did not run for that many windows")
    wrong = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    row.check(not wrong, f"slow work ended with {wrong!r}")
    row.check([lane.health()["generation"] for lane in made] == [1] * lanes, "a worker was replaced")
    row.survived = (lanes - len(wrong)) * windows


HEARTBEATS: dict[str, list[dict[str, Any]]] = {
    "equal counters": [{"progress": {"completed": [1, 1, 1, 1], "every": 0.01}}],
    "a falling counter": [{"progress": {"completed": [5, 4], "every": 0.01}}],
    "zero first": [{"progress": {"completed": [0]}}],
    "another's req_id": [{"progress": {"completed": [1], "req_id": "0-0"}}],
    "the last generation's req_id": [{"progress": {"completed": [1], "req_id": "99-1"}}],
    "a phase of LOAD": [{"progress": {"completed": [1], "phase": "setup"}}],
    "control": [{"progress": {"completed": [1], "phase": "control"}}],
    "no such phase": [{"progress": {"completed": [1], "phase": "alive"}}],
    "a counter above u64": [{"progress": {"completed": [18446744073709551616]}}],
    "a float": [{"frame": {"type": "PROGRESS", "req_id": "$req_id", "completed": 1.5, "phase": "inference"}}],
    "between header and payload": [
        {"reply": {"between": [{"type": "PROGRESS", "req_id": "$req_id", "completed": 1, "phase": "inference"}]}}
    ],
    "after the terminal reply": [
        {"reply": {}},
        {"frame": {"type": "PROGRESS", "req_id": "$req_id", "completed": 9, "phase": "inference"}},
    ],
}


@lane_row("R4", "{repeats} times each heartbeat without work", limit=0.1)
async def r4(ground: Arena, repeats: int = 1) -> None:
    """Heartbeats: a protocol fault at once, the window never renewed, one strike."""
    row = ground.row
    for name, do in list(HEARTBEATS.items()) * repeats:
        lane = ground.lanes({"rules": [{"first_id": 50, "do": [*do, {"sleep": 600}]}]}, lane_id=f"lane{row.injected}")
        await ground.history.embed(lane)
        process = ground.spy.process(lane)
        # From 10 frames a second to the fault is its own pace, so the time is taken from verdict to death.
        task = asyncio.create_task(ground.history.embed(lane, 50))
        row.injected += 1
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        late = name == "after the terminal reply"
        if late:
            # The reply itself was whole; the frame behind it is the fault of an idle worker.
            await until(lambda lane=lane: lane.health()["strikes"] == 1, name)
        right = not isinstance(outcome, BaseException) if late else isinstance(outcome, EngineCrashed)
        verdict = ground.spy.verdict(lane, 1)
        row.check(right, f"{name}: {outcome!r}")
        row.check(verdict is not None and verdict[1] == "protocol", f"{name}: the verdict is {verdict}")
        row.check(not process.running, f"{name}: the worker lives")
        row.check(lane.health()["strikes"] == 1, f"{name}: {lane.health()['strikes']} strikes")
        if verdict is not None:
            row.took(time.monotonic() - verdict[0])
        row.survived += right and lane.health()["strikes"] == 1
        await lane.aclose()
