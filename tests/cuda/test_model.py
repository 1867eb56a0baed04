"""A loaded model on the CPU provider: the whole loop against transformers, and what a request may not ask."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from engines.bundle import fixtures, manifest
from engines.bundle.digest import PREFIX, file_digest
from engines.bundle.manifest import Artifact, Bundle
from engines.checkpoint.package import profile_of, write_package
from engines.checkpoint.read import Checkpoint
from engines.cuda.model import OwnedModel
from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import Phase, Pooling
from engines.runtime.batch import TokenBatch
from engines.runtime.progress import ProgressReporter, silent
from tests.cuda.cases import CASES, case
from tests.cuda.conftest import Bundles, Loader
from tests.support.rows import batch_of, cosines

NAMES = [c.name for c in CASES]


def answer(model: OwnedModel, rows: list[list[int]]) -> np.ndarray:
    """Ask the model the way dispatch does."""
    spec, batch = model.spec, batch_of(rows)
    if spec.task == "rerank":
        return model.rerank_sequences(batch, progress=silent())[:, None]
    pooling = Pooling(spec.pooling)
    return model.embed(batch, pooling=pooling, normalize=spec.normalize, packed_width=None, progress=silent())


@pytest.mark.parametrize(
    ("name", "threads", "dtype"),
    [*((name, "2", "f32") for name in NAMES), ("modernbert-mean", "1", "f32"), ("bert-mean", "2", "f16"),
     ("bert-mean", "2", "bf16")],
)  # fmt: skip
def test_equals_transformers(
    name: str, threads: str, dtype: str, bundles: Bundles, load: Loader, goldens: dict[str, np.ndarray]
) -> None:
    """Whatever dtype the package has, whatever the order of the rows, alone and together, and once more."""
    model, rows = load(bundles(name, dtype=dtype), threads=threads, call_tokens="64"), case(name).rows()
    output = answer(model, rows)
    assert output.dtype == np.float32 and output.flags.c_contiguous
    if case(name).task == "rerank":
        assert np.abs(output[:, 0] - goldens[name]).max() <= 1e-4
    else:
        assert cosines(output, goldens[name]).min() >= (0.99999 if dtype == "f32" else 0.9995)
    order = np.random.default_rng(3).permutation(len(rows))
    assert np.abs(answer(model, [rows[i] for i in order]) - output[order]).max() <= 2e-5
    singles = np.concatenate([answer(model, [row]) for row in rows])
    assert np.abs(singles - output).max() <= 2e-5
    assert answer(model, rows).tobytes() == output.tobytes()


@pytest.mark.parametrize(
    ("rows", "fields", "words"),
    [
        ([[5, 6, 7]], {"pooling": Pooling.CLS}, "contradict"),
        ([[5, 6, 7]], {"normalize": False}, "contradict"),
        ([[5], [5] * 33], {}, "sequence_too_long: row 1 has 33 tokens, at most 32"),  # the manifest's limit, not BERT's
        ([[5], [6, 128]], {}, "token id 128 is outside the vocabulary of 128"),
    ],
)
def test_a_request_may_not_contradict_the_manifest(
    rows: list[list[int]], fields: dict[str, object], words: str, bundles: Bundles, load: Loader
) -> None:
    model = load(bundles("bert-mean", max_tokens=32))
    options = {"pooling": Pooling.MEAN, "normalize": True, "packed_width": None, "progress": silent(), **fields}
    with pytest.raises(EngineError, match=words) as caught:
        model.embed(batch_of(rows), **options)  # type: ignore[arg-type]
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert answer(model, [[5] * 32, [127]]).shape == (2, 64)


def test_progress_of_load_rises_with_finished_work(bundles: Bundles, load: Loader) -> None:
    frames: list[tuple[int, Phase]] = []
    ticks = iter(range(10_000))
    progress = ProgressReporter(
        lambda completed, phase: frames.append((completed, phase)), phase=Phase.SETUP, clock=lambda: next(ticks)
    )
    load(bundles("modernbert-cls"), progress=progress)
    assert len(frames) > 20 and {phase for _, phase in frames} == {Phase.SETUP}
    assert [completed for completed, _ in frames] == list(range(1, len(frames) + 1))


def in_dtype(real: Bundle, dtype: str, folder: Path) -> Bundle:
    """Return a bundle of a default model's float32 weights in *dtype*, with its own fixtures."""
    known, (plain,) = real.manifest, [e for e in real.artifacts("safetensors-package") if e.dtype == "f32"]
    assert isinstance(known.config, dict)
    checkpoint = Checkpoint.from_package(real.path(plain.path), config=known.config, family="bert", task=known.task)
    file = folder / "model.safetensors"
    size = write_package(checkpoint, file, profile=profile_of(real.manifest.model_id), dtype=dtype)
    entry = Artifact("safetensors-package", file.name, PREFIX + file_digest(file), dtype, bytes=size)
    manifest.write(folder, msgspec.structs.replace(known, artifacts=[entry]))
    shutil.copyfile(real.path("fixtures.npz"), folder / "fixtures.npz")
    return manifest.read(folder)


@pytest.mark.parametrize(("dtype", "least", "mean"), [("f32", 0.99999, 0.99999), ("int8", 0.99, 0.999)])
def test_the_real_embedder_agrees_with_its_reference(
    dtype: str, least: float, mean: float, load: Loader, tmp_path: Path, default_bundle: Bundles
) -> None:
    bundle = in_dtype(default_bundle("minilm"), dtype, tmp_path)
    arrays = fixtures.read(bundle.path("fixtures.npz")).arrays
    got = load(bundle).forward(TokenBatch(arrays["input_ids"], arrays["cu_seqlens"]), silent())
    found = cosines(got, arrays["vectors_q"] * arrays["vectors_scale"][:, None])
    assert len(found) >= 40 and found.min() >= least and found.mean() >= mean


@pytest.mark.parametrize(("dtype", "error", "best"), [("f32", 1e-4, 1.0), ("int8", 0.4, 0.95)])
def test_the_real_reranker_agrees_with_its_reference(
    dtype: str, error: float, best: float, load: Loader, tmp_path: Path, default_bundle: Bundles
) -> None:
    bundle = in_dtype(default_bundle("ms-marco"), dtype, tmp_path)
    arrays = fixtures.read(bundle.path("fixtures.npz")).arrays
    queries = np.split(arrays["query_ids"], arrays["query_cu"][1:-1])
    candidates = np.split(arrays["candidate_ids"], arrays["candidate_cu"][1:-1])
    of, logits = arrays["query_of"], arrays["logits"]
    rows = [[101, *queries[q], 102, *row, 102] for q, row in zip(of, candidates, strict=True)]
    got = load(bundle).rerank_sequences(batch_of(rows), progress=silent())
    assert np.corrcoef(got, logits)[0, 1] >= 0.9995 and np.abs(got - logits).max() <= error
    chosen = [logits[of == q][got[of == q].argmax()] == logits[of == q].max() for q in np.unique(of)]
    assert np.mean(chosen) >= best
