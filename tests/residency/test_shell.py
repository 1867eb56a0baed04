"""The asyncio shell: single flight, deadlines, cancellation, errors, restart order; its lanes are hand-made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engines.protocol.errors import ErrorCode
from synapse_host.errors import WORKER_ERRORS, DeadlineExceeded, EngineCrashed, QueueFull, SynapseError
from synapse_host.residency.shell import ResidencyShell, Withdrawn
from synapse_host.residency.types import Key, Model
from tests.residency.world import charged, resident

GTE = Model(22, 300, 128)
EXHAUSTED = WORKER_ERRORS[ErrorCode.ANE_RESOURCES_EXHAUSTED]


class HandLane:
    """A lane whose exchanges end when the test says so."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.gates: dict[Any, asyncio.Event] = {}
        self.errors: dict[Any, list[Exception]] = {}

    def hold(self, what: Any) -> asyncio.Event:
        self.gates[what] = asyncio.Event()
        return self.gates[what]

    async def _do(self, what: Any) -> None:
        self.log.append(what)
        if what in self.gates:
            await self.gates[what].wait()
        if self.errors.get(what):
            raise self.errors[what].pop(0)

    async def admit(self, key: Key, wanted: Callable[[], bool]) -> None:
        if "stream" in self.gates:
            await self.gates["stream"].wait()
        if not wanted():
            raise Withdrawn("nobody waits")
        await self._do(("admit", key.tokens))

    async def evict(self, key: Key) -> None:
        await self._do(("evict", key.tokens))

    async def stop(self) -> bool:
        await self._do("stop")
        return True

    async def start(self) -> None:
        await self._do("start")


@asynccontextmanager
async def fleet() -> AsyncIterator[tuple[ResidencyShell, HandLane, HandLane]]:
    """A shell with lanes ``a`` and ``b``, closed afterwards; twenty seconds for all of it."""
    a, b, shell = HandLane(), HandLane(), ResidencyShell()
    shell.add("a", a, GTE)
    shell.add("b", b, GTE)
    try:
        async with asyncio.timeout(20):
            yield shell, a, b
    finally:
        await shell.aclose()


def key(tokens: int, worker: str = "a") -> Key:
    return Key(worker, "shape", tokens)


def soon(seconds: float = 0.02) -> float:
    return asyncio.get_running_loop().time() + seconds


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


async def use(shell: ResidencyShell, tokens: int, deadline: float | None = None) -> None:
    (await shell.lease(key(tokens), deadline=deadline)).release()


async def test_a_lease_starts_the_worker_admits_once_and_finds_it_again() -> None:
    async with fleet() as (shell, a, _):
        await asyncio.gather(*(use(shell, 256) for _ in range(6)))
        await use(shell, 256)
        await use(shell, 128)
        assert a.log == ["start", ("admit", 256)], "128 came with LOAD"


async def test_serving_caller_cancellation_leaves_the_admission_and_its_accounting() -> None:
    async with fleet() as (shell, a, _):
        gate = a.hold(("admit", 256))
        caller = asyncio.ensure_future(use(shell, 256))
        await settle()
        caller.cancel()
        await settle()
        assert charged(shell.core)[0] == 2
        gate.set()
        await settle()
        assert key(256) in resident(shell.core, "a")
        await use(shell, 256)
        assert a.log.count(("admit", 256)) == 1


async def test_a_caller_who_left_before_anything_was_sent_is_not_compiled_for() -> None:
    """Its admission waits for the stream; one that somebody else joined meanwhile is sent."""
    async with fleet() as (shell, a, _):
        await use(shell, 128)
        stream = a.hold("stream")
        left, joined = asyncio.ensure_future(use(shell, 256)), asyncio.ensure_future(use(shell, 512))
        await settle()
        with pytest.raises(DeadlineExceeded):
            await use(shell, 1024, deadline=soon())
        other = asyncio.ensure_future(use(shell, 512))
        left.cancel()
        joined.cancel()
        await settle()
        stream.set()
        await other
        await settle()
        assert a.log == ["start", ("admit", 512)] and charged(shell.core)[0] == 2
        await use(shell, 256)
        assert a.log == ["start", ("admit", 512), ("admit", 256)]


async def test_waits_that_are_no_compilation_answer_deadline_exceeded() -> None:
    async with fleet() as (shell, a, _):
        with pytest.raises(DeadlineExceeded):
            await use(shell, 256, deadline=soon(0))
        await settle()
        assert a.log == [], "over before it began"
        held = [await shell.lease(key(tokens)) for tokens in (128, 256, 512, 1024)]
        with pytest.raises(DeadlineExceeded):
            await use(shell, 2048, deadline=soon())
        for lease in held:
            lease.release()


@pytest.mark.parametrize("what", [("admit", 256), ("evict", 256), "start", "stop"])
async def test_a_bug_of_ours_ends_what_waits_for_it(what: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever breaks in the host itself: callers get an error, and only a process keeps a place charged for ever."""
    async with fleet() as (shell, a, _):
        a.errors[what] = [ZeroDivisionError()]
        for tokens in (128, 256, 512, 1024, 2048):
            try:
                await asyncio.wait_for(use(shell, tokens), 5)
            except EngineCrashed as exc:
                assert "the host itself failed" in exc.message
            await settle()
        if what == "stop":
            shell.park("a")
            await settle()
            with pytest.raises(EngineCrashed, match="shut"):
                await use(shell, 128)
            assert charged(shell.core)[0] == 4, "a process that may live may hold them all"
        else:
            assert not a.errors[what], "it was met"
            await asyncio.wait_for(use(shell, 256), 5)
            assert key(256) in resident(shell.core, "a")
    assert "failed by a fault of the host" in caplog.text


async def test_a_guess_takes_only_room_and_nobody_s_time_and_a_failed_one_is_not_repeated() -> None:
    async with fleet() as (shell, a, _):
        shell.prefetch(key(256))
        await settle()
        assert a.log == [], "no worker is started for it"
        await use(shell, 128)
        a.errors[("admit", 512)] = [EXHAUSTED("no memory")]
        for _ in range(3):
            shell.prefetch(key(512))
            await settle()
        assert a.log == ["start", ("admit", 512)], "nothing was evicted for it, nothing restarted"
        gate = a.hold(("admit", 256))
        shell.prefetch(key(256))
        await settle()
        assert not shell.core.busy("a") and charged(shell.core)[0] == 2
        joined = asyncio.ensure_future(use(shell, 256))
        await settle()
        gate.set()
        await joined
        for tokens in (512, 1024):
            await use(shell, tokens)
        shell.prefetch(key(2048))
        await settle()
        assert ("admit", 2048) not in a.log and not any(entry[0] == "evict" for entry in a.log)


async def test_typed_resource_error_has_the_public_retry_delay_and_evicts_once() -> None:
    async with fleet() as (shell, a, b):
        a.errors[("admit", 512)] = [EXHAUSTED("no memory"), EXHAUSTED("no memory")]
        await use(shell, 256)
        with pytest.raises(SynapseError) as refused:
            await use(shell, 512)
        assert refused.value.code == "ane_resources_exhausted"
        assert refused.value.transient and refused.value.retry_after_ms == 250 and refused.value.safe_to_retry
        await settle()
        evictions = [entry for entry in a.log + b.log if isinstance(entry, tuple) and entry[0] == "evict"]
        assert len(evictions) == 1 and a.log.count(("admit", 512)) == 2 and a.log[-1] == "stop"


async def test_while_the_host_stops_who_waits_and_who_comes_is_told_so() -> None:
    async with fleet() as (shell, a, _):
        a.hold(("admit", 256))
        waiting = asyncio.ensure_future(use(shell, 256))
        await settle()
        closing = asyncio.ensure_future(shell.aclose())
        for late in (waiting, asyncio.ensure_future(use(shell, 128))):
            with pytest.raises(QueueFull, match="lane a: the host is stopping") as caught:
                await late
            assert caught.value.details["reason"] == "stopping"
        await closing
