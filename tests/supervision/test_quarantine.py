"""Strikes, cool-down and probes: protocol-v3 section 5."""

from __future__ import annotations

import pytest

from synapse_host.placement.spec import LaneKind
from synapse_host.supervision.quarantine import Fingerprint, Quarantine, fingerprint_of
from tests.faults.ledger import Row
from tests.faults.quarantine_model import walk
from tests.support.lanes import embed

POISON = Fingerprint("EMBED_BATCH", "m", "aa")
OTHER = Fingerprint("EMBED_BATCH", "m", "bb")


def struck(*fingerprints: Fingerprint | None, kind: LaneKind = "catalog", at: float = 0.0) -> Quarantine:
    """A quarantine with one strike for each fingerprint, of generations 1, 2 and so on."""
    made = Quarantine(kind, cool_down=600.0)
    for generation, fingerprint in enumerate(fingerprints, 1):
        assert made.strike(generation, at, fingerprint)
    return made


@pytest.mark.parametrize("kind", ["catalog", "legacy"])
def test_random_walks_agree_with_the_campaigns_model(kind: LaneKind):
    """Strikes, stale strikes, served work, unloads, probes and waits: what a caller sees after each."""
    row = Row("walk", kind)
    for seed in range(20):
        walk(kind, 200, seed, row)
    assert row.problems == []


def test_two_in_a_row_shut_the_lane_for_the_cool_down():
    q = struck(None, None, at=10.0)
    assert (q.open, q.admits(10.0), q.remaining(10.0), q.remaining(111.0)) == (False, False, 600.0, 499.0)
    assert not q.admits(609.999) and not q.open, "only a look at the clock opens it again"
    assert (q.admits(610.0), q.open, q.strikes(610.0), q.remaining(610.0)) == (True, True, 0, 0.0)


def test_a_strike_at_the_end_of_the_cool_down_is_the_first_of_the_next():
    q = struck(None, None)
    assert q.strikes(599.9) == 2
    assert q.strike(3, 600.0, None) and q.strikes(600.0) == 1 and q.admits(600.0)
    q.strike(4, 605.0, None)
    assert not q.admits(1204.9) and q.strikes(1205.0) == 0


def test_a_legacy_lane_stays_shut_until_probed():
    q = struck(None, None, kind="legacy")
    q.clear()
    assert not q.admits(1e9) and q.remaining(1e9) is None
    q.probed()
    assert q.admits(0.0) and q.strikes(0.0) == 0


@pytest.mark.parametrize(
    ("fingerprints", "same"),
    [((POISON,), None), ((POISON, POISON), POISON), ((POISON, OTHER), None), ((None, None), None),
     ((POISON, OTHER, OTHER), OTHER)],
    ids=["one", "same", "other", "idle", "the last two"],
)  # fmt: skip
def test_the_same_input_twice_is_told(fingerprints: tuple[Fingerprint | None, ...], same: Fingerprint | None):
    assert struck(*fingerprints).same_input == same


def test_a_fingerprint_is_of_the_operation_the_model_and_the_ids():
    one, again, other = (fingerprint_of(*embed([first])("1-1", "r"), "m") for first in (1, 1, 2))
    assert one == again != other and (one.operation, one.model) == ("EMBED_BATCH", "m")
    assert fingerprint_of(embed([1])("1-1", "r")[0], None, "m").ids_sha256 is None
