"""Birth of a worker generation: every way a handshake can go, with real processes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import socket

import psutil
import pytest

from synapse_host.errors import LaneRefused, QueueFull
from synapse_host.worker import handshake, listener
from tests.support.lanes import CUDA, FAST, crash, on, serve, spawns, until

pytestmark = pytest.mark.process


# --- deployment errors: typed, permanent, no strike, no respawn storm -----------------------------------------------


async def test_a_deployment_error_refuses_the_lane_until_unload(make, tmp_path):
    state = tmp_path / "state"
    lane = make({"hello": [{"hello": {"v": 2}}], "state": str(state)})
    for _ in range(3):
        with pytest.raises(LaneRefused) as caught:
            await serve(lane)
        assert caught.value.details == {"lane_id": "toy", "reason": "version", "expected": 3, "observed": 2}
        assert spawns(state) == 1
    health = lane.health()
    assert (health["state"], health["strikes"], health["worker_pid"]) == ("refused", 0, None)
    await lane.unload()
    assert lane.health()["state"] == "stopped"
    with pytest.raises(LaneRefused):
        await serve(lane)
    assert spawns(state) == 2
    # An explicit load is the reload that tries again at once.
    with pytest.raises(LaneRefused):
        await lane.load()
    assert spawns(state) == 3


async def test_a_kernel_revision_that_changes_between_generations_is_refused(make, tmp_path):
    script = {
        "engine": "owned-cuda",
        "state": str(tmp_path / "state"),
        "generations": [
            {"kernel_revision": "r1", "rules": [on("EMBED_BATCH", {"exit": 1})]},
            {"kernel_revision": "r2"},
        ],
    }
    lane = make(script, **CUDA)
    await crash(lane)
    with pytest.raises(LaneRefused) as caught:
        await serve(lane)
    assert caught.value.details["reason"] == "kernel_revision"
    assert (caught.value.details["expected"], caught.value.details["observed"]) == ("r1", "r2")


# --- nonsense and death before the ACK: strikes -----------------------------------------------------------------------

NONSENSE = {
    "wrong nonce": [{"hello": {"nonce": "feedface" * 2}}],
    "the parent's pid": [{"hello": {"pid": os.getpid()}}],
    "not JSON": [{"bytes": "02000000"}, {"text": "no"}],
    "PONG behind HELLO": [{"hello": {}}, {"frame": {"type": "PONG", "req_id": "1", "rss_mb": 1, "models_loaded": 0}}],
}
"""One of each kind: what the wire refuses is in the vectors, what a HELLO may say in test_handshake."""


@pytest.mark.parametrize("case", NONSENSE)
async def test_nonsense_before_the_ack_is_a_strike_each(make, tmp_path, case, caplog):
    caplog.set_level(logging.DEBUG)
    state = tmp_path / "state"
    lane = make({"hello": [*NONSENSE[case], {"sleep": 600}], "state": str(state)})
    first = await crash(lane)
    # PONG may also be read behind the ACK: out of turn all the same.
    assert first.details["cause"] == "handshake" or case.startswith("PONG")
    assert first.details["quarantined"] is False
    assert "feedface" not in json.dumps(first.to_dict()) + caplog.text, "no nonce is told to anybody"
    assert lane.health()["strikes"] == 1 and lane.health()["worker_pid"] is None
    second = await crash(lane)
    assert second.details["quarantined"] is True
    await crash(lane)
    assert spawns(state) == 2


@pytest.mark.parametrize(
    ("script", "status", "signal"),
    [
        ({"start": [{"stderr": "import failed"}, {"exit": 3}]}, 3, None),
        ({"hello": [{"stderr": "import failed"}, {"signal": "SIGABRT"}]}, None, "SIGABRT"),
    ],
)
async def test_death_before_the_ack_is_told_at_once(make, script, status, signal):
    # The handshake's time is not waited for.
    lane = make(script, config=dataclasses.replace(FAST, handshake=600.0))
    details = (await crash(lane)).details
    assert (details["cause"], details["exit_status"], details["signal"]) == ("handshake", status, signal)
    assert details["log_tail"].startswith("[stderr] import failed")
    assert lane.health()["strikes"] == 1


async def test_a_lane_closed_while_a_failed_handshake_is_looked_into_leaves_no_process(make, tmp_path):
    """The connection has ended, and a moment is granted for an exit that explains it: there the close comes."""
    report = tmp_path / "report"
    lane = make({"start": [{"report": str(report)}], "hello": [{"close": True}, {"sleep": 600}], "ignore": ["EOF"]})
    loading = asyncio.create_task(lane.load())
    await until(report.exists)
    pid = json.loads(report.read_text())["pid"]
    await until(lambda: not list(make.runtime.workers.iterdir()))
    await lane.aclose()
    assert not psutil.pid_exists(pid)
    with pytest.raises(QueueFull):
        await loading


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ({"start": [{"sleep": 600}]}, "did not connect"),
        ({"ignore": ["SIGTERM"], "hello": [{"bytes": "64000000" + "00" * 10}, {"sleep": 600}]}, "sent no HELLO"),
    ],
)
async def test_one_deadline_bounds_the_handshake(make, script, text):
    lane = make(script, config=dataclasses.replace(FAST, handshake=3.0))
    error = await crash(lane)
    assert text in error.message and error.details["cause"] == "handshake"
    assert lane.health()["strikes"] == 1


@pytest.mark.parametrize("told_by", ["pid", "uid"])
@pytest.mark.report("python/cpython#124779")
async def test_a_foreign_process_at_the_socket_harms_nobody(make, tmp_path, monkeypatch, told_by):
    """It is turned away without a strike, even while it waits in silence, and the listener goes on."""
    if told_by == "uid":
        # The peer's uid is the kernel's word; this process is another user's here.
        real, stranger = listener.peer_of, handshake.Peer(os.getuid() + 1, None)
        monkeypatch.setattr(listener, "peer_of", lambda at: stranger if real(at).pid == os.getpid() else real(at))
    go = tmp_path / "go"
    lane = make({"start": [{"wait_for": str(go)}]})
    loading = asyncio.create_task(lane.load())
    await until(lambda: list(make.runtime.workers.iterdir()))
    path = next(make.runtime.workers.iterdir())
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write((2).to_bytes(4, "little") + b"{}")
    # Closed with its words unread, which shows as a reset.
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    for _ in range(100):
        with socket.socket(socket.AF_UNIX) as dropped:
            dropped.connect(os.fspath(path))
        await asyncio.sleep(0)
    silent = socket.socket(socket.AF_UNIX)
    silent.connect(os.fspath(path))
    go.touch()
    await loading
    assert lane.health()["strikes"] == 0 and lane.health()["generation"] == 1
    assert not path.exists(), "one connection and nobody after it"
    silent.close()
    writer.close()
