"""What the environment decides: the matrix, and colour."""

from __future__ import annotations

import sys

import pytest

from tests.cli.conftest import Command, Here
from tests.support.small_bundle import write_matrix


def test_the_matrix_of_the_environment_is_taken_and_an_option_wins(
    cli: Command, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = cli.root / "own"
    own.mkdir()
    path = write_matrix(own, lanes={"mine": {"task": "embed", "engines": ["scripted"]}})
    monkeypatch.setenv("SYNAPSE_MATRIX", str(path))
    lanes = [
        [row["lane"] for row in here("matrix", "explain", "--json", *options, bare=True).document["lanes"]]
        for options in ([], ["--matrix", str(cli.matrix)])
    ]
    assert lanes == [["mine"], ["embed", "rerank", "generate"]]


@pytest.mark.skipif(sys.platform == "win32", reason="no pty")
@pytest.mark.parametrize("asked", [True, False])
def test_no_color_means_none_on_a_terminal(cli: Command, asked: bool) -> None:
    code, seen = cli.on_terminal("matrix", "explain", **({"NO_COLOR": "1"} if asked else {}))
    assert code == 0 and "scripted" in seen
    assert ("\x1b[3" in seen or "\x1b[1" in seen) is not asked, seen
