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


def test_where_the_system_gives_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is refused where none runs, else one that runs takes it; LIMIT refusals later all is as it was."""
    go, ran = threading.Event(), []

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def body() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            for _ in range(background.LIMIT):
                with pytest.raises(QueueFull, match="no further thread") as refused:
                    beside(lambda: ran.append(1))
                assert refused.value.details == {"reason": "threads"}
            assert not background.busy()
        first = beside(lambda: go.wait(60))
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            second = beside(lambda: 2)
        go.set()
        assert [await first, await second] == [True, 2] and not ran
        many = 2 * background.LIMIT
        assert await asyncio.gather(*(beside(lambda: 3) for _ in range(many))) == [3] * many

    asyncio.run(asyncio.wait_for(body(), 60))
