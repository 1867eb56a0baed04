"""The direct-ANE list of background/protocol-host.md 6, event by event, on the pure core; and a few more."""

from __future__ import annotations

from typing import TypeVar

from synapse_host.residency.core import ADMISSION_WAIT_S, DRAIN_S, Residency
from synapse_host.residency.types import (
    Admit,
    Evict,
    Granted,
    Key,
    Limits,
    Model,
    Refusal,
    Refused,
    Restart,
    Revive,
    State,
)
from tests.residency.world import charged, resident

GTE, QWEN = Model(22, 300, 128), Model(28, 1200, 128)


def ask(core: Residency, worker: str, model: Model = GTE) -> int:
    """Open a worker and request its smallest rung."""
    core.open_worker(worker, model)
    return core.request(key(model.smallest, worker), 0)


def up(core: Residency, worker: str, model: Model = GTE) -> None:
    """Open a worker and bring it up at generation 1 with its smallest rung resident."""
    ticket = ask(core, worker, model)
    assert core.take() == [Revive(worker, 0)]
    core.restored(worker, 1)
    assert core.take() == [Granted(ticket)]
    core.release(ticket)
    assert core.take() == []


def fleet(limits: Limits | None = None) -> Residency:
    core = Residency(limits)
    up(core, "a")
    return core


def key(tokens: int, worker: str = "a") -> Key:
    return Key(worker, "shape", tokens)


def admit(core: Residency, wanted: Key, now: float = 0.0) -> int:
    """Request *wanted*, answer its admission, return the ticket that holds the lease."""
    ticket = core.request(wanted, now)
    for action in core.take():
        if isinstance(action, Admit):
            core.admitted(action.slot, action.generation)
    assert Granted(ticket) in core.take() or core.tickets[ticket].slot is not None
    return ticket


T = TypeVar("T", Admit, Evict)


def only(core: Residency, kind: type[T]) -> T:
    """Return the one thing to do now, of this kind."""
    (action,) = core.take()
    assert isinstance(action, kind)
    return action


def full(core: Residency) -> dict[int, int]:
    """Lease the first rungs of a model, as many as it may have; return the tickets."""
    return {tokens: admit(core, key(tokens)) for tokens in (128, 256, 512, 1024)}


def evicting(core: Residency) -> Evict:
    """Ask for one rung more than a model may have, while none of its rungs is leased."""
    for ticket in full(core).values():
        core.release(ticket)
    core.take()
    core.request(key(2048), 0)
    return only(core, Evict)


def die(core: Residency) -> int:
    """Let the worker of the first generation fail and end while somebody waits for it: its replacement may start."""
    core.fault("a", 1, 0)
    core.take()
    ticket = core.request(key(128), 0)
    core.exited("a", 1)
    assert core.take() == [Revive("a", 1)]
    return ticket


# --- budget ----------------------------------------------------------------------------------------------------------


def test_pinned_layer_counts_charge_gte_and_qwen_before_admission() -> None:
    core = fleet()
    up(core, "b", QWEN)
    assert charged(core)[:2] == (2, 22 + 28), "what LOAD makes resident is charged before the worker starts"
    core.request(key(256), 0)
    only(core, Admit)
    assert charged(core)[:2] == (3, 22 + 28 + 22), "charged before ADMITTED"


def test_executable_budget_refuses_before_hardware_limit() -> None:
    core = fleet()
    leases = full(core)
    assert charged(core)[1] == 88
    up_b = Model(28, 0, 128)
    ask(core, "b", up_b)
    assert core.take() == [], "28 more would be 116: it waits, the hardware fails at about 115"
    core.release(leases[1024])
    only(core, Evict)


def test_a_shape_larger_than_the_whole_budget_is_refused_at_once() -> None:
    core = Residency(Limits(executables=20))
    ticket = ask(core, "a", Model(21, 1, 128))
    assert core.take() == [Refused(ticket, Refusal.NEVER_FITS)]


def test_byte_budget_counts_weights_times_functions() -> None:
    core = fleet(Limits(nbytes=700))
    admit(core, key(128))
    admit(core, key(256))
    core.request(key(512), 0)
    assert core.take() == [], "900 bytes do not fit and both are leased"
    assert charged(core)[2] == 600


def test_pending_compiles_reserve_full_executable_budget() -> None:
    core = fleet()
    for tokens in (256, 512, 1024):
        core.request(key(tokens), 0)
    assert len(core.take()) == 3 and charged(core)[1] == 88, "nothing was admitted yet"
    ask(core, "b")
    # 110 executables would not fit: the idle smallest rung of `a` has to go first.
    only(core, Evict)


def test_executable_budget_waits_then_succeeds_when_lease_releases() -> None:
    core = fleet()
    held = full(core)
    ticket = core.request(key(2048), 0)
    assert core.take() == []
    core.release(held[512])
    victim = only(core, Evict)
    assert victim.key == key(512)
    core.evicted(victim.slot, victim.generation)
    admission = only(core, Admit)
    assert admission.key == key(2048)
    core.admitted(admission.slot, admission.generation)
    assert core.take() == [Granted(ticket)]


def test_eviction_refunds_executables_only_after_completed_ack() -> None:
    core = fleet()
    victim = evicting(core)
    assert charged(core)[1] == 88
    core.evicted(victim.slot, victim.generation + 1)
    assert charged(core)[1] == 88, "an answer of another generation refunds nothing"
    core.evicted(victim.slot, victim.generation)
    only(core, Admit)
    assert charged(core)[1] == 88


def test_admission_wait_deadline_is_transient_and_cleans_queue() -> None:
    core = fleet()
    held = full(core)
    ticket = core.request(key(2048), 10)
    assert core.next_expiry() == 10 + ADMISSION_WAIT_S
    core.expire(10 + ADMISSION_WAIT_S - 0.1)
    assert core.take() == []
    core.expire(10 + ADMISSION_WAIT_S)
    assert core.take() == [Refused(ticket, Refusal.EXHAUSTED)]
    core.release(held[128])
    assert core.take() == [] and core.next_expiry() is None, "nobody waits, so nothing is evicted"


# --- order -----------------------------------------------------------------------------------------------------------


def test_waiters_are_served_fifo_and_only_the_lru_unleased_shape_is_evicted() -> None:
    core = fleet()
    held = full(core)
    first, second = core.request(key(2048), 0), core.request(key(4096), 0)
    core.take()
    core.release(held[1024])
    core.release(held[512])
    victim = only(core, Evict)
    assert victim.key == key(1024), "released first, so least recently used"
    core.evicted(victim.slot, 1)
    admission, following = core.take()
    assert isinstance(admission, Admit) and admission.key == key(2048)
    assert isinstance(following, Evict) and following.key == key(512)
    core.admitted(admission.slot, 1)
    assert core.take() == [Granted(first)]
    core.evicted(following.slot, 1)
    last = only(core, Admit)
    assert last.key == key(4096) and second in core.tickets


def test_the_smallest_rung_goes_last() -> None:
    core = fleet()
    core.release(admit(core, key(128)))
    core.release(admit(core, key(256)))
    held = [admit(core, key(512)), admit(core, key(1024))]
    core.take()
    # 128 was used before 256, but it is the model's smallest rung.
    core.request(key(2048), 0)
    victim = only(core, Evict)
    assert victim.key == key(256)
    core.evicted(victim.slot, 1)
    core.admitted(core.take()[0].slot, 1)  # type: ignore[union-attr]
    core.take()
    core.request(key(4096), 0)
    victim = only(core, Evict)
    assert victim.key == key(128), "nothing else is free"
    assert len(held) == 2


def test_at_its_own_cap_a_model_makes_room_itself() -> None:
    core = Residency(Limits(executables=1000))
    up(core, "b", QWEN)  # idle and least recently used, but it would not help
    up(core, "a")
    victim = evicting(core)
    assert victim.key.worker == "a"


def test_requests_for_one_shape_share_one_admission() -> None:
    core = fleet()
    tickets = [core.request(key(256), 0) for _ in range(5)]
    admission = only(core, Admit)
    core.admitted(admission.slot, 1)
    assert core.take() == [Granted(ticket) for ticket in tickets]


def test_a_resident_shape_bypasses_the_queue_unless_the_head_waits_for_a_lease() -> None:
    core = fleet()
    held = full(core)
    core.request(key(2048), 0)  # waits for somebody's lease
    behind = core.request(key(128), 0)
    assert core.take() == [], "short leases that follow each other could starve the head for ever"
    core.release(held[1024])
    victim, granted = core.take()
    assert isinstance(victim, Evict) and granted == Granted(behind), "the head has its victim now"


def test_identical_models_in_distinct_workers_each_admit_their_own_shape() -> None:
    core = fleet()
    up(core, "b")
    core.request(key(256), 0)
    core.request(key(256, "b"), 0)
    assert [action.key.worker for action in core.take() if isinstance(action, Admit)] == ["a", "b"]


# --- exhaustion ------------------------------------------------------------------------------------------------------


def exhausted(core: Residency, wanted: Key) -> tuple[int, Admit]:
    ticket = core.request(wanted, 0)
    admission = only(core, Admit)
    core.admit_failed(admission.slot, admission.generation, 0, exhausted=True)
    return ticket, admission


def test_resource_exhaustion_evicts_cross_worker_lru_and_retries_once_without_restart() -> None:
    core = fleet()
    up(core, "b")
    core.release(admit(core, key(256, "b")))
    admit(core, key(128))
    core.take()
    ticket, first = exhausted(core, key(512))
    victim = only(core, Evict)
    assert victim.key == key(256, "b")
    core.evicted(victim.slot, 1)
    retry = only(core, Admit)
    assert retry.slot == first.slot
    core.admitted(retry.slot, 1)
    assert core.take() == [Granted(ticket)]


def test_resource_exhaustion_never_evicts_a_leased_shape() -> None:
    core = fleet()
    admit(core, key(128))
    ticket, _ = exhausted(core, key(512))
    assert core.take() == [Refused(ticket, Refusal.EXHAUSTED, _.slot)]
    assert charged(core)[0] == 1, "the worker said no: nothing is resident, the reservation is gone"


def test_persistent_exhaustion_after_eviction_restarts_and_refuses_transiently() -> None:
    core = fleet()
    core.take()
    ticket, first = exhausted(core, key(512))
    victim = only(core, Evict)
    core.evicted(victim.slot, 1)
    core.take()
    core.admit_failed(first.slot, 1, 0, exhausted=True)
    assert core.take() == [Refused(ticket, Refusal.EXHAUSTED, first.slot), Restart("a", 1)]
    assert charged(core)[0] == 1, "charged until the exit is confirmed"


def test_persistent_exhaustion_drains_existing_leases_before_restart() -> None:
    core = fleet()
    up(core, "b")
    lease = admit(core, key(128))
    ticket, first = exhausted(core, key(512))
    victim = only(core, Evict)
    assert victim.key.worker == "b"
    core.evicted(victim.slot, 1)
    core.take()
    core.admit_failed(first.slot, 1, 0, exhausted=True)
    assert core.take() == [Refused(ticket, Refusal.EXHAUSTED, first.slot)]
    core.release(lease)
    assert core.take() == [Restart("a", 1)]


def test_failed_resource_victim_eviction_recovers_without_waiting_on_its_own_admission() -> None:
    core = fleet()
    core.release(admit(core, key(256)))
    core.take()
    ticket, first = exhausted(core, key(512))
    victim = only(core, Evict)
    assert victim.key == key(256)
    core.evict_failed(victim.slot, 1, 0)
    assert core.take() == [Refused(ticket, Refusal.EXHAUSTED, first.slot), Restart("a", 1)]


# --- recovery --------------------------------------------------------------------------------------------------------


def test_serving_admission_channel_fault_restarts_exactly_once() -> None:
    core = fleet()
    core.fault("a", 1, 0)
    assert core.take() == [Restart("a", 1)]
    core.fault("a", 1, 0)
    core.fault("a", 1, 5)
    assert core.take() == []


def test_stale_serving_fault_after_recovery_does_not_restart_restored_owner() -> None:
    core = fleet()
    waiting = die(core)
    core.restored("a", 2)
    core.fault("a", 1, 9)
    assert core.take() == [Granted(waiting)] and not core.workers["a"].recovering


def test_queued_eviction_from_old_owner_is_refused_after_restart() -> None:
    core = fleet()
    victim = evicting(core)
    die(core)
    core.restored("a", 2)
    core.take()
    before = charged(core)
    core.evicted(victim.slot, victim.generation)
    assert charged(core) == before


def test_replacement_never_starts_before_owner_exit_confirmation() -> None:
    core = fleet()
    waiting = core.request(key(128), 0)
    core.release(waiting)
    core.take()
    core.fault("a", 1, 0)
    waiting = core.request(key(128), 0)
    assert core.take() == [Restart("a", 1)]
    core.expire(1.0)
    assert core.take() == [], "no Revive without exited()"
    core.exited("a", 1)
    assert core.take() == [Revive("a", 1)]
    core.restored("a", 2)
    assert core.take() == [Granted(waiting)]


def test_retirement_between_precheck_and_grant_leaves_no_phantom_reservation() -> None:
    core = fleet()
    ticket = core.request(key(256), 0)
    admission = only(core, Admit)
    core.park("a", 0)
    core.release(ticket)
    assert core.take() == [], "its admission is still on the wire: no restart yet"
    core.admitted(admission.slot, 1)
    assert core.take() == [Restart("a", 1)]
    core.exited("a", 1)
    assert charged(core) == (0, 0, 0) and core.take() == []


def test_retirement_during_exit_confirmation_never_connects_replacement() -> None:
    core = fleet()
    core.fault("a", 1, 0)
    core.take()
    core.park("a", 0)
    core.exited("a", 1)
    core.expire(1e9)
    assert core.take() == [] and charged(core) == (0, 0, 0)


def test_restart_reloads_pinned_models_before_returning_ready() -> None:
    core = fleet()
    core.release(admit(core, key(256)))
    core.take()
    ticket = die(core)
    assert charged(core)[:2] == (1, 22), "the rest is refunded, what LOAD brings back is charged"
    assert core.take() == [], "not ready before its LOADs are replayed"
    core.restored("a", 2)
    assert core.take() == [Granted(ticket)] and resident(core, "a") == {key(128)}


def test_exit_confirmation_timeout_retains_reservations_and_never_spawns_replacement() -> None:
    core = fleet()
    waiting = core.request(key(256), 0)
    core.take()
    core.fault("a", 1, 0)
    core.take()
    core.unconfirmed("a", 1)
    assert core.take() == [Refused(waiting, Refusal.CLOSED)]
    assert charged(core)[:2] == (2, 44)
    core.expire(1e9)
    late = core.request(key(128), 1e9)
    assert core.take() == [Refused(late, Refusal.CLOSED)]


def test_unconfirmed_exit_keeps_worker_closed_and_budget_charged() -> None:
    core = fleet(Limits(executables=44))
    core.fault("a", 1, 0)
    core.take()
    core.unconfirmed("a", 1)
    ask(core, "b", QWEN)
    assert core.take() == [], "22 of 44 are still charged to a process that may be alive"
    core.exited("a", 1)
    assert core.take() == [Revive("b", 0)], "a late confirmation refunds"


def test_unacknowledged_admission_times_out_without_refunding_before_exit() -> None:
    core = fleet()
    ticket = core.request(key(256), 0)
    core.take()
    core.fault("a", 1, 600)  # the silence watchdog ended the exchange
    assert charged(core)[:2] == (2, 44) and core.take() == [Restart("a", 1)]
    core.exited("a", 1)
    assert charged(core)[:2] == (1, 22) and ticket in core.tickets
    core.take()
    core.restored("a", 2)
    admission = only(core, Admit)
    assert admission.generation == 2, "who waited goes on waiting"


def test_unacknowledged_eviction_times_out_without_refunding_before_exit() -> None:
    core = fleet()
    victim = evicting(core)
    core.fault("a", 1, 600)
    assert charged(core)[1] == 88 and core.slots[victim.slot].state is State.FAILED
    core.take()
    core.exited("a", 1)
    assert charged(core)[1] == 22


def test_drain_timeout_forces_confirmed_exit_and_reopens_worker() -> None:
    core = fleet()
    lease = admit(core, key(128))
    core.fault("a", 1, 100)
    assert core.take() == [] and core.next_expiry() == 100 + DRAIN_S
    core.expire(100 + DRAIN_S)
    assert core.take() == [Restart("a", 1)]
    ticket = core.request(key(128), 0)
    core.exited("a", 1)
    core.take()
    core.release(lease)
    core.restored("a", 2)
    assert core.take() == [Granted(ticket)]


def test_err_ack_restarts_the_worker_drops_its_shapes_and_resumes_waiters() -> None:
    core = fleet()
    core.release(admit(core, key(256)))
    core.take()
    asked = core.request(key(512), 0)
    admission = only(core, Admit)
    waiting = core.request(key(1024), 0)
    other = only(core, Admit)
    core.admit_failed(admission.slot, 1, 0, exhausted=False)
    assert core.take() == [Refused(asked, Refusal.FAILED, admission.slot)], "another exchange is still on the wire"
    core.admitted(other.slot, 1)
    assert core.take() == [Restart("a", 1)], "no lease is granted on a worker that recovers"
    core.exited("a", 1)
    core.take()
    core.restored("a", 2)
    again = only(core, Admit)
    assert again.key == key(1024) and resident(core, "a") == {key(128)}
    core.admitted(again.slot, 2)
    assert core.take() == [Granted(waiting)]


def test_a_worker_that_does_not_come_up_refuses_its_waiters_and_the_next_request_tries_again() -> None:
    core = fleet()
    waiting = die(core)
    core.revive_failed("a", 1)
    assert core.take() == [Refused(waiting, Refusal.FAILED)] and charged(core) == (0, 0, 0)
    core.request(key(256), 0)
    assert core.take() == [Revive("a", 1)]


def test_a_restart_waits_for_room_when_others_took_it() -> None:
    core = Residency(Limits(executables=44))
    up(core, "a")
    up(core, "b")
    core.fault("a", 1, 0)
    core.take()
    core.request(key(128), 0)
    waiting = core.request(key(256, "b"), 0)
    core.take()
    core.exited("a", 1)
    # The replacement goes before the ticket that waits: its LOAD brings the smallest rung back.
    assert core.take() == [Revive("a", 1)] and waiting in core.tickets


# --- reports that come late, twice or for nobody ---------------------------------------------------------------------


def test_a_parked_worker_stays_down_until_its_next_request() -> None:
    core = fleet()
    core.park("a", 0)
    assert core.take() == [Restart("a", 1)]
    core.exited("a", 1)
    assert core.take() == [] and not core.busy("a"), "nobody asked for it"
    core.park("a", 0)
    assert core.take() == [], "down already"
    ticket = core.request(key(128), 0)
    assert core.take() == [Revive("a", 1)] and core.busy("a")
    core.restored("a", 2)
    assert core.take() == [Granted(ticket)]


def test_a_lease_is_given_back_once() -> None:
    core = fleet()
    lease = admit(core, key(128))
    other = admit(core, key(128))
    core.release(lease)
    core.release(lease)
    assert core.busy("a"), "the second lease still holds"
    core.release(other)
    assert not core.busy("a")


def test_what_an_earlier_generation_reports_changes_nothing() -> None:
    core = fleet()
    waiting = die(core)
    core.restored("a", 2)
    assert core.take() == [Granted(waiting)]
    before = charged(core)
    core.exited("a", 1)
    core.unconfirmed("a", 1)
    core.revive_failed("a", 1)
    core.revive_failed("a", 2)
    assert core.take() == [] and charged(core) == before and not core.workers["a"].closed
    lease = core.request(key(128), 0)
    assert core.take() == [Granted(lease)]
