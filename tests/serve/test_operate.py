"""What operators ask of a running host over its Unix socket, whoever and whatever is at the other end."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from synapse_host.config import HostConfig
from synapse_host.errors import InvalidRequest
from synapse_host.host import Host
from tests.serve.conftest import Serve, Served, serving
from tests.support.lanes import until
from tests.support.small_bundle import write_bundle, write_matrix

pytestmark = pytest.mark.process


def waits(go: Path, on: str = "LOAD", **more: Any) -> dict[str, Any]:
    return {"rules": [{"on": on, "do": [*([{"touch": str(more["started"])}] if more else []), {"wait_for": str(go)}]}]}


def loading(up: Served) -> bool:
    return up.host.health()["lanes"]["embed"]["state"] == "loading"


async def test_the_socket_is_private_and_says_what_is_up(serve: Serve) -> None:
    async with serve() as up:
        assert up.control == up.host.runtime.path / "synapse" / "control.sock"
        assert stat.S_IMODE(up.control.stat().st_mode) == 0o600
        state = await up.get("/synapse/lanes")
        assert set(state) == {"host", "lanes", "workers"}
        assert state["host"]["pid"] == os.getpid() and state["host"]["version"] == "1"
        assert state["lanes"]["embed"]["state"] == "idle" and state["workers"] == []
        loaded = await up.post("/synapse/load", model="toy")
        assert loaded["lanes"]["embed"]["models"] == ["toy"]
        (worker,) = (await up.get("/synapse/workers"))["workers"]
        assert worker["lane"] == "embed" and worker["pid"] == up.host.health()["lanes"]["embed"]["worker_pid"]
        assert set(await up.post("/synapse/unload", model="toy")) == {"host", "lanes", "workers"}
        assert (await up.get("/synapse/lanes"))["lanes"]["embed"]["models"] == []
        toy = (await up.get("/synapse/models"))["models"]["toy"]
        assert toy["task"] == "embed" and [lane["engine"] for lane in toy["lanes"]] == ["scripted"]
        assert await up.get("/synapse/certificates") == {"certificates": []}


GARBAGE = [
    b"ps", b'"ps"', b"[]", b'{"extra": 1, "model": "toy"}', b"{}", b'{"model": 5}', b'{"model": "\xff"}',
    b"\xff\xfe\x00", b'{"model": "toy", "timeout": "soon"}', b'{"model": "toy", "timeout": -1}',
    b'{"model": "toy"} {"model": "toy"}',
    b"[" * 20000, b'{"lane": ' + b"[" * 20000 + b"]" * 20000 + b"}",
]  # fmt: skip


async def test_garbage_costs_one_answer_and_nothing_else(serve: Serve) -> None:
    async with serve() as up:
        for body in GARBAGE:
            answer = await up.operator.post("/synapse/load", content=body)
            error = answer.json()["error"]
            assert answer.status_code == 400, body
            assert error["code"] == "invalid_request" and error["class"] == "permanent" and error["message"]
        for method, route, status in (("GET", "/synapse/none", 404), ("GET", "/synapse/load", 405), ("PUT", "/", 405)):
            answer = await up.operator.request(method, route)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, "invalid_request"), route
        assert "lanes" in await up.get("/synapse/lanes")


async def test_a_slow_load_blocks_nobody_and_outlives_its_client(serve: Serve, tmp_path: Path) -> None:
    go = tmp_path / "go"
    async with serve(waits(go)) as up:
        slow = asyncio.ensure_future(up.post("/synapse/load", model="toy"))
        await until(lambda: loading(up))
        states = await asyncio.gather(*(up.get("/synapse/lanes") for _ in range(8)))
        assert all(state["lanes"]["embed"]["state"] == "loading" for state in states) and not slow.done()
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
        go.touch()
        await until(lambda: up.host.health()["lanes"]["embed"]["models"] == ["toy"])


async def test_errors_keep_their_codes(serve: Serve) -> None:
    async with serve({"rules": [{"on": "LOAD", "do": [{"err": {"code": "artifact_invalid", "msg": "no"}}]}]}) as up:
        unknown = (await up.post("/synapse/load", model="nope"))["error"]
        assert unknown["code"] == "unknown_model" and "restart" in unknown["message"] and "toy" in unknown["message"]
        assert (await up.post("/synapse/load", model="toy", lane="quiet"))["error"]["code"] == "invalid_request"
        assert (await up.post("/synapse/ping", lane="embd"))["error"]["code"] == "invalid_request"
        assert (await up.post("/synapse/load", model="toy"))["error"]["code"] == "artifact_invalid"


async def test_a_crash_comes_with_its_details(serve: Serve) -> None:
    async with serve({"rules": [{"on": "LOAD", "do": [{"stderr": "last words"}, {"signal": "SIGKILL"}]}]}) as up:
        error = (await up.post("/synapse/load", model="toy"))["error"]
        assert error["code"] == "engine_crashed" and error["details"]["signal"] == "SIGKILL"
        assert error["safe_to_retry_same_request"] is True and "last words" in error["details"]["log_tail"]
        shut = await up.operator.post("/synapse/load", json={"model": "toy"})
        assert shut.json()["error"]["details"]["quarantined"] is True
        assert shut.status_code == 503 and 500 < int(shut.headers["retry-after"]) <= 600
        assert (await up.get("/synapse/lanes"))["lanes"]["embed"]["state"] == "quarantined"
        await up.post("/synapse/unload", model="toy")
        assert (await up.get("/synapse/lanes"))["lanes"]["embed"]["strikes"] == 0


async def test_ping_says_who_answers(serve: Serve, tmp_path: Path) -> None:
    started, go = tmp_path / "started", tmp_path / "go"
    async with serve(waits(go, "EMBED_BATCH", started=started)) as up:
        assert (await up.post("/synapse/ping"))["pings"] == {}
        await up.post("/synapse/load", model="toy")
        answer = await up.post("/synapse/ping", lane="toy")
        assert answer["pings"]["embed"]["round_trip_ms"] > 0 and answer["lanes"]["embed"]["rss_mb"] > 0
        busy = asyncio.ensure_future(up.host.embed("toy", ["a"]))
        await until(started.exists)
        late = (await up.post("/synapse/ping", lane="embed", timeout=0.05))["pings"]["embed"]
        assert late["error"]["code"] == "deadline_exceeded"
        go.touch()
        await busy


async def test_health_readiness_and_metrics(serve: Serve) -> None:
    async with serve() as up:
        assert (await up.web.get("/health")).json() == {"status": "ok", "lanes": {"embed": "idle"}}
        assert (await up.web.get("/ready")).status_code == 200
        metrics = await up.web.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain") and "synapse_worker_info" in metrics.text
        up.service.stopping = True
        assert (await up.web.get("/ready")).status_code == 503


# --- logs ------------------------------------------------------------------------------------------------------------


async def test_logs_are_tagged_and_cover_dead_generations(serve: Serve, tmp_path: Path) -> None:
    dying = [
        {"rules": [{"on": "LOAD", "do": [{"stderr": word}, {"signal": "SIGKILL"}]}]} for word in ("first", "second")
    ]
    async with serve({"state": str(tmp_path / "spawns"), "generations": dying}) as up:
        for word in ("first", "second"):
            assert (await up.post("/synapse/load", model="toy"))["error"]["code"] == "engine_crashed"
            log = (await up.post("/synapse/logs"))["logs"]["embed"]
            assert word in "".join(text for _, text in log["segments"])
        text = "".join(text for stream, text in log["segments"] if stream == "stderr")
        assert log["missed"] == 0 and text.index("first") < text.index("second")
        after = {"embed": log["position"]}
        assert (await up.post("/synapse/logs", lane="embed", after=after))["logs"]["embed"]["segments"] == []


async def test_following_waits_for_what_comes(serve: Serve, tmp_path: Path) -> None:
    go = tmp_path / "go"
    async with serve({"ready": [{"thread": [{"wait_for": str(go)}, {"stderr": "here é"}]}]}) as up:
        first = (await up.post("/synapse/logs", lane="embed"))["logs"]["embed"]
        assert first["segments"] == []
        follow = asyncio.ensure_future(up.post("/synapse/logs", after={"embed": first["position"]}, wait=60))
        await up.post("/synapse/load", model="toy")
        assert not follow.done()
        go.touch()
        log = (await follow)["logs"]["embed"]
        assert log["segments"] == [["stderr", "here é\n"]]
        assert log["position"] == len("here é\n".encode())


@pytest.mark.parametrize(
    ("data", "whole"),
    [("aé".encode(), "aé".encode()), ("aé".encode()[:-1], b"a"), (b"a" + "😀".encode()[:3], b"a"),
     (b"\xff" + b"\x80" * 4, b"\xff" + b"\x80" * 4), (b"x" * 20000, b"x" * 20000)],
)  # fmt: skip
async def test_half_a_character_waits_and_what_was_lost_is_counted(serve: Serve, data: bytes, whole: bytes) -> None:
    async with serve() as up:
        up.host.logs["embed"].write("stdout", data)
        log = (await up.post("/synapse/logs"))["logs"]["embed"]
        assert log["position"] == len(whole) and log["missed"] == max(0, len(data) - 8192)
        text = whole[log["missed"] :].decode("utf-8", "replace")
        assert [text for _, text in log["segments"]] == [text] * bool(whole)


# --- the end ---------------------------------------------------------------------------------------------------------


async def test_the_end_answers_who_waits(serve: Serve) -> None:
    async with serve() as up:
        follower = asyncio.ensure_future(up.post("/synapse/logs", wait=60))
        await asyncio.sleep(0.1)
        up.service.stopping = True
        refused = await up.operator.post("/synapse/load", json={"model": "toy"})
        error = refused.json()["error"]
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert error["code"] == "queue_full" and error["details"]["reason"] == "stopping"
        assert (await up.get("/synapse/lanes"))["host"]["stopping"] is True
        assert not follower.done()
        up.service.close()
        assert "logs" in await follower


async def test_a_dead_host_s_socket_is_replaced_and_a_live_one_is_not(serve: Serve, runtime_dir: Path) -> None:
    (runtime_dir / "synapse").mkdir(mode=0o700)
    path = runtime_dir / "synapse" / "control.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    assert path.is_socket()
    async with serve() as up:
        assert "lanes" in await up.get("/synapse/lanes")
        with pytest.raises(InvalidRequest, match="another process listens"):
            async with serving(up.host):
                pass
        assert "lanes" in await up.get("/synapse/lanes")


@pytest.mark.parametrize("why", ["not a socket", "shorter runtime directory"])
async def test_where_no_socket_can_be(tmp_path: Path, runtime_dir: Path, why: str) -> None:
    taken = runtime_dir / "synapse" / "control.sock"
    taken.parent.mkdir(mode=0o700)
    taken.write_text("mine")
    where = runtime_dir if why == "not a socket" else tmp_path / ("x" * 100)
    bundles = {"toy": write_bundle(tmp_path / "toy", model_id="toy")}
    async with Host.open(write_matrix(tmp_path), bundles, HostConfig(runtime_dir=where)) as host:
        with pytest.raises(InvalidRequest, match=why):
            async with serving(host):
                pass
    assert taken.read_text() == "mine"
