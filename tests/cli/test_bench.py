"""``synapse bench``: finds its suite or says why not, and hands its flags on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import synapse_host
from synapse_host.cli import bench, main


def test_outside_a_checkout_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(synapse_host, "__file__", str(tmp_path / "site-packages" / "synapse_host" / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "--quick"]) == 2
    said = capsys.readouterr().err
    assert "part of a checkout" in said and "make bench" in said and "Traceback" not in said


def test_its_flags_reach_the_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[list[str], Any]] = []

    def run(command: list[str], *, cwd: Path, check: bool, timeout: float | None) -> Any:
        calls.append((command, cwd))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    out = tmp_path / "out"
    assert main(["bench", "--quick", "--only", "wire", "--out", str(out), "--threads", "1", "--json"]) == 0
    command, cwd = calls[0]
    assert command[:3] == [sys.executable, "-m", "tests.benchmarks"]
    assert command[3:] == ["--quick", "--only", "wire", "--out", str(out), "--threads", "1", "--json", "--quiet"]
    assert cwd == bench.checkout() and (cwd / "pyproject.toml").is_file()


def test_a_typo_in_a_matrix_is_told_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("the suite was started")

    monkeypatch.setattr(subprocess, "run", never)
    matrix = tmp_path / "m.yaml"
    matrix.write_text("version: 1\nlains: {}\n")
    assert main(["bench", "--matrix", str(matrix)]) == 2
    assert "m.yaml:2:1: lains: unknown key (did you mean 'lanes'?)" in capsys.readouterr().err
    assert main(["bench", "--matrix", str(tmp_path / "none.yaml")]) == 2


def test_a_suite_that_fails_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    assert main(["bench"]) == 1
    assert main(["bench", "--json"]) == 1


def test_a_deadline_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: Any) -> Any:
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(subprocess, "run", run)
    assert main(["bench", "--deadline", "1"]) == 5
