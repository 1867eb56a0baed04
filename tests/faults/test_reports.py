"""Public reports whose fault no other test keeps away; most carry their mark on the test or the row that proves it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from engines.ane.stderr_scan import StderrScan
from engines.protocol.errors import EngineError, ErrorCode
from synapse_host.config import Windows
from synapse_host.errors import InvalidRequest
from synapse_host.worker import process as process_module
from synapse_host.worker.listener import SUN_PATH, RuntimeDirectory
from synapse_host.worker.process import WorkerProcess
from tests.support.lanes import FAST, FINE, POISON, crash, embed, on, poison, serve, spawns, until

pytestmark = [pytest.mark.process, pytest.mark.fault]
ROOT = Path(__file__).resolve().parents[2]


def exists(pid: int) -> bool:
    """Whether the process is there at all, as a zombie too."""
    return psutil.pid_exists(pid)


def end(pid: int) -> None:
    """Kill what a missing guard left behind."""
    with contextlib.suppress(OSError):
        os.kill(pid, 9)


@pytest.mark.report("dask/distributed#1303")
async def test_a_worker_that_ignores_every_polite_word(make):
    """dask/distributed#1303: a second worker was started beside one that would not leave; ours is dead first."""
    stubborn = {"ignore": ["SIGTERM", "SIGINT", "EOF"], "shutdown": [{"sleep": 600}], "eof": [{"sleep": 600}]}
    lane = make(stubborn, config=dataclasses.replace(FAST, shutdown_grace=0.1))
    await lane.load()
    old = lane.health()["worker_pid"]
    try:
        await lane.probe(embed([FINE]))
        assert not exists(old), "two workers at once"
        assert lane.health()["generation"] == 2
    finally:
        end(old)


@pytest.mark.report("ollama/ollama#7779")
async def test_unload_that_never_answers(make):
    """ollama/ollama#7779 (also 12179): a model for ever 'stopping'; UNLOAD has a window, then the worker goes."""
    config = dataclasses.replace(FAST, windows=Windows(setup=20.0, control=0.3, ping=20.0, inference=20.0))
    lane = make({"rules": [on("UNLOAD", {"sleep": 600})]}, config=config)
    await lane.load()
    await lane.unload()
    assert lane.health()["models"] == [] and lane.health()["worker_pid"] is None
    await serve(lane)


@pytest.mark.report("agronholm/anyio#1166")
@pytest.mark.report("xorbitsai/inference#3202")
async def test_output_while_stopping_and_many_stops(make):
    """Closing waited for a child that waited for its pipe, and repeated stops hung: all end when the worker is gone."""
    flood = {"bytes": 2**20, "text": "x"}
    lane = make(
        {"ignore": ["SIGTERM", "EOF"], "shutdown": [{"stderr": flood}, {"stdout": flood}, {"sleep": 600}]},
        config=dataclasses.replace(FAST, shutdown_grace=0.3),
    )
    await lane.load()
    pid = lane.health()["worker_pid"]

    async def stop() -> None:
        await lane.aclose()
        assert not exists(pid), "a stop returned while the worker ran"

    try:
        await asyncio.gather(*(stop() for _ in range(20)))
    finally:
        end(pid)


@pytest.mark.report("benoitc/gunicorn#1298")
def test_who_may_unlink(directory):
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


@pytest.mark.report("apple/coremltools#2758")
def test_a_core_ml_compiler_that_fails_in_silence():
    """apple/coremltools#2758: the load succeeds, and only stderr says that nothing was compiled."""
    scan = StderrScan()
    with scan:
        os.write(2, b"E5RT: ANECCompile() FAILED\n")
    with pytest.raises(EngineError) as caught:
        scan.check("function s128")
    assert caught.value.code is ErrorCode.INVALID_PLACEMENT


PINNED = """
import json, os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from engines.cuda import settings
from engines import machine
from synapse_host.placement import hardware
from synapse_host.supervision.queueing import Permits
print(json.dumps([settings.parse({}, device="cpu", precision="f32").threads, machine.usable_cores(),
                  Permits().limit("cpu"), hardware.detect().cores]))
"""


@pytest.mark.report("microsoft/onnxruntime#10166")
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no cpuset on this system")
def test_threads_under_a_cpuset():
    """microsoft/onnxruntime#10166 (also 8313, 7207, headroomlabs-ai/headroom#2885): threads by the machine's size."""
    done = subprocess.run(
        [sys.executable, "-c", PINNED],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [1, 1, 1, 1]


@pytest.mark.report("ollama/ollama#12472")
async def test_a_kill_that_does_not_take(make, tmp_path, monkeypatch):
    """ollama/ollama#12472: a process stuck in a driver can't be killed; the host goes on, starts none beside it."""
    state = tmp_path / "state"
    # Long enough for a healthy request of a busy machine.
    patient = dataclasses.replace(FAST, windows=Windows(setup=20.0, control=20.0, ping=20.0, inference=3.0))
    lane = make(poison({"sleep": 600}, state=str(state), ignore=["EOF"]), config=patient, own_worker=False)
    other = make()
    await lane.load()
    pid = lane.health()["worker_pid"]
    try:
        with monkeypatch.context() as patch:
            patch.setattr(process_module, "REAP_LIMIT", 0.05)
            patch.setattr(WorkerProcess, "kill", lambda self: None)
            assert (await crash(lane)).details["cause"] == "silence"
            refused = await crash(lane, FINE)
            assert "can't be killed yet" in refused.message and not refused.details["quarantined"]
            assert spawns(state) == 1 and lane.health()["strikes"] == 1
            await serve(other)
    finally:
        end(pid)
    await until(lambda: not exists(pid))
    await serve(lane)
    assert spawns(state) == 2


def refused(call) -> str:
    with pytest.raises(InvalidRequest) as caught:
        call()
    return caught.value.details["reason"]


@pytest.mark.report("microsoft/onnxruntime#9313")
async def test_memory_that_grows_is_seen(make):
    """microsoft/onnxruntime#9313 (also 11118): a worker grew with every new shape; PING tells it, health shows it."""
    lane = make(poison({"allocate_mb": 64}))
    await lane.load()
    await lane.ping()
    before = lane.health()
    await serve(lane, POISON)
    await lane.ping()
    after = lane.health()
    assert before["rss_growth_mb"] == 0 and before["rss_mb"] > 5
    assert after["rss_growth_mb"] >= 48 and after["rss_mb"] - before["rss_mb"] == after["rss_growth_mb"]


@pytest.mark.report("python/cpython#151983")
async def test_a_grandchild_that_holds_stdout(make, tmp_path):
    """python/cpython#151983 (gh-119710): waiting for a child waited for its grandchild's pipe; the exit is enough."""
    pid_file = tmp_path / "pid"
    grandchild = {"grandchild": {"new_session": True, "pid_file": str(pid_file), "seconds": 600}}
    lane = make(poison(grandchild, {"signal": "SIGKILL"}))
    try:
        assert (await crash(lane)).details["signal"] == "SIGKILL"
        await serve(lane)
    finally:
        end(int(pid_file.read_text()))


@pytest.mark.report("Kludex/uvicorn#433")
def test_a_socket_that_is_left(directory):
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
