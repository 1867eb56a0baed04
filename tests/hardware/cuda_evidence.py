"""The document of a hardware run on an NVIDIA GPU: named after the chip, and of real chips only."""

from __future__ import annotations

import json
import platform
import re
from pathlib import Path
from typing import Any, Final

GPU: Final = re.compile(r"(NVIDIA|Tesla|Quadro|GeForce|TITAN|GRID)\b.*\d")
"""How NVIDIA's drivers name devices, such as 'NVIDIA H200' and 'Tesla T4'."""


def write(document: dict[str, Any], folder: Path) -> Path:
    """Write *document* into *folder* and return its path. Raises AssertionError for a device that is no GPU.

    The stub libraries of tests/rehearsal call theirs CUDASHIM-NO-GPU: a rehearsal is never evidence.
    """
    device = str(document["device"])
    assert GPU.match(device), f"{device!r} is no NVIDIA GPU, so nothing was written: a rehearsal is never evidence"
    chip = re.sub(r"[^A-Za-z0-9]+", "-", device).strip("-").lower()
    build = re.sub(r"[^A-Za-z0-9.]+", "-", platform.release())
    folder.mkdir(exist_ok=True)
    path = folder / f"cuda-{chip}-{build}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document, indent=1, default=str) + "\n")
    part.replace(path)  # a process that dies while it writes leaves the document of the test before
    return path


class NumbersMissed(AssertionError):
    """A number lies outside its bound; everything before it worked."""


def judge(**met: bool) -> None:
    """Raise NumbersMissed with the names that are false."""
    if missed := [name for name, good in met.items() if not good]:
        raise NumbersMissed(f"outside their bounds: {', '.join(missed)}")
