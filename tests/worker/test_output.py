"""The last bytes of a worker's output, exact and tagged; its lines in the host's log."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synapse_host.worker.output import MAX_LINE, LineForwarder, LogRing


def test_tags_do_not_count_and_the_tail_of_a_position_is_rendered_alone():
    ring = LogRing(10)
    ring.write("stdout", b"ab\n")
    ring.write("stderr", b"cd\n")
    ring.write("stdout", b"efgh")
    assert len(ring) == 10
    assert ring.render() == "[stdout] ab\n[stderr] cd\n[stdout] efgh"
    assert ring.render(6) == "[stdout] efgh" and ring.render(4) == "[stderr] d\n[stdout] efgh"
    ring.write("stderr", b"one\ntwo\n\xff")
    assert ring.render() == "[stdout] h\n[stderr] one\n[stderr] two\n[stderr] \ufffd"
    with pytest.raises(ValueError, match="capacity"):
        LogRing(-1)


@given(
    st.integers(0, 40),
    st.lists(st.tuples(st.sampled_from(["stdout", "stderr"]), st.binary(max_size=25)), max_size=12),
    st.integers(-5, 320),
)
def test_what_came_after_a_position(capacity, writes, position):
    ring = LogRing(capacity)
    calls = []
    ring.on_write = lambda: calls.append(ring.written)
    everything: list[tuple[str, int]] = []
    for stream, data in writes:
        ring.write(stream, data)
        everything += [(stream, byte) for byte in data]
    assert ring.written == len(everything)
    if capacity:
        assert len(calls) == sum(bool(data) for _, data in writes)
    runs, missed = ring.since(position)
    # A position that this ring never had (another host's, an older program's) means: from the beginning.
    start = position if 0 <= position <= len(everything) else 0
    kept = everything[max(start, len(everything) - capacity) :]
    assert [(stream, byte) for stream, part in runs for byte in part] == kept
    assert missed + len(kept) == len(everything) - start
    assert len(ring) == min(capacity, len(everything))
    assert ring.since(ring.written) == ([], 0)


def lines(caplog):
    return [record.getMessage() for record in caplog.records]


@pytest.fixture
def forwarder(caplog):
    caplog.set_level(logging.INFO, "synapse_host.worker")
    return LineForwarder("lane", per_second=3)


def test_lines_are_forwarded_without_carriage_returns(forwarder, caplog):
    forwarder.feed("toy-1", "stdout", b"hel", 0.0)
    forwarder.feed("toy-1", "stdout", b"lo\r\nrest", 0.0)
    assert lines(caplog) == ["toy-1 stdout: hello"]
    record = caplog.records[0]
    assert (record.worker, record.lane, record.stream, record.dropped) == ("toy-1", "lane", "stdout", 0)


def test_the_streams_do_not_mix(forwarder, caplog):
    forwarder.feed("w", "stdout", b"out", 0.0)
    forwarder.feed("w", "stderr", b"err\n", 0.0)
    forwarder.feed("w", "stdout", b"put\n", 0.0)
    assert lines(caplog) == ["w stderr: err", "w stdout: output"]


def test_the_budget_holds_for_both_streams_and_the_next_line_tells_what_was_dropped(forwarder, caplog):
    forwarder.feed("w", "stdout", b"1\n2\n", 0.0)
    forwarder.feed("w", "stderr", b"3\n4\n5\n", 0.5)
    assert lines(caplog) == ["w stdout: 1", "w stdout: 2", "w stderr: 3"]
    assert forwarder.dropped == 2
    forwarder.feed("w", "stdout", b"6\n7\n", 1.0)
    assert lines(caplog)[3:] == ["w stdout: 6 dropped=2", "w stdout: 7"]


def test_a_restart_keeps_the_budget_and_forgets_the_unterminated_line(forwarder, caplog):
    forwarder.feed("w-1", "stdout", b"1\n2\n3\nhalf", 0.0)
    forwarder.restart()
    forwarder.feed("w-2", "stdout", b"4\n", 0.1)
    assert forwarder.dropped == 1
    forwarder.feed("w-2", "stdout", b"5\n", 1.0)
    assert lines(caplog)[-1] == "w-2 stdout: 5 dropped=1"


def test_a_line_without_end_needs_bounded_memory(forwarder, caplog):
    for _ in range(100):
        forwarder.feed("w", "stderr", b"x" * 65536, 0.0)
    assert sum(map(len, forwarder._partial.values())) <= MAX_LINE + 1
    forwarder.feed("w", "stderr", b"\nnext\n", 0.0)
    assert lines(caplog) == ["w stderr: " + "x" * MAX_LINE, "w stderr: next"]
