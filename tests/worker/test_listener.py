"""The runtime directory and its sockets: private, exclusive, nothing touched that isn't ours."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from synapse_host.errors import InvalidRequest
from synapse_host.worker.handshake import Peer
from synapse_host.worker.listener import RuntimeDirectory, peer_of, safe_id


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def reason(call) -> dict:
    with pytest.raises(InvalidRequest) as caught:
        call()
    assert caught.value.exit_code == 2
    return caught.value.details


def test_a_private_directory_is_removed_at_the_end():
    made = RuntimeDirectory.open(None)
    assert mode(made.path) == mode(made.workers) == 0o700
    (made.workers / "leftover").write_text("x")
    made.close()
    made.close()
    assert not made.path.exists()


def test_two_private_directories_at_once():
    first, second = RuntimeDirectory.open(None), RuntimeDirectory.open(None)
    assert first.path != second.path
    first.close()
    second.close()


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
    assert listener.path.exists() and directory.lock_path.exists()
    listener.close()


def test_an_explicit_directory_is_made_private_and_stays(runtime_dir):
    path = runtime_dir / "deep" / "rt"
    made = RuntimeDirectory.open(path)
    assert mode(path) == mode(path / "synapse") == mode(path / "synapse" / "workers") == 0o700
    made.close()
    assert path.is_dir()
    RuntimeDirectory.open(path).close()


def test_a_second_host_is_refused_and_told_by_whom(directory):
    details = reason(lambda: RuntimeDirectory.open(directory.path))
    assert details["reason"] == "runtime_dir_busy"
    assert details["pid"] == os.getpid()


@pytest.mark.process
def test_another_process_is_named_and_the_lock_ends_with_it(runtime_dir):
    code = (
        "import sys; from synapse_host.worker.listener import RuntimeDirectory as R;"
        f"held = R.open({str(runtime_dir)!r}); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        assert reason(lambda: RuntimeDirectory.open(runtime_dir))["pid"] == holder.pid
        holder.kill()
    RuntimeDirectory.open(runtime_dir).close()


@pytest.mark.parametrize("bits", [0o755, 0o710, 0o701])
def test_a_directory_open_to_others_is_refused(runtime_dir, bits):
    runtime_dir.chmod(bits)
    details = reason(lambda: RuntimeDirectory.open(runtime_dir))
    assert details["reason"] == "runtime_dir_mode"


def test_a_directory_of_another_user_is_refused(runtime_dir, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert reason(lambda: RuntimeDirectory.open(runtime_dir))["reason"] == "runtime_dir_owner"


def test_a_workers_directory_that_is_a_link_is_refused(runtime_dir):
    (runtime_dir / "synapse").mkdir(mode=0o700)
    (runtime_dir / "elsewhere").mkdir(mode=0o700)
    (runtime_dir / "synapse" / "workers").symlink_to(runtime_dir / "elsewhere")
    assert reason(lambda: RuntimeDirectory.open(runtime_dir))["reason"] == "runtime_dir"


def test_a_file_in_place_of_the_directory_is_refused(runtime_dir):
    (runtime_dir / "file").write_text("")
    assert reason(lambda: RuntimeDirectory.open(runtime_dir / "file"))["reason"] == "runtime_dir"


def test_the_socket_has_the_seeds_path_and_is_private(directory):
    listener = directory.listen("toy-1")
    assert listener.path == directory.path / "synapse" / "workers" / "toy-1.sock"
    assert mode(listener.path) == 0o600
    assert listener.arguments == ("--socket", str(listener.path))
    listener.close()
    listener.close()
    assert not listener.path.exists()


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


def test_a_failing_check_closes_the_connection(directory):
    async def main():
        listener = directory.listen("toy-1")

        def admit(peer: Peer) -> bool:
            raise RuntimeError("boom")

        accepting = asyncio.create_task(listener.accept(admit))
        reader, writer = await asyncio.open_unix_connection(listener.path)
        assert await reader.read() == b""
        with pytest.raises(RuntimeError, match="boom"):
            await accepting
        writer.close()
        listener.close()

    asyncio.run(main())


@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="needs peer credentials")
def test_peer_credentials():
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert peer_of(ours) == Peer(os.getuid(), os.getpid())
