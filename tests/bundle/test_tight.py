"""Placement of rows in passes, and the width by cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@pytest.mark.parametrize(
    ("lengths", "packed", "width", "cost", "single"),
    [
        ([100, 100], {256: 9.0}, None, 7.0, (0, 1)),
        ([64, 60], {128: 3.5, 256: 9.0}, 128, 3.5, ()),
        ([40] * 12, {128: 3.5, 256: 4.0}, 256, 8.0, ()),
        ([40] * 12, {128: 3.5, 256: 9.0}, 128, 14.0, ()),
        # 60 + 60 share a pass; the lone 10 is as dear packed as alone and stays alone; 400 never fits.
        ([60, 60, 10, 400], {128: 3.6}, 128, 3.6 + 3.5 + 25.4, (2, 3)),
    ],
)
def test_the_width_is_chosen_by_cost(
    lengths: list[int], packed: dict[int, float], width: int | None, cost: float, single: tuple[int, ...]
) -> None:
    choice = tight.choose(lengths, single_cost=SINGLE, packed_cost=packed, max_rows=64)
    assert (choice.width, choice.single) == (width, single) and choice.cost == pytest.approx(cost)


@given(st.lists(st.integers(1, 512), min_size=1, max_size=40))
def test_choosing_never_costs_more_than_not_packing_and_loses_no_row(lengths: list[int]) -> None:
    choice = tight.choose(lengths, single_cost=SINGLE, packed_cost={128: 3.5, 256: 5.0}, max_rows=8)
    alone = sum(SINGLE[next(b for b in sorted(SINGLE) if length <= b)] for length in lengths)
    assert choice.cost <= alone + 1e-9
    rows = [row for one in choice.passes for row in one.rows] + list(choice.single)
    assert sorted(rows) == list(range(len(lengths)))
