"""The wheel, installed into a fresh environment outside the checkout: the command is there and embeds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.support import toy_models

ROOT = Path(__file__).parents[1]


def run(*words: str | Path, cwd: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [str(word) for word in words]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.process
@pytest.mark.skipif(os.name == "nt", reason="the fresh environment's programs lie elsewhere")
def test_the_wheel_serves_outside_the_checkout(tmp_path: Path) -> None:
    pytest.importorskip("build", reason="the extra dev isn't installed")
    run(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path / "dist", ROOT, cwd=tmp_path)
    [wheel] = (tmp_path / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"synapse_host/hw_matrix.yaml", "synapse_host/fixtures/minilm.npz"} <= set(names)
    assert not [name for name in names if name.split("/")[0] in ("tests", "bench", "scripts", "docs")]
    env = tmp_path / "env"
    run(sys.executable, "-m", "venv", env, cwd=tmp_path)
    run(env / "bin" / "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    # The dependencies come from the environment of these tests; its path file to the checkout is not followed.
    [site] = (env / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    code = "import engines, synapse_host; print(engines.__path__, synapse_host.__file__)"
    assert str(ROOT) not in run(env / "bin" / "python", "-c", code, cwd=tmp_path)
    toy_models.write_bert(tmp_path / "checkpoint")
    synapse = env / "bin" / "synapse"
    run(synapse, "build", "checkpoint", "bundle", "--formats", "safetensors-package", cwd=tmp_path)
    found = json.loads(run(synapse, "embed", "--model", "./bundle", "--json", "the cat", cwd=tmp_path))
    assert (found["n"], found["dims"], found["engine"]) == (1, 64, "onnx-cpu")
