"""A small host of its own process, for what can only be seen from outside: R11 its death, R13 its SIGTERM.

    python -m tests.faults.host_program MODE PATH

Prints JSON lines. ``orphans``: the pids of its workers, then nothing, until it is killed. ``drain``: on SIGTERM it
stops, a second one hurries it, and it prints the outcome of every request.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from synapse_host.errors import SynapseError
from synapse_host.supervision.queueing import Permits
from tests.faults.history import History
from tests.support import scripted
from tests.support.lanes import Lanes, lanes_in

BUSY, GIL, LONG = 50, 51, 52


def say(**fields: Any) -> None:
    """Print one JSON line."""
    print(json.dumps(fields), flush=True)


def wrapper(script: dict[str, Any], pid_file: Path) -> tuple[str, ...]:
    """Return a command that runs the worker as a child of a shell which doesn't exec it."""
    python, path, text = scripted.command(script)
    return ("/bin/sh", "-c", f'"$0" "$@" & echo $! > {pid_file}; wait $!', python, path, text)


async def orphans(lanes: Lanes, root: Path, history: History) -> None:
    """Start one worker of every kind that could outlive its host, and tell their pids."""
    rules = [{"first_id": BUSY, "do": [{"touch": str(root / "busy")}, {"ccall": 600}]}]
    spin = [{"first_id": GIL, "do": [{"touch": str(root / "gil")}, {"spin": True}]}]
    wrapped, wrapped_busy = root / "wrapped.pid", root / "wrapped-busy.pid"
    made = {
        "idle": lanes({}, lane_id="idle"),
        "busy in C": lanes({"rules": rules}, lane_id="busy"),
        "spins with the GIL": lanes({"rules": spin}, lane_id="gil"),
        "ignores SIGTERM": lanes({"ignore": ["SIGTERM", "SIGINT"]}, lane_id="deaf"),
        "behind a wrapper": lanes({}, lane_id="wrapped", command=wrapper({}, wrapped)),
        "behind a wrapper, busy in C": lanes(
            {},
            lane_id="wrapped-busy",
            command=wrapper(
                {"rules": [{**rules[0], "do": [{"touch": str(root / "wbusy")}, {"ccall": 600}]}]}, wrapped_busy
            ),
        ),
    }
    await asyncio.gather(*(lane.load() for lane in made.values()))
    tasks = [
        asyncio.create_task(history.embed(made[name], first))
        for name, first in (("busy in C", BUSY), ("spins with the GIL", GIL), ("behind a wrapper, busy in C", BUSY))
    ]
    starting = lanes({"start": [{"report": str(root / "starting")}, {"sleep": 600}]}, lane_id="starting")
    tasks.append(asyncio.create_task(starting.load()))
    while not all((root / name).exists() for name in ("busy", "gil", "wbusy", "starting")):
        await asyncio.sleep(0.005)
    pids = {name: lane.health()["worker_pid"] for name, lane in made.items()}
    pids["behind a wrapper: the worker"] = int(wrapped.read_text())
    pids["behind a wrapper, busy in C: the worker"] = int(wrapped_busy.read_text())
    pids["starting, before its HELLO"] = json.loads((root / "starting").read_text())["pid"]
    say(pids=pids)
    await asyncio.sleep(600)


async def drain(lanes: Lanes, root: Path, history: History) -> None:
    """One request runs, others wait; SIGTERM stops, a second one forces."""
    hold = [{"touch": str(root / "running")}, {"wait_for": str(root / "go")}]
    lane = lanes({"rules": [{"first_id": LONG, "do": hold}]})
    loop = asyncio.get_running_loop()
    await lane.load()
    running = asyncio.create_task(history.embed(lane, LONG))
    while not (root / "running").exists():
        await asyncio.sleep(0.002)
    queued = [asyncio.create_task(history.embed(lane)) for _ in range(5)]
    await asyncio.sleep(0.01)
    stopped = asyncio.Event()
    times: list[float] = []
    closing: list[asyncio.Task[None]] = []

    def stop() -> None:
        times.append(time.monotonic())
        closing.append(asyncio.create_task(lane.aclose(drain=0.0 if len(times) > 1 else 30.0)))
        say(stopping=len(times))
        stopped.set()

    loop.add_signal_handler(signal.SIGTERM, stop)
    say(ready=True, pid=lane.health()["worker_pid"])
    await stopped.wait()
    outcomes = await asyncio.gather(running, *queued, return_exceptions=True)
    await closing[0]
    await asyncio.gather(*closing)
    took = time.monotonic() - times[-1]
    told = [outcome.to_dict() if isinstance(outcome, SynapseError) else "ok" for outcome in outcomes]
    say(outcomes=told, lost=len(history.lost()), mismatched=len(history.mismatched()), took=took)


async def main(mode: str, root: Path) -> None:
    """Run one mode."""
    async with lanes_in(root / "rt") as lanes:
        lanes.permits = Permits({"cpu": 16})
        await {"orphans": orphans, "drain": drain}[mode](lanes, root, History())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
