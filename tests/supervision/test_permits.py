"""Execution permits: order, limits, deadlines, cancellation."""

from __future__ import annotations

import asyncio

import pytest

from engines.machine import usable_cores
from synapse_host.errors import DeadlineExceeded
from synapse_host.supervision.queueing import Permits


async def acquire(permits: Permits, device: str, deadline: float | None = None) -> None:
    await permits.acquire(device, lane_id="toy", stage="embed", deadline=deadline)


def test_defaults():
    permits = Permits()
    assert permits.limit("cpu") == usable_cores() >= 1
    assert permits.limit("cuda") == permits.limit("cuda:1") == permits.limit("metal") == permits.limit("ane") == 1


def test_limits_by_kind_and_by_device():
    permits = Permits({"cuda": 2, "cuda:1": 3})
    assert (permits.limit("cuda:0"), permits.limit("cuda:1"), permits.limit("ane")) == (2, 3, 1)
    with pytest.raises(ValueError, match="at least 1"):
        Permits({"cpu": 0})


def test_each_accelerator_has_its_own_and_cuda_is_cuda_0():
    permits = Permits()
    assert permits.try_acquire("cuda")
    assert not permits.try_acquire("cuda:0")
    assert permits.try_acquire("cuda:1")
    permits.release("cuda:0")
    assert permits.try_acquire("cuda")


async def test_first_come_first_served():
    permits, order = Permits({"cpu": 1}), []
    await acquire(permits, "cpu")

    async def take(n):
        await acquire(permits, "cpu")
        order.append(n)
        permits.release("cpu")

    tasks = [asyncio.create_task(take(n)) for n in range(5)]
    await asyncio.sleep(0)
    # Nobody overtakes a waiter.
    assert not permits.try_acquire("cpu")
    permits.release("cpu")
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2, 3, 4]
    assert permits.in_use("cpu") == 0


async def test_a_deadline_ends_the_wait_and_loses_no_permit():
    permits = Permits({"ane": 1})
    await acquire(permits, "ane")
    with pytest.raises(DeadlineExceeded, match=r"lane toy: .* during embed, while it waited for ane") as late:
        await acquire(permits, "ane", deadline=asyncio.get_running_loop().time() + 0.01)
    assert late.value.details == {"lane_id": "toy", "stage": "embed"}
    permits.release("ane")
    assert permits.in_use("ane") == 0
    assert permits.try_acquire("ane")


async def test_who_is_cancelled_with_its_permit_passes_it_on():
    permits = Permits({"ane": 1})
    await acquire(permits, "ane")
    leaving = asyncio.create_task(acquire(permits, "ane"))
    staying = asyncio.create_task(acquire(permits, "ane"))
    await asyncio.sleep(0)
    permits.release("ane")
    leaving.cancel()
    await staying
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert permits.in_use("ane") == 1
    permits.release("ane")
    assert permits.in_use("ane") == 0
