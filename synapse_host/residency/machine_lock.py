"""One host per user may drive the Neural Engine: an advisory lock that every worker inherits.

The lock belongs to the open file, and each worker gets that file as its standard input, so it stays held until the last
worker has exited, even when the host was killed. A worker never closes or reads stdin.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from synapse_host.errors import AneLaneBusy
from synapse_host.locks import lock_exclusive
from synapse_host.placement import places

NAME: Final = "ane-lane.lock"
"""In the user's cache folder: one file for all hosts of a machine."""


class LaneLock:
    """Held from construction to :meth:`close`; AneLaneBusy when another host, or a worker it left, has it."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or places.cache() / NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)  # noqa: PTH123, SIM115
        try:
            # flock, not lockf: it belongs to the open file description, which children share.
            lock_exclusive(self._file)
        except OSError as exc:
            holder = self._file.read(32).decode("ascii", "replace").strip() or "unknown"
            self.close()
            raise AneLaneBusy(
                f"another host (pid {holder}) or one of its workers drives the Neural Engine; try again when it ended",
                details={"holder": holder, "lock": str(self.path)},
            ) from exc
        self._file.truncate()
        self._file.write(f"{os.getpid()}\n".encode())

    def fileno(self) -> int:
        """Return the descriptor a worker gets as its stdin."""
        return self._file.fileno()

    def close(self) -> None:
        """Give up this process's hold; workers that inherited it keep theirs. Idempotent."""
        self._file.close()
