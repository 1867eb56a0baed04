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


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "synapse-background"]


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
        assert len(running()) == 2
        go.set()
        return await asyncio.gather(*waiting)

    assert asyncio.run(body()) == list(range(20))
    assert len(seen) <= 2
    for thread in running():  # also one that found nothing left to do
        thread.join(60)


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_neither_a_loop_nor_an_interpreter_waits_for_it_and_a_forked_child_starts_its_own() -> None:
    code = (
        "import asyncio, os, time\nfrom synapse_host.text.background import LIMIT, beside\n"
        "async def body(): [beside(lambda: time.sleep(600)) for _ in range(LIMIT)]\n"
        "asyncio.run(body())\n"
        "async def work(): return await beside(lambda: 3)\n"
        "os._exit(asyncio.run(work())) if (pid := os.fork()) == 0 else None\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 3


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
        first = beside(lambda: go.wait(60))
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            second = beside(lambda: 2)
        go.set()
        assert [await first, await second] == [True, 2] and not ran
        many = 2 * background.LIMIT
        assert await asyncio.gather(*(beside(lambda: 3) for _ in range(many))) == [3] * many

    asyncio.run(asyncio.wait_for(body(), 60))
