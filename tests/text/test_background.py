from __future__ import annotations

import asyncio
import contextvars
import os
import subprocess
import sys
import threading

import pytest

from synapse_host.errors import QueueFull
from synapse_host.text import background
from synapse_host.text.background import beside


def test_a_result_and_a_failure_come_back() -> None:
    value: contextvars.ContextVar[int] = contextvars.ContextVar("value")

    async def body() -> None:
        value.set(7)
        assert await beside(value.get) == 7
        assert await beside(threading.current_thread) is not threading.current_thread()
        with pytest.raises(ZeroDivisionError):
            await beside(lambda: 1 // 0)

    asyncio.run(body())


def test_no_more_threads_than_the_limit_and_none_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "LIMIT", 2)
    seen: set[threading.Thread] = set()
    go = threading.Event()

    def work(number: int) -> int:
        seen.add(threading.current_thread())
        go.wait(60)
        return number

    async def body() -> list[int]:
        waiting = [beside(lambda number=number: work(number)) for number in range(20)]  # type: ignore[misc]
        assert background.busy()
        go.set()
        return await asyncio.gather(*waiting)

    assert asyncio.run(body()) == list(range(20))
    assert len(seen) <= 2
    for thread in seen:
        thread.join(60)
    assert not background.busy()


def test_a_machine_without_threads_refuses_and_hangs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    real = threading.Thread.start

    def none_left(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def body() -> None:
        monkeypatch.setattr(threading.Thread, "start", none_left)
        ran: list[int] = []
        with pytest.raises(QueueFull, match="no further thread"):
            beside(lambda: ran.append(1))
        monkeypatch.setattr(threading.Thread, "start", real)
        first = beside(lambda: go.wait(60))
        monkeypatch.setattr(threading.Thread, "start", none_left)
        second = beside(lambda: 2)  # the thread that runs takes it
        go.set()
        assert [await first, await second] == [True, 2] and not ran
        monkeypatch.setattr(threading.Thread, "start", real)
        assert (
            await asyncio.gather(*(beside(lambda: 3) for _ in range(2 * background.LIMIT)))
            == [3] * 2 * background.LIMIT
        )

    asyncio.run(asyncio.wait_for(body(), 30))


def test_a_loop_does_not_wait_for_it_at_its_end() -> None:
    go, ended = threading.Event(), threading.Event()

    def work() -> None:
        go.wait(60)
        ended.set()

    async def body() -> None:
        beside(work)

    asyncio.run(body())
    assert not ended.is_set()
    go.set()
    assert ended.wait(60)


@pytest.mark.process
def test_an_interpreter_does_not_wait_for_it_at_its_exit() -> None:
    code = (
        "import asyncio, time\nfrom synapse_host.text.background import beside\n"
        "async def body(): beside(lambda: time.sleep(600))\n"
        "asyncio.run(body())\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_starts_its_own() -> None:
    go = threading.Event()

    async def body() -> None:
        beside(lambda: go.wait(60))

    asyncio.run(body())
    if (pid := os.fork()) == 0:
        os._exit(3 if background.busy() else 0)
    go.set()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_thread_that_cannot_be_started_is_told_and_harms_no_later_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system gives no thread: with LIMIT refusals behind it, work still runs once there is one again."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def body() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            for _ in range(background.LIMIT):
                with pytest.raises(QueueFull) as refused:
                    beside(lambda: 1)
                assert refused.value.details == {"reason": "threads"}
            assert not background.busy()
        assert await asyncio.wait_for(beside(lambda: 2), 60) == 2

    asyncio.run(body())


def test_work_that_got_no_thread_waits_for_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    start, starts = threading.Thread.start, 0

    def once(self: threading.Thread) -> None:
        nonlocal starts
        starts += 1
        if starts > 1:
            raise RuntimeError("can't start new thread")
        start(self)

    async def body() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", once)
            first, second = beside(lambda: go.wait(60)), beside(lambda: 2)
        go.set()
        assert await asyncio.wait_for(asyncio.gather(first, second), 60) == [True, 2]

    asyncio.run(body())
