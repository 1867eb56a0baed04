"""R17: suspends, blocked loops and stepped clocks are nobody's silence."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from synapse_host.config import Windows
from synapse_host.errors import EngineCrashed
from tests.faults.arena import Arena, campaign_row, outcome_of, until
from tests.faults.inprocess import SteppedLoop, stepped
from tests.support.lanes import FAST

CONFIG = dataclasses.replace(FAST, windows=Windows(setup=4.0, control=4.0, ping=4.0, inference=4.0), handshake=4.0)


async def _suspend(go: Path) -> None:
    """An hour passes at once, three times."""
    for _ in range(3):
        await stepped().step(3600.0)
        await asyncio.sleep(0.01)


async def _block(go: Path) -> None:
    """The host's loop stands still beyond the window while the reply waits in the socket."""
    go.touch()
    stepped().offset += 10.0
    time.sleep(0.05)


async def _set_wall_clock(go: Path) -> None:
    """Somebody sets the wall clock, a day back and a year on."""
    real = time.time
    for step in (-86_400.0, 3.2e7):
        with mock.patch.object(time, "time", lambda step=step: real() + step):
            await stepped().step(0.5)


async def _wait(go: Path) -> None:
    """The window passes second by second, also after a suspend."""
    await stepped().step(3600.0)
    for _ in range(12):
        await stepped().step(0.5)
        await asyncio.sleep(0.002)


SILENCE = "silence"
CASES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "suspend": ("EMBED_BATCH", _suspend),
    "suspend-load": ("LOAD", _suspend),
    "suspend-handshake": ("start", _suspend),
    "suspend-idle": ("idle", _suspend),
    "blocked": ("EMBED_BATCH", _block),
    "wall-clock": ("EMBED_BATCH", _set_wall_clock),
    SILENCE: ("EMBED_BATCH", _wait),
}
"""What the worker is at, until the file *go* appears, and what happens meanwhile. The last is one strike."""


@campaign_row("R17", "suspended machine, blocked loop, stepped wall clock", loop=SteppedLoop)
async def r17(ground: Arena, rounds: int = 1) -> None:
    """Jumps of the clock while an exchange runs, while idle, while starting; then real silence is still found."""
    for number in range(rounds):
        for name, (at, happen) in CASES.items():
            go, running = ground.file(f"{name}-{number}.go"), ground.file(f"{name}-{number}.running")
            hold = [{"touch": str(running)}, {"wait_for": str(go)}]
            script = {"start": hold} if at == "start" else {"rules": [{"on": at, "nth": 1, "do": hold}]}
            lane = ground.lanes(script, config=CONFIG, lane_id=f"{name}-{number}")
            with ground.row.fault(name) as check:
                request = asyncio.create_task(ground.history.embed(lane))
                if at == "idle":
                    await request
                    await happen(go)
                    request = asyncio.create_task(ground.history.embed(lane))
                else:
                    await until(running.exists, "the request")
                    await happen(go)
                    check(name == SILENCE or go.exists() or not request.done(), "it was taken for silence")
                go.touch()
                outcome = await outcome_of(request)
                cause = outcome.details["cause"] if isinstance(outcome, EngineCrashed) else None
                check(cause == (SILENCE if name == SILENCE else None), f"it ends with {outcome!r}")
                health = lane.health()["strikes"], lane.health()["generation"]
                check(health == (int(name == SILENCE), 1), f"strikes and generation {health}")
            await ground.end(lane)
