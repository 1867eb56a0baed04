"""Which Python our child programs run with, and what they find."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from synapse_host.errors import BackendMissing
from synapse_host.placement import interpreter, probe

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Unix programs")


@pytest.fixture
def uwsgi(tmp_path: Path) -> str:
    """A program that is no Python, counts its starts and doesn't end."""
    program = tmp_path / "uwsgi"
    program.write_text(f"#!/bin/sh\necho x >> {tmp_path}/started\nsleep 30\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize("own", ["UWSGI", "", None])
def test_inside_another_program_the_environments_own_python_is_taken(
    own: str | None, uwsgi: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sys.executable
    monkeypatch.setattr(sys, "executable", uwsgi if own == "UWSGI" else own)
    assert Path(interpreter.executable()).samefile(real)
    # An environment without a Python of its own, as in a frozen program: typed, and nothing is started.
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "nowhere"))
    with pytest.raises(BackendMissing, match=r"can't be started: this process .*Set SYNAPSE_PYTHON to the"):
        interpreter.executable()
    answers = probe.ask({("llama", "cpu")}, cache=None)
    assert answers["llama:cpu"].code == "probe_not_started" and "SYNAPSE_PYTHON" in answers["llama:cpu"].why
    assert not (tmp_path / "started").exists()
    monkeypatch.setenv("SYNAPSE_PYTHON", real)
    assert interpreter.executable() == real
    monkeypatch.setenv("SYNAPSE_PYTHON", str(tmp_path))
    with pytest.raises(BackendMissing, match="which is no program"):
        interpreter.executable()


def test_a_frozen_program_is_no_python_whatever_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(BackendMissing):
        interpreter.module("engines.llama")


def test_only_installs_of_pythonpath_are_handed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "target" / "msgspec-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", "mine", "target"]))
    assert interpreter.search_path() == {"PYTHONPATH": str(tmp_path / "target")}
    monkeypatch.setenv("PYTHONPATH", "mine")
    assert interpreter.search_path() == {}
