"""What a hardware run on an NVIDIA GPU may write down: of real chips only, and with the numbers that were missed."""

from __future__ import annotations

import re
from typing import Final

GPU: Final = re.compile(r"(NVIDIA|Tesla|Quadro|GeForce|TITAN|GRID)\b.*\d")
"""How NVIDIA's drivers name devices, such as 'NVIDIA H200' and 'Tesla T4'."""


def require_gpu(device: str) -> None:
    """Raise AssertionError for a device that is no GPU, such as the stub libraries' of tests/rehearsal."""
    assert GPU.match(device), f"{device!r} is no NVIDIA GPU, so nothing was written: a rehearsal is never evidence"


class NumbersMissed(AssertionError):
    """A number lies outside its bound; everything before it worked."""


def judge(**met: bool) -> None:
    """Raise NumbersMissed with the names that are false."""
    if missed := [name for name, good in met.items() if not good]:
        raise NumbersMissed(f"outside their bounds: {', '.join(missed)}")
