"""``--deadline`` ends every verb that takes it, with exit code 5."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from synapse_host.certification import run as certification
from synapse_host.cli import VERBS, main, remote
from synapse_host.cli.session import left, limited, run_orderly
from synapse_host.errors import DeadlineExceeded
from synapse_host.worker.listener import RuntimeDirectory
from tests.cli.conftest import Command

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="Unix signals and sockets"),
    # The default method uses the one timer that a process has.
    pytest.mark.timeout(120, method="thread"),
]

TO_A_WORKER = {
    "embed": (("embed", "a"), "EMBED_BATCH", "embed"),
    "rerank": (("rerank", "a", "b"), "RERANK", "rerank"),
    "generate": (("generate", "a", "--max-tokens", "2"), "GENERATE", "generate"),
    "serve": (("serve", "--port", "0", "--load", "toy"), "LOAD", "embed"),
    "search": (("search", "x.npy", "a"), "EMBED_BATCH", "embed"),
}
TO_A_HOST = {
    "ps": ("ps",), "ps --metrics": ("ps", "--metrics"), "ping": ("ping",), "logs": ("logs",),
    "logs -f": ("logs", "-f"), "load": ("load", "toy"), "unload": ("unload", "toy"),
    "probe": ("probe", "embed"),
}  # fmt: skip
WHOLE = {
    "build": ("build", "a", "b"), "models": ("models",), "matrix": ("matrix", "check"), "doctor": ("doctor",),
    "certify": ("certify", "embed"), "certificates": ("certificates",), "demo": ("demo",),
}  # fmt: skip
ELSEWHERE = {"bench"}  # test_bench.py


def test_no_verb_is_forgotten() -> None:
    assert {*TO_A_WORKER, *(words[0] for words in TO_A_HOST.values()), *WHOLE, *ELSEWHERE} == set(VERBS)


@pytest.mark.process
@pytest.mark.parametrize("verb", TO_A_WORKER)
def test_of_a_request(cli: Command, verb: str) -> None:
    words, message, task = TO_A_WORKER[verb]
    if verb == "search":
        assert cli("embed", "--model", "toy", "--out", "x.npy", "a").code == 0
    cli.setup({"rules": [{"on": message, "do": [{"sleep": 60}]}]}).bundle("toy", task=task)
    more = ("--runtime-dir", str(cli.root / "rt")) if verb == "serve" else ("--model", "toy")
    done = cli(*words, *more, "--json", "--deadline", "1.5")
    assert done.code == 5, done
    assert json.loads(done.out)["error"]["code"] == "deadline_exceeded"


@pytest.mark.process
@pytest.mark.parametrize("more", [(), ("--out", "x.npy")])
def test_the_command_ends_while_a_huge_text_is_still_tokenised(cli: Command, more: tuple[str, ...]) -> None:
    (cli.root / "long.jsonl").write_text(json.dumps("a " * 20_000) + "\n")
    (cli.root / "sitecustomize.py").write_text(
        "import time\nfrom synapse_host.text.tokenizer import TextTokenizer\n"
        "TextTokenizer.rows = lambda *_, **__: time.sleep(600)\n"
    )
    cli.environment["PYTHONPATH"] = f"{cli.root}:{Path(__file__).parents[2]}"
    done = cli("embed", "--model", "toy", "--file", "long.jsonl", "--deadline", "0.5", *more)
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
        said = command.stderr.read()
        assert command.wait(60) == 5
    assert said == "synapse: the deadline of 0.5 s passed while the input was read\n"


def test_what_remains_of_it_is_what_a_request_gets() -> None:
    now = time.monotonic()
    assert left(argparse.Namespace(deadline=None, started=now)) is None
    assert 58 < (left(argparse.Namespace(deadline=60.0, started=now - 1)) or 0) <= 59
    assert left(argparse.Namespace(deadline=1.0, started=now - 9)) == 0.001


@pytest.fixture
def silent() -> Iterator[Path]:
    """Yield the runtime directory of a host that takes connections and never answers."""
    runtime = RuntimeDirectory.open(None)
    listener = runtime.listen_control()
    yield runtime.path
    listener.close()
    runtime.close()


@pytest.mark.parametrize("name", TO_A_HOST)
def test_of_what_is_asked_of_a_host(
    silent: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    if name in ("load", "ping", "probe"):
        # The host is told this deadline and has a while longer to say so.
        monkeypatch.setattr(remote, "ANSWER_S", 0.2)
    else:
        monkeypatch.setattr(remote, "ANSWER_S", 600.0)
    assert main([*TO_A_HOST[name], "--runtime-dir", str(silent), "--deadline", "0.2"]) == 5
    assert "deadline passed before the host" in capsys.readouterr().err


@pytest.mark.parametrize("verb", WHOLE)
def test_of_a_whole_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str) -> None:
    cleaned = []

    def run(*_: Any) -> int:
        try:
            time.sleep(60)
        finally:
            cleaned.append(verb)
        return 0

    monkeypatch.setattr(import_module(f"synapse_host.cli.{VERBS[verb].module or verb}"), "run", run)
    before = signal.getsignal(signal.SIGALRM)
    assert main([*WHOLE[verb], "--deadline", "0.2"]) == 5
    assert capsys.readouterr().err == f"synapse: the deadline of 0.2 s passed while synapse {verb} ran\n"
    assert cleaned == [verb]
    assert signal.getsignal(signal.SIGALRM) == before and signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_of_a_certification(monkeypatch: pytest.MonkeyPatch, cli: Command, capsys: pytest.CaptureFixture[str]) -> None:
    ended = []

    async def endless(*_: Any, **__: Any) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            # What an open host needs to close comes after the alarm.
            await asyncio.sleep(0.01)
            ended.append(True)

    monkeypatch.setattr(certification, "certify", endless)
    cli.setup().bundle("toy")
    words = cli.arguments("certify", "embed", "--model", str(cli.root / "models" / "toy"), "--deadline", "0.3")
    assert main(words[3:]) == 5
    assert ended == [True] and "the deadline of 0.3 s passed" in capsys.readouterr().err


def test_ctrl_c_before_a_deadline_is_no_deadline() -> None:
    async def interrupted() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)

    with pytest.raises(KeyboardInterrupt), limited(60, "it waited"):
        run_orderly(interrupted())
    with pytest.raises(KeyboardInterrupt), limited(60, "it waited"):
        raise KeyboardInterrupt


def test_a_deadline_in_a_deadline_changes_nothing() -> None:
    with pytest.raises(DeadlineExceeded, match="while the outer ran"), limited(0.2, "the outer ran"):
        with limited(0.01, "the inner ran"):
            pass
        time.sleep(60)


def test_off_the_main_thread_there_is_none() -> None:
    done = []

    def work() -> None:
        with limited(0.01, "it ran"):
            time.sleep(0.05)
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
