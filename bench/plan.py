"""What one run of the suite does: how many rounds, which groups, which Python runs the rivals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from synapse_host.worker.listener import RuntimeDirectory

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Plan:
    """One run. ``folder`` is removed at its end; its path is short, for socket paths.

    It is a private runtime directory: what a killed run leaves is removed by the next one, or by any host that starts.
    """

    folder: Path
    rounds: int
    quick: bool = False
    models_dir: Path | None = None
    threads: int = 2

    @classmethod
    @contextmanager
    def make(cls, *, quick: bool, models_dir: Path | None = None, threads: int | None = None) -> Iterator[Plan]:
        """Make a plan and its folder for the block."""
        from engines.machine import usable_cores

        directory = RuntimeDirectory.open()
        try:
            yield cls(directory.path, 3 if quick else 7, quick, models_dir, threads or usable_cores())
        finally:
            directory.close()

    def scaled(self, count: int) -> int:
        """Return how many calls a turn makes: fewer in a quick run."""
        return max(1, count // 2 if self.quick else count)
