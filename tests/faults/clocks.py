"""R17: suspends, blocked loops and stepped clocks are nobody's silence."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from synapse_host.config import Windows
from synapse_host.errors import EngineCrashed
from tests.faults.arena import Arena, arena, until
from tests.faults.inprocess import SteppedLoop, ThreadProcess, Wire, threads_for_processes
from tests.faults.ledger import Row
from tests.support.lanes import FAST

Case: TypeAlias = Callable[[Arena, type[ThreadProcess], dict[str, Any], str], Any]
CONFIG = dataclasses.replace(FAST, windows=Windows(setup=4.0, control=4.0, ping=4.0, inference=4.0), handshake=4.0)


def r17(rounds: int = 1) -> Any:
    """Jumps of the clock while an exchange runs, while idle, while starting; then real silence is still found."""
    row = Row("R17", "suspended machine, blocked loop, stepped wall clock")

    async def body() -> None:
        script: dict[str, Any] = {}
        with threads_for_processes(script) as factory:
            async with arena(row) as ground:
                for number in range(rounds):
                    for name, check in CASES.items():
                        script.clear()
                        factory.made.clear()
                        factory.wrap = Wire
                        problems = len(row.problems)
                        row.injected += 1
                        try:
                            await check(ground, factory, script, f"{name}-{number}")
                        except BaseException as exc:
                            row.problems.append(f"{name}: {exc!r}")
                        row.survived += len(row.problems) == problems

    return row, body


def _loop() -> SteppedLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SteppedLoop)
    return loop


async def _holding(ground: Arena, script: dict[str, Any], name: str, *, on: str = "EMBED_BATCH") -> Any:
    """Return a lane with a request that runs until its file appears, the task, and that file."""
    go, running = ground.file(f"{name}.go"), ground.file(f"{name}.running")
    script["rules"] = [{"on": on, "nth": 1, "do": [{"touch": str(running)}, {"wait_for": str(go)}]}]
    lane = ground.lanes(script, config=CONFIG, lane_id=name)
    task = asyncio.create_task(ground.history.embed(lane))
    await until(running.exists, f"{name}: the request")
    return lane, task, go


async def _suspend(go: Path) -> None:
    """An hour passes at once, three times."""
    for _ in range(3):
        await _loop().step(3600.0)
        await asyncio.sleep(0.01)


async def _blocked(go: Path) -> None:
    """The host's loop stands still beyond the window while the reply waits in the socket."""
    go.touch()
    _loop().offset += 10.0
    time.sleep(0.05)


async def _wall_clock(go: Path) -> None:
    """Somebody sets the wall clock, a day back and a year on."""
    real = time.time
    try:
        for step in (-86_400.0, 3.2e7):
            time.time = lambda step=step: real() + step  # type: ignore[misc]
            await _loop().step(0.5)
    finally:
        time.time = real


def _undisturbed(disturb: Callable[[Path], Any], on: str = "EMBED_BATCH") -> Case:
    """Return the check that what happens while an exchange of a kind runs is not taken for silence."""

    async def check(ground: Arena, factory: type[ThreadProcess], script: dict[str, Any], name: str) -> None:
        lane, task, go = await _holding(ground, script, name, on=on)
        await disturb(go)
        ground.row.check(go.exists() or not task.done(), f"{name}: it was taken for silence")
        go.touch()
        await task
        ground.row.check((lane.health()["strikes"], lane.health()["generation"]) == (0, 1), f"{name}: a strike")
        await lane.aclose()

    return check


async def _handshake(ground: Arena, factory: type[ThreadProcess], script: dict[str, Any], name: str) -> None:
    """An hour passes between spawn and HELLO: the worker had no time at all meanwhile."""
    go = ground.file(f"{name}.go")

    class Slow(Wire):
        def send(self, view: memoryview) -> int:
            while not go.exists():
                time.sleep(0.001)
            return super().send(view)

    factory.wrap = Slow
    lane = ground.lanes(script, config=CONFIG, lane_id=name)
    task = asyncio.create_task(ground.history.embed(lane))
    await until(lambda: factory.made and factory.made[-1].wire is not None, f"{name}: the connection")
    await _suspend(go)
    ground.row.check(not task.done(), f"{name}: a suspend was taken for a silent connector")
    go.touch()
    await asyncio.gather(task, return_exceptions=True)
    ground.row.check((lane.health()["strikes"], lane.health()["generation"]) == (0, 1), f"{name}: a strike")
    await lane.aclose()


async def _idle(ground: Arena, factory: type[ThreadProcess], script: dict[str, Any], name: str) -> None:
    """A day passes while nothing is asked."""
    lane = ground.lanes(script, config=CONFIG, lane_id=name)
    await ground.history.embed(lane)
    await _loop().step(86_400.0)
    await ground.history.embed(lane)
    ground.row.check((lane.health()["strikes"], lane.health()["generation"]) == (0, 1), f"{name}: idle is not silence")
    await lane.aclose()


async def _silence(ground: Arena, factory: type[ThreadProcess], script: dict[str, Any], name: str) -> None:
    """The window passes second by second, also after a suspend: that is silence, and one strike."""
    lane, task, go = await _holding(ground, script, name)
    await _loop().step(3600.0)
    for _ in range(12):
        await _loop().step(0.5)
        await asyncio.sleep(0.002)
    go.touch()
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    right = isinstance(outcome, EngineCrashed) and outcome.details["cause"] == "silence"
    ground.row.check(right, f"{name}: real silence ends with {outcome!r}")
    ground.row.check(lane.health()["strikes"] == 1, f"{name}: {lane.health()['strikes']} strikes")
    await lane.aclose()


CASES: dict[str, Case] = {
    "suspend": _undisturbed(_suspend),
    "suspend-load": _undisturbed(_suspend, "LOAD"),
    "suspend-handshake": _handshake,
    "suspend-idle": _idle,
    "blocked": _undisturbed(_blocked),
    "wall-clock": _undisturbed(_wall_clock),
    "silence": _silence,
}
