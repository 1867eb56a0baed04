"""One host per user on the Neural Engine, held by the last worker that inherited the lock."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from synapse_host.errors import AneLaneBusy
from synapse_host.residency.machine_lock import LaneLock

pytestmark = [pytest.mark.process, pytest.mark.skipif(os.name == "nt", reason="no Neural Engine on Windows")]

SLEEPER = [sys.executable, "-c", "import sys, time; print('up', flush=True); time.sleep(60)"]
HOLDER = (
    "import subprocess, sys, time\n"
    "from pathlib import Path\n"
    "from synapse_host.residency.machine_lock import LaneLock\n"
    "lock = LaneLock(Path(sys.argv[1]))\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], stdin=lock.fileno())\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(60)\n"
)


def test_second_holder_is_busy_until_the_holder_and_its_workers_exit(tmp_path: Path) -> None:
    path = tmp_path / "ane.lock"
    first = LaneLock(path)
    worker = subprocess.Popen(SLEEPER, stdin=first.fileno(), stdout=subprocess.PIPE)
    try:
        assert worker.stdout is not None and worker.stdout.readline() == b"up\n"
        with pytest.raises(AneLaneBusy) as busy:
            LaneLock(path)
        assert busy.value.details["holder"] == str(os.getpid()) and busy.value.retry_after_ms == 1000
        first.close()
        with pytest.raises(AneLaneBusy):
            LaneLock(path)
    finally:
        worker.kill()
        worker.wait()
        assert worker.stdout is not None
        worker.stdout.close()
    LaneLock(path).close()


def test_killed_holder_with_resident_work_keeps_lane_busy_until_old_worker_exits(tmp_path: Path) -> None:
    path = tmp_path / "ane.lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    orphan = int(holder.stdout.readline())
    try:
        holder.kill()
        holder.wait()
        with pytest.raises(AneLaneBusy):
            LaneLock(path)
    finally:
        holder.stdout.close()
        os.kill(orphan, 9)
    for _ in range(1000):
        try:
            LaneLock(path).close()
            break
        except AneLaneBusy:
            os.sched_yield()
            _pause()
    else:
        raise AssertionError("the lock outlived its last holder")


def _pause() -> None:
    import time

    time.sleep(0.005)


def test_a_closed_lock_has_no_descriptor_and_closing_twice_is_fine(tmp_path: Path) -> None:
    with closing(LaneLock(tmp_path / "x" / "ane.lock")) as lock:
        assert lock.fileno() > 2
    lock.close()
    with pytest.raises(ValueError):
        lock.fileno()
