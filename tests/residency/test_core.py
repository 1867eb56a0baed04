"""The decisions of the pure core that a random history can't single out, event by event; world.py checks the rest.

Each row of background/protocol-host.md 6 about the Neural Engine is here, in tests/residency/test_lane.py over real
processes, or an invariant of the random world.
"""

from __future__ import annotations

from typing import TypeVar

import pytest

from synapse_host.residency.core import ADMISSION_WAIT_S, DRAIN_S, Residency
from synapse_host.residency.types import Admit, Evict, Granted, Key, Limits, Model, Refusal, Refused, Restart, Revive
from tests.residency.world import charged, resident

GTE, QWEN = Model(22, 300, 128), Model(28, 1200, 128)
T = TypeVar("T", Admit, Evict)


def key(tokens: int, worker: str = "a") -> Key:
    return Key(worker, "shape", tokens)


def ask(core: Residency, worker: str, model: Model = GTE) -> int:
    """Open a worker and request its smallest rung."""
    core.open_worker(worker, model)
    return core.request(key(model.smallest, worker), 0)


def fleet(*workers: str, limits: Limits | None = None) -> Residency:
    """Return workers at generation 1, each with its smallest rung resident, none leased."""
    core = Residency(limits)
    for worker in workers or ("a",):
        ticket = ask(core, worker)
        assert core.take() == [Revive(worker)]
        core.restored(worker)
        assert core.take() == [Granted(ticket)]
        core.release(ticket)
    return core


def only(core: Residency, kind: type[T]) -> T:
    """Return the one thing to do now, of this kind."""
    (action,) = core.take()
    assert isinstance(action, kind)
    return action


def admit(core: Residency, wanted: Key) -> int:
    """Request *wanted*, answer its admission, return the ticket that holds the lease."""
    ticket = core.request(wanted, 0)
    for action in core.take():
        if isinstance(action, Admit):
            core.admitted(action.slot)
    core.take()
    assert core.tickets[ticket].slot is not None
    return ticket


def full(core: Residency) -> dict[int, int]:
    """Lease the first rungs of a model, as many as it may have; return the tickets."""
    return {tokens: admit(core, key(tokens)) for tokens in (128, 256, 512, 1024)}


def exhausted(core: Residency, wanted: Key) -> tuple[int, Admit]:
    """Request *wanted* and let the worker say that it is out of resources."""
    ticket = core.request(wanted, 0)
    admission = only(core, Admit)
    core.admit_failed(admission.slot, 0, exhausted=True)
    return ticket, admission


# --- budget and order ------------------------------------------------------------------------------------------------


def test_what_load_brings_and_what_compiles_is_charged_before_it_is_sent() -> None:
    core = Residency()
    ask(core, "a")
    assert charged(core) == (1, 22, 300) and core.take() == [Revive("a")]
    core.restored("a")
    for tokens in (256, 512, 1024):
        core.request(key(tokens), 0)
    assert charged(core) == (4, 88, 1200)
    core.take()
    ask(core, "b", QWEN)
    assert core.take() == [], "28 more would be 116: it waits, the hardware fails at about 115"


@pytest.mark.parametrize("limits", [Limits(executables=21), Limits(nbytes=299)])
def test_a_shape_larger_than_the_whole_budget_is_refused_at_once(limits: Limits) -> None:
    core = Residency(limits)
    ticket = ask(core, "a")
    assert core.take() == [Refused(ticket, Refusal.NEVER_FITS, key(128))]


def test_waiters_are_served_fifo_as_leases_end_and_only_the_lru_unleased_shape_is_evicted() -> None:
    core = fleet()
    held = full(core)
    first, second = core.request(key(2048), 0), core.request(key(4096), 0)
    assert core.take() == []
    core.release(held[1024])
    core.release(held[512])
    victim = only(core, Evict)
    assert victim.key == key(1024), "released first, so least recently used"
    assert charged(core)[1] == 88
    core.evicted(victim.slot)
    admission, following = core.take()
    assert isinstance(admission, Admit) and admission.key == key(2048)
    assert isinstance(following, Evict) and following.key == key(512)
    core.admitted(admission.slot)
    assert core.take() == [Granted(first)]
    core.evicted(following.slot)
    assert only(core, Admit).key == key(4096) and second in core.tickets


def test_the_smallest_rung_goes_last_and_a_model_at_its_own_cap_makes_room_itself() -> None:
    core = fleet("b", "a", limits=Limits(executables=1000))  # b is least recently used, but would not help
    for tokens in (128, 256):
        core.release(admit(core, key(tokens)))
    for tokens in (512, 1024):
        admit(core, key(tokens))
    for wanted, gone in ((2048, 256), (4096, 128)):
        core.request(key(wanted), 0)
        victim = only(core, Evict)
        assert victim.key == key(gone)
        core.evicted(victim.slot)
        core.admitted(only(core, Admit).slot)
        core.take()


def test_admission_wait_deadline_is_transient_and_cleans_queue() -> None:
    core = fleet()
    held = full(core)
    ticket = core.request(key(2048), 10)
    assert core.next_expiry() == 10 + ADMISSION_WAIT_S
    core.expire(10 + ADMISSION_WAIT_S - 0.1)
    assert core.take() == []
    core.expire(10 + ADMISSION_WAIT_S)
    assert core.take() == [Refused(ticket, Refusal.EXHAUSTED, key(2048))]
    core.release(held[128])
    assert core.take() == [] and core.next_expiry() is None, "nobody waits, so nothing is evicted"


def test_a_resident_shape_bypasses_the_queue_unless_the_head_waits_for_a_lease() -> None:
    core = fleet()
    held = full(core)
    core.request(key(2048), 0)  # waits for somebody's lease
    behind = core.request(key(128), 0)
    assert core.take() == [], "short leases that follow each other could starve the head for ever"
    core.release(held[1024])
    victim, granted = core.take()
    assert isinstance(victim, Evict) and granted == Granted(behind), "the head has its victim now"


# --- exhaustion ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("then", ["admitted", "exhausted", "the eviction fails"])
def test_resource_exhaustion_evicts_cross_worker_lru_and_retries_once(then: str) -> None:
    core = fleet("b", "a")
    lease = admit(core, key(128))
    ticket, first = exhausted(core, key(512))
    victim = only(core, Evict)
    assert victim.key == key(128, "b")
    if then == "the eviction fails":
        core.evict_failed(victim.slot, 0)
        assert core.take() == [Refused(ticket, Refusal.EXHAUSTED, key(512)), Restart("b")]
        return
    core.evicted(victim.slot)
    assert only(core, Admit).slot == first.slot
    if then == "admitted":
        core.admitted(first.slot)
        assert core.take() == [Granted(ticket)]
        return
    core.admit_failed(first.slot, 0, exhausted=True)
    assert core.take() == [Refused(ticket, Refusal.EXHAUSTED, key(512))], "leases drain before the restart"
    assert charged(core)[0] == 2, "charged until the exit is confirmed"
    core.release(lease)
    assert core.take() == [Restart("a")]


# --- recovery --------------------------------------------------------------------------------------------------------


def test_a_fault_restarts_once_and_the_replacement_starts_when_the_exit_is_confirmed_and_somebody_waits() -> None:
    core = fleet()
    core.release(admit(core, key(256)))
    for now in (0, 0, 5):
        core.fault("a", 1, now)
    assert core.take() == [Restart("a")] and charged(core)[0] == 2, "nothing is refunded before the exit"
    waiting = core.request(key(128), 0)
    core.expire(1.0)
    assert core.take() == []
    core.exited("a")
    assert core.take() == [Revive("a")] and charged(core) == (1, 22, 300), "what its LOAD brings back"
    core.restored("a")
    assert core.take() == [Granted(waiting)] and resident(core, "a") == {key(128)}
    core.release(waiting)
    core.fault("a", 1, 9)
    assert core.take() == [], "of an earlier generation"


def test_err_ack_restarts_the_worker_when_the_last_exchange_ended_and_resumes_waiters() -> None:
    core = fleet()
    asked = core.request(key(512), 0)
    admission = only(core, Admit)
    waiting = core.request(key(1024), 0)
    other = only(core, Admit)
    core.admit_failed(admission.slot, 0, exhausted=False)
    assert core.take() == [Refused(asked, Refusal.FAILED, key(512))], "another exchange is still on the wire"
    core.admitted(other.slot)
    assert core.take() == [Restart("a")], "no lease is granted on a worker that recovers"
    core.exited("a")
    core.take()
    core.restored("a")
    again = only(core, Admit)
    core.admitted(again.slot)
    assert core.take() == [Granted(waiting)] and resident(core, "a") == {key(128), key(1024)}


def test_exit_confirmation_timeout_retains_reservations_and_never_spawns_replacement() -> None:
    core = fleet(limits=Limits(executables=44))
    waiting = core.request(key(256), 0)
    core.take()
    core.fault("a", 1, 0)
    core.take()
    core.unconfirmed("a")
    assert core.take() == [Refused(waiting, Refusal.CLOSED, key(256))] and charged(core)[1] == 44
    late = core.request(key(128), 1)
    assert core.take() == [Refused(late, Refusal.CLOSED, key(128))]
    ask(core, "b")
    assert core.take() == [], "the process may be alive"


def test_drain_timeout_forces_confirmed_exit_and_reopens_worker() -> None:
    core = fleet()
    lease = admit(core, key(128))
    core.fault("a", 1, 100)
    assert core.take() == [] and core.next_expiry() == 100 + DRAIN_S
    core.expire(100 + DRAIN_S)
    assert core.take() == [Restart("a")]
    ticket = core.request(key(128), 0)
    core.exited("a")
    core.take()
    core.release(lease)
    core.restored("a")
    assert core.take() == [Granted(ticket)]


def test_a_worker_that_does_not_come_up_refuses_its_waiters_and_the_next_request_tries_again() -> None:
    core = Residency()
    waiting = ask(core, "a")
    core.take()
    core.revive_failed("a")
    assert core.take() == [Refused(waiting, Refusal.FAILED, key(128))] and charged(core) == (0, 0, 0)
    core.request(key(256), 0)
    assert core.take() == [Revive("a")]


def test_a_replacement_goes_before_tickets_that_wait_for_room() -> None:
    core = fleet("a", "b", limits=Limits(executables=44))
    core.fault("a", 1, 0)
    core.request(key(128), 0)
    waiting = core.request(key(256, "b"), 0)
    core.take()
    core.exited("a")
    assert core.take() == [Revive("a")] and waiting in core.tickets


def test_a_parked_worker_goes_when_its_last_exchange_ended_and_stays_down_until_its_next_request() -> None:
    core = fleet()
    ticket = core.request(key(256), 0)
    admission = only(core, Admit)
    core.park("a", 0)
    core.release(ticket)
    assert core.take() == [], "its admission is still on the wire"
    core.admitted(admission.slot)
    assert core.take() == [Restart("a")]
    core.exited("a")
    core.park("a", 0)
    core.expire(1e9)
    assert core.take() == [] and charged(core) == (0, 0, 0) and not core.busy("a")
    core.request(key(128), 0)
    assert core.take() == [Revive("a")] and core.busy("a")


def test_a_lease_is_given_back_once() -> None:
    core = fleet()
    lease, other = admit(core, key(128)), admit(core, key(128))
    core.release(lease)
    core.release(lease)
    assert core.busy("a"), "the second lease still holds"
    core.release(other)
    assert not core.busy("a")
