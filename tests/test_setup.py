"""What `make` installs: decided by a script of the standard library alone."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts/setup.py"


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
    without = script.stamp()
    assert "cuda-libraries" not in script.extras()
    monkeypatch.setattr(script.shutil, "which", lambda name: f"/bin/{name}" if name == "nvidia-smi" else None)
    assert script.extras().split(",")[-1] == "cuda-libraries"
    assert script.stamp() != without


def test_other_versions_are_another_installation(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = script.stamp()
    other = tmp_path / "constraints.txt"
    other.write_text(script.CONSTRAINTS.read_text().replace("==2", "==3"))
    monkeypatch.setattr(script, "CONSTRAINTS", other)
    assert script.stamp() != before


def test_every_dependency_has_a_tested_version_and_no_origin(script: ModuleType) -> None:
    """A dependency that is added without `make lock` would come in whatever version is served that day."""
    lines = [line for line in script.CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r'[a-z0-9-]+==[\w.]+(; python_version == "3\.1[123]")?', line) for line in lines)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + [
        text for extra in [*script.EXTRAS.split(","), script.NVIDIA] for text in project["optional-dependencies"][extra]
    ]
    for minor in script.SUPPORTED:
        linux = {"platform_system": "Linux", "sys_platform": "linux", "python_version": minor}
        pinned = [found for found in map(Requirement, lines) if found.marker is None or found.marker.evaluate(linux)]
        versions = {found.name: str(found.specifier).removeprefix("==") for found in pinned}
        assert len(versions) == len(pinned)
        for needed in map(Requirement, wanted):
            if needed.marker is None or needed.marker.evaluate(linux):
                assert needed.specifier.contains(versions[re.sub("[-_.]+", "-", needed.name).lower()]), needed


@pytest.mark.parametrize(
    ("cached", "compiles"),
    [
        ("/c/a1/llama_cpp_python-{}-py3-none-linux_x86_64.whl", False),
        ("/c/a1/llama_cpp_python-0.0.1-py3-none-linux_x86_64.whl", True),
        ("/c/a1/llama_cpp_python-{}-cp310-cp310-linux_x86_64.whl", True),
        ("", True),
    ],
)
def test_a_wheel_that_another_python_compiled_is_taken(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, cached: str, compiles: bool
) -> None:
    pin = re.search(r"^llama-cpp-python==(.+)$", script.CONSTRAINTS.read_text(), re.MULTILINE)
    assert pin is not None
    compiled: list[tuple[str, ...]] = []
    listed = SimpleNamespace(stdout=cached.format(pin[1]) + "\n")
    monkeypatch.setattr(script, "version", lambda *arguments: None)
    monkeypatch.setattr(script.subprocess, "run", lambda *arguments, **options: listed)
    monkeypatch.setattr(script, "run", lambda *command: compiled.append(command))
    assert script.compiled_llama("python") == ([] if compiles else ["--find-links=/c/a1"])
    assert bool(compiled) == compiles


@pytest.mark.process
def test_a_python_that_is_none_is_refused_in_one_line(tmp_path: Path) -> None:
    environment = {"PATH": "", "VENV": str(tmp_path / "v"), "PYTHON": "/bin/false"}
    done = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "setup: PYTHON=/bin/false is not a Python 3.11, 3.12 or 3.13 with the module venv\n"
    assert not (tmp_path / "v").exists()
