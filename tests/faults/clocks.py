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
from tests.faults.inprocess import SteppedLoop, ThreadProcess, Wire, stepped, threads_for_processes
from tests.faults.ledger import Check
from tests.support.lanes import FAST

CONFIG = dataclasses.replace(FAST, windows=Windows(setup=4.0, control=4.0, ping=4.0, inference=4.0), handshake=4.0)


@dataclasses.dataclass
class Case:
    """One jump of the clock on a lane of its own."""

    ground: Arena
    factory: type[ThreadProcess]
    lane: Any
    check: Check
    go: Path
    running: Path

    def ask(self) -> asyncio.Task[Any]:
        """Send a request."""
        return asyncio.create_task(self.ground.history.embed(self.lane))

    async def hold(self, on: str = "EMBED_BATCH") -> asyncio.Task[Any]:
        """Send a request; it, or its LOAD, runs until the file ``go`` appears."""
        do = [{"touch": str(self.running)}, {"wait_for": str(self.go)}]
        self.factory.script["rules"] = [{"on": on, "nth": 1, "do": do}]
        task = self.ask()
        await until(self.running.exists, "the request")
        return task


@campaign_row("R17", "suspended machine, blocked loop, stepped wall clock", loop=SteppedLoop)
async def r17(ground: Arena, rounds: int = 1) -> None:
    """Jumps of the clock while an exchange runs, while idle, while starting; then real silence is still found."""
    with threads_for_processes({}) as factory:
        for number in range(rounds):
            for name, run in CASES.items():
                factory.script.clear()
                factory.made.clear()
                factory.wrap = Wire
                with ground.row.fault(name) as check:
                    lane = ground.lanes(factory.script, config=CONFIG, lane_id=f"{name}-{number}")
                    files = (ground.file(f"{name}-{number}.{end}") for end in ("go", "running"))
                    await run(Case(ground, factory, lane, check, *files))
                    health = lane.health()["strikes"], lane.health()["generation"]
                    check(health == (int(name == "silence"), 1), f"strikes and generation {health}")
                    await ground.end(lane)


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


def _undisturbed(disturb: Callable[[Path], Any], on: str = "EMBED_BATCH") -> Callable[[Case], Any]:
    """Return the check that what happens while an exchange of a kind runs is not taken for silence."""

    async def run(case: Case) -> None:
        task = await case.hold(on)
        await disturb(case.go)
        case.check(case.go.exists() or not task.done(), "it was taken for silence")
        case.go.touch()
        await task

    return run


async def _handshake(case: Case) -> None:
    """An hour passes between spawn and HELLO: the worker had no time at all meanwhile."""

    class Slow(Wire):
        def send(self, view: memoryview) -> int:
            while not case.go.exists():
                time.sleep(0.001)
            return super().send(view)

    case.factory.wrap = Slow
    task = case.ask()
    await until(lambda: case.factory.made and case.factory.made[-1].wire is not None, "the connection")
    await _suspend(case.go)
    case.check(not task.done(), "a suspend was taken for a silent connector")
    case.go.touch()
    await task


async def _idle(case: Case) -> None:
    """A day passes while nothing is asked."""
    await case.ask()
    await stepped().step(86_400.0)
    await case.ask()


async def _silence(case: Case) -> None:
    """The window passes second by second, also after a suspend: that is silence, and one strike."""
    task = await case.hold()
    await stepped().step(3600.0)
    for _ in range(12):
        await stepped().step(0.5)
        await asyncio.sleep(0.002)
    case.go.touch()
    outcome = await outcome_of(task)
    right = isinstance(outcome, EngineCrashed) and outcome.details["cause"] == "silence"
    case.check(right, f"real silence ends with {outcome!r}")


CASES: dict[str, Callable[[Case], Any]] = {
    "suspend": _undisturbed(_suspend),
    "suspend-load": _undisturbed(_suspend, "LOAD"),
    "suspend-handshake": _handshake,
    "suspend-idle": _idle,
    "blocked": _undisturbed(_block),
    "wall-clock": _undisturbed(_set_wall_clock),
    "silence": _silence,
}
