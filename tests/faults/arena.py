"""Where the rows run: lanes in a private directory, an eye on spawns and verdicts, and on everything left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import logging
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

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

    def pid(self, lane: Supervisor) -> int | None:
        """Return the pid of the lane's newest worker, also before its HELLO."""
        process = self.process(lane)
        return None if process is None else process.pid

    def process(self, lane: Supervisor) -> Any:
        """Return the lane's newest worker process."""
        return self.processes.get(f"{lane.spec.lane_id}-{lane.health()['generation']}")

    def verdict(self, lane: Supervisor, generation: int) -> tuple[float, str] | None:
        """Return when and for what a worker generation was given up."""
        return self.verdicts.get(f"{lane.spec.lane_id}-{generation}")

    @contextlib.contextmanager
    def watching(self) -> Iterator[Spy]:
        """Put the eye on the births and deaths of workers."""
        spy = self
        process_class, fail = birth_module.WorkerProcess, Session._fail

        class Spied(process_class):  # type: ignore[misc, valid-type]
            def __init__(self, command: Any, *, env: Any, **rest: Any) -> None:
                super().__init__(command, env=env, **rest)
                spy.processes[env["SYNAPSE_WORKER_ID"]] = self

        def noted(self: Session, cause: Any, message: str) -> None:
            if not self.dead and self._birth.over:
                spy.verdicts.setdefault(self.worker_id, (time.monotonic(), cause))
            fail(self, cause, message)

        birth_module.WorkerProcess = Spied  # type: ignore[misc]
        Session._fail = noted  # type: ignore[method-assign]
        try:
            yield self
        finally:
            birth_module.WorkerProcess = process_class  # type: ignore[misc]
            Session._fail = fail  # type: ignore[method-assign]


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
        row.lost += len(made.history.lost())
        row.mismatched += len(made.history.mismatched())
        if made.history.calls:
            row.notes["outcomes"] = made.history.counts()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        row.check(not others, f"tasks left behind: {others}")
        row.check(not uncaught, f"uncaught: {uncaught}")
    finally:
        shutil.rmtree(root, ignore_errors=True)


def lane_row(id: str, what: str, **limits: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a coroutine function over an :class:`Arena` a row of the campaign; *what* may name its options."""

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        def make(**options: Any) -> tuple[Row, Callable[[], Any]]:
            bound = inspect.signature(body).bind(None, **options)
            bound.apply_defaults()
            row = Row(id, what.format(**bound.arguments), **limits)

            async def work() -> None:
                async with arena(row) as ground:
                    await body(ground, **options)

            return row, work

        return make

    return decorate


def run(
    row: Row, body: Callable[[], Any], *, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
) -> Row:
    """Run one row: *body* returns a coroutine, or None when it did its work itself. Counts leaks; never raises."""
    log = logging.getLogger("synapse_host")
    level = log.level
    log.setLevel(logging.CRITICAL)  # a campaign kills thousands of workers
    gc.collect()
    before = (descriptors(), set(threading.enumerate()), children())
    start = time.monotonic()
    try:
        work = body()
        if work is not None:
            with asyncio.Runner(loop_factory=loop_factory) as runner:
                runner.run(work)
    except BaseException as exc:
        if isinstance(exc, KeyboardInterrupt):
            raise
        import traceback

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
    return row


async def until(condition: Callable[[], Any], what: str = "the condition", limit: float = LIMIT_S) -> Any:
    """Wait for *condition* and return its value."""
    deadline = time.monotonic() + limit
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come true within {limit:g} s")
        await asyncio.sleep(0.001)
    return value


async def appeared(path: Path) -> None:
    """Wait for a worker's signal and take it away."""
    await until(path.exists, f"{path.name}")
    path.unlink()


def kill(pid: int, signum: int = signal.SIGKILL) -> None:
    """Send a signal to a process of ours; it may have gone already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)
