"""llama.cpp on Metal: `make hw-metal` on a Mac. Nothing here has run anywhere until evidence/ says so.

The default models' lanes are certified on llama-metal through a host and its worker: numbers against their fp32
fixtures, batches, edge lengths, order, speed. evidence/llama-metal-<chip>-<os build>.json sums it up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from synapse_host import floor, hardware
from tests.hardware import lanes

pytestmark = [pytest.mark.metal, pytest.mark.timeout(1800)]

EVIDENCE = Path(__file__).parents[2] / "evidence"


@pytest.fixture(scope="module")
def document() -> Iterator[dict[str, Any]]:
    """What the run found, written at its end, also of a run that failed."""
    profile = hardware.detect()
    found: dict[str, Any] = {
        "engine": "llama-metal",
        "chip": profile.cpu_model,
        "os": f"{profile.os} {profile.os_version}",
        "os_build": profile.os_build,
        "software": floor.installed("llama"),
        "lanes": {},
    }
    yield found
    chip, build = (
        re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-") for text in (profile.cpu_model, profile.os_build)
    )
    EVIDENCE.mkdir(exist_ok=True)
    (EVIDENCE / f"llama-metal-{chip}-{build}.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


@pytest.mark.parametrize("lane", list(lanes.MODELS))
def test_certification(lane: str, document: dict[str, Any]) -> None:
    summary = lanes.certified(lane, "llama-metal")
    document["lanes"][lane] = summary
    lanes.assert_certified(summary)
