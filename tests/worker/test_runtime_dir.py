"""What killed hosts leave is removed; what lives, or isn't ours, is not."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from synapse_host.worker import runtime_dir as remains
from synapse_host.worker.listener import RuntimeDirectory
from tests.support.killed import holder, kill_one

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform == "win32", reason="Unix only"),
]


@pytest.fixture
def root(runtime_dir, monkeypatch):
    """Return where this test's private directories are made, and looked for."""
    monkeypatch.setattr(tempfile, "tempdir", str(runtime_dir))
    monkeypatch.setattr(remains, "roots", lambda: [runtime_dir])
    return runtime_dir


def private(root: Path, name: str = "synapse-abcdefgh", *, line: bytes = b"4242\n" + remains.PRIVATE) -> Path:
    """Make a directory as a dead host's would look."""
    path = root / name
    for part in (path, path / "synapse", path / "synapse" / "workers"):
        part.mkdir(mode=0o700)
    (path / remains.LOCK).write_bytes(line)
    return path


def test_a_living_hosts_directory_stays(root):
    with holder(root) as (process, directory, listening):
        assert remains.sweep(root, remove=False) == remains.sweep(root) == []
        assert directory.exists() and listening.is_socket()
        process.kill()
        process.wait()
        assert remains.sweep(root, remove=False) == [directory]
        assert remains.sweep(root) == [directory]


def test_a_forked_child_keeps_a_directory(root):
    made = RuntimeDirectory.open(None)
    there, back = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(back)
        os.read(there, 1)
        os._exit(0)
    os.close(there)
    made._lock.close()
    made._lock = None
    assert remains.sweep(root) == []
    os.close(back)
    os.waitpid(pid, 0)
    assert remains.sweep(root) == [made.path]


def test_a_short_directory_for_long_paths_is_removed_too(root):
    deep = root / ("d" * 90)
    deep.mkdir(mode=0o700)
    directory, listening = kill_one(deep)
    short = listening.parent
    assert short.parent == Path("/tmp") and remains.sweep(deep, remove=False) == [directory]
    # Any host that starts meanwhile may have removed it already.
    assert short in remains.sweep(Path("/tmp"), remove=False) or not short.exists()
    remains.sweep(Path("/tmp"))
    remains.sweep(deep)
    assert not short.exists() and not directory.exists()


def relink(path: Path, target: Path) -> None:
    """Move *path* to *target* and leave a link to it."""
    path.rename(target)
    path.symlink_to(target)


def test_what_is_dead_and_private_goes_and_no_link_in_it_is_followed(root, monkeypatch):
    kept = root / "kept"
    kept.mkdir()
    (kept / "file").write_text("x")
    path = private(root)
    (path / "synapse" / "link").symlink_to(kept)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert remains.sweep(root) == [], "another user's"
    living = RuntimeDirectory.open(None)  # sweeps before it makes its own
    assert not path.exists() and (kept / "file").read_text() == "x"
    assert remains.sweep(root) == [] and living.path.exists()
    living.close()


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("another name", lambda path: path.rename(path.with_name("somebody-abcdefgh"))),
        ("open to others", lambda path: path.chmod(0o755)),
        ("no lock file", lambda path: (path / remains.LOCK).unlink()),
        ("being made", lambda path: (path / remains.LOCK).write_bytes(b"")),
        ("an explicit directory", lambda path: (path / remains.LOCK).write_bytes(b"4242\n")),
        ("a pipe for a lock", lambda path: ((path / remains.LOCK).unlink(), os.mkfifo(path / remains.LOCK))),
        ("a folder for a lock", lambda path: ((path / remains.LOCK).unlink(), (path / remains.LOCK).mkdir())),
        ("a link for a lock", lambda path: relink(path / remains.LOCK, path / "x")),
        ("a link in its place", lambda path: relink(path, path.with_name("elsewhere"))),
        ("what became an explicit one", lambda path: RuntimeDirectory.open(path).close()),
    ],
)
def test_what_is_not_provably_ours_stays(root, what, change):
    change(private(root))
    before = sorted(root.rglob("*"))
    assert remains.sweep(root, remove=False) == remains.sweep(root) == []
    assert sorted(root.rglob("*")) == before


def test_two_sweepers_and_a_vanishing_directory(root, monkeypatch):
    path = private(root)
    real = shutil.rmtree

    def slow(victim, **options):
        # While one sweeps, the other finds nothing to do.
        assert remains.sweep(root) == []
        real(victim, **options)

    monkeypatch.setattr(shutil, "rmtree", slow)
    assert remains.sweep(root) == [path]
    assert remains.sweep(root / "gone") == []
