"""Rows about lives: spawn to HELLO, death to READY, what idle workers and health reads cost, memory in bulk work."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import echo_worker
from bench.rounds import Row, Spread, interleaved, row
from bench.wire import SPEC, calls, echo_lane, request
from synapse_host.config import HostConfig
from synapse_host.errors import EngineCrashed
from synapse_host.supervision.supervisor import Supervisor
from synapse_host.worker.listener import RuntimeDirectory
from synapse_host.worker.startup import LaneContext
from tests.support.worker_client import WorkerClient

if TYPE_CHECKING:
    from bench.plan import Plan

GROUP = "lifecycle"
WORKERS = {"llama": ["-m", "engines.llama"], "owned (onnx-cpu)": ["-m", "engines.cuda"]}
IDLE = 16


async def rows(plan: Plan) -> list[Row]:
    """Return every row of this group."""
    return [*await spawn(plan), await death(plan), *await idle(plan), *bulk(plan)]


async def spawn(plan: Plan) -> list[Row]:
    """Spawn to HELLO of our workers, beside an empty interpreter."""

    def bare() -> float:
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-c", ""], check=True)
        return time.perf_counter() - begun

    def hello(arguments: list[str]) -> float:
        begun = time.perf_counter()
        with WorkerClient([sys.executable, *arguments], handshake=False) as worker:
            worker.read_frame()
            return time.perf_counter() - begun

    contestants: dict[str, Any] = {name: lambda a=arguments: hello(a) for name, arguments in WORKERS.items()}
    figures = await interleaved({**contestants, "bare": bare}, 3 * plan.rounds)
    return [
        dataclasses.replace(
            row(figures, name, "bare", group=GROUP, name=f"{name} worker, spawn to HELLO", unit="ms", better="lower",
                scale=1e3, rival_name="an empty interpreter, start to end"),
            target=120.0, absolute=True,
        )
        for name in WORKERS
    ]  # fmt: skip


async def death(plan: Plan) -> Row:
    """SIGKILL of a serving lane's idle worker to the next answered request."""
    values = []
    async with echo_lane(plan.folder, 8, "death") as lane:
        build = request(1, 8, bytes(32))
        for _ in range(3 * plan.rounds):
            await calls(lane, build, 1)  # clears the strike of the round before
            pid = lane.health()["worker_pid"]
            begun = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            while True:
                try:
                    await lane.submit(build, stage="embed")
                    break
                except EngineCrashed:
                    continue
            values.append((time.perf_counter() - begun) * 1e3)
    return Row(
        GROUP, "SIGKILL of the worker to the next answer (fresh worker, LOAD, request)", "ms", "lower",
        ours=Spread.of(values), target=250.0, absolute=True, rounds=len(values), note="an engine that loads nothing",
    )  # fmt: skip


async def idle(plan: Plan) -> list[Row]:
    """The host's CPU time with idle workers, and reading their cached health."""
    seconds = 5.0 if plan.quick else 30.0
    runtime = RuntimeDirectory.open(plan.folder / "idle")
    async with AsyncExitStack() as stack:
        stack.callback(runtime.close)
        lanes = []
        for number in range(IDLE):
            spec = dataclasses.replace(SPEC, lane_id=f"idle{number}", command=echo_worker.command(8))
            lane = Supervisor(LaneContext(spec, HostConfig(), runtime))
            stack.push_async_callback(lane.aclose)
            await lane.load()
            lanes.append(lane)
        shares = []
        for _ in range(1 if plan.quick else 2):
            begun, used = time.perf_counter(), time.process_time()
            await asyncio.sleep(seconds)
            shares.append(100 * (time.process_time() - used) / (time.perf_counter() - begun))
        reads = []
        for _ in range(plan.rounds):
            begun = time.perf_counter()
            for _ in range(250):
                for lane in lanes:
                    lane.health()
            reads.append((time.perf_counter() - begun) / (250 * IDLE) * 1e6)
    return [
        Row(GROUP, f"host CPU with {IDLE} idle workers", "%", "lower", ours=Spread.of(shares), target=0.2,
            absolute=True, rounds=len(shares), note=f"{seconds:g} s each; a PING a worker every 10 s"),
        Row(GROUP, "cached health of one lane", "µs", "lower", ours=Spread.of(reads), target=5.0, absolute=True,
            rounds=len(reads)),
    ]  # fmt: skip


def bulk(plan: Plan) -> list[Row]:
    """A large file through the host in a process of its own: texts a second and what the memory grows by."""
    lines = 20_000 if plan.quick else 1_000_000
    command = [sys.executable, "-m", "bench.bulk", str(plan.folder), str(lines)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).resolve().parents[1])
    if done.returncode:
        return [Row(GROUP, f"{lines} lines, one worker", "texts/s", "higher", status="failed", note=done.stderr[-300:])]
    rate, growth, peak = map(float, done.stdout.split())
    note = f"an engine that computes nothing, so this is host and tokenizer; peak {peak:.0f} MiB"
    return [
        Row(GROUP, f"{lines} lines to .npy, one worker", "texts/s", "higher", ours=Spread.of([rate]), rounds=1,
            note=note),
        Row(GROUP, f"memory grown from a tenth to the end of {lines} lines", "MiB", "lower", ours=Spread.of([growth]),
            target=16.0, absolute=True, rounds=1, note="the host's resident set, the mapped output left out"),
    ]  # fmt: skip
