"""The asyncio shell: single flight, deadlines, cancellation, errors, restart order. Lanes are hand-made; no clock
runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from engines.protocol.errors import ErrorCode
from synapse_host.errors import WORKER_ERRORS, DeadlineExceeded, EngineCrashed, QueueFull, ShapeCompiling, SynapseError
from synapse_host.residency.shell import ResidencyShell, Withdrawn
from synapse_host.residency.types import Key, Limits, Model
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


def run(body: Callable[[ResidencyShell, HandLane, HandLane], Awaitable[None]], limits: Limits | None = None) -> None:
    async def main() -> None:
        a, b = HandLane(), HandLane()
        shell = ResidencyShell(limits)
        shell.add("a", a, GTE)
        shell.add("b", b, GTE)
        try:
            await body(shell, a, b)
        finally:
            await shell.aclose()

    asyncio.run(asyncio.wait_for(main(), 20))


def key(tokens: int, worker: str = "a") -> Key:
    return Key(worker, "shape", tokens)


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


async def use(shell: ResidencyShell, tokens: int, worker: str = "a", deadline: float | None = None) -> None:
    (await shell.lease(key(tokens, worker), deadline=deadline)).release()


def test_a_lease_starts_the_worker_admits_once_and_finds_it_again() -> None:
    async def body(shell: ResidencyShell, a: HandLane, b: HandLane) -> None:
        await asyncio.gather(*(use(shell, 256) for _ in range(6)))
        await use(shell, 256)
        await use(shell, 128)
        assert a.log == ["start", ("admit", 256)], "128 came with LOAD"

    run(body)


def test_serving_caller_cancellation_leaves_the_admission_and_its_accounting() -> None:
    async def body(shell: ResidencyShell, a: HandLane, b: HandLane) -> None:
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

    run(body)


def test_a_caller_who_left_before_anything_was_sent_is_not_compiled_for() -> None:
    """Its admission waits for the stream; one that somebody else joined meanwhile is sent."""

    async def body(shell: ResidencyShell, a: HandLane, b: HandLane) -> None:
        await use(shell, 128)
        stream = a.hold("stream")
        left, joined = asyncio.ensure_future(use(shell, 256)), asyncio.ensure_future(use(shell, 512))
        await settle()
        with pytest.raises(DeadlineExceeded):
            await use(shell, 1024, deadline=asyncio.get_running_loop().time() + 0.02)
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

    run(body)


def test_a_deadline_that_is_over_asks_for_nothing() -> None:
    async def body(shell: ResidencyShell, a: HandLane, b: HandLane) -> None:
        with pytest.raises(DeadlineExceeded):
            await use(shell, 256, deadline=asyncio.get_running_loop().time())
        await settle()
        assert a.log == []

    run(body)


@pytest.mark.parametrize("what", [("admit", 256), ("evict", 256), "start", "stop"])
def test_a_bug_of_ours_ends_what_waits_for_it(what: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever breaks in the host itself: callers are told, and no place is charged for ever but a process's own."""

    async def body(shell: ResidencyShell, a: HandLane, b: HandLane) -> None:
        a.errors[what] = [ZeroDivisionError()]
        ladder = (128, 256, 512, 1024, 2048)
        for tokens in ladder:
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
            return
        assert not a.errors[what], "it was met"
        await asyncio.wait_for(use(shell, 256), 5)
        assert key(256) in resident(shell.core, "a")

    run(body)
    assert "failed by a fault of the host" in caplog.text


def test_a_guess_takes_only_room_and_nobody_s_time() -> None:
    async def body(shell: ResidencyShell, a: HandLane, b: HandLane) -> None:
        shell.prefetch(key(256))
        await settle()
        assert a.log == [], "no worker is started for it"
        await use(shell, 128)
        gate = a.hold(("admit", 256))
        shell.prefetch(key(256))
        await settle()
        assert not shell.busy("a") and charged(shell.core)[0] == 2
        joined = asyncio.ensure_future(use(shell, 256))
        await settle()
        gate.set()
        await joined
        for tokens in (512, 1024):
            await use(shell, tokens)
        shell.prefetch(key(2048))
        await settle()
        assert ("admit", 2048) not in a.log and not any(entry[0] == "evict" for entry in a.log)

    run(body)


def test_a_guess_that_failed_is_not_repeated() -> None:
    async def body(shell: ResidencyShell, a: HandLane, b: HandLane) -> None:
        await use(shell, 128)
        a.errors[("admit", 256)] = [EXHAUSTED("no memory")]
        for _ in range(3):
            shell.prefetch(key(256))
            await settle()
        assert a.log == ["start", ("admit", 256)], "nothing was evicted for it, nothing restarted"
        await use(shell, 256)
        assert a.log[-1] == ("admit", 256), "who asks for it gets it"

    run(body)


def test_an_unload_stops_new_leases_and_waits_for_the_end() -> None:
    async def body(shell: ResidencyShell, a: HandLane, b: HandLane) -> None:
        await use(shell, 256)
        gate = a.hold("stop")
        parked = asyncio.ensure_future(shell.parked("a"))
        await settle()
        late = asyncio.ensure_future(use(shell, 128))
        await settle()
        assert not late.done() and not parked.done(), "resident, but on its way out"
        gate.set()
        await parked
        await late
        assert a.log == ["start", ("admit", 256), "stop", "start"]

    run(body)


def test_a_compile_in_progress_answers_shape_compiling_and_a_retry_joins_it() -> None:
    async def body(shell: ResidencyShell, a: HandLane, b: HandLane) -> None:
        gate = a.hold(("admit", 512))
        loop = asyncio.get_running_loop()
        with pytest.raises(ShapeCompiling) as late:
            await use(shell, 512, deadline=loop.time() + 0.05)
        assert late.value.details == {"lane_id": "a", "shape": 512}
        assert late.value.transient and late.value.retry_after_ms == 1000
        retry = asyncio.ensure_future(use(shell, 512))
        await settle()
        gate.set()
        await retry
        assert a.log.count(("admit", 512)) == 1

    run(body)


def test_other_waits_answer_deadline_exceeded() -> None:
    async def body(shell: ResidencyShell, a: HandLane, b: HandLane) -> None:
        held = [await shell.lease(key(tokens)) for tokens in (128, 256, 512, 1024)]
        with pytest.raises(DeadlineExceeded):
            await use(shell, 2048, deadline=asyncio.get_running_loop().time() + 0.02)
        for lease in held:
            lease.release()

    run(body)


def test_typed_resource_error_has_the_public_retry_delay_and_evicts_once() -> None:
    async def body(shell: ResidencyShell, a: HandLane, b: HandLane) -> None:
        a.errors[("admit", 512)] = [EXHAUSTED("no memory"), EXHAUSTED("no memory")]
        await use(shell, 256)
        with pytest.raises(SynapseError) as refused:
            await use(shell, 512)
        assert refused.value.code == "ane_resources_exhausted"
        assert refused.value.transient and refused.value.retry_after_ms == 250 and refused.value.safe_to_retry
        await settle()
        evictions = [entry for entry in a.log + b.log if isinstance(entry, tuple) and entry[0] == "evict"]
        assert len(evictions) == 1 and a.log.count(("admit", 512)) == 2 and a.log[-1] == "stop"

    run(body)


def test_while_the_host_stops_who_waits_and_who_comes_is_told_so() -> None:
    async def body(shell: ResidencyShell, a: HandLane, b: HandLane) -> None:
        a.hold(("admit", 256))
        waiting = asyncio.ensure_future(use(shell, 256))
        await settle()
        closing = asyncio.ensure_future(shell.aclose())
        for late in (waiting, asyncio.ensure_future(use(shell, 128))):
            with pytest.raises(QueueFull, match="lane a: the host is stopping") as caught:
                await late
            assert caught.value.details["reason"] == "stopping"
        await closing

    run(body)
