"""`make demo` itself, on the real default models: made on first use where the user's cache lacks them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.process, pytest.mark.llama]


def demo(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NO_COLOR": "1"}
    environment.pop("SYNAPSE_MATRIX", None)
    return subprocess.run(
        [sys.executable, "-m", "synapse_host", "demo", *words],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip


def test_the_demo_does_the_main_job_and_survives_a_killed_worker() -> None:
    done = demo("--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    models = {row["lane"]: row["model"] for row in document["lanes"]}
    assert (models["embed"], models["rerank"], models["generate"]) == ("minilm", "ms-marco", "smollm2")
    similarity = document["embed"]["similarity"]
    # A cat on a mat is nearer to a feline on a rug than to interest rates.
    assert similarity[0][1] > 0.4 > similarity[0][2]
    assert document["rerank"]["order"] == [1, 2, 0]
    assert document["generate"]["text"].strip().startswith("Rome")
    recovery = document["recovery"]
    assert recovery["same_answer"] is True and recovery["killed_pid"] != recovery["worker_pid"]
