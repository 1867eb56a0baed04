"""A slice of every row of the campaign, for order and outcomes only: times are the campaign's business."""

from __future__ import annotations

import asyncio
import socket

import pytest

from engines.protocol.connection import Connection
from tests.faults import campaign, mutations, quarantine_model
from tests.faults.arena import run
from tests.faults.history import History
from tests.faults.ledger import Row

pytestmark = [pytest.mark.fault, pytest.mark.process]
SLICES = [name for name, plan in campaign.PLANS.items() if plan.sizes["slice"] is not None]
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
    row = campaign.PLANS[name].run("slice")
    assert row is not None
    assert row.problems == []
    assert row.injected > 0


def test_every_requirement_has_a_row() -> None:
    # R15, the mutation score, is `make mutants`.
    assert [f"R{n}" for n in range(1, 18) if n != 15] == [name for name in campaign.PLANS if name.startswith("R")]
    assert all(plan.sizes["nightly"] is not None for plan in campaign.PLANS.values())
    # The soak is nightly.
    assert [name for name, plan in campaign.PLANS.items() if plan.sizes["ci"] is None] == ["R9"]


# --- the campaign would notice ---------------------------------------------------------------------------------------


def test_the_checker_notices_a_lost_a_doubled_and_a_wrong_answer() -> None:
    history = History()
    fine = history.begin("lane", (1,), [1.0])
    fine.outcomes.append(("ok", [1.0]))
    lost = history.begin("lane", (2,), [2.0])
    doubled = history.begin("lane", (3,), [3.0])
    doubled.outcomes += [("ok", [3.0]), ("engine_crashed", None)]
    wrong = history.begin("lane", (4,), [4.0])
    wrong.outcomes.append(("ok", [3.0]))
    assert history.lost() == [lost, doubled]
    assert history.mismatched() == [wrong]
    assert history.counts() == {"engine_crashed": 1, "ok": 3}


def test_a_row_fails_by_any_of_its_counts() -> None:
    def settled(**fields: object) -> Row:
        row = Row("R0", "x", injected=1, survived=1)
        for name, value in fields.items():
            setattr(row, name, value)
        row.settle()
        return row

    assert settled().passed
    for field in ("lost", "mismatched", "leaked"):
        assert not settled(**{field: 1}).passed
    assert not settled(survived=0).passed
    assert not settled(injected=0, survived=0).passed
    slow = settled(times=[0.2], limit=0.1)
    assert not slow.passed
    assert slow.problems == []
    assert settled(times=[0.05] * 99 + [0.2], limit=0.1, percentile=98).passed
    assert not settled(times=[0.05, 0.05], median_limit=0.01).passed


def test_a_row_counts_what_its_body_leaves_behind() -> None:
    sockets = []

    async def body() -> None:
        sockets.append(socket.socket())

    row = Row("R0", "x", injected=1, survived=1)
    try:
        run(row, body)
    finally:
        sockets.pop().close()
    assert row.leaked == 1
    assert "leaks" in row.notes
    failed = run(Row("R0", "x"), lambda: asyncio.sleep("no time"))  # type: ignore[arg-type]
    assert "TypeError" in failed.problems[0]


def test_the_quarantine_walk_notices_a_wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("synapse_host.supervision.quarantine.LIMIT", 3)
    row = Row("R14", "x")
    quarantine_model.walk("catalog", 200, 1, row)
    assert row.problems


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
