"""A loaded model on the CPU provider: the whole loop against transformers, and what a request may not ask."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from engines.cuda.model import OwnedModel
from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import Phase, Pooling
from engines.runtime.progress import ProgressReporter, silent
from tests.cuda.cases import CASES
from tests.cuda.conftest import Bundles, Loader, batch_of, case, cosines, real_bundle

NAMES = [c.name for c in CASES]


def answer(model: OwnedModel, rows: list[list[int]]) -> np.ndarray:
    """Ask the model the way dispatch does."""
    if model.facts.task == "rerank":
        return model.rerank_sequences(batch_of(rows), progress=silent())[:, None]
    return model.embed(
        batch_of(rows),
        pooling=Pooling(model.facts.pooling),
        normalize=model.facts.normalize is True,
        packed_width=None,
        progress=silent(),
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("threads", ["1", "2"])
def test_equals_transformers(
    name: str, threads: str, bundles: Bundles, load: Loader, goldens: dict[str, np.ndarray]
) -> None:
    model = load(bundles(name), threads=threads, call_tokens="64")
    output = answer(model, case(name).rows())
    assert output.dtype == np.float32 and output.flags.c_contiguous
    if case(name).task == "rerank":
        assert np.abs(output[:, 0] - goldens[name]).max() <= 1e-4
    else:
        assert cosines(output, goldens[name]).min() >= 0.99999


@pytest.mark.parametrize("name", ["bert-rerank", "modernbert-cls", "qwen3-last"])
def test_order_neighbours_and_repeats(name: str, bundles: Bundles, load: Loader) -> None:
    model = load(bundles(name), call_tokens="64")
    rows = case(name).rows()
    first = answer(model, rows)
    order = np.random.default_rng(3).permutation(len(rows))
    assert np.abs(answer(model, [rows[i] for i in order]) - first[order]).max() <= 2e-5
    singles = np.concatenate([answer(model, [row]) for row in rows])
    assert np.abs(singles - first).max() <= 2e-5
    other = answer(model, rows[::-1])
    assert other.shape == first.shape
    assert answer(model, rows).tobytes() == first.tobytes()  # A, B, A


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_stored_dtypes_are_widened(dtype: str, bundles: Bundles, load: Loader, goldens: dict[str, np.ndarray]) -> None:
    model = load(bundles("bert-mean", dtype=dtype))
    assert cosines(answer(model, case("bert-mean").rows()), goldens["bert-mean"]).min() >= 0.9995


def refused(model: OwnedModel, rows: list[list[int]], code: ErrorCode, words: str, **fields: object) -> None:
    options = {"pooling": Pooling.MEAN, "normalize": True, "packed_width": None, "progress": silent(), **fields}
    with pytest.raises(EngineError, match=words) as caught:
        model.embed(batch_of(rows), **options)  # type: ignore[arg-type]
    assert caught.value.code is code


def test_a_request_may_not_contradict_the_manifest(bundles: Bundles, load: Loader) -> None:
    model = load(bundles("bert-mean"))
    rows = [[5, 6, 7]]
    refused(model, rows, ErrorCode.INVALID_REQUEST, "contradict", pooling=Pooling.CLS)
    refused(model, rows, ErrorCode.INVALID_REQUEST, "contradict", normalize=False)
    refused(model, [[5], [5] * 65], ErrorCode.INVALID_REQUEST, "sequence_too_long: row 1 has 65 tokens, at most 64")
    refused(model, [[5], [6, 128]], ErrorCode.INVALID_REQUEST, "token 2 has id 128, the vocabulary ends at 127")
    with pytest.raises(EngineError) as caught:
        model.rerank_sequences(batch_of(rows), progress=silent())
    assert caught.value.code is ErrorCode.OPERATION_MISMATCH
    assert answer(model, [[5] * 64, [127]]).shape == (2, 64)


def test_a_reranker_does_not_embed(bundles: Bundles, load: Loader) -> None:
    model = load(bundles("bert-rerank"))
    refused(model, [[2, 5, 3, 6, 3]], ErrorCode.OPERATION_MISMATCH, "does not embed")


def test_the_manifests_limit_beats_the_position_table(bundles: Bundles, load: Loader) -> None:
    model = load(bundles("bert-mean", max_tokens=32))
    refused(model, [[5] * 33], ErrorCode.INVALID_REQUEST, "at most 32")


def test_progress_of_load_rises_with_finished_work(bundles: Bundles, load: Loader) -> None:
    frames: list[tuple[int, Phase]] = []
    ticks = iter(range(10_000))
    progress = ProgressReporter(
        lambda completed, phase: frames.append((completed, phase)), phase=Phase.SETUP, clock=lambda: next(ticks)
    )
    load(bundles("modernbert-cls"), progress=progress)
    assert len(frames) > 20 and {phase for _, phase in frames} == {Phase.SETUP}
    assert [completed for completed, _ in frames] == list(range(1, len(frames) + 1))


# --- the real models -------------------------------------------------------------------------------------------------

GOLDENS = Path(__file__).parents[1] / "goldens"


def test_real_minilm(load: Loader) -> None:
    bundle = real_bundle("minilm")
    with np.load(GOLDENS / "minilm.npz") as file:
        ids, cu, vectors = file["input_ids"], file["cu_seqlens"], file["vectors"]
    rows = [ids[a:b].tolist() for a, b in pairwise(cu)]
    model = load(bundle)
    kept = [i for i, row in enumerate(rows) if len(row) <= model.facts.max_tokens]
    assert len(kept) >= 40
    output = answer(model, [rows[i] for i in kept])
    assert cosines(output, vectors[kept]).min() >= 0.99999
    assert np.abs(output - vectors[kept]).max() <= 1e-5


def test_real_cross_encoder(load: Loader) -> None:
    bundle = real_bundle("ms-marco")
    with np.load(GOLDENS / "ms-marco.npz") as file:
        data = dict(file)
    queries = [data["query_ids"][a:b].tolist() for a, b in pairwise(data["query_cu"])]
    cu = data["candidate_cu"]
    candidates = [data["candidate_ids"][a:b].tolist() for a, b in pairwise(cu)]
    special = bundle.manifest.special_ids
    assert isinstance(special, dict)
    cls, sep = special["cls"], special["sep"]
    rows = [
        [cls, *queries[query], sep, *candidate, sep]
        for query, candidate in zip(data["query_of"].tolist(), candidates, strict=True)
    ]
    logits = answer(load(bundle), rows)[:, 0]
    assert np.abs(logits - data["logits"]).max() <= 1e-4
    for query in range(len(queries)):
        mine = data["query_of"] == query
        assert np.argsort(-logits[mine]).tolist() == np.argsort(-data["logits"][mine]).tolist()
