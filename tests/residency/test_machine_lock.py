"""One host per user on the Neural Engine, held by the last worker that inherited the lock."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from synapse_host.errors import AneLaneBusy
from synapse_host.residency.machine_lock import LaneLock

pytestmark = [pytest.mark.process, pytest.mark.skipif(os.name == "nt", reason="no Neural Engine on Windows")]

HOLDER = (
    "import subprocess, sys, time\n"
    "from pathlib import Path\n"
    "from synapse_host.residency.machine_lock import LaneLock\n"
    "lock = LaneLock(Path(sys.argv[1]))\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], stdin=lock.fileno())\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(60)\n"
)


def test_killed_holder_with_resident_work_keeps_lane_busy_until_old_worker_exits(tmp_path: Path) -> None:
    path = tmp_path / "x" / "ane.lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    orphan = int(holder.stdout.readline())
    try:
        with pytest.raises(AneLaneBusy) as busy:
            LaneLock(path)
        assert busy.value.details["holder"] == str(holder.pid) and busy.value.retry_after_ms == 1000
        holder.kill()
        holder.wait()
        with pytest.raises(AneLaneBusy):
            LaneLock(path)
    finally:
        holder.stdout.close()
        holder.kill()
        holder.wait()
        os.kill(orphan, 9)
    for _ in range(1000):
        try:
            lock = LaneLock(path)
            break
        except AneLaneBusy:
            time.sleep(0.005)
    else:
        raise AssertionError("the lock outlived its last holder")
    for _ in range(2):
        lock.close()
    LaneLock(path).close()
