"""CPU quota and free memory, read from made-up cgroup trees of both versions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from engines import machine
from engines.cuda import settings
from synapse_host.placement import hardware
from synapse_host.supervision.queueing import Permits


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "affinity", lambda: 16)


def tree(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


CASES = [
    ("no cgroup at all", None, {}, 16),
    ("v2 without a limit", "0::/a\n", {"cgroup.controllers": "cpu", "a/cpu.max": "max 100000\n"}, 16),
    ("v2, 2.5 cores are 2", "0::/a\n", {"cgroup.controllers": "cpu", "a/cpu.max": "250000 100000\n"}, 2),
    ("v2, half a core is 1", "0::/a\n", {"cgroup.controllers": "cpu", "a/cpu.max": "50000 100000\n"}, 1),
    (
        "v2, the parent is tighter",
        "0::/a/b\n",
        {"cgroup.controllers": "cpu", "a/cpu.max": "300000 100000\n", "a/b/cpu.max": "max 100000\n"},
        3,
    ),
    (
        "v2, the root of a container",
        "0::/\n",
        {"cgroup.controllers": "cpu", "cpu.max": "400000 100000\n"},
        4,
    ),
    (
        "v1",
        "4:cpu,cpuacct:/d\n0::/\n",
        {"cpu,cpuacct/d/cpu.cfs_quota_us": "150000\n", "cpu,cpuacct/d/cpu.cfs_period_us": "100000\n"},
        1,
    ),
    (
        "v1 without a limit",
        "4:cpu,cpuacct:/d\n",
        {"cpu,cpuacct/d/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/d/cpu.cfs_period_us": "100000\n"},
        16,
    ),
    (
        "v1 seen from inside a container: only the mount's root is there",
        "4:cpu,cpuacct:/docker/x\n",
        {"cpu,cpuacct/cpu.cfs_quota_us": "200000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
        2,
    ),
    ("nonsense is no limit", "0::/a\n", {"cgroup.controllers": "cpu", "a/cpu.max": "lots\n"}, 16),
]


@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize(("name", "membership", "files", "expected"), CASES, ids=[case[0] for case in CASES])
def test_usable_cores(tmp_path: Path, name: str, membership: str | None, files: dict[str, str], expected: int) -> None:
    tree(tmp_path / "fs", files)
    own = tmp_path / "cgroup"
    if membership is not None:
        own.write_text(membership)
    assert machine.usable_cores(root=tmp_path / "fs", membership=own) == expected


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no CPU sets on this system")
@pytest.mark.report("microsoft/onnxruntime#10166")
def test_threads_and_permits_follow_a_cpu_set() -> None:
    """Also microsoft/onnxruntime#8313 and 7207, headroomlabs-ai/headroom#2885: threads by the machine's size."""
    with machine.bound_to(min(os.sched_getaffinity(0))):
        threads = settings.parse({}, device="cpu", precision="f32").threads
        assert [machine.usable_cores(), threads, Permits().limit("cpu"), hardware.detect().cores] == [1] * 4


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 50_000),
        ({"a/memory.max": "40000", "a/memory.current": "30000"}, 10_000),
        (
            {
                "a/memory.max": "40000",
                "a/memory.current": "30000",
                "a/memory.stat": "anon 5\ninactive_file 7000\n",
            },
            17_000,
        ),
        ({"a/memory.max": "max", "a/memory.current": "30000"}, 50_000),
        ({"memory/d/memory.limit_in_bytes": "9000", "memory/d/memory.usage_in_bytes": "8000"}, 1000),
        ({"memory/d/memory.limit_in_bytes": str(2**63 - 4096), "memory/d/memory.usage_in_bytes": "8000"}, 50_000),
    ],
)
def test_free_memory_is_the_smallest_of_machine_and_cgroups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=50_000))
    own = tmp_path / "own"
    own.write_text("9:memory:/d\n0::/a\n")
    tree(tmp_path / "fs", files)
    assert machine.free_memory(root=tmp_path / "fs", membership=own) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="limits of the address space are Linux's")
def test_free_memory_heeds_a_limit_of_the_address_space() -> None:
    script = "import resource as r; r.setrlimit(r.RLIMIT_AS, (2**30, -1)); from engines import machine as m"
    done = subprocess.run([sys.executable, "-c", f"{script}; print(m.free_memory())"], capture_output=True, check=True)
    assert 2**29 < int(done.stdout) < 2**30


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads can't be bound on this system")
def test_a_thread_is_bound_for_the_block_only_and_to_no_cpu_that_is_not_there() -> None:
    before = os.sched_getaffinity(0)
    for cpu, inside in ((min(before), {min(before)}), (1023, before), (None, before)):
        with pytest.raises(ValueError, match="inside"), machine.bound_to(cpu):
            assert os.sched_getaffinity(0) == inside
            raise ValueError("inside")
        assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("mask", "usable", "threads", "expected"),
    [
        ({0, 1}, 2, 2, (0, 1)),
        ({7, 5, 6}, 3, 3, (5, 6, 7)),
        ({0, 1, 2, 3}, 4, 2, ()),  # others may use the rest, and the scheduler knows better which
        ({0, 1, 2, 3}, 2, 2, ()),  # a quota of two cores, on any of the four
        ({0}, 1, 1, ()),
        ({0, 1}, 2, 8, ()),
    ],
)
def test_threads_are_bound_only_where_they_fill_the_machine(
    monkeypatch: pytest.MonkeyPatch, mask: set[int], usable: int, threads: int, expected: tuple[int, ...]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: mask, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: None, raising=False)
    monkeypatch.setattr(machine, "usable_cores", lambda: usable)
    assert machine.whole_machine(threads) == expected
