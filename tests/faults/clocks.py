"""R17: suspends, blocked loops and stepped clocks are nobody's silence."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

from synapse_host.config import Windows
from synapse_host.errors import EngineCrashed
from tests.faults.arena import Arena, arena, until
from tests.faults.inprocess import SteppedLoop, ThreadProcess, Wire, threads_for_processes
from tests.faults.ledger import Row
from tests.support.lanes import FAST

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


async def _suspend(ground: Arena, factory: type[ThreadProcess], script: dict[str, Any], name: str) -> None:
    """An hour passes at once in the middle of an exchange."""
    lane, task, go = await _holding(ground, script, name)
    for _ in range(3):
        await _loop().step(3600.0)
        await asyncio.sleep(0.01)
    ground.row.check(lane.health()["strikes"] == 0 and not task.done(), f"{name}: a suspend was taken for silence")
    go.touch()
    await task
    ground.row.check(lane.health()["generation"] == 1, f"{name}: the worker was replaced")
    await lane.aclose()


async def _suspend_in_load(ground: Arena, factory: type[ThreadProcess], script: dict[str, Any], name: str) -> None:
    """An hour passes during LOAD."""
    lane, task, go = await _holding(ground, script, name, on="LOAD")
    await _loop().step(3600.0)
    await asyncio.sleep(0.01)
    ground.row.check(not task.done(), f"{name}: a suspend was taken for silence")
    go.touch()
    await task
    ground.row.check(lane.health()["generation"] == 1, f"{name}: the worker was replaced")
    await lane.aclose()


async def _suspend_in_handshake(ground: Arena, factory: type[ThreadProcess], script: dict[str, Any], name: str) -> None:
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
    await asyncio.sleep(0.01)
    await _loop().step(3600.0)
    await asyncio.sleep(0.01)
    ground.row.check(not task.done(), f"{name}: a suspend was taken for a silent connector")
    go.touch()
    await asyncio.gather(task, return_exceptions=True)
    ground.row.check(lane.health()["strikes"] == 0 and lane.health()["generation"] == 1, f"{name}: a strike")
    await lane.aclose()


async def _suspend_while_idle(ground: Arena, factory: type[ThreadProcess], script: dict[str, Any], name: str) -> None:
    """A day passes while nothing is asked."""
    lane = ground.lanes(script, config=CONFIG, lane_id=name)
    await ground.history.embed(lane)
    await _loop().step(86_400.0)
    await ground.history.embed(lane)
    ground.row.check(lane.health()["generation"] == 1 and lane.health()["strikes"] == 0, f"{name}: idle is not silence")
    await lane.aclose()


async def _blocked(ground: Arena, factory: type[ThreadProcess], script: dict[str, Any], name: str) -> None:
    """The host's loop stands still beyond the window while the reply waits in the socket."""
    lane, task, go = await _holding(ground, script, name)
    go.touch()
    _loop().offset += 10.0
    time.sleep(0.05)
    await task
    ground.row.check(lane.health()["strikes"] == 0, f"{name}: a blocked loop was taken for silence")
    await lane.aclose()


async def _wall_clock(ground: Arena, factory: type[ThreadProcess], script: dict[str, Any], name: str) -> None:
    """Somebody sets the wall clock, a day back and a year on."""
    lane, task, go = await _holding(ground, script, name)
    real = time.time
    try:
        for step in (-86_400.0, 3.2e7):
            time.time = lambda step=step: real() + step  # type: ignore[misc]
            await _loop().step(0.5)
        ground.row.check(not task.done(), f"{name}: the wall clock decided")
        go.touch()
        await task
    finally:
        time.time = real
    ground.row.check(lane.health()["strikes"] == 0, f"{name}: a strike")
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


CASES = {
    "suspend": _suspend,
    "suspend-load": _suspend_in_load,
    "suspend-handshake": _suspend_in_handshake,
    "suspend-idle": _suspend_while_idle,
    "blocked": _blocked,
    "wall-clock": _wall_clock,
    "silence": _silence,
}
