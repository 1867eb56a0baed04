"""Placement of rows in passes, the width by cost, positions and biases."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.ane import inputs
from engines.ane.inputs import MASKED
from engines.bundle import tight
from engines.bundle.tight import Pass
from engines.protocol.errors import EngineError, ErrorCode

SINGLE = {128: 3.5, 256: 9.0, 512: 25.4}
"""Upstream's M5 numbers for Core ML (ane.md 2.3), as a cost model."""


def naive(lengths: list[int], width: int, max_rows: int) -> list[list[int]]:
    """First fit by falling length, written the slow and obvious way."""
    passes: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for rows in passes:
            if sum(lengths[row] for row in rows) + lengths[index] <= width and len(rows) < max_rows:
                rows.append(index)
                break
        else:
            passes.append([index])
    return passes


@given(st.lists(st.integers(1, 64), max_size=80), st.integers(1, 12))
def test_plan_is_first_fit_decreasing(lengths: list[int], max_rows: int) -> None:
    got = tight.plan(lengths, width=64, max_rows=max_rows)
    assert [list(one.rows) for one in got] == naive(lengths, 64, max_rows)
    assert sorted(row for one in got for row in one.rows) == list(range(len(lengths)))
    for one in got:
        assert sum(one.lengths) <= 64 and len(one.rows) <= max_rows


def test_equal_lengths_keep_the_input_order() -> None:
    assert [one.rows for one in tight.plan([30, 30, 30, 30], width=64, max_rows=64)] == [(0, 1), (2, 3)]


@pytest.mark.parametrize(
    ("lengths", "code"), [([5, 65], ErrorCode.PACKED_ROWS_TOO_WIDE), ([5, 0], ErrorCode.INVALID_REQUEST)]
)
def test_rows_that_cannot_be_packed_are_refused(lengths: list[int], code: ErrorCode) -> None:
    with pytest.raises(EngineError) as refused:
        tight.plan(lengths, width=64, max_rows=64)
    assert refused.value.code is code


def test_a_pass_never_holds_more_than_its_width() -> None:
    with pytest.raises(ValueError):
        Pass(64, (0, 1), (40, 30))


def test_planning_10_000_rows_is_linearithmic_and_deterministic() -> None:
    rng = random.Random(7)
    lengths = [rng.randint(1, 256) for _ in range(10_000)]
    first = tight.plan(lengths, width=256, max_rows=64)
    assert first == tight.plan(list(lengths), width=256, max_rows=64)
    assert sum(len(one.rows) for one in first) == 10_000
    fill = sum(lengths) / (256 * len(first))
    assert fill > 0.97, fill


@pytest.mark.bench
def test_planning_10_000_rows_takes_under_100_ms() -> None:
    rng = random.Random(7)
    lengths = [rng.randint(1, 256) for _ in range(10_000)]
    best = min(_timed(lengths) for _ in range(5))
    assert best < 0.1, best


def _timed(lengths: list[int]) -> float:
    started = time.perf_counter()
    tight.plan(lengths, width=256, max_rows=64)
    return time.perf_counter() - started


# --- width by cost ---------------------------------------------------------------------------------------------------


def test_two_100_token_rows_are_cheaper_on_their_own_rungs() -> None:
    choice = tight.choose([100, 100], single_cost=SINGLE, packed_cost={256: 9.0}, max_rows=64)
    assert choice.width is None and choice.cost == pytest.approx(7.0) and choice.single == (0, 1)


def test_two_64_token_rows_win_twofold_in_one_128_pass() -> None:
    choice = tight.choose([64, 60], single_cost=SINGLE, packed_cost={128: 3.5, 256: 9.0}, max_rows=64)
    assert choice.width == 128 and choice.cost == pytest.approx(3.5)


def test_another_machine_s_costs_choose_another_width() -> None:
    lengths = [40] * 12
    cheap_wide = tight.choose(lengths, single_cost=SINGLE, packed_cost={128: 3.5, 256: 4.0}, max_rows=64)
    dear_wide = tight.choose(lengths, single_cost=SINGLE, packed_cost={128: 3.5, 256: 9.0}, max_rows=64)
    assert (cheap_wide.width, dear_wide.width) == (256, 128)


def test_a_half_empty_last_pass_is_undone_and_long_rows_run_alone() -> None:
    # 60 + 60 share a pass; the lone 10 is as dear packed as alone and stays alone; 400 never fits.
    choice = tight.choose([60, 60, 10, 400], single_cost=SINGLE, packed_cost={128: 3.6}, max_rows=64)
    assert choice.width == 128
    assert [one.rows for one in choice.passes] == [(0, 1)]
    assert choice.single == (2, 3)
    assert choice.cost == pytest.approx(3.6 + 3.5 + 25.4)


@given(st.lists(st.integers(1, 512), min_size=1, max_size=40))
def test_choosing_never_costs_more_than_not_packing_and_loses_no_row(lengths: list[int]) -> None:
    choice = tight.choose(lengths, single_cost=SINGLE, packed_cost={128: 3.5, 256: 5.0}, max_rows=8)
    alone = sum(SINGLE[next(b for b in sorted(SINGLE) if length <= b)] for length in lengths)
    assert choice.cost <= alone + 1e-9
    rows = [row for one in choice.passes for row in one.rows] + list(choice.single)
    assert sorted(rows) == list(range(len(lengths)))


# --- biases and positions --------------------------------------------------------------------------------------------


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
@pytest.mark.parametrize("lengths", [[7], [3, 5, 1], [24], [1] * 24, [5, 4]])
def test_bias_follows_the_rule_pair_by_pair(lengths: list[int], causal: bool, window: int | None) -> None:
    got = inputs.bias(tuple(lengths), 24, causal=causal, window=window)
    assert got.dtype == np.float16 and got.shape == (1, 1, 24, 24)
    assert np.array_equal(got, reference_bias(lengths, 24, causal, window))
    assert not got.flags.writeable, "it is shared between requests"


@pytest.mark.parametrize("lengths", [[1], [7, 9], [24]])
def test_every_query_sees_something_so_softmax_stays_finite(lengths: list[int]) -> None:
    for causal in (False, True):
        table = inputs.bias(tuple(lengths), 24, causal=causal, window=2)
        assert (table.max(axis=-1) == 0).all()
        assert np.isfinite(table).all()


def test_positions_restart_in_every_row() -> None:
    got = inputs.positions([3, 2], 7)
    assert got.dtype == np.int32
    assert got.tolist() == [[0, 1, 2, 0, 1, 0, 0]]
