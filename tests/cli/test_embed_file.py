"""``synapse embed --file … --out …``: what may be read, what is never harmed, and one run on one file at a time."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from synapse_host.bulk.output import Growing, Left, Record, alone
from synapse_host.errors import InvalidRequest, StorageFull
from tests.cli.conftest import Command, Here, finished

pytestmark = [pytest.mark.process, pytest.mark.skipif(os.name == "nt", reason="Unix files, links and signals")]
TOY = ("embed", "--model", "toy")

# --- what --out must not harm ----------------------------------------------------------------------------------------

NO_PLACE = {
    # x.npy's record, and y.npy's list of errors, is the input
    **dict.fromkeys(("in.jsonl", "./in.jsonl", "link.jsonl", "hard.jsonl", "x.npy", "y.npy"), "overwrite the input"),
    **{name: f"{name}: can't be written: it is not a regular file" for name in ("fifo", "folder", "socket")},
    **dict.fromkeys(("", "/"), "is not a file name"),
    "loop": "loop: can't be written",
}


@pytest.mark.parametrize("out", NO_PLACE)
def test_a_place_that_is_refused_is_left_as_it_was(cli: Command, here: Here, out: str) -> None:
    source = cli.root / {"x.npy": "x.npy.progress.json", "y.npy": "y.npy.errors.jsonl"}.get(out, "in.jsonl")
    source.write_text('"a"\n"b"\n')
    (cli.root / "link.jsonl").symlink_to("in.jsonl")
    os.link(source, cli.root / "hard.jsonl")
    os.mkfifo(cli.root / "fifo")
    (cli.root / "folder").mkdir()
    os.mknod(cli.root / "socket", stat.S_IFSOCK | 0o600)
    (cli.root / "loop").symlink_to("loop")
    before = {path.name: (path.lstat().st_ino, path.lstat().st_mode) for path in cli.root.iterdir()}
    done = here(*TOY, "--file", source.name, "--out", out)
    assert done.code == 2 and NO_PLACE[out] in done.err and done.err.count("\n") == 1
    assert source.read_text() == '"a"\n"b"\n'
    assert {path.name: (path.lstat().st_ino, path.lstat().st_mode) for path in cli.root.iterdir()} == before


def test_a_run_that_fails_at_once_leaves_an_older_result_alone(cli: Command, here: Here) -> None:
    cli.bundle("judge", task="rerank")
    (cli.root / "bad.jsonl").write_text('"a"\n{"no": "text"}\n')
    (cli.root / "x.npy").write_bytes(b"an older result")
    for words, code in (
        (("embed", "--model", "judge", "a"), 2), ((*TOY, "--file", "bad.jsonl"), 2), ((*TOY, ""), 2),
        ((*TOY, "--deadline", "0.000001", "a"), 5),
    ):  # fmt: skip
        assert here(*words, "--out", "x.npy").code == code
        assert {path.name: path.read_bytes() for path in cli.root.glob("x.npy*")} == {"x.npy": b"an older result"}


@pytest.mark.parametrize("room", [150, 300], ids=["no blocks for two rows", "no record of a chunk"])
def test_what_can_t_be_written_leaves_nothing_but_an_older_result(cli: Command, room: int) -> None:
    """Two rows take 192 bytes, their record some 400: the kernel refuses the one or the other."""
    (cli.root / "x.npy").write_bytes(b"older")
    limit = f"import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room}));"
    prefix = [sys.executable, "-c", f"{limit} os.execv(sys.argv[1], sys.argv[1:])"]
    # Else the interpreter leaves compiled modules of that size, which no later one can load.
    done = cli(*TOY, "--out", "x.npy", "a", "b", prefix=prefix, PYTHONDONTWRITEBYTECODE="1")
    assert done.code == 2 and done.err == "synapse: x.npy: can't be written: File too large\n"
    assert {path.name: path.read_bytes() for path in cli.root.glob("x.npy*")} == {"x.npy": b"older"}


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="elsewhere a full disk is told when it is full")
def test_out_has_its_blocks_before_the_first_row_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "x.npy"
    with Growing(out, {"rows": 9000}, "in.txt", head=b"head", width=64) as growing:
        growing.append(bytes(64))
        assert growing.path.stat().st_blocks * 512 >= 9000 * 64

    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageFull), Growing(out, {"rows": 8000}, "in.txt", head=b"head", width=64) as growing:
        growing.append(bytes(64))
    assert list(tmp_path.iterdir()) == []


def test_an_out_that_is_a_link_is_written_through_it(cli: Command, here: Here) -> None:
    """microsoft/terminal#10787: the large disk's file behind the link would be left stale."""
    (cli.root / "big").mkdir()
    target, link = cli.root / "big" / "o.npy", cli.root / "o.npy"
    link.symlink_to(target)
    for _ in ("dangling", "again"):
        assert here(*TOY, "--out", "o.npy", "--json", "a", "b").document["out"] == "o.npy"
        assert link.is_symlink() and np.load(target).shape == (2, 8)
    assert [path.name for path in (cli.root / "big").iterdir() if "meta" not in path.name] == ["o.npy"]
    assert here("search", "o.npy", "a", "--json").document["results"][0]["hits"][0]["row"] == 0


LIES = [
    *({"rows_done": rows} for rows in (True, -1, 99)), {"bytes": 11}, {"truncated": ["x"]}, {"truncated": [5]},
    {"read": 2}, {"skipped": [3]}, {"skipped": [{"entry": 1}]}, "deep",
]  # fmt: skip


@pytest.mark.parametrize("changes", LIES, ids=str)
def test_a_record_that_lies_is_not_believed(tmp_path: Path, changes: dict[str, object] | str) -> None:
    out, note = tmp_path / "x.npy", tmp_path / "x.npy.progress.json"
    (tmp_path / "x.npy.partial").write_bytes(bytes(20))

    def found(digest: str) -> Record:
        return Growing(out, {"input_digest": digest, "rows": 4}, "in.txt", head=bytes(4), width=4).record

    left = {"where": "x:2", "code": "invalid_request", "message": "empty", "entry": 1}
    honest = {
        "input_digest": "d",
        "rows": 4,
        "rows_done": 2,
        "read": 3,
        "bytes": 12,
        "truncated": [1],
        "skipped": [left],
    }
    note.write_text(json.dumps(honest))
    assert found("d") == Record(2, 3, 12, [1], [Left(**left)])
    assert found("e") == Record()
    note.write_text(json.dumps({**honest, **changes}) if isinstance(changes, dict) else "[" * 100_000)
    assert found("d") == Record()


# --- what --file may be ----------------------------------------------------------------------------------------------


def test_a_pipe_as_file_is_read_once(cli: Command, here: Here) -> None:
    """``--file <(command)``: nothing can be read from it twice."""
    os.mkfifo(cli.root / "pipe")
    writer = threading.Thread(target=lambda: (cli.root / "pipe").write_text('"a"\n"b"\n'), daemon=True)
    writer.start()
    assert here(*TOY, "--file", "pipe", "--out", "x.npy").code == 0
    writer.join(10)
    assert np.load(cli.root / "x.npy").shape[0] == 2


def test_an_interrupt_ends_a_run_whose_pipe_stands_still(cli: Command) -> None:
    os.mkfifo(cli.root / "pipe")
    # The pipe opens once the command reads it, so the signal meets the wait.
    with cli.started(*TOY, "--file", "pipe", "--out", "o.npy") as run, (cli.root / "pipe").open("w"):
        run.send_signal(signal.SIGINT)
        assert finished(run).code == 130


@pytest.mark.parametrize("out", [(), ("--out", "x.npy")])
@pytest.mark.parametrize("source", ["/dev/zero", "long.jsonl"])
def test_a_line_without_an_end_is_refused(cli: Command, here: Here, source: str, out: tuple[str, ...]) -> None:
    with (cli.root / "long.jsonl").open("wb") as file:
        file.truncate(70 * 1024 * 1024)
    done = here(*TOY, "--file", source, *out)
    assert done.code == 2 and "longer than" in done.err


# --- one run at a time -----------------------------------------------------------------------------------------------


def test_a_second_run_on_one_file_is_refused_in_one_line(cli: Command) -> None:
    out = cli.root / "x.npy"
    with cli.held(*TOY, "--out", str(out), "a", "b") as first:
        (cli.root / "link.npy").symlink_to(out)
        for place in (out, cli.root / "link.npy"):
            second = finished(cli.spawn(*TOY, "--out", str(place), "b", "a"))
            assert (second.code, second.out, second.err.count("\n")) == (2, "", 1)
            assert second.err.startswith(f"synapse: {place} is being written by pid {first.pid} (synapse, started ")
        (cli.root / "go").touch()
        assert finished(first).code == 0
    assert np.load(out).shape == (2, 8)
    assert sorted(path.name for path in cli.root.glob("x.npy*")) == ["x.npy", "x.npy.meta.json"]


def test_a_lock_that_can_t_be_written_isn_t_left(tmp_path: Path) -> None:
    code = (
        "import pathlib, resource\nfrom synapse_host.bulk.output import alone\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        f"with alone(pathlib.Path({str(tmp_path / 'x.npy')!r})): pass"
    )
    done = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert "InvalidRequest: " in done.stderr and "x.npy: can't be written: File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []


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
    # A file of somebody else's is not taken for a lock, and a folder that isn't there is told.
    theirs = tmp_path / "x.npy.progress.json.lock"
    theirs.write_text("precious")
    for out, why in ((tmp_path / "x.npy", "in the way"), (tmp_path / "no" / "x.npy", "can't be written: No such file")):
        with pytest.raises(InvalidRequest, match=why), alone(out):
            pass
    assert theirs.read_text() == "precious"
