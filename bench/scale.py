"""Rows about many at once: callers of one model, busy lanes, installed models."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import texts
from bench.models import host
from bench.rounds import Row, Spread, interleaved, row
from bench.wire import calls, echo_lane, request
from synapse_host.models import catalogue
from tests.support.small_bundle import write_bundle

if TYPE_CHECKING:
    from bench.plan import Plan

GROUP = "scale"
CALLERS = (1, 4, 16, 64)
LANES = 16
MODELS = 10_000


async def rows(plan: Plan) -> list[Row]:
    """Return every row of this group."""
    return [*await callers(plan), await busy_lanes(plan), many_models(plan)]


async def callers(plan: Plan) -> list[Row]:
    """Callers that each wait for an answer before the next call of one mixed text: what more of them do to the rate."""
    bundle = catalogue.obtain("minilm", plan.models_dir)
    sentences = texts.mix(bundle.root / "tokenizer.json", 64 if plan.quick else 256)
    waits: dict[str, list[float]] = {}
    async with host(plan, "minilm", "embed", "onnx-cpu") as opened:

        async def turn(count: int) -> float:
            """Return texts a second of *count* callers that share the sentences out among them."""
            left = iter(sentences)

            async def caller() -> None:
                for sentence in left:
                    begun = time.perf_counter()
                    await opened.embed("minilm", [sentence])
                    waits.setdefault(str(count), []).append(time.perf_counter() - begun)

            begun = time.perf_counter()
            await asyncio.gather(*(caller() for _ in range(count)))
            return len(sentences) / (time.perf_counter() - begun)

        contestants: dict[str, Any] = {str(count): lambda count=count: turn(count) for count in CALLERS}
        await interleaved(contestants, 1)
        waits.clear()
        figures = await interleaved(contestants, plan.rounds)

    def note(count: int) -> str:
        p50, p99 = (statistics.quantiles(waits[str(count)], n=100)[place] * 1e3 for place in (49, 98))
        return f"a call: p50 {p50:.0f} ms, p99 {p99:.0f} ms, p99/p50 {p99 / p50:.1f}"

    one = Row(GROUP, "onnx-cpu: one caller, one mixed text a call", "texts/s", "higher", ours=Spread.of(figures["1"]),
              rounds=plan.rounds, note=note(1))  # fmt: skip
    return [one] + [
        row(figures, str(count), "1", group=GROUP, name=f"onnx-cpu: {count} callers, one mixed text a call",
            unit="texts/s", better="higher", rival_name="one caller", target=0.95, note=note(count))
        for count in CALLERS[1:]
    ]  # fmt: skip


async def busy_lanes(plan: Plan) -> Row:
    """All lanes of a host busy with an engine that computes nothing: what the host itself does a second."""
    build = request(1, 8, bytes(32))
    each = plan.scaled(200)
    async with AsyncExitStack() as stack:
        lanes = [await stack.enter_async_context(echo_lane(plan.folder, 8, f"busy{n}")) for n in range(LANES)]
        times: list[float] = []

        async def turn(count: int) -> float:
            begun = time.perf_counter()
            for waited in await asyncio.gather(*(calls(lane, build, LANES * each // count) for lane in lanes[:count])):
                times.extend(waited if count == LANES else [])
            return LANES * each / (time.perf_counter() - begun)

        await turn(LANES)
        times.clear()
        figures = await interleaved({"all": lambda: turn(LANES), "one": lambda: turn(1)}, plan.rounds)
    p50, p99 = (statistics.quantiles(times, n=100)[place] * 1e3 for place in (49, 98))
    return row(
        figures, "all", "one", group=GROUP, name=f"{LANES} busy lanes of an engine that computes nothing",
        unit="calls/s", better="higher", rival_name="one such lane", target=0.9,
        note=f"a call: p50 {p50:.2f} ms, p99 {p99:.2f} ms, p99/p50 {p99 / p50:.1f}",
    )  # fmt: skip


def many_models(plan: Plan) -> Row:
    """List a folder of many models, from the command's start to its end."""
    folder = plan.folder / "many"
    manifest = write_bundle(plan.folder / "one-of-many").joinpath("manifest.json").read_bytes()
    for number in range(MODELS):
        place = folder / f"model-{number:05}"
        place.mkdir(parents=True)
        place.joinpath("manifest.json").write_bytes(manifest)
    command = [sys.executable, "-m", "synapse_host", "models", "--models-dir", str(folder)]
    values = []
    for _ in range(1 if plan.quick else 3):
        begun = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).resolve().parents[1])
        values.append(time.perf_counter() - begun)
        if done.stdout.count("model-") != MODELS:
            return Row(GROUP, f"synapse models with {MODELS:,}", "s", "lower", status="failed", note=done.stderr[-300:])
    return Row(
        GROUP, f"synapse models with {MODELS:,}", "s", "lower", ours=Spread.of(values), target=1.0, absolute=True,
        rounds=len(values), note="a fresh process, manifests in the page cache",
    )  # fmt: skip
