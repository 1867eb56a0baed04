"""R11 the host's sudden death, R13 its orderly one: a host in a process of its own, seen from outside.

    python -m tests.faults.endings orphans|drain PATH     is that host

It prints JSON lines. ``orphans``: the pids of its workers, then nothing, until it is killed. ``drain``: on SIGTERM it
stops, a second one hurries it, and it prints the outcome of every request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from synapse_host.errors import SynapseError
from synapse_host.supervision.queueing import Permits
from tests.faults.arena import campaign_row, kill
from tests.faults.history import History
from tests.faults.ledger import Row
from tests.support import scripted
from tests.support.lanes import Lanes, alive, lanes_in

ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0


# --- the host --------------------------------------------------------------------------------------------------------


def say(**fields: Any) -> None:
    """Print one JSON line."""
    print(json.dumps(fields), flush=True)


async def appeared(*paths: Path) -> None:
    """Wait until the workers have touched their files."""
    while not all(path.exists() for path in paths):
        await asyncio.sleep(0.002)


async def orphans(lanes: Lanes, root: Path, history: History) -> None:
    """Start one worker of every kind that could outlive its host, and tell their pids."""

    def busy(name: str, action: dict[str, Any]) -> dict[str, Any]:
        return {"rules": [{"on": "EMBED_BATCH", "do": [{"touch": str(root / name)}, action]}]}

    def wrapped(script: dict[str, Any], name: str) -> Any:
        """The worker is the child of a shell which doesn't exec it."""
        shell = f'"$0" "$@" & echo $! > {root / name}; wait $!'
        return lanes({}, lane_id=name, command=("/bin/sh", "-c", shell, *scripted.command(script)))

    made = {
        "idle": lanes({}, lane_id="idle"),
        "ignores SIGTERM": lanes({"ignore": ["SIGTERM", "SIGINT"]}, lane_id="deaf"),
        "behind a wrapper": wrapped({}, "wrapped"),
        "busy in C": lanes(busy("in-c", {"ccall": 600}), lane_id="busy"),
        "spins with the GIL": lanes(busy("spins", {"spin": True}), lane_id="gil"),
        "behind a wrapper, busy in C": wrapped(busy("wrapped-in-c", {"ccall": 600}), "wrapped-busy"),
    }
    await asyncio.gather(*(lane.load() for lane in made.values()))
    tasks = [asyncio.create_task(history.embed(lane)) for lane in list(made.values())[3:]]
    starting = lanes({"start": [{"report": str(root / "starting")}, {"sleep": 600}]}, lane_id="starting")
    tasks.append(asyncio.create_task(starting.load()))
    await appeared(*(root / name for name in ("in-c", "spins", "wrapped-in-c", "starting")))
    pids = {name: lane.health()["worker_pid"] for name, lane in made.items()}
    pids["behind a wrapper: the worker"] = int((root / "wrapped").read_text())
    pids["behind a wrapper, busy in C: the worker"] = int((root / "wrapped-busy").read_text())
    pids["starting, before its HELLO"] = json.loads((root / "starting").read_text())["pid"]
    say(pids=pids)
    await asyncio.sleep(600)


async def drain(lanes: Lanes, root: Path, history: History) -> None:
    """One request runs, others wait; SIGTERM stops, a second one forces."""
    hold = [{"touch": str(root / "running")}, {"wait_for": str(root / "go")}]
    lane = lanes({"rules": [{"on": "EMBED_BATCH", "nth": 1, "do": hold}]})
    await lane.load()
    running = asyncio.create_task(history.embed(lane))
    await appeared(root / "running")
    queued = [asyncio.create_task(history.embed(lane)) for _ in range(5)]
    await asyncio.sleep(0.01)
    times: list[float] = []
    closing: list[asyncio.Task[None]] = []

    def stop() -> None:
        times.append(time.monotonic())
        closing.append(asyncio.create_task(lane.aclose(drain=0.0 if len(times) > 1 else 30.0)))
        say(stopping=len(times))

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    say(pid=lane.health()["worker_pid"])
    outcomes = await asyncio.gather(running, *queued, return_exceptions=True)
    await asyncio.gather(*closing)
    told = [outcome.to_dict()["code"] if isinstance(outcome, SynapseError) else "ok" for outcome in outcomes]
    wrong = len(history.lost()), len(history.mismatched())
    say(outcomes=told, wrong=wrong, took=time.monotonic() - times[-1])


async def host(mode: str, root: Path) -> None:
    """Run one mode."""
    async with lanes_in(root / "rt") as lanes:
        lanes.permits = Permits({"cpu": 16})
        await {"orphans": orphans, "drain": drain}[mode](lanes, root, History())


# --- the rows --------------------------------------------------------------------------------------------------------


class HostProgram:
    """A host in a process and group of its own."""

    def __init__(self, mode: str, root: Path) -> None:
        self.root = root
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.endings", mode, str(root)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def line(self) -> dict[str, Any]:
        """Return the next line it says."""
        assert self.process.stdout is not None and self.process.stderr is not None
        text = self.process.stdout.readline()
        assert text, f"the host program ended with {self.process.wait()}: {self.process.stderr.read()}"
        return dict(json.loads(text))


@contextlib.contextmanager
def host_program(mode: str) -> Iterator[HostProgram]:
    """Run a host program; whatever it leaves is killed."""
    with tempfile.TemporaryDirectory(prefix="syn-h-", ignore_cleanup_errors=True) as root:
        program = HostProgram(mode, Path(root))
        try:
            yield program
        finally:
            program.process.kill()
            program.process.communicate()


@campaign_row("R11", "{count} SIGKILLed hosts", limit=1.0)
def r11(row: Row, count: int) -> None:
    """SIGKILL of the host: every worker is gone within a second, also one in a C call and one behind a wrapper."""
    for _ in range(count):
        with host_program("orphans") as program, row.fault("SIGKILL of the host") as check:
            left = program.line()["pids"]
            check(len(left) >= 9, "not every kind of worker was there")
            start = time.monotonic()
            program.process.kill()
            while left and time.monotonic() - start < 3:
                left = {name: pid for name, pid in left.items() if alive(pid)}
                time.sleep(0.002)
            row.took(time.monotonic() - start)
            check(not left, f"workers outlive their host: {sorted(left)}")
            row.leaked += len(left)
            for pid in left.values():
                kill(pid)


@campaign_row("R13", "{count} SIGTERM drains, half of them forced", limit=3.0)
def r13(row: Row, count: int) -> None:
    """SIGTERM: the running request is answered, queued ones are typed, exit 0; a second SIGTERM forces."""
    for n in range(count):
        forced = n % 2 == 1
        with host_program("drain") as program, row.fault("a forced drain" if forced else "a drain") as check:
            worker = program.line()["pid"]
            program.process.send_signal(signal.SIGTERM)
            check(program.line() == {"stopping": 1}, "the first SIGTERM")
            if forced:
                program.process.send_signal(signal.SIGTERM)
                check(program.line() == {"stopping": 2}, "the second SIGTERM")
            else:
                time.sleep(0.05)
                check(program.process.poll() is None, "it did not wait for the running request")
                (program.root / "go").touch()
            told = program.line()
            expected = ["engine_crashed" if forced else "ok", *["queue_full"] * 5]
            check(told["outcomes"] == expected, f"the requests end with {told['outcomes']}")
            check(told["wrong"] == [0, 0], f"{told['wrong']} requests lost and mismatched")
            row.took(told["took"])
            status = program.process.wait(LIMIT_S)
            check(status == 0, f"exit status {status}")
            check(not alive(worker), "the worker lives on")


if __name__ == "__main__":
    asyncio.run(host(sys.argv[1], Path(sys.argv[2])))
