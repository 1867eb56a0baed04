"""Rungs, per-row grouping, and what grouping saves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.ane.shapes import group
from engines.protocol.errors import EngineError, ErrorCode

LADDER = (128, 256, 512, 1024)
M5_MS = {128: 3.5, 256: 9.0, 512: 25.4, 1024: 73.3}
"""Upstream's M5 numbers a row (ane.md 2.3): inputs of a cost model here, not measurements of ours."""


@pytest.mark.parametrize(
    ("tokens", "fits"), [(1, 128), (127, 128), (128, 128), (129, 256), (256, 256), (257, 512), (1024, 1024)]
)
def test_ladder_rung_is_the_smallest_shape_that_fits(tokens: int, fits: int) -> None:
    assert list(group([tokens], LADDER)) == [fits]


@pytest.mark.parametrize("tokens", [0, -1, 1025])
def test_a_row_that_fits_nowhere_is_refused(tokens: int) -> None:
    with pytest.raises(EngineError) as refused:
        group([tokens], LADDER)
    assert refused.value.code is ErrorCode.INVALID_REQUEST


def test_rows_are_grouped_rung_by_rung_in_ascending_order() -> None:
    found = group([300, 5, 128, 129, 512, 1], LADDER)
    assert list(found.items()) == [(128, [1, 2, 5]), (256, [3]), (512, [0, 4])]


def test_one_impossible_row_refuses_the_whole_batch() -> None:
    with pytest.raises(EngineError):
        group([5, 2000], LADDER)


def test_grouping_beats_one_bucket_for_all_by_3_5_on_the_mixed_batch() -> None:
    lengths = [100, 120, 128, 64, 7, 90, 128, 500]
    grouped = sum(M5_MS[bucket] * len(rows) for bucket, rows in group(lengths, LADDER).items())
    one_bucket = M5_MS[512] * len(lengths)
    assert grouped == pytest.approx(7 * 3.5 + 25.4)
    assert one_bucket / grouped >= 3.5


@given(st.lists(st.integers(1, 1024), min_size=1, max_size=60))
def test_every_row_is_in_exactly_one_group_that_fits_and_no_smaller_one_would(lengths: list[int]) -> None:
    groups = group(lengths, LADDER)
    assert sorted(row for rows in groups.values() for row in rows) == list(range(len(lengths)))
    for bucket, rows in groups.items():
        for row in rows:
            assert lengths[row] <= bucket
            assert not any(lengths[row] <= lower < bucket for lower in LADDER)
