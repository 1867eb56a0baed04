"""Toy models against what transformers computes for them, and the guards, called directly."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.llama import model as model_module
from engines.llama.binding import ContextShape, NativeContext, NativeModel
from engines.llama.model import LlamaModel
from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import FinishReason, Phase, Pooling
from engines.runtime.batch import Generation, RerankPairs, TokenBatch
from engines.runtime.inference import bytes_of
from engines.runtime.progress import ProgressReporter, silent
from tests.cuda.cases import case
from tests.support import toy_models
from tests.support.rows import batch_of, cosines
from tests.support.served import rows as golden_rows
from tests.support.toy_gguf import ToyGguf, build_toy, rewrite, sha256
from tests.support.toy_models import toy_rows

pytestmark = pytest.mark.llama

GOLDENS = np.load(Path(__file__).parents[1] / "goldens" / "toys.npz")
CASES = np.load(Path(__file__).parents[1] / "cuda" / "goldens.npz")
"""What transformers computes for the toys of tests/cuda/cases.py."""
MIXED = [1, 7, 60, 33, 12, 64, 2, 2, 50, 1, 17]


def embed(model: LlamaModel, batch: TokenBatch, pooling: Pooling = Pooling.MEAN, **keywords: Any) -> np.ndarray:
    options: dict[str, Any] = {"normalize": True, "packed_width": None, "progress": silent(), **keywords}
    return model.embed(batch, pooling=pooling, **options)


def generate(model: LlamaModel, ids: list[int], most: int, progress: ProgressReporter | None = None) -> Generation:
    return model.generate(np.array(ids, np.int32), max_tokens=most, progress=progress or silent())


def refused(code: ErrorCode, call: Callable[[], object]) -> str:
    with pytest.raises(EngineError) as caught:
        call()
    assert caught.value.code is code, caught.value
    return caught.value.msg


# --- embeddings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("toy", "pooling", "floor", "config"),
    [
        ("bert", Pooling.MEAN, 0.9999, {}),
        ("bert:f16", Pooling.MEAN, 0.9999, {"threads": 2}),
        ("bert:bf16", Pooling.MEAN, 0.9999, {}),
        ("bert:q8_0", Pooling.MEAN, 0.997, {}),
        ("bert", Pooling.MEAN, 0.9999, {"encode_chunk_tokens": 16}),  # rows longer than a chunk
        ("bert", Pooling.MEAN, 0.9999, {"flash_attention": "disabled"}),
        ("qwen3", Pooling.LAST, 0.9999, {}),
        ("qwen3:q8_0", Pooling.LAST, 0.997, {"encode_chunk_tokens": 100}),
        ("qwen2:bf16", Pooling.LAST, 0.9999, {}),
    ],
)
def test_vectors_as_transformers_computes_them(
    load: Any, toy: str, pooling: Pooling, floor: float, config: dict[str, Any]
) -> None:
    name = toy.partition(":")[0]
    ours = embed(load(toy, **config), batch_of(golden_rows(GOLDENS, name)), pooling)
    assert ours.dtype == np.float32 and ours.flags.c_contiguous
    assert cosines(ours, GOLDENS[f"{name}.out"]).min() >= floor
    assert np.abs(np.linalg.norm(ours, axis=1) - 1).max() < 1e-5


def test_without_normalisation_the_length_is_the_models(load: Any, tmp_path: Path) -> None:
    toy = case("bert-cls")
    model = load(build_toy(tmp_path, toy.name, toy.write, **toy.options))
    ours = embed(model, batch_of(toy.rows()), Pooling.CLS, normalize=False)
    assert np.abs(ours - CASES[toy.name]).max() < 1e-2
    assert np.abs(np.linalg.norm(ours, axis=1) - 1).max() > 0.1, "the toy's vectors are not of length one by themselves"


@pytest.mark.parametrize(
    ("toy", "pooling", "floor"),
    [
        ("bert", Pooling.CLS, 0.99999),
        ("qwen3", Pooling.MEAN, 0.99999),
        ("llama-generate:f16", Pooling.LAST, 0.99999),
        ("bert:bf16", Pooling.LAST, 0.9999),
        ("bert:q8_0", Pooling.MEAN, 0.997),
    ],
)
@pytest.mark.report("ollama/ollama#6262")
def test_a_row_does_not_depend_on_its_neighbours(load: Any, toy: str, floor: float, pooling: Pooling) -> None:
    rows = toy_rows(3, MIXED * 6)  # U6: mixed lengths over several chunks
    model = load(toy, threads="2")
    together = embed(model, batch_of(rows), pooling)
    alone = np.concatenate([embed(model, batch_of([row]), pooling) for row in rows])
    assert cosines(together, alone).min() >= floor
    order = np.random.default_rng(0).permutation(len(rows))
    shuffled = embed(model, batch_of([rows[n] for n in order]), pooling)
    assert cosines(shuffled, together[order]).min() >= floor
    assert embed(model, batch_of(rows), pooling).tobytes() == together.tobytes(), "a repeat is byte-identical"


def test_threads_do_not_change_the_bytes_and_contexts_hardly_the_numbers(
    load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows that share a call depend on how many contexts there are, not on what computes them."""
    monkeypatch.setattr("engines.machine.usable_cores", lambda: 4)
    batch = batch_of(toy_rows(4, [60, 40] * 30))
    alone = embed(load("bert", threads=1), batch)
    for contexts, threads in ((1, 3), (2, 3), (2, 4), (3, 4)):
        vectors = embed(load("bert", threads=contexts), batch)
        assert cosines(vectors, alone).min() >= 0.99999, contexts
        assert embed(load("bert", contexts=contexts, threads=threads), batch).tobytes() == vectors.tobytes(), threads


@pytest.mark.parametrize(("toy", "lengths"), [("bert512", [512, 512, 76]), ("qwen3", [500, 12, 300, 288])])
@pytest.mark.report("ggml-org/llama.cpp#12836")
@pytest.mark.report("abetlen/llama-cpp-python#2051")
def test_more_tokens_than_a_batch_holds(load: Any, toy: str, lengths: list[int]) -> None:
    """U1, U2: 1100 tokens in one request, rows longer than the chunk, mean pooling on a model with a cache."""
    rows = toy_rows(5, lengths)
    model = load(toy)
    alone = np.concatenate([embed(model, batch_of([row])) for row in rows])
    for chunk in (64, 512, 4096):
        together = embed(load(toy, encode_chunk_tokens=chunk), batch_of(rows))
        assert cosines(together, alone).min() >= 0.99999, chunk


def test_states_without_the_head_are_the_same_bytes(toys: Any) -> None:
    with toys("qwen3-generate").path.open("rb") as file:
        native = NativeModel(file.fileno(), gpu_layers=0, on_tensor=lambda: None)
    ids, bounds = np.arange(5, 25, dtype=np.int32), np.array([0, 12, 20], dtype=np.int32)
    shapes = [ContextShape(n_ctx=256, n_ubatch=64, n_seq_max=2, headless=headless) for headless in (False, True)]
    contexts = [NativeContext(native, shape) for shape in shapes]
    for context in contexts:
        context.run_rows(ids, bounds)
    whole, headless = contexts
    assert headless.states(20).tobytes() == whole.states(20).tobytes()
    assert np.abs(whole.logits()).max() > 0
    assert not np.array_equal(headless.logits(), whole.logits()), "the head's product was computed"
    for closing in (*contexts, native):
        closing.close()


def test_long_rows_share_one_large_context(load: Any) -> None:
    model = load("bert2048", threads=1)
    for length in (600, 1300, 700, 2048, 900):
        embed(model, batch_of(toy_rows(7, [length, 20])))
    assert len(model._contexts._contexts) == 2, "the usual one and the last large one"


# --- rerank -----------------------------------------------------------------------------------------------------------


def pairs(query: list[int], documents: list[list[int]]) -> RerankPairs:
    return RerankPairs(np.array(query, dtype=np.int32), batch_of(documents))


@pytest.mark.parametrize(("dtype", "error"), [("f32", 0.05), ("bf16", 0.1), ("q8_0", 0.3)])
def test_rerank_gives_the_cross_encoders_logits(load: Any, tmp_path: Path, dtype: str, error: float) -> None:
    """Token types included: transformers was given type 1 behind the first separator."""
    toy = case("bert-rerank")
    model = load(build_toy(tmp_path, toy.name, toy.write, dtype=dtype, **toy.options))
    for row, logit in list(zip(toy.rows(), CASES[toy.name], strict=True))[4:]:  # shorter ones are no pairs
        middle = len(row) // 2
        (ours,) = model.rerank(pairs(row[: middle + 1], [row[middle + 1 :]]), progress=silent())
        assert abs(ours - logit) <= error
    documents = toy_rows(10, [3, 20, 7, 40, 1, 58, 12, 12])
    ours = model.rerank(pairs([2, 10, 11, 3], [[*row, 3] for row in documents]), progress=silent())
    assert model.dims == 1 and ours.shape == (8,) and ours.dtype == np.float32
    alone = [model.rerank(pairs([10, 11], [row]), progress=silent())[0] for row in documents]
    assert np.abs(ours - alone).max() < error / 2


def test_a_pair_longer_than_the_model(load: Any) -> None:
    model = load("bert-rerank")
    assert len(model.rerank(pairs([10] * 20, [[11] * 41]), progress=silent())) == 1
    said = refused(ErrorCode.INVALID_REQUEST, lambda: model.rerank(pairs([10] * 20, [[11] * 42]), progress=silent()))
    assert "pair 0 has 65 tokens" in said


# --- generate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("toy", "blocks"),
    [("llama-generate", {"ubatch_size": 3}), ("qwen3-generate", {"batch_size": 1}), ("qwen2-generate", {}),
     ("mistral-generate", {})],
)  # fmt: skip
def test_greedy_tokens_as_transformers_computes_them(load: Any, toy: str, blocks: dict[str, int]) -> None:
    """Also what proves llama's rotary order: a wrong one changes every token."""
    model = load(toy, **blocks)
    for row, expected in zip(golden_rows(GOLDENS, toy), GOLDENS[f"{toy}.greedy"], strict=True):
        found = generate(model, row, 8)
        assert list(found.generated_token_ids) == expected.tolist()
        assert (found.n_prompt, found.n_gen, found.finish_reason) == (len(row), 8, FinishReason.LENGTH)


# --- numbers that go wrong, memory, progress --------------------------------------------------------------------------


def test_nonfinite_states_are_typed(toys: Any, load: Any, tmp_path: Path) -> None:
    import gguf

    poisoned = rewrite(toys("bert").path, tmp_path / "nan.gguf")
    info = next(t for t in gguf.GGUFReader(poisoned.path).tensors if t.name == "token_embd.weight")
    with poisoned.path.open("r+b") as file:
        file.seek(int(info.data_offset) + 7 * 64 * 4)
        file.write(np.full(64, np.nan, dtype="<f4").tobytes())

    model = load(ToyGguf(poisoned.path, poisoned.checkpoint, sha256(poisoned.path)))
    vectors = embed(model, batch_of([[5], [7, 8]]))
    assert "row 1 " in refused(ErrorCode.NONFINITE_OUTPUT, lambda: bytes_of(vectors, vectors.shape))
    assert np.isfinite(embed(model, batch_of([[5], [6, 8]]))).all()


def test_weights_beyond_free_memory_are_oom(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.machine.free_memory", lambda: 1000)
    assert "free" in refused(ErrorCode.OOM, lambda: load("bert"))


def test_a_cache_beyond_free_memory_is_oom(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load("llama-generate")
    monkeypatch.setattr("engines.llama.contexts.free_memory", lambda: 1000)
    refused(ErrorCode.OOM, lambda: generate(model, [5], 4))
    monkeypatch.undo()
    assert generate(model, [5], 4).n_gen == 4


def test_a_generator_without_a_vocabulary_cannot_say_text(toys: Any, load: Any, tmp_path: Path) -> None:
    nameless = load(rewrite(toys("qwen3").path, tmp_path / "nameless.gguf", qwen3__pooling_type=-1))
    refused(ErrorCode.MODEL_UNSUPPORTED, lambda: generate(nameless, [5], 1))


def recorder() -> tuple[ProgressReporter, list[int]]:
    """Return a reporter without coalescing, and what it emitted."""
    seen: list[int] = []
    emit = lambda completed, _phase: seen.append(completed)  # noqa: E731
    return ProgressReporter(emit, phase=Phase.INFERENCE, clock=itertools.count().__next__), seen


@pytest.mark.parametrize("threads", [1, 2])
def test_each_finished_chunk_is_its_layers(load: Any, threads: int) -> None:
    progress, seen = recorder()
    embed(load("bert", threads=threads), batch_of(toy_rows(1, [64] * 24)), progress=progress)
    assert seen == [2, 4, 6, 8, 10, 12], "six chunks of four rows, two layers each"


@pytest.mark.parametrize("toy", ["bert512", "qwen3"])
def test_a_slow_call_reports_each_layer(load: Any, monkeypatch: pytest.MonkeyPatch, toy: str) -> None:
    plain = embed(load(toy), batch_of(toy_rows(1, [400])))
    monkeypatch.setattr(model_module, "SLOW_CALL_S", 0.0)
    progress, seen = recorder()
    watched = embed(load(toy), batch_of(toy_rows(1, [400])), progress=progress)
    assert seen == [1, 2]
    assert watched.tobytes() == plain.tobytes(), "watching changes nothing"


def test_a_prompt_that_takes_long_is_cut_into_blocks_that_are_reported(
    load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 7B model's prompt on two slow cores was silent beyond the host's 120 s, and a live worker was killed."""
    quick = generate(load("llama-generate"), [5, 6, 7, 8] * 12, 6)
    assert quick.n_gen == 6
    monkeypatch.setattr(model_module, "BLOCK_S", 0.0)
    progress, seen = recorder()
    slow = generate(load("llama-generate"), [5, 6, 7, 8] * 12, 6, progress)
    assert seen == list(range(1, 9)), "three blocks of 16 tokens, five decoded tokens: the sixth is never read"
    assert slow.generated_token_ids == quick.generated_token_ids


def test_a_large_vocabulary_is_counted_before_the_kernel_counts_it(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bge-m3's shape at 8,192 tokens takes 8.2 GB: llama.cpp makes room for logits that an encoder never computes."""
    wide = build_toy(tmp_path, "wide", toy_models.write_bert, vocab=200_000, max_positions=4096)
    model = load(wide, threads=1)
    monkeypatch.setattr("engines.llama.contexts.free_memory", lambda: 2_000_000_000)
    refused(ErrorCode.OOM, lambda: embed(model, batch_of(toy_rows(1, [4096]))))
    rows = batch_of(toy_rows(2, [64] * 12))
    progress, seen = recorder()
    assert np.isfinite(embed(model, rows, progress=progress)).all(), "usual rows fit, in smaller chunks"
    assert seen == [2, 4, 6], "three chunks of 256 tokens, of two layers each"


def test_close_is_idempotent(load: Any) -> None:
    model = load("bert", threads=2)
    embed(model, batch_of(toy_rows(1, [60] * 20)))
    model.close()
    model.close()
