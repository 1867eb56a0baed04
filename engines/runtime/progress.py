"""Completed work on its way to the host.

Spec: "Counters strictly increase for completed work, never for timer ticks or kernel submission alone." So there is no
timer here: a frame leaves only from a call that reports finished work, and the clock may only hold one back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from engines.protocol.messages import Phase

COALESCE_S: Final = 0.05
"""Spec (protocol-v3, 4): at most one frame per 50 ms, the CUDA switch exempt."""


class ProgressReporter:
    """Counts the finished work of one exchange and emits it, coalesced; safe to call from any thread.

    *emit* gets (completed, phase) in rising order. It is called under the reporter's lock, so a frame can't overtake
    another one or follow :meth:`close`. A worker passes its write lock as *lock*: two locks would be taken in opposite
    orders by a progress callback (reporter, then stream) and by the terminal reply (stream, then reporter).
    """

    def __init__(
        self,
        emit: Callable[[int, Phase], None],
        *,
        phase: Phase,
        clock: Callable[[], float] = time.monotonic,
        lock: threading.RLock | None = None,
    ) -> None:
        self._emit = emit
        self._phase = phase
        self._clock = clock
        self._lock = threading.RLock() if lock is None else lock
        self._completed = 0
        self._sent = 0
        self._closed = False
        self._next_at = clock() + COALESCE_S

    @property
    def completed(self) -> int:
        """Work finished so far, in the exchange's unit."""
        return self._completed

    def advance(self, units: int = 1) -> None:
        """Record *units* of finished work (>= 1); the unit is the caller's, one per exchange."""
        if units < 1:
            raise ValueError(f"progress of {units} units is not work")
        with self._lock:
            if self._closed:
                return
            self._completed += units
            now = self._clock()
            if now >= self._next_at:
                self._send(now)

    def switch(self, prepared: int) -> None:
        """CUDA's switch frame: the inputs are *prepared* in all, and the opaque forward comes next.

        Sent at once. The counter becomes *prepared*, which must be above what was sent, so setup frames may report at
        most ``prepared - 1`` (llama-cuda.md, 1.1); ValueError otherwise, since the counter has to rise.
        """
        with self._lock:
            if self._closed:
                return
            if prepared <= self._sent:
                raise ValueError(f"{prepared} inputs prepared, but setup frames already said {self._sent}")
            self._completed = max(self._completed, prepared)
            self._phase = Phase.INFERENCE
            self._send(self._clock())

    def close(self) -> None:
        """Emit nothing from now on; called under the write lock before the terminal header."""
        with self._lock:
            self._closed = True

    def _send(self, now: float) -> None:
        if self._completed > self._sent:
            self._sent = self._completed
            self._next_at = now + COALESCE_S
            self._emit(self._completed, self._phase)


def silent() -> ProgressReporter:
    """Return a reporter that emits nothing (tools and tests)."""
    return ProgressReporter(lambda completed, phase: None, phase=Phase.SETUP)
