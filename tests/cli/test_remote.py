"""Where a running host is looked for, and one that isn't the user's or doesn't answer."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import platformdirs
import pytest

from synapse_host.cli import main, remote
from synapse_host.cli.remote import default_directory
from synapse_host.errors import InvalidRequest
from synapse_host.worker.handshake import Peer
from synapse_host.worker.listener import RuntimeDirectory

pytestmark = pytest.mark.skipif(os.name != "posix", reason="Unix sockets")


@pytest.mark.parametrize(("name", "mode", "taken"), [("", 0o700, True), ("later", 0o700, True), ("", 0o755, False)])
def test_the_user_s_runtime_directory_is_taken_where_it_is_private(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, mode: int, taken: bool
) -> None:
    monkeypatch.setattr(remote, "SUN_PATH", 4096)  # pytest's own folders are longer than a user's
    tmp_path.chmod(mode)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / name))
    assert default_directory() == (tmp_path / name if taken else Path(f"/tmp/synapse-{os.getuid()}"))
    assert remote.runtime_dir(argparse.Namespace(runtime_dir=None)) == default_directory()
    assert remote.runtime_dir(argparse.Namespace(runtime_dir=Path("rt"))) == Path("rt")
    # A long one leaves no room for sockets; one below TMPDIR differs from shell to shell.
    monkeypatch.setattr(remote, "SUN_PATH", len(str(tmp_path)) + remote.LONGEST)
    assert default_directory() == Path(f"/tmp/synapse-{os.getuid()}")
    monkeypatch.setattr(platformdirs, "user_runtime_path", lambda: tmp_path / f"runtime-{os.getuid()}")
    assert default_directory() == Path(f"/tmp/synapse-{os.getuid()}")


def test_no_warning_reaches_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert default_directory().is_absolute()  # warnings are errors in tests


@pytest.fixture
def silent() -> Iterator[Path]:
    """The runtime directory of a host that takes connections and never answers."""
    runtime = RuntimeDirectory.open(None)
    listener = runtime.listen_control()
    yield runtime.path
    listener.close()
    runtime.close()


VERBS = ("ps", "ps --metrics", "ping", "logs", "logs -f", "load toy", "unload toy", "probe embed")


@pytest.mark.parametrize("verb", VERBS)
def test_a_host_that_does_not_answer_is_not_waited_for(
    silent: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    # The host is told the deadline of some and has a while longer to say so.
    told = verb.split()[0] in ("load", "ping", "probe")
    monkeypatch.setattr(remote, "ANSWER_S", 0.2 if told else 600.0)
    assert main([*verb.split(), "--runtime-dir", str(silent), "--deadline", "0.2"]) == 5
    assert "deadline passed before the host" in capsys.readouterr().err
    if verb in ("ps", "ping"):
        monkeypatch.setattr(remote, "ANSWER_S", 0.2)
        monkeypatch.setattr("synapse_host.cli.operate.PING_S", 0.1)
        assert main([verb, "--runtime-dir", str(silent)]) == 5
        assert "doesn't answer: it is stopped or hangs" in capsys.readouterr().err


def test_another_user_s_host_is_not_talked_to(monkeypatch: pytest.MonkeyPatch, silent: Path) -> None:
    monkeypatch.setattr(remote, "peer_of", lambda connection: Peer(os.getuid() + 1, 1))
    with pytest.raises(InvalidRequest, match="another user"), remote.connect(silent):
        pass


def test_a_model_may_take_its_time_to_load() -> None:
    assert remote.patience("/synapse/load", {"timeout": None}) is None and remote.patience("/synapse/probe", {}) is None
    assert remote.patience("/synapse/load", {"timeout": 60.0}) == 60.0 + remote.ANSWER_S
