"""A host's private runtime directory as a kill -9 leaves it, or as a living host holds it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HOLDER = """
import sys
from synapse_host.worker.listener import RuntimeDirectory
held = RuntimeDirectory.open(None)
listener = held.listen("embed-1")
print(held.path, listener.path, sep="\\n", flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(root: Path) -> Iterator[tuple[subprocess.Popen[str], Path, Path]]:
    """Run a process that holds a private directory in *root*; yield it, its directory and a socket of its."""
    environment = {**os.environ, "TMPDIR": str(root)}
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        try:
            yield process, Path(process.stdout.readline().strip()), Path(process.stdout.readline().strip())
        finally:
            process.kill()


def kill_one(root: Path) -> tuple[Path, Path]:
    """Return the directory and the socket of a host in *root* that was killed."""
    with holder(root) as (process, directory, listening):
        process.kill()
        process.wait()
        return directory, listening
