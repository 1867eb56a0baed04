"""A slice of every row of the campaign, for order and outcomes only: times are the campaign's business."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from engines.protocol.connection import Connection
from tests.faults import campaign, mutations, quarantine_model
from tests.faults.arena import campaign_row
from tests.faults.history import Call, History
from tests.faults.ledger import Row

pytestmark = [pytest.mark.fault, pytest.mark.process]
SLICES = [name for name in campaign.PLANS if campaign.options(name, "slice") is not None]
REPORTS = {
    "R1": (
        *("triton-inference-server/server#8448", "vllm-project/vllm#2050", "noxdafox/pebble#97"),
        *("Lightning-AI/LitServe#532", "triton-inference-server/server#5381"),
    ),
    "R2": ("vllm-project/vllm#41530",),
    "R7": ("redis/redis-py#2624", "huggingface/sentence-transformers#2955"),
    "R8": ("triton-inference-server/server#7230", "MagicStack/uvloop#185"),
    "R11": ("vllm-project/vllm#55510", "joblib/loky#360"),
    "R12": ("bytedance/SandboxFusion#53",),
    "R13": ("ray-project/ray#64181", "NVIDIA/TensorRT-LLM#15612"),
    "R16": ("quintel/pyetm#205",),
    "R17": ("sgl-project/sglang#3836",),
}
"""Public reports whose fault a row keeps away."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.report(report) for report in REPORTS.get(name, ())]) for name in SLICES],
)
def test_a_slice_of_every_row(name: str) -> None:
    row = campaign.PLANS[name][0](**(campaign.options(name, "slice") or {}))
    assert row.problems == []
    assert row.injected > 0


def test_every_requirement_has_a_row() -> None:
    """R15, the mutation score, is `make mutants`; the soak is nightly."""
    assert [*campaign.PLANS] == [f"R{n}" for n in range(1, 18) if n != 15]
    assert [name for name in campaign.PLANS if campaign.options(name, "ci") is None] == ["R9"]


# --- the campaign would notice ---------------------------------------------------------------------------------------


def test_the_checker_notices_a_lost_a_doubled_and_a_wrong_answer() -> None:
    fine, lost, doubled, wrong = calls = [Call([float(n)]) for n in range(4)]
    fine.outcomes = [("ok", [0.0])]
    doubled.outcomes = [("ok", [2.0]), ("engine_crashed", None)]
    wrong.outcomes = [("ok", [2.0])]
    history = History()
    history.calls = calls
    assert history.lost() == [lost, doubled]
    assert history.mismatched() == [wrong]
    assert history.counts() == {"engine_crashed": 1, "ok": 3}


@pytest.mark.parametrize(
    ("fields", "problems", "slow"),
    [
        ({}, 0, 0),
        ({"lost": 1}, 1, 0),
        ({"mismatched": 1}, 1, 0),
        ({"leaked": 1}, 1, 0),
        ({"survived": 0}, 1, 0),
        ({"injected": 0, "survived": 0}, 1, 0),
        ({"times": [0.2], "limit": 0.1}, 0, 1),
        ({"times": [0.05] * 99 + [0.2], "limit": 0.1, "percentile": 98}, 0, 0),
        ({"times": [0.05, 0.05], "median_limit": 0.01}, 0, 1),
    ],
)
def test_a_row_fails_by_any_of_its_counts(fields: dict[str, Any], problems: int, slow: int) -> None:
    row = Row("R0", "x", **{"injected": 1, "survived": 1} | fields)
    row.settle()
    assert (len(row.problems), len(row.slow), row.passed) == (problems, slow, not problems and not slow)


def test_a_row_counts_what_its_body_leaves_behind_and_what_goes_wrong_in_it() -> None:
    sockets = []

    @campaign_row("R0", "x")
    def bad(row: Row) -> None:
        sockets.append(socket.socket())
        for right in (True, False):
            with row.fault("one") as check:
                check(right, "wrong")
        with row.fault("two"):
            raise TypeError("boom")

    try:
        row = bad()
    finally:
        sockets.pop().close()
    assert (row.injected, row.survived, row.leaked, "leaks" in row.notes) == (3, 1, 1, True)
    assert row.problems[0] == "one: wrong" and "TypeError: boom\ntwo" in row.problems[1]


def test_the_quarantine_walk_notices_a_wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("synapse_host.supervision.quarantine.LIMIT", 3)
    assert quarantine_model.r14(steps=200).problems


def test_the_generator_of_headers_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes, findings = mutations.headers(2000, 1)
    assert not findings and min(outcomes[kind] for kind in ("fault", "event", "waiting")) > 5

    def fail(self: Connection, error: Exception, cause: object = None) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "_fail", fail)
        assert mutations.headers(100, 1)[1]
    monkeypatch.setattr("engines.protocol.connection.DECODE_ERRORS", (RecursionError,))
    assert mutations.headers(100, 1)[1]
