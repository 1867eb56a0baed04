"""Cached health: what PONG feeds, when it goes stale, and that reading it touches nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal

import pytest

from engines.protocol.messages import EngineInfo, Hello, PackedCapability, Pong
from synapse_host.config import Windows
from synapse_host.supervision.health import Fault, LaneHealth
from synapse_host.worker.exchange import Exchange
from synapse_host.worker.process import Death
from synapse_host.worker.session import Session
from tests.support.lanes import FAST, crash, lane, lanes_in, on, poison, serve, until

HELLO = Hello(
    v=3,
    nonce="n",
    engine=EngineInfo("owned-cuda", "1.2"),
    pid=1,
    max_frame=1024,
    kernel_revision="r1",
    packed=PackedCapability("tight-v1", [128], 4),
)
FREQUENT = dataclasses.replace(FAST, ping_interval=0.05)


def pong(rss: int, **more) -> Pong:
    return Pong(req_id="1", rss_mb=rss, models_loaded=1, **more)


@pytest.mark.report("microsoft/onnxruntime#9313")
def test_a_generation_s_facts():
    """HELLO starts the age; growth counts from a generation's first PONG, whose facts end with it; HELLO's stay."""
    health = LaneHealth(lane())
    assert health.age(0.0) is None and health.facts.worker_version is None
    health.greeted(HELLO, 100.0)
    assert (health.age(105.0), health.facts.kernel_revision, health.facts.worker_version) == (5.0, "r1", "1.2")
    assert health.facts.packed_widths == [128] and health.facts.rss_mb is None
    for rss in (100, 90, 150):
        health.pong(pong(rss, placement_share=0.97, buckets=[64], ane_resident_shapes={"ane:1": [64]}), 106.0)
    facts = health.facts
    assert (facts.rss_mb, facts.rss_growth_mb, facts.placement_share, facts.buckets) == (150, 50, 0.97, [64])
    assert facts.resident_shapes == {"ane:1": [64]} and facts.resident_packed is None
    details = {"stage": "embed", "cause": "exit", "exit_status": 1, "signal": None, "fingerprint": None}
    health.struck(Death(1, "exit", "m", 7, 1, None, True), details)
    assert health.age(107.0) is None and health.facts.rss_mb is None and health.facts.kernel_revision == "r1"
    assert health.facts.last_fault == Fault(1, 7, "embed", "exit", 1, None, None)
    health.greeted(HELLO, 108.0)
    health.pong(pong(70), 109.0)
    assert (health.facts.rss_growth_mb, health.facts.buckets) == (0, None) and health.facts.last_fault is not None


def test_a_worker_rests_from_its_last_answer_on():
    health = LaneHealth(lane())
    assert not health.rests(1e9, 5.0), "there is no worker"
    health.greeted(HELLO, 100.0)
    assert not health.rests(1e9, 5.0), "its LOAD is still to come"
    health.used = 100.0
    health.pong(pong(100), 104.0)
    assert [health.rests(now, 5.0) for now in (104.9, 105.0)] == [False, True], "a PING is no work"
    health.ended()
    assert not health.rests(1e9, 5.0) and (health.age(110.0), health.facts.rss_mb) == (None, None)


@pytest.mark.process
async def test_ping_feeds_health_never_queues_behind_inference_and_never_spawns(make, tmp_path):
    go, pinged = tmp_path / "go", tmp_path / "pinged"
    rules = [on("PING", {"touch": str(pinged)}), on("EMBED_BATCH", {"wait_for": str(go)})]
    lane = make({"rules": rules, "placement_share": 0.5}, config=FREQUENT)
    await asyncio.sleep(0.2)
    assert lane.health()["generation"] == 0
    await lane.load()
    await until(pinged.exists)
    await until(lambda: lane.health()["rss_mb"] is not None)
    health = lane.health()
    assert health["rss_mb"] > 0 and health["models_loaded"] == 1 and health["placement_share"] == 0.5
    assert health["strikes"] == 0 and lane.counters.abandoned == 0
    request = asyncio.create_task(serve(lane))
    await until(lambda: lane.health()["state"] == "serving")
    pinged.unlink()
    await asyncio.sleep(0.3)
    assert lane.health()["waiting"] == 0 and not pinged.exists()
    go.touch()
    await request
    await until(pinged.exists)
    os.kill(lane.health()["worker_pid"], signal.SIGKILL)
    await until(lambda: lane.health()["worker_pid"] is None)
    await asyncio.sleep(0.2)
    assert lane.health()["generation"] == 1


@pytest.mark.process
async def test_a_ping_that_the_host_has_no_memory_for_holds_up_nobody(make, monkeypatch):
    lane = make(config=FREQUENT)
    await lane.load()
    tried = []

    def starved(session: Session, exchange: Exchange) -> None:
        tried.append(exchange)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Session, "begin", starved)
        await until(lambda: tried)
    await serve(lane)


@pytest.mark.process
async def test_health_goes_unknown_without_news_and_serving_does_not(make, tmp_path):
    go = tmp_path / "go"
    config = dataclasses.replace(FAST, health_stale=0.1)
    lane = make({"rules": [{"on": "EMBED_BATCH", "do": [{"wait_for": str(go)}]}]}, config=config)
    await lane.load()
    await until(lambda: lane.health()["state"] == "unknown")
    request = asyncio.create_task(serve(lane))
    await asyncio.sleep(0.3)
    assert lane.health()["state"] == "serving" and lane.health()["age_s"] > 0.1
    go.touch()
    await request
    assert lane.health()["state"] == "idle"
    assert (await lane.ping())["state"] == "idle"


@pytest.mark.process
async def test_a_worker_that_hangs_while_idle_is_unknown_then_struck(make):
    windows = Windows(setup=20.0, control=20.0, ping=1.0, inference=20.0)
    lane = make(config=dataclasses.replace(FREQUENT, windows=windows, health_stale=0.3))
    await lane.load()
    os.kill(lane.health()["worker_pid"], signal.SIGSTOP)
    await until(lambda: lane.health()["state"] == "unknown")
    await until(lambda: lane.health()["strikes"] == 1)
    assert lane.health()["last_fault"]["cause"] == "silence" and lane.health()["last_fault"]["stage"] == "ping"
    await serve(lane)


class OtherClock(asyncio.SelectorEventLoop):
    """A loop whose clock is a million seconds off: uvloop's may differ from Python's too, on macOS by every sleep."""

    def time(self) -> float:
        return super().time() - 1e6


@pytest.mark.process
@pytest.mark.parametrize(
    "kind",
    # libuv keeps one pipe for signals as long as the process lives.
    ["another clock", pytest.param("uvloop", marks=pytest.mark.leaks_allowed("descriptors"))],
)
def test_a_lane_lives_on_any_loop_and_its_times_are_of_that_loop_s_clock(tmp_path, kind):
    factory = OtherClock if kind == "another clock" else pytest.importorskip("uvloop").new_event_loop
    go = tmp_path / "go"
    script = poison({"wait_for": str(go)}, {"exit": 1})

    async def main() -> None:
        async with lanes_in(tmp_path / "rt") as make:
            lane = make(script)
            await lane.load()
            pinged = await lane.ping()
            assert 0 <= pinged["age_s"] < 60 and lane.counters.ipc.total < 60
            request = asyncio.create_task(crash(lane))
            await until(lambda: lane.health()["state"] == "serving")
            assert 0 <= lane.health()["progress"]["running_s"] < 60
            go.touch()
            await request
            await crash(lane)
            health = lane.health()
            assert health["state"] == "quarantined" and 0 < health["quarantine_remaining_s"] <= 60

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())
