"""The registry covers every report once, its tests exist, and every guard still stands where it says."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.reports.registry import CANNOT_APPLY, REPORTS, Report

ROOT = Path(__file__).resolve().parents[3]


def test_all_55_reports_are_there_once():
    numbers = [report.number for report in REPORTS] + [item.number for item in CANNOT_APPLY]
    assert sorted(numbers) == list(range(1, 56))
    assert len(CANNOT_APPLY) <= 10 and all(len(item.missing) > 20 for item in CANNOT_APPLY)


def test_every_test_of_a_report_is_registered():
    written = {
        f"{file.relative_to(ROOT).as_posix()}::{node.name}"
        for file in Path(__file__).parent.glob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_report_")
    }
    assert written == {report.test for report in REPORTS}


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: f"{report.number:02}")
def test_a_report_names_its_source_and_its_guard(report: Report):
    file, _, name = report.test.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    (function,) = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
    assert (ast.get_docstring(function) or "").startswith(report.source), "the docstring starts with the report"
    assert report.guards
    for guard in report.guards:
        changed = Counter(edit.file for edit in guard.edits)
        texts = {path: (ROOT / path).read_text() for path in changed}
        for edit in guard.edits:
            assert texts[edit.file].count(edit.old) == 1, f"{guard.where}: {edit.file} no longer has {edit.old!r} once"
            texts[edit.file] = texts[edit.file].replace(edit.old, edit.new)
        for path, text in texts.items():
            compile(text, path, "exec")
