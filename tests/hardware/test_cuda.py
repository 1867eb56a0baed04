"""The CUDA lane on a real NVIDIA GPU: `make hw-cuda`. Not executed anywhere until evidence/ holds its document.

One command, under ten minutes, no network (but for the default models, where they aren't installed yet). Weights are
seeded; what the GPU computes is compared with transformers' goldens (toys) and with the CPU provider's f32 graph (real
shapes), which the ordinary tests hold to transformers. The last tests go the whole way: worker process, then
certification of the real models.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.bundle import manifest
from engines.bundle.manifest import Bundle
from engines.checkpoint.read import Checkpoint
from engines.cuda import binding
from engines.cuda.devices import CudaDevice
from engines.cuda.engine import PRECISION_VARIABLE, CudaEngine, runtime_version
from engines.cuda.model import OwnedModel
from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import Phase
from engines.runtime.engine import WorkerOptions
from engines.runtime.progress import silent
from tests.cuda.cases import CASES, Case
from tests.cuda.conftest import batch_of, case, cosines, goldens  # noqa: F401 - the fixture
from tests.hardware import cuda_evidence, lanes
from tests.support import toy_models
from tests.support.owned_bundle import load_request, write_bundle
from tests.support.worker_client import module_worker, require_loaded

# The driver keeps descriptors of its own from the first context to the end of the process.
pytestmark = [pytest.mark.cuda, pytest.mark.timeout(600), pytest.mark.leaks_allowed("descriptors")]

ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "evidence"
REFERENCE = ROOT / ".venv-reference/bin/python"
"""Where torch lives, if anywhere: beside onnxruntime in one process two sets of CUDA libraries would meet."""
SOFTWARE = ("synapse-workers", "numpy", "onnx", "cuda-python", "nvidia-cublas", "nvidia-cuda-runtime")
NAMES = [c.name for c in CASES]
SHAPES: dict[str, Case] = {
    "minilm": Case(
        "minilm",
        toy_models.write_bert,
        options={"layers": 6, "hidden": 384, "heads": 12, "ffn": 1536, "vocab": 30522, "max_positions": 512},
        vocab=30522,
    ),
    "modernbert": Case(
        "modernbert",
        toy_models.write_modernbert,
        options={
            "layers": 22, "hidden": 768, "heads": 12, "ffn": 1152, "vocab": 50368, "max_positions": 8192,
            "local_attention": 128,
        },
        vocab=50368,
    ),
    "qwen3": Case(
        "qwen3",
        toy_models.write_qwen3,
        options={
            "layers": 28, "hidden": 1024, "heads": 16, "kv_heads": 8, "head_dim": 128, "ffn": 3072, "vocab": 151669,
            "max_positions": 8192,
        },
        vocab=151669,
    ),
}  # fmt: skip
TARGETS = {"minilm": 2_000_000, "modernbert": 700_000, "qwen3": 250_000}
"""Real tokens/s on an H200 (issue C). Recorded, and asserted only on that chip."""


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@pytest.fixture(scope="session")
def evidence(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """What the run found, written to evidence/ at its end, also of a run that failed."""
    facts = binding.driver_facts(0)
    engine = CudaEngine(WorkerOptions(device="cuda"))
    document: dict[str, Any] = {
        "engine": "owned-cuda",
        "device": facts.device,
        "driver_api": facts.driver_api,
        "compute_capability": list(facts.capability or ()),
        "onnxruntime": runtime_version(),
        "software": {"python": platform.python_version()} | {name: installed(name) for name in SOFTWARE},
        "kernel_revision": engine.identity().kernel_revision,
        "os": platform.platform(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "results": {},
        "outcomes": {item.name: "not run" for item in request.session.items if item.path == Path(__file__)},
    }
    yield document
    document["passed"] = set(document["outcomes"].values()) == {"passed"}
    cuda_evidence.write(document, EVIDENCE)


@pytest.fixture(autouse=True)
def outcome(evidence: dict[str, Any], request: pytest.FixtureRequest) -> Iterator[None]:
    """Write down how each test ended: figures alone don't say that a check failed."""
    yield
    evidence["outcomes"][request.node.name] = dict(request.node.user_properties).get("outcome", "unknown")


@pytest.fixture
def note(evidence: dict[str, Any], request: pytest.FixtureRequest) -> Callable[..., None]:
    """Record figures under the test's name."""

    def record(**figures: Any) -> None:
        evidence["results"].setdefault(request.node.name, {}).update(figures)

    return record


@pytest.fixture(scope="session")
def bundle_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Bundle]:
    """Return a case's bundle, written once; the real shapes as float16 packages."""
    made: dict[str, Bundle] = {}

    def get(c: Case) -> Bundle:
        if c.name not in made:
            folder = tmp_path_factory.mktemp("cuda")
            checkpoint = Checkpoint.open(c.checkpoint(folder / "checkpoint"))
            made[c.name] = write_bundle(checkpoint, folder / "bundle", dtype="f16" if c.name in SHAPES else "f32")
        return made[c.name]

    return get


Open = Callable[..., OwnedModel]


@pytest.fixture
def open_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Load a bundle on the GPU, or on the CPU provider; closed after the test."""
    opened: list[OwnedModel] = []

    def load(bundle: Bundle, *, device: str = "cuda", precision: str | None = None, **config: str) -> OwnedModel:
        if precision is not None:
            monkeypatch.setenv(PRECISION_VARIABLE, precision)
        else:
            monkeypatch.delenv(PRECISION_VARIABLE, raising=False)
        engine = CudaEngine(WorkerOptions(device=device, manifest=bundle.root / manifest.FILE_NAME))
        model = engine.load(load_request(bundle, **config), progress=silent())
        assert isinstance(model, OwnedModel)
        opened.append(model)
        return model

    yield load
    for model in opened:
        model.close()


def forward(model: OwnedModel, rows: list[list[int]]) -> np.ndarray:
    return model.forward(batch_of(rows), silent())


def mixed(vocab: int, count: int, seed: int = 0, longest: int = 512) -> list[list[int]]:
    """Rows of log-normal lengths, median 98."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(np.exp(rng.normal(np.log(98), 0.8, count)), 4, longest).astype(int)
    return [rng.integers(5, vocab, n).tolist() for n in lengths]


# --- where it runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert-mean", "modernbert-cls", "qwen3-last"])
def test_every_node_runs_on_the_gpu(
    name: str, open_model: Open, bundle_of: Callable[[Case], Bundle], note: Callable[..., None]
) -> None:
    model = open_model(bundle_of(case(name)))
    assert isinstance(model.device, CudaDevice)
    for route in (*model.device.routes, *model.device.captured):
        assert route.session.get_providers()[0] == "CUDAExecutionProvider"
        providers = {part.ep_name for part in route.session.get_provider_graph_assignment_info()}
        assert providers == {"CUDAExecutionProvider"}
    note(recorded_shapes=len(model.device._recorded))


# --- parity (6.7) ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("attention", ["auto", "fused"])
def test_toys_against_transformers(
    name: str,
    attention: str,
    open_model: Open,
    bundle_of: Callable[[Case], Bundle],
    goldens: dict[str, np.ndarray],  # noqa: F811
    note: Callable[..., None],
) -> None:
    output = forward(open_model(bundle_of(case(name)), attention=attention), case(name).rows())
    if case(name).task == "rerank":
        worst = float(np.abs(output[:, 0] - goldens[name]).max())
        note(max_error=worst)
        assert worst <= 0.02
    else:
        similar = cosines(output, goldens[name])
        note(min_cosine=float(similar.min()), mean_cosine=float(similar.mean()))
        assert similar.min() >= 0.999 and similar.mean() >= 0.9999


@pytest.mark.parametrize("name", ["bert-mean", "modernbert-rerank", "qwen3-rerank"])
def test_float32_oracle(
    name: str,
    open_model: Open,
    bundle_of: Callable[[Case], Bundle],
    goldens: dict[str, np.ndarray],  # noqa: F811
    note: Callable[..., None],
) -> None:
    model = open_model(bundle_of(case(name)), precision="f32", attention="fused")
    output = forward(model, case(name).rows())
    error = np.abs(output[:, 0] - goldens[name]) if case(name).task == "rerank" else 1 - cosines(output, goldens[name])
    note(worst=float(error.max()))
    assert error.max() <= 1e-3


@pytest.mark.parametrize("name", list(SHAPES))
def test_real_shapes_against_the_cpu_graph(
    name: str, open_model: Open, bundle_of: Callable[[Case], Bundle], note: Callable[..., None]
) -> None:
    rows = mixed(SHAPES[name].vocab, 400 if name == "minilm" else 64)
    if name != "minilm":
        rows += mixed(SHAPES[name].vocab, 2, seed=1, longest=1500)
    reference = forward(open_model(bundle_of(SHAPES[name]), device="cpu"), rows)
    output = forward(open_model(bundle_of(SHAPES[name])), rows)
    similar = cosines(output, reference)
    ours, theirs = (np.argsort(-(x @ x.T), axis=1)[:, :10] for x in (output, reference))
    overlap = float(np.mean([len(set(a) & set(b)) / 10 for a, b in zip(ours, theirs, strict=True)]))
    note(min_cosine=float(similar.min()), mean_cosine=float(similar.mean()), top10_overlap=overlap, rows=len(rows))
    assert similar.min() >= 0.999 and similar.mean() >= 0.9999 and overlap >= 0.995


# --- byte identity ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert-mean", "modernbert-mean", "qwen3-last"])
def test_repeats_are_byte_identical(name: str, open_model: Open, bundle_of: Callable[[Case], Bundle]) -> None:
    model = open_model(bundle_of(case(name)))
    rows = case(name).rows()
    first, other = forward(model, rows).tobytes(), forward(model, rows[::-1]).tobytes()
    for _ in range(5):
        assert forward(model, rows).tobytes() == first
        assert forward(model, rows[::-1]).tobytes() == other  # A, B, A


@pytest.mark.parametrize("name", ["bert-mean", "modernbert-mean", "qwen3-last"])
def test_a_recorded_launch_gives_the_same_bytes(
    name: str, open_model: Open, bundle_of: Callable[[Case], Bundle]
) -> None:
    """Same operators, same shape (4 rows of 32 tokens), once recorded and once launched node by node."""
    rows = toy_models.toy_rows(5, [32] * 4, case(name).vocab)
    bundle = bundle_of(case(name))
    recorded = open_model(bundle, attention="fused", cuda_graphs="1")
    assert isinstance(recorded.device, CudaDevice) and recorded.device.recorded_for(4, 32) == (4, 32)
    plain = open_model(bundle, attention="fused", cuda_graphs="0")
    assert isinstance(plain.device, CudaDevice) and not plain.device._recorded
    assert forward(recorded, rows).tobytes() == forward(plain, rows).tobytes()


# --- memory ----------------------------------------------------------------------------------------------------------


def test_out_of_memory_is_an_answer_and_the_worker_goes_on(
    open_model: Open, bundle_of: Callable[[Case], Bundle], note: Callable[..., None]
) -> None:
    """With little memory a request is halved or refused as oom; the next small one is answered either way."""
    config = {"gpu_mem_limit_mb": "320", "warm": "0", "cuda_graphs": "0", "attention": "fused"}
    model = open_model(bundle_of(SHAPES["minilm"]), **config)
    small = [[5, 6, 7]]
    before = forward(model, small)
    try:
        forward(model, [[5] * 512] * 256)
        outcome = "served"
    except EngineError as exc:
        assert exc.code is ErrorCode.OOM
        outcome = "oom"
    note(outcome=outcome)
    assert forward(model, small).tobytes() == before.tobytes()


def test_memory_stays_flat_over_many_shapes(
    open_model: Open, bundle_of: Callable[[Case], Bundle], note: Callable[..., None]
) -> None:
    model = open_model(bundle_of(SHAPES["minilm"]))
    assert isinstance(model.device, CudaDevice)
    for seed in range(20):
        forward(model, mixed(30522, 128, seed))
    free = model.device.cuda.memory_info()[0]
    for seed in range(20, 120):
        forward(model, mixed(30522, 128, seed))
    grown = free - model.device.cuda.memory_info()[0]
    note(grown_mib=grown / 2**20)
    assert grown < 512 * 2**20


# --- speed -----------------------------------------------------------------------------------------------------------


def seconds(call: Callable[[], object], *, repeats: int = 5) -> float:
    """Return the median wall time after two warm-up calls; every call ends with its rows on the host."""
    for _ in range(2):
        call()
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


@pytest.mark.parametrize("name", list(SHAPES))
def test_throughput(
    name: str,
    open_model: Open,
    bundle_of: Callable[[Case], Bundle],
    note: Callable[..., None],
    evidence: dict[str, Any],
) -> None:
    model = open_model(bundle_of(SHAPES[name]))
    vocab = SHAPES[name].vocab
    rows = mixed(vocab, 2048)
    tokens = sum(map(len, rows))
    figures: dict[str, Any] = {"mixed_tokens_per_s": tokens / seconds(lambda: forward(model, rows))}
    for width in model.policy.ladder:
        if width > 2048:
            break
        full = [[7] * min(width, model.facts.max_tokens)] * min(512, model.policy.max_rows(width))
        figures[f"bucket_{width}_tokens_per_s"] = sum(map(len, full)) / seconds(lambda f=full: forward(model, f))  # type: ignore[misc]
    figures["single_16_ms"] = 1000 * seconds(lambda: forward(model, [[7] * 16]), repeats=50)
    figures["single_128_ms"] = 1000 * seconds(lambda: forward(model, [[7] * 128]), repeats=50)
    rival = torch_rate(bundle_of(SHAPES[name]).root.parent / "checkpoint", rows)
    if "tokens_per_s" in rival:
        figures["ratio_to_torch_fp16_sdpa"] = figures["mixed_tokens_per_s"] / rival["tokens_per_s"]
    note(**figures, torch_fp16_sdpa=rival, target=TARGETS[name])
    if "H200" in evidence["device"]:
        assert figures["mixed_tokens_per_s"] >= TARGETS[name]


def torch_rate(folder: Path, rows: list[list[int]], device: str = "cuda") -> dict[str, Any]:
    """Return tokens/s of the same model in torch fp16 with SDPA, in a process of its own; or why there are none."""
    python = str(REFERENCE) if REFERENCE.is_file() else sys.executable
    done = subprocess.run(
        [python, str(Path(__file__).with_name("torch_rate.py")), str(folder), device],
        input=json.dumps([len(row) for row in rows]),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    found: dict[str, Any] = json.loads(lines[-1]) if done.returncode == 0 and lines else {"why": done.stderr[-300:]}
    return found


# --- the whole way ---------------------------------------------------------------------------------------------------


def test_the_worker_process_serves_on_the_gpu(
    bundle_of: Callable[[Case], Bundle], open_model: Open, note: Callable[..., None]
) -> None:
    """Handshake, LOAD, EMBED_BATCH with the phase switch, PING and the same bytes again, SHUTDOWN."""
    bundle, c = bundle_of(case("bert-mean")), case("bert-mean")
    here = open_model(bundle)
    expected = forward(here, c.rows())
    here.close()
    entry = bundle.artifacts("safetensors-package")[0]
    arguments = ["--manifest", str(bundle.root / manifest.FILE_NAME)]
    started = time.perf_counter()
    with module_worker("engines.cuda", device="cuda", arguments=arguments) as client:
        note(spawn_to_hello_ms=1000 * (time.perf_counter() - started))
        flags = client.hello.engine.build_flags
        assert isinstance(flags, dict) and (flags["device"], flags["backend"]) == ("cuda", "cuda")
        assert client.hello.manifest_digest == bundle.digest
        loaded = require_loaded(client.load(bundle.path(entry.path), entry.digest, entry.format))
        note(cold_load_ms=loaded.cold_load_ms)
        exchange = client.embed(loaded.model_ref, c.rows())
        assert cosines(exchange.floats, expected).min() >= 0.99999
        switch = next(frame for frame in exchange.progress if frame.phase is Phase.INFERENCE)
        assert all(frame.completed < switch.completed for frame in exchange.progress[: exchange.progress.index(switch)])
        assert client.ping().models_loaded == 1
        assert client.embed(loaded.model_ref, c.rows()).raw == exchange.raw
        assert client.shutdown() == 0 and client.stdout() == ""


@pytest.mark.parametrize("lane", ["embed", "rerank"])
def test_certification(lane: str, note: Callable[..., None]) -> None:
    """The real models through a host and its worker, against their fp32 fixtures, as `synapse certify` does it."""
    summary = lanes.certified(lane, "cuda", EVIDENCE)
    note(**summary)
    assert summary["verdict"] == "certified", summary
