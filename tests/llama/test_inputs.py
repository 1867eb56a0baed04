"""Pairs, chunks, pooling: tables and worked examples of llama-cuda.md 2.5, 2.6 and 4.3."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.llama import inputs
from engines.llama.gguf import Header, SpecialIds
from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import Pooling
from engines.runtime.batch import RerankPairs
from tests.support.rows import batch_of

BERT = SpecialIds(bos=2, sep=3, eos=3)
XLM = SpecialIds(bos=0, sep=2, eos=5)
NO_EOS = SpecialIds(bos=2, sep=3, eos=None)


def compose(query: list[int], documents: list[list[int]], special: SpecialIds, shift: int = 0) -> list[list[int]]:
    pairs = RerankPairs(np.array(query, dtype=np.int32), batch_of(documents))
    return [row.tolist() for row in inputs.compose_pairs(pairs, special, passage_shift=shift).rows()]


@pytest.mark.parametrize(
    ("name", "query", "document", "special", "expected"),
    [
        ("the example of the page", [2, 10, 11, 3], [20, 21, 3], BERT, [2, 10, 11, 3, 20, 21, 3]),
        ("bare segments", [10], [20], BERT, [2, 10, 3, 20, 3]),
        ("one leading BOS is dropped, a second one is text", [2, 2, 10], [2, 2, 20], BERT, [2, 2, 10, 3, 2, 20, 3]),
        ("every trailing SEP and EOS is dropped", [10, 3, 3, 3], [20, 3, 3], BERT, [2, 10, 3, 20, 3]),
        ("inner SEP stays", [10, 3, 11], [20, 3, 21], BERT, [2, 10, 3, 11, 3, 20, 3, 21, 3]),
        ("END is EOS where it differs from SEP", [0, 10, 2, 5], [20, 5, 2], XLM, [0, 10, 2, 20, 5]),
        ("END is SEP without EOS", [2, 10, 3], [20, 3], NO_EOS, [2, 10, 3, 20, 3]),
        ("EOS of another vocabulary is text without EOS", [10, 5], [20, 5], NO_EOS, [2, 10, 5, 3, 20, 5, 3]),
        ("PAD is text", [10, 0], [0, 20], BERT, [2, 10, 0, 3, 0, 20, 3]),
    ],
)
def test_pairs(name: str, query: list[int], document: list[int], special: SpecialIds, expected: list[int]) -> None:
    assert compose(query, [document], special) == [expected], name


@pytest.mark.parametrize(
    ("architecture", "vocabulary", "expected"),
    [
        ("bert", "no_vocab", [2, 10, 3, 20, 3]),
        ("bert", "bert", [2, 10, 3, 20, 3]),
        ("bert", "t5", [2, 10, 3, 3, 20, 3]),  # XLM-RoBERTa: <s> q </s></s> d </s>
        ("bert", "gpt2", [2, 10, 3, 3, 20, 3]),  # RoBERTa
        ("modern-bert", "gpt2", [2, 10, 3, 20, 3]),
        ("bert", "rwkv", None),
        ("gemma-embedding", "llama", None),
    ],
)
def test_the_pair_template_follows_the_vocabulary(
    architecture: str, vocabulary: str, expected: list[int] | None
) -> None:
    header = Header({"general.architecture": architecture, "tokenizer.ggml.model": vocabulary}, {}, 0)
    pairs = RerankPairs(np.array([2, 10, 3], dtype=np.int32), batch_of([[20, 3]]))
    if expected is None:
        with pytest.raises(EngineError, match="pair template") as caught:
            inputs.pair_separators(header)
        assert caught.value.code is ErrorCode.MODEL_UNSUPPORTED
    else:
        composed = inputs.compose_pairs(pairs, BERT, separators=inputs.pair_separators(header))
        assert [row.tolist() for row in composed.rows()] == [expected]


def test_a_split_vocabulary_shifts_the_passage_and_its_end() -> None:
    composed = compose([2, 10, 3], [[20, 21, 3], [30]], BERT, shift=100)
    assert composed == [[2, 10, 3, 120, 121, 103], [2, 10, 3, 130, 103]]


@pytest.mark.parametrize(
    ("query", "document", "special", "code"),
    [
        ([2, 3], [20], BERT, ErrorCode.INVALID_REQUEST),
        ([10], [2, 3, 3], BERT, ErrorCode.INVALID_REQUEST),
        ([10], [2], BERT, ErrorCode.INVALID_REQUEST),
        ([10], [3], BERT, ErrorCode.INVALID_REQUEST),
        ([10], [20], SpecialIds(bos=None, sep=3, eos=3), ErrorCode.MODEL_UNSUPPORTED),
        ([10], [20], SpecialIds(bos=2, sep=None, eos=3), ErrorCode.MODEL_UNSUPPORTED),
    ],
)
def test_pairs_that_cannot_be_built(
    query: list[int], document: list[int], special: SpecialIds, code: ErrorCode
) -> None:
    with pytest.raises(EngineError) as caught:
        compose(query, [document], special)
    assert caught.value.code is code


@given(
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=256),
    cap=st.integers(1, 600),
    slots=st.integers(1, 9),
)
def test_chunks_cover_every_row_once_within_their_bounds(lengths: list[int], cap: int, slots: int) -> None:
    chunks = inputs.plan_chunks(lengths, cap=cap, slots=slots)
    assert sorted(row for chunk in chunks for row in chunk.rows) == list(range(len(lengths)))
    for chunk in chunks:
        assert chunk.tokens == sum(lengths[row] for row in chunk.rows)
        assert len(chunk.rows) <= inputs.MAX_SEQUENCES
        assert chunk.tokens <= cap or len(chunk.rows) == 1
    assert chunks == inputs.plan_chunks(list(lengths), cap=cap, slots=slots)


@pytest.mark.parametrize(
    ("lengths", "cap", "slots", "tokens"),
    [
        ([100] * 12, 512, 2, [300] * 4),  # not 500, 500 and 200, of which the second slot would compute 500
        ([100] * 12, 512, 1, [400] * 3),
        ([16] * 2, 512, 2, [16] * 2),
        ([64], 512, 4, [64]),
        ([5, 400, 9, 28, 131, 70, 64, 130], 512, 2, [414, 423]),
        ([5, 400, 9, 28, 131, 70, 64, 130], 256, 2, [214, 223, 400]),
        ([300] * 4, 512, 2, [300] * 4),  # no two fit together
        ([1] * 129, 512, 1, [43] * 3),
    ],
)
def test_chunks_give_every_slot_as_many_tokens(lengths: list[int], cap: int, slots: int, tokens: list[int]) -> None:
    assert sorted(chunk.tokens for chunk in inputs.plan_chunks(lengths, cap=cap, slots=slots)) == tokens


def test_pooling_worked_example() -> None:
    lengths = [3, 1, 2]
    bounds = np.cumsum([0, *lengths]).astype(np.int32)
    states = np.arange(12, dtype=np.float32).reshape(6, 2)
    assert inputs.pool(states, bounds, Pooling.LAST).tolist() == states[[2, 3, 5]].tolist()
    assert inputs.pool(states, bounds, Pooling.CLS).tolist() == states[[0, 3, 4]].tolist()
    assert inputs.pool(states, bounds, Pooling.MEAN).tolist() == [[2, 3], [6, 7], [9, 10]]
    assert inputs.pool(states, bounds, Pooling.MEAN).dtype == np.float32


def test_normalisation_worked_example() -> None:
    states = np.array([[1, 2], [3, 6]], dtype=np.float32)
    mean = inputs.pool(states, np.array([0, 2], dtype=np.int32), Pooling.MEAN)
    assert mean.tolist() == [[2, 4]]
    assert inputs.normalize_rows(mean)[0] == pytest.approx([0.4472136, 0.8944272], abs=1e-7)
    assert inputs.normalize_rows(np.zeros((1, 3), dtype=np.float32)).tolist() == [[0, 0, 0]]
    # The epsilon comes after the square root: a vector of norm 1e-12 halves instead of growing to length one.
    tiny = np.array([[1e-12, 0]], dtype=np.float32)
    assert inputs.normalize_rows(tiny)[0, 0] == pytest.approx(0.5, abs=1e-3)
