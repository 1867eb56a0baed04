"""The CUDA loop without a GPU: same slots, copies, events and bindings, with plain host memory behind them.

It proves the loop's bookkeeping on the CPU provider, nothing about the device: what only a GPU can prove is in
tests/hardware/test_cuda.py.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np


class HostCuda:
    """Stands where :class:`engines.cuda.binding.Cuda` does. ``calls`` tells the order of what was queued."""

    kind = "cpu"
    index = 0
    stream = 0

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.live: dict[int, Any] = {}
        self.events = 0
        self.fired: set[int] = set()

    def pinned(self, size: int) -> tuple[np.ndarray, int]:
        array = np.full(size, 255, np.uint8)
        self.live[array.ctypes.data] = array
        return array, array.ctypes.data

    def memory(self, size: int) -> int:
        return self.pinned(max(size, 1))[1]

    def event(self) -> int:
        self.events += 1
        return self.events

    def copy(self, target: int, source: int, size: int, *, up: bool) -> None:
        self.calls.append("up" if up else "down")
        for address in (target, source):
            inside = any(start <= address and address + size <= start + a.nbytes for start, a in self.live.items())
            assert inside, f"a copy of {size} bytes beyond its block"
        ctypes.memmove(target, source, size)

    def record(self, event: int) -> None:
        self.calls.append(f"record {event}")
        self.fired.add(event)

    def wait(self, event: int) -> None:
        assert event in self.fired, "waited for an event that was never recorded"
        self.calls.append(f"wait {event}")

    def upload(self, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        """No weights on a device: the CPU provider's sessions keep their own."""
        return {}

    def settle(self) -> None:
        self.calls.append("settle")

    def close(self) -> None:
        self.live.clear()
        self.events = 0
