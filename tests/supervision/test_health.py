"""Cached health: what PONG feeds, when it goes stale, and that reading it touches nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal

import pytest

from engines.protocol.messages import EngineInfo, Hello, PackedCapability, Pong
from synapse_host.config import Windows
from synapse_host.errors import EngineCrashed
from synapse_host.supervision.health import LaneHealth, Refresher
from tests.support.lanes import FAST, crash, lanes_in, on, poison, serve, until

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


def test_a_greeting_starts_the_age_and_keeps_what_hello_said():
    health = LaneHealth()
    assert health.stale(0.0, 30.0) and health.fields(0.0)["age_s"] is None
    health.greeted(HELLO, 100.0)
    fields = health.fields(105.0)
    assert (fields["age_s"], fields["kernel_revision"], fields["worker_version"]) == (5.0, "r1", "1.2")
    assert fields["packed_widths"] == [128] and fields["rss_mb"] is None


@pytest.mark.parametrize(("age", "stale"), [(0.0, False), (30.0, False), (30.001, True)])
def test_staleness(age, stale):
    health = LaneHealth()
    health.greeted(HELLO, 100.0)
    assert health.stale(100.0 + age, 30.0) is stale


def test_growth_counts_from_the_first_pong_of_a_generation():
    health = LaneHealth()
    health.greeted(HELLO, 0.0)
    for rss in (100, 90, 150):
        health.pong(pong(rss), 1.0)
    assert (health.fields(1.0)["rss_mb"], health.fields(1.0)["rss_growth_mb"]) == (150, 50)
    health.greeted(HELLO, 2.0)
    health.pong(pong(70), 3.0)
    assert health.fields(3.0)["rss_growth_mb"] == 0


def test_everything_a_pong_may_say():
    health = LaneHealth()
    health.pong(pong(1, placement_share=0.97, buckets=[64], ane_resident_shapes={"ane:1": [64]}), 0.0)
    fields = health.fields(0.0)
    assert (fields["placement_share"], fields["buckets"]) == (0.97, [64])
    assert fields["resident_shapes"] == {"ane:1": [64]} and fields["resident_packed"] is None


def test_the_refresher_stops():
    async def main():
        calls = []
        refresher = Refresher(0.001, lambda: calls.append(1))
        refresher.start()
        refresher.start()
        while len(calls) < 3:
            await asyncio.sleep(0.001)
        refresher.stop()
        refresher.stop()
        count = len(calls)
        await asyncio.sleep(0.02)
        assert len(calls) == count

    asyncio.run(main())


@pytest.mark.process
async def test_states_of_a_lane_and_json(make, tmp_path):
    go, loaded = tmp_path / "go", tmp_path / "loaded"
    lane = make({"rules": [on("LOAD", {"wait_for": str(loaded)}), on("EMBED_BATCH", {"wait_for": str(go)})]})
    request = asyncio.create_task(serve(lane))
    assert lane.health()["state"] == "stopped"
    await until(lambda: lane.health()["state"] == "loading")
    loaded.touch()
    await until(lambda: lane.health()["state"] == "serving")
    go.touch()
    await request
    assert lane.health()["state"] == "idle"
    health = json.loads(json.dumps(lane.health()))
    wanted = "state engine device worker_pid generation strikes quarantine_remaining_s age_s rss_mb models"
    assert set(wanted.split()) <= set(health)


@pytest.mark.process
async def test_ping_feeds_health_in_the_background(make):
    lane = make({"placement_share": 0.5}, config=FREQUENT)
    await lane.load()
    await until(lambda: lane.health()["rss_mb"] is not None)
    health = lane.health()
    assert health["rss_mb"] > 0 and health["models_loaded"] == 1 and health["placement_share"] == 0.5
    assert health["strikes"] == 0 and lane.counters.abandoned == 0


@pytest.mark.process
async def test_ping_never_queues_behind_inference_and_never_spawns(make, tmp_path):
    go, pinged = tmp_path / "go", tmp_path / "pinged"
    rules = [on("PING", {"touch": str(pinged)}), on("EMBED_BATCH", {"wait_for": str(go)})]
    lane = make({"rules": rules}, config=FREQUENT)
    await asyncio.sleep(0.2)
    assert lane.health()["generation"] == 0
    await lane.load()
    await until(pinged.exists)
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


@pytest.mark.process
async def test_a_request_behind_a_ping_is_served(make):
    lane = make({"rules": [{"on": "PING", "do": [{"sleep": 0.05}]}]}, config=FREQUENT)
    for n in range(1, 20):
        await serve(lane, n)
        await asyncio.sleep(0.01)
    assert lane.health()["generation"] == 1
    await lane.unload()


@pytest.mark.process
async def test_a_wrong_pong_is_a_protocol_fault(make):
    lane = make({"rules": [{"on": "PING", "do": [{"reply": {"set": {"req_id": "other"}}}, {"sleep": 600}]}]})
    await lane.load()
    with pytest.raises(EngineCrashed) as caught:
        await lane.ping()
    assert caught.value.details["cause"] == "protocol" and caught.value.details["stage"] == "ping"


class OtherClock(asyncio.SelectorEventLoop):
    """A loop whose clock is a million seconds off: uvloop's may differ from Python's too, on macOS by every sleep."""

    def time(self) -> float:
        return super().time() - 1e6


@pytest.mark.process
def test_ages_and_remaining_times_are_of_the_loop_s_own_clock(tmp_path):
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

    with asyncio.Runner(loop_factory=OtherClock) as runner:
        runner.run(main())
