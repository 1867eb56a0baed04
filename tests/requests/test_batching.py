"""Which calls share an exchange, and whose rows are whose, against a model of a few lines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.protocol.messages import EmbedBatch, Pooling, RerankSequences, Scores, Vectors
from synapse_host.host import Host
from synapse_host.requests.batching import Batch
from tests.support.lanes import on
from tests.support.scripted import expected_vector
from tests.support.small_bundle import write_bundle, write_matrix

MEAN, CLS = Pooling.MEAN, Pooling.CLS


def call(*lengths: int, pooling: Pooling | None = MEAN, normalize: bool = True, start: int = 0) -> Batch:
    ids = np.arange(start, start + sum(lengths), dtype=np.int32)
    return Batch(list(lengths), ids, pooling, normalize, first=start)


def other(req_id: str, model_ref: str) -> Any:
    """A build that nobody can join."""
    raise AssertionError


@pytest.mark.parametrize(
    ("leader", "waiting", "count"),
    [
        (call(3), [], 0),
        (call(3), [call(3), call(4)], 2),
        (call(3), [call(3), call(5)], 1),  # eleven tokens
        (call(3), [call(8), call(1)], 0),  # in order of arrival: the small one doesn't pass the large one
        (call(20), [call(1)], 0),  # too large already
        (call(1), [call(1, 1), call(1), call(1)], 2),  # four rows
        (call(1), [call(1), call(1, pooling=CLS), call(1)], 1),
        (call(1), [call(1, normalize=False)], 0),
        (call(1, pooling=None), [call(1, pooling=None), call(1)], 1),
        (call(1), [call(1), other, call(1)], 1),
    ],
)
def test_who_goes_along(leader: Batch, waiting: list[Any], count: int) -> None:
    assert leader.company(waiting, rows=4, tokens=10) == count


def test_a_suspect_shares_with_nobody() -> None:
    bad, good = call(2, start=50), call(2)
    alone = {bad.fingerprint(): None}
    assert bad.company([good], rows=9, tokens=99, alone=alone) == 0
    assert good.company([good, bad, good], rows=9, tokens=99, alone=alone) == 1
    assert call(2, start=50).fingerprint() == bad.fingerprint() != good.fingerprint()


CALLS = st.builds(
    lambda lengths, pooling, normalize, start: call(*lengths, pooling=pooling, normalize=normalize, start=start),
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.sampled_from([MEAN, CLS, None]),
    st.booleans(),
    st.integers(0, 3),
)


@given(
    CALLS,
    st.lists(CALLS | st.just(other), max_size=12),
    st.integers(1, 12),
    st.integers(1, 40),
    st.sets(st.integers(0, 12)),
)
def test_company_is_the_longest_run_of_alike_calls_that_fits(
    leader: Batch, waiting: list[Any], rows: int, tokens: int, bad: set[int]
) -> None:
    everybody = [leader, *waiting]
    alone = {one.fingerprint() for n, one in enumerate(everybody) if n in bad and isinstance(one, Batch)}

    def may_ride(run: list[Any]) -> bool:
        return all(
            isinstance(one, Batch)
            and (one.pooling, one.normalize) == (leader.pooling, leader.normalize)
            and one.fingerprint() not in alone
            for one in run
        ) and (sum(len(one.lengths) for one in run) <= rows and sum(len(one.ids) for one in run) <= tokens)

    expected = max((n for n in range(1, len(waiting) + 1) if may_ride([leader, *waiting[:n]])), default=0)
    assert leader.company(waiting, rows=rows, tokens=tokens, alone=alone) == expected


@given(st.lists(CALLS, min_size=1, max_size=6), st.integers(1, 3))
def test_every_row_comes_back_to_its_own_call(calls: list[Batch], width: int) -> None:
    leader, *others = calls
    request, payload = leader.joined(others)("1-1", "m:1")
    segments = request.items if isinstance(request, EmbedBatch) else request.sequences
    lengths = [length for one in calls for length in one.lengths]
    assert [segment.n_tokens for segment in segments] == lengths and (request.req_id, request.model_ref) == (
        "1-1",
        "m:1",
    )
    assert np.frombuffer(payload, np.int32).tolist() == [id for one in calls for id in one.ids.tolist()]
    if isinstance(request, EmbedBatch):
        assert (request.pooling, request.normalize) == (leader.pooling, leader.normalize)
        assert [item.id for item in request.items] == [str(n) for n in range(len(lengths))]
        reply: Any = Vectors("1-1", dims=width, n=len(lengths))
    else:
        assert isinstance(request, RerankSequences)
        reply, width = Scores("1-1"), 1
    array = np.arange(len(lengths) * width, dtype=np.float32)
    shares = leader.shares(others, reply, array)
    assert np.concatenate([share for _, share in shares]).tolist() == array.tolist()
    for one, (own, share) in zip(calls, shares, strict=True):
        assert len(share) == len(one.lengths) * width and share.base is None and share.flags.writeable
        assert getattr(own, "n", len(one.lengths)) == len(one.lengths)


def test_alone_the_rows_keep_the_numbers_that_the_caller_knows_them_by() -> None:
    request, _ = call(1, 1, start=256)("1-1", "m:1")
    assert [item.id for item in request.items] == ["256", "257"]


@pytest.mark.process
async def test_small_calls_come_between_the_exchanges_of_a_large_one(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "toy", model_id="toy")
    matrix = write_matrix(tmp_path, {"rules": [on("EMBED_BATCH", {"sleep": 0.1})]})
    large, small = [[7, 1 + n % 9] for n in range(2000)], [[8, n] for n in range(1, 6)]

    async with Host.open(matrix, {"toy": folder}) as host, asyncio.timeout(120):
        counts = host.counters["embed"].shared.counts
        big = asyncio.create_task(host.embed_ids("toy", large))
        while not sum(counts):
            await asyncio.sleep(0.005)
        found = await asyncio.gather(*(host.embed_ids("toy", [row]) for row in small))
        assert not big.done() and sum(counts) <= 4
        for row, vectors in zip(small, found, strict=True):
            assert vectors.tolist() == [expected_vector(row)]
        assert (await big).tolist() == [expected_vector(row) for row in large]
