"""R2 hangs found by their window, R3 slow work left alone, R4 heartbeats that finish nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import time
from pathlib import Path
from typing import Any

from synapse_host.config import Windows
from synapse_host.errors import EngineCrashed
from synapse_host.supervision.queueing import Permits
from tests.faults.arena import Arena, appeared, campaign_row, kill, outcome_of, until
from tests.faults.ledger import Stopwatch
from tests.support.lanes import FAST

STOP, SPIN = 50, 51


def _windows(seconds: float) -> Any:
    return dataclasses.replace(
        FAST, windows=Windows(setup=max(20.0, seconds), control=20.0, ping=20.0, inference=seconds), cool_down=3600.0
    )


@campaign_row("R2", "{count} hangs (half SIGSTOP, half GIL spin), {at_once} at a time, window {window:g} s")
async def r2(ground: Arena, count: int, *, window: float = 2.0, at_once: int = 10) -> None:
    """SIGSTOP and spins that hold the GIL: the verdict within the window + max(5 %, 100 ms), one strike each."""
    row = ground.row
    row.limit = max(0.05 * window, 0.1)
    ground.lanes.permits = Permits({"cpu": at_once})
    answers: list[float] = []
    made = []
    for n in range(at_once):
        path = ground.file(f"signal{n}")
        ends = {STOP: {"sleep": 600}, SPIN: {"spin": True}}
        rules = [{"first_id": first, "do": [{"touch": str(path)}, end]} for first, end in ends.items()]
        made.append((ground.lanes({"rules": rules}, config=_windows(window), lane_id=f"lane{n}"), path))
    for start in range(0, count, at_once):
        batch = made[: min(at_once, count - start)]
        await asyncio.gather(*(ground.history.embed(lane) for lane, _ in batch))
        answers += await asyncio.gather(
            *(_hang(ground, lane, path, (STOP, SPIN)[n % 2], window) for n, (lane, path) in enumerate(batch))
        )
        for lane, _ in batch:
            await lane.unload()
    row.notes["callers_answer_after_window_ms"] = round(max(answers) * 1000, 1)


async def _hang(ground: Arena, lane: Any, path: Path, kind: int, window: float) -> float:
    """Let one request hang; return how long after the window its caller was answered."""
    generation = lane.health()["generation"]
    watch = Stopwatch()
    task = asyncio.create_task(ground.history.embed(lane, kind))
    if kind == STOP:
        await appeared(path)
        kill(ground.spy.process(lane).pid, signal.SIGSTOP)
    with ground.row.fault("a stop" if kind == STOP else "a spin") as check:
        outcome = await outcome_of(task)
        answered, waited = watch.read()
        right = isinstance(outcome, EngineCrashed) and outcome.details["cause"] == "silence"
        check(right, f"it ends with {outcome!r}")
        late = ground.spy.verdict(lane, generation)[0] - watch.start - window
        ground.row.took(late, waited)
        check(late >= -0.01, f"given up {-late:.3f} s before its window")
        check(lane.health()["strikes"] == 1, f"{lane.health()['strikes']} strikes")
    path.unlink(missing_ok=True)
    return answered - window


@campaign_row("R3", "slow but working for {windows} windows, {lanes} lanes")
async def r3(ground: Arena, windows: int, *, window: float = 0.6, share: float = 0.7, lanes: int = 4) -> None:
    """Progress just inside the window for many windows: nothing is killed."""
    row = ground.row
    ground.lanes.permits = Permits({"cpu": lanes})
    every = window * share
    steady = {"progress": {"from": 1, "to": int(windows / share) + 1, "every": every}}
    script = {"rules": [{"first_id": 50, "do": [steady]}]}
    made = [ground.lanes(script, config=_windows(window), lane_id=f"lane{n}") for n in range(lanes)]
    await asyncio.gather(*(lane.load() for lane in made))
    start = time.monotonic()
    outcomes = await asyncio.gather(*(ground.history.embed(lane, 50) for lane in made), return_exceptions=True)
    row.check(time.monotonic() - start >= windows * window, "it did not run for that many windows")
    wrong = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    row.check(not wrong, f"slow work ended with {wrong!r}")
    row.check([lane.health()["generation"] for lane in made] == [1] * lanes, "a worker was replaced")
    row.injected, row.survived = lanes * windows, (lanes - len(wrong)) * windows


def _beat(**fields: Any) -> dict[str, Any]:
    return {"type": "PROGRESS", "req_id": "$req_id", "completed": 1, "phase": "inference", **fields}


AFTER = "after the terminal reply"
HEARTBEATS: dict[str, list[dict[str, Any]]] = {
    "equal counters": [{"progress": {"completed": [1, 1, 1, 1], "every": 0.01}}],
    "a falling counter": [{"progress": {"completed": [5, 4], "every": 0.01}}],
    "zero first": [{"frame": _beat(completed=0)}],
    "another's req_id": [{"frame": _beat(req_id="0-0")}],
    "the last generation's req_id": [{"frame": _beat(req_id="99-1")}],
    "a phase of LOAD": [{"frame": _beat(phase="setup")}],
    "control": [{"frame": _beat(phase="control")}],
    "no such phase": [{"frame": _beat(phase="alive")}],
    "a counter above u64": [{"frame": _beat(completed=2**64)}],
    "a float": [{"frame": _beat(completed=1.5)}],
    "between header and payload": [{"reply": {"between": [_beat()]}}],
    AFTER: [{"reply": {}}, {"frame": _beat(completed=9)}],
}


@campaign_row("R4", "{repeats} times each heartbeat without work", limit=0.1)
async def r4(ground: Arena, repeats: int = 1) -> None:
    """Heartbeats: a protocol fault at once, the window never renewed, one strike."""
    for number, (name, do) in enumerate([*HEARTBEATS.items()] * repeats):
        lane = ground.lanes({"rules": [{"first_id": 50, "do": [*do, {"sleep": 600}]}]}, lane_id=f"lane{number}")
        await ground.history.embed(lane)
        process = ground.spy.process(lane)
        with ground.row.fault(name) as check:
            outcome = await outcome_of(ground.history.embed(lane, 50))
            if name == AFTER:
                # The reply itself was whole; the frame behind it is the fault of an idle worker.
                await until(lambda lane=lane: lane.health()["strikes"] == 1, name)
            crashed = isinstance(outcome, EngineCrashed)
            check(crashed is not (name == AFTER), f"it ends with {outcome!r}")
            # How fast the beats come is the worker's own pace, so the time is taken from verdict to death.
            at, cause = ground.spy.verdict(lane, 1)
            ground.row.took(time.monotonic() - at)
            check(cause == "protocol", f"the verdict is {cause}")
            check(not process.running, "the worker lives")
            check(lane.health()["strikes"] == 1, f"{lane.health()['strikes']} strikes")
        await ground.end(lane)
