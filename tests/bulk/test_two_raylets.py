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


@pytest.mark.parametrize("jobs", [1, pytest.param(20, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_an_actor_and_a_raylet_that_are_killed_lose_and_double_nothing(tmp_path: Path, jobs: int) -> None:
    pytest.importorskip("ray", reason="the extra ray isn't installed")
    with pytest.raises(InvalidRequest, match=r"Ray can't be reached at 127\.0\.0\.1:1: "):
        Place(tmp_path / "no").run(address="127.0.0.1:1")
    with two_raylets() as kill_a_raylet:
        for job in range(jobs):
            place = Place(tmp_path / str(job), SLOW)
            document, killed = run_killed(place, [kill_an_actor, kill_a_raylet])
            assert document["n"] == 3000 and killed == 2
            place.check()
