"""Birth of a worker generation: every way a handshake can go, with real processes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import socket
from pathlib import Path

import psutil
import pytest

from engines.bundle.manifest import canonical_bytes, manifest_digest
from synapse_host.errors import DeadlineExceeded, InvalidRequest, LaneRefused, QueueFull
from tests.support import scripted
from tests.support.lanes import CUDA, EMBED, FAST, crash, embed, on, serve, soon, spawns, until

pytestmark = pytest.mark.process


async def test_a_good_worker_is_accepted_and_its_socket_removed(make):
    lane = make()
    reply, payload = await lane.submit(embed([1, 2], [3]), stage=EMBED)
    assert (reply.n, reply.dims) == (2, 8)
    assert payload.reshape(2, 8).tolist() == [scripted.expected_vector([1, 2]), scripted.expected_vector([3])]
    assert list(make.runtime.workers.iterdir()) == []


async def test_arguments_environment_and_session_of_a_worker(make, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "no")
    report = tmp_path / "report"
    manifest = tmp_path / "manifest.json"
    manifest.write_bytes(canonical_bytes({"any": "object"}))
    lane = make(
        {"engine": "owned-cuda", "ready": [{"report": str(report)}]},
        **CUDA,
        env={"EXTRA": "1"},
        manifest_path=manifest,
        manifest_digest=manifest_digest(manifest.read_bytes()),
        packed_widths=(128, 256),
    )
    await lane.load()
    told = json.loads(report.read_text())
    argv = told["argv"][told["argv"].index("--socket") :]
    assert argv[::2] == ["--socket", "--nonce", "--device", "--manifest", "--packed"]
    assert Path(argv[1]).name == "toy-1.sock"
    assert len(argv[3]) == 16 and int(argv[3], 16) >= 0
    assert argv[5:10:2] == ["cpu", str(manifest), "128,256"]
    assert told["environment"]["SYNAPSE_WORKER_ID"] == "toy-1" and told["environment"]["EXTRA"] == "1"
    assert "SECRET_TOKEN" not in told["environment"]
    assert told["session"] == told["pid"] == lane.health()["worker_pid"] != os.getsid(0)


# --- deployment errors: typed, permanent, no strike, no respawn storm -----------------------------------------------

REFUSALS = {
    "version": ({"hello": [{"hello": {"v": 2}}]}, {}),
    "version 1": ({"hello": [{"hello": {"v": 1}}]}, {}),
    "engine": ({"engine": "owned-cuda"}, {}),
    "device": ({"device": "cuda:0"}, {}),
    "manifest": ({"engine": "owned-cuda"}, {**CUDA, "manifest_digest": "a" * 64}),
    "kernel_revision": ({"engine": "owned-cuda"}, {**CUDA, "kernel_revision": "pinned"}),
}


@pytest.mark.parametrize("case", REFUSALS)
async def test_a_deployment_error_refuses_the_lane_until_unload(make, tmp_path, case):
    script, changes = REFUSALS[case]
    state = tmp_path / "state"
    lane = make({**script, "state": str(state)}, **changes)
    for _ in range(3):
        with pytest.raises(LaneRefused) as caught:
            await serve(lane)
        assert caught.value.details["reason"] == case.split()[0]
        assert set(caught.value.details) == {"lane_id", "reason", "expected", "observed"}
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


async def test_a_foreign_worker_need_not_echo_the_device(make):
    foreign = make({"hello": [{"hello": {"engine": {"build_flags": {}}}}]}, own_worker=False)
    await foreign.load()
    ours = make({"hello": [{"hello": {"engine": {"build_flags": {}}}}]})
    with pytest.raises(LaneRefused):
        await ours.load()


# --- nonsense and death before the ACK: strikes -----------------------------------------------------------------------

_HELLO = b'{"v":3.0,"nonce":"%s","engine":{"engine":"llama.cpp-worker","version":"1"},"pid":1,"max_frame":1}'
FLOAT_VERSION = (len(_HELLO).to_bytes(4, "little") + _HELLO).hex()
NONSENSE = {
    "wrong nonce": [{"hello": {"nonce": "0" * 16}}],
    "wrong pid": [{"hello": {"pid": 1}}],
    "the parent's pid": [{"hello": {"pid": os.getpid()}}],
    "a pid beyond every pid": [{"hello": {"pid": 2**32 - 1}}],
    "v as text": [{"hello": {"v": "3"}}],
    "v as float": [{"bytes": FLOAT_VERSION}],
    "v as bool": [{"hello": {"v": True}}],
    "no nonce": [{"hello": {"nonce": None}}],
    "max_frame 0": [{"hello": {"max_frame": 0}}],
    "not JSON": [{"bytes": "02000000"}, {"text": "no"}],
    "too large": [{"torn": {"length": 65537, "send": 10}}],
    "length 0xFFFFFFFF": [{"bytes": "ffffffff"}],
    "another message": [{"frame": {"type": "PONG", "req_id": "1", "rss_mb": 1, "models_loaded": 0}}],
    "closed": [{"close": True}],
    "torn": [{"torn": {"length": 100, "send": 10}}, {"close": True}],
}


@pytest.mark.parametrize("case", NONSENSE)
async def test_nonsense_before_the_ack_is_a_strike_each(make, tmp_path, case):
    state = tmp_path / "state"
    lane = make({"hello": [*NONSENSE[case], {"sleep": 600}], "state": str(state)})
    first = await crash(lane)
    assert first.details["cause"] == "handshake" and first.details["quarantined"] is False
    assert lane.health()["strikes"] == 1 and lane.health()["worker_pid"] is None
    second = await crash(lane)
    assert second.details["quarantined"] is True
    third = await crash(lane)
    assert third.details == {"lane_id": "toy", "quarantined": True}
    assert spawns(state) == 2


@pytest.mark.parametrize(
    ("script", "status", "signal"),
    [
        ({"start": [{"stderr": "import failed"}, {"exit": 3}]}, 3, None),
        ({"start": [{"stderr": "import failed"}, {"signal": "SIGKILL"}]}, None, "SIGKILL"),
        ({"hello": [{"stderr": "import failed"}, {"exit": 4}]}, 4, None),
        ({"hello": [{"stderr": "import failed"}, {"abort": True}]}, None, "SIGABRT"),
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
        ({"hello": [{"sleep": 600}]}, "sent no HELLO"),
        ({"ignore": ["SIGTERM"], "hello": [{"torn": {"length": 100, "send": 10}}, {"sleep": 600}]}, "sent no HELLO"),
    ],
)
async def test_one_deadline_bounds_the_handshake(make, script, text):
    lane = make(script, config=dataclasses.replace(FAST, handshake=3.0))
    error = await crash(lane)
    assert text in error.message and error.details["cause"] == "handshake"
    assert lane.health()["strikes"] == 1


async def test_frames_before_the_ack_are_a_violation(make):
    pong = {"frame": {"type": "PONG", "req_id": "1", "rss_mb": 1, "models_loaded": 0}}
    # In one piece with HELLO: the host can't have answered in between.
    lane = make({"hello": [{"hello": {}}, pong, {"sleep": 600}]})
    assert (await crash(lane)).details["cause"] in ("handshake", "protocol")
    assert lane.health()["strikes"] == 1


@pytest.mark.parametrize(
    ("engine", "cure"),
    [
        ("llama.cpp-worker", "llama-cpp-python was built for another CPU, rebuild it"),
        ("owned-cuda", "a library of this engine was built for another CPU (SIGILL)"),
    ],
)
async def test_sigill_names_the_cure(make, engine, cure):
    lane = make({"engine": engine, "start": [{"signal": "SIGILL"}]}, expected_engine=engine)
    error = await crash(lane)
    assert error.message.endswith(cure), error.message
    assert error.details["signal"] == "SIGILL"


@pytest.mark.report("python/cpython#124779")
async def test_a_foreign_process_at_the_socket_harms_nobody(make, tmp_path):
    """It is turned away without a strike, even while it waits in silence, and the listener goes on."""
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
    silent = socket.socket(socket.AF_UNIX)
    silent.connect(os.fspath(path))
    go.touch()
    await loading
    assert lane.health()["strikes"] == 0 and lane.health()["generation"] == 1
    silent.close()
    writer.close()


async def test_the_smaller_max_frame_rules(make):
    lane = make({"hello": [{"hello": {"max_frame": 4096}}]})
    await lane.load()
    with pytest.raises(InvalidRequest, match="4096"):
        await lane.submit(embed(list(range(1, 2000))), stage=EMBED)
    # Refused before the first byte: the same worker serves the next request.
    await serve(lane)
    assert lane.health()["generation"] == 1


async def test_a_deadline_during_the_spawn_leaves_the_spawn_to_the_next_caller(make, tmp_path):
    go, state = tmp_path / "go", tmp_path / "state"
    lane = make({"start": [{"wait_for": str(go)}], "state": str(state)})
    with pytest.raises(DeadlineExceeded):
        await serve(lane, deadline=soon(0.05))
    assert lane.health()["state"] == "loading"
    go.touch()
    await serve(lane)
    assert lane.health()["generation"] == spawns(state) == 1 and lane.health()["strikes"] == 0
