"""Whole runs over real worker processes: good lanes pass, each sabotage fails its own gates and passes the others.

The toy models' reference is the clean bundle's own answer: what is tested here is the gate. That the clean numbers are
right is the parity suites' business (tests/cuda, tests/llama), and the default models' fixtures come from transformers.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engines.bundle import manifest
from engines.bundle.manifest import Artifact, Function
from engines.checkpoint.read import Checkpoint
from synapse_host import Host, HostConfig
from synapse_host.certification.run import Order, certify
from synapse_host.errors import BackendMissing, BundleInvalid, InvalidRequest
from synapse_host.placement.matrix import HardwareMatrix, load
from synapse_host.text.tokenizer import TextTokenizer
from tests.support import owned_bundle
from tests.support.evidence import N, failed, failed_groups, function
from tests.support.sabotage import (
    BUNDLES,
    DIMS,
    SABOTAGES,
    SCRIPTS,
    Sabotage,
    bent,
    embed_arrays,
    give_fixtures,
    id_rows,
    reference,
    rerank_arrays,
    rewrite,
    run,
    sabotaged,
)
from tests.support.scripted import expected_vector
from tests.support.small_bundle import write_bundle, write_matrix
from tests.support.toy_models import write_bert

pytestmark = pytest.mark.process
needs_onnx = pytest.mark.skipif(importlib.util.find_spec("onnxruntime") is None, reason="needs the extra 'cuda'")


# --- real engine, toy weights ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Toy embedder and cross-encoder with fixtures that their clean selves computed on onnx-cpu."""
    root = tmp_path_factory.mktemp("toys")
    rows, candidates = id_rows(1), id_rows(2, longest=10)
    queries = [row[:4] for row in id_rows(3, count=20)]
    of = [n % 20 for n in range(N)]
    found = {}
    for task in ("embed", "rerank"):
        source = write_bert(root / f"{task}-source", seed=7, layers=3, cross_encoder=task == "rerank")
        bundle = owned_bundle.write_bundle(Checkpoint.open(source, task=task), root / task, model_id=task)  # type: ignore[arg-type]
        found[task] = bundle.root

    matrix = onnx_matrix(root)

    async def on_onnx() -> tuple[Any, list[float]]:
        async with Host.open(matrix, found) as host:
            vectors = await host.embed_ids("embed", rows)
            logits = [
                float((await host.rerank_ids("rerank", queries[q], [row], raw=True))[0])
                for q, row in zip(of, candidates, strict=True)
            ]
            return vectors, logits

    vectors, logits = asyncio.run(on_onnx())
    give_fixtures(found["embed"], "embed", [None] * N, embed_arrays(rows, vectors))
    give_fixtures(found["rerank"], "rerank", [None] * N, rerank_arrays(queries, candidates, of, logits))
    return found


def onnx_matrix(folder: Path) -> HardwareMatrix:
    """A matrix whose lanes run on onnx-cpu alone."""
    path = folder / "onnx.yaml"
    engine = {"engine": "cuda", "device": "cpu", "format": "safetensors-package", "requires": "any"}
    lanes = {task: {"task": task, "engines": ["onnx-cpu"]} for task in ("embed", "rerank")}
    path.write_text(
        json.dumps({"version": 1, "hardware": {"any": {}}, "engines": {"onnx-cpu": engine}, "lanes": lanes})
    )
    return load(path)


@needs_onnx
@pytest.mark.parametrize("task", ["embed", "rerank"])
def test_a_good_lane_is_certified(task: str, toys: dict[str, Path], tmp_path: Path) -> None:
    document = run(toys[task], task, onnx_matrix(tmp_path))
    assert failed(document) == set()
    assert document.verdict == "certified"
    assert document.engine.observed == "owned-cuda"
    assert document.engine.kernel_revision is not None
    assert len(document.performance.single_ms) == N
    assert ("rows_per_s_32x64" in document.reported) == (task == "embed")
    assert {"single_p50_ms", "rows_per_s", "tokens_per_s"} <= document.reported.keys()
    assert [case.outcome for case in document.limits].count("sequence_too_long") == 1


@needs_onnx
@pytest.mark.parametrize("task", ["embed", "rerank"])
def test_an_int8_lane_is_judged_as_approximate(task: str, toys: dict[str, Path], tmp_path: Path) -> None:
    source = write_bert(tmp_path / "source", seed=7, layers=3, cross_encoder=task == "rerank")
    bundle = owned_bundle.write_bundle(
        Checkpoint.open(source, task=task),  # type: ignore[arg-type]
        tmp_path / task,
        model_id=task,
        dtype="int8",
    )
    shutil.copyfile(toys[task] / "fixtures.npz", bundle.root / "fixtures.npz")
    rewrite(bundle.root, fixtures=manifest.read(toys[task]).manifest.fixtures)
    plain = onnx_matrix(tmp_path)
    with pytest.raises(BackendMissing, match="int8 only where its dtype list says so"):
        run(bundle.root, task, plain)
    engine = msgspec.structs.replace(plain.engines["onnx-cpu"], dtype=("int8",))
    document = run(bundle.root, task, msgspec.structs.replace(plain, engines={"onnx-cpu": engine}))
    gates = {gate.name: gate for gate in document.gates}
    assert document.precision == "approximate"
    assert document.model.dtype == "int8"
    # Random weights have hardly a best answer; what agreement of the numbers there is, is judged, and nothing else.
    assert gates["pearson"].passed and gates["pearson"].threshold == 0.995
    assert failed(document) <= {"top1"}
    assert gates["batch_single"].passed and gates["order"].passed and gates["repeat"].passed


@needs_onnx
@pytest.mark.parametrize("kind", BUNDLES)
def test_each_bent_bundle_fails_its_own_gates_only(kind: str, toys: dict[str, Path], tmp_path: Path) -> None:
    task, _, group = BUNDLES[kind]
    document = run(sabotaged(toys[task], tmp_path / "b", kind), task, onnx_matrix(tmp_path))
    assert document.verdict == "uncertified"
    assert failed_groups(document) == {group}


# --- foreign workers with one fault ----------------------------------------------------------------------------------


def scripted_bundle(folder: Path, task: str, *, dtype: str = "f16", kind: str = "good") -> Path:
    """A bundle whose reference is what the scripted worker answers, or has one fault."""
    formats, unit = {"gguf": dtype}, {"normalize": False} if task == "embed" else {}
    write_bundle(folder, task=task, dims=DIMS, max_tokens=32, tokenizer=False, formats=formats, **unit)
    reference(folder, task, kind)
    return folder


HONEST = {
    task: Sabotage(task, set(), dtype="int8" if task == "rerank" else "f16") for task in ("embed", "rerank", "generate")
}


@pytest.mark.parametrize("sabotage", [*HONEST.values(), *SABOTAGES.values()], ids=[*HONEST, *SABOTAGES])
def test_each_sabotage_fails_its_own_gates_only_and_an_honest_worker_none(sabotage: Sabotage, tmp_path: Path) -> None:
    bundle = scripted_bundle(tmp_path / "toy", sabotage.task, dtype=sabotage.dtype, kind=sabotage.kind)
    script = {"dims": DIMS, **SCRIPTS.get(sabotage.worker, {})}
    with bent(sabotage.worker):
        document = run(bundle, sabotage.task, load(write_matrix(tmp_path, script, dtype=[sabotage.dtype])))
    assert failed(document) == sabotage.gates
    assert (document.verdict == "certified") == (not sabotage.gates)


def test_a_bundle_without_fixtures_ends_uncertified(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "toy")
    document = run(bundle, "embed", load(write_matrix(tmp_path)))
    assert document.verdict == "uncertified"
    assert document.reasons[0] == "reference_fixture_missing"
    assert document.engine.observed == "llama.cpp-worker"


def test_stale_texts_are_counted(tmp_path: Path) -> None:
    """Texts that the bundle's tokenizer now turns into other ids."""
    bundle = write_bundle(tmp_path / "toy", dims=DIMS, normalize=False)
    texts = [" ".join("abcdef"[(n >> k) % 6] for k in range(0, 9, 2)) for n in range(N)]
    rows = [TextTokenizer(manifest.read(bundle)).rows([text]).ids.tolist() for text in texts]
    vectors = [expected_vector(row, DIMS) for row in rows]
    give_fixtures(bundle, "embed", ["f f f", *texts[1:]], embed_arrays(rows, vectors))
    document = run(bundle, "embed", load(write_matrix(tmp_path, {"dims": DIMS})))
    assert document.fixture is not None and document.fixture.stale_rows == 1
    assert "reference_stale" in failed(document)


# --- the Neural Engine lane ------------------------------------------------------------------------------------------


def ane_bundle(folder: Path, task: str) -> Path:
    special, digest = {"cls": 2, "sep": 3}, "sha256:" + "0" * 64
    write_bundle(folder, task=task, dims=DIMS, max_tokens=32, normalize=False, tokenizer=False, special_ids=special)
    functions = [Function("s16", bucket=16), Function("s32", bucket=32)]
    entry = Artifact("coreml", "model.mlpackage", digest, "f16", tree=digest, layers=2, functions=functions)
    rewrite(folder, artifacts=[entry], token_types=task == "rerank")
    reference(folder, task, "framed")
    return folder


UNPLANNED = {"functions_unreported", "function_share", "cost_share"}


@pytest.mark.parametrize(
    ("task", "share", "plan", "gates"),
    [
        ("embed", 0.91, 91, set()),
        ("rerank", 0.89, 89, {"placement_share", "function_share"}),
        ("embed", None, 95, {"placement_share"}),
        ("embed", 0.99, None, UNPLANNED),
    ],
    ids=["reached", "missed", "unreported", "no framework to ask"],
)
def test_placement_decides_for_both_tasks(
    task: str, share: float | None, plan: int | None, gates: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One host of a user drives the Neural Engine: the lock of this test is nobody else's.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    script = {"dims": DIMS if task == "embed" else 1, "buckets": [16, 32], "placement_share": share}
    matrix, more = load(write_matrix(tmp_path, script, engine="ane")), {}
    if plan is not None:
        table = [function(name, ane=plan, cpu=100 - plan) for name in ("s16", "s32")], ["cast@mask_position"], None
        more = {"plans": lambda assignment: table}
    document = run(ane_bundle(tmp_path / "toy", task), task, matrix, **more)
    assert document.placement is not None and document.placement.share == share
    assert bool(document.placement.reason) == (plan is None)
    # A scripted worker is about as fast "on the CPU", so whether the speed-up is reached says nothing here.
    assert failed(document) - {"speedup"} == gates
    assert ("placement_unreported" in document.reasons) == (share is None)
    assert len(document.placement.forced_ms) == len(document.placement.native_ms) == 16


# --- orders that make no sense ---------------------------------------------------------------------------------------


def test_bad_orders(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "toy")
    matrix = load(write_matrix(tmp_path))

    def order(**changes: Any) -> None:
        asyncio.run(certify(Order(**{"lane": "embed", "model": "toy", "bundle": bundle, **changes}), matrix))

    with pytest.raises(InvalidRequest, match="did you mean 'embed'"):
        order(lane="embd")
    with pytest.raises(InvalidRequest, match="no engine 'cuda'"):
        order(engine="cuda")
    with pytest.raises(InvalidRequest, match="no lane 'rerank' for toy"):
        order(lane="rerank")
    rewrite(bundle, artifacts=[Artifact("coreml-less", "x", "sha256:" + "0" * 64, "f16")])
    described = json.loads(matrix.path.read_text())
    described["engines"]["other"] = described["engines"]["scripted"]
    described["lanes"]["embed"]["engines"].append("other")
    matrix.path.write_text(json.dumps(described))
    matrix = load(matrix.path)
    with pytest.raises(BackendMissing) as caught:
        order()
    assert [item["engine"] for item in caught.value.details["considered"]] == ["scripted", "other"]
    # One engine was asked for: the others are no part of the answer.
    with pytest.raises(BackendMissing) as caught:
        order(engine="other")
    assert [item["engine"] for item in caught.value.details["considered"]] == ["other"]
    assert "pinned" not in caught.value.message


def test_fixtures_of_another_task_or_width_are_refused(tmp_path: Path) -> None:
    matrix = load(write_matrix(tmp_path))
    bundle = write_bundle(tmp_path / "toy")
    give_fixtures(bundle, "embed", [None], embed_arrays([[1, 2]], [[1.0, 0, 0]]))
    with pytest.raises(BundleInvalid, match="dims"):
        run(bundle, "embed", matrix)
    give_fixtures(bundle, "rerank", [None], rerank_arrays([[1]], [[2]], [0], [0.5]))
    with pytest.raises(BundleInvalid, match="fixtures to rerank"):
        run(bundle, "embed", matrix)
    (bundle / "fixtures.npz").unlink()
    with pytest.raises(BundleInvalid, match="not readable"):
        run(bundle, "embed", matrix)


def test_a_configuration_that_demands_certificates_does_not_stop_certifying(tmp_path: Path) -> None:
    bundle = scripted_bundle(tmp_path / "toy", "embed")
    matrix = load(write_matrix(tmp_path, {"dims": DIMS}))
    config = HostConfig(require_certificate=True, data_dir=tmp_path / "none")
    document = asyncio.run(certify(Order("embed", "toy", bundle), matrix, config))
    assert document.verdict == "certified"
