"""Input preparation against the reference of llama-cuda.md 6.4, and its worked examples."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engines.cuda import staging
from engines.cuda.buckets import Policy, plan
from engines.cuda.staging import Filler, Slot, layout, slot_bytes
from tests.support.rows import batch_of

ROWS = st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=50), min_size=1, max_size=40)
PADDED = ("input_ids", "lens", "positions", "type_starts", "max_len")
PACKED = ("input_ids", "positions", "columns", "type_starts", "token_offset", "cu_seqlens")


def slot_for(size: int) -> Slot:
    host = np.full(size, 255, np.uint8)  # whatever isn't written shows
    return Slot(host, host.ctypes.data, np.empty(0, np.float32), 0)


def test_packed_offsets_worked_example() -> None:
    found = staging.packed_offsets(np.array([1, 2, 4], np.int32), 4)
    assert found["cu_seqlens"].tolist() == [0, 1, 3, 7]
    assert found["token_offset"].reshape(-1).tolist() == [0, 4, 5, 8, 9, 10, 11, 1, 2, 3, 6, 7]
    assert found["positions"].tolist() == [0, 0, 1, 0, 1, 2, 3]


def test_token_type_one_starts_after_the_first_separator() -> None:
    batch = batch_of([[2, 9, 3, 8, 3], [2, 9], [3], [2, 3, 3]])
    assert staging.type_starts(batch, 3).tolist() == [3, 2, 1, 2]
    assert staging.type_starts(batch_of([[5, 6], [7]]), 3).tolist() == [2, 1]


@given(rows=ROWS, policy=st.sampled_from([Policy(tokens=128), Policy(tokens=64, ladder=())]), spare=st.integers(0, 3))
def test_every_bucket_equals_the_request_row_by_row(rows: list[list[int]], policy: Policy, spare: int) -> None:
    batch = batch_of(rows)
    made = plan(batch.lengths, policy)
    filler = Filler(batch, made, pad_id=7, separator=3)
    seen = 0
    for bucket in made.buckets:
        shape = layout(PADDED, rows=bucket.rows + spare, width=bucket.width)
        slot = slot_for(slot_bytes(PADDED, cells=(bucket.rows + spare) * bucket.width))
        filler.fill(slot, bucket, shape)
        ids, lens = slot.view(shape, "input_ids"), slot.view(shape, "lens")
        starts = slot.view(shape, "type_starts")
        assert slot.view(shape, "positions").tolist() == list(range(bucket.width))
        assert slot.view(shape, "max_len").tolist() == [bucket.width]
        for place, row in enumerate(made.order[bucket.start : bucket.stop]):
            real = int(lens[place])
            assert ids[place, :real].tolist() == rows[row]
            assert (ids[place, real:] == 7).all()
            assert starts[place] == (rows[row].index(3) + 1 if 3 in rows[row] else real)
        assert (lens[bucket.rows :] == 1).all() and (ids[bucket.rows :] == 7).all()
        seen += bucket.rows
    assert seen == len(rows)


@given(rows=ROWS)
def test_packed_staging_holds_each_row_at_its_place(rows: list[list[int]]) -> None:
    batch = batch_of(rows)
    made = plan(batch.lengths, Policy(tokens=256))
    filler = Filler(batch, made, pad_id=7, separator=3)
    for bucket in made.buckets:
        chosen = [rows[i] for i in made.order[bucket.start : bucket.stop]]
        shape = filler.shape(bucket, PACKED, rows=bucket.rows, width=bucket.width, packed=True)
        slot = slot_for(slot_bytes(PACKED, cells=bucket.rows * bucket.width))
        filler.fill(slot, bucket, shape)
        assert slot.view(shape, "input_ids").tolist() == [token for row in chosen for token in row]
        assert slot.view(shape, "positions").tolist() == [n for row in chosen for n in range(len(row))]
        starts = [row.index(3) + 1 if 3 in row else len(row) for row in chosen]
        expected = [start for start, row in zip(starts, chosen, strict=True) for _ in row]
        assert slot.view(shape, "type_starts").tolist() == expected
        grid = np.full(bucket.rows * bucket.width, -1)
        offset = slot.view(shape, "token_offset").reshape(-1)
        total = sum(map(len, chosen))
        grid[offset[:total]] = slot.view(shape, "input_ids")  # what RestorePadding does
        assert sorted(offset.tolist()) == list(range(len(grid)))
        assert grid.reshape(bucket.rows, bucket.width).tolist() == [
            row + [-1] * (bucket.width - len(row)) for row in chosen
        ]


def test_inputs_lie_apart_and_aligned() -> None:
    shape = layout(PACKED, rows=3, width=5, tokens=11)
    spans = sorted((offset, offset + 4 * int(np.prod(dims))) for offset, dims in shape.places.values())
    assert all(offset % 256 == 0 for offset, _ in spans)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert spans[-1][1] <= shape.size <= slot_bytes(PACKED, cells=15)
