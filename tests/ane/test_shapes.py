"""Which rung a row runs on, and how many functions may be resident."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engines.ane.shapes import Resident, Shapes, group
from engines.ane.signature import Key
from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import Inventory

LADDER = (128, 256, 512, 1024)


@pytest.mark.parametrize("lengths", [[0], [1025], [5, 2000]])
def test_a_row_that_fits_nowhere_refuses_the_whole_batch(lengths: list[int]) -> None:
    with pytest.raises(EngineError, match=r"no tokens|the largest bucket takes 1024") as refused:
        group(lengths, LADDER)
    assert refused.value.code is ErrorCode.INVALID_REQUEST


@example([300, 5, 128, 129, 512, 1, 1024])
@given(st.lists(st.integers(1, 1024), min_size=1, max_size=60))
def test_every_row_is_in_exactly_one_group_that_fits_and_no_smaller_one_would(lengths: list[int]) -> None:
    groups = group(lengths, LADDER)
    assert list(groups) == sorted(groups) and all(rows == sorted(rows) for rows in groups.values())
    assert sorted(row for rows in groups.values() for row in rows) == list(range(len(lengths)))
    for bucket, rows in groups.items():
        assert all(min(b for b in LADDER if lengths[row] <= b) == bucket for row in rows)


def test_shapes_and_packed_widths_share_four_places() -> None:
    closed: list[Key] = []

    class Program:
        def __init__(self, key: Key) -> None:
            self.close = lambda: closed.append(key)

    keys = [Key("shape", 2**n) for n in range(4, 10)] + [Key("packed", 64)]
    one = Shapes(keys, lambda key: Resident(Program(key), Inventory([], []), 0.5))  # type: ignore[arg-type]
    for key in (*keys[:3], Key("packed", 64)):
        one.admit(key)
    with pytest.raises(EngineError) as refused:
        one.admit(Key("shape", 128))
    assert refused.value.code is ErrorCode.ANE_RESIDENCY_LIMIT
    one.admit(Key("shape", 16))  # resident: no new place
    one.evict(Key("packed", 64))
    one.admit(Key("shape", 128))
    assert closed == [Key("packed", 64)] and one.resident("shape") == (16, 32, 64, 128)
    with pytest.raises(EngineError, match=r"bucket 256 is not resident .*bucket 16, bucket 32"):
        one.program(Key("shape", 256))
    with pytest.raises(EngineError, match=r"no packed width 32 .it has: 64."):
        one.evict(Key("packed", 32))
    one.close()
    one.close()
    assert len(closed) == 5
