"""int8 packages on the CPU: close to float32, the same alone and in a batch, and never on the GPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from engines.bundle import fixtures, manifest
from engines.bundle.digest import PREFIX, file_digest
from engines.bundle.manifest import Artifact, Bundle
from engines.checkpoint import safetensors
from engines.checkpoint.package import profile_of, write_package
from engines.checkpoint.read import Checkpoint
from engines.cuda.engine import CudaEngine
from engines.cuda.graphs.builder import ModelSpec, Variant, WeightStore
from engines.cuda.graphs.families import build
from engines.protocol.errors import EngineError, ErrorCode
from engines.runtime.batch import TokenBatch
from engines.runtime.engine import Probe, WorkerOptions
from engines.runtime.progress import silent
from tests.cuda.conftest import Bundles, Loader, batch_of, case, cosines, real_bundle
from tests.support.owned_bundle import load_request

BERT = ("bert-mean", "bert-cls", "bert-rerank")


@pytest.mark.parametrize("name", BERT)
def test_close_to_float(name: str, bundles: Bundles, load: Loader, goldens: dict[str, np.ndarray]) -> None:
    got = load(bundles(name, dtype="int8")).forward(batch_of(case(name).rows()), silent())
    if case(name).task == "rerank":
        spread = goldens[name].max() - goldens[name].min()
        assert np.abs(got[:, 0] - goldens[name]).max() <= 0.05 * spread
        assert np.corrcoef(got[:, 0], goldens[name])[0, 1] >= 0.995
    else:
        assert cosines(got, goldens[name]).min() >= 0.99
    assert np.abs(got.reshape(-1) - goldens[name].reshape(-1)).max() > 1e-5, "these are float32's numbers"


@pytest.mark.parametrize("name", BERT)
def test_a_row_is_the_same_alone_and_in_a_batch(name: str, bundles: Bundles, load: Loader) -> None:
    model = load(bundles(name, dtype="int8"))
    rows = case(name).rows()
    together = model.forward(batch_of(rows), silent())
    alone = np.concatenate([model.forward(batch_of([row]), silent()) for row in rows])
    # A float sum in another order may tip a value to the next of 255 levels; a shared range would move all of them.
    assert np.abs(together - alone).max() <= 2e-3 * np.abs(alone).max()
    assert np.median(np.abs(together - alone)) <= 1e-5


def test_the_graph_multiplies_integers_and_stores_them(bundles: Bundles) -> None:
    import onnx

    bundle = bundles("bert-rerank", dtype="int8")
    opened = safetensors.SafetensorsFile.open(bundle.path("model.safetensors"))
    tensors = {name: opened.array(name) for name in opened.header.tensors}
    fields = bundle.manifest
    assert isinstance(fields.config, dict)
    config = {k: float(v) if isinstance(v, str) and k.endswith("eps") else v for k, v in fields.config.items()}
    spec = ModelSpec("bert", "rerank", 1, config, token_types=True)
    graph = build(spec, WeightStore(tensors, "f32"), Variant(int8=True))
    kinds = [node.op_type for node in onnx.load_model_from_string(graph.model).graph.node]
    layers = spec.integer("num_hidden_layers")
    assert kinds.count("MatMulIntegerToFloat") == 6 * layers
    assert kinds.count("MatMul") == 6 * layers + 2  # attention's own, channels apart, pooler and classifier
    assert sum(array.dtype == np.int8 for array in graph.weights.values()) == 6 * layers
    with pytest.raises(EngineError, match="int8 is built for bert on the CPU"):
        build(spec, WeightStore(tensors, "f32"), Variant(attention="packed", int8=True))


def int8_of(name: str, folder: Path) -> Bundle:
    """Return a bundle of an installed default model's weights in int8, with its own fixtures."""
    real = real_bundle(name)
    known = real.manifest
    (plain,) = [entry for entry in real.artifacts("safetensors-package") if entry.dtype == "f32"]
    assert isinstance(known.config, dict)
    checkpoint = Checkpoint.from_package(real.path(plain.path), config=known.config, family="bert", task=known.task)
    file = folder / "model.safetensors"
    size = write_package(checkpoint, file, profile=profile_of(name), dtype="int8")
    entry = Artifact("safetensors-package", file.name, PREFIX + file_digest(file), "int8", bytes=size)
    manifest.write(folder, msgspec.structs.replace(known, artifacts=[entry]))
    shutil.copyfile(real.path("fixtures.npz"), folder / "fixtures.npz")
    return manifest.read(folder)


def test_the_real_embedder_agrees_with_its_reference(load: Loader, tmp_path: Path) -> None:
    bundle = int8_of("minilm", tmp_path)
    arrays = fixtures.read(bundle.path("fixtures.npz")).arrays
    ids, cu = arrays["input_ids"], arrays["cu_seqlens"]
    got = load(bundle).forward(TokenBatch(ids, cu), silent())
    found = cosines(got, arrays["vectors_q"] * arrays["vectors_scale"][:, None])
    assert found.min() >= 0.99 and found.mean() >= 0.999


def test_the_real_reranker_agrees_with_its_reference(load: Loader, tmp_path: Path) -> None:
    bundle = int8_of("ms-marco", tmp_path)
    arrays = fixtures.read(bundle.path("fixtures.npz")).arrays
    queries = np.split(arrays["query_ids"], arrays["query_cu"][1:-1])
    candidates = np.split(arrays["candidate_ids"], arrays["candidate_cu"][1:-1])
    of, logits = arrays["query_of"], arrays["logits"]
    rows = [[101, *queries[q], 102, *row, 102] for q, row in zip(of, candidates, strict=True)]
    got = load(bundle).rerank_sequences(batch_of(rows), progress=silent())
    assert np.corrcoef(got, logits)[0, 1] >= 0.9995
    assert np.abs(got - logits).max() <= 0.4
    best = [(logits[of == q].max(), logits[of == q][got[of == q].argmax()]) for q in np.unique(of)]
    assert np.mean([mine == theirs for theirs, mine in best]) >= 0.95


def test_the_gpu_refuses_it(bundles: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = bundles("bert-mean", dtype="int8")
    engine = CudaEngine(WorkerOptions(device="cuda", manifest=bundle.root / manifest.FILE_NAME))
    monkeypatch.setattr(engine, "probe_floor", lambda: Probe("ok", "ok", {}, {}))
    with pytest.raises(EngineError, match="only the CPU serves") as caught:
        engine.load(load_request(bundle), progress=silent())
    assert caught.value.code is ErrorCode.MODEL_UNSUPPORTED


LAYER = "encoder.layer.0."


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (LAYER + "output.dense.weight.scale", lambda a: put(a, np.nan), "dense.weight.scale holds NaN or infinity"),
        (LAYER + "output.dense.weight.scale", lambda a: put(a, np.inf), "dense.weight.scale holds NaN or infinity"),
        (LAYER + "output.dense.weight.scale", lambda a: put(a, 0.0), "scale holds a value that isn't above 0"),
        (LAYER + "attention.self.key.weight.scale", lambda a: None, "key.weight.scale is missing"),
        (LAYER + "attention.self.query.weight.apart", lambda a: a[:, :3].copy(), r"apart has shape \[64, 3\]"),
        ("apart", lambda a: put(a, 64), "apart holds .*not different channels below 64"),
        ("apart", lambda a: put(a, a[1]), "apart holds .*not different channels below 64"),
        (LAYER + "intermediate.dense.weight.apart", lambda a: put(a, np.inf), "dense.weight.apart holds NaN"),
        (LAYER + "intermediate.dense.bias", lambda a: put(a, np.nan), "intermediate.dense.bias holds NaN or infinity"),
        (LAYER + "output.dense.weight", lambda a: a.astype(np.float32), "dtype F32, an int8 package has I8"),
    ],
)
def test_a_damaged_package_is_refused(
    name: str, change: Callable[[np.ndarray], np.ndarray | None], words: str, bundles: Bundles, tmp_path: Path
) -> None:
    refused(forged(bundles("bert-rerank", dtype="int8"), tmp_path, name, change), words)


def test_a_manifest_that_calls_it_f32_is_refused(bundles: Bundles, tmp_path: Path) -> None:
    source = bundles("bert-rerank", dtype="int8")
    refused(forged(source, tmp_path, "apart", np.copy, dtype="f32"), "dtype I8, only F32")


def put(array: np.ndarray, value: float) -> np.ndarray:
    array.flat[0] = value
    return array


def refused(bundle: Bundle, words: str) -> None:
    engine = CudaEngine(WorkerOptions(device="cpu", manifest=bundle.root / manifest.FILE_NAME))
    with pytest.raises(EngineError, match=words) as caught:
        engine.load(load_request(bundle), progress=silent())
    assert caught.value.code is ErrorCode.ARTIFACT_INVALID


def forged(
    source: Bundle, root: Path, name: str, change: Callable[[np.ndarray], np.ndarray | None], **fields: str
) -> Bundle:
    """Copy a bundle with one tensor changed, or gone where *change* returns None, described by an honest digest."""
    opened = safetensors.SafetensorsFile.open(source.path("model.safetensors"))
    tensors = {key: np.array(opened.array(key)) for key in opened.header.tensors}
    if (changed := change(tensors.pop(name))) is not None:
        tensors[name] = changed
    safetensors.write(root / "model.safetensors", tensors, metadata={"profile": "toy.owned-cuda"})
    text = json.loads((source.root / manifest.FILE_NAME).read_text())
    text["artifacts"][0] |= {"digest": PREFIX + file_digest(root / "model.safetensors"), **fields}
    (root / manifest.FILE_NAME).write_bytes(manifest.canonical_bytes(text))
    return manifest.read(root)
