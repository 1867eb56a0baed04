"""Pipes, descriptors and sockets: reports 29 to 39."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import stat
import struct
import sys
import tracemalloc
from pathlib import Path

import pytest

from engines.protocol.connection import Connection, Role
from engines.protocol.errors import RemoteProtocolError
from engines.protocol.messages import EmbedBatch, Item, Pooling
from synapse_host.errors import BackendMissing, InvalidRequest
from synapse_host.worker.listener import SUN_PATH, RuntimeDirectory
from tests.conftest import descriptors
from tests.faults.reports.trial import end, exists
from tests.support.kernel32 import stand_in
from tests.support.lanes import EMBED, FAST, crash, poison, serve, soon

pytestmark = [pytest.mark.process, pytest.mark.fault]

MIB = 2**20


@pytest.fixture
def directory(runtime_dir):
    made = RuntimeDirectory.open(runtime_dir)
    yield made
    made.close()


def refused(call) -> str:
    with pytest.raises(InvalidRequest) as caught:
        call()
    return caught.value.details["reason"]


@pytest.mark.report("bytedance/SandboxFusion#53")
async def test_report_29_output_that_nobody_reads(make):
    """bytedance/SandboxFusion#53: a child stood still at 200 KB of output; both pipes are drained all the time."""
    flood = {"bytes": MIB, "text": "x"}
    lane = make(poison({"stdout": flood}, {"stderr": flood}, {"reply": {}}))
    await lane.load()
    await serve(lane, 13, deadline=soon(20.0))


@pytest.mark.report("agronholm/anyio#1166")
async def test_report_30_output_while_stopping(make):
    """agronholm/anyio#1166: closing waited for a child that waited for its pipe; ours is killed before any wait."""
    flood = {"bytes": MIB, "text": "x"}
    lane = make(
        {"ignore": ["SIGTERM", "EOF"], "shutdown": [{"stderr": flood}, {"stdout": flood}, {"sleep": 600}]},
        config=dataclasses.replace(FAST, shutdown_grace=0.3),
    )
    await lane.load()
    pid = lane.health()["worker_pid"]
    try:
        await lane.aclose()
        assert not exists(pid)
    finally:
        end(pid)


@pytest.mark.report("python/cpython#151983")
async def test_report_31_a_grandchild_that_holds_stdout(make, tmp_path):
    """python/cpython#151983 (gh-119710): waiting for a child waited for its grandchild's pipe; the exit is enough."""
    pid_file = tmp_path / "pid"
    grandchild = {"grandchild": {"new_session": True, "pid_file": str(pid_file), "seconds": 600}}
    lane = make(poison(grandchild, {"signal": "SIGKILL"}))
    try:
        assert (await crash(lane)).details["signal"] == "SIGKILL"
        await serve(lane)
    finally:
        end(int(pid_file.read_text()))


@pytest.mark.report("MagicStack/uvloop#185")
async def test_report_32_a_spawn_that_fails(make):
    """MagicStack/uvloop#185 (also python/cpython#79902, #156400): failed spawns lost descriptors, ours none."""
    lane = make(command=("/no/such/program",))
    with pytest.raises(BackendMissing, match="/no/such/program") as caught:
        await serve(lane)
    assert caught.value.exit_code == 4
    before = descriptors()
    for _ in range(300):
        with pytest.raises(BackendMissing):
            await serve(lane)
    assert descriptors() == before
    assert list(make.runtime.workers.iterdir()) == [], "a socket file is left"
    assert lane.health()["strikes"] == 0


@pytest.mark.report("quintel/pyetm#205")
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
async def test_report_33_few_descriptors(make):
    """quintel/pyetm#205: 256 descriptors are macOS's limit; running out is said by name and is nobody's strike."""
    import resource

    lane, working = make(), make()
    await working.load()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(entry.name) for entry in Path("/dev/fd").iterdir())
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
        with contextlib.ExitStack() as others:
            with contextlib.suppress(OSError):
                while True:
                    others.enter_context(open(os.devnull, "rb"))  # noqa: PTH123
            error = await crash(lane)
        assert error.details["errno"] == "EMFILE" and "open files" in error.message
        assert lane.health()["strikes"] == 0
        await serve(working)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    await serve(lane)


@pytest.mark.report("Kludex/uvicorn#433")
def test_report_34_a_socket_that_is_left(directory):
    """Kludex/uvicorn#433 (also neovim/neovim#37378): 'address in use'; the dead goes, the living and files stay."""
    path = directory.workers / "toy-1.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(os.fspath(path))
    directory.listen("toy-1").close()
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.bind(os.fspath(path))
        foreign.listen(1)
        inode = path.lstat().st_ino
        assert refused(lambda: directory.listen("toy-1")) == "path_taken"
        assert path.lstat().st_ino == inode
    path.unlink()
    path.write_text("somebody's")
    assert refused(lambda: directory.listen("toy-1")) == "path_taken"
    assert path.read_text() == "somebody's"


@pytest.mark.report("benoitc/gunicorn#1298")
def test_report_35_who_may_unlink(directory):
    """benoitc/gunicorn#1298 (also MagicStack/uvloop#28): a socket was unlinked by one who didn't own it."""
    missing = directory.listen("toy-1")
    missing.path.unlink()
    missing.close()
    replaced = directory.listen("toy-2")
    # Beside the old one, so that the new file can't get its inode.
    other = directory.workers / "other"
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.bind(os.fspath(other))
        other.rename(replaced.path)
        replaced.close()
        assert replaced.path.is_socket(), "somebody else's socket was removed"
    replaced.path.unlink()


@pytest.mark.report("dotnet/runtime#79503")
@pytest.mark.parametrize("letter", ["d", "é"])
def test_report_36_long_paths(runtime_dir, letter):
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


@pytest.mark.report("python/cpython#124779")
async def test_report_37_connect_and_drop(make, directory):
    """python/cpython#124779 (also #100573, python-trio/trio#1773): one dropped connection ended an accept loop."""

    listener = directory.listen("toy-1")
    seen = 0

    def admit(peer) -> bool:
        nonlocal seen
        seen += 1
        return seen > 1000

    accepting = asyncio.create_task(listener.accept(admit))
    while not accepting.done():
        try:
            with socket.socket(socket.AF_UNIX) as client:
                client.setblocking(False)
                client.connect(os.fspath(listener.path))
        except BlockingIOError:
            pass
        await asyncio.sleep(0)
    (await accepting).close()
    listener.close()

    tokens = 16 * MIB
    payload = bytes(4 * tokens)

    def build(req_id, ref):
        items = [Item("0", tokens)]
        request = EmbedBatch(req_id=req_id, model_ref=ref, pooling=Pooling.MEAN, normalize=False, items=items)
        return request, payload

    lane = make({"vectors": "echo", "dims": tokens})
    _, vectors = await lane.submit(build, stage=EMBED)
    assert vectors.nbytes == 64 * MIB and vectors[12345] == 0 and vectors.flags.writeable
    # On Windows: byte mode, so that a large frame is a stream and not a message. The system itself is not measured.
    with stand_in() as kernel:
        from synapse_host.worker import windows

        windows.listen(Path("rt"), "toy-1").close()
    assert kernel.created[0]["pipe_mode"] & (0x4 | 0x2) == 0, "message type or message read mode"


@pytest.mark.report("python/cpython#10305")
@pytest.mark.parametrize("length", [1025, 0, 0x80000000, 0xFFFFFFFF])
def test_report_38_length_fields(length):
    """python/cpython#10305 (bpo-17560): a length overflowed; ours is compared before a byte is allocated."""
    asked: list[int] = []

    def allocate(size: int) -> memoryview:
        asked.append(size)
        return memoryview(bytearray(size))

    host = Connection(Role.HOST, max_frame=1024, allocate=allocate)
    tracemalloc.start()
    try:
        view = host.get_buffer()
        view[:4] = struct.pack("<I", length)
        host.buffer_updated(4)
        with pytest.raises(RemoteProtocolError):
            host.next_event()
        assert tracemalloc.get_traced_memory()[1] < MIB and asked == []
    finally:
        tracemalloc.stop()
