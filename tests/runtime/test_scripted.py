"""The scripted worker does what its script says: each misbehaviour, seen from the host's end."""

from __future__ import annotations

import json
import os
import signal
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from engines.protocol.errors import RemoteProtocolError, VersionMismatch
from engines.protocol.events import HelloReceived, PeerClosed
from engines.protocol.messages import (
    AneAdmitPacked,
    AneAdmitShape,
    EmbedBatch,
    Err,
    Generate,
    Item,
    Ping,
    Pong,
    Pooling,
    Rerank,
    RerankSequences,
    Segment,
    Shutdown,
    Text,
    Vectors,
)
from tests.support.peer import WorkerProcess
from tests.support.scripted import (
    command,
    expected_score,
    expected_sequence_score,
    expected_text,
    expected_vector,
)

pytestmark = pytest.mark.process
DIGEST = "sha256:" + "0" * 64
RAW = struct.pack("<2i", 7, 8)


def embed(ref: str = "llama:0") -> EmbedBatch:
    return EmbedBatch("e", ref, Pooling.MEAN, True, [Item("0", 2)])


def ready(script: dict[str, Any], directory: Path, **kwargs: Any) -> WorkerProcess:
    worker = WorkerProcess(command(script), directory, **kwargs)
    worker.end.shake_hands()
    worker.load("x", DIGEST)
    return worker


def on_embed(*actions: dict[str, Any], **extra: Any) -> dict[str, Any]:
    return {**extra, "rules": [{"on": "EMBED_BATCH", "do": list(actions)}]}


# --- legal -----------------------------------------------------------------------------------------------------------


def test_legal_answers_are_functions_of_their_ids(runtime_dir: Path) -> None:
    with ready({}, runtime_dir) as worker:
        call = worker.end.call
        scores = call(Rerank("r", "llama:0", 1, [Segment(1), Segment(2)]), struct.pack("<4i", 9, 1, 2, 3)).payload
        assert scores is not None
        assert struct.unpack("<2f", scores) == (expected_score([9], [1]), expected_score([9], [2, 3]))
        text = call(Generate("g", "llama:0", 3), RAW).reply
        assert isinstance(text, Text)
        assert (text.text, text.generated_token_ids, text.finish_reason) == expected_text([7, 8], 3)
        assert expected_vector([1, 2]) != expected_vector([2, 1])


def test_owned_engines_serve_sequences_and_one_model(runtime_dir: Path) -> None:
    with ready({"engine": "owned-cuda"}, runtime_dir) as worker:
        assert worker.end.hello is not None
        assert worker.end.hello.kernel_revision == "scripted-1"
        outcome = worker.end.call(RerankSequences("r", "owned-cuda:0", [Segment(2)]), RAW)
        assert outcome.payload is not None
        assert struct.unpack("<f", outcome.payload)[0] == expected_sequence_score([7, 8])
        reply = worker.end.call(Rerank("r", "owned-cuda:0", 1, [Segment(1)]), RAW).reply
        assert isinstance(reply, Err)


def test_the_ane_poser_admits_shapes_and_packs(runtime_dir: Path) -> None:
    script = {"engine": "ane-coreml-worker", "packed": True, "buckets": [128], "placement_share": 0.97}
    with ready(script, runtime_dir, device="ane", extra=["--packed", "256"]) as worker:
        assert worker.end.call(AneAdmitShape("a", "ane:0", 128)).progress == []
        worker.end.call(AneAdmitPacked("a", "ane:0", 256))
        request = EmbedBatch("e", "ane:0", Pooling.MEAN, True, [Item("0", 2)], packed_width=256)
        assert isinstance(worker.end.call(request, RAW).reply, Vectors)
        pong = worker.end.call(Ping("p")).reply
        assert isinstance(pong, Pong)
        assert (pong.placement_share, pong.ane_resident_packed) == (0.97, {"ane:0": [256]})


def test_echo_vectors(runtime_dir: Path) -> None:
    with ready({"vectors": "echo", "dims": 2}, runtime_dir) as worker:
        payload = worker.end.call(embed(), RAW).payload
        assert payload is not None
        assert struct.unpack("<2f", payload) == (7.0, 8.0)


def test_generations_count_spawns(runtime_dir: Path) -> None:
    crash = {"rules": [{"on": "EMBED_BATCH", "do": [{"exit": 7}]}]}
    script = {"state": str(runtime_dir / "spawns"), "generations": [crash, crash, {}]}
    for expected in (7, 7, None):
        with ready(script, runtime_dir) as worker:
            worker.end.send(embed(), RAW)
            if expected is None:
                assert isinstance(worker.end.finish().reply, Vectors)
            else:
                assert worker.wait() == expected


def test_rules_match_by_count_and_by_first_id(runtime_dir: Path) -> None:
    rules = [
        {"on": "EMBED_BATCH", "nth": 2, "do": [{"err": {"code": "oom"}}]},
        {"on": "serving", "first_id": 666, "do": [{"err": {"code": "inference_failed"}}]},
    ]
    with ready({"rules": rules}, runtime_dir) as worker:
        replies = [worker.end.call(embed(), struct.pack("<2i", first, 1)).reply for first in (1, 1, 666, 1)]
    kinds = [reply.code.value if isinstance(reply, Err) else "vectors" for reply in replies]
    assert kinds == ["vectors", "oom", "inference_failed", "vectors"]


def test_progress_by_script_is_what_the_host_sees(runtime_dir: Path) -> None:
    script = on_embed({"progress": {"from": 3, "to": 5, "every": 0.001}})
    with ready(script, runtime_dir) as worker:
        assert [f.completed for f in worker.end.call(embed(), RAW).progress] == [3, 4, 5]


def test_a_cuda_poser_can_switch(runtime_dir: Path) -> None:
    frames = [{"progress": {"completed": [1]}}, {"progress": {"completed": [2], "phase": "inference"}}]
    with ready(on_embed(*frames, engine="owned-cuda"), runtime_dir) as worker:
        outcome = worker.end.call(embed("owned-cuda:0"), RAW)
        assert [f.phase.value for f in outcome.progress] == ["setup", "inference"]


# --- protocol faults -------------------------------------------------------------------------------------------------

PROGRESS = {"type": "PROGRESS", "req_id": "$req_id", "completed": 1, "phase": "inference"}
FAULTS: dict[str, list[dict[str, Any]]] = {
    "progress for another request": [{"progress": {"completed": [1], "req_id": "other"}}],
    "progress repeated": [{"progress": {"completed": [1, 1]}}],
    "progress backwards": [{"progress": {"completed": [2, 1]}}],
    "progress of nothing": [{"progress": {"completed": [0]}}],
    "a phase of another exchange": [{"progress": {"completed": [1], "phase": "setup"}}],
    "an unknown phase": [{"progress": {"completed": [1], "phase": "warp"}}],
    "progress between header and payload": [{"reply": {"between": [PROGRESS]}}],
    "a reply of another type": [{"reply": {"type": "SCORES"}}],
    "a reply to another request": [{"reply": {"set": {"req_id": "other"}}}],
    "a short payload": [{"reply": {"raw_bytes": 28}}],
    "a long payload": [{"reply": {"raw_bytes": 36}}],
    "no payload": [{"reply": {"no_raw": True}}, {"frame": PROGRESS}],
    "no dims": [{"reply": {"set": {"dims": 0}, "raw_bytes": 0}}],
    "other dims": [{"reply": {"set": {"dims": 4}}}],
    "n off by one": [{"reply": {"set": {"n": 2}}}],
    "a missing field": [{"reply": {"drop": ["dims"]}}],
    "an unknown field": [{"reply": {"set": {"extra": 1}}}],
    "an unknown code": [{"err": {"code": "tired"}}],
    "a frame that is no JSON": [{"bytes": "030000007b7b7b"}],
    "a request from a worker": [{"frame": {"type": "PING", "req_id": "p"}}],
    "a frame too large": [{"torn": {"length": 2**32 - 1, "send": 0}}],
    "a frame torn by death": [{"torn": {"length": 100, "send": 10}}, {"exit": 0}],
    "death inside the payload": [
        {"thread": [{"sleep": 1.0}, {"exit": 0}]},
        {"reply": {"stall": {"after": 4, "seconds": 9}}},
    ],
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_one_to_the_host(runtime_dir: Path, name: str) -> None:
    with ready(on_embed(*FAULTS[name]), runtime_dir) as worker:
        worker.end.send(embed(), RAW)
        with pytest.raises(RemoteProtocolError):
            worker.end.finish()


AFTERWARDS = {
    "progress after the reply": [{"reply": {}}, {"frame": PROGRESS}],
    "two replies": [{"reply": {"times": 2}}],
    "an unasked PONG": [{"reply": {}}, {"frame": {"type": "PONG", "req_id": "x", "rss_mb": 1, "models_loaded": 1}}],
}


@pytest.mark.parametrize("name", AFTERWARDS)
def test_frames_after_the_reply_are_a_fault_when_noticed(runtime_dir: Path, name: str) -> None:
    with ready(on_embed(*AFTERWARDS[name]), runtime_dir) as worker:
        assert isinstance(worker.end.call(embed(), RAW).reply, Vectors)
        with pytest.raises(RemoteProtocolError):
            worker.end.event()


def test_nan_passes_the_wire(runtime_dir: Path) -> None:
    with ready(on_embed({"reply": {"nan": 3}}), runtime_dir) as worker:
        payload = worker.end.call(embed(), RAW).payload
        assert payload is not None
        values = struct.unpack("<8f", payload)
        assert values[3] != values[3]


def test_a_stall_inside_the_payload_ends_whole(runtime_dir: Path) -> None:
    with ready(on_embed({"reply": {"stall": {"after": 5, "seconds": 0.05}}}), runtime_dir) as worker:
        payload = worker.end.call(embed(), RAW).payload
        assert payload is not None
        assert list(struct.unpack("<8f", payload)) == expected_vector([7, 8])


# --- handshake -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"nonce": "f" * 16}, "nonce", "f" * 16),
        ({"pid": 1}, "pid", 1),
        ({"engine": {"engine": "other"}}, "engine.engine", "other"),
        ({"engine": {"build_flags": {"device": "ane"}}}, "engine.build_flags", {"device": "ane"}),
        ({"manifest_digest": "1" * 64}, "manifest_digest", "1" * 64),
        ({"kernel_revision": "other"}, "kernel_revision", "other"),
        ({"protocol_version": 2}, "v", 3),
        ({"max_frame": 1024}, "max_frame", 1024),
    ],
)
def test_a_bent_hello(runtime_dir: Path, changes: dict[str, Any], field: str, value: object) -> None:
    with WorkerProcess(command({"hello": [{"hello": changes}]}), runtime_dir) as worker:
        event = worker.end.event()
        assert isinstance(event, HelloReceived)
        found: Any = event.hello
        for part in field.split("."):
            found = getattr(found, part)
        assert found == value


def test_a_worker_of_version_2(runtime_dir: Path) -> None:
    script = {"hello": [{"hello": {"v": 2}}]}
    with WorkerProcess(command(script), runtime_dir) as worker, pytest.raises(VersionMismatch):
        worker.end.event()


@pytest.mark.parametrize(
    "actions",
    [
        [{"bytes": "deadbeef" * 4}],
        [{"text": "GET / HTTP/1.1\r\n\r\n"}],
        [{"frame": {"type": "PONG", "req_id": "x", "rss_mb": 1, "models_loaded": 1}}, {"hello": {}}],
        [{"frame": {"type": "PING", "req_id": "x"}}],
        [{"hello": {"nonce": None}}],
        [{"hello": {"v": "3"}}],
        [{"torn": {"length": 100, "send": 10}}, {"exit": 0}],
        [{"torn": {"length": 65537, "send": 0}}],
        [{"hello": {}}, {"frame": PROGRESS}],
    ],
)
def test_nonsense_before_the_ack(runtime_dir: Path, actions: list[dict[str, Any]]) -> None:
    with WorkerProcess(command({"hello": actions}), runtime_dir) as worker, pytest.raises(RemoteProtocolError):
        while not isinstance(worker.end.event(), PeerClosed):
            pass


def test_death_before_the_ack(runtime_dir: Path) -> None:
    with WorkerProcess(command({"hello": [{"hello": {}}, {"exit": 9}]}), runtime_dir) as worker:
        worker.end.event()
        assert worker.closed()
        assert worker.wait() == 9


def test_a_connector_that_stays_silent(runtime_dir: Path) -> None:
    with WorkerProcess(command({"hello": [{"sleep": 60}]}), runtime_dir) as worker:
        worker.end.socket.settimeout(0.1)
        with pytest.raises(TimeoutError):
            worker.end.event()


def test_a_worker_that_never_connects(runtime_dir: Path) -> None:
    with pytest.raises(AssertionError, match="ended with 5"):
        WorkerProcess(command({"start": [{"exit": 5}]}), runtime_dir)


# --- death and worse -------------------------------------------------------------------------------------------------

DEATHS: dict[str, tuple[dict[str, Any], int]] = {
    "exit 0": ({"exit": 0}, 0),
    "exit 42": ({"exit": 42}, 42),
    "SIGKILL": ({"signal": "SIGKILL"}, -signal.SIGKILL),
    "SIGABRT": ({"abort": True}, -signal.SIGABRT),
    "SIGSEGV": ({"segfault": True}, -signal.SIGSEGV),
    "SIGILL": ({"signal": "SIGILL"}, -signal.SIGILL),
}


@pytest.mark.parametrize("name", DEATHS)
def test_each_death_has_its_status(runtime_dir: Path, name: str) -> None:
    action, status = DEATHS[name]
    with ready(on_embed(action), runtime_dir) as worker:
        worker.end.send(embed(), RAW)
        assert worker.closed()
        assert worker.wait() == status


def test_death_between_progress_frames(runtime_dir: Path) -> None:
    script = on_embed({"progress": {"completed": [1, 2]}}, {"signal": "SIGKILL"})
    with ready(script, runtime_dir) as worker:
        worker.end.send(embed(), RAW)
        assert [type(worker.end.event()).__name__ for _ in range(3)] == ["ProgressReceived"] * 2 + ["PeerClosed"]


def test_idle_death(runtime_dir: Path) -> None:
    with WorkerProcess(command({"background": [{"sleep": 0.05}, {"signal": "SIGKILL"}]}), runtime_dir) as worker:
        worker.end.shake_hands()
        assert worker.closed()


@pytest.mark.parametrize("action", [{"signal": "SIGSTOP"}, {"spin": True}, {"hold_gil": 3600}])
def test_a_frozen_worker_needs_sigkill(runtime_dir: Path, action: dict[str, Any]) -> None:
    marker = runtime_dir / "here"
    with ready(on_embed({"touch": str(marker)}, action), runtime_dir) as worker:
        worker.end.send(embed(), RAW)
        while not marker.exists():
            assert worker.process.poll() is None
        worker.end.close()  # the watcher can't act without the GIL
        with pytest.raises(Exception, match="timed out"):
            worker.wait(timeout=0.3)
        worker.process.kill()
        assert worker.wait() == -signal.SIGKILL


def test_ten_mib_of_stderr_without_a_newline(runtime_dir: Path) -> None:
    with ready(
        on_embed({"stderr": {"bytes": 10 * 2**20}}, {"stdout": {"bytes": 10 * 2**20, "text": "o"}}), runtime_dir
    ) as worker:
        assert isinstance(worker.end.call(embed(), RAW).reply, Vectors)
        assert worker.stop() == 0
        assert len(worker.stderr()) == 10 * 2**20
        assert worker.stdout() == b"o" * 10 * 2**20


def test_shutdown_and_sigterm_ignored(runtime_dir: Path) -> None:
    with ready({"ignore": ["SIGTERM"], "shutdown": [{"sleep": 3600}]}, runtime_dir) as worker:
        worker.end.send(Shutdown())
        worker.process.terminate()
        with pytest.raises(Exception, match="timed out"):
            worker.wait(timeout=0.3)


def test_a_worker_that_outlives_its_connection(runtime_dir: Path) -> None:
    script = {"ignore": ["EOF"], "eof": [{"sleep": 3600}]}
    with ready(script, runtime_dir) as worker:
        worker.end.close()
        with pytest.raises(Exception, match="timed out"):
            worker.wait(timeout=0.3)


def test_a_grandchild_that_keeps_stdout_open(runtime_dir: Path) -> None:
    pid_file = runtime_dir / "pid"
    script = on_embed({"grandchild": {"seconds": 60, "pid_file": str(pid_file), "new_session": True}})
    with ready(script, runtime_dir) as worker:
        worker.end.call(embed(), RAW)
        assert worker.stop() == 0
        pid = int(pid_file.read_text())
        os.kill(pid, 0)
        os.kill(pid, signal.SIGKILL)


def test_memory_that_grows(runtime_dir: Path) -> None:
    with ready(on_embed({"allocate_mb": 50}), runtime_dir) as worker:
        sizes = []
        for _ in range(3):
            worker.end.call(embed(), RAW)
            pong = worker.end.call(Ping("p")).reply
            assert isinstance(pong, Pong)
            sizes.append(pong.rss_mb)
    assert 45 <= sizes[2] - sizes[1] <= 60


def test_a_report_tells_what_the_worker_was_given(runtime_dir: Path) -> None:
    path = runtime_dir / "report.json"
    with ready({"ready": [{"report": str(path)}]}, runtime_dir, env={"SYNAPSE_WORKER_ID": "lane-1"}) as worker:
        report = json.loads(path.read_text())
        assert report["pid"] == worker.pid
        assert report["session"] == worker.pid
        assert report["environment"]["SYNAPSE_WORKER_ID"] == "lane-1"
        assert len(report["descriptors"]) < 10


def test_actions_can_run_beside_a_call(runtime_dir: Path) -> None:
    go = runtime_dir / "go"
    with ready(on_embed({"thread": [{"wait_for": str(go)}, {"exit": 3}]}, {"ccall": 3600}), runtime_dir) as worker:
        worker.end.send(embed(), RAW)
        time.sleep(0)
        go.touch()
        assert worker.wait() == 3
