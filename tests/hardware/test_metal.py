"""llama.cpp on Metal: `make hw-metal` on a Mac. Nothing here has run anywhere until evidence/ says so.

The default models' lanes are certified on llama-metal by the code of `synapse certify`: numbers against their fp32
fixtures, batches, edge lengths, order, speed. evidence/llama-metal-<chip>-<os>/ holds the documents and hardware.json.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from synapse_host.placement import probe
from tests.hardware import lanes
from tests.hardware.record import Record

pytestmark = [pytest.mark.metal, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def record(request: pytest.FixtureRequest) -> Iterator[Record]:
    found = Record("llama-metal", probe.DISTRIBUTIONS["llama"])
    found.expect(request)
    yield found
    found.write()


@pytest.fixture(autouse=True)
def outcome(record: Record, request: pytest.FixtureRequest) -> Iterator[None]:
    """Write down how each test ended."""
    yield
    record.ended(request)


@pytest.mark.parametrize("lane", list(lanes.MODELS))
def test_certification(lane: str, record: Record) -> None:
    summary = lanes.certified(lane, "llama-metal")
    record.note(lane, **summary)
    lanes.assert_certified(summary)
