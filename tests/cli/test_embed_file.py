"""Two runs never write one ``--out``."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from synapse_host.bulk.output import alone
from synapse_host.errors import InvalidRequest
from tests.cli.conftest import Command


@pytest.mark.process
def test_a_second_run_on_one_file_is_refused_in_one_line(cli: Command) -> None:
    started, out = cli.root / "started", cli.root / "x.npy"
    cli.setup(
        {"rules": [{"on": "EMBED_BATCH", "do": [{"touch": str(started)}, {"wait_for": str(cli.root / "go")}]}]}
    ).bundle("toy")
    environment, mark = cli.env()
    arguments = cli.arguments("embed", "--model", "toy", "--out", str(out), "a", "b")
    with subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as first:
        limit = time.monotonic() + 60
        while not started.exists() and first.poll() is None and time.monotonic() < limit:
            time.sleep(0.01)
        (cli.root / "link.npy").symlink_to(out)
        for place in (out, cli.root / "link.npy"):
            words = cli.arguments("embed", "--model", "toy", "--out", str(place), "b", "a")
            second = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=60)
            assert second.returncode == 2 and second.stdout == ""
            assert second.stderr.startswith(f"synapse: {place} is being written by pid {first.pid} (synapse, started ")
            assert second.stderr.count("\n") == 1
        (cli.root / "go").touch()
        assert first.wait(60) == 0
    assert np.load(out).shape == (2, 8)
    assert sorted(path.name for path in cli.root.glob("x.npy*")) == ["x.npy", "x.npy.meta.json"]
    cli.check_clean(mark)


@pytest.mark.process
def test_an_out_that_is_a_link_is_written_through_it(cli: Command) -> None:
    """microsoft/terminal#10787: the large disk's file behind the link would be left stale."""
    (cli.root / "big").mkdir()
    target, link = cli.root / "big" / "o.npy", cli.root / "o.npy"
    for step in ("dangling", "again"):
        if step == "dangling":
            link.symlink_to(target)
        done = cli("embed", "--model", "toy", "--out", "o.npy", "--json", "a", "b")
        assert done.code == 0 and done.document["out"] == "o.npy"
        assert link.is_symlink() and np.load(target).shape == (2, 8)
    assert sorted(path.name for path in (cli.root / "big").iterdir()) == ["o.npy", "o.npy.meta.json"]
    (cli.root / "loop").symlink_to("loop")
    refused = cli("embed", "--model", "toy", "--out", "loop", "a")
    assert refused.code == 2 and "loop: can't be written" in refused.err and "internal error" not in refused.err


@pytest.mark.process
@pytest.mark.skipif(sys.platform == "win32", reason="no limit of file sizes")
@pytest.mark.parametrize("room", [150, 300], ids=["no blocks for two rows", "no record of the first chunk"])
def test_what_can_t_be_written_leaves_nothing_but_an_older_result(cli: Command, room: int) -> None:
    """Two rows take 192 bytes, their record some 400: the kernel refuses the one or the other."""
    (cli.root / "x.npy").write_bytes(b"older")
    environment, mark = cli.env()
    words = cli.arguments("embed", "--model", "toy", "--out", "x.npy", "a", "b")
    limit = f"import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room}));"
    done = subprocess.run(
        [sys.executable, "-c", f"{limit} os.execv(sys.argv[1], sys.argv[1:])", *words],
        env=environment, cwd=cli.root, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr == "synapse: x.npy: can't be written: File too large\n"
    assert {path.name: path.read_bytes() for path in cli.root.glob("x.npy*")} == {"x.npy": b"older"}
    cli.check_clean(mark)


@pytest.mark.process
@pytest.mark.skipif(sys.platform == "win32", reason="no limit of file sizes")
def test_a_lock_that_can_t_be_written_isn_t_left(tmp_path: Path) -> None:
    code = (
        "import pathlib, resource\nfrom synapse_host.bulk.output import alone\n"
        "from synapse_host.errors import SynapseError\nresource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        f"try:\n    with alone(pathlib.Path({str(tmp_path / 'x.npy')!r})): pass\n"
        "except SynapseError as exc: raise SystemExit(exc.message)"
    )
    done = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert "x.npy: can't be written: File too large" in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.process
def test_a_killed_run_locks_nobody_out(tmp_path: Path) -> None:
    code = "import sys, pathlib; from synapse_host.bulk.output import alone\n" + (
        f"with alone(pathlib.Path({str(tmp_path / 'x.npy')!r})): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        with pytest.raises(InvalidRequest, match=f"pid {process.pid}") as caught, alone(tmp_path / "x.npy"):
            pass
        assert caught.value.details["reason"] == "out_busy" and caught.value.exit_code == 2
        process.kill()
    with alone(tmp_path / "x.npy"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_somebody_else_s_is_not_taken_for_a_lock(tmp_path: Path) -> None:
    theirs = tmp_path / "x.npy.progress.json.lock"
    theirs.write_text("precious")
    with pytest.raises(InvalidRequest, match="in the way"), alone(tmp_path / "x.npy"):
        pass
    assert theirs.read_text() == "precious"


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="can't be written: No such file"), alone(tmp_path / "no" / "x.npy"):
        pass
