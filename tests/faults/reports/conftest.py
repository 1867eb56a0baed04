"""Fixtures of the public reports' tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.reports.trial import ReportLanes
from tests.support.lanes import pytest_pyfunc_call

__all__ = ["pytest_pyfunc_call"]


@pytest.fixture
def make(tmp_path: Path) -> ReportLanes:
    """Return a lane factory for an async test, with workers of this tree."""
    return ReportLanes(tmp_path / "rt")
