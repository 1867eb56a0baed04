"""Rows about the wire: echo latency, large frames both ways, what the host adds to a reply."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import echo_worker, machine
from bench.floor import Floor
from bench.rounds import Row, Spread, interleaved, p50, row
from engines.protocol.messages import EmbedBatch, Item, Pooling
from synapse_host.config import HostConfig
from synapse_host.placement.spec import LaneSpec, LoadSpec
from synapse_host.supervision.supervisor import Supervisor
from synapse_host.worker.listener import RuntimeDirectory
from synapse_host.worker.startup import LaneContext

if TYPE_CHECKING:
    from bench.plan import Plan

GROUP = "wire"
ECHO_DIMS = 1024
LENGTHS = (256, 1024, 4096, 16384, 49152, 262144)
"""Bytes of the echo's raw frames: latency against length."""
TARGET_BYTES = 4096
MIB = 1024 * 1024
SPEC = LaneSpec(
    lane_id="echo",
    model="echo",
    kind="catalog",
    engine_id="echo",
    expected_engine="llama.cpp-worker",
    owned=False,
    device="cpu",
    command=(),
    load=LoadSpec("none", "sha256:" + "0" * 64, "gguf"),
)


@asynccontextmanager
async def echo_lane(folder: Path, dims: int, name: str = "echo") -> AsyncIterator[Supervisor]:
    """Run one lane over the echo worker."""
    runtime = RuntimeDirectory.open(folder / name)
    spec = dataclasses.replace(SPEC, lane_id=name, command=echo_worker.command(dims))
    supervisor = Supervisor(LaneContext(spec, HostConfig(), runtime))
    try:
        await supervisor.load()
        yield supervisor
    finally:
        await supervisor.aclose()
        runtime.close()


def request(rows: int, tokens: int, ids: Any) -> Any:
    """Return a build of *rows* equal rows over the raw buffer *ids*."""
    items = [Item(id=str(index), n_tokens=tokens) for index in range(rows)]

    def build(req_id: str, model_ref: str) -> tuple[EmbedBatch, Any]:
        return EmbedBatch(req_id=req_id, model_ref=model_ref, pooling=Pooling.MEAN, normalize=True, items=items), ids

    return build


async def calls(supervisor: Supervisor, build: Any, count: int) -> list[float]:
    """Return the seconds of each of *count* calls, one after the other."""
    clock = time.perf_counter
    times = []
    for _ in range(count):
        begun = clock()
        await supervisor.submit(build, stage="embed")
        times.append(clock() - begun)
    return times


async def rows(plan: Plan) -> list[Row]:
    """Return every row of this group."""
    return [*await echo(plan), *await frames(plan), await reply_overhead(plan)]


async def echo(plan: Plan) -> list[Row]:
    """Return the 4 KiB echo with both ends on one core and on two, and latency against length."""
    found: list[Row] = []
    floor = Floor(plan.folder)
    try:
        for size in LENGTHS:
            for name, placed in machine.placements().items():
                if size != TARGET_BYTES and name != machine.ONE_CORE:
                    continue
                found.append(await _echo(plan, floor, size, name, placed))
    finally:
        floor.close()
    return found


async def _echo(plan: Plan, floor: Floor, size: int, name: str, placed: tuple[set[int], set[int]] | None) -> Row:
    import numpy as np

    dims = size // 4
    raw = np.zeros(dims, np.int32).tobytes()
    count = plan.scaled(400 if size <= 16384 else 100)
    async with echo_lane(plan.folder, dims, f"echo{size}") as lane:
        build = request(1, dims, raw)

        async def ours() -> float:
            return p50(await calls(lane, build, count))

        def theirs() -> float:
            return p50(floor_echo(floor, raw, count))

        worker = lane.health()["worker_pid"]
        with machine.placed(placed, [floor.process.pid, worker]), machine.spinners():
            await calls(lane, build, 200)
            figures = await interleaved({"ours": ours, "floor": theirs}, plan.rounds)
    return row(
        figures,
        "ours",
        "floor",
        group=GROUP,
        name=f"echo of {_size(size)} each way, {name}, p50",
        unit="µs",
        better="lower",
        scale=1e6,
        rival_name="two blocking processes",
        target=(0.10 if name == machine.ONE_CORE else 0.30) if size == TARGET_BYTES else None,
        note="one low-priority spinner per core",
        extra={"bytes": size} if name == machine.ONE_CORE else None,
    )


def floor_echo(floor: Floor, raw: bytes, count: int) -> list[float]:
    """Echo through the floor, whatever the size."""
    if len(raw) <= 49152:
        return floor.echo(raw, count)
    return [floor.send(raw) + floor.fetch(len(raw)) for _ in range(count)]


async def frames(plan: Plan) -> list[Row]:
    """Return 1, 16 and 64 MiB frames, to the worker and back."""
    import numpy as np

    whole = sys.version_info >= (3, 12)
    target = 0.80 if whole else 0.66
    note = f"Python {sys.version_info.major}.{sys.version_info.minor}: {'whole' if whole else 'sliced'} writes; floor: "
    note += "a receiver into a fresh array"
    found = []
    floor = Floor(plan.folder)
    try:
        for mib in (1, 16, 64):
            # The reply of the large request is one row of one number, and the other way round.
            size = mib * MIB - (256 if mib == 64 else 0)
            ids = np.zeros(size // 4, np.int32)
            count = max(4, plan.scaled(128 // mib))
            async with (
                echo_lane(plan.folder, 1, f"up{mib}") as up,
                echo_lane(plan.folder, size // 4, f"down{mib}") as down,
            ):
                large, small = request(1, size // 4, ids.data), request(1, 1, np.zeros(1, np.int32).data)

                async def sent(lane: Any, build: Any, count: int = count) -> float:
                    return p50(await calls(lane, build, count))

                contestants = {
                    "to": lambda up=up, large=large: sent(up, large),
                    "floor to": lambda ids=ids, count=count: p50([floor.send(ids.data) for _ in range(count)]),
                    "from": lambda down=down, small=small: sent(down, small),
                    "floor from": lambda size=size, count=count: p50([floor.fetch(size) for _ in range(count)]),
                }
                # No spinners: a core that computes for milliseconds is awake, and the two ends need both.
                await interleaved(contestants, 2)
                figures = await interleaved(contestants, plan.rounds)
            for way, label in (("to", "host to worker"), ("from", "worker to host")):
                figures[way + " rate"] = [size / MIB / 1024 / value for value in figures[way]]
                figures["floor rate"] = [size / MIB / 1024 / value for value in figures["floor " + way]]
                found.append(
                    row(
                        figures,
                        way + " rate",
                        "floor rate",
                        group=GROUP,
                        name=f"{mib} MiB frame, {label}",
                        unit="GiB/s",
                        better="higher",
                        rival_name="two blocking processes",
                        target=0.40 if mib == 1 else target,
                        note=note,
                    )
                )
    finally:
        floor.close()
    return found


async def reply_overhead(plan: Plan) -> Row:
    """Return what everything but the engine adds to an embed call whose reply is 128 KiB (32 x 1024 floats)."""
    import numpy as np

    ids = np.zeros(32 * 32, np.int32)
    async with echo_lane(plan.folder, 1024, "reply") as lane:
        build = request(32, 32, ids.data)
        await calls(lane, build, 200)
        with machine.spinners():
            values = [p50(await calls(lane, build, plan.scaled(200))) * 1e6 for _ in range(plan.rounds)]
    return Row(
        group=GROUP,
        name="added to an embed reply of 128 KiB, p50",
        unit="µs",
        better="lower",
        ours=Spread.of(values),
        target=200.0,
        absolute=True,
        rounds=len(values),
        note="32 rows of 32 ids in, 32 x 1024 floats out, an engine that computes nothing",
    )


def _size(size: int) -> str:
    return f"{size} B" if size < 1024 else f"{size // 1024} KiB"


if __name__ == "__main__":
    from bench.plan import Plan

    with Plan.make(quick=True) as small:
        for line in asyncio.run(rows(small)):
            print(line.name, line.ours, line.rival, line.ratio)
