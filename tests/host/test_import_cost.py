"""`import synapse_host` stays cheap: what it pulls in, not how long it takes, is checked here."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = (
    "numpy", "yaml", "tokenizers", "rich", "psutil", "asyncio", "msgspec", "jinja2", "platformdirs",
    "starlette", "uvicorn", "httpx", "prometheus_client",
    "llama_cpp", "onnxruntime", "onnx", "coremltools", "engines.runtime",
)  # fmt: skip


def loaded(statement: str) -> set[str]:
    script = f"{statement}\nimport sys\nprint(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


@pytest.mark.process
def test_importing_the_package_imports_nothing_heavy() -> None:
    assert not loaded("import synapse_host").intersection(HEAVY)


@pytest.mark.process
def test_importing_the_host_imports_no_engine_and_no_numerics() -> None:
    modules = loaded("from synapse_host import Host, SyncHost, HostConfig, SynapseError, Generation, Windows")
    heavy = {"numpy", "tokenizers", "yaml", "rich", "jinja2", "starlette", "httpx", "llama_cpp", "onnxruntime"}
    assert not modules.intersection(heavy)
    assert not [name for name in modules if name.startswith(("engines.runtime", "engines.llama", "engines.cuda"))]


@pytest.mark.process
@pytest.mark.parametrize("module", ["supervision.supervisor", "models.builder", "models.catalogue"])
def test_neither_a_lane_nor_a_build_needs_numerics_or_an_engine(module: str) -> None:
    modules = loaded(f"import synapse_host.{module}")
    assert not modules.intersection({"numpy", "onnx", "gguf", "llama_cpp", "tokenizers"})
    ours = {name.split(".")[1] for name in modules if name.startswith("engines.")}
    assert ours <= {"bundle", "checkpoint", "protocol", "machine", "finite"}
    assert module != "supervision.supervisor" or "psutil" not in modules


@pytest.mark.process
def test_the_page_of_verbs_needs_no_yaml_and_no_host() -> None:
    modules = loaded("from synapse_host.cli import main\nmain(['--help'])")
    assert not modules.intersection({"numpy", "yaml", "rich", "tokenizers", "psutil", "asyncio", "starlette", "httpx"})
