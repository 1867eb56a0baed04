"""``synapse embed --out`` on a pipe that nobody writes to any more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.small_bundle import write_bundle, write_matrix

pytestmark = [pytest.mark.process, pytest.mark.skipif(os.name == "nt", reason="no SIGINT to another process")]


def test_an_interrupt_ends_a_run_whose_pipe_stands_still(tmp_path: Path) -> None:
    model, matrix = write_bundle(tmp_path / "toy", model_id="toy"), write_matrix(tmp_path)
    pipe = tmp_path / "texts"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "synapse_host", "embed", "--file", str(pipe), "--out", str(tmp_path / "o.npy")]
    run = subprocess.Popen(
        [*command, "--matrix", str(matrix), "--model", str(model)], stderr=subprocess.PIPE, text=True
    )
    try:
        # Opens once the command reads it, so the signal meets the wait.
        with pipe.open("w"):
            run.send_signal(signal.SIGINT)
            _, stderr = run.communicate(timeout=30)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 130, stderr
