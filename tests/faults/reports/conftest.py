"""Fixtures of the public reports' tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.reports.trial import Scenario, run_lanes


@pytest.fixture
def lanes(tmp_path: Path) -> Callable[[Scenario], None]:
    """Run an async scenario with a lane factory in a loop of its own."""
    return lambda scenario: run_lanes(tmp_path / "rt", scenario)
