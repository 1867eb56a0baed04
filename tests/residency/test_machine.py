"""Random histories: no invariant ever breaks, and once everything is answered nobody waits."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from synapse_host.residency.types import Limits
from tests.residency.world import World


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.data_too_large, HealthCheck.too_slow])
@given(st.data())
def test_random_histories_under_hypothesis(data: st.DataObject) -> None:
    world = World()
    choices = data.draw(st.lists(st.integers(0, 719), min_size=100, max_size=220))
    # An event that runs out of choices in the middle takes the last of each: events are never cut in two.
    while choices:
        world.step(lambda n: (choices.pop(0) if choices else n - 1) % n)
    world.settle()


@pytest.mark.parametrize("seed", range(4))
def test_25_000_seeded_steps_each(seed: int) -> None:
    rng = random.Random(seed)
    world = World(Limits() if seed % 2 else None)
    for step in range(25_000):
        world.step(rng.randrange)
        if step % 5_000 == 4_999:
            world.settle()
    assert world.answered > 1_000
