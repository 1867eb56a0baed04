"""R1 kill -9 at random phases, R10 death to READY, R7 callers who leave."""

from __future__ import annotations

import asyncio
import random
import signal
import statistics
from pathlib import Path
from typing import Any

from engines.protocol.messages import EmbedBatch, Item, Pooling
from synapse_host.errors import DeadlineExceeded, EngineCrashed
from tests.faults.arena import Arena, appeared, campaign_row, kill, outcome_of, until
from tests.faults.ledger import Stopwatch

SERVING = ("computing", "between two PROGRESS", "after the header", "inside the payload", "idle", "while it reads")
STARTING = ("before HELLO", "after HELLO", "in LOAD", "in LOAD between two PROGRESS")
HANG = {"sleep": 600}
SOME = {"progress": {"completed": [1, 2]}}


def _serving_script(path: Path) -> dict[str, Any]:
    """A worker whose fate a request chooses by its first id: 100 + the phase's place in SERVING."""
    told = {"touch": str(path)}
    later = {"thread": [{"sleep": 0.002}, told]}
    ends: dict[str, list[dict[str, Any]]] = {
        "computing": [told, HANG],
        "between two PROGRESS": [SOME, told, HANG],
        "after the header": [later, {"reply": {"pause": 600}}],
        "inside the payload": [later, {"reply": {"stall": {"after": 7, "seconds": 600}}}],
    }
    return {"rules": [{"first_id": 100 + SERVING.index(phase), "do": do} for phase, do in ends.items()]}


def _starting_script(phase: str, path: Path, state: Path) -> dict[str, Any]:
    """A worker whose first generation hangs in *phase* and whose second is well."""
    hang = [{"touch": str(path)}, HANG]
    first: dict[str, Any] = {
        "before HELLO": {"start": hang},
        "after HELLO": {"ready": hang},
        "in LOAD": {"rules": [{"on": "LOAD", "do": hang}]},
        "in LOAD between two PROGRESS": {"rules": [{"on": "LOAD", "do": [SOME, *hang]}]},
    }[phase]
    return {"state": str(state), "generations": [first, {}]}


@campaign_row("R1", "{count} kill -9 at random phases", limit=0.1, median_limit=0.01)
async def r1(ground: Arena, count: int) -> None:
    """kill -9 at random phases: every request has one outcome, the victim's within 100 ms of the death."""
    phases = [*SERVING, *STARTING]
    plan = [phases[n % len(phases)] for n in range(count)]
    random.Random(1).shuffle(plan)
    await asyncio.gather(_kills(ground, 1, plan[::2]), _kills(ground, 2, plan[1::2]))
    ground.row.notes["phases"] = {phase: plan.count(phase) for phase in phases}


async def _kills(ground: Arena, number: int, plan: list[str]) -> None:
    rng = random.Random(number)
    path = ground.file(f"signal{number}")
    serving = ground.lanes(_serving_script(path), lane_id=f"serving{number}")
    for n, phase in enumerate(plan):
        if phase in STARTING:
            script = _starting_script(phase, path, ground.file(f"state{number}-{n}"))
            starting = ground.lanes(script, lane_id=f"starting{number}-{n}")
            await _kill_once(ground, starting, phase, path, rng)
            await starting.aclose()
        else:
            await ground.history.embed(serving)
            await _kill_once(ground, serving, phase, path, rng)


async def _kill_once(ground: Arena, lane: Any, phase: str, path: Path, rng: random.Random) -> None:
    row, history = ground.row, ground.history
    strikes = lane.health()["strikes"]
    generation = lane.health()["generation"] + (phase in STARTING)
    victim: asyncio.Task[Any] | None = None
    if phase == "while it reads":
        # A stopped worker reads nothing, so a large request stays in the host.
        kill(ground.spy.process(lane).pid, signal.SIGSTOP)
        victim = asyncio.create_task(history.ask(lane, _large, "nothing: half a request has no answer"))
        await asyncio.sleep(0.005)
    elif phase != "idle":
        victim = asyncio.create_task(history.embed(lane, 100 + SERVING.index(phase) if phase in SERVING else None))
        await appeared(path)
    waiting = [asyncio.create_task(history.embed(lane)) for _ in range(rng.randrange(4) if victim else 0)]
    await asyncio.sleep(rng.random() * 0.004)
    with row.fault(phase) as check:
        watch = Stopwatch()
        kill(ground.spy.process(lane).pid)
        if victim is None:
            await until(lambda: lane.health()["strikes"] == strikes + 1, "the notice of an idle death", 10)
            row.took(*watch.read())
        else:
            victim.add_done_callback(lambda _: row.took(*watch.read()))
            outcome = await outcome_of(victim)
            right = isinstance(outcome, EngineCrashed) and not outcome.quarantined
            check(right, f"the victim's outcome is {outcome!r}")
        # Whoever waited behind the victim is served by the next worker, in order, with its own answer.
        served = await asyncio.gather(*waiting, return_exceptions=True)
        wrong = [outcome for outcome in served if isinstance(outcome, BaseException)]
        check(not wrong, f"behind the victim {wrong!r}")
        if not waiting:
            check(lane.health()["strikes"] == strikes + 1, f"strikes {strikes} -> {lane.health()['strikes']}")
        await history.embed(lane)
        check(lane.health()["strikes"] == 0, "served work clears the strike")
        check(lane.health()["generation"] == generation + 1, "one replacement, not more")


def _large(req_id: str, ref: str) -> tuple[EmbedBatch, bytes]:
    count = 2_000_000
    return EmbedBatch(req_id, ref, Pooling.MEAN, False, [Item("0", count)]), bytes(4 * count)


@campaign_row("R10", "{count} restarts, death to READY", limit=0.25, percentile=99)
async def r10(ground: Arena, count: int) -> None:
    """Death to READY with a scripted engine: p99 under 250 ms."""
    lane = ground.lanes({})
    await lane.load()
    raw, spent = [], []
    for number in range(count):
        with ground.row.fault(f"restart {number}") as check:
            old = ground.spy.process(lane).pid
            watch = Stopwatch()
            kill(old)
            await until(lambda: lane.health()["strikes"] == 1, "the notice")
            await lane.load()
            seconds, waited = watch.read()
            new = ground.spy.process(lane).pid
            ran, stood = (int(part) / 1e9 for part in Path(f"/proc/{new}/schedstat").read_text().split()[:2])
            # The worker's own wait for a CPU is the machine's, not the path's.
            ground.row.took(seconds, waited + stood)
            raw.append(seconds)
            spent.append(ran)
            await ground.history.generate(lane)
            check(lane.health()["strikes"] == 0 and new != old, "not a new worker without a strike")
    ground.row.notes |= {
        "with_cpu_waits_p50_ms": round(statistics.median(raw) * 1000, 1),
        "with_cpu_waits_worst_ms": round(max(raw) * 1000, 1),
        "worker_cpu_p50_ms": round(statistics.median(spent) * 1000, 1),
    }


@campaign_row("R7", "{count} cancelled callers")
async def r7(ground: Arena, count: int) -> None:
    """Callers who leave at random times: no strike, no wrong reply afterwards, the same workers."""
    row = ground.row
    script = {"rules": [{"on": "EMBED_BATCH", "first_id": 50, "do": [{"sleep": 0.003}]}]}
    made = [ground.lanes(script, lane_id=f"lane{n}") for n in range(3)]
    await asyncio.gather(*(ground.history.embed(lane) for lane in made))
    await asyncio.gather(*(_leavers(ground, lane, count // 3 + 1, random.Random(n)) for n, lane in enumerate(made)))
    row.check([lane.health()["generation"] for lane in made] == [1] * 3, "a worker was replaced")
    row.check([lane.health()["strikes"] for lane in made] == [0] * 3, "a strike was charged")
    row.notes["late_replies"] = sum(lane.counters.abandoned for lane in made)
    # Of a handful on a busy machine each may have left in the queue.
    row.check(row.notes["late_replies"] > 0 or count < 100, "nobody left while his request ran")


async def _leavers(ground: Arena, lane: Any, count: int, rng: random.Random) -> None:
    history, loop = ground.history, asyncio.get_running_loop()
    left = 0
    while left < count:
        batch = []
        for _ in range(4):
            first = 50 if rng.random() < 0.7 else None
            after = rng.random() * 0.006
            if rng.random() < 0.5:
                task = asyncio.create_task(history.embed(lane, first, deadline=loop.time() + after))
            else:
                task = asyncio.create_task(history.embed(lane, first))
                loop.call_later(after, task.cancel)
            batch.append(task)
        stays = asyncio.create_task(history.embed(lane))
        for outcome in await asyncio.gather(*batch, return_exceptions=True):
            if isinstance(outcome, BaseException):
                with ground.row.fault("a caller who leaves") as check:
                    gone = isinstance(outcome, asyncio.CancelledError | DeadlineExceeded)
                    check(gone, f"its outcome is {outcome!r}")
                    left += gone
        await stays
