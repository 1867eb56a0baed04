"""What a lane's health is made of: stamped facts from PONG, progress and replies, stale after a while.

Reading it touches no worker. PING feeds it in the background: it never queues behind inference and never spawns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from msgspec import UNSET

from engines.protocol.messages import Hello, Pong


class LaneHealth:
    """The cached facts of one lane's current worker generation. Times are :func:`time.monotonic`."""

    __slots__ = (
        "age_from",
        "buckets",
        "build_flags",
        "engine",
        "first_rss_mb",
        "kernel_revision",
        "last_fault",
        "models_loaded",
        "packed_widths",
        "placement_share",
        "resident_packed",
        "resident_shapes",
        "rss_mb",
        "version",
    )

    def __init__(self) -> None:
        self.last_fault: dict[str, Any] | None = None
        self.kernel_revision: str | None = None
        self.version: str | None = None
        self.engine: str | None = None
        self.build_flags: dict[str, str] = {}
        self.packed_widths: list[int] = []
        self.forget()

    def forget(self) -> None:
        """The worker is gone: what it told is history."""
        self.age_from: float | None = None
        self.rss_mb: int | None = None
        self.first_rss_mb: int | None = None
        self.models_loaded: int | None = None
        self.placement_share: float | None = None
        self.buckets: list[int] | None = None
        self.resident_shapes: dict[str, list[int]] | None = None
        self.resident_packed: dict[str, list[int]] | None = None

    def struck(self, generation: int, pid: int | None, details: dict[str, Any]) -> None:
        """The worker died; *details* are those of its EngineCrashed."""
        self.forget()
        self.last_fault = {
            "generation": generation,
            "worker_pid": pid,
            **{key: details[key] for key in ("stage", "cause", "exit_status", "signal", "fingerprint")},
        }

    def greeted(self, hello: Hello, now: float) -> None:
        """A new generation has shaken hands."""
        self.forget()
        self.age_from = now
        self.version = hello.engine.version
        self.engine = hello.engine.engine
        self.build_flags = {} if hello.engine.build_flags is UNSET else dict(hello.engine.build_flags)
        self.kernel_revision = None if hello.kernel_revision is UNSET else hello.kernel_revision
        self.packed_widths = [] if hello.packed is UNSET else list(hello.packed.widths)

    def pong(self, pong: Pong, now: float) -> None:
        """Stamp what a PONG says; the first RSS of a generation is what growth is measured from."""
        self.age_from = now
        self.rss_mb = pong.rss_mb
        if self.first_rss_mb is None:
            self.first_rss_mb = pong.rss_mb
        self.models_loaded = pong.models_loaded
        self.placement_share = None if pong.placement_share is UNSET else pong.placement_share
        self.buckets = None if pong.buckets is UNSET else pong.buckets
        self.resident_shapes = None if pong.ane_resident_shapes is UNSET else pong.ane_resident_shapes
        self.resident_packed = None if pong.ane_resident_packed is UNSET else pong.ane_resident_packed

    def stale(self, now: float, limit: float) -> bool:
        """Return whether nothing was heard for more than *limit* seconds."""
        return self.age_from is None or now - self.age_from > limit

    def fields(self, now: float) -> dict[str, Any]:
        """Return the worker's part of a health record; ages in seconds, sizes in MiB."""
        age, rss, first = self.age_from, self.rss_mb, self.first_rss_mb
        return {
            "age_s": None if age is None else now - age,
            "rss_mb": rss,
            "rss_growth_mb": None if rss is None or first is None else rss - first,
            "models_loaded": self.models_loaded,
            "placement_share": self.placement_share,
            "kernel_revision": self.kernel_revision,
            "packed_widths": self.packed_widths,
            "buckets": self.buckets,
            "resident_shapes": self.resident_shapes,
            "resident_packed": self.resident_packed,
            "worker_version": self.version,
            "worker_engine": self.engine,
            "build_flags": self.build_flags,
            "last_fault": self.last_fault,
        }


class Refresher:
    """Calls *ping* every *interval* seconds until stopped. *ping* must not wait: it skips what is busy or missing."""

    def __init__(self, interval: float, ping: Callable[[], None]) -> None:
        self._interval = interval
        self._ping = ping
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin; does nothing when running."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._interval, self._tick)

    def stop(self) -> None:
        """End; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._interval, self._tick)
        self._ping()


monotonic = time.monotonic
"""The clock of health: the same on every thread, so that a reader outside the loop sees the same ages."""
