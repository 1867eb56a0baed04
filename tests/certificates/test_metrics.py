"""Metrics against numbers worked out by hand, and a few laws."""

from __future__ import annotations

import math

import numpy as np
import pytest

from synapse_host.certificates import figures, metrics
from synapse_host.certificates.document import GenerateInputs, RerankInputs


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([[1, 0]], [[1, 0]], [1.0]),
        ([[1, 0]], [[0, 2]], [0.0]),
        ([[1, 0]], [[-3, 0]], [-1.0]),
        ([[1, 1]], [[1, 0]], [math.sqrt(0.5)]),
        ([[0, 0]], [[1, 0]], [0.0]),
        ([[1e-30, 0], [3, 4]], [[1, 0], [4, 3]], [1.0, 0.96]),
    ],
)
def test_cosines(one: list[list[float]], other: list[list[float]], expected: list[float]) -> None:
    assert metrics.cosines(np.array(one), np.array(other)).tolist() == pytest.approx(expected)


def test_rank_overlaps_of_swapped_neighbours() -> None:
    angles = np.radians([0, 10, 30, 60, 100])
    reference = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    assert metrics.rank_overlaps(reference, reference).tolist() == [1.0] * 5
    # Row 1 moves next to row 2: the nearest (k = 1) of rows 0 and 2 changes or stays accordingly.
    angles = np.radians([0, 28, 30, 60, 100])
    moved = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    assert metrics.rank_overlaps(reference, moved).tolist() == [1.0, 0.0, 1.0, 1.0, 1.0]


def test_rank_overlaps_take_a_tenth_of_the_rows() -> None:
    angles = np.radians(np.cumsum(np.arange(21)))
    reference = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    moved = reference.copy()
    moved[0] = -moved[0]
    overlaps = metrics.rank_overlaps(reference, moved)
    assert set(overlaps.tolist()) <= {0.0, 0.5, 1.0}
    assert overlaps[0] < 1.0


@pytest.mark.parametrize("n", [0, 1, 2])
def test_rank_overlaps_of_too_few_rows_are_whole(n: int) -> None:
    assert metrics.rank_overlaps(np.ones((n, 3)), -np.ones((n, 3))).tolist() == [1.0] * n


@pytest.mark.parametrize(
    ("overlaps", "expected"),
    [([], None), ([0.5], 0.5), ([1.0] * 9 + [0.0], 0.0), ([1.0] * 10 + [0.0], 0.5), ([1.0] * 19 + [0.4], 0.7)],
)
def test_worst_decile(overlaps: list[float], expected: float | None) -> None:
    assert metrics.worst_decile(overlaps) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1, 2, 3], [2, 4, 6], 1.0),
        ([1, 2, 3], [3, 2, 1], -1.0),
        ([1, 2, 3, 4], [1, 3, 2, 4], 0.8),
        ([5, 5], [5, 5], 0.0),
        ([5, 5], [1, 2], 0.0),
        ([], [], 0.0),
    ],
)
def test_pearson(one: list[float], other: list[float], expected: float) -> None:
    assert metrics.pearson(one, other) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("scores", "apart", "expected"),
    [
        ([3.0, 2.0, 1.0, 1.0, 2.0], 0.1, 0),
        ([2.0, 3.0, 1.0, 1.0, 2.0], 0.1, 1),
        ([2.0, 3.0, 1.0, 1.0, 2.0], 1.5, 0),
        ([1.0, 2.0, 3.0, 1.0, 2.0], 0.1, 3),
        # The second group's order is its own: its scores may lie anywhere.
        ([30.0, 20.0, 10.0, 0.1, 0.2], 0.1, 0),
        ([3.0, 3.0, 1.0, 1.0, 2.0], 0.1, 1),
    ],
)
def test_order_flips(scores: list[float], apart: float, expected: int) -> None:
    reference, groups = [3.0, 2.0, 1.0, 1.0, 2.0], [0, 0, 0, 1, 1]
    assert metrics.order_flips(reference, scores, groups, apart=apart) == expected


@pytest.mark.parametrize(
    ("scores", "expected"),
    [([9.0, 1.0, 0.0, 7.0, 8.0], 1.0), ([1.0, 9.0, 0.0, 7.0, 8.0], 1.0), ([0.0, 1.0, 9.0, 7.0, 8.0], 0.5)],
)
def test_same_best_takes_equals_of_the_best(scores: list[float], expected: float) -> None:
    assert metrics.same_best([5.0, 5.0, 1.0, 1.0, 2.0], scores, [0, 0, 0, 1, 1]) == expected


@pytest.mark.parametrize(
    ("batch", "own", "best"),
    [
        # Rows that changed places, and a row that became another.
        (np.eye(4)[[1, 0, 2, 3]], [0, 0, 1, 1], [1, 1, 1, 1]),
        ([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0.4], [0, 0, 0, 2]], [1, 1, 0.9285, 1], [1, 1, 0.9285, 1]),
    ],
)
def test_a_batch_against_its_rows_alone(batch: list[list[float]], own: list[float], best: list[float]) -> None:
    found_own, found_best, longer = metrics.own_and_best(np.array(batch), np.eye(4))
    assert found_own.tolist() == pytest.approx(own, abs=1e-4)
    assert found_best.tolist() == pytest.approx(best, abs=1e-4)
    assert longer.tolist() == pytest.approx(np.linalg.norm(batch, axis=1).tolist())


@pytest.mark.parametrize(
    ("batch", "error", "misplaced"),
    [
        ([1.0, 2.0, 3.0], 0.0, 0),
        ([1.1, 2.0, 3.0], 0.1, 0),
        ([3.0, 2.0, 1.0], 0.0, 2),
        ([2.0, 3.0, 1.0], 0.0, 3),
        ([3.01, 2.0, 1.0], 0.01, 2),
        # However wrong the numbers are, a swap stays one: what was measured gives no room.
        ([9.0, 1.0, 3.0], 6.0, 1),
        ([0.0, 0.0, 0.0], 3.0, 0),
        ([None, None, None], 0.0, 0),
    ],
)
def test_scores_of_a_batch(batch: list[float | None], error: float, misplaced: int) -> None:
    single: list[float | None] = [1.0, 2.0, 3.0]
    pairs = RerankInputs([0] * 3, [1.0, 2.0, 3.0], single, batch, single, [0] * 3)
    assert figures.batch_error(pairs) == pytest.approx(error)
    assert figures.misplaced_scores(pairs, 0.1) == misplaced


@pytest.mark.parametrize(
    ("reference", "greedy", "share"),
    [
        ([5, 6, 7], [5, 6, 8], 2 / 3),
        ([5, 6], [5, 6, 7], 1.0),
        ([9], [5], 0.0),
        ([5, 2, 0], [5], 1.0),
        ([5, 6], [5], 0.5),
    ],
)
def test_how_much_of_a_continuation_is_kept(reference: list[int], greedy: list[int], share: float) -> None:
    assert figures.prefix_share(GenerateInputs([reference], [greedy], [0], [5], [2])) == pytest.approx(share)


@pytest.mark.parametrize(("share", "expected"), [(0.5, 5.0), (0.95, 10.0), (0.9, 9.0), (0.0, 1.0), (1.0, 10.0)])
def test_percentile(share: float, expected: float) -> None:
    assert metrics.percentile([float(n) for n in range(10, 0, -1)], share) == expected
    assert metrics.percentile([], share) == 0.0


def test_neighbours_and_their_correlation() -> None:
    rows = np.array([[1, 0], [0.9, 0.1], [0, 1]])
    assert metrics.nearest(rows) == [1, 0, 1]
    assert metrics.neighbour_pearson(rows, rows).tolist() == pytest.approx([1, 1, 1])


def test_a_mean_is_the_same_on_every_python() -> None:
    """``sum`` gives 0.9999999999999999 before Python 3.12 and 1.0 since; a document says the figure to the last bit."""
    assert metrics.total([0.1] * 10) == 1.0
    assert metrics.total([1e308, 1e308]) == float("inf")
    assert metrics.worst_decile([0.1] * 100) == 0.1


def test_an_error_is_measured_by_the_spread_of_the_reference() -> None:
    assert metrics.scale_error([1.0, 3.0], [1.5, 2.5]) == pytest.approx(0.5)
    assert metrics.scale_error([2.0, 2.0], [1.0, 3.0]) is None and metrics.scale_error([], []) is None
    assert metrics.max_error([1.0, 3.0], [1.5, 2.75]) == 0.5 and metrics.max_error([], []) is None
    assert metrics.nearest(np.zeros((0, 2))) == []
