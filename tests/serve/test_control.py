"""The control socket of a running host: one JSON line each way, whoever and whatever is at the other end."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from synapse_host.config import HostConfig
from synapse_host.errors import InvalidRequest
from synapse_host.host import Host
from synapse_host.serve import control
from synapse_host.serve.control import ControlServer, admits
from synapse_host.serve.operations import LoadModel, Logs, Ping, Ps, decode
from synapse_host.worker.handshake import Peer
from synapse_host.worker.output import LogRing
from tests.support.small_bundle import write_bundle, write_matrix

pytestmark = pytest.mark.process

ABOUT = {"version": "1", "runtime_dir": "here"}
Work = Callable[[Host, ControlServer, "Client"], Awaitable[Any]]


class Client:
    """A raw connection, so that a test may send anything."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, host: Host) -> Client:
        return cls(*await asyncio.open_unix_connection(host.runtime.control_path, limit=2**24))

    async def raw(self, line: bytes) -> dict[str, Any]:
        self.writer.write(line)
        return await self.answer()

    async def answer(self) -> dict[str, Any]:
        async with asyncio.timeout(60):
            line = await self.reader.readline()
        assert line.endswith(b"\n") and line.count(b"\n") == 1
        document: dict[str, Any] = json.loads(line)
        return document

    async def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        return await self.raw(json.dumps({"op": op, **fields}).encode() + b"\n")

    async def ended(self) -> bool:
        async with asyncio.timeout(60):
            return await self.reader.read(1) == b""

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


@pytest.fixture
def serve(tmp_path: Path, runtime_dir: Path) -> Callable[..., Any]:
    """Run *work* with a host of model `toy` on lane `embed`, its control server and a client of it."""

    def run(work: Work, script: dict[str, Any] | None = None, **config: Any) -> Any:
        bundle = write_bundle(tmp_path / "toy", model_id="toy")
        matrix = write_matrix(tmp_path, script)

        async def main() -> Any:
            settings = HostConfig(shutdown_grace=5, runtime_dir=runtime_dir, **config)
            async with (
                Host.open(matrix, {"toy": bundle}, settings) as host,
                ControlServer.open(host, about=ABOUT) as server,
            ):
                client = await Client.to(host)
                result = await work(host, server, client)
                await client.close()
            assert not runtime_dir.joinpath("synapse", "control.sock").exists()
            return result

        return asyncio.run(main())

    return run


# --- pure ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uid", "expected"),
    [(1000, True), (1001, False), (0, False), (None, False)],
    ids=["same", "other", "root", "unknown"],
)
def test_only_the_same_user_is_admitted(uid: int | None, expected: bool) -> None:
    assert admits(Peer(uid, 1), 1000) is expected


def test_requests() -> None:
    assert decode(b'{"op": "ps"}\n') == Ps()
    assert decode(b'{"op": "ping", "lane": "embed", "deadline": 1.5}') == Ping("embed", 1.5)
    assert decode(b'{"op": "load", "model": "m", "lane": null}') == LoadModel("m")
    assert decode(b'{"op": "logs", "after": {"embed": 7}}') == Logs(after={"embed": 7})


GARBAGE = [
    b"\n",
    b"ps\n",
    b"{}\n",
    b'"ps"\n',
    b'{"op": "stop"}\n',
    b'{"op": ["ps"]}\n',
    b'{"op": "ps", "extra": 1}\n',
    b'{"op": "load"}\n',
    b'{"op": "load", "model": 5}\n',
    b'{"op": "ping", "deadline": "soon"}\n',
    b'{"op": "logs", "after": {"embed": "x"}}\n',
    b'{"op": "ps"} {"op": "ps"}\n',
    b"\xff\xfe\x00\n",
    b'{"op": "load", "model": "\xff"}\n',
    b"[" * 20000 + b"\n",
    b'{"op": "ping", "lane": ' + b"[" * 20000 + b"]" * 20000 + b"}\n",
]


@pytest.mark.parametrize("line", GARBAGE, ids=[repr(line[:30]) for line in GARBAGE])
def test_garbage_is_a_typed_error(line: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode(line)


@pytest.mark.parametrize(
    ("data", "whole"),
    [(b"", b""), (b"ab", b"ab"), ("é".encode(), "é".encode()), ("aé".encode()[:-1], b"a"), ("€".encode()[:2], b""),
     ("😀".encode(), "😀".encode()), (b"a" + "😀".encode()[:3], b"a"), (b"\xff" + b"\x80" * 4, b"\xff" + b"\x80" * 4)],
)  # fmt: skip
def test_half_a_character_waits(data: bytes, whole: bytes) -> None:
    ring = LogRing()
    ring.write("stdout", data)
    told = control._tail(ring, 0)
    assert told["position"] == len(whole)
    assert [text for _, text in told["segments"]] == [whole.decode("utf-8", "replace")] * bool(whole)


# --- the socket ------------------------------------------------------------------------------------------------------


def test_the_socket_is_private_and_tells_what_is_up(serve: Any) -> None:
    async def work(host: Host, server: ControlServer, client: Client) -> None:
        path = host.runtime.control_path
        assert path == host.runtime.path / "synapse" / "control.sock"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        state = await client.ask("ps")
        assert set(state) == {"host", "lanes", "workers"}
        assert state["host"]["pid"] == os.getpid() and state["host"]["version"] == "1"
        assert state["lanes"]["embed"]["state"] == "idle" and state["workers"] == []
        loaded = await client.ask("load", model="toy")
        assert loaded["lanes"]["embed"]["models"] == ["toy"]
        state = await client.ask("ps")
        (worker,) = state["workers"]
        assert worker["lane"] == "embed" and worker["pid"] == host.health()["lanes"]["embed"]["worker_pid"]
        assert set(await client.ask("unload", model="toy")) == {"host", "lanes", "workers"}
        assert (await client.ask("ps"))["lanes"]["embed"]["models"] == []

    serve(work)


def test_garbage_costs_one_answer_and_nothing_else(serve: Any) -> None:
    async def work(host: Host, server: ControlServer, client: Client) -> None:
        for line in GARBAGE:
            error = (await client.raw(line))["error"]
            assert error["code"] == "invalid_request" and error["class"] == "permanent" and error["message"]
        assert "lanes" in await client.ask("ps")

    serve(work)


def test_an_oversize_line_is_told_and_ends_its_connection_only(serve: Any) -> None:
    async def work(host: Host, server: ControlServer, client: Client) -> None:
        for ending in (b"", b"\n"):
            other = await Client.to(host)
            answer = await other.raw(b'{"op": "' + b"x" * control.MAX_LINE + ending)
            assert str(control.MAX_LINE) in answer["error"]["message"]
            assert await other.ended()
            await other.close()
        assert "lanes" in await client.ask("ps")

    serve(work)


def test_a_line_without_an_end(serve: Any) -> None:
    async def work(host: Host, server: ControlServer, client: Client) -> None:
        client.writer.write(b'{"op": "ps"}')
        client.writer.write_eof()
        assert "no end" in (await client.answer())["error"]["message"]
        assert await client.ended()

    serve(work)


def test_many_clients_at_once_and_a_slow_one_blocks_nobody(serve: Any, tmp_path: Path) -> None:
    go = tmp_path / "go"

    async def work(host: Host, server: ControlServer, client: Client) -> None:
        clients = [await Client.to(host) for _ in range(8)]
        slow = asyncio.ensure_future(clients[0].ask("load", model="toy"))
        while not server._busy:
            await asyncio.sleep(0)
        states = await asyncio.gather(*(client.ask("ps") for client in clients[1:]))
        assert all(state["lanes"]["embed"]["state"] == "loading" for state in states)
        assert not slow.done()
        go.touch()
        assert (await slow)["lanes"]["embed"]["models"] == ["toy"]
        for each in clients:
            await each.close()

    serve(work, {"rules": [{"on": "LOAD", "do": [{"wait_for": str(go)}]}]})


def test_too_many_clients_are_told(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MAX_CLIENTS", 3)

    async def work(host: Host, server: ControlServer, client: Client) -> None:
        clients = [await Client.to(host) for _ in range(2)]
        for client in clients:
            await client.ask("ps")
        extra = await Client.to(host)
        assert (await extra.answer())["error"]["code"] == "queue_full"
        assert await extra.ended()
        for client in [*clients, extra]:
            await client.close()
        again = await Client.to(host)
        while "error" in await again.ask("ps"):
            await again.close()
            again = await Client.to(host)
        await again.close()

    serve(work)


def test_another_user_is_turned_away_without_a_word(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "peer_of", lambda connection: Peer(os.getuid() + 1, 1))

    async def work(host: Host, server: ControlServer, client: Client) -> None:
        assert await client.ended()

    serve(work)


def test_a_client_that_leaves_in_the_middle_of_a_load_leaves_the_load(serve: Any, tmp_path: Path) -> None:
    go = tmp_path / "go"

    async def work(host: Host, server: ControlServer, client: Client) -> None:
        client.writer.write(b'{"op": "load", "model": "toy"}\n')
        while not server._busy:
            await asyncio.sleep(0)
        await client.close()
        go.touch()
        async with asyncio.timeout(60):
            while host.health()["lanes"]["embed"]["models"] != ["toy"]:
                await asyncio.sleep(0.01)

    serve(work, {"rules": [{"on": "LOAD", "do": [{"wait_for": str(go)}]}]})


def test_errors_keep_their_codes(serve: Any) -> None:
    async def work(host: Host, server: ControlServer, client: Client) -> None:
        unknown = (await client.ask("load", model="nope"))["error"]
        assert unknown["code"] == "unknown_model" and "restart" in unknown["message"] and "toy" in unknown["message"]
        assert (await client.ask("load", model="toy", lane="quiet"))["error"]["code"] == "invalid_request"
        assert (await client.ask("load", model="toy", deadline=-1))["error"]["code"] == "invalid_request"
        assert (await client.ask("ping", lane="embd"))["error"]["code"] == "invalid_request"
        assert (await client.ask("load", model="toy"))["error"]["code"] == "artifact_invalid"

    serve(work, {"rules": [{"on": "LOAD", "do": [{"err": {"code": "artifact_invalid", "msg": "no"}}]}]})


def test_a_crash_comes_with_its_details(serve: Any) -> None:
    async def work(host: Host, server: ControlServer, client: Client) -> None:
        error = (await client.ask("load", model="toy"))["error"]
        assert error["code"] == "engine_crashed" and error["details"]["signal"] == "SIGKILL"
        assert error["safe_to_retry_same_request"] is True and "last words" in error["details"]["log_tail"]
        error = (await client.ask("load", model="toy"))["error"]
        assert error["details"]["quarantined"] is True
        state = await client.ask("ps")
        assert state["lanes"]["embed"]["state"] == "quarantined"
        await client.ask("unload", model="toy")
        assert (await client.ask("ps"))["lanes"]["embed"]["strikes"] == 0

    serve(work, {"rules": [{"on": "LOAD", "do": [{"stderr": "last words"}, {"signal": "SIGKILL"}]}]})


def test_a_bug_of_ours_ends_one_request(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(host: Host, server: ControlServer, client: Client) -> None:
        def broken(*lanes: str) -> dict[str, Any]:
            raise ZeroDivisionError

        with monkeypatch.context() as patch:
            patch.setattr(server, "state", broken)
            assert (await client.ask("ps"))["error"]["code"] == "internal_error"
        assert "lanes" in await client.ask("ps")

    serve(work)


def test_ping_tells_who_answers(serve: Any, tmp_path: Path) -> None:
    started, go = tmp_path / "started", tmp_path / "go"

    async def work(host: Host, server: ControlServer, client: Client) -> None:
        assert (await client.ask("ping"))["pings"] == {}
        await client.ask("load", model="toy")
        answer = await client.ask("ping", lane="toy")
        assert answer["pings"]["embed"]["round_trip_ms"] > 0 and answer["lanes"]["embed"]["rss_mb"] > 0
        busy = asyncio.ensure_future(host.embed("toy", ["a"]))
        while not started.exists():
            await asyncio.sleep(0.01)
        late = (await client.ask("ping", lane="embed", deadline=0.05))["pings"]["embed"]
        assert late["error"]["code"] == "deadline_exceeded"
        go.touch()
        await busy

    serve(work, {"rules": [{"on": "EMBED_BATCH", "do": [{"touch": str(started)}, {"wait_for": str(go)}]}]})


# --- logs ------------------------------------------------------------------------------------------------------------


def test_logs_are_tagged_and_cover_dead_generations(serve: Any, tmp_path: Path) -> None:
    async def work(host: Host, server: ControlServer, client: Client) -> None:
        for word in ("first", "second"):
            assert (await client.ask("load", model="toy"))["error"]["code"] == "engine_crashed"
            log = (await client.ask("logs"))["logs"]["embed"]
            assert word in "".join(text for _, text in log["segments"])
        text = "".join(text for stream, text in log["segments"] if stream == "stderr")
        assert log["missed"] == 0 and text.index("first") < text.index("second")
        after = {"embed": log["position"]}
        assert (await client.ask("logs", lane="embed", after=after))["logs"]["embed"]["segments"] == []

    dying = [
        {"rules": [{"on": "LOAD", "do": [{"stderr": word}, {"signal": "SIGKILL"}]}]} for word in ("first", "second")
    ]
    serve(work, {"state": str(tmp_path / "spawns"), "generations": dying})


def test_following_waits_for_what_comes(serve: Any, tmp_path: Path) -> None:
    go = tmp_path / "go"

    async def work(host: Host, server: ControlServer, client: Client) -> None:
        first = (await client.ask("logs", lane="embed"))["logs"]["embed"]
        assert first["segments"] == []
        follow = asyncio.ensure_future(client.ask("logs", after={"embed": first["position"]}, wait=60))
        other = await Client.to(host)
        await other.ask("load", model="toy")
        assert not follow.done()
        go.touch()
        log = (await follow)["logs"]["embed"]
        assert [list(part) for part in log["segments"]] == [["stderr", "here é\n"]]
        assert log["position"] == len("here é\n".encode())
        await other.close()

    serve(work, {"ready": [{"thread": [{"wait_for": str(go)}, {"stderr": "here é"}]}]})


def test_who_follows_too_slowly_is_told_what_is_lost(serve: Any) -> None:
    async def work(host: Host, server: ControlServer, client: Client) -> None:
        host.logs["embed"].write("stdout", b"x" * 20000)
        log = (await client.ask("logs"))["logs"]["embed"]
        assert log["missed"] == 20000 - 8192 and log["position"] == 20000
        assert sum(len(text) for _, text in log["segments"]) == 8192

    serve(work)


# --- the end ---------------------------------------------------------------------------------------------------------


def test_the_end_answers_who_waits(serve: Any) -> None:
    async def work(host: Host, server: ControlServer, client: Client) -> None:
        other = await Client.to(host)
        follower = asyncio.ensure_future(client.ask("logs", wait=60))
        while not server._busy:
            await asyncio.sleep(0)
        server.stopping = True
        refused = (await other.ask("load", model="toy"))["error"]
        assert refused["code"] == "queue_full" and refused["details"]["reason"] == "stopping"
        assert (await other.ask("ps"))["host"]["stopping"] is True
        assert not follower.done()
        await server._close()
        assert "logs" in await follower
        for each in (client, other):
            assert await each.ended()
            await each.close()

    serve(work)


def test_a_dead_host_s_socket_is_replaced_and_a_live_one_is_not(serve: Any, runtime_dir: Path, tmp_path: Path) -> None:
    (runtime_dir / "synapse").mkdir(mode=0o700)
    path = runtime_dir / "synapse" / "control.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    assert path.is_socket()

    async def work(host: Host, server: ControlServer, client: Client) -> None:
        assert "lanes" in await client.ask("ps")
        await client.close()
        with pytest.raises(InvalidRequest, match="another process listens"):
            async with ControlServer.open(host, about={}):
                pass
        again = await Client.to(host)
        await again.close()

    serve(work)


def test_what_is_not_a_socket_is_left_alone(serve: Any, runtime_dir: Path) -> None:
    (runtime_dir / "synapse").mkdir(mode=0o700)
    path = runtime_dir / "synapse" / "control.sock"
    path.write_text("mine")

    async def work(host: Host, server: ControlServer, client: Client) -> None:
        raise AssertionError("never opened")

    with pytest.raises(InvalidRequest, match="not a socket"):
        serve(work)
    assert path.read_text() == "mine"


def test_a_directory_too_long_for_a_socket_says_so(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "toy", model_id="toy")
    matrix = write_matrix(tmp_path)
    long = tmp_path / ("x" * 100)

    async def main() -> None:
        async with Host.open(matrix, {"toy": bundle}, HostConfig(runtime_dir=long)) as host:
            with pytest.raises(InvalidRequest, match="shorter runtime directory"):
                async with ControlServer.open(host, about={}):
                    pass

    asyncio.run(main())
