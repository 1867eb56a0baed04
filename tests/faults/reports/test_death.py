"""Hangs, deaths and orphans: public reports 1 to 23."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.decoding import decode_from_worker
from engines.protocol.messages import EmbedBatch, Err, Item, Load, Loaded, Pooling, encode
from engines.runtime.dispatch import Dispatcher
from engines.runtime.progress import silent
from synapse_host import process as process_module
from synapse_host.config import Windows
from synapse_host.errors import EngineCrashed
from synapse_host.process import WorkerProcess
from tests.faults.reports.trial import ROOT, TREE, alive, end, exists, run_limited
from tests.host.conftest import EMBED, FAST, FINE, POISON, SHORT, crash, embed, on, poison, serve, spawns, until
from tests.support import scripted
from tests.support.toy_engine import ToyEngine

pytestmark = [pytest.mark.process, pytest.mark.fault]


@pytest.mark.report("huggingface/text-embeddings-inference#694")
async def test_report_01_one_input_stops_the_server(make):
    """huggingface/text-embeddings-inference#694: one input hung a whole server; here it costs one lane one window."""
    ill, well = make(poison({"sleep": 600}), config=SHORT), make()
    await asyncio.gather(ill.load(), well.load())
    stuck = asyncio.create_task(crash(ill))
    served = 0
    while not stuck.done():
        await serve(well)
        served += 1
    assert (await stuck).details["cause"] == "silence" and served > 10
    assert well.health()["generation"] == 1 and well.health()["strikes"] == 0
    await serve(ill)


@pytest.mark.report("triton-inference-server/server#5381")
async def test_report_02_death_by_the_kernel(make):
    """triton-inference-server/server#5381: the kernel's SIGKILL in LOAD and in mid-frame ends in a typed crash."""
    loading = make({"rules": [on("LOAD", {"signal": "SIGKILL"})]})
    with pytest.raises(EngineCrashed) as caught:
        await loading.load()
    assert caught.value.details["stage"] == "load" and caught.value.details["signal"] == "SIGKILL"
    header = {"frame": {"type": "VECTORS", "req_id": "$req_id", "dims": 8, "n": 1}}
    answering = make(poison(header, {"torn": {"length": 32, "send": 5}}, {"signal": "SIGKILL"}))
    error = await crash(answering)
    assert error.details["signal"] == "SIGKILL" and "inside a frame" in error.message
    await serve(answering)


@pytest.mark.report("triton-inference-server/server#7230")
async def test_report_03_zombie_and_good_health(make):
    """triton-inference-server/server#7230: a dead stub stayed a zombie while health said 200; reaped and told here."""
    made = [make() for _ in range(3)]
    await asyncio.gather(*(lane.load() for lane in made))
    pids = [lane.health()["worker_pid"] for lane in made]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    await until(lambda: all(lane.health()["worker_pid"] is None for lane in made))
    assert not any(map(exists, pids)), "a zombie is left"
    assert [lane.health()["state"] for lane in made] == ["stopped"] * 3


@pytest.mark.report("triton-inference-server/server#8841")
async def test_report_04_an_abort_is_counted(make):
    """triton-inference-server/server#8841: an abort nobody counted; here a strike, and every request has its end."""
    lane = make(poison({"abort": True}))
    firsts = [*range(20, 39), POISON]
    outcomes = await asyncio.gather(*(lane.submit(embed([n, 1]), stage=EMBED) for n in firsts), return_exceptions=True)
    crashed = [outcome for outcome in outcomes if isinstance(outcome, EngineCrashed)]
    served = [outcome for outcome in outcomes if isinstance(outcome, tuple)]
    assert (len(served), len(crashed)) == (19, 1)
    health = lane.health()
    assert health["strikes"] == 1 and health["last_fault"]["signal"] == "SIGABRT"


@pytest.mark.report("triton-inference-server/server#8448")
async def test_report_05_a_death_with_500_requests_queued(make, tmp_path):
    """triton-inference-server/server#8448: a stub's death at high concurrency hung everything that waited."""
    go = tmp_path / "go"
    lane = make(
        poison({"wait_for": str(go)}, {"signal": "SIGKILL"}), config=dataclasses.replace(FAST, queue_limit=1000)
    )
    await lane.load()
    pid = lane.health()["worker_pid"]
    dying = asyncio.create_task(crash(lane))
    queued = [asyncio.create_task(serve(lane, 100 + n)) for n in range(500)]
    await until(lambda: lane.health()["waiting"] == 500)
    go.touch()
    await asyncio.gather(dying, *queued)
    assert not exists(pid) and lane.health()["generation"] == 2


@pytest.mark.report("vllm-project/vllm#41530")
async def test_report_06_one_of_three_is_stopped(make):
    """vllm-project/vllm#41530: one stuck worker took the engine with it; a stopped one is killed at its window."""
    ill, *well = make(poison({"signal": "SIGSTOP"}), config=SHORT), make(), make()
    await asyncio.gather(*(lane.load() for lane in [ill, *well]))
    pid = ill.health()["worker_pid"]
    try:
        error = await crash(ill)
        assert error.details["cause"] == "silence" and not exists(pid), "a stopped process takes no polite signal"
        for lane in well:
            await serve(lane)
            assert lane.health()["generation"] == 1
        await serve(ill)
    finally:
        end(pid)


@pytest.mark.report("vllm-project/vllm#2050")
async def test_report_07_ten_waiters_of_a_dead_worker(make, tmp_path):
    """vllm-project/vllm#2050: one worker died and later requests were stuck without an error."""
    go = tmp_path / "go"
    lane = make(poison({"wait_for": str(go)}, {"signal": "SIGKILL"}))
    await lane.load()
    running = asyncio.create_task(lane.submit(embed([POISON]), stage=EMBED))
    waiting = [asyncio.create_task(serve(lane, 20 + n)) for n in range(10)]
    await until(lambda: lane.health()["waiting"] == 10)
    go.touch()
    outcomes = await asyncio.gather(running, *waiting, return_exceptions=True)
    assert isinstance(outcomes[0], EngineCrashed) and outcomes[0].details["signal"] == "SIGKILL"
    # The broken request was not replayed: one death, one new worker.
    assert outcomes[1:] == [None] * 10 and lane.health()["generation"] == 2


HOST = """
import asyncio, sys
from pathlib import Path
from tests.host.conftest import FAST, embed
from tests.faults.reports.trial import ReportLanes

async def main():
    make = ReportLanes(Path(sys.argv[1]))
    lane = make(sys.argv[2])
    await lane.load()
    asyncio.ensure_future(lane.submit(embed([13, 1]), stage="embed_batch"))
    while not Path(sys.argv[3]).exists():
        await asyncio.sleep(0.005)
    print(lane.health()["worker_pid"], flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def orphan(folder: Path, **script) -> bool:
    """Start a host whose worker computes, SIGKILL the host, and return whether the worker ends as well."""
    busy = folder / "busy"
    text = scripted.command(poison({"touch": str(busy)}, *script.pop("do"), **script))[-1]
    with subprocess.Popen(
        [sys.executable, "-c", HOST, str(folder / "rt"), text, str(busy)],
        stdout=subprocess.PIPE,
        env={**os.environ, **TREE},
        cwd=ROOT,
    ) as host:
        assert host.stdout is not None
        pid = int(host.stdout.readline())
        host.kill()
        host.wait()
    try:
        run_limited(lambda: until(lambda: not alive(pid)))
    except TimeoutError:
        return False
    finally:
        end(pid)
    return True


@pytest.mark.report("vllm-project/vllm#55510")
def test_report_08_the_host_is_killed(tmp_path):
    """vllm-project/vllm#55510 (also 34643, 43060): a killed host's workers kept the GPU; the socket's end ends ours."""
    assert orphan(tmp_path, do=[{"ccall": 600}], parent_death=False), "the worker outlived its host"


@pytest.mark.report("huggingface/trl#6628")
def test_report_09_ends_of_pipes_that_siblings_hold():
    """huggingface/trl#6628: a pipe's end kept open elsewhere hides a death; a worker inherits nothing of the host's."""

    async def scenario():
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

    run_limited(scenario)


def raising(error: Exception):
    def hook(**details):
        raise error

    return hook


@pytest.mark.report("huggingface/sentence-transformers#3920")
async def test_report_10_an_error_that_cannot_be_sent(make):
    """huggingface/sentence-transformers#3920: an exception that could not be pickled hung its parent; ours is text."""
    request = EmbedBatch(req_id="1", model_ref="toy:0", pooling=Pooling.MEAN, normalize=False, items=[Item("0", 1)])
    engine = ToyEngine()
    dispatcher = Dispatcher(engine, engine.identity())
    load = Load("load", "path", "sha256:" + "0" * 64, "gguf")
    assert isinstance(dispatcher.handle(load, None, silent()).reply, Loaded)
    for text in ("a bad \udcff byte", "x" * 2**20, "\x00\u2028"):
        engine.hook = raising(EngineError(ErrorCode.INFERENCE_FAILED, text))
        answer = dispatcher.handle(request, memoryview(struct.pack("<i", 1)), silent())
        frame = encode(answer.reply)
        told = decode_from_worker(frame)
        assert isinstance(told, Err) and told.code is ErrorCode.INFERENCE_FAILED and len(frame) < 2**16
    lane = make(poison({"raise": "an object nobody can pickle"}))
    error = await crash(lane)
    assert error.details["exit_status"] == 1 and "an object nobody can pickle" in error.details["log_tail"]
    await serve(lane)


def large() -> tuple[int, bytes]:
    """A row of ids that fills a whole frame of 64 MiB."""
    return 16 * 2**20, bytes(64 * 2**20)


@pytest.mark.report("noxdafox/pebble#97")
async def test_report_11_the_peer_dies_while_the_host_sends(make):
    """noxdafox/pebble#97: blocked in send to a dead child; ours never blocks, and the window covers sending."""
    tokens, payload = large()

    def build(req_id, ref):
        items = [Item("0", tokens)]
        return EmbedBatch(req_id=req_id, model_ref=ref, pooling=Pooling.MEAN, normalize=False, items=items), payload

    # A worker that loads and then never reads again.
    deaf = {"rules": [on("LOAD", {"reply": {}}, {"signal": "SIGSTOP"})]}
    killed, silent = make(deaf), make(deaf, config=SHORT)
    await killed.load()
    sending = asyncio.create_task(killed.submit(build, stage=EMBED))
    await asyncio.sleep(0.1)
    assert not sending.done()
    os.kill(killed.health()["worker_pid"], signal.SIGKILL)
    with pytest.raises(EngineCrashed) as caught:
        await sending
    assert caught.value.details["signal"] == "SIGKILL"
    with pytest.raises(EngineCrashed) as caught:
        await silent.submit(build, stage=EMBED)
    assert caught.value.details["cause"] == "silence"


@pytest.mark.report("python/cpython#10441")
async def test_report_12_exit_inside_a_request(make):
    """python/cpython#10441 (bpo-22393): a pool hung when its worker left; here the request gets the exit status."""
    lane = make(poison({"exit": 123}))
    error = await crash(lane)
    assert error.details["exit_status"] == 123 and "exit status 123" in error.message
    await serve(lane)


@pytest.mark.report("joblib/loky#360")
def test_report_13_the_host_is_killed_while_c_code_holds_the_gil(tmp_path):
    """joblib/loky#360: children outlived a killed parent; the kernel's signal ends even one that holds its GIL."""
    if sys.platform != "linux":
        pytest.skip("the parent-death signal is Linux's; elsewhere a GIL-holding call can't be ended from inside")
    assert orphan(tmp_path, do=[{"hold_gil": 600}], ignore=["EOF"]), "the worker outlived its host"


@pytest.mark.report("Lightning-AI/LitServe#532")
async def test_report_14_a_worker_that_crashed_while_idle(make):
    """Lightning-AI/LitServe#532: the worker was dead and the server healthy; here health follows the death."""
    lane = make()
    await serve(lane)
    assert lane.health()["state"] == "idle"
    os.kill(lane.health()["worker_pid"], signal.SIGKILL)
    await until(lambda: lane.health()["strikes"] == 1)
    health = lane.health()
    assert (health["state"], health["worker_pid"], health["models"]) == ("stopped", None, [])
    assert (health["last_fault"]["stage"], health["last_fault"]["signal"]) == ("idle", "SIGKILL")
    await serve(lane)
    assert lane.health()["generation"] == 2


@pytest.mark.report("dask/distributed#1303")
async def test_report_15_a_worker_that_ignores_every_polite_word(make):
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
async def test_report_16_a_loop_that_holds_the_gil(make):
    """dask/distributed#8537: a worker's own watchdog starved with it; ours sits in the host and asks for the stacks."""
    lane = make(poison({"spin": True}), config=SHORT)
    error = await crash(lane)
    assert error.details["cause"] == "silence" and "do_spin" in error.details["log_tail"]
    await serve(lane)


@pytest.mark.report("dask/distributed#1863")
async def test_report_17_no_storm_of_restarts(make, tmp_path):
    """dask/distributed#1863: restarted for ever; after two deaths in a row the lane is shut."""
    state = tmp_path / "state"
    lane = make({"start": [{"exit": 1}], "state": str(state)})
    errors = [await crash(lane) for _ in range(5)]
    assert spawns(state) == 2
    assert [error.details["quarantined"] for error in errors] == [False, True, True, True, True]


@pytest.mark.report("ollama/ollama#7779")
async def test_report_18_unload_that_never_answers(make):
    """ollama/ollama#7779 (also 12179): a model for ever 'stopping'; UNLOAD has a window, then the worker goes."""
    config = dataclasses.replace(FAST, windows=Windows(setup=20.0, control=0.3, ping=20.0, inference=20.0))
    lane = make({"rules": [on("UNLOAD", {"sleep": 600})]}, config=config)
    await lane.load()
    await lane.unload()
    assert lane.health()["models"] == [] and lane.health()["worker_pid"] is None
    await serve(lane)


ENDS = {
    "SIGKILL": ({"signal": "SIGKILL"}, "the worker's process ended during a request (SIGKILL)"),
    "SIGABRT": ({"abort": True}, "the worker's process ended during a request (SIGABRT)"),
    "SIGSEGV": ({"segfault": True}, "the worker's process ended during a request (SIGSEGV)"),
    "SIGFPE": ({"signal": "SIGFPE"}, "the worker's process ended during a request (SIGFPE)"),
    "SIGILL": (
        {"signal": "SIGILL"},
        "the worker's process ended during a request: llama-cpp-python was built for another CPU, rebuild it",
    ),
    "7": ({"exit": 7}, "the worker's process ended during a request (exit status 7)"),
}


@pytest.mark.report("ollama/ollama#14093")
async def test_report_19_stopped_unexpectedly_and_no_word_why(make):
    """ollama/ollama#14093 (also 14983): 'has unexpectedly stopped'; here signal or status and the last 8 KiB."""

    async def one(make, name: str) -> None:
        action, sentence = ENDS[name]
        lane = make(poison({"stderr": {"bytes": 20_000, "text": "0123456789"}}, action), lane_id=f"end-{name}")
        error = await crash(lane)
        assert error.message == f"lane end-{name}: {sentence}"
        details = error.details
        if name == "7":
            assert (details["exit_status"], details["signal"]) == (7, None)
        else:
            assert (details["exit_status"], details["signal"]) == (None, name)
        if name in ("SIGKILL", "7"):
            # What nothing followed: faulthandler adds its own words to the other ends.
            assert details["log_tail"] == "[stderr] " + ("0123456789" * 2000)[-8192:]

    for pair in (("SIGKILL", "SIGABRT"), ("SIGSEGV", "SIGFPE"), ("SIGILL", "7")):
        await asyncio.gather(*(one(make, name) for name in pair))


@pytest.mark.report("ollama/ollama#12472")
async def test_report_20_a_kill_that_does_not_take(make, tmp_path, monkeypatch):
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


@pytest.mark.report("sgl-project/sglang#3836")
async def test_report_21_idle_is_not_silence(make):
    """sgl-project/sglang#3836: a watchdog fired after a quiet time; ours watches exchanges only."""
    lane = make(config=dataclasses.replace(FAST, windows=Windows(20.0, 20.0, 20.0, inference=0.3)))
    await serve(lane)
    await asyncio.sleep(1.5)
    assert lane.health()["strikes"] == 0
    await serve(lane)
    assert lane.health()["generation"] == 1


@pytest.mark.report("NVIDIA/TensorRT-LLM#15612")
async def test_report_22_a_hang_while_stopping(make, tmp_path):
    """NVIDIA/TensorRT-LLM#15612 and #16404: a polite stop deadlocked, a tree kill hit its host; ours is bounded."""
    pid_file = tmp_path / "pid"
    hung = {
        "ready": [{"grandchild": {"pid_file": str(pid_file), "seconds": 600}}],
        "ignore": ["SIGTERM", "EOF"],
        "shutdown": [{"sleep": 600}],
    }
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]) as sibling:
        try:
            lane = make(hung, config=dataclasses.replace(FAST, shutdown_grace=0.1))
            await lane.load()
            pid = lane.health()["worker_pid"]
            await lane.aclose()
            assert not exists(pid)
            await until(lambda: not alive(int(pid_file.read_text())))
            assert sibling.poll() is None, "a process of the host's own was hit"
        finally:
            sibling.kill()
            end(int(pid_file.read_text()))


@pytest.mark.report("xorbitsai/inference#3202")
async def test_report_23_stop_called_many_times(make):
    """xorbitsai/inference#3202: repeated stops hung; every one of twenty returns, and only when the worker is gone."""
    lane = make({"shutdown": [{"sleep": 0.3}]})
    await lane.load()
    pid = lane.health()["worker_pid"]

    async def stop() -> None:
        await lane.aclose()
        assert not exists(pid), "stopped, says it, and the worker runs"

    await asyncio.gather(*(stop() for _ in range(20)))
    await stop()
