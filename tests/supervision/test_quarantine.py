"""Strikes, cool-down and probes: protocol-v3 section 5."""

from __future__ import annotations

import pytest

from synapse_host.placement.spec import LaneKind
from synapse_host.supervision.quarantine import Fingerprint, Quarantine, Strike
from tests.faults.ledger import Row
from tests.faults.quarantine_model import walk

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


@pytest.mark.parametrize(
    ("kind", "steps", "strikes"),
    [
        pytest.param("catalog", "strike 1, strike 1", 1, id="one physical failure is one strike"),
        pytest.param("catalog", "strike 2, strike 1", 1, id="a stale fault charges nothing"),
        pytest.param("catalog", "strike 1, served 2", 0, id="served work clears the strike"),
        pytest.param("catalog", "strike 1, served 2, strike 2", 1, id="served work between two crashes leaves one"),
        pytest.param("catalog", "strike 2, served 2, served 1", 1, id="a dead generation can't clear"),
        pytest.param("catalog", "strike 1, strike 2, served 3", 2, id="served work doesn't open a shut lane"),
        pytest.param("catalog", "strike 1, strike 2, clear", 0, id="unload clears a catalog lane at once"),
        pytest.param("legacy", "strike 1, clear", 0, id="unload clears the single strike of a legacy lane"),
    ],
)
def test_strikes_after(kind: LaneKind, steps: str, strikes: int):
    q = Quarantine(kind, cool_down=600.0)
    for step in steps.split(", "):
        name, _, generation = step.partition(" ")
        if name == "strike":
            strike(q, int(generation))
        elif name == "served":
            q.served(int(generation))
        else:
            q.clear()
    assert q.strikes(0.0) == strikes and q.admits(0.0) is (strikes < 2)


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


def test_strikes_lapse_with_the_cool_down_also_when_a_strike_or_a_question_comes_first():
    q = catalog()
    strike(q, 1, 0.0)
    strike(q, 2, 0.0)
    assert q.strikes(599.9) == 2
    assert strike(q, 3, 600.0)
    assert q.strikes(600.0) == 1 and q.admits(600.0)
    strike(q, 4, 605.0)
    assert q.strikes(1205.0) == 0


def test_history_holds_the_strikes_in_order():
    q = catalog()
    strike(q, 1, 5.0, POISON)
    strike(q, 2, 6.0, OTHER)
    assert [s.generation for s in q.history] == [1, 2]
    assert POISON.to_dict() == {"operation": "EMBED_BATCH", "model": "m", "ids_sha256": "aa"}


@pytest.mark.parametrize("kind", ["catalog", "legacy"])
def test_random_walks_agree_with_the_campaigns_model(kind: LaneKind):
    row = Row("walk", kind)
    for seed in range(20):
        walk(kind, 200, seed, row)
    assert row.problems == []


def test_open_is_what_a_strike_shuts_and_only_a_look_at_the_clock_opens_again():
    lane = catalog()
    assert lane.open is True
    strike(lane, 1)
    assert lane.open is True
    strike(lane, 2, 5.0)
    assert lane.open is False
    assert lane.admits(5.0 + 600.0)
    assert lane.open is True
