"""Public reports whose fault no other test keeps away; most carry their mark on the test or the row that proves it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os

import psutil
import pytest

from synapse_host.config import Windows
from synapse_host.worker import process as process_module
from synapse_host.worker.process import WorkerProcess
from tests.support.lanes import FAST, FINE, crash, embed, on, poison, serve, spawns, until

pytestmark = [pytest.mark.process, pytest.mark.fault]


def end(pid: int) -> None:
    """Kill what a missing guard left behind."""
    with contextlib.suppress(OSError):
        os.kill(pid, 9)


@pytest.mark.report("dask/distributed#1303")
@pytest.mark.report("agronholm/anyio#1166")
@pytest.mark.report("xorbitsai/inference#3202")
async def test_a_worker_that_ignores_every_polite_word_and_talks_while_it_stops(make):
    """A second worker was started beside one that would not leave; closing waited for a child that waited for its
    pipe; repeated stops hung. Ours is dead first, and all stops end when it is."""
    flood = {"bytes": 2**20, "text": "x"}
    stubborn = {"shutdown": [{"stderr": flood}, {"stdout": flood}, {"sleep": 600}], "eof": [{"sleep": 600}]}
    config = dataclasses.replace(FAST, shutdown_grace=0.2)
    lane = make({"ignore": ["SIGTERM", "SIGINT", "EOF"], **stubborn}, config=config)
    await lane.load()
    pids = [lane.health()["worker_pid"]]
    try:
        await lane.probe(embed([FINE]))
        assert not psutil.pid_exists(pids[0]) and lane.health()["generation"] == 2, "two workers at once"
        pids.append(lane.health()["worker_pid"])

        async def stop() -> None:
            await lane.aclose()
            assert not psutil.pid_exists(pids[1]), "a stop returned while the worker ran"

        await asyncio.gather(*(stop() for _ in range(20)))
    finally:
        for pid in pids:
            end(pid)


@pytest.mark.report("ollama/ollama#7779")
async def test_unload_that_never_answers(make):
    """ollama/ollama#7779 (also 12179): a model for ever 'stopping'; UNLOAD has a window, then the worker goes."""
    config = dataclasses.replace(FAST, windows=Windows(setup=20.0, control=0.3, ping=20.0, inference=20.0))
    lane = make({"rules": [on("UNLOAD", {"sleep": 600})]}, config=config)
    await lane.load()
    await lane.unload()
    assert lane.health()["models"] == [] and lane.health()["worker_pid"] is None
    await serve(lane)


@pytest.mark.report("ollama/ollama#12472")
async def test_a_kill_that_does_not_take(make, tmp_path, monkeypatch):
    """ollama/ollama#12472: a process stuck in a driver can't be killed; the host goes on, starts none beside it."""
    state = tmp_path / "state"
    # Long enough for a healthy request of a busy machine.
    patient = dataclasses.replace(FAST, windows=Windows(setup=20.0, control=20.0, ping=20.0, inference=1.5))
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
    await until(lambda: not psutil.pid_exists(pid))
    await serve(lane)
    assert spawns(state) == 2


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
