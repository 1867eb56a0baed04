"""Strikes, cool-down and probes: protocol-v3 section 5."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from synapse_host.quarantine import Fingerprint, Quarantine, Strike

POISON = Fingerprint("EMBED_BATCH", "m", "aa")
OTHER = Fingerprint("EMBED_BATCH", "m", "bb")


def catalog() -> Quarantine:
    return Quarantine("catalog", cool_down=600.0)


def legacy() -> Quarantine:
    return Quarantine("legacy", cool_down=600.0)


def strike(quarantine: Quarantine, generation: int, now: float = 0.0, fingerprint: Fingerprint | None = None) -> bool:
    return quarantine.strike(Strike(generation, "exit", now, fingerprint))


def test_two_in_a_row_shut_the_lane_for_the_cool_down():
    q = catalog()
    assert strike(q, 1, 0.0)
    assert q.admits(0.0) and q.strikes(0.0) == 1
    assert strike(q, 2, 10.0)
    assert not q.admits(10.0)
    assert q.remaining(10.0) == 600.0
    assert q.remaining(111.0) == 499.0
    assert not q.admits(609.999)
    # At the very end of the cool-down the lane is open, with no strikes.
    assert q.admits(610.0)
    assert q.strikes(610.0) == 0
    assert q.remaining(610.0) == 0.0


def test_one_physical_failure_is_one_strike():
    q = catalog()
    assert strike(q, 1)
    assert not strike(q, 1)
    assert q.strikes(0.0) == 1 and q.admits(0.0)


def test_a_stale_fault_charges_nothing():
    q = catalog()
    assert strike(q, 2)
    assert not strike(q, 1)
    assert q.strikes(0.0) == 1


def test_served_work_between_two_crashes_leaves_one_strike():
    q = catalog()
    strike(q, 1)
    q.served(2)
    assert q.strikes(0.0) == 0
    strike(q, 2)
    assert q.strikes(0.0) == 1 and q.admits(0.0)


def test_a_dead_generation_can_not_clear():
    q = catalog()
    strike(q, 2)
    q.served(2)
    q.served(1)
    assert q.strikes(0.0) == 1


def test_served_work_does_not_open_a_shut_lane():
    q = catalog()
    strike(q, 1)
    strike(q, 2)
    q.served(3)
    assert not q.admits(1.0)


def test_unload_clears_a_catalog_lane_at_once():
    q = catalog()
    strike(q, 1)
    strike(q, 2)
    q.clear()
    assert q.admits(0.0) and q.strikes(0.0) == 0


def test_a_legacy_lane_stays_shut_until_probed():
    q = legacy()
    strike(q, 1)
    strike(q, 2)
    assert not q.admits(1e9)
    assert q.remaining(1e9) is None
    q.clear()
    assert not q.admits(0.0)
    q.probed()
    assert q.admits(0.0) and q.strikes(0.0) == 0


def test_unload_clears_the_single_strike_of_a_legacy_lane():
    q = legacy()
    strike(q, 1)
    q.clear()
    assert q.strikes(0.0) == 0


def test_the_same_input_twice_is_told():
    q = catalog()
    strike(q, 1, fingerprint=POISON)
    assert not q.same_input
    strike(q, 2, fingerprint=POISON)
    assert q.same_input
    other = catalog()
    strike(other, 1, fingerprint=POISON)
    strike(other, 2, fingerprint=OTHER)
    assert not other.same_input
    idle = catalog()
    strike(idle, 1)
    strike(idle, 2)
    assert not idle.same_input


def test_a_strike_after_expiry_starts_a_new_count():
    q = catalog()
    strike(q, 1, 0.0)
    strike(q, 2, 0.0)
    assert strike(q, 3, 600.0)
    assert q.strikes(600.0) == 1 and q.admits(600.0)


def test_history_holds_the_strikes_in_order():
    q = catalog()
    strike(q, 1, 5.0, POISON)
    strike(q, 2, 6.0, OTHER)
    assert [s.generation for s in q.history] == [1, 2]
    assert POISON.to_dict() == {"operation": "EMBED_BATCH", "model": "m", "ids_sha256": "aa"}


class QuarantineMachine(RuleBasedStateMachine):
    """Against a model of three numbers: strikes in a row, shut since, last generation struck."""

    @initialize(kind=st.sampled_from(["catalog", "legacy"]))
    def begin(self, kind):
        self.kind, self.q = kind, Quarantine(kind, cool_down=600.0)
        self.now, self.strikes, self.since, self.struck, self.generation = 0.0, 0, None, 0, 1

    def lapse(self):
        if self.kind == "catalog" and self.since is not None and self.now - self.since >= 600.0:
            self.strikes, self.since = 0, None

    @rule(seconds=st.sampled_from([0.0, 1.0, 299.0, 600.0, 601.0]))
    def wait(self, seconds):
        self.now += seconds
        self.lapse()

    @rule(behind=st.integers(0, 2))
    def fail(self, behind):
        generation = max(1, self.generation - behind)
        counted = generation > self.struck
        assert self.q.strike(Strike(generation, "exit", self.now)) == counted
        if counted:
            self.struck, self.strikes = generation, min(2, self.strikes + 1)
            self.generation = generation + 1
            if self.strikes == 2 and self.since is None:
                self.since = self.now

    @rule(behind=st.integers(0, 2))
    def serve(self, behind):
        generation = max(1, self.generation - behind)
        self.q.served(generation)
        if self.since is None and generation > self.struck:
            self.strikes = 0

    @rule()
    def unload(self):
        self.q.clear()
        if self.kind == "catalog" or self.since is None:
            self.strikes, self.since = 0, None

    @rule()
    def probe(self):
        self.q.probed()
        self.strikes, self.since = 0, None

    @invariant()
    def agree(self):
        assert self.q.admits(self.now) == (self.since is None)
        assert self.q.strikes(self.now) == self.strikes
        expected = 0.0 if self.since is None else None if self.kind == "legacy" else self.since + 600.0 - self.now
        assert self.q.remaining(self.now) == expected


QuarantineMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_quarantine_against_its_model = QuarantineMachine.TestCase


def test_open_is_what_a_strike_shuts_and_only_a_look_at_the_clock_opens_again():
    lane = catalog()
    assert lane.open is True
    strike(lane, 1)
    assert lane.open is True
    strike(lane, 2, 5.0)
    assert lane.open is False
    assert lane.admits(5.0 + 600.0)
    assert lane.open is True


def test_strikes_lapse_with_the_cool_down_without_being_asked_for_entry():
    lane = catalog()
    strike(lane, 1)
    strike(lane, 2, 5.0)
    assert lane.strikes(604.9) == 2
    assert lane.strikes(605.0) == 0
