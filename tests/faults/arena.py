"""Where the rows run: lanes in a private directory, an eye on spawns and verdicts, and on everything left behind."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import logging
import os
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from synapse_host.supervision.supervisor import Supervisor
from synapse_host.worker import startup as birth_module
from synapse_host.worker.session import Session
from tests.conftest import SETTLE_S, children, descriptors, leaked
from tests.faults.history import History
from tests.faults.ledger import Row
from tests.support.lanes import Lanes, lanes_in

LIMIT_S = 60.0
"""No single step of a row may take longer: a hang is a finding, not a wait."""


class Spy:
    """Notes every spawn and every verdict on a worker while it is in force."""

    def __init__(self) -> None:
        self.processes: dict[str, Any] = {}
        """The latest process of each worker_id."""
        self.verdicts: dict[str, tuple[float, str]] = {}
        """worker_id -> (time.monotonic() of the first fault seen, its cause)."""

    def process(self, lane: Supervisor) -> Any:
        """Return the lane's newest worker process, also before its HELLO."""
        return self.processes[f"{lane.spec.lane_id}-{lane.health()['generation']}"]

    def verdict(self, lane: Supervisor, generation: int) -> tuple[float, str]:
        """Return when and for what a worker generation was given up."""
        return self.verdicts[f"{lane.spec.lane_id}-{generation}"]

    def forget(self) -> None:
        """Let go of what was noted: a process keeps its session alive, with its buffers."""
        self.processes.clear()
        self.verdicts.clear()

    @contextlib.contextmanager
    def watching(self) -> Iterator[Spy]:
        """Put the eye on the births and deaths of workers."""
        spy, fail = self, Session._fail

        class Spied(birth_module.WorkerProcess):
            def __init__(self, command: Any, *, env: Any, **rest: Any) -> None:
                super().__init__(command, env=env, **rest)
                spy.processes[env["SYNAPSE_WORKER_ID"]] = self

        def noted(self: Session, cause: Any, message: str) -> None:
            if not self.dead and self._birth.over:
                spy.verdicts.setdefault(self.worker_id, (time.monotonic(), cause))
            fail(self, cause, message)

        with mock.patch.object(birth_module, "WorkerProcess", Spied), mock.patch.object(Session, "_fail", noted):
            yield self


class Arena:
    """What a row works with."""

    def __init__(self, row: Row, lanes: Lanes, root: Path, spy: Spy) -> None:
        self.row = row
        self.lanes = lanes
        self.root = root
        self.spy = spy
        self.history = History()

    def file(self, name: str) -> Path:
        """Return a path for a worker's signals."""
        return self.root / name

    def check_history(self) -> None:
        """Judge the requests so far, all of them over, and forget them: an endless history would be a leak."""
        self.row.lost += len(self.history.lost())
        self.row.mismatched += len(self.history.mismatched())
        self.history.calls.clear()
        self.spy.forget()

    async def end(self, lane: Supervisor) -> None:
        """Close a lane before the row ends."""
        await lane.aclose()
        self.lanes.made.remove(lane)


@contextlib.asynccontextmanager
async def arena(row: Row) -> AsyncIterator[Arena]:
    """Give lanes to a row; at the end judge the history and what the loop never heard about."""
    root = Path(tempfile.mkdtemp(prefix="syn-f-"))
    uncaught: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: uncaught.append(str(context)[:300]))
    try:
        with Spy().watching() as spy:
            async with lanes_in(root / "rt") as lanes:
                made = Arena(row, lanes, root, spy)
                yield made
        if made.history.calls:
            row.notes["outcomes"] = made.history.counts()
        made.check_history()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        row.check(not others, f"tasks left behind: {others}")
        row.check(not uncaught, f"uncaught: {uncaught}")
    finally:
        shutil.rmtree(root, ignore_errors=True)


def campaign_row(
    id: str, what: str, *, loop: Callable[[], asyncio.AbstractEventLoop] | None = None, **limits: Any
) -> Callable[[Callable[..., Any]], Callable[..., Row]]:
    """Make a function a row of the campaign: called with its options it runs and returns what it found.

    A coroutine function gets an :class:`Arena`, any other the :class:`Row`. *what* may name the options.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., Row]:
        @functools.wraps(body)
        def made(**options: Any) -> Row:
            bound = inspect.signature(body).bind(None, **options)
            bound.apply_defaults()
            row = Row(id, what.format(**bound.arguments), **limits)

            async def on_lanes() -> None:
                async with arena(row) as ground:
                    await body(ground, **options)

            with counted(row):
                if inspect.iscoroutinefunction(body):
                    with asyncio.Runner(loop_factory=loop) as runner:
                        runner.run(on_lanes())
                else:
                    body(row, **options)
            return row

        return made

    return decorate


@contextlib.contextmanager
def counted(row: Row) -> Iterator[None]:
    """Enter what the block raises, its time and its leaks into *row*, and settle it."""
    log = logging.getLogger("synapse_host")
    level = log.level
    log.setLevel(logging.CRITICAL)  # a campaign kills thousands of workers
    gc.collect()
    before = (descriptors(), set(threading.enumerate()), children())
    start = time.monotonic()
    try:
        yield
    except (Exception, asyncio.CancelledError) as exc:
        row.problems.append("".join(traceback.format_exception(exc))[-3000:])
    finally:
        log.setLevel(level)
    row.seconds = time.monotonic() - start
    deadline = time.monotonic() + SETTLE_S
    gc.collect()
    while (left := leaked(before)) and time.monotonic() < deadline:
        time.sleep(0.02)
    row.leaked += sum(len(found) for found in left.values())
    if left:
        row.notes["leaks"] = str(left)[:500]
    row.settle()


async def until(condition: Callable[[], Any], what: str, limit: float = LIMIT_S) -> Any:
    """Wait for *condition* and return its value."""
    deadline = time.monotonic() + limit
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come true within {limit:g} s")
        await asyncio.sleep(0.001)
    return value


async def appeared(path: Path) -> None:
    """Wait for a worker's signal and take it away."""
    await until(path.exists, path.name)
    path.unlink()


async def outcome_of(request: Any) -> Any:
    """Return what a request returned or raised."""
    (outcome,) = await asyncio.gather(request, return_exceptions=True)
    return outcome


def kill(pid: int, signum: int = signal.SIGKILL) -> None:
    """Send a signal to a process of ours; it may have gone already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)
