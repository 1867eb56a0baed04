"""The page: whole without a network, right about what failed, safe against names with markup."""

from __future__ import annotations

import re
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engines.bundle.fixtures import Reference
from synapse_host.certificates.document import Fault
from synapse_host.certification import report
from tests.support.evidence import DIGEST, embed_inputs, evidence, fixture, function, placement

VOID = {"meta", "br", "circle", "line", "rect"}


class Balance(HTMLParser):
    """Collects tags; every one that opens must close."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def balanced(page: str) -> Balance:
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    return parser


@pytest.mark.parametrize(
    ("kind", "plots"),
    [
        ({"task": "embed"}, 3),
        ({"task": "rerank", "dtype": "int8"}, 3),
        ({"task": "generate"}, 1),
        ({"task": "embed", "ane": True}, 3),
        ({"fixture": None, "inputs": None, "tokens": []}, 0),
    ],
)
def test_every_kind_of_document_becomes_a_whole_page(kind: dict[str, Any], plots: int) -> None:
    document = evidence(**kind)
    page = report.render(document)
    assert balanced(page).seen.count("svg") == plots
    assert document.verdict in page
    for gate in document.gates:
        assert f"<code>{gate.name}</code>" in page
    # Self-contained: nothing is fetched, nothing runs.
    assert not re.search(r"<(script|link|img|iframe)|https?:|@import|url\(", page)


def test_what_failed_is_said_first() -> None:
    page = report.render(evidence(inputs=embed_inputs(cosine=[0.5] * 260)))
    assert "Not met: agreement with the reference." in page
    assert "What to do" in page and "synapse models verify" in page
    balanced(page)
    page = report.render(evidence(inputs=None, fault=Fault("engine_crashed", "killed by SIGKILL", "singles")))
    assert "The run ended during singles: killed by SIGKILL" in page and "docs/operations.md" in page
    assert "What to do" not in report.render(evidence())


@pytest.mark.parametrize("origin", report.ORIGINS)
def test_the_page_says_whose_reference_it_was_and_from_which_weights(origin: str) -> None:
    by = Reference("transformers", "5.24.0", "float64", DIGEST, "int8")
    page = unescape(report.render(evidence(fixture=fixture(origin=origin, computed_by=by))))
    assert page.count(report.ORIGINS[origin]) == 2
    assert "transformers 5.24.0" in page and "in int8, whose rounding is part of the reference" in page


def test_placement_has_its_table() -> None:
    page = report.render(
        evidence(ane=True, placement=placement(functions=[function("s128"), function("s512", ane=80, cpu=20)]))
    )
    assert "s512" in page and "too many" in page
    page = report.render(evidence(ane=True, placement=placement(functions=[], reason="no Core ML here")))
    assert "No table: no Core ML here" in page


def test_names_with_markup_stay_text() -> None:
    document = evidence()
    evil = msgspec.structs.replace(document, lane="<script>alert(1)</script>")
    page = report.render(evil)
    assert "<script>" not in page and "&lt;script&gt;" in page


def test_points_stay_inside_the_frame() -> None:
    points = [(1.0, 1e-9), (512.0, 0.5), (3.0, 1e-3)]
    for plot in (
        report.scatter("t", points, x="x", y="y", log=True, allowed=1e-3),
        report.scatter("t", points, x="x", y="y", same=True),
        report.scatter("t", [(1.0, 1.0)], x="x", y="y"),
        report.scatter("t", [(0.0, 0.0)], x="x", y="y"),
    ):
        ticks = [place for axis in ("across", "up", "allowed") for place, _ in plot[axis]]
        assert plot["points"] and len(ticks) >= 4
        assert all(-1e-9 <= place <= 1 + 1e-9 for place in (*ticks, *(n for point in plot["points"] for n in point)))


def test_without_jinja2_there_is_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert report.write(tmp_path / "e.html", evidence()) is None and not list(tmp_path.iterdir())
