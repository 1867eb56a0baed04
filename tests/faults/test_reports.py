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

from engines.ane.artifact import prepared
from engines.ane.stderr_scan import StderrScan
from engines.protocol.errors import EngineError, ErrorCode
from synapse_host.config import Windows
from synapse_host.errors import InvalidRequest
from synapse_host.worker import process as process_module
from synapse_host.worker.listener import SUN_PATH, RuntimeDirectory
from synapse_host.worker.process import WorkerProcess
from tests.support.lanes import FAST, FINE, SHORT, Lanes, crash, embed, on, poison, serve, spawns, until

pytestmark = [pytest.mark.process, pytest.mark.fault]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def make(tmp_path: Path) -> Lanes:
    return Lanes(tmp_path / "rt")


def exists(pid: int) -> bool:
    """Whether the process is there at all, as a zombie too."""
    return psutil.pid_exists(pid)


def end(pid: int) -> None:
    """Kill what a missing guard left behind."""
    with contextlib.suppress(OSError):
        os.kill(pid, 9)


@pytest.mark.report("huggingface/trl#6628")
async def test_ends_of_pipes_that_siblings_hold():
    """huggingface/trl#6628: a pipe's end kept open elsewhere hides a death; a worker inherits nothing of the host's."""
    read, write = os.pipe()
    os.set_inheritable(write, True)
    sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    siblings = [WorkerProcess(sleeper, env={}, cwd=None, output=lambda stream, data: None) for _ in range(3)]
    try:
        os.close(write)
        os.set_blocking(read, False)
        assert os.read(read, 1) == b"", "a worker holds a descriptor of the host's"
        first = siblings[0]
        first.kill()
        assert await first.wait(30)
        # Its own log pipes end with it, though two siblings live.
        await asyncio.wait_for(first.drain(limit=600), 30)
    finally:
        os.close(read)
        for sibling in siblings:
            await sibling.destroy()


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


@pytest.mark.report("dask/distributed#8537")
async def test_a_loop_that_holds_the_gil(make):
    """dask/distributed#8537: a worker's own watchdog starved with it; ours sits in the host and asks for the stacks."""
    lane = make(poison({"spin": True}), config=SHORT)
    error = await crash(lane)
    assert error.details["cause"] == "silence" and "do_spin" in error.details["log_tail"]
    await serve(lane)


@pytest.mark.report("ollama/ollama#7779")
async def test_unload_that_never_answers(make):
    """ollama/ollama#7779 (also 12179): a model for ever 'stopping'; UNLOAD has a window, then the worker goes."""
    config = dataclasses.replace(FAST, windows=Windows(setup=20.0, control=0.3, ping=20.0, inference=20.0))
    lane = make({"rules": [on("UNLOAD", {"sleep": 600})]}, config=config)
    await lane.load()
    await lane.unload()
    assert lane.health()["models"] == [] and lane.health()["worker_pid"] is None
    await serve(lane)


@pytest.mark.report("xorbitsai/inference#3202")
async def test_stop_called_many_times(make):
    """xorbitsai/inference#3202: repeated stops hung; every one of twenty returns, and only when the worker is gone."""
    lane = make({"shutdown": [{"sleep": 0.3}]})
    await lane.load()
    pid = lane.health()["worker_pid"]

    async def stop() -> None:
        await lane.aclose()
        assert not exists(pid), "stopped, says it, and the worker runs"

    await asyncio.gather(*(stop() for _ in range(20)))
    await stop()


@pytest.fixture
def directory(runtime_dir):
    made = RuntimeDirectory.open(runtime_dir)
    yield made
    made.close()


@pytest.mark.report("agronholm/anyio#1166")
async def test_output_while_stopping(make):
    """agronholm/anyio#1166: closing waited for a child that waited for its pipe; ours is killed before any wait."""
    flood = {"bytes": 2**20, "text": "x"}
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
def test_core_ml_compilers(tmp_path):
    """apple/coremltools#2758 (also 2367, 2110, ggml-org/whisper.cpp#937, soniqo/speech-swift#286): a compile that
    fails in silence, or starts anew at every launch."""
    scan = StderrScan()
    with scan:
        os.write(2, b"E5RT: ANECCompile() FAILED\n")
    with pytest.raises(EngineError) as caught:
        scan.check("function s128")
    assert caught.value.code is ErrorCode.INVALID_PLACEMENT
    folder = tmp_path / "bundle"
    folder.mkdir()
    function = {"inputs": {}, "outputs": {}, "bundle": "b.mlmodelc", "multi": False, "first_load_ms": 5}
    source = "sha256:" + "1" * 64
    (folder / "preparation.json").write_text(
        json.dumps(
            {"source_digest": source, "compiled_digest": source, "os_build": "24A335", "functions": {"s128": function}}
        )
    )
    compiled = folder / "compiled"
    assert prepared(compiled, source_digests=[source], os_build="24A335", allow_cold=False).functions["s128"]
    with pytest.raises(EngineError, match="24B83") as caught:
        prepared(compiled, source_digests=[source], os_build="24B83", allow_cold=False)
    assert caught.value.code is ErrorCode.SPECIALIZATION_MISSING


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


@pytest.mark.report("vllm-project/vllm#12754")
async def test_a_fresh_interpreter(make, tmp_path):
    """vllm-project/vllm#12754 (also 8893, huggingface/tokenizers#187): CUDA and pools don't survive a fork; we exec."""
    from tokenizers import Tokenizer, models

    # The host has used its tokenizer's thread pool, and this process has far more loaded than a worker may see.
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).encode_batch(["a"] * 100)
    report = tmp_path / "report"
    lane = make({"ready": [{"report": str(report)}]})
    await serve(lane)
    told = json.loads(report.read_text())
    inherited = {"pytest", "_pytest", "hypothesis", "tokenizers", "synapse_host"} & set(told["modules"])
    assert not inherited, f"the worker was forked, not started: {inherited}"
    assert told["pid"] == lane.health()["worker_pid"] and told["ppid"] == os.getpid()


@pytest.mark.report("ollama/ollama#12472")
async def test_a_kill_that_does_not_take(make, tmp_path, monkeypatch):
    """ollama/ollama#12472: a process stuck in a driver can't be killed; the host goes on, starts none beside it."""
    state = tmp_path / "state"
    lane = make(poison({"sleep": 600}, state=str(state), ignore=["EOF"]), config=SHORT, own_worker=False)
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
