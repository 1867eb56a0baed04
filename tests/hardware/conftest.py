"""What a hardware run keeps of each test: how it ended, for the evidence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome: Any = yield
    report: pytest.TestReport = outcome.get_result()
    if report.when == "call" or report.outcome != "passed":
        item.user_properties.append(("outcome", report.outcome))
