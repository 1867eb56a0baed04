"""The last bytes of a worker's output, exact and tagged; its lines in the host's log."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synapse_host.worker.output import MAX_LINE, LineForwarder, LogRing


def test_tags_do_not_count_and_the_tail_of_a_position_is_rendered_alone():
    ring = LogRing(10)
    ring.write("stdout", b"ab\n")
    ring.write("stderr", b"cd\n")
    ring.write("stdout", b"efgh")
    assert ring.render() == "[stdout] ab\n[stderr] cd\n[stdout] efgh"
    assert ring.render(6) == "[stdout] efgh" and ring.render(4) == "[stderr] d\n[stdout] efgh"
    ring.write("stderr", b"one\ntwo\n\xff")
    assert ring.render() == "[stdout] h\n[stderr] one\n[stderr] two\n[stderr] \ufffd"


@settings(deadline=None)
@given(
    st.integers(0, 40) | st.just(2000),
    st.lists(
        st.tuples(
            st.sampled_from(["stdout", "stderr"]), st.binary(max_size=25) | st.binary(min_size=600, max_size=600)
        ),
        max_size=12,
    ),
    st.integers(-5, 7500),
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
    assert ring.since(ring.written) == ([], 0)


LINES: dict[str, tuple[list[tuple[str, bytes, float] | None], list[str]]] = {
    "a carriage return, half a line": ([("stdout", b"hel", 0.0), ("stdout", b"lo\r\nrest", 0.0)], ["stdout: hello"]),
    "streams that don't mix": (
        [("stdout", b"out", 0.0), ("stderr", b"err\n", 0.0), ("stdout", b"put\n", 0.0)],
        ["stderr: err", "stdout: output"],
    ),
    "a budget for both, and what was dropped": (
        [("stdout", b"1\n2\n", 0.0), ("stderr", b"3\n4\n5\n", 0.5), ("stdout", b"6\n7\n", 1.0)],
        ["stdout: 1", "stdout: 2", "stderr: 3", "stdout: 6 dropped=2", "stdout: 7"],
    ),
    "a restart, which keeps the budget and forgets half a line": (
        [("stdout", b"1\n2\n3\nhalf", 0.0), None, ("stdout", b"4\n", 0.1), ("stdout", b"5\n", 1.0)],
        ["stdout: 1", "stdout: 2", "stdout: 3", "stdout: 5 dropped=1"],
    ),
    "a line without end": (
        [*[("stderr", b"x" * 65536, 0.0)] * 100, ("stderr", b"\nnext\n", 0.0)],
        ["stderr: " + "x" * MAX_LINE, "stderr: next"],
    ),
}
"""What is fed, and when (None: another worker from here on) -> what is logged, of three lines a second."""


@pytest.mark.parametrize("case", LINES)
def test_lines_are_forwarded(case, caplog):
    caplog.set_level(logging.INFO, "synapse_host.worker")
    forwarder = LineForwarder("lane", per_second=3)
    feeds, expected = LINES[case]
    for feed in feeds:
        if feed is None:
            forwarder.restart()
        else:
            stream, data, now = feed
            forwarder.feed("w", stream, data, now)
        assert sum(map(len, forwarder._partial.values())) <= MAX_LINE + 1, "memory is bounded"
    assert [record.getMessage() for record in caplog.records] == [f"w {line}" for line in expected]
    for record in caplog.records:
        assert (record.worker, record.lane) == ("w", "lane") and record.stream in record.getMessage()
        assert (record.dropped > 0) is ("dropped=" in record.getMessage())
