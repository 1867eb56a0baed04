"""Who gets the stream next: in order, once, and never lost with a caller who leaves."""

from __future__ import annotations

import asyncio

import pytest

from synapse_host.errors import DeadlineExceeded, LaneRefused, QueueFull
from synapse_host.supervision.queueing import Turns
from synapse_host.supervision.standing import Standing
from tests.support.lanes import lane


def turns(limit: int = 8) -> tuple[Turns, Standing]:
    standing = Standing(lane(), cool_down=60.0)
    return Turns(standing, limit=limit), standing


def queue(line: Turns, count: int, *, order: list[int] | None = None) -> list[asyncio.Task[None]]:
    async def one(n: int) -> None:
        await line.take(None, "embed_batch")
        if order is not None:
            order.append(n)

    return [asyncio.create_task(one(n)) for n in range(count)]


async def test_turns_are_given_in_order_and_one_at_a_time():
    line, _ = turns()
    await line.take(None, "embed_batch")
    order: list[int] = []
    tasks = queue(line, 3, order=order)
    await asyncio.sleep(0)
    assert (line.waiting, order) == (3, [])
    for served in range(1, 4):
        line.pass_on()
        await asyncio.sleep(0)
        assert order == list(range(served)) and line.held
    line.pass_on()
    assert not line.held and all(task.done() for task in tasks)


@pytest.mark.report("huggingface/text-embeddings-inference#424")
async def test_a_full_queue_and_a_deadline_in_the_past_wait_for_nothing():
    line, _ = turns(limit=1)
    line.held = True
    with pytest.raises(DeadlineExceeded):
        await line.take(0.0, "embed_batch")
    (waiting,) = queue(line, 1)
    await asyncio.sleep(0)
    with pytest.raises(QueueFull) as caught:
        await line.take(None, "embed_batch")
    assert caught.value.details == {"lane_id": "toy", "waiting": 1}
    waiting.cancel()
    await asyncio.wait({waiting})


async def test_a_deadline_while_waiting_leaves_the_line():
    line, _ = turns()
    line.held = True
    with pytest.raises(DeadlineExceeded, match="during embed_batch"):
        await line.take(asyncio.get_running_loop().time() + 0.01, "embed_batch")
    assert line.waiting == 0
    line.pass_on()
    assert not line.held


@pytest.mark.parametrize("granted", [False, True])
async def test_a_cancelled_waiter_loses_no_turn(granted):
    line, _ = turns()
    line.held = True
    first, second = queue(line, 2)
    await asyncio.sleep(0)
    if granted:
        line.pass_on()
    first.cancel()
    await asyncio.sleep(0)
    if not granted:
        assert line.waiting == 1
        line.pass_on()
    await second
    assert first.cancelled() and line.held and line.waiting == 0


async def test_whoever_waited_gets_the_answer_of_a_lane_that_was_shut_meanwhile():
    line, standing = turns()
    line.held = True
    tasks = queue(line, 3)
    await asyncio.sleep(0)
    standing.refusal = LaneRefused("not the worker", details={"reason": "engine"})
    line.pass_on()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(answer) for answer in answers] == [LaneRefused] * 3
    assert not line.held


async def test_closing_answers_the_line_and_drains_the_holder():
    line, standing = turns()
    line.held = True
    tasks = queue(line, 2)
    await asyncio.sleep(0)
    standing.closing = True
    line.close(asyncio.get_running_loop().time() + 60)
    draining = asyncio.create_task(line.drain())
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(answer) for answer in answers] == [QueueFull] * 2 and not draining.done()
    line.pass_on()
    await draining


async def test_a_second_close_hurries_the_first():
    line, standing = turns()
    line.held = standing.closing = True
    line.close(asyncio.get_running_loop().time() + 600)
    draining = asyncio.create_task(line.drain())
    await asyncio.sleep(0)
    line.close(asyncio.get_running_loop().time())
    await draining
    assert line.held


async def test_a_drain_ends_when_its_time_is_over():
    line, standing = turns()
    line.held = standing.closing = True
    line.close(asyncio.get_running_loop().time() + 0.01)
    await asyncio.wait_for(line.drain(), 60)
    assert line.held, "the holder still runs; who closes the lane ends it"


@pytest.mark.parametrize("closing", [False, True])
async def test_who_left_in_this_very_moment_is_passed_over(closing):
    line, _ = turns()
    line.held = True
    gone, stays = queue(line, 2)
    await asyncio.sleep(0)
    gone.cancel()
    # The leaver has had no chance yet to take itself out of the line.
    if closing:
        line.close(asyncio.get_running_loop().time())
    else:
        line.pass_on()
    answers = await asyncio.gather(gone, stays, return_exceptions=True)
    assert [type(answer) for answer in answers] == [asyncio.CancelledError, QueueFull if closing else type(None)]
    assert line.held
