"""The plan of a request: worked examples of llama-cuda.md 8.3 and properties over random lengths."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.texts import mixed_lengths
from engines.cuda.buckets import LADDER, LAUNCH_CELLS, Policy, ladder_up_to, plan


@pytest.mark.parametrize(
    ("lengths", "tokens", "expected"),
    [
        # Merged where that adds fewer than 128 cells in all: 1056 cells, 992 by ladder step alone, 3200 as one batch.
        ([5, 400, 9, 28, 131, 70, 64, 130], 32768, [([0, 2, 3], 32), ([6, 5], 96), ([7, 4], 160), ([1], 448)]),
        ([7, 3, 7, 3, 7], 1024, [([1, 3, 0, 2, 4], 16)]),  # equal lengths keep their order
        ([100] * 10, 4 * 128, [([0, 1, 2], 128), ([3, 4, 5], 128), ([6, 7, 8, 9], 128)]),  # pieces of nearly equal size
        ([8192, 8192, 3], 1024, [([2], 16), ([0], 8192), ([1], 8192)]),  # longer than the budget: alone
    ],
)
def test_worked_examples(lengths: list[int], tokens: int, expected: list[tuple[list[int], int]]) -> None:
    made = plan(np.array(lengths, np.int32), Policy(tokens=tokens))
    assert [(made.order[b.start : b.stop].tolist(), b.width) for b in made.buckets] == expected


def test_exact_widths_in_blocks_above_the_free_ones() -> None:
    policy = Policy(tokens=64, ladder=(), block=8)
    assert policy.widths(np.array([1, 8, 9, 10, 16, 17], np.int32)).tolist() == [1, 8, 9, 16, 16, 24]


@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=8), block=st.sampled_from([1, 8]))
def test_no_other_cut_of_the_longest_first_costs_less_on_the_cpu(lengths: list[int], block: int) -> None:
    policy = Policy(tokens=128, ladder=(), block=block, rows=5)
    falling = sorted(lengths, reverse=True)
    widths = policy.widths(np.array(falling, np.int32)).tolist()
    inner = [cut for pieces in range(len(widths)) for cut in combinations(range(1, len(widths)), pieces)]
    cuts = [list(pairwise((0, *cut, len(widths)))) for cut in inner]
    allowed = [cut for cut in cuts if all(stop - start <= policy.max_rows(widths[start]) for start, stop in cut)]
    costs = [sum((stop - start) * widths[start] + LAUNCH_CELLS for start, stop in cut) for cut in allowed]
    made = plan(np.array(lengths, np.int32), policy)
    assert [lengths[row] for row in made.order] == falling
    assert sum(bucket.rows * bucket.width + LAUNCH_CELLS for bucket in made.buckets) == min(costs)


@pytest.mark.parametrize("tokens", [128, 256])
@pytest.mark.parametrize("count", [48, 64, 128, 200, 256])
def test_at_most_three_of_a_hundred_computed_tokens_of_mixed_texts_are_padding(count: int, tokens: int) -> None:
    lengths = np.array(mixed_lengths(count), np.int32)
    made = plan(lengths, Policy(tokens=tokens, ladder=(), rows=256))
    assert lengths.sum() >= 0.97 * sum(bucket.rows * bucket.width for bucket in made.buckets)


def test_ladder_of_a_model_ends_at_its_maximum_and_keeps_whole_blocks() -> None:
    assert ladder_up_to(256) == (16, 32, 48, 64, 96, 128, 160, 192, 256)
    blocks = ladder_up_to(8192, 64)
    assert blocks[:6] == (16, 32, 48, 64, 128, 192) and blocks[-1] == 8192
    assert all(step <= 65 or step % 64 == 0 for step in blocks)


POLICIES = st.one_of(
    st.builds(Policy, tokens=st.sampled_from([64, 512, 32768]), rows=st.sampled_from([1, 7, 512])),
    st.builds(Policy, tokens=st.sampled_from([64, 512]), ladder=st.just(()), block=st.sampled_from([1, 8]),
              rows=st.sampled_from([3, 256])),
)  # fmt: skip


@given(lengths=st.lists(st.integers(1, 600), min_size=1, max_size=256), policy=POLICIES)
def test_every_row_runs_once_wide_enough_and_within_the_budget(lengths: list[int], policy: Policy) -> None:
    array = np.array(lengths, np.int32)
    made = plan(array, policy)
    assert sorted(made.order.tolist()) == list(range(len(lengths)))
    assert [b.start for b in made.buckets] == [0, *(b.stop for b in made.buckets[:-1])]
    assert made.buckets[-1].stop == len(lengths)
    for bucket in made.buckets:
        rows = array[made.order[bucket.start : bucket.stop]]
        assert bucket.rows >= 1 and int(rows.max()) <= bucket.width
        assert bucket.rows == 1 or bucket.rows * bucket.width <= policy.tokens
        assert bucket.rows <= max(1, policy.rows)
        if policy.ladder:
            assert bucket.width in LADDER
        elif bucket.width > policy.block + 1:
            assert bucket.width % policy.block == 0


@given(lengths=st.lists(st.integers(1, 600), min_size=1, max_size=256))
def test_merging_adds_fewer_cells_than_its_limit_for_each_launch_saved(lengths: list[int]) -> None:
    steps = np.array(LADDER)[np.searchsorted(LADDER, lengths)]  # each row by itself
    merged = plan(np.array(lengths, np.int32), Policy(tokens=1 << 30)).buckets
    assert len(merged) <= len(set(steps.tolist()))
    assert sum(bucket.rows * bucket.width for bucket in merged) - steps.sum() < 128 * len(merged)
