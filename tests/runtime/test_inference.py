"""The numeric edge of the request loop: ids, finite checks of every size, and when numpy is imported."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from engines.finite import BLOCK, FEW, all_finite, floats
from engines.protocol.errors import EngineError, ErrorCode
from engines.runtime.batch import TokenBatch, check_lengths, check_vocabulary
from engines.runtime.inference import bytes_of, check_ids

SIZES = (1, 2, FEW - 1, FEW, FEW + 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", SIZES)
def test_one_bad_number_is_found_wherever_it_is(size: int, bad: float) -> None:
    array = np.full(size, 3.4e38, np.float32)  # no sum or product of these is finite
    assert all_finite(array)
    assert floats(array.data.cast("B"))[1]
    for place in {0, size // 2, size - 1}:
        array[place] = bad
        assert not all_finite(array)
        assert not floats(array.data.cast("B"))[1]
        array[place] = -1.0
    assert all_finite(array) and floats(array.data.cast("B"))[1]


def test_the_answer_names_the_row_of_a_bad_number() -> None:
    array = np.zeros((3 * BLOCK // 8, 8), np.float32)
    array[BLOCK // 8 + 7, 3] = np.nan
    with pytest.raises(EngineError, match=f"row {BLOCK // 8 + 7} of {len(array)}") as caught:
        bytes_of(array, array.shape)
    assert caught.value.code is ErrorCode.NONFINITE_OUTPUT


@pytest.mark.parametrize("size", SIZES)
def test_the_first_negative_id_is_named(size: int) -> None:
    ids = np.full(size, 2**31 - 1, np.int32)
    check_ids(ids)
    ids[size // 3] = -1
    ids[-1] = -(2**31)
    first = int((ids < 0).argmax())
    with pytest.raises(EngineError, match=f"token {first} has the negative id {ids[first]}"):
        check_ids(ids)


def test_the_worker_is_there_without_numpy() -> None:
    script = "import sys; import engines.runtime.main, engines.runtime.worker; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_ids_and_lengths_at_the_edge() -> None:
    batch = TokenBatch(np.array([0, 9, 3], np.int32), np.array([0, 1, 3], np.int32))
    check_lengths(batch, limit=2, what="item")
    check_vocabulary(batch.input_ids, 10)
    for check in (lambda: check_lengths(batch, limit=1, what="item"), lambda: check_vocabulary(batch.input_ids, 9)):
        with pytest.raises(EngineError, match=r"9 is outside the vocabulary|item 1 has 2 tokens") as caught:
            check()
        assert caught.value.code is ErrorCode.INVALID_REQUEST
