"""R8 spawn and stop, R9 the soak."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import sys
import threading
import time
from array import array
from pathlib import Path
from typing import Any

from synapse_host.errors import BackendMissing, EngineCrashed
from tests.conftest import children, descriptors
from tests.faults.arena import Arena, kill, lane_row, until
from tests.support.lanes import alive

LIGHT = (sys.executable, "-I", "-S", str(Path(__file__).with_name("light_worker.py")))
GROWTH = 5 * 2**20


def rss() -> int:
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@lane_row("R8", "{count} spawn/stop cycles")
async def r8(ground: Arena, count: int, *, lanes: int = 3) -> None:
    """Spawn and stop: no descriptor, thread, child, zombie or socket file is left, and the host doesn't grow."""
    row = ground.row
    # Imports, caches and the allocator's pools settle first.
    warm = max(6, min(150, count // 4))
    await _cycles(ground, warm, lanes, counted=False)
    gc.collect()
    before = (len(descriptors()), threading.active_count(), len(children()))
    start = rss()
    await _cycles(ground, count, lanes, counted=True)
    gc.collect()
    grown = rss() - start
    after = (len(descriptors()), threading.active_count(), len(children()))
    files = [path.name for path in ground.root.rglob("*.sock")]
    for name, one, two in zip(("descriptors", "threads", "children"), before, after, strict=True):
        row.leaked += max(0, two - one)
        row.check(two <= one, f"{name}: {one} -> {two}")
    row.leaked += len(files)
    row.check(not files, f"socket files left: {files}")
    row.check(grown <= GROWTH, f"the host grew by {grown / 2**20:.1f} MiB")
    row.notes["rss_growth_mib"] = round(grown / 2**20, 2)


async def _cycles(ground: Arena, count: int, lanes: int, *, counted: bool) -> None:
    turns = iter(range(count))
    await asyncio.gather(*(_cycle_lane(ground, number, turns, counted) for number in range(lanes)))


async def _cycle_lane(ground: Arena, number: int, turns: Any, counted: bool) -> None:
    row = ground.row
    for turn in turns:
        way = ("stop", "stop", "kill", "unload", "missing")[turn % 5]
        lane = ground.lanes(
            {}, lane_id=f"cycle{number}", command=("/nonexistent/worker",) if way == "missing" else LIGHT
        )
        pid = None
        right = True
        if way == "missing":
            outcome = (await asyncio.gather(lane.load(), return_exceptions=True))[0]
            right = isinstance(outcome, BackendMissing)
        else:
            await lane.load()
            pid = lane.health()["worker_pid"]
            if way == "kill":
                kill(pid)
                await until(lambda lane=lane: lane.health()["strikes"] == 1, "the notice of a death")
            elif way == "unload":
                await lane.unload()
        await lane.aclose()
        ground.lanes.made.remove(lane)
        right = right and not (pid and alive(pid))
        row.check(right, f"{way}: not as it should be")
        if counted:
            row.injected += 1
            row.survived += right
            ground.spy.processes.clear()
            ground.spy.verdicts.clear()


@lane_row("R9", "soak of {seconds:g} s with faults")
async def r9(ground: Arena, seconds: float, *, seed: int = 9) -> None:
    """Faults and traffic for a while: latency and memory don't drift, nothing is lost."""
    row = ground.row
    rng = random.Random(seed)
    ends: list[list[dict[str, Any]]] = [
        [{"signal": "SIGKILL"}],
        [{"exit": 3}],
        [{"text": "nonsense"}, {"sleep": 600}],
        [{"reply": {"set": {"dims": 0}}}],
        [{"close": True}, {"sleep": 600}],
    ]
    rules = [{"first_id": 50 + n, "do": do} for n, do in enumerate(ends)]
    made = [ground.lanes({"rules": rules}, lane_id=f"lane{n}") for n in range(2)]
    await asyncio.gather(*(ground.history.embed(lane) for lane in made))
    # Machine floats: a list of tuples would be the only thing that grows.
    marks = [array("d"), array("d"), array("d")]
    start = time.monotonic()
    first_rss = 0
    while (now := time.monotonic() - start) < seconds:
        lane = rng.choice(made)
        clients = [_client(ground, lane, marks[min(2, int(3 * now / seconds))]) for _ in range(8)]
        if rng.random() < 0.02:
            row.injected += 1
            clients.append(_poison(ground, lane, 50 + rng.randrange(len(ends))))
        await asyncio.gather(*clients)
        if len(ground.history.calls) > 500:
            # The checker looks at what is over; an endless history would be a leak of our own.
            row.lost += len(ground.history.lost())
            row.mismatched += len(ground.history.mismatched())
            ground.history.calls.clear()
            # A process keeps its session alive, with its buffers.
            ground.spy.processes.clear()
            ground.spy.verdicts.clear()
        if not first_rss and now > seconds / 4:
            gc.collect()
            first_rss = rss() - _nbytes(marks)
    gc.collect()
    hours = seconds * 0.75 / 3600
    # Less what this test itself keeps: eight bytes a request.
    grown = rss() - _nbytes(marks) - first_rss
    slope = grown / 2**20 / hours
    thirds = [_p99(part) for part in marks]
    row.notes |= {
        "requests": sum(map(len, marks)),
        "p99_ms_by_third": [round(value * 1000, 2) for value in thirds],
        "rss_slope_mib_per_h": round(slope, 2),
        "rss_growth_mib": round(grown / 2**20, 2),
    }
    if seconds >= 3600:
        row.check(thirds[2] <= 1.1 * thirds[0], f"p99 drifts: {thirds}")
        row.check(slope <= 1.0, f"memory grows by {slope:.2f} MiB an hour")
    else:
        row.check(grown <= GROWTH, "memory grows")


async def _client(ground: Arena, lane: Any, times: array[float]) -> None:
    began = time.monotonic()
    await ground.history.embed(lane)
    times.append(time.monotonic() - began)


async def _poison(ground: Arena, lane: Any, first: int) -> None:
    outcome = (await asyncio.gather(ground.history.embed(lane, first), return_exceptions=True))[0]
    right = isinstance(outcome, EngineCrashed) and not outcome.quarantined
    ground.row.check(right, f"a poison request ends with {outcome!r}")
    await ground.history.embed(lane)
    ground.row.survived += right


def _nbytes(marks: list[array[float]]) -> int:
    return sum(len(part) * part.itemsize for part in marks)


def _p99(values: array[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)] if values else 0.0
