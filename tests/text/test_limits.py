from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.protocol.messages import EmbedBatch, Item, Pooling, encode
from synapse_host.errors import InvalidRequest, SequenceTooLong
from synapse_host.text import limits


def test_a_row_that_is_too_long_is_told_by_index() -> None:
    limits.check_lengths([1, 5, 3], max_tokens=5, model="m")
    with pytest.raises(SequenceTooLong) as long:
        limits.check_lengths([1, 2, 812], max_tokens=512, model="minilm")
    assert long.value.details == {"index": 2, "tokens": 812, "max_tokens": 512}
    assert long.value.message.startswith("text 2 has 812 tokens, minilm takes 512. Shorten it or pass truncate=True (")
    assert "takes 512. Shorten it or pass --truncate (" in long.value.said("command")
    prompt = limits.too_long(0, 5, 4, model="toy", noun="prompt", at_least=True)
    assert prompt.message == "the prompt has at least 5 tokens, toy takes 4. Shorten it."


lengths = st.lists(st.integers(1, 400), max_size=700)


@given(lengths, st.integers(1, 1024), st.integers(2048, 200_000), st.integers(0, 100))
def test_every_exchange_fits_in_both_directions(rows: list[int], dims: int, max_frame: int, common: int) -> None:
    reply_row = 4 * dims
    try:
        exchanges = limits.split(rows, reply_row_bytes=reply_row, max_frame=max_frame, common_tokens=common)
    except InvalidRequest:
        rooms = (max_frame - limits.HEADER_BYTES) // limits.ROW_HEADER_BYTES
        too_long = any(4 * (row + common) > max_frame for row in rows)
        assert rooms < 1 or max_frame < reply_row or too_long
        return
    # Consecutive, complete, in order.
    assert [index for part in exchanges for index in part] == list(range(len(rows)))
    for part in exchanges:
        assert 1 <= len(part) <= 256
        assert 4 * (common + sum(rows[index] for index in part)) <= max_frame
        assert reply_row * len(part) <= max_frame
        items = [Item(id=str(index), n_tokens=rows[index]) for index in part]
        header = EmbedBatch(
            req_id="r" * 64, model_ref="x" * 64, pooling=Pooling.MEAN, normalize=True, items=items, packed_width=2**31
        )
        assert len(encode(header)) <= max_frame


def test_an_exchange_is_as_full_as_it_may_be() -> None:
    limit = limits.EXCHANGE_TOKENS
    for lengths, sizes in (([4] * 600, [256, 256, 88]), ([], []), ([limit, 1, limit + 5, 1], [1, 1, 1, 1])):
        found = limits.split(lengths, reply_row_bytes=4, max_frame=2**26)
        assert [len(part) for part in found] == sizes


def test_a_row_that_fits_no_frame_is_refused_by_index() -> None:
    with pytest.raises(InvalidRequest) as caught:
        limits.split([1, 20_000], reply_row_bytes=4, max_frame=65_536)
    assert caught.value.details["index"] == 1
    with pytest.raises(InvalidRequest, match="raise max_frame"):
        limits.split([1], reply_row_bytes=4 * 100_000, max_frame=65_536)
