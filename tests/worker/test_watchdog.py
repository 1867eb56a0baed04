"""Silence windows: the table of protocol-v3 section 4, renewal, jumps, and the longest silence of each window."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engines.protocol.messages import CUDA_ENGINE, LLAMA_ENGINE, EmbedBatch, Load, Phase, Ping, Unload, phases
from synapse_host.config import Windows
from synapse_host.worker.watchdog import JUMP, Watchdog

# Four different numbers, so that no window can stand in for another.
DISTINCT = Windows(setup=601.0, control=602.0, ping=121.0, inference=122.0)
SETUP, CONTROL, PING, INFERENCE = 601.0, 602.0, 121.0, 122.0
# Which phase each request begins with is a table of the protocol's own.
FIRST = [
    (Load, LLAMA_ENGINE, SETUP),
    (Unload, LLAMA_ENGINE, CONTROL),
    (Ping, CUDA_ENGINE, PING),
    (EmbedBatch, LLAMA_ENGINE, INFERENCE),
    (EmbedBatch, CUDA_ENGINE, SETUP),
]


@pytest.mark.parametrize(("request_type", "engine", "expected"), FIRST)
def test_first_window_of_every_exchange(request_type, engine, expected):
    dog = Watchdog(DISTINCT)
    assert (dog.deadline, dog.window, dog.gaps, dog.expired(1e9)) == (None, 0.0, {}, False)
    dog.start(request_type, engine, 1000.0)
    assert (dog.deadline, dog.window) == (1000.0 + expected, expected)
    assert not dog.expired(1000.0 + expected - 0.001)
    assert dog.expired(1000.0 + expected)


def test_the_windows_and_the_jump_are_the_spec_s():
    assert Windows() == Windows(setup=600.0, control=600.0, ping=120.0, inference=120.0)
    assert JUMP == 1.0


@pytest.mark.parametrize("late", [0.0, JUMP, JUMP + 0.001, 4878.0])
def test_a_check_that_comes_late(late):
    """A little late is a busy machine; beyond JUMP the host stood still, and the window starts anew, without a gap."""
    dog = Watchdog(DISTINCT)
    dog.start(EmbedBatch, LLAMA_ENGINE, 0.0)
    now = INFERENCE + late
    assert dog.expired(now, late=late) is (late <= JUMP)
    if late <= JUMP:
        assert dog.gaps == {"inference": now}
    else:
        assert (dog.deadline, dog.gaps) == (now + INFERENCE, {})
        dog.progress(Phase.INFERENCE, now + 3.0)
        assert dog.gaps == {"inference": 3.0}


class WatchdogMachine(RuleBasedStateMachine):
    """The watchdog against a model: (start of the silence, name and length of the window) or None; and the gaps."""

    def __init__(self):
        super().__init__()
        self.dog = Watchdog(DISTINCT)
        self.now = 0.0
        self.model = None
        self.gaps = {}
        self.header_seen = False

    def heard(self, phase=None):
        """A silence ends now; the next one is measured against *phase*'s window."""
        since, name, length = self.model
        self.gaps[name] = max(self.gaps.get(name, 0.0), self.now - since)
        if phase is not None:
            name = "ping" if self.request is Ping else phase.value
            length = {"setup": SETUP, "control": CONTROL, "ping": PING, "inference": INFERENCE}[name]
        self.model = (self.now, name, length)

    @precondition(lambda self: self.model is None)
    @rule(first=st.sampled_from(FIRST))
    def start(self, first):
        self.request, engine, length = first
        self.header_seen = False
        self.phases = phases(self.request, engine)
        self.model = (self.now, "ping" if self.request is Ping else self.phases[0].value, length)
        self.dog.start(self.request, engine, self.now)

    @precondition(lambda self: self.model is not None)
    @rule(data=st.data())
    def progress(self, data):
        phase = data.draw(st.sampled_from(self.phases))
        self.heard(phase)
        self.dog.progress(phase, self.now)

    @precondition(lambda self: self.model is not None)
    @rule()
    def header(self):
        if not self.header_seen:
            self.header_seen = True
            self.heard()
        self.dog.header(self.now)

    @precondition(lambda self: self.model is not None)
    @rule(drained=st.booleans())
    def stop(self, drained):
        if drained:
            self.heard()
        self.model = None
        self.dog.stop(self.now if drained else None)
        assert self.dog.deadline is None

    @rule(seconds=st.integers(0, 700))
    def wait(self, seconds):
        self.now += seconds

    @precondition(lambda self: self.model is not None)
    @rule(seconds=st.integers(2, 10**6))
    def suspend(self, seconds):
        """The host stood still across the deadline and notices when its check comes late."""
        since, name, length = self.model
        if self.now < since + length:
            self.now = since + length + seconds
            assert not self.dog.expired(self.now, late=seconds)
            self.model = (self.now, name, length)

    @invariant()
    def same_verdict(self):
        silent = self.model is not None and self.now >= self.model[0] + self.model[2]
        if silent:
            self.gaps[self.model[1]] = max(self.gaps.get(self.model[1], 0.0), self.now - self.model[0])
        assert self.dog.expired(self.now) == silent
        assert self.dog.gaps == self.gaps


WatchdogMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_watchdog_against_its_model = WatchdogMachine.TestCase
