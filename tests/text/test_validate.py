"""What callers pass: refused by its size or kind before it is read, copied or sent."""

from __future__ import annotations

import array
import tracemalloc
from collections import deque
from typing import Any

import numpy as np
import pytest

from synapse_host.errors import InvalidRequest, SequenceTooLong
from synapse_host.text import validate
from synapse_host.text.rows import Rows
from synapse_host.text.validate import check_texts, id_rows


def checked(rows: Any) -> Rows:
    return id_rows(rows, max_tokens=512, model="toy")


@pytest.mark.parametrize(
    ("rows", "index"),
    [
        ([[1], []], 1),
        ([[1.5]], 0),
        ([[True]], 0),
        ([["1"]], 0),
        ([[[1]]], 0),
        ([1], 0),
        ([[1], [-1]], 1),
        ([[2**31]], 0),
        ([[2**70]], 0),
        ([None], 0),
        ([[1, [2]]], 0),
    ],
)
def test_ids_that_are_none_are_refused_by_index(rows: Any, index: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checked(rows)
    assert caught.value.details == {"index": index}


@pytest.mark.parametrize("rows", [None, 5, "ab", b"ab", {1: 2}, {1}, (row for row in [[1]])])
def test_rows_that_are_no_list_are_refused(rows: Any) -> None:
    with pytest.raises(InvalidRequest, match="must be a list of rows"):
        checked(rows)


def test_ids_may_be_lists_or_arrays() -> None:
    rows = checked([[1, 2], np.array([3], np.int64), (4,), np.array([5, 6], np.uint16)])
    assert rows.ids.tolist() == [1, 2, 3, 4, 5, 6] and rows.ids.dtype == np.int32
    assert rows.lengths == [2, 1, 1, 2]
    assert checked([]).lengths == []


def test_other_sequences_of_ids() -> None:
    rows = [array.array("i", [1, 2]), deque([3]), range(4, 6), [np.int64(6), np.uint8(7)], memoryview(b"\x08"),
            [np.array(9)]]  # fmt: skip
    assert checked(rows).ids.tolist() == list(range(1, 10))
    assert checked(np.array([[1, 2], [3, 4]])).lengths == [2, 2]


HUGE = {
    "a range": range(10**12),
    "an array of one number": np.broadcast_to(np.int32(5), (10**12,)),
    "a list": [1] * 10_000,
}


@pytest.mark.parametrize("row", HUGE.values(), ids=HUGE)
def test_a_row_that_is_too_long_is_not_looked_at(row: Any) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(SequenceTooLong) as caught:
            checked([[1], row])
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert caught.value.details == {"index": 1, "tokens": len(row), "max_tokens": 512}


STRANGE = {
    "an array of arrays": np.broadcast_to(np.int32(5), (3, 10**12)),
    "a mapping": {1: 2},
    "a memoryview of two dimensions": memoryview(np.zeros((2, 2), np.int32)),
    "truths among numbers": [1, True],
}


@pytest.mark.parametrize("row", STRANGE.values(), ids=STRANGE)
def test_a_row_that_is_none_is_refused_by_index(row: Any) -> None:
    with pytest.raises(InvalidRequest, match="row 1 is not a flat list of whole token ids") as caught:
        checked([[1], row])
    assert caught.value.details == {"index": 1}


@pytest.mark.parametrize(
    "rows",
    [range(10**12), np.broadcast_to(np.int32(5), (10**12, 4)), range(10**30)],
)
def test_more_rows_than_a_call_takes(rows: Any) -> None:
    with pytest.raises(InvalidRequest):
        checked(rows)


def test_more_ids_than_a_call_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "MAX_IDS", 1000)
    assert len(checked([[1] * 500] * 2).ids) == 1000
    with pytest.raises(InvalidRequest, match="more than 1000 ids in sum; send them in parts"):
        checked([[1] * 500] * 3)


@pytest.mark.parametrize("texts", [np.broadcast_to(np.array("a"), (10**12,)), range(10**12), range(10**30)])
def test_more_texts_than_a_call_takes(texts: Any) -> None:
    with pytest.raises(InvalidRequest):
        check_texts(texts, "texts")
