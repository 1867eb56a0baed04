"""A clock that stands still until told to move: what pure policy is tested with."""

from __future__ import annotations


class ManualClock:
    """Seconds as a float: call it, or read ``now``."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> float:
        """Move forward and return the new time."""
        self.now += seconds
        return self.now
