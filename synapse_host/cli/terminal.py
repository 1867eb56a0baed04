"""What a terminal is shown: the reports of a job's stages, and text that can't steer it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

STEERING: Final = {
    code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
    # C0 without tab and line feed, DEL and C1; then what makes text run backwards on a terminal.
    for code in (*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}


Stages: TypeAlias = Callable[[str, int, int], None]
"""``report(stage, done, total)``; each stage starts the bar anew."""


def printable(text: str) -> str:
    """Return *text* with every character escaped that steers a terminal: words of workers, models and files hold any.

    ``ESC ]0;…`` would set its title, ``ESC [2J`` clear it, and a right-to-left override turn a line round.
    """
    return text.translate(STEERING)
