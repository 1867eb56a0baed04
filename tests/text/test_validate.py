"""What callers pass: refused by its size or kind before it is read, copied or sent."""

from __future__ import annotations

import array
import asyncio
import tracemalloc
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.bundle.manifest import read
from synapse_host.errors import InvalidRequest, SequenceTooLong
from synapse_host.text import validate
from synapse_host.text.rows import Rows
from synapse_host.text.validate import absolute, id_rows, prompt_text
from tests.support.small_bundle import write_bundle


def checked(rows: Any) -> Rows:
    return id_rows(rows, max_tokens=512, model="toy")


NOT_IDS: list[Any] = [
    [], [1.5], [True], ["1"], [[1]], [1, [2]], [-1], [2**31], [2**70], None, 1, {1: 2},
    np.broadcast_to(np.int32(5), (3, 4)), memoryview(np.zeros((2, 2), np.int32)),
]  # fmt: skip


@pytest.mark.parametrize("row", NOT_IDS, ids=lambda row: type(row).__name__)
def test_a_row_that_is_none_of_ids_is_refused_by_index(row: Any) -> None:
    with pytest.raises(InvalidRequest, match="row 1") as caught:
        checked([[1], row])
    assert caught.value.details == {"index": 1}


@pytest.mark.parametrize("rows", [None, 5, "ab", b"ab", {1: 2}, {1}, (row for row in [[1]])])
def test_rows_that_are_no_list_are_refused(rows: Any) -> None:
    with pytest.raises(InvalidRequest, match="must be a list of rows"):
        checked(rows)


def test_ids_may_be_lists_arrays_and_other_sequences() -> None:
    rows = checked([[0, 2], np.array([3], np.int64), (4,), np.array([5, 6], np.uint16)])
    assert rows.ids.tolist() == [0, 2, 3, 4, 5, 6] and rows.ids.dtype == np.int32
    assert rows.lengths == [2, 1, 1, 2] and checked([]).lengths == []
    others = [array.array("i", [1, 2]), deque([3]), range(4, 6), [np.int64(6), np.uint8(7)], memoryview(b"\x08"),
              [np.array(9)]]  # fmt: skip
    assert checked(others).ids.tolist() == list(range(1, 10))
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


def test_many_rows_are_joined_a_block_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy lets no other thread run while it joins arrays."""
    joined: list[int] = []
    concatenate = np.concatenate

    def noted(arrays: Any) -> Any:
        joined.append(len(arrays))
        return concatenate(arrays)

    monkeypatch.setattr(validate, "BLOCK", 4)
    monkeypatch.setattr(np, "concatenate", noted)
    assert checked([[n] for n in range(10)]).ids.tolist() == list(range(10))
    assert joined == [4, 4, 4], "two blocks, then both and the two rows behind them"


@pytest.mark.parametrize("deadline", ["5", b"5", [], float("nan"), 10**400], ids=str)
async def test_a_deadline_is_a_number_of_seconds(deadline: Any) -> None:
    with pytest.raises(InvalidRequest, match="deadline is not a number of seconds"):
        absolute(deadline)
    assert absolute(None) is None and absolute(5) - asyncio.get_running_loop().time() == pytest.approx(5, abs=1)


@pytest.mark.parametrize(
    ("default", "name", "expected"),
    [
        (None, None, ""), (None, "query", "query: "), ("doc", None, "passage: "), ("doc", "none", ""),
        ("doc", "bare", ""), ("doc", "Doc", None), (None, "", None), (None, 7, None),
    ],
)  # fmt: skip
def test_a_prompt_is_the_callers_the_models_own_or_none(
    tmp_path: Path, default: str | None, name: Any, expected: str | None
) -> None:
    chosen = {} if default is None else {"default_prompt": default}
    prompts = {"query": "query: ", "doc": "passage: ", "bare": ""}
    model = read(write_bundle(tmp_path / "b", prompts=prompts, **chosen)).manifest
    plain = read(write_bundle(tmp_path / "plain")).manifest
    assert (prompt_text(plain, None), prompt_text(plain, "none")) == ("", "")
    if expected is not None:
        assert prompt_text(model, name) == expected
        return
    for one, known in ((model, ["bare", "doc", "query", "none"]), (plain, ["none"])):
        with pytest.raises(InvalidRequest, match=", ".join(known)) as caught:
            prompt_text(one, name)
        assert caught.value.details == {"prompts": known}
