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


@pytest.mark.parametrize("kind", ["catalog", "legacy"])
def test_random_walks_agree_with_the_campaigns_model(kind: LaneKind):
    """Strikes, stale strikes, served work, unloads, probes and waits: what a caller sees after each."""
    row = Row("walk", kind)
    for seed in range(20):
        walk(kind, 200, seed, row)
    assert row.problems == []


@pytest.mark.parametrize(
    ("fingerprints", "same"),
    [((POISON,), None), ((POISON, POISON), POISON), ((POISON, OTHER), None), ((None, None), None),
     ((POISON, OTHER, OTHER), OTHER)],
    ids=["one", "same", "other", "idle", "the last two"],
)  # fmt: skip
def test_the_same_input_twice_is_told(fingerprints: tuple[Fingerprint | None, ...], same: Fingerprint | None):
    q = Quarantine("catalog", cool_down=600.0)
    for generation, fingerprint in enumerate(fingerprints, 1):
        q.strike(generation, 0.0, fingerprint)
    assert q.same_input == same and q.admits(0.0) is (len(fingerprints) < 2)


def test_a_fingerprint_is_of_the_operation_the_model_and_the_ids():
    one, again, other = (fingerprint_of(*embed([first])("1-1", "r"), "m") for first in (1, 1, 2))
    assert one == again != other and (one.operation, one.model) == ("EMBED_BATCH", "m")
    assert fingerprint_of(embed([1])("1-1", "r")[0], None, "m").ids_sha256 is None
