"""Who gets the stream or a permit next: in order, once, and never lost with a caller who leaves."""

from __future__ import annotations

import asyncio

import pytest

from engines.machine import usable_cores
from synapse_host.errors import DeadlineExceeded, LaneRefused, QueueFull
from synapse_host.supervision.queueing import Permits, Turns
from synapse_host.supervision.standing import Standing
from tests.support.lanes import lane, soon


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


@pytest.mark.parametrize("end", ["given back", "hurried", "over"])
async def test_closing_answers_the_line_and_waits_for_the_holder(end):
    line, standing = turns()
    line.held = True
    tasks = queue(line, 2)
    await asyncio.sleep(0)
    standing.closing = True
    line.close(soon(0.01 if end == "over" else 600))
    draining = asyncio.create_task(line.drain())
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(answer) for answer in answers] == [QueueFull] * 2 and not draining.done()
    if end == "given back":
        line.pass_on()
    elif end == "hurried":
        line.close(soon(0))
    await asyncio.wait_for(draining, 60)
    assert line.held is (end != "given back"), "a holder that still runs is ended by whoever closes the lane"


@pytest.mark.parametrize("closing", [False, True])
async def test_who_left_in_this_very_moment_is_passed_over(closing):
    line, _ = turns()
    line.held = True
    gone, stays = queue(line, 2)
    await asyncio.sleep(0)
    gone.cancel()
    # The leaver has had no chance yet to take itself out of the line.
    if closing:
        line.close(soon(0))
    else:
        line.pass_on()
    answers = await asyncio.gather(gone, stays, return_exceptions=True)
    assert [type(answer) for answer in answers] == [asyncio.CancelledError, QueueFull if closing else type(None)]
    assert line.held


async def test_who_comes_back_has_its_old_place():
    line, _ = turns()
    line.held = True
    assert line.arrive() == 1
    order: list[str] = []

    async def one(name: str, place: int | None) -> None:
        await line.take(None, "embed_batch", place=place, limited=False)
        order.append(name)
        line.pass_on()

    tasks = [
        asyncio.create_task(one(name, place)) for name, place in (("b", None), ("c", None), ("a", 1), ("first", 0))
    ]
    await asyncio.sleep(0)
    line.pass_on()
    await asyncio.gather(*tasks)
    assert order == ["first", "a", "b", "c"] and not line.held


async def test_those_who_are_taken_along_get_answers_and_no_turn():
    line, _ = turns()
    line.held = True
    now = asyncio.get_running_loop().time()

    async def one(name: str, deadline: float | None) -> object:
        return await line.take(deadline, "embed_batch", build=name)

    # The timer of the second, which is due at once, has not run when the others board.
    ends = [None, now + 0.001, now + 60, None, None, None]
    tasks = [asyncio.create_task(one(name, end)) for name, end in zip("abcdef", ends, strict=True)]
    await asyncio.sleep(0)
    tasks[3].cancel()
    while asyncio.get_running_loop().time() < now + 0.001:
        pass
    offered: list[object] = []

    def choose(builds: object) -> int:
        offered.extend(builds)  # type: ignore[call-overload]
        return 3

    riders = line.board(choose)
    assert offered == ["a", "c", "e", "f"] and [rider.build for rider in riders] == ["a", "c", "e"]
    assert line.waiting == 1
    riders[0].future.set_result("for a")
    riders[2].future.set_result("for e")
    tasks[4].cancel()
    tasks[2].cancel()
    found = await asyncio.gather(*tasks[:5], return_exceptions=True)
    assert found[0] == "for a" and isinstance(found[1], DeadlineExceeded)
    assert [type(one) for one in found[2:]] == [asyncio.CancelledError] * 3
    assert line.held and not tasks[5].done(), "those who had no turn passed none on"
    line.pass_on()
    assert await tasks[5] is None


# --- permits ---------------------------------------------------------------------------------------------------------


def test_permits_are_counted_by_kind_or_by_device():
    default, permits = Permits(), Permits({"cuda": 2, "cuda:1": 3})
    assert default.limit("cpu") == usable_cores()
    assert [default.limit(device) for device in ("cuda", "cuda:1", "metal", "ane")] == [1] * 4
    assert [permits.limit(device) for device in ("cuda:0", "cuda:1", "ane")] == [2, 3, 1]
    with pytest.raises(ValueError, match="at least 1"):
        Permits({"cpu": 0})


def test_each_accelerator_has_its_own_and_cuda_is_cuda_0():
    permits = Permits()
    assert permits.try_acquire("cuda")
    assert not permits.try_acquire("cuda:0")
    assert permits.try_acquire("cuda:1")
    permits.release("cuda:0")
    assert permits.try_acquire("cuda")


async def test_a_permit_goes_to_whoever_waits_longest_and_is_never_lost():
    permits, order = Permits(), list[int]()

    async def acquire(deadline: float | None = None) -> None:
        await permits.acquire("ane", lane_id="toy", stage="embed", deadline=deadline)

    async def take(n: int) -> None:
        await acquire()
        order.append(n)
        permits.release("ane")

    await acquire()
    with pytest.raises(DeadlineExceeded, match=r"lane toy: .* during embed, while it waited for ane") as late:
        await acquire(soon(0.01))
    assert late.value.details == {"lane_id": "toy", "stage": "embed"}
    leaving = asyncio.create_task(acquire())
    tasks = [asyncio.create_task(take(n)) for n in range(3)]
    await asyncio.sleep(0)
    assert not permits.try_acquire("ane"), "nobody overtakes a waiter"
    permits.release("ane")
    leaving.cancel()  # with its permit
    await asyncio.gather(*tasks)
    assert leaving.cancelled() and order == [0, 1, 2] and permits.in_use("ane") == 0
