"""A worker as a real process on a real socket."""

from __future__ import annotations

import signal
import struct
from pathlib import Path

import pytest

from engines.protocol.messages import EmbedBatch, Item, Ping, Pong, Pooling, Shutdown, Vectors
from tests.support.peer import DIGEST, IDS, WorkerProcess, embed, ready
from tests.support.scripted import command, expected_vector

pytestmark = pytest.mark.process


def test_a_well_behaved_worker_answers_and_obeys_shutdown(runtime_dir: Path) -> None:
    with WorkerProcess(command(), runtime_dir) as worker:
        worker.end.shake_hands()
        assert isinstance(worker.end.call(Ping(req_id="p")).reply, Pong)
        ref = worker.load("x", DIGEST)
        items = [Item("0", 3), Item("1", 1)]
        request = EmbedBatch(req_id="e", model_ref=ref, pooling=Pooling.MEAN, normalize=True, items=items)
        outcome = worker.end.call(request, struct.pack("<4i", 1, 2, 3, 4))
        assert isinstance(outcome.reply, Vectors)
        assert outcome.payload is not None
        assert struct.unpack("<16f", outcome.payload) == (*expected_vector([1, 2, 3]), *expected_vector([4]))
        assert worker.stop() == 0
        assert worker.stdout() == b""


@pytest.mark.parametrize("stage", ["before the ACK", "idle"])
def test_the_host_leaving_ends_the_worker_with_0(runtime_dir: Path, stage: str) -> None:
    with WorkerProcess(command(), runtime_dir) as worker:
        if stage == "idle":
            worker.end.shake_hands()
            worker.load("x", DIGEST)
        else:
            worker.end.event()
        worker.end.close()
        assert worker.wait() == 0
        assert worker.stderr() == ""


@pytest.mark.parametrize("action", ["ccall", "sleep"])
def test_the_host_leaving_ends_a_worker_that_sits_in_a_call(runtime_dir: Path, action: str) -> None:
    started = runtime_dir / "started"
    script = {"rules": [{"on": "EMBED_BATCH", "do": [{"touch": str(started)}, {action: 3600}]}]}
    with ready(script, runtime_dir) as worker:
        worker.end.send(embed(), IDS)
        while not started.exists():
            assert worker.process.poll() is None
        worker.end.close()
        assert worker.wait() == 0


def test_a_torn_frame_exits_1_with_one_line(runtime_dir: Path) -> None:
    with ready({}, runtime_dir) as worker:
        worker.end.socket.sendall(b"\x10\0\0\0{")
        worker.end.close()
        assert worker.wait() == 1
        assert worker.stderr().splitlines() == ["scripted-worker: fatal: the stream ended inside a frame"]


def test_shutdown_during_a_request_comes_after_its_reply(runtime_dir: Path) -> None:
    go = runtime_dir / "go"
    script = {"rules": [{"on": "EMBED_BATCH", "do": [{"wait_for": str(go)}]}]}
    with ready(script, runtime_dir) as worker:
        worker.end.send(embed(), IDS)
        worker.end.send(Shutdown())
        go.touch()
        assert isinstance(worker.end.finish().reply, Vectors)
        assert worker.wait() == 0


def test_a_bug_in_an_engine_leaves_a_traceback_and_status_1(runtime_dir: Path) -> None:
    script = {"rules": [{"on": "EMBED_BATCH", "do": [{"raise": "boom"}]}]}
    with ready(script, runtime_dir) as worker:
        worker.end.send(embed(), IDS)
        assert worker.wait() == 1
        text = worker.stderr()
    assert "Traceback" in text
    assert "RuntimeError: boom" in text


@pytest.mark.parametrize("name", ["SIGABRT", "SIGSEGV"])
def test_a_fatal_signal_leaves_a_stack_and_its_own_status(runtime_dir: Path, name: str) -> None:
    script = {"rules": [{"on": "EMBED_BATCH", "do": [{"signal": name}]}]}
    with ready(script, runtime_dir) as worker:
        worker.end.send(embed(), IDS)
        assert worker.wait() == -getattr(signal, name)
        assert "Fatal Python error" in worker.stderr()
