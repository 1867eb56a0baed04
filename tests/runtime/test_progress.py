"""ProgressReporter under a clock that moves only when told."""

from __future__ import annotations

import threading

import pytest

from engines.protocol.messages import Phase
from engines.runtime.progress import COALESCE_S, ProgressReporter
from tests.support.clock import ManualClock

Sent = list[tuple[int, Phase]]


def reporter(clock: ManualClock, phase: Phase = Phase.INFERENCE) -> tuple[ProgressReporter, Sent]:
    sent: Sent = []
    return ProgressReporter(lambda completed, p: sent.append((completed, p)), phase=phase, clock=clock), sent


def test_only_finished_work_is_sent_and_only_when_an_interval_has_passed(clock: ManualClock) -> None:
    progress, sent = reporter(clock)
    progress.advance(5)
    clock.advance(COALESCE_S / 2)
    progress.advance()
    assert (sent, progress.completed) == ([], 6)
    clock.advance(3600)
    assert sent == [], "time alone sends nothing"
    progress.advance(2)
    assert sent == [(8, Phase.INFERENCE)], "a later report carries everything done so far"
    progress.close()
    clock.advance(10)
    progress.advance()
    progress.switch(100)
    assert len(sent) == 1, "nothing follows the close"


def test_at_most_one_frame_an_interval_and_each_rises(clock: ManualClock) -> None:
    progress, sent = reporter(clock)
    for _ in range(1000):
        clock.advance(COALESCE_S / 10)
        progress.advance()
    assert 90 <= len(sent) <= 100
    counts = [completed for completed, _ in sent]
    assert counts == sorted(set(counts))


@pytest.mark.parametrize("units", [0, -1])
def test_no_work_is_not_progress(clock: ManualClock, units: int) -> None:
    progress, _ = reporter(clock)
    with pytest.raises(ValueError, match="is not work"):
        progress.advance(units)


def test_the_switch_is_sent_at_once_changes_the_phase_and_has_to_rise(clock: ManualClock) -> None:
    progress, sent = reporter(clock, Phase.SETUP)
    clock.advance(COALESCE_S)
    progress.advance(20)
    with pytest.raises(ValueError, match="already said 20"):
        progress.switch(20)
    progress.switch(60)
    clock.advance(COALESCE_S)
    progress.advance(60)
    assert sent == [(20, Phase.SETUP), (60, Phase.INFERENCE), (120, Phase.INFERENCE)]


def test_threads_reporting_at_once_never_send_a_count_twice_or_backwards() -> None:
    sent: Sent = []
    ticks = iter(range(10**9))
    progress = ProgressReporter(lambda c, p: sent.append((c, p)), phase=Phase.SETUP, clock=lambda: float(next(ticks)))
    threads = [threading.Thread(target=lambda: [progress.advance() for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = [completed for completed, _ in sent]
    assert counts == list(range(1, 2001))
