"""The scripted worker's legal answers, and the parts of a script that choose. What its misbehaviours look like from the
host's end is what tests/host and the fault campaign expect of them."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest

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
    Text,
    Vectors,
)
from tests.support.peer import IDS as RAW
from tests.support.peer import embed, ready
from tests.support.scripted import (
    expected_score,
    expected_sequence_score,
    expected_text,
    expected_vector,
)

pytestmark = pytest.mark.process


def on_embed(*actions: dict[str, Any], **extra: Any) -> dict[str, Any]:
    return {**extra, "rules": [{"on": "EMBED_BATCH", "do": list(actions)}]}


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
