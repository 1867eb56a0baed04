"""A clock that stands still until told to move: what pure policy is tested with."""

from __future__ import annotations


class ManualClock:
    """Seconds as a float; call it, or read ``now``, like ``loop.time``."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def time(self) -> float:
        """Return the current time under the name the event loop uses."""
        return self.now

    def advance(self, seconds: float) -> float:
        """Move forward and return the new time; a monotonic clock never goes back."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock can't go back {-seconds} s")
        self.now += seconds
        return self.now
