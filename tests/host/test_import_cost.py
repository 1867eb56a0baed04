"""`import synapse_host` stays cheap: what it pulls in, not how long it takes, is checked here."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIBRARIES = (
    "numpy", "yaml", "tokenizers", "rich", "psutil", "jinja2", "platformdirs", "llama_cpp", "onnxruntime", "onnx",
    "coremltools", "gguf",
)  # fmt: skip
UNWANTED = {
    "import synapse_host": (*LIBRARIES, "asyncio", "msgspec", "engines.runtime"),
    "from synapse_host import Host, SyncHost, HostConfig, SynapseError, Generation, Windows": (
        *(name for name in LIBRARIES if name not in ("psutil", "platformdirs")),
        *("engines.runtime", "engines.llama", "engines.cuda"),
    ),
    "from synapse_host.cli import main\nmain(['--help'])": (*LIBRARIES, "asyncio"),
    # Neither a lane nor a build needs numerics or an engine.
    **{
        f"import synapse_host.{module}": (
            *("numpy", "onnx", "gguf", "llama_cpp", "tokenizers", *more),
            *("engines.runtime", "engines.llama", "engines.cuda", "engines.ane"),
        )
        for module, more in (("supervision.supervisor", ("psutil",)), ("models.builder", ()), ("models.catalogue", ()))
    },
}


@pytest.mark.process
@pytest.mark.parametrize("statement", UNWANTED, ids=lambda statement: statement.split()[1])
def test_an_import_brings_nothing_heavy_along(statement: str) -> None:
    script = f"{statement}\nimport sys\nprint(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert not set(done.stdout.split()).intersection(UNWANTED[statement])
