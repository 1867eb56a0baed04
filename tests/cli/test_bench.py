"""``synapse bench``: finds its suite or says why not, and hands its flags on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import synapse_host
from synapse_host.cli import bench, main
from tests.cli.conftest import Command, finished
from tests.support.lanes import alive


def test_outside_a_checkout_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(synapse_host, "__file__", str(tmp_path / "site-packages" / "synapse_host" / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "--quick"]) == 2
    said = capsys.readouterr().err
    assert "part of a checkout" in said and "make bench" in said and "Traceback" not in said


def test_its_flags_reach_the_suite_and_its_failure_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[list[str], Path]] = []

    def run(command: list[str], root: Path, seconds: float | None) -> int:
        calls.append((command, root))
        return len(calls) - 1

    monkeypatch.setattr(bench, "run_suite", run)
    out = tmp_path / "out"
    assert main(["bench", "--quick", "--only", "wire", "--out", str(out), "--threads", "1", "--json"]) == 0
    command, cwd = calls[0]
    assert command[:3] == [sys.executable, "-m", "bench"]
    flags = ["--out", str(out), "--only", "wire", "--threads", "1", "--quick", "--json", "--quiet", "--guarded"]
    assert command[3:] == flags
    assert cwd == bench.checkout() and (cwd / "pyproject.toml").is_file()
    assert main(["bench"]) == 1
    calls.pop()
    assert main(["bench", "--json"]) == 1


def test_a_deadline_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    suite = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    real = bench.run_suite
    monkeypatch.setattr(bench, "run_suite", lambda command, root, seconds: real(suite, root, seconds))
    assert main(["bench", "--deadline", "0.1"]) == 5


def test_a_suite_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "END_S", 0.1)
    place = tmp_path / "pid"
    code = f"import os, pathlib, time; pathlib.Path({str(place)!r}).write_text(str(os.getpid())); time.sleep(600)"
    with pytest.raises(subprocess.TimeoutExpired):
        bench.run_suite([sys.executable, "-c", code], tmp_path, 2.0)
    assert not psutil.pid_exists(int(place.read_text()))


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="finds the suite's processes and their signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_command_alone_ends_it_with_all_it_started(cli: Command, number: signal.Signals) -> None:
    with cli.spawn("bench", "--quick", "--only", "wire", "--json") as program:
        end = time.monotonic() + 60
        while len(below := psutil.Process(program.pid).children(recursive=True)) < 2:
            assert program.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        program.send_signal(number)
        if number == signal.SIGTERM:
            done = finished(program)
            assert (done.code, done.err, done.document["error"]["code"]) == (130, "", "interrupted")
            assert not alive(below[0].pid)
        while any(alive(one.pid) for one in below):
            assert time.monotonic() < end
            time.sleep(0.05)
    assert not list((cli.root / "tmp").iterdir())
