"""A command in odd surroundings: closed or full outputs, other encodings, places that --out must not harm."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from synapse_host.bulk.output import good_rows, reserve_blocks
from tests.cli.conftest import Command

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(os.name == "nt", reason="Unix files, descriptors and encodings"),
]


def shell(cli: Command, words: list[str], redirect: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command with a redirection of the shell's."""
    inherited, mark = cli.env()
    done = subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {redirect}', "sh", *cli.arguments(*words)],
        env={**inherited, **environment}, capture_output=True, text=True, timeout=120, check=False, cwd=cli.root,
    )  # fmt: skip
    cli.check_clean(mark)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr
    return done


# --- what --out must not harm ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", ["in.jsonl", "./in.jsonl", "link.jsonl", "hard.jsonl"])
def test_out_never_overwrites_its_own_input(cli: Command, out: str) -> None:
    source = cli.root / "in.jsonl"
    source.write_text('"a"\n"b"\n')
    (cli.root / "link.jsonl").symlink_to("in.jsonl")
    os.link(source, cli.root / "hard.jsonl")
    done = cli("embed", "--model", "toy", "--file", "in.jsonl", "--out", out)
    assert done.code == 2 and "would overwrite the input" in done.err
    assert source.read_text() == '"a"\n"b"\n' and not list(cli.root.glob("*.progress.json"))


def test_the_note_of_progress_never_overwrites_the_input(cli: Command) -> None:
    source = cli.root / "x.npy.progress.json"
    source.write_text('"a"\n')
    done = cli("embed", "--model", "toy", "--file", source.name, "--out", "x.npy")
    assert done.code == 2 and "would overwrite the input" in done.err and source.read_text() == '"a"\n'


@pytest.mark.parametrize("kind", ["fifo", "folder", "socket"])
def test_out_replaces_nothing_but_a_file(cli: Command, kind: str) -> None:
    place = cli.root / "place"
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    else:
        os.mknod(place, stat.S_IFSOCK | 0o600)
    before = place.lstat()
    done = cli("embed", "--model", "toy", "--out", "place", "a")
    assert done.code == 2 and "place: can't be written: it is not a regular file" in done.err
    assert (place.lstat().st_ino, place.lstat().st_mode) == (before.st_ino, before.st_mode)


@pytest.mark.parametrize("out", ["", "/", "."])
def test_out_needs_a_file_name(cli: Command, out: str) -> None:
    done = cli("embed", "--model", "toy", "--out", out, "a")
    assert done.code == 2 and done.err.count("\n") == 1 and "internal error" not in done.err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--model", "judge", "a"), 2),
        (("--model", "toy", "--file", "bad.jsonl"), 2),
        (("--model", "toy", ""), 2),
        (("--model", "toy", "--deadline", "0.000001", "a"), 5),
    ],
)
def test_a_run_that_fails_at_once_leaves_an_older_result_alone(
    cli: Command, arguments: tuple[str, ...], code: int
) -> None:
    cli.bundle("judge", task="rerank")
    (cli.root / "bad.jsonl").write_text('"a"\n{"no": "text"}\n')
    older = cli.root / "x.npy"
    older.write_bytes(b"an older result")
    done = cli("embed", *arguments, "--out", "x.npy")
    assert done.code == code and done.err
    assert older.read_bytes() == b"an older result"
    assert [path.name for path in cli.root.glob("x.npy*")] == ["x.npy"]


def test_out_has_its_blocks_before_anything_is_computed(cli: Command) -> None:
    """A hole that is mapped and written on a full disk ends the process by SIGBUS."""
    out = cli.root / "x.npy"
    array = np.lib.format.open_memmap(out, mode="w+", dtype=np.float32, shape=(4096, 64))
    reserve_blocks(out)
    assert out.stat().st_blocks * 512 >= array.nbytes
    assert np.load(out).shape == (4096, 64)


def test_out_without_the_call_for_blocks_keeps_the_header(cli: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    out = cli.root / "x.npy"
    array = np.lib.format.open_memmap(out, mode="w+", dtype=np.float32, shape=(9000, 64))
    del array
    reserve_blocks(out)
    assert out.stat().st_blocks * 512 >= 9000 * 64 * 4
    assert np.load(out).shape == (9000, 64)


def test_a_place_without_room_is_an_error_and_leaves_nothing(cli: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    out = cli.root / "x.npy"
    np.lib.format.open_memmap(out, mode="w+", dtype=np.float32, shape=(9, 9))

    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(OSError, match="No space left"):
        reserve_blocks(out)
    assert not out.exists()


# --- what a file may be ----------------------------------------------------------------------------------------------


def test_a_pipe_as_file_is_read_once(cli: Command) -> None:
    """``--file <(command)``: nothing can be read from it twice."""
    os.mkfifo(cli.root / "pipe")
    writer = threading.Thread(target=lambda: (cli.root / "pipe").write_text('"a"\n"b"\n'), daemon=True)
    writer.start()
    done = cli("embed", "--model", "toy", "--file", "pipe", "--out", "x.npy")
    writer.join(10)
    assert done.code == 0, done.err
    assert np.load(cli.root / "x.npy").shape[0] == 2


@pytest.mark.parametrize("out", [(), ("--out", "x.npy")])
def test_a_file_without_an_end_is_refused(cli: Command, out: tuple[str, ...]) -> None:
    done = cli("embed", "--model", "toy", "--file", "/dev/zero", *out)
    assert done.code == 2 and "longer than" in done.err


def test_an_endless_line_in_a_plain_file_is_refused_while_it_is_counted(cli: Command) -> None:
    with (cli.root / "long.jsonl").open("wb") as file:
        file.truncate(70 * 1024 * 1024)
    done = cli("embed", "--model", "toy", "--file", "long.jsonl", "--out", "x.npy")
    assert done.code == 2 and "long.jsonl:1: longer than" in done.err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("rows_done", value) for value in (True, -1, 99)),
        *(("truncated", value) for value in (["x"], [5])),
        *(("read", 2), ("skipped", [3])),
    ],
)
def test_a_resume_file_that_lies_is_not_believed(cli: Command, name: str, value: object) -> None:
    out, note = cli.root / "x.npy", cli.root / "x.npy.progress.json"
    with (cli.root / "x.npy.partial").open("wb") as file:
        np.save(file, np.zeros((4, 2), np.float32))
    honest = {"input_digest": "d", "rows_done": 2, "read": 3, "truncated": [1], "skipped": [{"entry": 1}]}
    note.write_text(json.dumps(honest))
    assert good_rows(out, {"input_digest": "d"}, (4, 2)) == honest
    note.write_text(json.dumps({**honest, name: value}))
    assert good_rows(out, {"input_digest": "d"}, (4, 2)) is None


def test_an_archive_in_place_of_the_vectors_is_not_resumed(cli: Command) -> None:
    out, note = cli.root / "x.npy", cli.root / "x.npy.progress.json"
    note.write_text(json.dumps({"rows_done": 2, "read": 2, "truncated": [], "skipped": []}))
    with (cli.root / "x.npy.partial").open("wb") as file:
        np.savez(file, np.zeros((4, 2), np.float32))
    assert good_rows(out, {}, (4, 2)) is None
    note.write_text("[" * 100_000)
    assert good_rows(out, {}, (4, 2)) is None


# --- outputs ---------------------------------------------------------------------------------------------------------


EMBED = ["embed", "--model", "toy", "a"]


@pytest.mark.parametrize(
    ("words", "redirect"),
    [
        *((EMBED, redirect) for redirect in ("<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-")),
        (EMBED[:-1], "<&- >&- 2>&-"),
        (["models"], ">&-"),
    ],
)
def test_closed_descriptors(cli: Command, words: list[str], redirect: str) -> None:
    done = shell(cli, words, redirect)
    assert done.returncode == (2 if words == ["embed", "--model", "toy"] else 0)
    if ">&-" not in redirect.replace("2>&-", "") and done.returncode == 0:
        assert done.stdout


@pytest.mark.parametrize("redirect", ["> /dev/full", "| true"])
@pytest.mark.parametrize(
    "words", [["embed", "--model", "toy", "a"], ["embed", "--model", "none", "a", "--json"], ["models", "--json"]]
)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_outputs_that_take_nothing(cli: Command, words: list[str], redirect: str) -> None:
    if redirect.startswith("|"):
        inherited, mark = cli.env()
        first = subprocess.Popen(
            cli.arguments(*words), env=inherited, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=cli.root
        )
        assert first.stdout is not None and first.stderr is not None
        first.stdout.close()
        said = first.stderr.read().decode()
        first.stderr.close()
        code = first.wait(60)
        cli.check_clean(mark)
        assert said.replace("synapse: 1 x 4 from toy on scripted (lane embed)\n", "") == ""
    else:
        done = shell(cli, words, redirect)
        said, code = done.stderr, done.returncode
        assert "the result can't be written: No space left on device" in said or "No space left" in said
    assert "Traceback" not in said and "Exception ignored" not in said
    assert code in (1, 2)


def test_another_encoding_of_stdout(cli: Command) -> None:
    cli.bundle("judge", task="rerank").setup({"rules": []})
    for options in ([], ["--json"]):
        done = shell(cli, ["rerank", "--model", "judge", *options, "query", "日本"], "", PYTHONIOENCODING="ascii")
        assert "internal error" not in done.stderr + done.stdout
        assert done.stdout.isascii()
    done = shell(cli, ["embed", "--model", "日本", "--json", "a"], "", PYTHONIOENCODING="ascii")
    assert "日本" in json.loads(done.stdout)["error"]["message"]


def test_bytes_that_are_no_text_in_a_message(cli: Command) -> None:
    """A file name of bytes comes as half surrogate pairs, which stdout can't encode."""
    inherited, mark = cli.env()
    words: list[str | bytes] = [*cli.arguments("embed", "--json"), "--model", b"./\xff", "a"]
    done = subprocess.run(words, env=inherited, capture_output=True, timeout=60, check=False, cwd=cli.root)
    cli.check_clean(mark)
    assert done.returncode == 2 and done.stderr == b""
    assert json.loads(done.stdout)["error"]["message"].startswith("./\\udcff ")


def test_a_current_folder_that_is_gone(cli: Command) -> None:
    (cli.root / "gone").mkdir()
    inherited, mark = cli.env()
    words = [*cli.arguments("embed", "--model", "toy"), "--runtime-dir", "rt", "a"]
    done = subprocess.run(
        ["/bin/sh", "-c", 'cd gone && rmdir ../gone && exec "$@"', "sh", *words],
        env=inherited, capture_output=True, text=True, timeout=60, check=False, cwd=cli.root,
    )  # fmt: skip
    cli.check_clean(mark)
    assert done.returncode == 2 and done.stderr == "synapse: the current folder is gone: No such file or directory\n"


# --- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "burst", [["SIGINT"], ["SIGTERM"], ["SIGHUP"], ["SIGINT"] * 9, ["SIGTERM", "SIGINT", "SIGHUP"]]
)
def test_signals_leave_nothing_behind(cli: Command, burst: list[str]) -> None:
    started = cli.root / "started"
    # Deaf to SHUTDOWN: the command is ending for a while, and signals go on coming.
    script = {"rules": [{"on": "EMBED_BATCH", "do": [{"touch": str(started)}, {"sleep": 60}]}]}
    cli.setup(script)
    inherited, mark = cli.env()
    command = subprocess.Popen(
        cli.arguments("embed", "--model", "toy", "a"), env=inherited, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    while not started.exists() and command.poll() is None:
        time.sleep(0.01)
    for name in burst:
        command.send_signal(getattr(signal, name))
        time.sleep(0.03)
    _, said = command.communicate(timeout=30)
    cli.check_clean(mark)
    # A signal that comes when the interpreter is ending already kills it: a shell shows SIGINT as 130 as well.
    assert said == b"synapse: interrupted\n"
    assert command.returncode == 130 or (len(burst) > 1 and command.returncode < 0)


@pytest.mark.parametrize("module", ["argparse", "synapse_host.cli.models", "engines.bundle.manifest"])
@pytest.mark.parametrize("json_too", [False, True])
def test_an_interrupt_while_a_command_only_starts(cli: Command, module: str, json_too: bool) -> None:
    """It comes while that module is imported: by the command itself, for its verb, or for the verb's."""
    (cli.root / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    cli.environment["PYTHONPATH"] = f"{cli.root}:{Path(__file__).parents[2]}"
    done = cli("models", *(["--json"] if json_too else []))
    assert done.code == 130
    if json_too:
        assert done.document["error"]["code"] == "interrupted" and done.err == ""
    else:
        assert (done.out, done.err) == ("", "synapse: interrupted\n")


def test_a_parent_that_ignores_the_ends_of_children(cli: Command) -> None:
    """sudo-project/sudo#98: ignoring SIGCHLD is inherited, and the kernel would keep no status of ours."""
    cli.setup({"rules": [{"on": "EMBED_BATCH", "do": [{"signal": "SIGKILL"}]}]})
    inherited, mark = cli.env()
    ignore = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", ignore, *cli.arguments(*EMBED)],
        env=inherited, capture_output=True, text=True, timeout=60, check=False, cwd=cli.root,
    )  # fmt: skip
    cli.check_clean(mark)
    assert done.returncode == 1 and "(SIGKILL)" in done.stderr


def test_an_ignored_signal_stays_ignored(cli: Command) -> None:
    started, go = cli.root / "started", cli.root / "go"
    cli.setup({"rules": [{"on": "EMBED_BATCH", "do": [{"touch": str(started)}, {"wait_for": str(go)}]}]})
    inherited, mark = cli.env()
    command = subprocess.Popen(
        ["/bin/sh", "-c", 'trap "" HUP; exec "$@"', "sh", *cli.arguments("embed", "--model", "toy", "a", "--json")],
        env=inherited, stdout=subprocess.PIPE,
    )  # fmt: skip
    while not started.exists() and command.poll() is None:
        time.sleep(0.01)
    command.send_signal(signal.SIGHUP)
    go.touch()
    out, _ = command.communicate(timeout=30)
    cli.check_clean(mark)
    assert command.returncode == 0 and json.loads(out)["n"] == 1
