"""Each setting of HostConfig governs what its name says, through a host."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from synapse_host.config import HostConfig
from synapse_host.errors import DeadlineExceeded, EngineCrashed
from synapse_host.host import Host
from tests.support.small_bundle import write_bundle, write_matrix

pytestmark = pytest.mark.process


async def test_permits_bound_how_many_lanes_compute_at_once(tmp_path: Path) -> None:
    go = tmp_path / "go"
    lanes = {name: {"task": "embed", "engines": ["scripted"]} for name in ("embed", "other")}
    held = {"on": "serving", "first_id": 13, "do": [{"wait_for": str(go)}]}
    matrix = write_matrix(tmp_path, {"rules": [held]}, lanes=lanes)
    models = {"toy": write_bundle(tmp_path / "toy")}
    async with Host.open(matrix, models, HostConfig(permits={"cpu": 1})) as host:
        await asyncio.gather(host.load("toy", lane="embed"), host.load("toy", lane="other"))
        first = asyncio.create_task(host.embed_ids("toy", [[13]], lane="embed"))
        while host.health()["lanes"]["embed"]["state"] != "serving":
            await asyncio.sleep(0.01)
        with pytest.raises(DeadlineExceeded):
            await host.embed_ids("toy", [[7]], lane="other", deadline=1.0)
        go.touch()
        await first
        await host.embed_ids("toy", [[7]], lane="other")


async def test_the_log_is_kept_and_forwarded_within_its_bounds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = [{"stderr": f"line {number:04}"} for number in range(100)]
    matrix = write_matrix(tmp_path, {"rules": [{"on": "serving", "do": [*words, {"exit": 3}]}]})
    models = {"toy": write_bundle(tmp_path / "toy")}
    with caplog.at_level(logging.INFO):
        async with Host.open(matrix, models, HostConfig(log_ring_bytes=100, log_lines_per_s=5)) as host:
            with pytest.raises(EngineCrashed) as caught:
                await host.embed("toy", ["a"])
    tail = caught.value.details["log_tail"]
    assert "line 0099" in tail and len(tail.replace("[stderr] ", "")) <= 101
    # Five a second; fifty, which is the default, would be half of them at once.
    assert 0 < sum("line 00" in record.getMessage() for record in caplog.records) < 40
