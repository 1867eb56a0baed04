"""Rows on their way into a function, and vectors on their way out."""

from __future__ import annotations

import numpy as np
import pytest

from engines.ane import inputs, model
from engines.ane.inputs import MASKED, InputRules
from engines.protocol.messages import Pooling


@pytest.mark.parametrize(
    ("ids", "rules", "feeds"),
    [
        # Qwen's end token has the pad id and must stay attended.
        ([5, 9, 0], InputRules(10, pad_id=0), {"input_ids": [5, 9, 0, 0, 0, 0], "attention_mask": [1, 1, 1, 0, 0, 0]}),
        ([5], InputRules(10, pad_id=7), {"input_ids": [5, 7, 7, 7, 7, 7], "attention_mask": [1, 0, 0, 0, 0, 0]}),
        (
            [2, 5, 3, 6, 3],
            InputRules(10, token_types=True, sep_id=3),
            {
                "input_ids": [2, 5, 3, 6, 3, 0],
                "attention_mask": [1, 1, 1, 1, 1, 0],
                "token_type_ids": [0, 0, 0, 1, 1, 0],
            },
        ),
    ],
    ids=["mask by length", "pad id", "types behind the first separator"],
)
def test_a_row_in_its_bucket(ids: list[int], rules: InputRules, feeds: dict[str, list[int]]) -> None:
    found = inputs.single(np.array(ids, np.int32), 6, rules)
    assert {name: value.tolist() for name, value in found.items()} == {name: [row] for name, row in feeds.items()}
    assert {array.dtype for array in found.values()} == {np.dtype(np.int32)}


@pytest.mark.parametrize(
    ("family", "kinds", "causal", "window"),
    [
        ("bert", [], False, None),
        ("modernbert", ["full_attention", "sliding_attention"], False, 64),
        ("modernbert", ["full_attention"], False, None),
        ("qwen3", [], True, None),
        ("qwen2", [], False, None),
    ],
)
def test_rules_of_a_family(family: str, kinds: list[str], causal: bool, window: int | None) -> None:
    config = {"vocab_size": 9, "layer_types": kinds, "local_attention": 128, "is_causal": causal}
    assert InputRules.of(family, config, pad_id=3) == InputRules(9, pad_id=3, causal=causal, window=window)
    assert MASKED == -10_000.0, "what a built package holds, too"


def test_a_packed_pass_carries_every_row_end_to_end() -> None:
    rules = InputRules(vocab=20, pad_id=1, causal=True, window=1)
    found = inputs.packed([np.array([5, 6, 8], np.int32), np.array([7], np.int32)], 8, rules)
    assert found["input_ids"].tolist() == [[5, 6, 8, 7, 1, 1, 1, 1]]
    assert found["position_ids"].dtype == np.int32
    assert found["position_ids"].tolist() == [[0, 1, 2, 0, 0, 0, 0, 0]]
    assert np.array_equal(found["attention_bias"], inputs.bias((3, 1), 8, causal=True))
    assert np.array_equal(found["local_bias"], inputs.bias((3, 1), 8, causal=True, window=1))


def reference_bias(lengths: list[int], width: int, causal: bool, window: int | None) -> np.ndarray:
    """The rule said pair by pair."""
    owner = [row for row, length in enumerate(lengths) for _ in range(length)]
    owner += [-1] * (width - len(owner))
    table = np.full((width, width), MASKED, np.float16)
    for query in range(width):
        for key in range(width):
            same = owner[query] >= 0 and owner[query] == owner[key]
            if same and (not causal or key <= query) and (window is None or abs(query - key) <= window):
                table[query, key] = 0
            if owner[query] < 0 and query == key:
                table[query, key] = 0
    return table[None, None]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 0, 3])
@pytest.mark.parametrize("lengths", [[7], [3, 5, 1], [24], [1] * 24])
def test_bias_follows_the_rule_pair_by_pair(lengths: list[int], causal: bool, window: int | None) -> None:
    got = inputs.bias(tuple(lengths), 24, causal=causal, window=window)
    assert got.dtype == np.float16 and np.isfinite(got).all()
    assert np.array_equal(got, reference_bias(lengths, 24, causal, window))
    assert not got.flags.writeable, "it is shared between requests"


@pytest.mark.parametrize(("how", "expected"), [(Pooling.CLS, [1, 2]), (Pooling.LAST, [5, 8]), (Pooling.MEAN, [3, 5])])
def test_pooling(how: Pooling, expected: list[float]) -> None:
    assert model.pool(np.array([[1, 2], [3, 5], [5, 8]], np.float32), how).tolist() == expected


def test_mean_is_summed_in_float64_however_the_rows_lie_in_memory() -> None:
    wide = np.random.default_rng(3).standard_normal((300, 96)).astype(np.float32)
    exact = wide[:, :64].astype(np.float64).mean(axis=0).astype(np.float32)
    for states in (wide[:, :64], wide[:, :64].copy()):
        assert np.array_equal(model.pool(states, Pooling.MEAN), exact)


def test_normalisation_divides_by_the_norm_and_false_skips_it() -> None:
    rows = np.array([[3, 4], [0, 2]], np.float32)
    assert model.finish(rows.copy(), normalize=False).tolist() == rows.tolist()
    assert model.finish(rows.copy(), normalize=True).tolist() == [[np.float32(0.6), np.float32(0.8)], [0, 1]]
