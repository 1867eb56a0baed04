"""``--deadline`` ends every verb that takes it, with exit code 5; verbs about a running host: test_remote.py."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from synapse_host.certification import run as certification
from synapse_host.cli import VERBS, main
from synapse_host.cli.session import left, limited, run_orderly
from synapse_host.errors import DeadlineExceeded
from tests.cli import test_remote
from tests.cli.conftest import Command, Here

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="Unix signals and sockets"),
    # The default method uses the one timer that a process has.
    pytest.mark.timeout(120, method="thread"),
]

TO_A_WORKER = {
    "embed": ("embed a", "EMBED_BATCH", "embed"),
    "rerank": ("rerank a b", "RERANK", "rerank"),
    "generate": ("generate a --max-tokens 2", "GENERATE", "generate"),
    "search": ("search x.npy a", "EMBED_BATCH", "embed"),
    "serve": ("serve --port 0 --load toy --runtime-dir rt", "LOAD", "embed"),
}
WHOLE = ("build a b", "models", "matrix check", "doctor", "certify embed", "certificates", "demo")
ELSEWHERE = {"bench", *(words.split()[0] for words in test_remote.VERBS)}


def test_no_verb_is_forgotten() -> None:
    assert {*TO_A_WORKER, *(words.split()[0] for words in WHOLE), *ELSEWHERE} == set(VERBS)


@pytest.mark.process
@pytest.mark.parametrize("verb", TO_A_WORKER)
def test_of_a_request(cli: Command, here: Here, verb: str) -> None:
    words, message, task = TO_A_WORKER[verb]
    if verb == "search":
        assert here("embed", "--model", "toy", "--out", "x.npy", "a").code == 0
    cli.setup({"rules": [{"on": message, "do": [{"sleep": 60}]}]}).bundle("toy", task=task)
    model = () if verb == "serve" else ("--model", "toy")
    done = here(*words.split(), *model, "--json", "--deadline", "0.8")
    assert (done.code, done.document["error"]["code"]) == (5, "deadline_exceeded")
    cli.check_clean()


@pytest.mark.process
@pytest.mark.parametrize("more", [(), ("--out", "x.npy")])
def test_the_command_ends_while_a_huge_text_is_still_tokenised(cli: Command, more: tuple[str, ...]) -> None:
    (cli.root / "sitecustomize.py").write_text(
        "import time\nfrom synapse_host.text.tokenizer import TextTokenizer\n"
        "TextTokenizer.rows = lambda *_, **__: time.sleep(600)\n"
    )
    cli.environment["PYTHONPATH"] = f"{cli.root}:{Path(__file__).parents[2]}"
    done = cli("embed", "--model", "toy", "--deadline", "0.5", "a " * 20_000, *more)
    assert (done.code, done.out) == (5, "")
    assert done.err == "synapse: the deadline passed while the texts were tokenised\n"


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "source"), [(("embed",), "-"), (("embed", "--out", "x.npy"), "pipe"), (("rerank",), "pipe")]
)
def test_it_counts_while_the_input_is_read(cli: Command, words: tuple[str, ...], source: str) -> None:
    """Nobody writes to stdin, or opens the pipe; what remains of it after the input is what the request gets."""
    os.mkfifo(cli.root / "pipe")
    with cli.started(*words, "--model", "toy", "--file", source, "--deadline", "0.5") as command:
        assert command.stderr is not None
        assert command.stderr.read() == "synapse: the deadline of 0.5 s passed while the input was read\n"
        assert command.wait(60) == 5


@pytest.mark.parametrize("words", WHOLE)
def test_of_a_whole_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str) -> None:
    verb, cleaned = words.split()[0], []

    def run(*_: Any) -> int:
        try:
            time.sleep(60)
        finally:
            cleaned.append(verb)
        return 0

    monkeypatch.setattr(import_module(f"synapse_host.cli.{VERBS[verb].module or verb}"), "run", run)
    before = signal.getsignal(signal.SIGALRM)
    assert main([*words.split(), "--deadline", "0.2"]) == 5
    assert capsys.readouterr().err == f"synapse: the deadline of 0.2 s passed while synapse {verb} ran\n"
    assert cleaned == [verb]
    assert signal.getsignal(signal.SIGALRM) == before and signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_of_a_certification(monkeypatch: pytest.MonkeyPatch, cli: Command, here: Here) -> None:
    ended = []

    async def endless(*_: Any, **__: Any) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            # What an open host needs to close comes after the alarm.
            await asyncio.sleep(0.01)
            ended.append(True)

    monkeypatch.setattr(certification, "certify", endless)
    done = here("certify", "embed", "--model", "toy", "--deadline", "0.3")
    assert (done.code, ended) == (5, [True]) and "the deadline of 0.3 s passed" in done.err


def of(seconds: float | None, ago: float = 0.0) -> argparse.Namespace:
    """The arguments of a command that began *ago*."""
    return argparse.Namespace(deadline=seconds, started=time.monotonic() - ago)


def test_what_remains_of_it_is_what_a_request_gets() -> None:
    assert left(of(None)) is None and left(of(1.0, ago=9)) == 0.001
    assert 58 < (left(of(60.0, ago=1)) or 0) <= 59


def test_ctrl_c_before_a_deadline_is_no_deadline() -> None:
    async def interrupted() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)

    with pytest.raises(KeyboardInterrupt), limited(of(60), "it waited"):
        run_orderly(interrupted())
    with pytest.raises(KeyboardInterrupt), limited(of(60), "it waited"):
        raise KeyboardInterrupt


def test_a_deadline_in_a_deadline_changes_nothing() -> None:
    with pytest.raises(DeadlineExceeded, match="while the outer ran"), limited(of(0.2), "the outer ran"):
        with limited(of(0.01), "the inner ran"):
            pass
        time.sleep(60)


def test_off_the_main_thread_there_is_none() -> None:
    done = []

    def work() -> None:
        with limited(of(0.01), "it ran"):
            time.sleep(0.05)
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
