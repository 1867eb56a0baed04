"""Where a running host is looked for when nobody says so."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import platformdirs
import pytest

from synapse_host.cli import remote
from synapse_host.errors import DeadlineExceeded, InvalidRequest
from synapse_host.worker.handshake import Peer
from synapse_host.worker.listener import RuntimeDirectory

pytestmark = pytest.mark.skipif(os.name != "posix", reason="Unix sockets")

FALLBACK = Path(f"/tmp/synapse-{os.getuid()}") if os.name == "posix" else Path()


@pytest.fixture
def own(tmp_path: Path) -> Path:
    folder = tmp_path / "xdg"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest's own folders are longer than a user's runtime directory.
    monkeypatch.setattr(remote, "SUN_PATH", 4096)


def test_the_user_s_runtime_directory(monkeypatch: pytest.MonkeyPatch, own: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own))
    assert remote.default_directory() == own
    assert remote.runtime_dir(argparse.Namespace(runtime_dir=None)) == own
    assert remote.runtime_dir(argparse.Namespace(runtime_dir=Path("rt"))) == Path("rt")


def test_one_that_does_not_exist_yet_will_be_made(monkeypatch: pytest.MonkeyPatch, own: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own / "later"))
    assert remote.default_directory() == own / "later"
    (own / "later").mkdir(mode=0o700)
    assert remote.default_directory() == own / "later"


def test_one_that_is_open_to_others_is_not_used(monkeypatch: pytest.MonkeyPatch, own: Path) -> None:
    own.chmod(0o755)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own))
    assert remote.default_directory() == FALLBACK


def test_a_long_one_is_not_used(monkeypatch: pytest.MonkeyPatch, own: Path) -> None:
    monkeypatch.setattr(remote, "SUN_PATH", 108)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own / ("x" * 80)))
    assert remote.default_directory() == FALLBACK


def test_one_below_tmpdir_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """TMPDIR differs from shell to shell: host and operator would look in two places."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(platformdirs, "user_runtime_path", lambda: tmp_path / f"runtime-{os.getuid()}")
    assert remote.default_directory() == FALLBACK


def test_no_warning_reaches_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert remote.default_directory().is_absolute()  # warnings are errors in tests


@pytest.mark.parametrize("route", ["lanes", "logs", "ping"])
def test_a_host_that_is_stopped_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, route: str) -> None:
    monkeypatch.setattr(remote, "ANSWER_S", 0.2)
    fields = {"ping": {"timeout": 0.1}, "logs": {"wait": 0.1}}.get(route, {})
    runtime = RuntimeDirectory.open(None)
    listener = runtime.listen_control()
    try:
        with remote.connect(runtime.path) as there, pytest.raises(DeadlineExceeded, match="doesn't answer") as caught:
            there.post(f"/synapse/{route}", **fields)
    finally:
        listener.close()
        runtime.close()
    assert caught.value.exit_code == 5


def test_another_user_s_host_is_not_talked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "peer_of", lambda connection: Peer(os.getuid() + 1, 1))
    runtime = RuntimeDirectory.open(None)
    listener = runtime.listen_control()
    with pytest.raises(InvalidRequest, match="another user"), remote.connect(runtime.path):
        pass
    listener.close()
    runtime.close()


def test_a_model_may_take_its_time_to_load() -> None:
    assert remote.patience("/synapse/load", {"timeout": None}) is None and remote.patience("/synapse/probe", {}) is None
    assert remote.patience("/synapse/load", {"timeout": 60.0}) == 60.0 + remote.ANSWER_S
