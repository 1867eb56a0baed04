"""A command in odd surroundings: closed or full outputs, other encodings, a folder that is gone, signals."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.cli.conftest import Command, finished

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(os.name == "nt", reason="Unix files, descriptors and encodings"),
]
EMBED = ("embed", "--model", "toy", "a")


def shell(redirect: str) -> list[str]:
    """Return the program that runs a command with a redirection."""
    return ["/bin/sh", "-c", f'exec "$@" {redirect}', "sh"]


# --- outputs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "redirect"),
    [
        *((EMBED, redirect) for redirect in (">&-", "2>&-", "<&- >&- 2>&-")),
        (EMBED[:-1], "<&- >&- 2>&-"),
        (["models"], ">&-"),
    ],
)
def test_closed_descriptors(cli: Command, words: tuple[str, ...], redirect: str) -> None:
    done = cli(*words, prefix=shell(redirect))
    assert done.code == (2 if words == EMBED[:-1] else 0)
    if ">&-" not in redirect.replace("2>&-", "") and done.code == 0:
        assert done.out


@pytest.mark.parametrize("stdout", ["full", "closed pipe"])
@pytest.mark.parametrize("words", [EMBED, ("embed", "--model", "none", "a", "--json"), ("models", "--json")])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_outputs_that_take_nothing(cli: Command, words: tuple[str, ...], stdout: str) -> None:
    if stdout == "full":
        done = cli(*words, prefix=shell("> /dev/full"))
        assert done.code in (1, 2) and "No space left on device" in done.err
        return
    with cli.started(*words) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read().replace("synapse: 1 x 8 from toy on scripted (lane embed)\n", "") == ""
        assert process.wait(60) in (1, 2)


def test_another_encoding_of_stdout(cli: Command) -> None:
    cli.bundle("judge", task="rerank")
    for options in ([], ["--json"]):
        done = cli("rerank", "--model", "judge", *options, "query", "日本", PYTHONIOENCODING="ascii")
        assert "internal error" not in done.err + done.out and done.out.isascii()
    done = cli("embed", "--model", "日本", "--json", "a", PYTHONIOENCODING="ascii")
    assert "日本" in done.document["error"]["message"]
    # A file name of bytes comes as half surrogate pairs, which stdout can't encode.
    done = cli("embed", "--json", "--model", os.fsdecode(b"./\xff"), "a")
    assert (done.code, done.err) == (2, "") and done.document["error"]["message"].startswith("./\\udcff ")


def test_a_current_folder_that_is_gone(cli: Command) -> None:
    (cli.root / "gone").mkdir()
    prefix = ["/bin/sh", "-c", 'cd gone && rmdir ../gone && exec "$@"', "sh"]
    done = cli(*EMBED, "--runtime-dir", "rt", prefix=prefix)
    assert (done.code, done.err) == (2, "synapse: the current folder is gone: No such file or directory\n")


# --- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("burst", [["SIGTERM"], ["SIGHUP"], ["SIGINT"] * 9, ["SIGTERM", "SIGINT", "SIGHUP"]])
def test_signals_leave_nothing_behind(cli: Command, burst: list[str]) -> None:
    with cli.held(*EMBED) as command:
        for name in burst:
            command.send_signal(getattr(signal, name))
            time.sleep(0.03)
        done = finished(command)
    # A signal that comes when the interpreter is ending already kills it: a shell shows SIGINT as 130 as well.
    assert done.err == "synapse: interrupted\n"
    assert done.code == 130 or (len(burst) > 1 and done.code < 0)


@pytest.mark.parametrize(
    ("module", "json_too"),
    [("argparse", False), ("synapse_host.cli.models", True), ("engines.bundle.manifest", False)],
)
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
    ignore = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    done = cli(*EMBED, prefix=[sys.executable, "-c", ignore])
    assert done.code == 1 and "(SIGKILL)" in done.err


def test_an_ignored_signal_stays_ignored(cli: Command) -> None:
    with cli.held(*EMBED, "--json", prefix=["/bin/sh", "-c", 'trap "" HUP; exec "$@"', "sh"]) as command:
        command.send_signal(signal.SIGHUP)
        (cli.root / "go").touch()
        done = finished(command)
    assert done.code == 0 and done.document["n"] == 1
