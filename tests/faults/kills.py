"""R1 kill -9 at random phases, R10 death to READY, R7 callers who leave."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path
from typing import Any

from synapse_host.errors import DeadlineExceeded, EngineCrashed, SynapseError
from tests.faults.arena import Arena, appeared, kill, lane_row, until
from tests.faults.ledger import Stopwatch

SERVING = ("computing", "between two PROGRESS", "after the header", "inside the payload", "idle", "while it reads")
STARTING = ("before HELLO", "after HELLO", "in LOAD", "in LOAD between two PROGRESS")
FOREVER = 600


def _signal(path: Path) -> dict[str, Any]:
    return {"touch": str(path)}


def _serving_script(path: Path) -> dict[str, Any]:
    """A worker whose fate a request chooses by its first id: 100 + the phase's place in SERVING."""
    hold = {"sleep": FOREVER}
    later = {"thread": [{"sleep": 0.002}, _signal(path)]}
    ends: dict[str, list[dict[str, Any]]] = {
        "computing": [_signal(path), hold],
        "between two PROGRESS": [{"progress": {"completed": [1, 2]}}, _signal(path), hold],
        "after the header": [later, {"reply": {"pause": FOREVER}}],
        "inside the payload": [later, {"reply": {"stall": {"after": 7, "seconds": FOREVER}}}],
    }
    return {"rules": [{"first_id": 100 + SERVING.index(phase), "do": do} for phase, do in ends.items()]}


def _starting_script(phase: str, path: Path, state: Path) -> dict[str, Any]:
    """A worker whose first generation hangs in *phase* and whose second is well."""
    hang: dict[str, Any] = {
        "before HELLO": {"start": [_signal(path), {"sleep": FOREVER}]},
        "after HELLO": {"ready": [_signal(path), {"sleep": FOREVER}]},
        "in LOAD": {"rules": [{"on": "LOAD", "do": [_signal(path), {"sleep": FOREVER}]}]},
        "in LOAD between two PROGRESS": {
            "rules": [{"on": "LOAD", "do": [{"progress": {"completed": [1, 2]}}, _signal(path), {"sleep": FOREVER}]}]
        },
    }[phase]
    return {"state": str(state), "generations": [hang, {}]}


@lane_row("R1", "{count} kill -9 at random phases", limit=0.1, median_limit=0.01)
async def r1(ground: Arena, count: int, *, seed: int = 1, lanes: int = 2) -> None:
    """kill -9 at random phases: every request has one outcome, the victim's within 100 ms of the death."""
    row = ground.row
    rng = random.Random(seed)
    phases = [*SERVING, *STARTING]
    plan = [phases[n % len(phases)] for n in range(count)]
    rng.shuffle(plan)
    shares = [plan[n::lanes] for n in range(lanes)]
    await asyncio.gather(*(_kills(ground, n, share, random.Random(seed + n)) for n, share in enumerate(shares)))
    row.notes["phases"] = {phase: plan.count(phase) for phase in phases}


async def _kills(ground: Arena, number: int, plan: list[str], rng: random.Random) -> None:
    path = ground.file(f"signal{number}")
    lane = ground.lanes(_serving_script(path), lane_id=f"serving{number}")
    for n, phase in enumerate(plan):
        if phase in STARTING:
            other = ground.lanes(
                _starting_script(phase, path, ground.file(f"state{number}-{n}")), lane_id=f"starting{number}-{n}"
            )
            await _kill_once(ground, other, phase, path, rng)
            await other.aclose()
        else:
            await ground.history.embed(lane)
            await _kill_once(ground, lane, phase, path, rng)


async def _kill_once(ground: Arena, lane: Any, phase: str, path: Path, rng: random.Random) -> None:
    row, history, spy = ground.row, ground.history, ground.spy
    strikes = lane.health()["strikes"]
    generation = lane.health()["generation"] + (phase in STARTING)
    first = 100 + SERVING.index(phase) if phase in SERVING else None
    victim: asyncio.Task[Any] | None = None
    if phase == "while it reads":
        # A stopped worker reads nothing, so a large request stays in the host.
        kill(spy.pid(lane) or 0, signal.SIGSTOP)
        victim = asyncio.create_task(_large(ground, lane))
        await asyncio.sleep(0.005)
    elif phase != "idle":
        victim = asyncio.create_task(history.embed(lane, first))
        await appeared(path)
    waiting = [asyncio.create_task(history.embed(lane)) for _ in range(rng.randrange(4) if victim else 0)]
    await asyncio.sleep(rng.random() * 0.004)
    pid = spy.pid(lane)
    assert pid is not None
    watch = Stopwatch()
    kill(pid)
    row.injected += 1
    good = True
    if victim is None:
        await until(lambda: lane.health()["strikes"] == strikes + 1, "the notice of an idle death", 10)
        row.took(*watch.read())
    else:
        victim.add_done_callback(lambda _: row.took(*watch.read()))
        (outcome,) = await asyncio.gather(victim, return_exceptions=True)
        good = isinstance(outcome, EngineCrashed) and not outcome.quarantined
        row.check(good, f"{phase}: the victim's outcome is {outcome!r}")
    # Whoever waited behind the victim is served by the next worker, in order, with its own answer.
    served = await asyncio.gather(*waiting, return_exceptions=True)
    wrong = [outcome for outcome in served if isinstance(outcome, BaseException)]
    row.check(not wrong, f"{phase}: behind the victim {wrong!r}")
    if not waiting:
        row.check(lane.health()["strikes"] == strikes + 1, f"{phase}: strikes {strikes} -> {lane.health()['strikes']}")
    await history.embed(lane)
    row.check(lane.health()["strikes"] == 0, f"{phase}: served work clears the strike")
    row.check(lane.health()["generation"] == generation + 1, f"{phase}: one replacement, not more")
    row.survived += good and not wrong


async def _large(ground: Arena, lane: Any) -> Any:
    from engines.protocol.messages import EmbedBatch, Item, Pooling

    ids = 2_000_000
    call = ground.history.begin(lane.spec.lane_id, (ids,), None)
    payload = bytes(4 * ids)

    def build(req_id: str, ref: str) -> Any:
        items = [Item("0", ids)]
        return EmbedBatch(req_id=req_id, model_ref=ref, pooling=Pooling.MEAN, normalize=False, items=items), payload

    try:
        await lane.submit(build, stage="campaign")
    except SynapseError as exc:
        call.outcomes.append((exc.code, None))
        raise
    call.outcomes.append(("ok", "an answer to half a request"))


@lane_row("R10", "{count} restarts, death to READY", limit=0.25, percentile=99)
async def r10(ground: Arena, count: int) -> None:
    """Death to READY with a scripted engine: p99 under 250 ms."""
    row = ground.row
    lane = ground.lanes({})
    await lane.load()
    raw, spent = [], []
    for _ in range(count):
        pid = ground.spy.pid(lane)
        watch = Stopwatch()
        kill(pid or 0)
        row.injected += 1
        await until(lambda: lane.health()["strikes"] == 1, "the notice")
        await lane.load()
        seconds, waited = watch.read()
        new = ground.spy.pid(lane)
        runs = [int(part) / 1e9 for part in Path(f"/proc/{new}/schedstat").read_text().split()[:2]]
        # The worker's own wait for a CPU is the machine's, not the path's.
        row.took(seconds, waited + runs[1])
        raw.append(seconds)
        spent.append(runs[0])
        await ground.history.generate(lane)
        row.survived += lane.health()["strikes"] == 0 and new != pid
    raw.sort()
    spent.sort()
    row.notes |= {
        "p50_ms": round(sorted(row.times)[len(raw) // 2] * 1000, 1),
        "with_cpu_waits_p50_ms": round(raw[len(raw) // 2] * 1000, 1),
        "with_cpu_waits_worst_ms": round(raw[-1] * 1000, 1),
        "worker_cpu_p50_ms": round(spent[len(spent) // 2] * 1000, 1),
    }


@lane_row("R7", "{count} cancelled callers")
async def r7(ground: Arena, count: int, *, seed: int = 7, lanes: int = 3) -> None:
    """Callers who leave at random times: no strike, no wrong reply afterwards, the same workers."""
    row = ground.row
    script = {"rules": [{"on": "EMBED_BATCH", "first_id": 50, "do": [{"sleep": 0.003}]}]}
    made = [ground.lanes(script, lane_id=f"lane{n}") for n in range(lanes)]
    await asyncio.gather(*(ground.history.embed(lane) for lane in made))
    pids = [ground.spy.pid(lane) for lane in made]
    await asyncio.gather(
        *(_leavers(ground, lane, count // lanes + 1, random.Random(seed + n)) for n, lane in enumerate(made))
    )
    row.check([ground.spy.pid(lane) for lane in made] == pids, "a worker was replaced")
    row.check([lane.health()["strikes"] for lane in made] == [0] * lanes, "a strike was charged")
    row.notes["late_replies"] = sum(lane.counters.abandoned for lane in made)
    # Of a handful on a busy machine each may have left in the queue.
    row.check(row.notes["late_replies"] > 0 or count < 100, "nobody left while his request ran")


async def _leavers(ground: Arena, lane: Any, count: int, rng: random.Random) -> None:
    history, row = ground.history, ground.row
    loop = asyncio.get_running_loop()
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
        outcomes = await asyncio.gather(*batch, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, asyncio.CancelledError | DeadlineExceeded):
                left += 1
                row.injected += 1
                row.survived += 1
            else:
                row.check(not isinstance(outcome, BaseException), f"a caller's outcome is {outcome!r}")
        await stays
