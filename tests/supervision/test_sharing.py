"""Calls that share an exchange, over real workers: nobody's answer is another's, whatever happens to the exchange."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from engines.protocol.messages import Pooling
from synapse_host.errors import DeadlineExceeded, EngineCrashed, SynapseError
from synapse_host.placement.spec import LoadSpec
from synapse_host.requests.batching import Batch
from synapse_host.supervision.supervisor import Supervisor
from tests.support import scripted
from tests.support.lanes import on, soon, spawns, until

pytestmark = pytest.mark.process


class Gates:
    """Files that let the worker's n-th exchange go on: until then it keeps the lane, so that others wait."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def hold(self, nth: int) -> dict[str, Any]:
        """A rule that keeps that exchange."""
        return on("EMBED_BATCH", {"wait_for": str(self._root / f"go{nth}")}, nth=nth)

    def open(self, nth: int = 1) -> None:
        (self._root / f"go{nth}").touch()


@pytest.fixture
def gates(tmp_path: Path) -> Gates:
    return Gates(tmp_path)


def rows(*firsts: int, pooling: Pooling = Pooling.MEAN) -> Batch:
    ids = np.array([id for first in firsts for id in (first, 1)], np.int32)
    return Batch([2] * len(firsts), ids, pooling, True)


def check(outcome: Any, *firsts: int) -> None:
    reply, array = outcome
    assert array.reshape(len(firsts), -1).tolist() == [scripted.expected_vector([first, 1]) for first in firsts]
    assert reply.n == len(firsts)


def limited(tokens: int) -> LoadSpec:
    return LoadSpec("none", "sha256:" + "0" * 64, "gguf", {"batch_size": str(tokens)})


async def queued(lane: Supervisor, count: int, gates: Gates | None = None) -> list[asyncio.Task[Any]]:
    """Start a call that holds the lane, and *count* that wait behind it, in order; then let the first go on."""
    tasks = [asyncio.create_task(lane.submit(rows(n), stage="embed")) for n in range(count + 1)]
    await until(lambda: lane.health()["waiting"] == count)
    if gates is not None:
        gates.open()
    return tasks


def exchanges(lane: Supervisor) -> int:
    return sum(lane.counters.shared.counts)


async def answers(tasks: Sequence[asyncio.Task[Any]]) -> list[Any]:
    return await asyncio.gather(*tasks, return_exceptions=True)


async def test_calls_that_wait_leave_together_and_a_free_lane_takes_one_at_once(make, gates):
    lane = make({"rules": [gates.hold(1)]})
    await lane.load()
    for n, outcome in enumerate(await answers(await queued(lane, 20, gates))):
        check(outcome, n)
    assert exchanges(lane) == 2 and lane.counters.requests["embed", "ok"] == 21
    for n in range(3):
        check(await lane.submit(rows(n, n + 1), stage="embed"), n, n + 1)
    assert exchanges(lane) == 5


async def test_those_who_wait_for_the_first_worker_leave_with_it(make):
    lane = make()
    for n, outcome in enumerate(await answers(await queued(lane, 5))):
        check(outcome, n)
    assert exchanges(lane) == 1


@pytest.mark.parametrize("tokens", [1, 2, 6])
async def test_an_exchange_is_filled_up_to_its_useful_size_and_in_order(make, gates, tokens):
    lane, order = make({"rules": [gates.hold(1)]}, load=limited(tokens)), list[int]()
    await lane.load()
    tasks = await queued(lane, 6, gates)
    for n, task in enumerate(tasks):
        task.add_done_callback(lambda _, n=n: order.append(n))
    await answers(tasks)
    assert order == list(range(7)) and exchanges(lane) == 1 + 6 // max(1, tokens // 2)


@pytest.mark.parametrize("who", [1, 3], ids=["the leader", "a rider"])
async def test_one_who_leaves_changes_nothing_for_the_others(make, gates, who):
    lane = make({"rules": [gates.hold(1), gates.hold(2)]})
    await lane.load()
    tasks = await queued(lane, 5, gates)
    await until(lambda: exchanges(lane) == 2)
    tasks[who].cancel()
    await asyncio.sleep(0)
    gates.open(2)
    found = await answers(tasks)
    for n, outcome in enumerate(found):
        if n == who:
            assert isinstance(outcome, asyncio.CancelledError)
        else:
            check(outcome, n)
    assert exchanges(lane) == 2 and lane.counters.abandoned == 1 and lane.health()["strikes"] == 0


async def test_each_keeps_its_own_deadline(make, gates):
    lane = make({"rules": [gates.hold(1), gates.hold(2)]})
    await lane.load()
    first = asyncio.create_task(lane.submit(rows(0), stage="embed"))
    await until(lambda: exchanges(lane) == 1)
    ends = [soon(1.5), soon(0.1), None, soon(60), soon(1.5)]
    tasks = [asyncio.create_task(lane.submit(rows(n), stage="embed", deadline=end)) for n, end in enumerate(ends)]
    await asyncio.wait({tasks[1]})  # in the queue; the first and the last become late in the exchange they share
    gates.open(1)
    await asyncio.wait({tasks[0], tasks[4]})
    gates.open(2)
    found = await answers(tasks)
    assert [isinstance(one, DeadlineExceeded) for one in found] == [True, True, False, False, True]
    check(found[2], 2)
    check(found[3], 3)
    await first
    assert exchanges(lane) == 2 and lane.counters.abandoned == 2


@pytest.mark.parametrize(
    "fault",
    [{"err": {"code": "inference_failed", "msg": "one of you"}}, {"reply": {"nan": 3}}],
    ids=["ERR", "NaN"],
)
async def test_what_may_be_about_one_of_them_is_answered_one_by_one_and_in_order(make, gates, fault):
    first, order = {"rules": [gates.hold(1), on("EMBED_BATCH", fault, nth=[2, 4])]}, list[int]()
    lane = make(first)
    await lane.load()
    tasks = await queued(lane, 4)
    late = asyncio.create_task(lane.submit(rows(5, pooling=Pooling.CLS), stage="embed"))
    for n, task in enumerate([*tasks, late]):
        task.add_done_callback(lambda _, n=n: order.append(n))
    await until(lambda: lane.health()["waiting"] == 5)
    gates.open()
    # The second exchange has four calls, the third is the late one's, the fourth the first of the four by itself.
    found = await answers([*tasks, late])
    assert isinstance(found[1], SynapseError) and found[1].code in ("inference_failed", "nonfinite_output")
    for n in (0, 2, 3, 4, 5):
        check(found[n], n)
    assert "joined" not in found[1].details and lane.health()["strikes"] == 0 and lane.generation == 1
    # Whoever had the turn next had it already; behind it they are served in their old order.
    assert exchanges(lane) == 1 + 1 + 4 + 1 and [n for n in order if n in (1, 2, 3, 4)] == [1, 2, 3, 4]


async def test_a_crash_is_told_to_all_and_they_never_share_again(make, gates, tmp_path):
    script = {"rules": [gates.hold(1), on("EMBED_BATCH", {"signal": "SIGKILL"}, nth=2)]}
    lane = make({"state": str(tmp_path / "spawns"), "generations": [script, {}]})
    await lane.load()
    found = await answers(await queued(lane, 4, gates))
    check(found[0], 0)
    for error in found[1:]:
        assert isinstance(error, EngineCrashed) and error.safe_to_retry
        assert (error.details["joined"], error.details["signal"], error.details["stage"]) == (4, "SIGKILL", "embed")
    assert len({id(error) for error in found[1:]}) == 4
    assert lane.health()["strikes"] == 1 and lane.health()["state"] != "quarantined"
    before = exchanges(lane)
    tasks = [asyncio.create_task(lane.submit(rows(n), stage="embed")) for n in (9, 1, 2, 3, 4, 7, 8)]
    for first, outcome in zip((9, 1, 2, 3, 4, 7, 8), await answers(tasks), strict=True):
        check(outcome, first)
    # 9 leads nobody, since 1 to 4 go by themselves; 7 and 8 go together.
    assert exchanges(lane) == before + 6 and spawns(tmp_path / "spawns") == 2


async def test_no_memory_to_join_them_leaves_nobody_waiting(make, gates):
    class Starved(Batch, frozen=True):
        def joined(self, others: Any) -> Batch:
            raise MemoryError

    lane = make({"rules": [gates.hold(1)]})
    await lane.load()
    first = asyncio.create_task(lane.submit(rows(0), stage="embed"))
    await until(lambda: exchanges(lane) == 1)
    leader = Starved([2], np.array([1, 1], np.int32), Pooling.MEAN, True)
    tasks = [asyncio.create_task(lane.submit(one, stage="embed")) for one in (leader, rows(2), rows(3))]
    await until(lambda: lane.health()["waiting"] == 3)
    gates.open()
    for n, outcome in enumerate(await answers([first, *tasks])):
        check(outcome, n)


async def test_kills_while_exchanges_are_shared_give_nobody_anothers_answer(make):
    lane, rng = make(), random.Random(7)
    ends: list[str] = []
    running = True

    async def caller(number: int) -> None:
        for turn in itertools.count():
            if turn >= 30 and ends.count("crash"):
                return
            firsts = [1000 * number + turn, 7 + turn % 3]
            try:
                check(await lane.submit(rows(*firsts), stage="embed", deadline=soon(60)), *firsts)
                ends.append("ok")
            except EngineCrashed as error:
                ends.append("crash" if "joined" in error.details else "single")

    async def killer() -> None:
        while running:
            served = ends.count("ok") + rng.randrange(1, 30)
            await until(lambda served=served: ends.count("ok") >= served or not running)
            pid = lane.health()["worker_pid"]
            if pid is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    psutil.Process(pid).send_signal(signal.SIGKILL)
            lane.clear()

    killing = asyncio.create_task(killer())
    await asyncio.gather(*(caller(number) for number in range(12)))
    running = False
    await killing
    assert len(ends) >= 12 * 30 and exchanges(lane) < len(ends)
