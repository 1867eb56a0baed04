"""Metrics against numbers worked out by hand, and a few laws."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from synapse_host.certificates import figures, metrics
from synapse_host.certificates.document import GenerateInputs, RerankInputs

GROUPS, RANKED = [0, 0, 0, 1, 1], [3.0, 2.0, 1.0, 1.0, 2.0]
TWO_BEST = [5.0, 5.0, 1.0, 1.0, 2.0]
DOWN = [float(n) for n in range(10, 0, -1)]


def flips(scores: list[float], apart: float) -> int:
    return metrics.order_flips(RANKED, scores, GROUPS, apart=apart)


def kept(reference: list[int], greedy: list[int]) -> float | None:
    """The share of one continuation that is kept; 2 is a stop."""
    return figures.prefix_share(GenerateInputs([reference], [greedy], [0], [5], [2]))


best = partial(metrics.same_best, TWO_BEST, groups=GROUPS)
NUMBERS: list[tuple[Callable[..., Any], tuple[Any, ...], Any]] = [
    (
        metrics.cosines,
        ([[1, 0], [1, 0], [1, 0], [1, 1]], [[1, 0], [0, 2], [-3, 0], [1, 0]]),
        [1, 0, -1, math.sqrt(0.5)],
    ),
    (metrics.cosines, ([[0, 0], [1e-30, 0], [3, 4]], [[1, 0], [1, 0], [4, 3]]), [0.0, 1.0, 0.96]),
    (metrics.pearson, ([1, 2, 3], [2, 4, 6]), 1.0),
    (metrics.pearson, ([1, 2, 3], [3, 2, 1]), -1.0),
    (metrics.pearson, ([1, 2, 3, 4], [1, 3, 2, 4]), 0.8),
    (metrics.pearson, ([5, 5], [5, 5]), 0.0),
    (metrics.pearson, ([5, 5], [1, 2]), 0.0),
    (metrics.pearson, ([], []), 0.0),
    (metrics.worst_decile, ([],), None),
    (metrics.worst_decile, ([0.5],), 0.5),
    (metrics.worst_decile, ([1.0] * 9 + [0.0],), 0.0),
    (metrics.worst_decile, ([1.0] * 10 + [0.0],), 0.5),
    (metrics.worst_decile, ([1.0] * 19 + [0.4],), 0.7),
    (metrics.percentile, (DOWN, 0.0), 1.0),
    (metrics.percentile, (DOWN, 0.5), 5.0),
    (metrics.percentile, (DOWN, 0.9), 9.0),
    (metrics.percentile, (DOWN, 0.95), 10.0),
    (metrics.percentile, (DOWN, 1.0), 10.0),
    (metrics.percentile, ([], 0.5), 0.0),
    (metrics.scale_error, ([1.0, 3.0], [1.5, 2.5]), 0.5),
    (metrics.scale_error, ([2.0, 2.0], [1.0, 3.0]), None),
    (metrics.scale_error, ([], []), None),
    (metrics.max_error, ([1.0, 3.0], [1.5, 2.75]), 0.5),
    (metrics.max_error, ([], []), None),
    (flips, ([3.0, 2.0, 1.0, 1.0, 2.0], 0.1), 0),
    (flips, ([2.0, 3.0, 1.0, 1.0, 2.0], 0.1), 1),
    (flips, ([2.0, 3.0, 1.0, 1.0, 2.0], 1.5), 0),
    (flips, ([1.0, 2.0, 3.0, 1.0, 2.0], 0.1), 3),
    # The second group's order is its own: its scores may lie anywhere.
    (flips, ([30.0, 20.0, 10.0, 0.1, 0.2], 0.1), 0),
    (flips, ([3.0, 3.0, 1.0, 1.0, 2.0], 0.1), 1),
    # Equals of the best count as best.
    (best, ([9.0, 1.0, 0.0, 7.0, 8.0],), 1.0),
    (best, ([1.0, 9.0, 0.0, 7.0, 8.0],), 1.0),
    (best, ([0.0, 1.0, 9.0, 7.0, 8.0],), 0.5),
    (kept, ([5, 6, 7], [5, 6, 8]), 2 / 3),
    (kept, ([5, 6], [5, 6, 7]), 1.0),
    (kept, ([9], [5]), 0.0),
    (kept, ([5, 2, 0], [5]), 1.0),
    (kept, ([5, 6], [5]), 0.5),
]


@pytest.mark.parametrize(("figure", "arguments", "expected"), NUMBERS)
def test_a_figure_worked_out_by_hand(figure: Callable[..., Any], arguments: tuple[Any, ...], expected: Any) -> None:
    assert figure(*arguments) == pytest.approx(expected)


def test_rank_overlaps_of_swapped_neighbours() -> None:
    angles = np.radians([0, 10, 30, 60, 100])
    reference = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    assert metrics.rank_overlaps(reference, reference).tolist() == [1.0] * 5
    # Row 1 moves next to row 2: the nearest (k = 1) of rows 0 and 2 changes or stays accordingly.
    angles = np.radians([0, 28, 30, 60, 100])
    moved = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    assert metrics.rank_overlaps(reference, moved).tolist() == [1.0, 0.0, 1.0, 1.0, 1.0]
    for n in range(3):  # too few to rank
        assert metrics.rank_overlaps(np.ones((n, 3)), -np.ones((n, 3))).tolist() == [1.0] * n


def test_rank_overlaps_take_a_tenth_of_the_rows() -> None:
    angles = np.radians(np.cumsum(np.arange(21)))
    reference = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    moved = reference.copy()
    moved[0] = -moved[0]
    overlaps = metrics.rank_overlaps(reference, moved)
    assert set(overlaps.tolist()) <= {0.0, 0.5, 1.0}
    assert overlaps[0] < 1.0


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
    assert found_own == pytest.approx(own, abs=1e-4) and found_best == pytest.approx(best, abs=1e-4)
    assert longer == pytest.approx(np.linalg.norm(batch, axis=1))


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


def test_neighbours_and_their_correlation() -> None:
    rows = np.array([[1, 0], [0.9, 0.1], [0, 1]])
    assert metrics.nearest(rows) == [1, 0, 1] and metrics.nearest(np.zeros((0, 2))) == []
    assert metrics.neighbour_pearson(rows, rows) == pytest.approx([1, 1, 1])


def test_a_mean_is_the_same_on_every_python() -> None:
    """``sum`` gives 0.9999999999999999 before Python 3.12 and 1.0 since; a document says the figure to the last bit."""
    assert metrics.total([0.1] * 10) == 1.0 and metrics.worst_decile([0.1] * 100) == 0.1
    assert metrics.total([1e308, 1e308]) == float("inf")
