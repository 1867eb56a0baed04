"""The same job on two raylets of this machine: an actor and a raylet die in the middle of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from synapse_host.errors import InvalidRequest
from tests.support.on_ray import SLOW, Place, kill_an_actor, run_killed, two_raylets

pytestmark = [
    pytest.mark.process,
    pytest.mark.ray,
    pytest.mark.fault,
    pytest.mark.leaks_allowed("threads", "children", "descriptors"),
    pytest.mark.filterwarnings("ignore"),  # Ray's own, about itself
]


def test_an_actor_and_a_raylet_that_are_killed_lose_and_double_nothing(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra ray isn't installed")
    place = Place(tmp_path, SLOW)
    with pytest.raises(InvalidRequest, match=r"Ray can't be reached at 127\.0\.0\.1:1: "):
        place.run(address="127.0.0.1:1")
    with two_raylets() as raylets:
        document, killed = run_killed(place, [kill_an_actor, raylets.kill])
    assert document["n"] == 3000 and killed == 2
    place.check()
