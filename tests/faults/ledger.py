"""What a row of the campaign found: counts, times against their limits, the table and the JSON document.

Two kinds of trouble are kept apart. ``problems`` are wrong outcomes (a lost request, another's answer, a wrong strike
count) and make a row fail everywhere. ``slow`` is a time beyond its limit: the campaign fails on it, ``make test``,
which runs a slice of every row, doesn't look.
"""

from __future__ import annotations

import io
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

COLUMNS = ("injected", "survived", "lost", "mismatched", "leaked")


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

    def settle(self) -> None:
        """Compare counts and times with what is allowed; call once, at the end."""
        self.check(self.injected > 0, "nothing was injected")
        self.check(self.survived == self.injected, f"{self.injected - self.survived} faults not survived")
        for name in ("lost", "mismatched", "leaked"):
            self.check(getattr(self, name) == 0, f"{name}: {getattr(self, name)}")
        if self.limit is not None and self.worst is not None and self.worst > self.limit:
            over = sum(value > self.limit for value in self.times)
            self.slow.append(f"{self.worst * 1000:.0f} ms, limit {self.limit * 1000:.0f} ms ({over} over)")
        if self.median_limit is not None and self.times and statistics.median(self.times) > self.median_limit:
            middle = statistics.median(self.times)
            self.slow.append(f"median {middle * 1000:.1f} ms, limit {self.median_limit * 1000:.0f} ms")

    @property
    def passed(self) -> bool:
        """True when outcomes and times are right."""
        return not self.problems and not self.slow

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict; of the times only their number, the median and the one the limit is for."""
        counted = asdict(self) | {"passed": self.passed, "times": len(self.times), "problems": self.problems[:20]}
        counted["worst_ms"] = None if self.worst is None else round(self.worst * 1000, 2)
        counted["median_ms"] = round(statistics.median(self.times) * 1000, 2) if self.times else None
        return counted


def cpu_wait() -> float:
    """Return the seconds this thread has been runnable without a CPU so far; 0.0 where the kernel doesn't tell."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


class Stopwatch:
    """A time together with this thread's wait for a CPU in it."""

    def __init__(self) -> None:
        self._wait = cpu_wait()
        self.start = time.monotonic()

    def read(self) -> tuple[float, float]:
        """Return (seconds since the start, seconds of these without a CPU)."""
        return time.monotonic() - self.start, cpu_wait() - self._wait


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text, and below them what is wrong."""
    made = Table("id", *COLUMNS, "worst ms", "limit", "took s", "result", "what", box=None)
    for row in rows:
        worst = "-" if row.worst is None else f"{row.worst * 1000:.1f}"
        limit = "-" if row.limit is None else f"{row.limit * 1000:.0f}"
        counts = [str(getattr(row, name)) for name in COLUMNS]
        made.add_row(row.id, *counts, worst, limit, f"{row.seconds:.1f}", "pass" if row.passed else "FAIL", row.what)
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
        "load_average": [round(value, 2) for value in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "rows": [row.to_dict() for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
