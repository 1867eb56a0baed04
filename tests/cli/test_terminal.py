"""Words of workers, models and files on a person's terminal: none of their characters steers it."""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from pathlib import Path

import pytest

from synapse_host.cli.console import Console
from tests.cli.conftest import Command
from tests.cli.test_serve import running, until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no pty")

TITLE = "\x1b]0;owned\x07"
COLOURS = re.compile(r"\x1b\[(?:[0-9;]*)m")


def steering(text: str) -> str:
    """Return what of a screen is neither text nor one of the colours and cursor moves that we make ourselves."""
    plain = re.sub(r"\x1b\[\?25[hl]|\x1b\[\d*[AK]|\r", "", COLOURS.sub("", text))
    return "".join(char for char in plain if char not in "\n\t" and unicodedata.category(char) in ("Cc", "Cf"))


@pytest.mark.process
def test_the_last_words_of_a_worker(cli: Command) -> None:
    cli.setup({"rules": [{"on": "EMBED_BATCH", "do": [{"stderr": f"{TITLE}boom\x9b2J"}, {"abort": True}]}]})
    code, seen = cli.on_terminal("embed", "--model", "toy", "a")
    assert code == 1 and "| \\x1b]0;owned\\x07boom" in seen, seen
    assert steering(seen) == ""
    code, seen = cli.on_terminal("embed", "--model", "toy", "--json", "a")
    assert json.loads(seen)["error"]["details"]["log_tail"].startswith(f"[stderr] {TITLE}boom") and steering(seen) == ""
    cli.environment["SYNAPSE_LOG"] = "info"
    code, seen = cli.on_terminal("embed", "--model", "toy", "a")
    assert "stderr: \\x1b]0;owned\\x07boom" in seen and steering(seen) == ""


@pytest.mark.process
def test_logs_and_whatever_else_is_said_of_a_running_host(cli: Command, runtime_dir: Path) -> None:
    cli.setup({"ready": [{"stderr": f"{TITLE}hello"}]})
    with running(cli, runtime_dir, "--load", "toy") as host:
        where = ("--runtime-dir", str(runtime_dir))
        until(lambda: "hello" in host("logs").out)
        code, seen = cli.on_terminal("logs", *where)
        assert code == 0 and "embed [stderr] \\x1b]0;owned\\x07hello" in seen and steering(seen) == ""
        code, seen = cli.on_terminal("load", f"{TITLE}toy", *where)
        assert code == 2 and "\\x1b]0;owned" in seen and steering(seen) == ""
        # Through a pipe the bytes stay what they were: another program reads them.
        assert host("logs").out == f"embed [stderr] {TITLE}hello\n"
        document = host("logs", "--json").document
        assert {"host", "lanes", "workers"} < set(document) and set(document["lanes"]) == {"embed"}
        assert document["logs"] == {"embed": [f"embed [stderr] {TITLE}hello"]}


@pytest.mark.process
def test_names_and_files(cli: Command) -> None:
    for words in (["embed", "--model", f"{TITLE}m", "a"], ["embed", "--file", f"{TITLE}f", "--model", "toy"]):
        code, seen = cli.on_terminal(*words)
        assert code == 2 and "owned" in seen and steering(seen) == ""
    broken = cli.root / "models" / "broken"
    broken.mkdir()
    (broken / "manifest.json").write_text(json.dumps({TITLE: 1}))
    for words in (["models"], ["doctor"], ["models", "verify", "broken"]):
        _, seen = cli.on_terminal(*words)
        assert "broken" in seen and steering(seen) == "", words


@pytest.mark.process
@pytest.mark.parametrize("asked", [True, False])
def test_no_color_means_none(cli: Command, asked: bool) -> None:
    code, seen = cli.on_terminal("matrix", "explain", **({"NO_COLOR": "1"} if asked else {}))
    assert code == 0 and "scripted" in seen
    assert ("\x1b[3" in seen or "\x1b[1" in seen) is not asked, seen


def test_our_colours_stay_and_those_of_others_don_t(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    console.colour = console.interactive = True
    console.line(console.style("red \x1b[8m", "red") + " \u202egnp.exe \x7f\ttab")
    assert capsys.readouterr().out == "\x1b[31mred \\x1b[8m\x1b[0m \\u202egnp.exe \\x7f\ttab\n"
