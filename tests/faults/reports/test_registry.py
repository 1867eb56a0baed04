"""The registry covers every report once, each has a source, and every guard still stands where it says."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.faults.reports.registry import CANNOT_APPLY, GUARDS, REPORTS, ROOT, Report


def test_all_55_reports_are_there_once():
    numbers = [report.number for report in REPORTS] + [item.number for item in CANNOT_APPLY]
    assert sorted(numbers) == list(range(1, 56))
    assert {guard.report for guard in GUARDS} == {report.number for report in REPORTS}, "a guard without a test"
    assert len(CANNOT_APPLY) <= 10 and all(len(item.missing) > 20 for item in CANNOT_APPLY)


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: f"{report.number:02}")
def test_a_report_names_its_source_and_its_guard(report: Report):
    assert report.source, "the docstring starts with the report"
    assert report.guards
    for guard in report.guards:
        changed = Counter(edit.file for edit in guard.edits)
        texts = {path: (ROOT / path).read_text() for path in changed}
        for edit in guard.edits:
            assert texts[edit.file].count(edit.old) == 1, f"{guard.where}: {edit.file} no longer has {edit.old!r} once"
            texts[edit.file] = texts[edit.file].replace(edit.old, edit.new)
        for path, text in texts.items():
            compile(text, path, "exec")
