"""R5 with real processes: the same plans, carried out by the worker itself."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from synapse_host.config import Windows
from synapse_host.errors import LaneRefused
from tests.faults.arena import Arena, alive, arena, until
from tests.faults.ledger import Row
from tests.faults.mutations import FRAMES, KILL_S, SCRIPT, TRIES, _typed
from tests.faults.spoil import Plan, draw
from tests.support.lanes import FAST

PROGRAM = Path(__file__).with_name("spoiled_worker.py")
PATIENCE = dataclasses.replace(
    FAST, windows=Windows(setup=2.0, control=2.0, ping=2.0, inference=2.0), handshake=5.0, shutdown_grace=0.5
)


async def real_sessions(row: Row, count: int, seed: int, outcomes: Counter[str], *, lanes: int = 4) -> None:
    """Spoil *count* sessions of real processes."""
    rng = random.Random(-seed)
    plans = iter([draw(rng, frames=FRAMES) for _ in range(count)])
    async with arena(row) as ground:
        await asyncio.gather(*(_lane(ground, plans, n, outcomes) for n in range(lanes)))


async def _lane(ground: Arena, plans: Any, number: int, outcomes: Counter[str]) -> None:
    for turn, plan in enumerate(plans):
        late = await _session(ground, plan, f"real{number}-{turn}", outcomes)
        for again in range(TRIES):
            if late is None or late <= KILL_S:
                break
            # What is slow by itself is slow again; a busy machine is not.
            repeated = await _session(ground, plan, f"real{number}-{turn}-{again}", outcomes)
            ground.row.notes["times_measured_again"] = ground.row.notes.get("times_measured_again", 0) + 1
            late = min(late, repeated or late)
        if late is not None:
            if late > KILL_S:
                ground.row.notes.setdefault("slow", []).append(plan.to_dict())
            ground.row.took(late)


async def _session(ground: Arena, plan: Plan, name: str, outcomes: Counter[str]) -> float | None:
    row, history = ground.row, ground.history
    struck = ground.file(f"{name}.struck")
    script: dict[str, Any] = {
        **SCRIPT,
        "state": str(ground.file(f"{name}.state")),
        "struck": str(struck),
        "generations": [{"plan": plan.to_dict()}, {"plan": None}],
    }
    command = (sys.executable, str(PROGRAM), json.dumps(script))
    lane = ground.lanes({}, config=PATIENCE, lane_id=name, command=command)
    told, findings = [], []
    for ask in (history.embed, history.generate, history.rerank):
        before = len(history.calls)
        was_struck = struck.exists()
        (outcome,) = await asyncio.gather(ask(lane), return_exceptions=True)
        call = next(call for call in history.calls[before:] if call.lane == name)
        if isinstance(outcome, BaseException):
            told.append(_typed(outcome))
            if told[-1].startswith("untyped"):
                findings.append(told[-1])
        else:
            told.append("ok")
            if call.outcomes != [("ok", call.expected)] and was_struck:
                findings.append(f"another's answer: {call.outcomes}")
            call.expected = call.outcomes[0][1]
        if isinstance(outcome, LaneRefused):
            break
        if lane.health()["strikes"] > 1:
            findings.append(f"{lane.health()['strikes']} strikes after {told}")
    late: float | None = None
    first = ground.spy.processes.get(f"{name}-1")
    verdict = ground.spy.verdict(lane, 1)
    # What the host sends is spoiled behind its back: the worker may finish its work before it reads the rest.
    if verdict is not None and verdict[1] != "silence" and plan.sender == "worker":
        if struck.exists():
            late = verdict[0] - float(struck.read_text())
        if first is not None:
            # The verdict may have come this very moment, on an idle worker.
            await until(lambda: not alive(first.pid), "the end of the spoiled worker", 5)
    await lane.aclose()
    ground.lanes.made.remove(lane)
    row.injected += 1
    row.survived += not findings
    row.problems += [f"process, {plan.to_dict()}: {finding}" for finding in findings]
    outcomes["process: " + ", ".join(told)] += 1
    return late
