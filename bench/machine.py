"""The machine a figure comes from, and the low-priority spinners that keep its cores awake."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

SPIN = """
import ctypes, os, sys
parent = int(sys.argv[1])
try:
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: a killed suite leaves none of these behind
except (AttributeError, OSError, TypeError):
    pass
if os.getppid() != parent:
    sys.exit()
try:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
except (AttributeError, OSError):
    os.nice(19)
try:
    libc = ctypes.CDLL(None)
    lock = ctypes.c_int()
    libc.pthread_spin_init(ctypes.byref(lock), 0)
    libc.pthread_spin_lock(ctypes.byref(lock))
    libc.pthread_spin_lock(ctypes.byref(lock))
except (AttributeError, OSError, TypeError):
    pass
while os.getppid() == parent:
    for _ in range(1000000):
        pass
"""
# Waiting twice for one spin lock is a loop of PAUSE instructions. Virtual cores are often the two threads of one core,
# and a busy loop beside the measured process would take half of it away.
PACKAGES = ("synapse-workers", "msgspec", "numpy", "llama-cpp-python", "onnxruntime-gpu", "onnxruntime", "uvloop")


@contextmanager
def spinners() -> Iterator[None]:
    """Keep every core from sleeping with one process that runs only when nothing else wants to.

    Without them a ping-pong between two processes measures how long a core takes to wake up.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    children = []
    try:
        for core in cores:
            child = subprocess.Popen([sys.executable, "-S", "-c", SPIN, str(os.getpid())])
            children.append(child)
            with suppress(AttributeError, OSError):
                os.sched_setaffinity(child.pid, {core})
        yield
    finally:
        for child in children:
            child.kill()
            child.wait()


ONE_CORE = "both ends on one core"


def placements() -> dict[str, tuple[set[int], set[int]] | None]:
    """Return where the two ends of a ping-pong may run: (ours, the others'), or None where cores can't be chosen.

    It decides more than anything else here: on one core a switch is a few microseconds, between two virtual cores a
    wake-up may be an exit to the hypervisor. Left to the scheduler, one contestant may get the one and its rival the
    other.
    """
    if not hasattr(os, "sched_getaffinity"):
        return {ONE_CORE: None}
    cores = sorted(os.sched_getaffinity(0))
    found: dict[str, tuple[set[int], set[int]] | None] = {ONE_CORE: ({cores[0]}, {cores[0]})}
    if len(cores) > 1:
        found["each on its own core"] = ({cores[0]}, {cores[1]})
    return found


@contextmanager
def placed(where: tuple[set[int], set[int]] | None, others: list[int]) -> Iterator[None]:
    """Pin this process and all threads of the processes *others* for the block."""
    if where is None:
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, where[0])
        for pid in others:
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), where[1])
        yield
    finally:
        os.sched_setaffinity(0, before)
        for pid in others:
            with suppress(OSError):
                for thread in Path(f"/proc/{pid}/task").iterdir():
                    os.sched_setaffinity(int(thread.name), before)


def load() -> float | None:
    """Return the load average of the last minute."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None


def describe() -> dict[str, Any]:
    """Return what the report says about where it was made."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": cpu(),
        "cores": cores,
        "memory_gb": _memory(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
    }


@cache
def cpu() -> str:
    """Return the processor's name, family and instruction sets."""
    with suppress(OSError):
        facts: dict[str, str] = {}
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
        flags = set(facts.get("flags", "").split())
        sets = [name for name in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16") if name in flags]
        place = f"family {facts.get('cpu family')}, model {facts.get('model')}"
        return f"{facts.get('model name', platform.processor())} ({place}; {' '.join(sets) or 'no AVX2'})"
    return platform.processor() or platform.machine()


def _memory() -> float:
    import psutil

    return round(psutil.virtual_memory().total / 2**30, 1)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
