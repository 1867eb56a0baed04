"""What `make` installs: decided by a script of the standard library alone."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts/setup.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_cuda_libraries_come_where_a_driver_is(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 GB that only such a machine needs; a driver installed later changes the stamp, so the next `make` adds them."""
    monkeypatch.setattr(script, "DRIVER", Path("/nowhere"))
    monkeypatch.setattr(script.shutil, "which", lambda name: None)
    without = script._stamp()
    assert "cuda-libraries" not in script._extras()
    monkeypatch.setattr(script.shutil, "which", lambda name: f"/bin/{name}" if name == "nvidia-smi" else None)
    assert script._extras().split(",")[-1] == "cuda-libraries"
    assert script._stamp() != without
