"""What the environment decides: the matrix, and colour."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from tests.cli.conftest import Command
from tests.support.small_bundle import write_matrix


def test_the_matrix_of_the_environment_is_taken_and_an_option_wins(cli: Command) -> None:
    own = cli.root / "own"
    own.mkdir()
    path = write_matrix(own, lanes={"mine": {"task": "embed", "engines": ["scripted"]}})
    environment, _ = cli.env()
    environment["SYNAPSE_MATRIX"] = str(path)
    for options, expected in (([], ["mine"]), (["--matrix", str(cli.matrix)], ["embed", "rerank", "generate"])):
        done = subprocess.run(
            [sys.executable, "-m", "synapse_host", "matrix", "explain", "--json", *options],
            env=environment, capture_output=True, text=True, timeout=60, check=False, cwd=cli.root,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert [f'"lane": "{name}"' in done.stdout or f'"{name}"' in done.stdout for name in expected] == [True] * len(
            expected
        )
        assert ("mine" in done.stdout) is (expected == ["mine"])


@pytest.mark.parametrize("asked", [True, False])
def test_no_color_means_none_on_a_terminal(cli: Command, asked: bool) -> None:
    environment, mark = cli.env()
    environment |= {"TERM": "xterm-256color", "COLUMNS": "120"}
    environment.pop("NO_COLOR", None)
    if asked:
        environment["NO_COLOR"] = "1"
    master, slave = pty.openpty()
    process = subprocess.Popen(
        cli.arguments("matrix", "explain"), env=environment, stdin=slave, stdout=slave, stderr=slave, cwd=cli.root
    )
    os.close(slave)
    seen = b""
    try:
        while chunk := os.read(master, 65536):
            seen += chunk
    except OSError:
        pass  # the other end has gone
    finally:
        process.wait(60)
        os.close(master)
    assert process.returncode == 0 and b"scripted" in seen
    assert (b"\x1b[3" in seen or b"\x1b[1" in seen) is not asked, seen
    cli.check_clean(mark)
