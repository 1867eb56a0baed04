"""Locks between processes, on files: the kernel gives them back with the process that held them."""

from __future__ import annotations

import sys
from typing import IO


def lock_exclusive(handle: IO[bytes]) -> None:
    """Lock without waiting; OSError when another process holds it. The kernel releases it with the process."""
    if sys.platform == "win32":
        import msvcrt

        # Byte 1024: locked bytes can't be read, and the pid at the start must stay readable.
        handle.seek(1024)
        msvcrt.locking(handle.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(handle.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
