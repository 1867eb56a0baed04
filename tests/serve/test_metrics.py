"""The Prometheus text of a host: names, labels and values, from real lanes."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from synapse_host.errors import EngineCrashed, InvalidRequest
from synapse_host.host import Host
from synapse_host.serve import metrics
from tests.serve.conftest import Serve
from tests.support.small_bundle import write_bundle, write_matrix

pytestmark = pytest.mark.process

NAMES = {
    "requests_total": "counter",
    "request_duration_seconds": "histogram",
    "ipc_overhead_seconds": "histogram",
    "progress_gap_seconds": "gauge",
    "silence_window_seconds": "gauge",
    "restarts_total": "counter",
    "strikes": "gauge",
    "quarantined": "gauge",
    "quarantine_remaining_seconds": "gauge",
    "rss_bytes": "gauge",
    "placement_share": "gauge",
    "load_duration_seconds": "histogram",
    "calls_per_exchange": "histogram",
    "bytes_total": "counter",
    "frames_rejected_total": "counter",
    "abandoned_replies_total": "counter",
    "queue_length": "gauge",
    "info": "gauge",
}


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample by name (without the prefix) and sorted labels."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.name.startswith("synapse_worker_")
            found[sample.name.removeprefix("synapse_worker_"), tuple(sorted(sample.labels.items()))] = sample.value
    return found


def value(text: str, name: str, **labels: str) -> float:
    return samples(text)[name, tuple(sorted({"lane": "embed:toy", **labels}.items()))]


async def test_a_host_at_rest(serve: Serve) -> None:
    async with serve() as up:
        text = metrics.text(up.host)
    for name, kind in NAMES.items():
        assert f"# TYPE synapse_worker_{name} {kind}\n" in text and f"# HELP synapse_worker_{name} " in text
    assert value(text, "strikes") == value(text, "quarantined") == value(text, "quarantine_remaining_seconds") == 0
    assert value(text, "bytes_total", direction="sent") == 0
    assert value(text, "silence_window_seconds", window="inference") == 120
    assert value(text, "silence_window_seconds", window="setup") == 600
    assert not [key for key in samples(text) if key[0] in ("rss_bytes", "placement_share", "progress_gap_seconds")]


async def test_a_host_at_work(serve: Serve) -> None:
    async with serve({"placement_share": 0.5}) as up:
        for _ in range(3):
            await up.host.embed("toy", ["a", "b"])
        with pytest.raises(InvalidRequest):
            await up.host.embed("toy", [""])
        await up.host.ping("toy")
        for seconds in (0.0001, 0.002, 0.002, 99.0):
            up.host.counters["embed"].durations["made_up"].add(seconds)
        text = metrics.text(up.host)
    assert value(text, "requests_total", op="embed", outcome="ok") == 3
    assert value(text, "requests_total", op="ping", outcome="ok") == 1
    assert value(text, "request_duration_seconds_count", op="embed") == 3
    assert value(text, "request_duration_seconds_sum", op="embed") > 0
    assert value(text, "load_duration_seconds_count") == value(text, "ipc_overhead_seconds_count") == 1
    assert value(text, "rss_bytes") > 2**20
    assert value(text, "placement_share") == 0.5
    assert 0 < value(text, "progress_gap_seconds", window="inference") < 120
    assert value(text, "bytes_total", direction="received") > 3 * 2 * 8 * 4
    info = next(labels for name, labels in samples(text) if name == "info")
    assert dict(info) == {"lane": "embed:toy", "model": "toy", "engine": "scripted", "device": "cpu", "state": "idle"}
    for bound, number in {"0.0005": 1, "0.0025": 3, "30.0": 3, "+Inf": 4}.items():
        assert value(text, "request_duration_seconds_bucket", op="made_up", le=bound) == number, "cumulative"


@pytest.mark.parametrize("kind", ["catalog", "legacy"])
async def test_a_quarantined_lane(tmp_path: Path, kind: str) -> None:
    script = {"rules": [{"on": "EMBED_BATCH", "do": [{"bytes": "ffffffff"}, {"sleep": 60}]}]}
    bundle = write_bundle(tmp_path / "toy", model_id="toy")
    async with Host.open(write_matrix(tmp_path, script, kind=kind), {"toy": bundle}) as host:
        for _ in range(2):
            with pytest.raises(EngineCrashed):
                await host.embed("toy", ["a"])
        text = metrics.text(host)
    assert (value(text, "strikes"), value(text, "quarantined")) == (2, 1)
    remaining = value(text, "quarantine_remaining_seconds")
    assert remaining == float("inf") if kind == "legacy" else 500 < remaining <= 600
    assert value(text, "frames_rejected_total", reason="oversize") == 2
    assert value(text, "restarts_total", reason="protocol") == 1
    assert value(text, "requests_total", op="embed", outcome="engine_crashed") == 2


async def test_another_thread_may_ask_while_the_lanes_work(serve: Serve) -> None:
    """An application's own registry is scraped on a thread of prometheus-client."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        async with serve() as up:
            counts = up.host.counters["embed"]
            for n in range(500):
                counts.durations[f"op{n}"].add(0.1)
            asking = asyncio.gather(*(asyncio.to_thread(metrics.text, up.host) for _ in range(4)))
            while not asking.done():
                counts.durations[f"op{len(counts.durations)}"].add(0.1)
                await asyncio.sleep(0)
            await asking
            assert len(counts.durations) > 500
            assert (await asyncio.to_thread(up.host.health))["lanes"]["embed"]["state"] == "idle"
    finally:
        sys.setswitchinterval(before)


async def test_a_second_model_changes_no_series(tmp_path: Path) -> None:
    matrix = write_matrix(tmp_path)
    models = {name: write_bundle(tmp_path / name, model_id=name) for name in ("toy", "second")}
    for installed in ({"toy": models["toy"]}, models):
        async with Host.open(matrix, installed) as host:
            found = {dict(labels)["lane"] for _, labels in samples(metrics.text(host))}
            assert found == {f"embed:{name}" for name in installed}


def test_the_documented_metrics_are_these() -> None:
    text = Path(__file__).parents[2].joinpath("docs", "operations.md").read_text()
    section = text.partition("\n## Metrics\n")[2].partition("\n## ")[0]
    documented = re.findall(r"`(\w+)`", section.partition("\n- ")[2])
    assert sorted(documented) == sorted(NAMES)
