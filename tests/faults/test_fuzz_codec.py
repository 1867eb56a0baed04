"""A seeded slice of the codec fuzzers, the kept corpus, and the proof that they would notice.

The environment variables SYNAPSE_FUZZ_HEADERS and SYNAPSE_FUZZ_SESSIONS set the number of cases; the whole campaign is
1,000,000 and 20,000 (``python -m tests.faults.fuzz_codec``).
"""

from __future__ import annotations

import os

import pytest

from engines.protocol.connection import Connection
from tests.faults import fuzz_codec

HEADERS = int(os.environ.get("SYNAPSE_FUZZ_HEADERS", "20000"))
SESSIONS = int(os.environ.get("SYNAPSE_FUZZ_SESSIONS", "2000"))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2])
def test_mutated_headers_end_in_typed_faults(seed: int) -> None:
    report = fuzz_codec.run(HEADERS // 2, seed)
    assert report["findings"] == []
    assert sum(report["outcomes"].values()) == HEADERS // 2
    assert min(report["outcomes"].get(kind, 0) for kind in ("fault", "event", "waiting")) > 0


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2])
def test_mutated_sessions_come_to_rest(seed: int) -> None:
    report = fuzz_codec.run_sessions(SESSIONS // 2, seed)
    assert report["findings"] == []
    assert {"fault", "local", "completed"} <= set(report["outcomes"]) <= {"fault", "local", "closed", "completed"}


def test_the_corpus_still_ends_as_it_did() -> None:
    rows = fuzz_codec.read_corpus()
    assert len(rows) >= 100
    for row in rows:
        outcome = fuzz_codec.probe(row["aim"], bytes.fromhex(row["hex"]))
        # The wording of a fault may change with the JSON library, its class may not.
        assert outcome.split(": ")[:2] == row["outcome"].split(": ")[:2], row


def test_a_seed_gives_the_same_run() -> None:
    first, second = fuzz_codec.run(300, 7), fuzz_codec.run(300, 7)
    assert first["outcomes"] == second["outcomes"] != fuzz_codec.run(300, 8)["outcomes"]
    assert fuzz_codec.run_sessions(100, 7)["accidents"] == fuzz_codec.run_sessions(100, 7)["accidents"]


def test_the_fuzzers_notice_an_untyped_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.protocol.connection.DECODE_ERRORS", (RecursionError,))
    assert fuzz_codec.run(50, 1)["findings"]
    assert fuzz_codec.run_sessions(50, 1)["findings"]


def test_the_fuzzers_notice_a_fault_that_does_not_close(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Connection, error: Exception, cause: object = None) -> None:
        raise error

    monkeypatch.setattr(Connection, "_fail", fail)
    assert fuzz_codec.run(50, 1)["findings"]


def test_the_fuzzers_notice_a_reply_that_answers_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "_check_reply", lambda self, reply, error: 24)
    assert fuzz_codec.run_sessions(200, 1)["findings"]


def test_the_command_line_exits_by_its_findings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fuzz_codec.main(["--headers", "20", "--sessions", "20"]) == 0
    assert '"what": "mutated sessions"' in capsys.readouterr().out
    monkeypatch.setattr("engines.protocol.connection.DECODE_ERRORS", (RecursionError,))
    assert fuzz_codec.main(["--headers", "20", "--sessions", "20"]) == 1
