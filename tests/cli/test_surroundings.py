"""A command in odd surroundings: closed or full outputs, other encodings, a folder that is gone, signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.conftest import Command

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(os.name == "nt", reason="Unix files, descriptors and encodings"),
]


def shell(cli: Command, words: list[str], redirect: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command with a redirection of the shell's."""
    inherited, mark = cli.env()
    done = subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {redirect}', "sh", *cli.arguments(*words)],
        env={**inherited, **environment}, capture_output=True, text=True, timeout=120, check=False, cwd=cli.root,
    )  # fmt: skip
    cli.check_clean(mark)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr
    return done


# --- outputs ---------------------------------------------------------------------------------------------------------


EMBED = ["embed", "--model", "toy", "a"]


@pytest.mark.parametrize(
    ("words", "redirect"),
    [
        *((EMBED, redirect) for redirect in ("<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-")),
        (EMBED[:-1], "<&- >&- 2>&-"),
        (["models"], ">&-"),
    ],
)
def test_closed_descriptors(cli: Command, words: list[str], redirect: str) -> None:
    done = shell(cli, words, redirect)
    assert done.returncode == (2 if words == ["embed", "--model", "toy"] else 0)
    if ">&-" not in redirect.replace("2>&-", "") and done.returncode == 0:
        assert done.stdout


@pytest.mark.parametrize("redirect", ["> /dev/full", "| true"])
@pytest.mark.parametrize(
    "words", [["embed", "--model", "toy", "a"], ["embed", "--model", "none", "a", "--json"], ["models", "--json"]]
)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_outputs_that_take_nothing(cli: Command, words: list[str], redirect: str) -> None:
    if redirect.startswith("|"):
        inherited, mark = cli.env()
        first = subprocess.Popen(
            cli.arguments(*words), env=inherited, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=cli.root
        )
        assert first.stdout is not None and first.stderr is not None
        first.stdout.close()
        said = first.stderr.read().decode()
        first.stderr.close()
        code = first.wait(60)
        cli.check_clean(mark)
        assert said.replace("synapse: 1 x 4 from toy on scripted (lane embed)\n", "") == ""
    else:
        done = shell(cli, words, redirect)
        said, code = done.stderr, done.returncode
        assert "the result can't be written: No space left on device" in said or "No space left" in said
    assert "Traceback" not in said and "Exception ignored" not in said
    assert code in (1, 2)


def test_another_encoding_of_stdout(cli: Command) -> None:
    cli.bundle("judge", task="rerank").setup({"rules": []})
    for options in ([], ["--json"]):
        done = shell(cli, ["rerank", "--model", "judge", *options, "query", "日本"], "", PYTHONIOENCODING="ascii")
        assert "internal error" not in done.stderr + done.stdout
        assert done.stdout.isascii()
    done = shell(cli, ["embed", "--model", "日本", "--json", "a"], "", PYTHONIOENCODING="ascii")
    assert "日本" in json.loads(done.stdout)["error"]["message"]


def test_bytes_that_are_no_text_in_a_message(cli: Command) -> None:
    """A file name of bytes comes as half surrogate pairs, which stdout can't encode."""
    inherited, mark = cli.env()
    words: list[str | bytes] = [*cli.arguments("embed", "--json"), "--model", b"./\xff", "a"]
    done = subprocess.run(words, env=inherited, capture_output=True, timeout=60, check=False, cwd=cli.root)
    cli.check_clean(mark)
    assert done.returncode == 2 and done.stderr == b""
    assert json.loads(done.stdout)["error"]["message"].startswith("./\\udcff ")


def test_a_current_folder_that_is_gone(cli: Command) -> None:
    (cli.root / "gone").mkdir()
    inherited, mark = cli.env()
    words = [*cli.arguments("embed", "--model", "toy"), "--runtime-dir", "rt", "a"]
    done = subprocess.run(
        ["/bin/sh", "-c", 'cd gone && rmdir ../gone && exec "$@"', "sh", *words],
        env=inherited, capture_output=True, text=True, timeout=60, check=False, cwd=cli.root,
    )  # fmt: skip
    cli.check_clean(mark)
    assert done.returncode == 2 and done.stderr == "synapse: the current folder is gone: No such file or directory\n"


# --- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "burst", [["SIGINT"], ["SIGTERM"], ["SIGHUP"], ["SIGINT"] * 9, ["SIGTERM", "SIGINT", "SIGHUP"]]
)
def test_signals_leave_nothing_behind(cli: Command, burst: list[str]) -> None:
    started = cli.root / "started"
    # Deaf to SHUTDOWN: the command is ending for a while, and signals go on coming.
    script = {"rules": [{"on": "EMBED_BATCH", "do": [{"touch": str(started)}, {"sleep": 60}]}]}
    cli.setup(script)
    inherited, mark = cli.env()
    command = subprocess.Popen(
        cli.arguments("embed", "--model", "toy", "a"), env=inherited, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    while not started.exists() and command.poll() is None:
        time.sleep(0.01)
    for name in burst:
        command.send_signal(getattr(signal, name))
        time.sleep(0.03)
    _, said = command.communicate(timeout=30)
    cli.check_clean(mark)
    # A signal that comes when the interpreter is ending already kills it: a shell shows SIGINT as 130 as well.
    assert said == b"synapse: interrupted\n"
    assert command.returncode == 130 or (len(burst) > 1 and command.returncode < 0)


@pytest.mark.parametrize("module", ["argparse", "synapse_host.cli.models", "engines.bundle.manifest"])
@pytest.mark.parametrize("json_too", [False, True])
def test_an_interrupt_while_a_command_only_starts(cli: Command, module: str, json_too: bool) -> None:
    """It comes while that module is imported: by the command itself, for its verb, or for the verb's."""
    (cli.root / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    cli.environment["PYTHONPATH"] = f"{cli.root}:{Path(__file__).parents[2]}"
    done = cli("models", *(["--json"] if json_too else []))
    assert done.code == 130
    if json_too:
        assert done.document["error"]["code"] == "interrupted" and done.err == ""
    else:
        assert (done.out, done.err) == ("", "synapse: interrupted\n")


def test_a_parent_that_ignores_the_ends_of_children(cli: Command) -> None:
    """sudo-project/sudo#98: ignoring SIGCHLD is inherited, and the kernel would keep no status of ours."""
    cli.setup({"rules": [{"on": "EMBED_BATCH", "do": [{"signal": "SIGKILL"}]}]})
    inherited, mark = cli.env()
    ignore = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", ignore, *cli.arguments(*EMBED)],
        env=inherited, capture_output=True, text=True, timeout=60, check=False, cwd=cli.root,
    )  # fmt: skip
    cli.check_clean(mark)
    assert done.returncode == 1 and "(SIGKILL)" in done.stderr


def test_an_ignored_signal_stays_ignored(cli: Command) -> None:
    started, go = cli.root / "started", cli.root / "go"
    cli.setup({"rules": [{"on": "EMBED_BATCH", "do": [{"touch": str(started)}, {"wait_for": str(go)}]}]})
    inherited, mark = cli.env()
    command = subprocess.Popen(
        ["/bin/sh", "-c", 'trap "" HUP; exec "$@"', "sh", *cli.arguments("embed", "--model", "toy", "a", "--json")],
        env=inherited, stdout=subprocess.PIPE,
    )  # fmt: skip
    while not started.exists() and command.poll() is None:
        time.sleep(0.01)
    command.send_signal(signal.SIGHUP)
    go.touch()
    out, _ = command.communicate(timeout=30)
    cli.check_clean(mark)
    assert command.returncode == 0 and json.loads(out)["n"] == 1
