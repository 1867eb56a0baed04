"""One host per user may drive the Neural Engine: an advisory lock that every worker inherits.

The lock belongs to the open file, and each worker gets that file as its standard input, so it stays held until the last
worker has exited, even when the host was killed. A worker never closes or reads stdin.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from synapse_host.errors import AneLaneBusy
from synapse_host.placement import places

NAME: Final = "ane-lane.lock"


def default_path() -> Path:
    """Return the lock file of this user, one for all hosts of a machine."""
    return places.cache() / NAME


class LaneLock:
    """Held from construction to :meth:`close`; AneLaneBusy when another host, or a worker it left, has it."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or default_path()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd: int | None = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        if sys.platform == "win32":
            return  # no Neural Engine there
        import fcntl

        try:
            # flock, not lockf: it belongs to the open file description, which children share.
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            self.close()
            raise AneLaneBusy(
                f"another host (pid {holder}) or one of its workers drives the Neural Engine; try again when it ended",
                details={"holder": holder, "lock": str(self.path)},
            ) from exc
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def fileno(self) -> int:
        """Return the descriptor a worker gets as its stdin."""
        if self._fd is None:
            raise ValueError("the lane lock is closed")
        return self._fd

    def close(self) -> None:
        """Give up this process's hold; workers that inherited it keep theirs. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
