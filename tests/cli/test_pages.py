"""How pages look on terminals of any width: tables, hanging lines, help, the line that tells of a long request."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import Any

import pytest

from synapse_host.cli import VERBS, main
from synapse_host.cli.console import Console, explain
from synapse_host.cli.operate import busy_line, lanes_page
from synapse_host.cli.session import watched
from synapse_host.errors import EngineCrashed

LANE = {
    "state": "idle", "model": "minilm", "engine": "llama-cpu", "worker_pid": 4121, "generation": 1, "rss_mb": 91,
    "age_s": 1.2, "models": ["minilm"], "strikes": 0, "quarantine_remaining_s": 0.0,
}  # fmt: skip
SHUT = {
    **LANE, "state": "quarantined", "worker_pid": None, "rss_mb": None, "age_s": None, "models": [], "strikes": 2,
    "quarantine_remaining_s": 431.0, "last_fault": {"signal": "SIGABRT", "cause": "exit", "stage": "embed"},
}  # fmt: skip
REMARK = "for another 431 s, last: SIGABRT during embed"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Any:
    def of(width: int) -> Console:
        monkeypatch.setenv("COLUMNS", str(width))
        console = Console()
        console.interactive = True
        return console

    return of


@pytest.mark.parametrize("width", [200, 80, 60, 45])
def test_the_table_of_lanes_fits(terminal: Any, capsys: pytest.CaptureFixture[str], width: int) -> None:
    lanes_page({"lanes": {"embed": LANE, "rerank": SHUT}}, terminal(width))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert REMARK in " ".join(" ".join(lines).split())
    assert all(word in lines[0] for word in ("LANE", "STATE", "MODEL"))
    assert ("ENGINE" in lines[0], "MEMORY" in lines[0]) == (width > 45, width > 60)


def test_off_a_terminal_nothing_is_folded(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    progress = {"stage": "load", "completed": 7, "running_s": 1.0}
    loading = {**LANE, "state": "loading", "progress": progress}
    lanes_page({"lanes": {"embed": LANE, "rerank": SHUT, "generate": loading}}, Console())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[2].endswith(REMARK) and "load, 7 units done" in lines[3]


def test_a_long_line_hangs_below_its_text(terminal: Any, capsys: pytest.CaptureFixture[str]) -> None:
    terminal(40).hang("  1 engine  ", "a reason that is too long for one line of forty", 12)
    assert capsys.readouterr().out == ("  1 engine  a reason that is too long\n            for one line of forty\n")
    terminal(40).hang("  ", "", 2)
    assert capsys.readouterr().out == "  \n"
    # With hardly any room left the terminal folds better than we do.
    terminal(25).hang("  1 engine  ", "words " * 10, 12)
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize("verb", VERBS)
def test_help_fits_the_terminal(verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main([verb, "--help"]) == 0
    page, _, examples = capsys.readouterr().out.partition("examples:\n")
    for option in ("--json", "--quiet", "--matrix", "--models-dir", "--runtime-dir", "--deadline"):
        assert option in page
    own = "starts a host and a worker of its own and stops them at the end"
    assert (own in " ".join(page.split())) is (verb in ("embed", "rerank", "generate"))
    assert max(map(len, page.splitlines())) <= 60
    # To be copied as they are.
    assert examples.startswith(f"  synapse {verb}")


class _Host:
    """A host whose one lane has finished seven units."""

    def health(self) -> dict[str, Any]:
        progress = {"stage": "generate", "completed": 7, "running_s": 3.0}
        return {"lanes": {"generate": {"state": "serving", "model": "m", "progress": progress}}}


@pytest.mark.parametrize("quick", [True, False])
def test_a_long_request_tells_how_far_it_is(quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    finish = asyncio.Event()

    def show(text: str) -> None:
        shown.append(text)
        finish.set()

    @contextmanager
    def status() -> Any:
        yield show

    console = Console()
    console.bars = True
    monkeypatch.setattr(console, "status", status)
    monkeypatch.setattr("synapse_host.cli.session.PATIENCE_S", 60.0 if quick else 0.0)

    async def work() -> str:
        if not quick:
            await finish.wait()
        return "answer"

    assert asyncio.run(watched(_Host(), console, work())) == "answer"  # type: ignore[arg-type]
    assert shown == ([] if quick else ["generate: 7 steps done, 3 s"])


def test_an_error_of_a_watched_request_is_its_own() -> None:
    async def work() -> None:
        raise ValueError("of the request")

    with pytest.raises(ValueError, match="of the request"):
        asyncio.run(watched(_Host(), Console(), work()))  # type: ignore[arg-type]


def test_what_a_lane_does_without_progress() -> None:
    assert busy_line({"embed": {"state": "loading", "model": "m"}}) == "embed: starting a worker for m"
    assert busy_line({"embed": {"state": "idle", "model": "m"}}) == "waiting"
    progress = {"stage": "load", "completed": 0, "running_s": 1.0}
    assert busy_line({"embed": {"state": "loading", "model": "m", "progress": progress}}) == "embed load: 1 s"


def test_a_traceback_shows_its_words_not_its_marks() -> None:
    tail = "".join(f"[stderr] line {n}\n[stderr]   ^^^^~~~^^^\n" for n in range(9))
    error = EngineCrashed("died", details={"log_tail": tail})
    assert explain(error).splitlines()[1:] == [f"         | line {n}" for n in range(1, 9)]
