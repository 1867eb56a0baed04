"""The asyncio shell: single flight, deadlines, cancellation, errors, restart order. Lanes are hand-made; no clock
runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from engines.protocol.errors import ErrorCode
from synapse_host.errors import WORKER_ERRORS, DeadlineExceeded, EngineCrashed, QueueFull, ShapeCompiling, SynapseError
from synapse_host.residency_shell import ResidencyShell
from synapse_host.slots import Key, Limits, Model
from tests.host.residency_world import charged, resident

GTE = Model(22, 300, 128)
EXHAUSTED = WORKER_ERRORS[ErrorCode.ANE_RESOURCES_EXHAUSTED]


class HandLane:
    """A lane whose exchanges end when the test says so."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.gates: dict[Any, asyncio.Event] = {}
        self.errors: dict[Any, list[SynapseError]] = {}
        self.confirms = True

    def hold(self, what: Any) -> asyncio.Event:
        self.gates[what] = asyncio.Event()
        return self.gates[what]

    async def _do(self, what: Any) -> None:
        self.log.append(what)
        if what in self.gates:
            await self.gates[what].wait()
        if self.errors.get(what):
            raise self.errors[what].pop(0)

    async def admit(self, key: Key) -> None:
        await self._do(("admit", key.tokens))

    async def evict(self, key: Key) -> None:
        await self._do(("evict", key.tokens))

    async def stop(self) -> bool:
        await self._do("stop")
        return self.confirms

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
    async with shell.lease(key(tokens, worker), deadline=deadline):
        pass


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
        async with shell.lease(key(128)), shell.lease(key(256)), shell.lease(key(512)), shell.lease(key(1024)):
            with pytest.raises(DeadlineExceeded):
                await use(shell, 2048, deadline=asyncio.get_running_loop().time() + 0.02)

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


def test_an_unconfirmed_exit_keeps_the_lane_shut_and_charged() -> None:
    async def body(shell: ResidencyShell, a: HandLane, b: HandLane) -> None:
        await use(shell, 256)
        a.confirms = False
        shell.fault("a", shell.generation("a"))
        await settle()
        with pytest.raises(EngineCrashed):
            await use(shell, 128)
        assert a.log[-1] == "stop" and charged(shell.core)[0] == 2

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


def test_eight_concurrent_two_rung_requests_complete_within_the_budget() -> None:
    async def body(shell: ResidencyShell, a: HandLane, b: HandLane) -> None:
        async def request(n: int) -> None:
            for tokens in (256 + 256 * (n % 2), 1024 * (1 + n % 3)):  # ascending, one lease at a time
                async with shell.lease(key(tokens, "ab"[n % 2])):
                    slots, executables, _ = charged(shell.core)
                    assert slots <= 8 and executables <= 100
                    await asyncio.sleep(0)

        await asyncio.gather(*(request(n) for n in range(8)))

    run(body)
