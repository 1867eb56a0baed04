"""The pair and the clock that other tests stand on."""

from __future__ import annotations

import pytest

from engines.protocol.connection import PeerClosed, Role, State
from engines.protocol.messages import Ping, Pong
from tests.support.clock import ManualClock
from tests.support.pair import ConnectionPair, byte_by_byte, cut_at, random_cuts, ready, whole

DATA = bytes(range(256)) * 400


@pytest.mark.parametrize("cut", [whole, byte_by_byte, random_cuts(3), cut_at(), cut_at(5, 1, 100_000, 10**9, 0)])
def test_cutting_loses_nothing(cut: object) -> None:
    pieces = list(cut(DATA))  # type: ignore[operator]
    assert b"".join(pieces) == DATA and all(pieces)
    assert list(cut(b"")) == []  # type: ignore[operator]


def test_cuts_are_where_they_were_asked_for() -> None:
    assert list(cut_at(1, 4)(b"abcdef")) == [b"a", b"bcd", b"ef"]
    assert list(random_cuts(1)(DATA)) == list(random_cuts(1)(DATA)) != list(random_cuts(2)(DATA))


def test_what_one_end_sends_the_other_reports() -> None:
    pair = ConnectionPair()
    pair.handshake()
    pair.host_sends(Ping(req_id="p"))
    pair.worker_sends(Pong(req_id="p", rss_mb=1, models_loaded=0))
    assert [len(pair.host_events), len(pair.worker_events)] == [2, 2]
    assert pair.close(Role.WORKER) == PeerClosed() and pair.end(Role.WORKER).state is State.CLOSED
    assert ready(Role.WORKER).state is ready(Role.HOST).state is State.IDLE


def test_the_clock_moves_only_forward_and_only_when_told() -> None:
    clock = ManualClock(5.0)
    assert (clock(), clock.time(), clock.now) == (5.0, 5.0, 5.0)
    assert clock.advance(2.5) == clock() == 7.5
    with pytest.raises(ValueError, match="can't go back"):
        clock.advance(-1)
