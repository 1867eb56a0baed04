"""Numbers and inputs: reports 40 to 55."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engines.ane.artifact import prepared
from engines.ane.stderr_scan import StderrScan
from engines.bundle.checkpoint import Checkpoint
from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import Load, Pooling
from engines.runtime.batch import RerankPairs, TokenBatch
from engines.runtime.engine import WorkerOptions
from engines.runtime.progress import silent
from synapse_host import Host, certificates
from synapse_host.config import Windows
from synapse_host.errors import WORKER_ERRORS, EngineCrashed, InvalidRequest, QueueFull, SequenceTooLong
from synapse_host.figures import STAGES
from synapse_host.results import sigmoid
from tests.faults.reports.trial import ROOT, TREE, run_limited, toy_host
from tests.host.conftest import EMBED, FAST, KILLS, POISON, crash, embed, on, poison, serve, spawns, until
from tests.host.test_certificates import BOUND
from tests.llama import reference
from tests.support import scripted, toy_models
from tests.support.evidence import N, embed_inputs, evidence, rerank_inputs
from tests.support.toy_gguf import ToyGguf, build_toy

pytestmark = [pytest.mark.process, pytest.mark.fault]

NONFINITE = WORKER_ERRORS[ErrorCode.NONFINITE_OUTPUT]


# --- the real llama worker's model, small ----------------------------------------------------------------------------


def token_batch(rows: Sequence[Sequence[int]]) -> TokenBatch:
    flat = np.array([token for row in rows for token in row], np.int32)
    return TokenBatch(flat, np.cumsum([0, *map(len, rows)]).astype(np.int32))


@pytest.fixture
def llama(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Build a toy with *write* and load it in this process; ``.toy`` is its files."""
    from engines.llama.engine import LlamaEngine

    opened: list[Any] = []

    def load(write: Callable[..., Path], config: dict[str, str] | None = None, **recipe: Any) -> tuple[Any, ToyGguf]:
        toy = build_toy(tmp_path, f"toy{len(opened)}", write, **recipe)
        request = Load("load", str(toy.path), toy.digest, "gguf", {"threads": "1", **(config or {})})
        model = LlamaEngine(WorkerOptions(device="cpu")).load(request, progress=silent())
        opened.append(model)
        return model, toy

    yield load
    for model in opened:
        model.close()


def vectors(model: Any, rows: Sequence[Sequence[int]], pooling: Pooling = Pooling.MEAN) -> np.ndarray:
    return model.embed(token_batch(rows), pooling=pooling, normalize=True, packed_width=None, progress=silent())


# --- the reports -----------------------------------------------------------------------------------------------------


@pytest.mark.report("ggml-org/llama.cpp#14812")
async def test_report_40_nan_after_a_thousand_requests(make):
    """ggml-org/llama.cpp#14812 (also 13854): null vectors after hours and no error; ours is typed, and no strike."""
    lane = make({"rules": [on("EMBED_BATCH", {"reply": {"nan": 5}}, nth=1000)]})
    for n in range(999):
        await lane.submit(embed([n + 1]), stage=EMBED)
    with pytest.raises(NONFINITE):
        await serve(lane)
    await serve(lane)
    assert lane.health()["strikes"] == 0 and lane.health()["generation"] == 1


@pytest.mark.report("ollama/ollama#15582")
def test_report_41_nan_on_one_device_only():
    """ollama/ollama#15582: NaN on the GPU, fine on the CPU; each device has its own run, verdict and certificate."""
    assert verdict() == ("certified", [])
    counts = dict.fromkeys(STAGES["embed"], 0) | {"singles": 1}
    spoilt = embed_inputs(cosine=[None, *[1.0] * (N - 1)])
    assert verdict(inputs=spoilt, non_finite=counts) == ("uncertified", ["unmeasured", "non_finite"])
    assert certificates.path_of("cpu", "0" * 64) != certificates.path_of("gpu", "0" * 64)
    assert certificates.void_because(BOUND, BOUND) == []
    elsewhere = msgspec.structs.replace(BOUND, device="cuda:1")
    assert certificates.void_because(BOUND, elsewhere) == ["the device changed cuda → cuda:1"]


def verdict(task: str = "embed", **changes: Any) -> tuple[str, list[str]]:
    """Judge a flawless run with one thing of it spoilt."""
    judged = evidence(task, **changes)
    return judged.verdict, judged.reasons


@pytest.mark.report("huggingface/text-embeddings-inference#932")
def test_report_42_a_poison_request(tmp_path):
    """huggingface/text-embeddings-inference#932: a retried NaN took every replica; nothing here is sent twice."""
    state = tmp_path / "state"

    async def scenario():
        matrix, models = toy_host(tmp_path, {**KILLS, "state": str(state)})
        async with Host.open(matrix, models, FAST) as host:
            errors = []
            for attempt in (1, 2, 2):
                with pytest.raises(EngineCrashed) as caught:
                    await host.embed_ids("toy", [[POISON, 1]])
                errors.append(caught.value)
                assert spawns(state) == attempt, "somebody sent it again"
        first, second, third = errors
        assert first.safe_to_retry and not first.quarantined and first.details["stage"] == "embed"
        assert second.details["same_input"] and second.details["fingerprint"] == first.details["fingerprint"]
        assert third.details == {"lane_id": "embed", "quarantined": True} and "same input" in third.message

    run_limited(scenario)


@pytest.mark.report("ggml-org/llama.cpp#12836")
@pytest.mark.llama
def test_report_43_sizes_on_which_the_library_asserts(llama):
    """ggml-org/llama.cpp#12836 (also 26352, gpustack/llama-box#13): batch above ubatch aborts; ours fits every call."""
    for key, value in (("ubatch_size", "0"), ("batch_size", "-1"), ("encode_chunk_tokens", "many")):
        with pytest.raises(EngineError) as caught:
            llama(toy_models.write_bert, {key: value})
        assert caught.value.code is ErrorCode.CONFIG_INVALID
    model, _ = llama(
        toy_models.write_bert, {"encode_chunk_tokens": "256", "ubatch_size": "64"}, seed=4, max_positions=512
    )
    assert np.isfinite(vectors(model, [[7]])).all()
    assert np.isfinite(vectors(model, [[7], [8], [9]])).all()
    # Longer than a usual chunk, and more rows than tokens of one.
    assert vectors(model, toy_models.toy_rows(5, [300, 1, 65, 512])).shape == (4, 64)
    assert vectors(model, [[7]] * 256).shape == (256, 64)


@pytest.mark.report("ggml-org/llama.cpp#25447")
@pytest.mark.llama
def test_report_44_rerank_scores_that_are_no_scores(llama, tmp_path):
    """ggml-org/llama.cpp#25447 (also 16407, vllm-project/vllm#21681, withcatai/node-llama-cpp#617, #550): near zero,
    NaN, or a sigmoid twice. A Qwen3 GGUF doesn't rerank, and logits get one sigmoid, at the host."""
    model, _ = llama(toy_models.write_qwen3, generate=True)
    pairs = RerankPairs(np.array([10], np.int32), token_batch([[11], [12]]))
    with pytest.raises(EngineError, match="Qwen3") as caught:
        model.rerank(pairs, progress=silent())
    assert caught.value.code is ErrorCode.OPERATION_MISMATCH

    async def scenario():
        matrix, models = toy_host(tmp_path, task="rerank")
        async with Host.open(matrix, models, FAST) as host:
            documents = [[n] for n in range(20, 60)]
            scores = await host.rerank_ids("toy", [5], documents)
            logits = await host.rerank_ids("toy", [5], documents, raw=True)
        assert logits.tolist() == [scripted.expected_score([5], row) for row in documents]
        assert np.allclose(scores, 1 / (1 + np.exp(-logits.astype(np.float64))))
        assert (scores > 0).all() and (scores < 1).all() and np.ptp(scores) > 0.3
        assert np.array_equal(np.argsort(scores), np.argsort(logits))
        assert np.array_equal(scores, sigmoid(logits))

    run_limited(scenario)


@pytest.mark.report("abetlen/llama-cpp-python#2051")
@pytest.mark.llama
def test_report_45_lengths_around_a_batch(llama):
    """abetlen/llama-cpp-python#2051 (also 1380, ollama/ollama#14121): several texts failed, 513 ids came out wrong."""
    model, toy = llama(toy_models.write_bert, seed=6, max_positions=640)
    known = reference.Weights(Checkpoint.open(toy.checkpoint))
    rows = toy_models.toy_rows(7, [511, 512, 513, 3, 2, 1])
    for pooling in Pooling:
        ours = vectors(model, rows, pooling)
        theirs = np.stack([reference.pooled(reference.bert_states(known, row), pooling.value) for row in rows])
        assert reference.cosine(ours, theirs).min() >= 0.9999, pooling


@pytest.mark.report("ggml-org/llama.cpp#5733")
def test_report_46_nothing_to_compute(tmp_path):
    """ggml-org/llama.cpp#5733 (also vllm-project/vllm#7283, huggingface/text-generation-inference#1485,
    sgl-project/sglang#5621): empty input hung or divided by zero; here it is refused before a worker is started."""
    state = tmp_path / "state"

    async def scenario():
        matrix, models = toy_host(tmp_path, {"state": str(state)}, frame=False)
        async with Host.open(matrix, models, FAST) as host:
            empty: list[Any] = [
                lambda: host.embed_ids("toy", []),
                lambda: host.embed_ids("toy", [[]]),
                lambda: host.embed_ids("toy", [[1], [], [2]]),
                lambda: host.embed("toy", []),
                lambda: host.embed("toy", [""]),
                lambda: host.embed("toy", ["a", "  \n\t "]),
            ]
            for call in empty:
                with pytest.raises(InvalidRequest) as caught:
                    await call()
                assert caught.value.exit_code == 2
            assert spawns(state) == 0

    run_limited(scenario)


@pytest.mark.report("ggml-org/llama.cpp#7277")
async def test_report_47_an_input_that_is_too_long(make, tmp_path):
    """ggml-org/llama.cpp#7277: too long an input came back as itself; ours is refused, replies are measured."""
    state = tmp_path / "state"
    matrix, models = toy_host(tmp_path, {"state": str(state)})
    async with Host.open(matrix, models, FAST) as host:
        with pytest.raises(SequenceTooLong) as caught:
            await host.embed_ids("toy", [[1] * 16, [1] * 17])
        assert caught.value.details == {"index": 1, "tokens": 17, "max_tokens": 16}
        assert spawns(state) == 0
        assert (await host.embed_ids("toy", [[1] * 16])).shape == (1, 8)
    lane = make(poison({"reply": {"set": {"dims": 2}, "raw_bytes": 8}}))
    assert (await crash(lane)).details["cause"] == "protocol"


NO_GPU = """
import sys
from pathlib import Path
from engines.bundle.checkpoint import Checkpoint
from engines.cuda import binding
from engines.cuda.graphs.families import build
from engines.cuda.graphs.builder import Variant, WeightStore
from engines.protocol.errors import EngineError
from tests.cuda.test_graph import spec_of
from tests.support.toy_models import write_bert

checkpoint = Checkpoint.open(write_bert(Path(sys.argv[1])))
graph = build(spec_of(checkpoint), WeightStore(checkpoint.tensors, "f32"), Variant())
try:
    binding.session(graph, threads=1, cuda={"device_id": "0"})
except EngineError as exc:
    print(exc.code.value)
else:
    print("a session on the CPU")
"""


@pytest.mark.report("microsoft/onnxruntime#23372")
def test_report_48_cuda_that_is_not_there(tmp_path):
    """microsoft/onnxruntime#23372 (also 17801, 26232): without CUDA it ran on the CPU in silence; ours refuses."""
    if importlib.util.find_spec("onnxruntime") is None:
        pytest.skip("needs the extra 'cuda' (onnxruntime)")
    done = subprocess.run(
        [sys.executable, "-c", NO_GPU, str(tmp_path / "toy")],
        env={**os.environ, **TREE, "CUDA_VISIBLE_DEVICES": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "backend_missing\n", done.stderr


@pytest.mark.report("microsoft/onnxruntime#32569")
def test_report_49_wrong_but_finite():
    """microsoft/onnxruntime#32569 (also 16934, 22275): finite and wrong on one OS; numbers and build both count."""
    scores = rerank_inputs().reference
    shifted: list[float | None] = [score + 0.8 for score in scores]
    wrong = rerank_inputs(single=shifted, batch=list(shifted), permuted=list(shifted))
    assert verdict("rerank") == ("certified", [])
    assert verdict("rerank", inputs=wrong) == ("uncertified", ["max_error"]), "order and correlation are perfect"
    said = certificates.void_because(BOUND, msgspec.structs.replace(BOUND, os_build="24B83"))
    assert said == ["the operating system build changed 23F79 → 24B83"]


@pytest.mark.report("apple/coremltools#2758")
async def test_report_50_core_ml_compilers(make, tmp_path):
    """apple/coremltools#2758 (also 2367, 2110, ggml-org/whisper.cpp#937, soniqo/speech-swift#286): a compile that
    fails in silence, kills, never ends, or starts anew at every launch."""
    scan = StderrScan()
    with scan:
        os.write(2, b"E5RT: ANECCompile() FAILED\n")
    with pytest.raises(EngineError) as caught:
        scan.check("function s128")
    assert caught.value.code is ErrorCode.INVALID_PLACEMENT
    folder = tmp_path / "bundle"
    folder.mkdir()
    function = {"inputs": {}, "outputs": {}, "bundle": "b.mlmodelc", "multi": False, "first_load_ms": 5}
    source = "sha256:" + "1" * 64
    (folder / "preparation.json").write_text(
        json.dumps(
            {"source_digest": source, "compiled_digest": source, "os_build": "24A335", "functions": {"s128": function}}
        )
    )
    compiled = folder / "compiled"
    assert prepared(compiled, source_digests=[source], os_build="24A335", allow_cold=False).functions["s128"]
    with pytest.raises(EngineError, match="24B83") as caught:
        prepared(compiled, source_digests=[source], os_build="24B83", allow_cold=False)
    assert caught.value.code is ErrorCode.SPECIALIZATION_MISSING
    windows = Windows(setup=0.4, control=20.0, ping=20.0, inference=20.0)
    endless = make({"rules": [on("LOAD", {"sleep": 600})]}, config=dataclasses.replace(FAST, windows=windows))
    with pytest.raises(EngineCrashed) as caught:
        await endless.load()
    assert (caught.value.details["cause"], caught.value.details["stage"]) == ("silence", "load")
    # The load "succeeds", the first predictions kill.
    killed = make({"rules": [on("EMBED_BATCH", {"signal": "SIGKILL"})]})
    await killed.load()
    for _ in range(3):
        error = await crash(killed)
    assert error.quarantined and killed.health()["state"] == "quarantined"


@pytest.mark.report("microsoft/onnxruntime#9799")
def test_report_51_numbers_that_depend_on_the_shape():
    """microsoft/onnxruntime#9799: wrong results in some shapes of a batch; a row that its neighbours change fails."""
    spoilt = [0.99999] * N
    spoilt[32] = 0.99
    assert verdict() == ("certified", [])
    inputs = embed_inputs(batch_own=list(spoilt), batch_best=list(spoilt))
    assert verdict(inputs=inputs) == ("uncertified", ["batch_single"])


@pytest.mark.report("microsoft/onnxruntime#9313")
async def test_report_52_memory_that_grows(make):
    """microsoft/onnxruntime#9313 (also 11118, 22271): RSS grew with every new shape; PING tells it, health shows it."""
    lane = make(poison({"allocate_mb": 64}))
    await lane.load()
    await lane.ping()
    before = lane.health()
    assert before["rss_growth_mb"] == 0 and before["rss_mb"] > 5
    await serve(lane, POISON)
    await lane.ping()
    after = lane.health()
    assert after["rss_growth_mb"] >= 48 and after["rss_mb"] - before["rss_mb"] == after["rss_growth_mb"]


PINNED = """
import json, os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from engines.cuda import settings
from engines import machine
from synapse_host import hardware, permits
print(json.dumps([settings.parse({}, device="cpu", precision="f32").threads, machine.usable_cores(),
                  permits.Permits().limit("cpu"), hardware.detect().cores]))
"""


@pytest.mark.report("microsoft/onnxruntime#10166")
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no cpuset on this system")
def test_report_53_threads_under_a_cpuset():
    """microsoft/onnxruntime#10166 (also 8313, 7207, headroomlabs-ai/headroom#2885): threads by the machine's size."""
    done = subprocess.run(
        [sys.executable, "-c", PINNED],
        env={**os.environ, **TREE},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [1, 1, 1, 1]


@pytest.mark.report("vllm-project/vllm#12754")
async def test_report_54_a_fresh_interpreter(make, tmp_path):
    """vllm-project/vllm#12754 (also 8893, huggingface/tokenizers#187): CUDA and pools don't survive a fork; we exec."""
    from tokenizers import Tokenizer, models

    # The host has used its tokenizer's thread pool, and this process has far more loaded than a worker may see.
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).encode_batch(["a"] * 100)
    report = tmp_path / "report"
    lane = make({"ready": [{"report": str(report)}]})
    await serve(lane)
    told = json.loads(report.read_text())
    inherited = {"pytest", "_pytest", "hypothesis", "tokenizers", "synapse_host"} & set(told["modules"])
    assert not inherited, f"the worker was forked, not started: {inherited}"
    assert told["pid"] == lane.health()["worker_pid"] and told["ppid"] == os.getpid()


@pytest.mark.report("ray-project/ray#64181")
async def test_report_55_running_requests_at_sigterm(make, tmp_path):
    """ray-project/ray#64181: SIGTERM gave running requests a 500; ours are answered, the queued get a typed refusal."""
    go = tmp_path / "go"
    lane = make(poison({"wait_for": str(go)}))
    await lane.load()
    running = asyncio.create_task(serve(lane, POISON))
    await until(lambda: lane.health()["state"] == "serving")
    queued = [asyncio.create_task(serve(lane)) for _ in range(3)]
    await until(lambda: lane.health()["waiting"] == 3)
    closing = asyncio.create_task(lane.aclose(drain=60.0))
    for error in await asyncio.gather(*queued, return_exceptions=True):
        assert isinstance(error, QueueFull) and error.details["reason"] == "stopping"
    go.touch()
    await asyncio.gather(running, closing)
