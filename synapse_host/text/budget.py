"""How many characters all threads of the process tokenise at once.

What the tokenizers library makes of a text takes up to 250 bytes a character while it runs, so a few long texts side by
side would take the host's memory. A thread holds its characters for as long as the library works on them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

BUDGET_CHARACTERS: Final = 1024 * 1024
"""Characters in the tokenizers of all threads at once; a longer piece goes alone."""
FREE_CHARACTERS: Final = 16 * 1024
"""Calls with fewer never wait for the budget: they may run on the event loop's thread."""


class Budget:
    """Characters that are being tokenised, by all threads of the process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._used = 0

    @contextmanager
    def taken(self, characters: int) -> Iterator[None]:
        """Wait until there is room for *characters* and hold it; more than all there is goes alone."""
        if characters <= FREE_CHARACTERS:
            yield
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._used or self._used + characters <= BUDGET_CHARACTERS)
            self._used += characters
        try:
            yield
        finally:
            with self._changed:
                self._used -= characters
                self._changed.notify_all()


budget: Final = Budget()
