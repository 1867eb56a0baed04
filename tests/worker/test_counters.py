"""What lanes count: requests by outcome, silence against its window, restarts, breaches, bytes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from synapse_host.errors import EngineCrashed, QueueFull
from synapse_host.worker.counters import Histogram, LaneCounters
from tests.support.lanes import embed, on

# --- pure ------------------------------------------------------------------------------------------------------------


def test_a_histogram_counts_up_to_and_including_its_bounds():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        histogram.add(value)
    assert histogram.counts == [2, 2, 1] and histogram.total == 8.0


def test_outcomes():
    counters = LaneCounters()
    with counters.call("load"):
        pass
    for error in (QueueFull("full"), asyncio.CancelledError(), GeneratorExit(), ValueError()):
        with pytest.raises(type(error)), counters.call("embed"):
            raise error
    assert counters.requests == {
        ("load", "ok"): 1,
        ("embed", "queue_full"): 1,
        ("embed", "cancelled"): 2,
        ("embed", "internal_error"): 1,
    }
    assert sum(counters.durations["load"].counts) == 1 and "embed" not in counters.durations


# --- lanes -----------------------------------------------------------------------------------------------------------


@pytest.mark.process
async def test_a_lane_counts_what_its_callers_got(make, tmp_path: Path):
    dies = {"rules": [on("EMBED_BATCH", {"signal": "SIGKILL"}, nth=2)]}
    lane = make({"state": str(tmp_path / "spawns"), "generations": [dies, {}]})
    counters = lane.counters
    await lane.submit(embed([1, 2]), stage="embed")
    with pytest.raises(EngineCrashed):
        await lane.submit(embed([1, 2]), stage="embed")
    assert counters.restarts == {}
    await lane.submit(embed([1, 2]), stage="embed")
    await lane.ping()
    await lane.unload()
    await lane.load()
    assert counters.requests == {
        ("embed", "ok"): 2,
        ("embed", "engine_crashed"): 1,
        ("ping", "ok"): 1,
        ("unload", "ok"): 1,
        ("load", "ok"): 1,
    }
    assert sum(counters.durations["embed"].counts) == 2
    # LOAD of two generations and the reload; the PING's round trip; a replacement by how the first one ended.
    assert sum(counters.loads.counts) == 3 and counters.last_load_s is not None
    assert sum(counters.ipc.counts) == 1 and counters.ipc.total > 0
    assert sum(counters.restarts.values()) == 1 and set(counters.restarts) <= {"exit", "eof"}
    assert set(counters.gaps) == {"setup", "inference", "ping", "control"}
    assert counters.sent > 0 and counters.received > 0 and counters.rejected == {}


@pytest.mark.process
@pytest.mark.parametrize(
    ("reason", "bytes", "end"),
    [("malformed", "05000000" + b"hello".hex(), {"sleep": 60}), ("torn", "64000000" + "00" * 5, {"exit": 3})],
)
async def test_breaches_by_reason(make, reason, bytes, end):
    lane = make({"rules": [on("EMBED_BATCH", {"bytes": bytes}, end)]})
    with pytest.raises(EngineCrashed):
        await lane.submit(embed([1]), stage="embed")
    assert lane.counters.rejected == {reason: 1}
