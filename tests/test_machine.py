"""CPU quota and free memory, read from made-up cgroup trees of both versions."""

from __future__ import annotations

import os
from pathlib import Path

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


def test_free_memory_is_the_smaller_of_machine_and_cgroup(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable:      50 kB\n")
    own = tmp_path / "own"
    own.write_text("0::/a\n")
    root = tmp_path / "fs"
    assert machine.free_memory(root=root, membership=own, meminfo=meminfo) == 50 * 1024
    tree(root, {"cgroup.controllers": "", "a/memory.max": "40000", "a/memory.current": "30000"})
    assert machine.free_memory(root=root, membership=own, meminfo=meminfo) == 10_000
    tree(root, {"a/memory.stat": "anon 5\ninactive_file 7000\n"})
    assert machine.free_memory(root=root, membership=own, meminfo=meminfo) == 17_000
    tree(root, {"a/memory.max": "max"})
    assert machine.free_memory(root=root, membership=own, meminfo=meminfo) == 50 * 1024


def test_free_memory_of_cgroup_version_1(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("9:memory:/d\n")
    root = tmp_path / "fs"
    tree(root, {"memory/d/memory.limit_in_bytes": "9000", "memory/d/memory.usage_in_bytes": "8000"})
    assert machine.free_memory(root=root, membership=own, meminfo=tmp_path / "none") == 1000
    tree(root, {"memory/d/memory.limit_in_bytes": str(2**63 - 4096)})
    assert machine.free_memory(root=root, membership=own, meminfo=tmp_path / "none") is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads can't be bound on this system")
def test_a_thread_is_bound_for_the_block_only() -> None:
    before = os.sched_getaffinity(0)
    cpu = min(before)
    with pytest.raises(ValueError, match="inside"), machine.bound_to(cpu):
        assert os.sched_getaffinity(0) == {cpu}
        raise ValueError("inside")
    assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads can't be bound on this system")
def test_a_cpu_that_is_not_there_leaves_the_thread_free() -> None:
    before = os.sched_getaffinity(0)
    with machine.bound_to(1023):
        assert os.sched_getaffinity(0) == before
    with machine.bound_to(None):
        assert os.sched_getaffinity(0) == before
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
