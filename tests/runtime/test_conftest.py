"""The checks around every test can fail: a run of a throw-away test file under tests/conftest.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process
ROOT = Path(__file__).resolve().parents[2]
CONFTEST = """
import tests.conftest as shared
from tests.conftest import *
shared.SETTLE_S = 0.2
shared.missing_device = lambda marker: None if marker == "metal" else f"no {marker} here"
"""
CASES = """
import os, socket, subprocess, threading, time, pytest
kept = []

def test_clean(): pass
def test_descriptor(): kept.append(os.open(__file__, os.O_RDONLY))
def test_socket_collected_late(): socket.socket().detach and socket.socketpair()[0].close()
def test_thread():
    thread = threading.Thread(target=time.sleep, args=(3,), daemon=True); thread.start()
def test_child(): kept.append(subprocess.Popen(["sleep", "5"]))
def test_socket_file(runtime_dir):
    with socket.socket(socket.AF_UNIX) as sock: sock.bind(str(runtime_dir / "x.sock"))
@pytest.mark.leaks_allowed("descriptors")
def test_allowed(): kept.append(os.open(__file__, os.O_RDONLY))
@pytest.mark.cuda
def test_on_cuda(): pass
@pytest.mark.metal
def test_on_metal(): pass
@pytest.mark.metal
def test_on_metal_that_skips(): pytest.skip("changed its mind")
@pytest.mark.windows
def test_on_windows(): pass
@pytest.mark.bench
def test_speed(): pass
def test_end():
    for child in kept:
        if not isinstance(child, int): child.kill(); child.wait()
"""
CONFIG = """
[pytest]
markers =
    cuda: x
    metal: x
    windows: x
    bench: x
"""


def outcomes(directory: Path, *arguments: str) -> tuple[dict[str, str], str, int]:
    (directory / "conftest.py").write_text(CONFTEST)
    (directory / "test_cases.py").write_text(CASES)
    (directory / "pytest.ini").write_text(CONFIG)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "-q", "--import-mode=importlib", *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    found: dict[str, str] = {}
    for status, name in re.findall(r"^(PASSED|FAILED|ERROR) test_cases\.py::(\w+)", result.stdout, re.MULTILINE):
        found[name] = "ERROR" if "ERROR" in (status, found.get(name)) else status
    return found, result.stdout + result.stderr, result.returncode


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are counted through /proc")
def test_leaks_are_found_and_hardware_skips_are_told(tmp_path: Path) -> None:
    found, text, status = outcomes(tmp_path)
    bad = {"test_descriptor", "test_thread", "test_child", "test_socket_file"}
    assert {name for name, outcome in found.items() if outcome == "ERROR"} == bad, text
    for kind in ("descriptors", "threads", "children", "socket files left"):
        assert kind in text
    assert found["test_clean"] == found["test_allowed"] == found["test_socket_collected_late"] == "PASSED"
    assert "no cuda here" in text
    assert "needs Windows" in text
    assert "test_on_cuda" not in found
    assert "test_speed" not in found
    assert status == 1


def test_a_hardware_run_passes_by_no_skip_and_not_by_running_nothing(tmp_path: Path) -> None:
    found, text, status = outcomes(tmp_path, "-m", "cuda or metal", "--hw=cuda", "--hw=metal")
    assert found == {"test_on_cuda": "ERROR", "test_on_metal": "PASSED", "test_on_metal_that_skips": "FAILED"}
    assert "--hw=cuda allows no skip: no cuda here" in text and "changed its mind" in text and status == 1
    found, text, status = outcomes(tmp_path, "-k", "test_clean", "--hw=metal")
    assert found == {"test_clean": "PASSED"} and "no test of metal was executed" in text and status == 1


@pytest.mark.parametrize(("code", "enough"), [("no_neural_engine", True), ("bindings_missing", False)])
def test_mac_cpu_needs_a_mac_and_no_neural_engine(code: str, enough: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import tests.conftest as shared

    answer = subprocess.CompletedProcess([], 2, f'{{"status":"refused","code":"{code}"}}\n', "")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: answer)
    why = shared.missing_device.__wrapped__("mac-cpu")
    assert why is None if enough else code in str(why)
    assert code in str(shared.missing_device.__wrapped__("ane"))
