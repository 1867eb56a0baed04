"""The runtime directory and its sockets: private, exclusive, nothing touched that isn't ours."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from pathlib import Path

import pytest

from synapse_host.errors import InvalidRequest
from synapse_host.worker.listener import SUN_PATH, RuntimeDirectory, safe_id
from synapse_host.worker.runtime_dir import LOCK


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_private_directory_is_removed_at_the_end():
    made = RuntimeDirectory.open(None)
    assert mode(made.path) == mode(made.workers) == 0o700
    (made.workers / "leftover").write_text("x")
    made.close()
    made.close()
    assert not made.path.exists()


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_an_explicit_directory_is_private_whatever_the_umask_and_stays(runtime_dir, umask):
    old = os.umask(umask)
    try:
        made = RuntimeDirectory.open(runtime_dir / "deep" / "rt")
        listener = made.listen("toy-1")
    finally:
        os.umask(old)
    assert listener.path == made.path / "synapse" / "workers" / "toy-1.sock"
    assert listener.arguments == ("--socket", str(listener.path))
    assert {mode(part) for part in (made.path.parent, made.path, made.path / "synapse", made.workers)} == {0o700}
    assert mode(listener.path) == 0o600
    with pytest.raises(InvalidRequest, match="is in use by") as caught:
        RuntimeDirectory.open(made.path)
    assert (caught.value.details["reason"], caught.value.details["pid"]) == ("runtime_dir_busy", os.getpid())
    listener.close()
    listener.close()
    assert not listener.path.exists()
    made.close()
    RuntimeDirectory.open(made.path).close()


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        *((lambda path, bits=bits: path.chmod(bits), "runtime_dir_mode") for bits in (0o755, 0o710, 0o701)),
        (lambda path: (path / "synapse").chmod(0o770), "runtime_dir_mode"),
        (lambda path: (path / "synapse" / "workers").chmod(0o755), "runtime_dir_mode"),
        (
            lambda path: ((path / "synapse" / "workers").rmdir(), (path / "synapse" / "workers").symlink_to(path)),
            "runtime_dir",
        ),
        (lambda path: (shutil.rmtree(path), path.write_text("")), "runtime_dir"),
        (None, "runtime_dir_owner"),
    ],
)
def test_a_directory_that_is_not_ours_alone_is_refused_and_left_as_it_was(tmp_path, monkeypatch, prepare, reason):
    path = tmp_path / "rt"
    for part in (path, path / "synapse", path / "synapse" / "workers"):
        part.mkdir(mode=0o700)
    if prepare is None:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    else:
        prepare(path)
    before = [(entry, mode(entry)) for entry in [path, *sorted(path.rglob("*"))]]
    with pytest.raises(InvalidRequest) as caught:
        RuntimeDirectory.open(path)
    assert caught.value.exit_code == 2 and caught.value.details["reason"] == reason
    if reason == "runtime_dir_mode":
        # Not `chmod 700` alone: the folder may be /etc.
        assert "choose another runtime directory, or" in caught.value.message and "chmod 700" in caught.value.message
    assert [(entry, mode(entry)) for entry in [path, *sorted(path.rglob("*"))]] == before


def test_a_directory_that_was_removed_is_made_again_and_locked(runtime_dir):
    made = RuntimeDirectory.open(runtime_dir / "rt")
    first = made.listen("embed-1")
    shutil.rmtree(made.path)
    listener = made.listen("embed-2")
    assert mode(made.workers) == mode(made.path) == 0o700 and listener.path.exists()
    with pytest.raises(InvalidRequest, match="is in use by"):
        RuntimeDirectory.open(made.path)
    first.close()
    listener.close()
    made.close()
    assert not listener.path.exists()
    RuntimeDirectory.open(made.path).close()


def test_a_removed_directory_that_another_host_took_is_not_shared(runtime_dir):
    made = RuntimeDirectory.open(runtime_dir / "rt")
    shutil.rmtree(made.path)
    other = RuntimeDirectory.open(made.path)
    shutil.rmtree(other.workers)
    with pytest.raises(InvalidRequest, match="is in use by"):
        made.listen("embed-1")
    other.close()
    made.close()


def test_a_forked_childs_copy_removes_nothing(directory):
    listener = directory.listen("embed-1")
    if (pid := os.fork()) == 0:
        directory.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert listener.path.exists() and (directory.path / LOCK).exists()
    listener.close()


@pytest.mark.parametrize(
    ("lane_id", "name"),
    [("embed", "embed"), ("embed:mini lm", "embed_mini_lm"), ("../x", "_._x"), (".a", "_a"), ("é/\0", "___")],
)
def test_unsafe_characters(lane_id, name):
    assert safe_id(lane_id) == name


def test_a_name_another_lane_uses_falls_back_too(directory):
    first, second = directory.listen("a_b"), directory.listen("a:b")
    assert first.path != second.path and second.path.name.startswith("wk-")
    first.close()
    second.close()


@pytest.mark.report("benoitc/gunicorn#1298")
def test_nothing_of_others_is_removed_at_the_end(directory):
    """benoitc/gunicorn#1298 (also MagicStack/uvloop#28): unlinked is what this host bound, by device and inode."""
    ours, missing, linked, replaced = (directory.listen(f"toy-{n}") for n in range(4))
    theirs, other, kept = (directory.workers / name for name in ("theirs.sock", "other", "kept"))
    kept.write_text("x")
    with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as two:
        one.bind(os.fspath(theirs))
        two.bind(os.fspath(other))
        for listener in (missing, linked):
            listener.path.unlink()
        linked.path.symlink_to(theirs)
        other.rename(replaced.path)  # bound beside the old one, so that the new file can't get its inode
        missing.close()
        replaced.close()
        directory.close()
    assert not ours.path.exists() and kept.exists() and theirs.is_socket()
    assert linked.path.is_symlink() and replaced.path.is_socket(), "somebody else's socket was removed"
    for listener in (ours, linked):
        listener.close()
    for left in (linked.path, replaced.path, theirs):
        left.unlink()


@pytest.mark.report("Kludex/uvicorn#433")
def test_a_dead_socket_goes_and_the_living_files_and_links_stay(directory):
    """Kludex/uvicorn#433 (also neovim/neovim#37378): 'address in use' after a crash."""
    path, target = directory.workers / "toy-1.sock", directory.workers / "target"

    def refused() -> None:
        before = path.lstat().st_ino
        with pytest.raises(InvalidRequest) as caught:
            directory.listen("toy-1")
        assert caught.value.details["reason"] == "path_taken" and path.lstat().st_ino == before
        path.unlink()

    with socket.socket(socket.AF_UNIX) as dead, socket.socket(socket.AF_UNIX) as elsewhere:
        dead.bind(os.fspath(path))
        elsewhere.bind(os.fspath(target))
    directory.listen("toy-1").close()
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as living:
        living.bind(os.fspath(path))
        living.listen(1)
        refused()
    path.write_text("somebody's")
    refused()
    path.symlink_to(target)
    refused()
    assert target.is_socket()
    target.unlink()


@pytest.mark.report("dotnet/runtime#79503")
@pytest.mark.parametrize("letter", ["d", "é"], ids=["ascii", "utf-8"])
def test_long_paths(runtime_dir, letter):
    """dotnet/runtime#79503 (also agronholm/anyio#661, raine/workmux#293, meteor/meteor#3591): 104 bytes and no more."""
    for length in range(60, 121, 12):
        missing = length - len(os.fsencode(runtime_dir)) - 1
        made = RuntimeDirectory.open(runtime_dir / (letter * (missing // len(letter.encode()))))
        try:
            listener = made.listen("embed:all-MiniLM-L6-v2-1")
            short = listener.path.parent
            assert len(os.fsencode(listener.path)) < SUN_PATH and stat.S_IMODE(short.stat().st_mode) == 0o700
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(os.fspath(listener.path))
            listener.close()
        finally:
            made.close()
        assert not listener.path.exists() and (short == made.workers or not short.exists())
