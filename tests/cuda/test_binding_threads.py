"""Where the threads of a single call run: a CPU each, the caller's left free, and only where they fill the machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from engines import machine
from engines.cuda import binding
from engines.runtime.progress import silent
from tests.cuda.conftest import Bundles, Loader
from tests.support.rows import batch_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and binds threads: Linux")
TASKS = Path("/proc/self/task")


def masks() -> dict[str, set[int]]:
    return {task.name: os.sched_getaffinity(int(task.name)) for task in TASKS.iterdir()}


@pytest.fixture
def cpus() -> list[int]:
    found = sorted(os.sched_getaffinity(0))
    if len(found) < 2 or machine.usable_cores() != len(found):
        pytest.skip("needs two CPUs and no quota")
    return found


def test_every_thread_but_the_callers_has_a_cpu_if_they_fill_the_machine(
    bundles: Bundles, load: Loader, cpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = masks()
    load(bundles("bert-mean"), threads=str(len(cpus)), warm="0")
    bound = [mask for task, mask in masks().items() if task not in before and len(mask) == 1]
    assert sorted(cpu for mask in bound for cpu in mask) == cpus[1:]
    monkeypatch.setattr(machine, "usable_cores", lambda: len(cpus) + 1)
    before = masks()
    load(bundles("bert-mean"), threads=str(len(cpus)), warm="0")
    assert all(mask == set(cpus) for task, mask in masks().items() if task not in before)


def test_the_caller_is_bound_during_a_single_call_only(
    bundles: Bundles, load: Loader, cpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(bundles("bert-mean"), threads=str(len(cpus)), call_tokens="16")
    during: list[set[int]] = []
    run = binding.Binding.run

    def watched(self: binding.Binding, entries: dict[str, str]) -> None:
        during.append(os.sched_getaffinity(0))
        run(self, entries)

    monkeypatch.setattr(binding.Binding, "run", watched)
    one = model.forward(batch_of([[5, 6, 7]]), silent())
    assert during == [{cpus[0]}]
    assert os.sched_getaffinity(0) == set(cpus)
    several = model.forward(batch_of([[5, 6, 7], [8] * 16, [9] * 16]), silent())
    assert len(during) > 2 and all(mask == set(cpus) for mask in during[1:])
    assert np.allclose(several[0], one[0], atol=1e-6)
