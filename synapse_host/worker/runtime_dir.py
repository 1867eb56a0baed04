"""What a killed host leaves behind: private runtime directories whose lock nobody holds any more.

A private directory says so in its lock file, which its host keeps locked as long as it lives: the kernel gives the lock
back however the host ends. Only that decides; neither age nor a pid does, for pids are used again.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Final

from synapse_host.locks import lock_exclusive
from synapse_host.placement import places
from synapse_host.placement.places import NoTemporary

PREFIX: Final = "synapse-"
PRIVATE: Final = b"private\n"
"""Second line of a lock file, under the pid: the directory is removed with its host."""
LOCK: Final = Path("synapse", "lock")
"""Where the lock lies in a runtime directory."""


def roots() -> list[Path]:
    """Return the folders where private runtime directories are made."""
    found = [Path("/tmp")]  # noqa: S108 - mkdtemp's there
    with suppress(NoTemporary):
        found.insert(0, places.temporary())
    return list(dict.fromkeys(found))


def sweep(root: Path, *, remove: bool = True) -> list[Path]:
    """Return the private runtime directories in *root* whose hosts are dead, and *remove* them; no OSError."""
    found = []
    for path in _candidates(root):
        # Held until it is gone: two sweepers never remove one directory, or its successor.
        with _claimed(path) as dead:
            if dead:
                found.append(path)
                if remove:
                    shutil.rmtree(path, ignore_errors=True)
    return sorted(found)


def _candidates(root: Path) -> Iterator[Path]:
    """Yield the directories in *root* that are named like ours, are this user's alone, and are no links."""
    if os.name != "posix":
        return
    try:
        with os.scandir(root) as entries:
            named = [entry for entry in entries if entry.name.startswith(PREFIX)]
    except OSError:
        return
    for entry in named:
        with suppress(OSError):
            found = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
                yield Path(entry.path)


@contextmanager
def _claimed(path: Path) -> Iterator[bool]:
    """Hold the lock of a private directory for a moment; False where it isn't one or its host lives."""
    lock = path / LOCK
    try:
        # O_NONBLOCK: a pipe of that name must not stop us.
        file = os.fdopen(os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK), "rb", buffering=0)
    except OSError:
        yield False
        return
    with file:
        try:
            entry = os.fstat(file.fileno())
            ours = stat.S_ISREG(entry.st_mode) and entry.st_uid == os.geteuid()
            # Written under the lock: a directory that is only being made has no such line yet, and is left alone.
            if ours := ours and _private(file):
                lock_exclusive(file)
                ours = os.path.samestat(entry, lock.lstat()) and _private(file)
        except OSError:
            ours = False
        yield ours


def _private(lock: IO[bytes]) -> bool:
    lock.seek(0)
    return lock.read(64).partition(b"\n")[2] == PRIVATE


def holder(handle: IO[bytes]) -> tuple[int | None, str]:
    """Return the pid in a lock file that another holds, and ``pid 3310 (synapse, started 2026-10-31 10:02)``."""
    handle.seek(0)
    line = handle.read(32).partition(b"\n")[0].decode("ascii", "replace").strip()
    pid = int(line) if line.isdigit() else None
    return pid, f"pid {line or 'unknown'}{_described(pid)}"


def _described(pid: int | None) -> str:
    """Return `` (synapse, started 2026-10-31 10:02)`` for a process, as far as it can be seen."""
    if pid is None:
        return ""
    import psutil

    try:
        process = psutil.Process(pid)
        started = datetime.fromtimestamp(process.create_time())
        words, name = process.cmdline(), process.name()
    except (psutil.Error, OSError, ValueError):
        return ""
    ours = any(Path(word).name == "synapse" or "synapse_host" in word for word in words[:4])
    return f" ({'synapse' if ours else name}, started {started:%Y-%m-%d %H:%M})"
