"""The CUDA device's numbers without a GPU: plain host memory in place of :class:`engines.cuda.binding.Cuda`.

It proves that rows and results lie where they belong, nothing about the device: the order of calls is rehearsed in
tests/rehearsal, what only a GPU can prove is in tests/hardware/test_cuda.py.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np


class HostCuda:
    """Memory and copies; everything queued is finished at once."""

    kind = "cpu"
    index = 0

    def __init__(self) -> None:
        self.live: dict[int, Any] = {}

    def pinned(self, size: int) -> tuple[np.ndarray, int]:
        array = np.full(size, 255, np.uint8)
        self.live[array.ctypes.data] = array
        return array, array.ctypes.data

    def memory(self, size: int) -> int:
        return self.pinned(max(size, 1))[1]

    def copy(self, target: int, source: int, size: int, *, up: bool) -> None:
        for address in (target, source):
            inside = any(start <= address and address + size <= start + a.nbytes for start, a in self.live.items())
            assert inside, f"a copy of {size} bytes beyond its block"
        ctypes.memmove(target, source, size)

    def nothing(self, *_: object) -> None: ...

    event = record = wait = settle = nothing

    def close(self) -> None:
        self.live.clear()
