"""Rows on their way into a function, and vectors on their way out."""

from __future__ import annotations

import numpy as np
import pytest

from engines.ane import inputs, model
from engines.ane.inputs import InputRules
from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import Pooling
from engines.runtime.batch import TokenBatch


def batch(*rows: list[int]) -> TokenBatch:
    ids = np.concatenate([np.asarray(row, np.int32) for row in rows]) if rows else np.zeros(0, np.int32)
    cu = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    return TokenBatch(ids, cu)


def test_the_mask_follows_the_length_and_never_the_pad_id() -> None:
    # Qwen's end token has the pad id and must stay attended.
    feeds = inputs.single(np.array([5, 9, 0], np.int32), 6, InputRules(vocab=10, pad_id=0))
    assert feeds["input_ids"].tolist() == [[5, 9, 0, 0, 0, 0]]
    assert feeds["attention_mask"].tolist() == [[1, 1, 1, 0, 0, 0]]
    assert {array.dtype for array in feeds.values()} == {np.dtype(np.int32)}


def test_padding_uses_the_profile_s_pad_id() -> None:
    feeds = inputs.single(np.array([5], np.int32), 3, InputRules(vocab=10, pad_id=7))
    assert feeds["input_ids"].tolist() == [[5, 7, 7]]


def test_token_types_turn_to_one_behind_the_first_separator() -> None:
    rules = InputRules(vocab=10, token_types=True, sep_id=3)
    feeds = inputs.single(np.array([2, 5, 3, 6, 3], np.int32), 7, rules)
    assert feeds["token_type_ids"].tolist() == [[0, 0, 0, 1, 1, 0, 0]]


def test_a_packed_pass_carries_every_row_end_to_end() -> None:
    rules = InputRules(vocab=20, pad_id=1, causal=True, window=4)
    feeds = inputs.packed([np.array([5, 6], np.int32), np.array([7], np.int32)], 8, rules)
    assert feeds["input_ids"].tolist() == [[5, 6, 7, 1, 1, 1, 1, 1]]
    assert feeds["position_ids"].tolist() == [[0, 1, 0, 0, 0, 0, 0, 0]]
    assert set(feeds) == {"input_ids", "position_ids", "attention_bias", "local_bias"}


@pytest.mark.parametrize("rows", [[[10]], [[5, 2**31 - 1]]])
def test_bad_ids_are_refused_before_the_framework_sees_them(rows: list[list[int]]) -> None:
    with pytest.raises(EngineError) as refused:
        inputs.check_ids(batch(*rows), 10)
    assert refused.value.code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(("how", "expected"), [(Pooling.CLS, [1, 2]), (Pooling.LAST, [5, 8]), (Pooling.MEAN, [3, 5])])
def test_pooling(how: Pooling, expected: list[float]) -> None:
    states = np.array([[1, 2], [3, 5], [5, 8]], np.float32)
    assert model.pool(states, how).tolist() == expected


def test_mean_does_not_depend_on_how_the_rows_lie_in_memory() -> None:
    rng = np.random.default_rng(3)
    states = rng.standard_normal((300, 64)).astype(np.float32)
    wide = np.zeros((300, 96), np.float32)
    wide[:, :64] = states
    assert np.array_equal(model.pool(states, Pooling.MEAN), model.pool(wide[:, :64], Pooling.MEAN))


def test_normalisation_divides_by_the_norm_and_false_skips_it() -> None:
    rows = np.array([[3, 4], [0, 2]], np.float32)
    assert model.finish(rows.copy(), normalize=False).tolist() == rows.tolist()
    assert model.finish(rows.copy(), normalize=True).tolist() == [[np.float32(0.6), np.float32(0.8)], [0, 1]]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(EngineError) as refused:
        model.finish(np.array([[1, 2], [bad, 1]], np.float32), normalize=True)
    assert refused.value.code is ErrorCode.NONFINITE_OUTPUT and "row 1" in refused.value.msg


def test_a_row_of_zeros_is_refused() -> None:
    with pytest.raises(EngineError) as refused:
        model.finish(np.zeros((1, 4), np.float32), normalize=True)
    assert refused.value.code is ErrorCode.NONFINITE_OUTPUT and "zeros" in refused.value.msg
