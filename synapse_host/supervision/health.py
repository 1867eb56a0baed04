"""What a lane's health is made of: stamped facts from PONG, progress and replies, stale after a while.

Reading it touches no worker. PING feeds it in the background: it never queues behind inference and never spawns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from msgspec import UNSET

from engines.protocol.messages import Hello, Pong


class LaneHealth:
    """The cached facts of one lane's current worker generation. Times are the loop's."""

    def __init__(self) -> None:
        self.last_fault: dict[str, Any] | None = None
        self.hello: dict[str, Any] = {
            "kernel_revision": None,
            "packed_widths": [],
            "worker_version": None,
            "worker_engine": None,
            "build_flags": {},
        }
        """What the last HELLO said of the worker."""
        self.forget()

    def forget(self) -> None:
        """The worker is gone: what it told is history."""
        self.age_from: float | None = None
        self.first_rss_mb: int | None = None
        self._pong: dict[str, Any] = dict.fromkeys(
            ("rss_mb", "models_loaded", "placement_share", "buckets", "resident_shapes", "resident_packed")
        )

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
        self.hello = {
            "kernel_revision": _told(hello.kernel_revision),
            "packed_widths": [] if hello.packed is UNSET else list(hello.packed.widths),
            "worker_version": hello.engine.version,
            "worker_engine": hello.engine.engine,
            "build_flags": dict(_told(hello.engine.build_flags) or {}),
        }

    def pong(self, pong: Pong, now: float) -> None:
        """Stamp what a PONG says; the first RSS of a generation is what growth is measured from."""
        self.age_from = now
        if self.first_rss_mb is None:
            self.first_rss_mb = pong.rss_mb
        self._pong = {
            "rss_mb": pong.rss_mb,
            "models_loaded": pong.models_loaded,
            "placement_share": _told(pong.placement_share),
            "buckets": _told(pong.buckets),
            "resident_shapes": _told(pong.ane_resident_shapes),
            "resident_packed": _told(pong.ane_resident_packed),
        }

    def stale(self, now: float, limit: float) -> bool:
        """Return whether nothing was heard for more than *limit* seconds."""
        return self.age_from is None or now - self.age_from > limit

    def fields(self, now: float) -> dict[str, Any]:
        """Return the worker's part of a health record; ages in seconds, sizes in MiB."""
        return {
            "age_s": None if self.age_from is None else now - self.age_from,
            "rss_growth_mb": None if self.first_rss_mb is None else self._pong["rss_mb"] - self.first_rss_mb,
            **self._pong,
            **self.hello,
            "last_fault": self.last_fault,
        }


def _told(value: Any) -> Any:
    return None if value is UNSET else value


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
