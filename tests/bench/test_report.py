"""The suite's own arithmetic and report: turns, ratios by round, what counts as reached, absent rivals."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import psutil
import pytest

from bench import picture, texts
from bench.__main__ import text
from bench.plan import Plan
from bench.rivals import Missing, Rival, interpreter
from bench.rounds import Row, Spread, interleaved, row


def test_contestants_take_turns_in_a_rotating_order() -> None:
    order: list[str] = []

    async def slow() -> float:
        order.append("a")
        return 2.0

    def fast() -> float:
        order.append("b")
        return 1.0

    figures = asyncio.run(interleaved({"a": slow, "b": fast}, 3))
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert figures == {"a": [2.0, 2.0, 2.0], "b": [1.0, 1.0, 1.0]}


def test_a_ratio_is_made_within_its_round() -> None:
    # The machine was half as fast in the second round: the ratio doesn't notice.
    figures = {"ours": [1.0, 2.0, 1.0], "rival": [3.0, 6.0, 4.0]}
    lower = row(figures, "ours", "rival", group="g", name="n", unit="s", better="lower", target=3.0)
    assert (lower.ratio, lower.reached) == (Spread(3.0, 3.0, 4.0), True)
    higher = row(figures, "ours", "rival", group="g", name="n", unit="1/s", better="higher", target=0.5)
    assert higher.ratio == Spread(1 / 3, 0.25, 1 / 3) and higher.reached is False


@pytest.mark.parametrize(
    ("better", "median", "reached"), [("lower", 4.0, True), ("lower", 6.0, False), ("higher", 6.0, True)]
)
def test_an_absolute_target_is_held_against_our_own_figure(better: str, median: float, reached: bool) -> None:
    line = Row("g", "n", "µs", better, ours=Spread(median, 1, 9), target=5.0, absolute=True)
    assert line.reached is reached and line.to_dict()["target_on"] == "ours"


def test_the_report_shows_every_row_and_escapes_names() -> None:
    lines = [
        row({"a": [1.0], "b": [2.0]}, "a", "b", group="wire", name="echo <4 KiB>", unit="µs", better="lower",
            target=3.0),
        Row("wire", "alone", "%", "lower", ours=Spread(0.1, 0.1, 0.2), target=0.2, absolute=True),
        Row("models", "gone", "texts/s", "higher", rival_name="other", target=2.0, status="not installed"),
        *[
            row({"a": [1e-5], "b": [5e-6]}, "a", "b", group="wire", name=f"l{size}", unit="µs", better="lower",
                scale=1e6, extra={"bytes": size})
            for size in (1024, 4096)
        ],
    ]  # fmt: skip
    document = {
        "made": "now", "quick": True, "seconds": 1.0, "threads": 2, "load": {"before": 5.0, "after": 5.0},
        "machine": {"cpu": "c", "cores": 2, "memory_gb": 1, "system": "s", "python": "3"},
        "rows": [line.to_dict() for line in lines],
    }  # fmt: skip
    page = picture.page(json.loads(json.dumps(document)))
    assert "echo &lt;4 KiB&gt;" in page and "busy with other work" in page
    assert page.count("<svg") == page.count("</svg>") == 1
    parser = HTMLParser()
    parser.feed(page)
    parser.close()
    table = text(document)
    assert "2.00 x [2.00 .. 2.00] b" in table and "target 3 NOT reached" in table
    assert "other: not installed" in table and "target 0.2 reached" in table


def test_texts_have_the_tokens_they_should(tmp_path: Path) -> None:
    # Every plain word is one token, so a text of n tokens has n - 2 words.
    words = {"[CLS]": 0, "##ing": 1, "a": 2, "cat": 3, "dog": 4, "été": 5, "Cat": 6}
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(json.dumps({"model": {"vocab": words}}))
    assert texts.words(tokenizer) == ["cat", "dog"]
    assert [len(line.split()) for line in texts.equal(tokenizer, 3, 10)] == [8, 8, 8]
    mixed = texts.mix(tokenizer, 256)
    lengths = sorted(len(line.split()) + 2 for line in mixed)
    assert lengths[0] >= 6 and lengths[-1] == 256 and 34 <= lengths[128] <= 46
    assert mixed == texts.mix(tokenizer, 256)


def test_a_rival_without_its_environment_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.rivals.ENVIRONMENT", tmp_path / "none")
    assert interpreter("fastembed") is None
    with Plan.make(quick=True) as plan, pytest.raises(Missing, match="make bench-rivals"):
        Rival("fastembed", plan)


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="a parent's death is told by Linux only")
def test_a_killed_suite_leaves_no_spinner() -> None:
    script = "from bench.machine import spinners\nwith spinners(): print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2],
    ) as suite:  # fmt: skip
        assert suite.stdout is not None
        suite.stdout.readline()
        spinning = psutil.Process(suite.pid).children()
        assert spinning
        # They are told of a parent's death from the moment they step back behind everything else.
        while not all(os.sched_getscheduler(one.pid) == os.SCHED_IDLE or one.nice() == 19 for one in spinning):
            time.sleep(0.01)
        suite.kill()
    gone, alive = psutil.wait_procs(spinning, timeout=30)
    assert len(gone) == len(spinning) and not alive
