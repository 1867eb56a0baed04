"""The hardware floor, asked through a real driver interface: what is missing is what is named."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rehearsal import libraries


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"CUDASHIM_CC": "12.1"}, "ok"),
        ({"CUDASHIM_DRIVER_API": "12080"}, "cuda_driver_too_old"),
        ({"without": "libcublas.so.13"}, "cuda_runtime_missing:libcublas.so.13"),
        ({"without": "libcuda.so.1"}, "cuda_no_driver"),
    ],
)
def test_the_probes_verdict(settings: dict[str, str], code: str, stubs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "libraries"
    shutil.copytree(stubs, folder)
    if (missing := settings.get("without")) is not None:
        (folder / missing).unlink()
    env = libraries.environment(folder, **{key: value for key, value in settings.items() if key != "without"})
    command = [sys.executable, "-m", "engines.cuda", "--probe-floor"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert json.loads(done.stdout)["code"] == code
    assert done.returncode == (0 if code == "ok" else 2)
