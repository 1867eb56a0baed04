from __future__ import annotations

import asyncio

import numpy as np
import pytest

from synapse_host.errors import InvalidRequest
from synapse_host.requests.parts import AHEAD, Part, collect, cut
from synapse_host.text.rows import Rows


def rows(lengths: list[int]) -> Rows:
    return Rows(np.arange(sum(lengths), dtype=np.int32), lengths, [])


def test_parts_hold_every_row_once_and_in_order() -> None:
    parts = cut(rows([2] * 600), reply_row_bytes=4, max_frame=1 << 20, noun="text")
    assert [part.rows for part in parts] == [range(256), range(256, 512), range(512, 600)]
    assert [len(part.lengths) for part in parts] == [256, 256, 88]
    assert np.concatenate([part.ids for part in parts]).tolist() == list(range(1200))


def test_a_row_that_fits_no_frame_is_named() -> None:
    with pytest.raises(InvalidRequest, match="document 3 "):
        cut(rows([1, 1, 1, 2000]), reply_row_bytes=4, max_frame=4096, noun="document")


def some_parts(count: int) -> list[Part]:
    return [Part(range(2 * n, 2 * n + 2), [1, 1], np.array([2 * n, 2 * n + 1], np.int32)) for n in range(count)]


async def test_answers_lie_where_their_rows_are_whoever_is_first() -> None:
    started: list[int] = []
    first_may_end = asyncio.Event()

    async def send(part: Part) -> np.ndarray:
        started.append(part.rows.start)
        if part.rows.start == 0:
            await first_may_end.wait()
        elif part.rows.start == 2:
            first_may_end.set()
        return np.stack([part.ids, part.ids], axis=1).astype(np.float32)

    answer = await collect(some_parts(4), send, 2)
    assert answer.tolist() == [[n, n] for n in range(8)]
    assert started == [0, 2, 4, 6]


async def test_no_more_than_ahead_are_under_way() -> None:
    running = most = 0

    async def send(part: Part) -> np.ndarray:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(3):
            await asyncio.sleep(0)
        running -= 1
        return part.ids.astype(np.float32)

    assert (await collect(some_parts(6), send)).tolist() == list(range(12))
    assert most == AHEAD


async def test_the_first_failure_cancels_what_is_under_way_and_starts_nothing_more() -> None:
    started: list[int] = []
    cancelled: list[int] = []

    async def send(part: Part) -> np.ndarray:
        started.append(part.rows.start)
        if part.rows.start == 0:
            await asyncio.sleep(0)
            raise InvalidRequest("no")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(part.rows.start)
            raise
        raise AssertionError

    with pytest.raises(InvalidRequest):
        await collect(some_parts(4), send)
    assert (started, cancelled) == ([0, 2], [2])
