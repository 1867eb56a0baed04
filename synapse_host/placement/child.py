"""A child process of the host's, whatever it runs: the environment it gets, and how it ended.

Workers, probes and the process that renders templates are started with the same short list of variables, so that what
a probe found holds for the worker.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Final

ENVIRONMENT: Final = frozenset(
    {"PATH", "HOME", "USER", "LANG", "TMPDIR", "SYSTEMROOT", "LD_LIBRARY_PATH", "OMP_NUM_THREADS"}
)


ENVIRONMENT_PREFIXES: Final = ("LC_", "DYLD_", "CUDA_", "NVIDIA_", "GGML_")


def worker_environment(
    worker_id: str, extra: Mapping[str, str], *, source: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return a worker's environment: the list of interfaces.md, SYNAPSE_WORKER_ID, and what the matrix adds."""
    source = os.environ if source is None else source
    # Windows writes SystemRoot and Path; elsewhere another case is another variable.
    known = str.upper if os.name == "nt" else str
    kept = {
        name: value
        for name, value in source.items()
        if known(name) in ENVIRONMENT or name.startswith(ENVIRONMENT_PREFIXES)
    }
    return {**kept, **extra, "SYNAPSE_WORKER_ID": worker_id}


def signal_name(returncode: int | None) -> str | None:
    """Return the name of the signal that ended a process, None when it exited by itself."""
    if returncode is None or returncode >= 0:
        return None
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"SIG{-returncode}"


def reap(child: subprocess.Popen[bytes], limit: float | None = None) -> int | None:
    """Wait for *child*, at most *limit* seconds, and return its exit code as Popen has it; TimeoutExpired then.

    None where somebody else took the status: SIGCHLD is ignored in this process, or a thread of the embedding program
    waits for any child. Popen reports 0 then, which would turn a killed worker into one that ended well.
    """
    if sys.platform == "win32" or child.returncode is not None:
        return child.wait(limit)
    end = None if limit is None else time.monotonic() + limit
    pause = 0.0005
    while True:
        try:
            pid, status = os.waitpid(child.pid, 0 if end is None else os.WNOHANG)
        except ChildProcessError:
            child.returncode = 0  # only so that Popen waits for it no more
            return None
        if pid:
            child.returncode = os.waitstatus_to_exitcode(status)
            return child.returncode
        left = (end or 0.0) - time.monotonic()
        if left <= 0:
            raise subprocess.TimeoutExpired(child.args, limit or 0.0)
        pause = min(pause * 2, left, 0.05)
        time.sleep(pause)
