"""Figures of the worker runtime: spawn to HELLO, idle memory, the end with the host, an exchange's floor.

Run with ``pytest -m bench tests/benchmarks``. Limits come from issue A, "It must reach".
"""

from __future__ import annotations

import os
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.protocol.messages import EmbedBatch, Item, Ping, Pong, Pooling, Vectors
from tests.support.peer import WorkerProcess
from tests.support.scripted import command

pytestmark = [pytest.mark.bench, pytest.mark.process]
PROGRAMS = {
    "scripted": command(),
    **{name: [sys.executable, "-m", f"engines.{name}"] for name in ("llama", "cuda", "ane")},
}
DIGEST = "sha256:" + "0" * 64

Report = Callable[[str, object], None]


@pytest.fixture
def report(record_property: Report, capsys: pytest.CaptureFixture[str]) -> Report:
    def tell(name: str, value: object) -> None:
        record_property(name, value)
        with capsys.disabled():
            print(f"\n    {name}: {value}", end="")

    return tell


def bare_python() -> float:
    """Seconds that an empty interpreter takes here and now: what every worker pays before its first line."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", ""], check=True)
    return time.perf_counter() - started


@pytest.mark.parametrize("name", PROGRAMS)
def test_spawn_to_hello_is_under_120_ms(name: str, runtime_dir: Path, report: Report) -> None:
    times, floors, sizes = [], [], []
    for _ in range(11):
        floors.append(bare_python())
        started = time.perf_counter()
        with WorkerProcess(PROGRAMS[name], runtime_dir) as worker:
            worker.end.event()
            times.append(time.perf_counter() - started)
    with WorkerProcess(PROGRAMS[name], runtime_dir) as worker:
        worker.end.shake_hands()
        for index in range(3):
            pong = worker.end.call(Ping(f"p{index}")).reply
            assert isinstance(pong, Pong)
            sizes.append(pong.rss_mb)
    median = statistics.median(times)
    report(f"{name} spawn to HELLO, median ms", round(median * 1000, 1))
    report(f"{name} empty interpreter, median ms", round(statistics.median(floors) * 1000, 1))
    report(f"{name} resident before LOAD, MiB", max(sizes))
    assert median < 0.120
    assert max(sizes) < 40


def test_a_worker_in_a_c_call_is_gone_within_50_ms_of_its_host(runtime_dir: Path, report: Report) -> None:
    times = []
    for index in range(10):
        started = runtime_dir / f"started-{index}"
        script = {"rules": [{"on": "PING", "do": [{"touch": str(started)}, {"ccall": 3600}]}]}
        with WorkerProcess(command(script), runtime_dir) as worker:
            worker.end.shake_hands()
            worker.end.send(Ping("p"))
            while not started.exists():
                time.sleep(0.001)
            time.sleep(0.02)
            begun = time.perf_counter()
            worker.end.close()
            assert os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1]) == 0
            times.append(time.perf_counter() - begun)
            worker.process.returncode = 0
    report("host gone to worker reaped in a C call, median and worst ms", [round(t * 1000, 2) for t in _spread(times)])
    assert max(times) < 0.050


def test_exchange_latency_of_the_worker_side(runtime_dir: Path, report: Report) -> None:
    with WorkerProcess(command({"vectors": "echo", "dims": 1024}), runtime_dir) as worker:
        worker.end.shake_hands()
        ref = worker.load("x", DIGEST)
        raw = struct.pack("<1024i", *range(1024))
        times = []
        for index in range(3000):
            request = EmbedBatch(f"e{index}", ref, Pooling.MEAN, True, [Item("0", 1024)])
            begun = time.perf_counter()
            reply = worker.end.call(request, raw).reply
            times.append(time.perf_counter() - begun)
            assert isinstance(reply, Vectors)
        worker.stop()
    report("echo of 4 KiB each way, blocking host, p50 and worst us", [round(t * 1e6) for t in _spread(times[500:])])


def _spread(values: list[float]) -> tuple[float, float]:
    return statistics.median(values), max(values)
