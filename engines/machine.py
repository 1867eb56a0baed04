"""What this machine lets the process have: usable cores and free memory, container limits included.

Host and engines read it here, so that both count the same cores. More threads than the CPU quota allows make
llama.cpp's barriers collapse (a public report measured 45 times slower), and neither ``os.cpu_count`` nor the affinity
mask knows of a cgroup quota.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
SELF_CGROUP = Path("/proc/self/cgroup")


def usable_cores(*, root: Path = CGROUP_ROOT, membership: Path = SELF_CGROUP) -> int:
    """Return the cores this process may use at once: affinity mask and CPU quota, rounded down, at least 1."""
    quota = cpu_quota(root=root, membership=membership)
    cores = affinity()
    return max(1, cores if quota is None else min(cores, int(quota)))


def cpu_quota(*, root: Path = CGROUP_ROOT, membership: Path = SELF_CGROUP) -> float | None:
    """Return the smallest cgroup CPU limit that applies to this process, in cores, or None without one."""
    return min(_quotas(root, membership), default=None)


def free_memory(*, root: Path = CGROUP_ROOT, membership: Path = SELF_CGROUP) -> int:
    """Return the bytes that can still be taken: of the machine, of each cgroup, of the address space."""
    import psutil  # a worker needs it at LOAD, and would pay for it before HELLO

    return min([int(psutil.virtual_memory().available), *_cgroup_free(root, membership), *_address_space()])


def affinity() -> int:
    """Return how many CPUs the scheduler may run this process on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def installed_version(*distributions: str) -> str | None:
    """Return the version of the first of *distributions* that is found, from the name of its metadata folder.

    importlib.metadata would cost every spawn 15 ms of imports for the same answer.
    """
    for root in sys.path:
        for name in distributions:
            for found in Path(root).glob(f"{name}-*.dist-info"):
                return found.stem.partition("-")[2]
    return None


def whole_machine(threads: int) -> tuple[int, ...]:
    """Return the ids of all CPUs this process may use if that is *threads* of them, two or more; otherwise nothing.

    Then a thread may be bound to each without taking a choice away: there is none. Empty where threads can't be bound.
    """
    if threads < 2 or not hasattr(os, "sched_getaffinity"):
        return ()
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    return cpus if len(cpus) == threads == usable_cores() else ()


@contextmanager
def bound_to(cpu: int | None) -> Iterator[None]:
    """Keep the calling thread on *cpu* for the block; None, or a CPU that is no longer allowed, leaves it free."""
    before: set[int] | None = None
    if cpu is not None and sys.platform == "linux":
        before = os.sched_getaffinity(0)
        try:
            os.sched_setaffinity(0, {cpu})
        except OSError:
            before = None
    try:
        yield
    finally:
        if before is not None and sys.platform == "linux":
            with suppress(OSError):  # the CPUs were taken away meanwhile
                os.sched_setaffinity(0, before)


def _folders(root: Path, membership: Path, controller: str) -> Iterator[Path]:
    """Yield the cgroup folders that limit us, innermost first: version 2, then version 1."""
    for line in _text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount = root / "unified" if (root / "unified").is_dir() else root
        elif controller in controllers.split(","):
            mount = next((root / name for name in (controllers, controller) if (root / name).is_dir()), root)
        else:
            continue
        inner = mount / path.lstrip("/")
        yield inner
        for parent in inner.parents:
            if not parent.is_relative_to(mount):
                break
            yield parent


def _quotas(root: Path, membership: Path) -> Iterator[float]:
    for folder in _folders(root, membership, "cpu"):
        words = _text(folder / "cpu.max").split()
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
            yield int(words[0]) / int(words[1])
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota is not None and period and quota > 0:  # -1 means unlimited
            yield quota / period


def _cgroup_free(root: Path, membership: Path) -> Iterator[int]:
    for folder in _folders(root, membership, "memory"):
        for limit_name, usage_name in (("max", "current"), ("limit_in_bytes", "usage_in_bytes")):
            limit, usage = _number(folder / f"memory.{limit_name}"), _number(folder / f"memory.{usage_name}")
            if limit is not None and usage is not None and limit < 2**60:  # version 1 says 'none' with 2**63
                yield max(0, limit - usage + _reclaimable(folder))


def _reclaimable(folder: Path) -> int:
    """Return the page cache that counts as usage but is given back under pressure."""
    for line in _text(folder / "memory.stat").splitlines():
        words = line.split()
        if len(words) == 2 and words[0] in ("inactive_file", "total_inactive_file"):
            return int(words[1])
    return 0


def _address_space() -> Iterator[int]:
    """Yield what RLIMIT_AS leaves, where there is such a limit."""
    import psutil

    if sys.platform == "linux":
        limit, _ = psutil.Process().rlimit(psutil.RLIMIT_AS)
        if limit != psutil.RLIM_INFINITY:
            yield max(0, limit - int(psutil.Process().memory_info().vms))


def _text(path: Path) -> str:
    """Return what a file holds, nothing where it can't be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None
