"""What one lane has done, as plain integers: cheap enough for every request, read by :mod:`synapse_host.serve.metrics`.

Only the loop's thread writes; there is no lock and nothing to flush. Times are in seconds.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from synapse_host.errors import SynapseError

REQUEST_BOUNDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
LOAD_BOUNDS: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
SHARED_BOUNDS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
IPC_BOUNDS: Final = (5e-05, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 1.0)


class Histogram:
    """Observations counted into buckets: ``counts[i]`` holds those up to ``bounds[i]``, the last one the rest."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class LaneCounters:
    """One lane's counts over all its worker generations."""

    def __init__(self) -> None:
        self.failures: Counter[tuple[str, str]] = Counter()
        """By operation and outcome: an error code, or ``cancelled``. What callers got, not what workers did."""
        self.durations: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(REQUEST_BOUNDS))
        """By operation, from the call to its reply, waiting included; answered requests only."""
        self.ipc = Histogram(IPC_BOUNDS)
        """Round trips of PING: the path without any model work."""
        self.loads = Histogram(LOAD_BOUNDS)
        """LOAD exchanges that ended with LOADED."""
        self.last_load_s: float | None = None
        self.gaps: dict[str, float] = {}
        """The longest silence within an exchange, by the window it is measured against; the watchdog writes it."""
        self.restarts: Counter[str] = Counter()
        """Workers started in place of one that ended, by how that one ended."""
        self.rejected: Counter[str] = Counter()
        """What a worker sent against the rules, by reason."""
        self.abandoned = 0
        """Replies that were drained after their caller had left."""
        self.sent = 0
        self.received = 0
        self.shared = Histogram(SHARED_BOUNDS)
        """Calls that an inference exchange served."""

    @property
    def requests(self) -> dict[tuple[str, str], int]:
        """Requests by operation and outcome: ``ok``, an error code, or ``cancelled``."""
        answered = {(op, "ok"): sum(histogram.counts) for op, histogram in self.durations.items()}
        return {**answered, **self.failures}

    @contextmanager
    def call(self, op: str) -> Iterator[None]:
        """Count what the block does as one request, by how it ends."""
        started = time.monotonic()
        try:
            yield
        except SynapseError as exc:
            self.failures[op, exc.code] += 1
            raise
        except (asyncio.CancelledError, GeneratorExit):
            # GeneratorExit: a caller left a stream between two of its pieces.
            self.failures[op, "cancelled"] += 1
            raise
        except BaseException:
            self.failures[op, "internal_error"] += 1
            raise
        self.durations[op].add(time.monotonic() - started)
