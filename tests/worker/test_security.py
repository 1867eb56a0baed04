"""The boundary around workers: who may connect, what a worker inherits, what is said before it is trusted."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from engines.protocol.connection import Connection, Role
from engines.protocol.errors import RemoteProtocolError
from engines.protocol.messages import HELLO_MAX_FRAME
from synapse_host.errors import InvalidRequest
from synapse_host.placement import probe
from synapse_host.placement.child import ENVIRONMENT, ENVIRONMENT_PREFIXES, worker_environment
from synapse_host.worker import handshake
from synapse_host.worker.listener import RuntimeDirectory
from tests.support import scripted
from tests.support.lanes import crash, on, serve

posix = pytest.mark.skipif(os.name != "posix", reason="Unix permissions and descriptors")
ROOT = Path(__file__).resolve().parents[2]


# --- the runtime directory -------------------------------------------------------------------------------------------


@posix
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_modes_don_t_depend_on_the_umask(runtime_dir, umask):
    old = os.umask(umask)
    try:
        made = RuntimeDirectory.open(runtime_dir / "deep" / "rt")
        listener = made.listen("toy-1")
    finally:
        os.umask(old)
    for part in (made.path.parent, made.path, made.path / "synapse", made.workers):
        assert stat.S_IMODE(part.lstat().st_mode) == 0o700
    assert stat.S_IMODE(listener.path.lstat().st_mode) == 0o600
    listener.close()
    made.close()


@posix
@pytest.mark.parametrize("inner", ["synapse", "synapse/workers"])
@pytest.mark.parametrize("bits", [0o777, 0o755, 0o770])
def test_every_part_of_the_directory_is_checked(runtime_dir, inner, bits):
    folder = runtime_dir / inner
    folder.mkdir(parents=True)
    for part in (runtime_dir / "synapse", folder):
        part.chmod(0o700)
    folder.chmod(bits)
    with pytest.raises(InvalidRequest) as caught:
        RuntimeDirectory.open(runtime_dir)
    assert caught.value.details["reason"] == "runtime_dir_mode"
    # Not `chmod 700` alone: the folder may be /etc.
    assert "choose another runtime directory, or" in caught.value.message and "chmod 700" in caught.value.message


@posix
def test_a_refused_directory_is_left_as_it_was(runtime_dir):
    runtime_dir.chmod(0o755)
    (runtime_dir / "theirs").write_text("x")
    with pytest.raises(InvalidRequest):
        RuntimeDirectory.open(runtime_dir)
    assert [entry.name for entry in runtime_dir.iterdir()] == ["theirs"]
    assert stat.S_IMODE(runtime_dir.stat().st_mode) == 0o755


@posix
def test_nothing_of_others_is_removed_at_the_end(runtime_dir):
    """Unlinked is what this host bound, by device and inode; a neighbour's socket, file or link stays."""
    made = RuntimeDirectory.open(runtime_dir)
    listeners = [made.listen(f"toy-{n}") for n in range(3)]
    neighbour = made.workers / "neighbour.sock"
    kept = made.workers / "kept"
    kept.write_text("x")
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(os.fspath(neighbour))
        # One of ours is replaced by a link to the neighbour's.
        listeners[1].path.unlink()
        listeners[1].path.symlink_to(neighbour)
        made.close()
        assert neighbour.is_socket() and kept.exists() and listeners[1].path.is_symlink()
        assert not listeners[0].path.exists() and not listeners[2].path.exists()
    for listener in listeners:
        listener.close()
    for left in (listeners[1].path, neighbour):
        left.unlink()


@posix
def test_a_link_in_the_place_of_a_socket_is_not_followed(runtime_dir):
    made = RuntimeDirectory.open(runtime_dir)
    target = runtime_dir / "target"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(os.fspath(target))
    (made.workers / "toy-1.sock").symlink_to(target)
    with pytest.raises(InvalidRequest) as caught:
        made.listen("toy-1")
    assert caught.value.details["reason"] == "path_taken"
    assert target.is_socket()
    made.close()
    target.unlink()


# --- what a worker inherits ------------------------------------------------------------------------------------------

LISTED = """SYNAPSE_WORKER_ID, PATH, HOME, USER, LANG, LC_*, TMPDIR, SYSTEMROOT, LD_LIBRARY_PATH, DYLD_*, CUDA_*,
NVIDIA_*, OMP_NUM_THREADS, GGML_*"""
"""interfaces.md: a worker's environment."""


def test_the_environment_is_the_list_of_interfaces_md():
    listed = set(re.findall(r"[A-Z_]+\*?", LISTED))
    ours = set(ENVIRONMENT) | {f"{prefix}*" for prefix in ENVIRONMENT_PREFIXES} | {"SYNAPSE_WORKER_ID"}
    assert ours == listed


@posix
def test_names_of_variables_are_exact():
    source = {"path": "/evil", "home": "/evil", "user": "x", "Lang": "x", "lc_all": "x", "cuda_x": "1", "PATH": "/bin"}
    assert worker_environment("w", {}, source=source) == {"PATH": "/bin", "SYNAPSE_WORKER_ID": "w"}


@pytest.mark.process
@posix
@pytest.mark.report("huggingface/trl#6628")
@pytest.mark.report("vllm-project/vllm#12754")
async def test_a_worker_gets_its_socket_and_its_streams_and_nothing_else(make, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setenv("LD_PRELOAD", "")
    report = tmp_path / "report"
    pairs = [os.pipe() for _ in range(20)]
    server = socket.create_server(("127.0.0.1", 0))
    try:
        for fd in [fd for pair in pairs for fd in pair] + [server.fileno()]:
            os.set_inheritable(fd, True)
        lane = make({"ready": [{"report": str(report)}]})
        await serve(lane)
    finally:
        server.close()
        for fd in [fd for pair in pairs for fd in pair]:
            os.close(fd)
    told = json.loads(report.read_text())
    # 0, 1, 2, the connection, the script's own copy of stdout, and the listing itself.
    assert len(told["descriptors"]) <= 6, told["descriptors"]
    allowed = re.compile("|".join(name.replace("*", ".*") for name in re.findall(r"[A-Z_]+\*?", LISTED)))
    # Python itself may add LC_CTYPE (PEP 538).
    assert all(allowed.fullmatch(name) for name in told["environment"]), sorted(told["environment"])
    assert told["environment"]["SYNAPSE_WORKER_ID"] == "toy-1"
    assert told["session"] == told["pid"], "a worker leads its own session"
    assert told["ppid"] == os.getpid() and "pytest" not in told["modules"], "it was forked, not started"


CLOEXEC = """
import asyncio, fcntl, json, os, sys
from pathlib import Path
from tests.support.lanes import embed, lanes_in

async def main():
    async with lanes_in(Path(sys.argv[1])) as make:
        lane = make()
        await lane.load()
        inheritable = {}
        for name in os.listdir("/proc/self/fd"):
            fd = int(name)
            try:
                flags = fcntl.fcntl(fd, fcntl.F_GETFD)
                target = os.readlink(f"/proc/self/fd/{fd}")
            except OSError:
                continue
            if fd > 2 and not flags & fcntl.FD_CLOEXEC:
                inheritable[fd] = target
        print(json.dumps(inheritable))

asyncio.run(main())
"""


@pytest.mark.process
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="no /proc")
def test_every_descriptor_of_a_host_is_close_on_exec(runtime_dir):
    """Listener, connections, pipes, pidfds, lock: whatever else the embedding program starts gets none of them."""
    done = subprocess.run(
        [sys.executable, "-c", CLOEXEC, str(runtime_dir / "rt")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        close_fds=True,
        check=True,
    )
    assert json.loads(done.stdout) == {}


@pytest.mark.process
def test_a_probe_sees_what_a_worker_would_see(tmp_path, monkeypatch):
    """Another environment would be another answer, and a foreign command's probe is as foreign as its worker."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("LC_ALL", "C")
    seen = tmp_path / "seen"
    code = (
        f"import json, os; open({str(seen)!r}, 'w').write(json.dumps(dict(os.environ)));"
        'print(\'{"status": "ok", "code": "ok", "required": {}, "observed": {}}\')'
    )
    assert probe.probe((sys.executable, "-c", code)).status == "ok"
    environment = json.loads(seen.read_text())
    assert "AWS_SECRET_ACCESS_KEY" not in environment and environment["LC_ALL"] == "C"


# --- the nonce -------------------------------------------------------------------------------------------------------


@pytest.mark.process
async def test_the_nonce_is_new_for_each_spawn_and_never_told(make, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    report = tmp_path / "report"
    dies = {"rules": [on("EMBED_BATCH", {"stderr": "bye"}, {"signal": "SIGKILL"})]}
    lane = make({**dies, "ready": [{"report": str(report)}]})
    nonces, told = [], []
    for _ in range(2):
        error = await crash(lane)
        argv = json.loads(report.read_text())["argv"]
        nonces.append(argv[argv.index("--nonce") + 1])
        told.append(json.dumps(error.to_dict()))
    told.append(json.dumps(lane.health()))
    assert len(set(nonces)) == 2 and all(re.fullmatch("[0-9a-f]{16}", nonce) for nonce in nonces)
    everything = "\n".join([*told, caplog.text])
    assert not any(nonce in everything for nonce in nonces)


@pytest.mark.process
async def test_a_wrong_nonce_isn_t_echoed(make, caplog):
    caplog.set_level(logging.DEBUG)
    lane = make({"hello": [{"hello": {"nonce": "feedfacefeedface"}}]})
    error = await crash(lane)
    assert "nonce" in error.message
    assert "feedface" not in json.dumps(error.to_dict()) + caplog.text


def test_nonces_are_compared_in_constant_time(monkeypatch):
    compared = []

    def compare(a, b):
        compared.append((a, b))
        return False

    monkeypatch.setattr(handshake.hmac, "compare_digest", compare)
    from tests.worker.test_handshake import NONCE, check, hello

    with pytest.raises(handshake.HandshakeFault):
        check(hello())
    assert compared == [(NONCE.encode(), NONCE.encode())]


# --- before the ACK --------------------------------------------------------------------------------------------------


def test_the_frame_limit_before_the_ack():
    for maximum, limit in ((64 * 2**20, HELLO_MAX_FRAME), (1024, 1024)):
        for length, refused in ((limit + 1, True), (limit, False)):
            host = Connection(Role.HOST, max_frame=maximum)
            host.get_buffer()[:4] = struct.pack("<I", length)
            host.buffer_updated(4)
            if refused:
                with pytest.raises(RemoteProtocolError, match="exceeds"):
                    host.next_event()
            else:
                assert host.next_event() is None


# --- who connects ----------------------------------------------------------------------------------------------------


@pytest.mark.process
@posix
async def test_another_user_s_process_is_turned_away(make, tmp_path, monkeypatch):
    """The peer's uid is the kernel's word; here it is another one for the first two connections."""
    from synapse_host.worker import listener

    real, asked = listener.peer_of, []

    def peer_of(connection):
        peer = real(connection)
        asked.append(peer)
        return handshake.Peer(peer.uid + 1, peer.pid) if len(asked) == 1 else peer

    monkeypatch.setattr(listener, "peer_of", peer_of)
    start = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); print(s.recv(1))"
    # Its first connection comes from "another user"; the worker itself connects afterwards.
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text(
        "import os, subprocess, sys\n"
        "at = sys.argv.index('--socket')\n"
        f"subprocess.run([sys.executable, '-c', {start!r}, sys.argv[at + 1]], check=True)\n"
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"
    )
    lane = make(command=(sys.executable, str(wrapper), *scripted.command({})[1:]))
    await serve(lane)
    assert len(asked) == 2 and lane.health()["strikes"] == 0
