"""What a row of the campaign found: counts, times against their limits, the table and the JSON document.

Two kinds of trouble are kept apart. ``problems`` are wrong outcomes (a lost request, another's answer, a wrong strike
count) and make a row fail everywhere. ``slow`` is a time beyond its limit: the campaign fails on it, ``make test``,
which runs a slice of every row, doesn't look.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

COLUMNS = ("injected", "survived", "lost", "mismatched", "leaked")
Check = Callable[[object, str], None]


@dataclass
class Row:
    """One requirement of the campaign. Times in seconds."""

    id: str
    what: str
    injected: int = 0
    """Faults injected (or operations done, where the row injects none)."""
    survived: int = 0
    """Of these: how many the host came out of as it must, ready for the next request."""
    lost: int = 0
    """Requests without exactly one outcome."""
    mismatched: int = 0
    """Replies whose content isn't a function of their own request."""
    leaked: int = 0
    """Descriptors, threads, children and socket files left behind."""
    times: list[float] = field(default_factory=list)
    """From each fault to its typed answer. Of one beyond the limit this process's wait for a CPU is taken off."""
    waited: float = 0.0
    """The longest wait that was taken off one of the times: above 0 the machine was busy with other things."""
    limit: float | None = None
    median_limit: float | None = None
    percentile: float = 100.0
    """Which percentile of the times the limit is for."""
    problems: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def check(self, condition: object, problem: str) -> None:
        """Note *problem* unless *condition* holds."""
        if not condition:
            self.problems.append(problem)

    @contextlib.contextmanager
    def fault(self, name: str) -> Iterator[Check]:
        """Count one fault, survived if every check in the block held; yields :meth:`check` with *name* before it."""
        self.injected += 1
        survived = True

        def check(condition: object, problem: str) -> None:
            nonlocal survived
            survived = survived and bool(condition)
            self.check(condition, f"{name}: {problem}")

        try:
            yield check
        except BaseException as exc:
            exc.add_note(name)
            raise
        self.survived += survived

    def took(self, seconds: float, waited: float = 0.0) -> None:
        """Record one time; *waited*: the part of it in which this process was runnable, but had no CPU."""
        if self.limit is not None and seconds > self.limit:
            self.waited = max(self.waited, min(seconds, waited))
            seconds = max(0.0, seconds - waited)
        self.times.append(seconds)

    @property
    def worst(self) -> float | None:
        """The time the limit is for."""
        if not self.times:
            return None
        ordered = sorted(self.times)
        return ordered[min(len(ordered) - 1, int(len(ordered) * self.percentile / 100))]

    @property
    def median(self) -> float | None:
        """The middle of the times."""
        return statistics.median(self.times) if self.times else None

    def settle(self) -> None:
        """Compare counts and times with what is allowed; call once, at the end."""
        self.check(self.injected > 0, "nothing was injected")
        self.check(self.survived == self.injected, f"{self.injected - self.survived} faults not survived")
        for name in ("lost", "mismatched", "leaked"):
            self.check(getattr(self, name) == 0, f"{name}: {getattr(self, name)}")
        limits = {"worst": (self.worst, self.limit), "median": (self.median, self.median_limit)}
        for name, (seconds, limit) in limits.items():
            if seconds is not None and limit is not None and seconds > limit:
                self.slow.append(f"{name} {seconds * 1000:.1f} ms, limit {limit * 1000:.0f} ms")

    @property
    def passed(self) -> bool:
        """True when outcomes and times are right."""
        return not self.problems and not self.slow

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict; of the times only their number, the median and the one the limit is for."""
        told = {"passed": self.passed, "times": len(self.times), "problems": self.problems[:20]}
        return asdict(self) | told | {"worst_ms": _ms(self.worst), "median_ms": _ms(self.median)}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)


class Stopwatch:
    """A time together with this thread's wait for a CPU in it."""

    def __init__(self) -> None:
        self._waited = self._cpu_wait()
        self.start = time.monotonic()

    def read(self) -> tuple[float, float]:
        """Return (seconds since the start, seconds of these without a CPU)."""
        return time.monotonic() - self.start, self._cpu_wait() - self._waited

    def _cpu_wait(self) -> float:
        """Return the seconds this thread has been runnable without a CPU; 0.0 where the kernel doesn't tell."""
        try:
            return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text, and below them what is wrong."""
    made = Table("id", *COLUMNS, "worst ms", "limit", "took s", "result", "what", box=None)
    for row in rows:
        counts = [getattr(row, name) for name in COLUMNS]
        times = [_ms(row.worst), _ms(row.limit), round(row.seconds, 1)]
        cells = ["-" if value is None else str(value) for value in (row.id, *counts, *times)]
        made.add_row(*cells, "pass" if row.passed else "FAIL", row.what)
    page = Console(file=io.StringIO(), width=200)
    page.print(made)
    for row in rows:
        for problem in [*row.problems[:10], *row.slow]:
            page.print(f"{row.id}: {problem}", markup=False, soft_wrap=True)
    return page.file.getvalue().rstrip()


def write(rows: Sequence[Row], path: Path, *, size: str) -> None:
    """Write the JSON report."""
    document = {
        "size": size,
        "passed": all(row.passed for row in rows),
        "seconds": round(sum(row.seconds for row in rows), 1),
        "cores": os.cpu_count(),
        "rows": [row.to_dict() for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
