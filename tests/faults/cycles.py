"""R8 spawn and stop, R9 the soak."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from synapse_host.errors import BackendMissing, EngineCrashed
from tests.conftest import children, descriptors
from tests.faults.arena import Arena, campaign_row, kill, outcome_of, until
from tests.support.lanes import alive

LIGHT = (sys.executable, "-I", "-S", str(Path(__file__).with_name("light_worker.py")))
GROWTH = 5 * 2**20
WAYS = ("stop", "stop", "kill", "unload", "missing")


def rss() -> int:
    """Return the resident bytes of this process."""
    return int(psutil.Process().memory_info().rss)


@campaign_row("R8", "{count} spawn/stop cycles")
async def r8(ground: Arena, count: int) -> None:
    """Spawn and stop: no descriptor, thread, child, zombie or socket file is left, and the host doesn't grow."""
    row = ground.row
    # Imports, caches and the allocator's pools settle first.
    await _cycles(ground, max(6, min(150, count // 4)))
    row.injected = row.survived = 0
    before, start = _held(), rss()
    await _cycles(ground, count)
    after, grown = _held(), rss() - start
    for name, one, two in zip(("descriptors", "threads", "children"), before, after, strict=True):
        row.leaked += max(0, two - one)
        row.check(two <= one, f"{name}: {one} -> {two}")
    files = [path.name for path in ground.root.rglob("*.sock")]
    row.check(not files, f"socket files left: {files}")
    row.check(grown <= GROWTH, f"the host grew by {grown / 2**20:.1f} MiB")
    row.notes["rss_growth_mib"] = round(grown / 2**20, 2)


def _held() -> tuple[int, int, int]:
    gc.collect()
    return len(descriptors()), threading.active_count(), len(children())


async def _cycles(ground: Arena, count: int) -> None:
    turns = iter(range(count))
    await asyncio.gather(*(_cycle_lane(ground, f"cycle{number}", turns) for number in range(3)))


async def _cycle_lane(ground: Arena, name: str, turns: Iterator[int]) -> None:
    for turn in turns:
        way = WAYS[turn % len(WAYS)]
        with ground.row.fault(way) as check:
            lane = ground.lanes({}, lane_id=name, command=("/nonexistent/worker",) if way == "missing" else LIGHT)
            if way == "missing":
                outcome = await outcome_of(lane.load())
                check(isinstance(outcome, BackendMissing), f"{outcome!r}")
                await ground.end(lane)
                continue
            await lane.load()
            pid = lane.health()["worker_pid"]
            if way == "kill":
                kill(pid)
                await until(lambda lane=lane: lane.health()["strikes"] == 1, "the notice of a death")
            elif way == "unload":
                await lane.unload()
            await ground.end(lane)
            check(not alive(pid), "the worker lives")
        ground.spy.forget()


@campaign_row("R9", "soak of {seconds:g} s with faults")
async def r9(ground: Arena, seconds: float) -> None:
    """Faults and traffic for a while: latency and memory don't drift, nothing is lost."""
    row = ground.row
    rng = random.Random(9)
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
    thirds = [array("d"), array("d"), array("d")]

    def held() -> int:
        """Return the resident bytes less what this row itself keeps: eight bytes a request."""
        gc.collect()
        return rss() - sum(len(part) * part.itemsize for part in thirds)

    start = time.monotonic()
    first_held = 0
    while (now := time.monotonic() - start) < seconds:
        lane = rng.choice(made)
        clients = [_client(ground, lane, thirds[min(2, int(3 * now / seconds))]) for _ in range(8)]
        if rng.random() < 0.02:
            clients.append(_poison(ground, lane, 50 + rng.randrange(len(ends))))
        await asyncio.gather(*clients)
        if len(ground.history.calls) > 500:
            ground.check_history()
        if not first_held and now > seconds / 4:
            first_held = held()
    grown = held() - first_held
    slope = grown / 2**20 / (seconds * 0.75 / 3600)
    p99 = [sorted(part)[int(len(part) * 0.99)] if part else 0.0 for part in thirds]
    row.notes |= {
        "requests": sum(map(len, thirds)),
        "p99_ms_by_third": [round(value * 1000, 2) for value in p99],
        "rss_slope_mib_per_h": round(slope, 2),
        "rss_growth_mib": round(grown / 2**20, 2),
    }
    if seconds >= 3600:
        row.check(p99[2] <= 1.1 * p99[0], f"p99 drifts: {p99}")
        row.check(slope <= 1.0, f"memory grows by {slope:.2f} MiB an hour")
    else:
        row.check(grown <= GROWTH, "memory grows")


async def _client(ground: Arena, lane: Any, times: array[float]) -> None:
    began = time.monotonic()
    await ground.history.embed(lane)
    times.append(time.monotonic() - began)


async def _poison(ground: Arena, lane: Any, first: int) -> None:
    with ground.row.fault("a poison request") as check:
        outcome = await outcome_of(ground.history.embed(lane, first))
        check(isinstance(outcome, EngineCrashed) and not outcome.quarantined, f"it ends with {outcome!r}")
        await ground.history.embed(lane)
