"""Silence windows: the table of protocol-v3 section 4, renewal, jumps."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engines.protocol.messages import (
    ANE_ENGINE,
    CUDA_ENGINE,
    LLAMA_ENGINE,
    AneAdmitPacked,
    AneAdmitShape,
    AneEvictPacked,
    AneEvictShape,
    EmbedBatch,
    Generate,
    Load,
    Phase,
    Ping,
    Rerank,
    RerankSequences,
    Unload,
    phases,
)
from synapse_host.config import Windows
from synapse_host.worker.watchdog import JUMP, Watchdog

# Four different numbers, so that no window can stand in for another.
DISTINCT = Windows(setup=601.0, control=602.0, ping=121.0, inference=122.0)
SETUP, CONTROL, PING, INFERENCE = 601.0, 602.0, 121.0, 122.0


@pytest.mark.parametrize(
    ("request_type", "engine", "expected"),
    [
        (Load, LLAMA_ENGINE, SETUP),
        (Load, CUDA_ENGINE, SETUP),
        (AneAdmitShape, ANE_ENGINE, SETUP),
        (AneAdmitPacked, ANE_ENGINE, SETUP),
        (AneEvictShape, ANE_ENGINE, CONTROL),
        (AneEvictPacked, ANE_ENGINE, CONTROL),
        (Unload, LLAMA_ENGINE, CONTROL),
        (Ping, LLAMA_ENGINE, PING),
        (Ping, CUDA_ENGINE, PING),
        (EmbedBatch, LLAMA_ENGINE, INFERENCE),
        (Rerank, LLAMA_ENGINE, INFERENCE),
        (Generate, LLAMA_ENGINE, INFERENCE),
        (RerankSequences, ANE_ENGINE, INFERENCE),
        (EmbedBatch, CUDA_ENGINE, SETUP),
        (RerankSequences, CUDA_ENGINE, SETUP),
    ],
)
def test_first_window_of_every_exchange(request_type, engine, expected):
    dog = Watchdog(DISTINCT)
    dog.start(request_type, engine, 1000.0)
    assert dog.deadline == 1000.0 + expected
    assert not dog.expired(1000.0 + expected - 0.001)
    assert dog.expired(1000.0 + expected)


def test_default_windows_are_the_seeds():
    assert Windows() == Windows(setup=600.0, control=600.0, ping=120.0, inference=120.0)


def test_cuda_switches_from_the_setup_to_the_inference_window():
    dog = Watchdog(DISTINCT)
    dog.start(EmbedBatch, CUDA_ENGINE, 0.0)
    dog.progress(Phase.SETUP, 100.0)
    assert dog.deadline == 100.0 + SETUP
    dog.progress(Phase.INFERENCE, 200.0)
    assert dog.deadline == 200.0 + INFERENCE


def test_the_terminal_header_renews_once():
    dog = Watchdog(DISTINCT)
    dog.start(EmbedBatch, LLAMA_ENGINE, 0.0)
    dog.header(100.0)
    assert dog.deadline == 100.0 + INFERENCE
    dog.header(150.0)
    assert dog.deadline == 100.0 + INFERENCE
    # The next exchange has a header of its own.
    dog.start(EmbedBatch, LLAMA_ENGINE, 300.0)
    dog.header(310.0)
    assert dog.deadline == 310.0 + INFERENCE


def test_progress_of_a_ping_stays_in_its_own_window():
    dog = Watchdog(DISTINCT)
    dog.start(Ping, LLAMA_ENGINE, 0.0)
    dog.progress(Phase.CONTROL, 10.0)
    assert dog.deadline == 10.0 + PING


def test_idle_is_not_silence():
    dog = Watchdog(DISTINCT)
    assert not dog.expired(1e9)
    dog.start(Ping, LLAMA_ENGINE, 0.0)
    dog.stop()
    assert dog.deadline is None
    assert not dog.expired(1e9)


def test_a_jump_of_the_host_starts_the_window_anew():
    dog = Watchdog(DISTINCT)
    dog.start(EmbedBatch, LLAMA_ENGINE, 0.0)
    # The check planned for t = 122 runs at t = 5000: the machine was suspended.
    assert not dog.expired(5000.0, late=5000.0 - INFERENCE)
    assert dog.deadline == 5000.0 + INFERENCE
    # Real silence after it is still found.
    assert dog.expired(5000.0 + INFERENCE, late=0.01)


def test_a_slightly_late_check_still_expires():
    dog = Watchdog(DISTINCT)
    dog.start(EmbedBatch, LLAMA_ENGINE, 0.0)
    assert dog.expired(INFERENCE + JUMP, late=JUMP)


REQUESTS = (Load, Unload, Ping, EmbedBatch, Generate, AneAdmitShape, AneEvictShape)


class WatchdogMachine(RuleBasedStateMachine):
    """The watchdog against a model: (start of the silence, length of the window) or None."""

    def __init__(self):
        super().__init__()
        self.dog = Watchdog(DISTINCT)
        self.now = 0.0
        self.model = None
        self.request = None
        self.header_seen = False

    def window(self, phase):
        if self.request is Ping:
            return PING
        return {Phase.SETUP: SETUP, Phase.CONTROL: CONTROL, Phase.INFERENCE: INFERENCE}[phase]

    @precondition(lambda self: self.model is None)
    @rule(request_type=st.sampled_from(REQUESTS), engine=st.sampled_from([LLAMA_ENGINE, CUDA_ENGINE, ANE_ENGINE]))
    def start(self, request_type, engine):
        self.request, self.header_seen = request_type, False
        self.phases = phases(request_type, engine)
        self.model = (self.now, self.window(self.phases[0]))
        self.dog.start(request_type, engine, self.now)

    @precondition(lambda self: self.model is not None)
    @rule(data=st.data())
    def progress(self, data):
        phase = data.draw(st.sampled_from(self.phases))
        self.model = (self.now, self.window(phase))
        self.dog.progress(phase, self.now)

    @precondition(lambda self: self.model is not None)
    @rule()
    def header(self):
        if not self.header_seen:
            self.header_seen = True
            self.model = (self.now, self.model[1])
        self.dog.header(self.now)

    @rule()
    def stop(self):
        self.model = None
        self.dog.stop()

    @rule(seconds=st.floats(0.0, 700.0))
    def wait(self, seconds):
        self.now += seconds

    @rule(seconds=st.floats(JUMP + 0.5, 1e6))
    def suspend(self, seconds):
        """The host stood still across the deadline and notices when its check comes late."""
        self.now += seconds
        if self.model is not None and self.now >= sum(self.model) and self.now - sum(self.model) > JUMP:
            assert not self.dog.expired(self.now, late=self.now - sum(self.model))
            self.model = (self.now, self.model[1])

    @invariant()
    def same_verdict(self):
        silent = self.model is not None and self.now >= self.model[0] + self.model[1]
        assert self.dog.expired(self.now) == silent


WatchdogMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_watchdog_against_its_model = WatchdogMachine.TestCase


# --- the longest silence of each window, for metrics -----------------------------------------------------------------


def test_a_fresh_watchdog_watches_nothing():
    dog = Watchdog(DISTINCT)
    assert (dog.deadline, dog.window, dog.gaps) == (None, 0.0, {})


def test_the_longest_silence_is_kept_by_window():
    gaps: dict[str, float] = {}
    dog = Watchdog(DISTINCT, gaps)
    assert dog.gaps is gaps
    dog.start(EmbedBatch, CUDA_ENGINE, 100.0)
    dog.progress(Phase.SETUP, 107.0)
    dog.progress(Phase.INFERENCE, 110.0)
    # The first seven seconds and the three before the switch were measured against the window of setup.
    assert gaps == {"setup": 7.0}
    dog.header(115.0)
    assert gaps == {"setup": 7.0, "inference": 5.0}
    dog.header(121.0)
    assert gaps["inference"] == 5.0
    dog.stop(122.0)
    assert gaps["inference"] == 7.0
    assert dog.deadline is None
    dog.start(Ping, LLAMA_ENGINE, 200.0)
    dog.stop(200.5)
    assert gaps == {"setup": 7.0, "inference": 7.0, "ping": 0.5}


def test_a_shorter_silence_changes_nothing_and_an_equal_one_neither():
    dog = Watchdog(DISTINCT)
    for long in (4.0, 2.0, 4.0):
        dog.start(EmbedBatch, LLAMA_ENGINE, 50.0)
        dog.stop(50.0 + long)
        assert dog.gaps == {"inference": 4.0}


def test_each_exchange_starts_its_own_silence():
    dog = Watchdog(DISTINCT)
    dog.start(EmbedBatch, LLAMA_ENGINE, 0.0)
    dog.stop(1.0)
    dog.start(EmbedBatch, LLAMA_ENGINE, 500.0)
    dog.progress(Phase.INFERENCE, 500.25)
    assert dog.gaps == {"inference": 1.0}


def test_an_exchange_that_is_given_up_leaves_no_silence():
    dog = Watchdog(DISTINCT)
    dog.start(EmbedBatch, LLAMA_ENGINE, 0.0)
    dog.stop()
    assert dog.gaps == {}


def test_an_expiry_is_a_silence_and_a_jump_is_none():
    dog = Watchdog(DISTINCT)
    dog.start(EmbedBatch, LLAMA_ENGINE, 0.0)
    assert not dog.expired(5000.0, late=5000.0 - INFERENCE)
    assert dog.gaps == {}
    dog.progress(Phase.INFERENCE, 5003.0)
    assert dog.gaps == {"inference": 3.0}
    assert dog.expired(5003.0 + INFERENCE)
    assert dog.gaps == {"inference": INFERENCE}
