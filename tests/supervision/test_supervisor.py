"""One lane over real workers: every row of protocol-v3 section 5, and the host's checklist."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import os
import signal
import struct
import sys
from pathlib import Path

import psutil
import pytest

from engines.protocol.errors import ErrorCode
from synapse_host.config import Windows
from synapse_host.errors import (
    WORKER_ERRORS,
    DeadlineExceeded,
    EngineCrashed,
    InvalidRequest,
    LaneRefused,
    ModelInUse,
    ProbeRequired,
    QueueFull,
)
from synapse_host.supervision.queueing import Permits
from synapse_host.worker import process as process_module
from synapse_host.worker.process import WorkerProcess
from tests.support.lanes import (
    CUDA,
    EMBED,
    FAST,
    FINE,
    KILLS,
    POISON,
    SHORT,
    crash,
    embed,
    on,
    poison,
    serve,
    soon,
    spawns,
    until,
)

pytestmark = pytest.mark.process

PATIENT = dataclasses.replace(FAST, windows=Windows(setup=20.0, control=20.0, ping=20.0, inference=1.5))
"""A window that a healthy worker on a busy machine keeps, and that a test can outlast."""
SENT = 1.0
"""Seconds to a deadline that a request to a loaded worker is sent well before."""


# --- serving ---------------------------------------------------------------------------------------------------------


async def test_a_request_that_breaks_the_rules_is_refused_here(make):
    lane = make()
    with pytest.raises(InvalidRequest):
        await lane.submit(lambda req_id, ref: (embed([1, 2])(req_id, ref)[0], b"\0" * 4), stage=EMBED)
    with pytest.raises(ZeroDivisionError):
        await lane.submit(lambda req_id, ref: 1 // 0, stage=EMBED)
    await serve(lane)
    assert lane.health()["strikes"] == 0 and lane.health()["generation"] == 1


# --- crashes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "status", "name"),
    [
        ({"signal": "SIGSEGV"}, None, "SIGSEGV"),
        ({"exit": 0}, 0, None),
        ({"raise": "a bug"}, 1, None),
    ],
)
@pytest.mark.report("triton-inference-server/server#8841")
@pytest.mark.report("python/cpython#10441")
@pytest.mark.report("ollama/ollama#14093")
async def test_death_in_a_request_is_typed_with_its_cause(make, action, status, name):
    lane = make(poison({"stderr": "last words"}, action))
    error = await crash(lane)
    assert error.transient and error.safe_to_retry and error.retry_after_ms == 250 and error.exit_code == 1
    details = error.details
    assert (details["lane_id"], details["stage"], details["cause"]) == ("toy", EMBED, "exit")
    assert (details["exit_status"], details["signal"], details["quarantined"]) == (status, name, False)
    assert details["log_tail"].startswith("[stderr] last words")
    if name:
        assert name in error.message
    await serve(lane)
    assert lane.health()["generation"] == 2 and lane.health()["strikes"] == 0


async def test_a_closed_connection_of_a_living_worker_is_eof(make):
    lane = make(poison({"close": True}, {"sleep": 600}, ignore=["EOF"]))
    error = await crash(lane)
    assert error.details["cause"] == "eof" and error.details["signal"] is None
    assert lane.health()["strikes"] == 1 and lane.health()["worker_pid"] is None


async def test_an_answer_before_the_whole_request_was_read_is_out_of_turn(make, tmp_path):
    go = tmp_path / "go"
    early = {"type": "ERR", "req_id": "1-2", "code": "oom", "msg": ""}
    answers = {"thread": [{"wait_for": str(go)}, {"frame": early}]}
    lane = make({"rules": [on("LOAD", {"reply": {}}, answers, {"sleep": 600})]})
    await lane.load()
    request = asyncio.create_task(lane.submit(embed([1] * 2**20), stage=EMBED))
    await until(lambda: lane.health()["state"] == "serving")
    go.touch()
    with pytest.raises(EngineCrashed):
        await request
    assert lane.health()["last_fault"]["cause"] == "protocol" and lane.counters.rejected == {"out_of_turn": 1}


async def test_a_request_for_one_worker_never_reaches_another_and_starts_none(make, tmp_path):
    state = tmp_path / "state"
    lane = make({**KILLS, "state": str(state)})
    await serve(lane)
    await serve(lane, generation=lane.generation)
    with pytest.raises(EngineCrashed):
        await serve(lane, POISON, generation=1)
    with pytest.raises(EngineCrashed, match="what this request needs is gone") as caught:
        await serve(lane, generation=1)
    assert caught.value.details["cause"] == "exit" and not caught.value.quarantined
    assert spawns(state) == 1
    await serve(lane)
    with pytest.raises(EngineCrashed, match="what this request needs is gone"):
        await serve(lane, generation=1)
    await serve(lane, generation=2)
    assert spawns(state) == 2 and lane.health()["strikes"] == 0


# --- what is no crash (protocol faults: R4 and R5 of the campaign) ---------------------------------------------------


@pytest.mark.parametrize(
    ("action", "code", "transient"),
    [
        ({"err": {"code": "inference_failed", "msg": "no luck"}}, "inference_failed", False),
        ({"err": {"code": "oom"}}, "oom", True),
        ({"reply": {"nan": 5}}, "nonfinite_output", False),
    ],
)
@pytest.mark.report("ggml-org/llama.cpp#14812")
async def test_what_a_worker_answers_instead_is_neither_a_strike_nor_forgiveness(make, action, code, transient):
    lane = make({"rules": [on("EMBED_BATCH", action, first_id=1), *KILLS["rules"]]})
    for strikes in (0, 1):
        with pytest.raises(WORKER_ERRORS[ErrorCode(code)], match=action.get("err", {}).get("msg", ".")) as caught:
            await serve(lane, 1)
        assert (caught.value.code, caught.value.transient, caught.value.details["stage"]) == (code, transient, EMBED)
        assert caught.value.retry_after_ms == (250 if transient else None)
        assert lane.health()["strikes"] == strikes and lane.health()["generation"] == 1 + strikes
        if not strikes:
            await crash(lane)
            await lane.load()
            await lane.ping()
            assert lane.health()["strikes"] == 1, "only served work forgives"
    await serve(lane)
    assert lane.health()["strikes"] == 0 and lane.health()["generation"] == 2


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of address space that counts")
async def test_a_reply_that_the_host_has_no_memory_for_is_no_fault_of_the_worker(make):
    import resource

    dims = 12 * 2**20
    lane = make({"dims": dims})
    _, payload = await lane.submit(embed([FINE]), stage=EMBED)
    del payload
    await asyncio.sleep(0)  # the loop still holds what it has just handed over
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 24 * 2**20, limits[1]))
    # A row has 48 MiB; what malloc keeps for later goes first.
    kept = []
    try:
        with contextlib.suppress(MemoryError):
            while True:
                kept.append(bytearray(40 * 2**20))
        with pytest.raises(WORKER_ERRORS[ErrorCode.OOM], match="the host has no memory for the reply") as caught:
            await lane.submit(embed([FINE]), stage=EMBED)
    finally:
        kept.clear()
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert caught.value.details == {"lane_id": "toy", "stage": EMBED} and caught.value.safe_to_retry
    _, payload = await lane.submit(embed([FINE]), stage=EMBED)
    assert len(payload) == dims
    assert (lane.health()["generation"], lane.health()["strikes"]) == (2, 0), "its stream had lost its place"


# --- silence ---------------------------------------------------------------------------------------------------------

HANGS = {
    "spin with the GIL": [{"spin": True}],
    "stall in the payload": [{"reply": {"stall": {"after": 5, "seconds": 600}}}],
    "stall after the header": [{"reply": {"pause": 600}}],
    # Bytes alone never renew.
    "half a header": [
        {"bytes": "ff000000"},
        *(action for _ in range(100) for action in ({"text": "{"}, {"sleep": 0.05})),
    ],
    # Setup has the long window; the switch to inference starts the short one.
    "after setup": [
        {"sleep": 0.8},
        {"progress": {"completed": [1], "phase": "inference"}},
        {"sleep": 600},
    ],
}
"""A worker that sleeps or is stopped is R2 of the campaign."""


@pytest.mark.parametrize("case", HANGS)
@pytest.mark.report("huggingface/text-embeddings-inference#694")
@pytest.mark.report("dask/distributed#8537")
async def test_silence_past_the_window_is_one_strike(make, case):
    own, cuda = case != "half a header", case == "after setup"
    script = poison(*HANGS[case], engine="owned-cuda" if cuda else "llama.cpp-worker")
    lane = make(script, config=SHORT, own_worker=own, **(CUDA if cuda else {}))
    await lane.load()
    error = await crash(lane)
    assert error.details["cause"] == "silence" and "no completed work for 0.4 s" in error.message
    # Only our own worker is asked for its stacks.
    assert own or error.details["log_tail"] == ""
    assert (error.details["signal"], error.details["exit_status"]) == (None, None)
    assert ("do_spin" in error.details["log_tail"]) is (case == "spin with the GIL"), "the stacks of a silent worker"
    assert lane.health()["strikes"] == 1 and lane.health()["worker_pid"] is None
    assert lane.counters.gaps["inference"] >= 0.4 and (not cuda or lane.counters.gaps["setup"] >= 0.8)
    await lane.load()
    assert lane.counters.restarts == {"silence": 1}


async def test_no_watchdog_while_waiting_for_the_stream_or_the_permit(make):
    make.permits = Permits({"cpu": 1})
    busy = make(poison({"progress": {"from": 1, "to": 6, "every": 0.4}}), config=PATIENT)
    other = make(config=PATIENT)
    await asyncio.gather(busy.load(), other.load())
    first = asyncio.create_task(serve(busy, POISON))
    await until(lambda: busy.health()["state"] == "serving")
    # One waits for the stream, the other for the permit, both longer than a window.
    await asyncio.gather(first, serve(busy), serve(other))
    assert busy.health()["strikes"] == other.health()["strikes"] == 0


# --- the caller leaves -----------------------------------------------------------------------------------------------


def held(tmp_path: Path) -> tuple[dict, Path]:
    go = tmp_path / "go"
    return poison({"wait_for": str(go)}), go


@pytest.mark.parametrize("way", ["deadline", "cancellation"])
async def test_a_caller_who_leaves_harms_nobody(make, tmp_path, way):
    script, go = held(tmp_path)
    make.permits = Permits({"cpu": 1})
    lane, other = make(script), make()
    await lane.load()
    pid = lane.health()["worker_pid"]
    if way == "deadline":
        with pytest.raises(DeadlineExceeded) as caught:
            await serve(lane, POISON, deadline=soon(SENT))
        assert caught.value.exit_code == 5 and caught.value.details["stage"] == EMBED
    else:
        request = asyncio.create_task(serve(lane, POISON))
        await until(lambda: lane.health()["state"] == "serving")
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
    # The abandoned reply isn't drained yet: the lane is busy, the model in use, the next request waits.
    assert lane.health()["state"] == "serving"
    with pytest.raises(ModelInUse):
        await lane.unload()
    with pytest.raises(DeadlineExceeded):
        await serve(lane, deadline=soon(0.05))
    # It also keeps the device's permit; another lane loads and pings without one, and waits for it to infer.
    await other.load()
    await other.ping()
    with pytest.raises(DeadlineExceeded, match=r"lane toy1: .* while it waited for cpu") as late:
        await serve(other, deadline=soon(0.05))
    assert late.value.details == {"lane_id": "toy1", "stage": EMBED} and make.permits.in_use("cpu") == 1
    following = asyncio.gather(serve(lane), serve(other))
    await asyncio.sleep(0)
    go.touch()
    await following
    assert make.permits.in_use("cpu") == 0
    health = lane.health()
    assert (health["worker_pid"], health["strikes"], lane.counters.abandoned) == (pid, 0, 1)


async def test_an_abandoned_exchange_that_hangs_is_still_killed_and_struck(make):
    lane = make(poison({"sleep": 600}), config=PATIENT)
    await lane.load()
    abandoned = asyncio.create_task(serve(lane, POISON))
    await until(lambda: lane.health()["state"] == "serving")
    abandoned.cancel()
    await until(lambda: lane.health()["strikes"] == 1)
    assert abandoned.cancelled() and lane.health()["last_fault"]["cause"] == "silence"
    await lane.load()


async def test_an_abandoned_success_clears_strikes(make, tmp_path):
    go = tmp_path / "go"
    lane = make({"rules": [on("EMBED_BATCH", {"exit": 1}, first_id=POISON), on("EMBED_BATCH", {"wait_for": str(go)})]})
    await crash(lane)
    await lane.load()
    with pytest.raises(DeadlineExceeded):
        await serve(lane, deadline=soon(SENT))
    assert lane.health()["strikes"] == 1
    go.touch()
    await until(lambda: lane.health()["strikes"] == 0)


async def test_a_deadline_in_the_past_writes_and_spawns_nothing(make, tmp_path):
    state = tmp_path / "state"
    lane = make({"state": str(state)})
    with pytest.raises(DeadlineExceeded):
        await serve(lane, deadline=soon(-1))
    await asyncio.sleep(0.05)
    assert spawns(state) == 0 and lane.health()["state"] == "stopped"
    await lane.load()
    sent = lane.counters.sent
    with pytest.raises(DeadlineExceeded):
        await serve(lane, deadline=soon(-1))
    assert (lane.counters.abandoned, lane.counters.sent) == (0, sent)
    await serve(lane)


async def test_a_load_whose_callers_left_goes_on_and_keeps_its_connection_to_itself(make, tmp_path):
    """Until LOADED a ping waits in turn, however late it becomes; afterwards it is answered."""
    go, state = tmp_path / "go", tmp_path / "state"
    lane = make({"state": str(state), "rules": [on("LOAD", {"wait_for": str(go)})]})
    for _ in range(2):
        with pytest.raises(DeadlineExceeded, match="during embed_batch, before its worker was ready"):
            await serve(lane, deadline=soon(0.3))
    with pytest.raises(ModelInUse):
        await lane.unload()
    await until(lambda: lane.health()["worker_pid"] is not None)
    with pytest.raises(DeadlineExceeded, match="during ping, before its worker was ready"):
        await lane.ping(soon(0.1))
    waiting = asyncio.create_task(lane.ping())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    go.touch()
    assert (await waiting)["rss_mb"] > 0
    await serve(lane)
    assert spawns(state) == 1 and lane.health()["strikes"] == 0


async def test_an_unload_behind_a_start_that_nobody_waits_for_any_more_is_refused(make, tmp_path):
    """It was let in while a PING ran; behind that a request began the start and left."""
    began, pong, go = tmp_path / "began", tmp_path / "pong", tmp_path / "go"
    slow = on("PING", {"touch": str(began)}, {"wait_for": str(pong)})
    lane = make({"rules": [slow, on("LOAD", {"wait_for": str(go)}, nth=2)]})
    await lane.load()
    await lane.unload()
    pinging = asyncio.create_task(lane.ping())
    await until(began.exists)
    leaving = asyncio.create_task(serve(lane))
    unloading = asyncio.create_task(lane.unload())
    await asyncio.sleep(0.05)
    pong.touch()
    await pinging
    await until(lambda: lane.health()["state"] == "loading")
    leaving.cancel()
    with pytest.raises(ModelInUse):
        await unloading
    go.touch()
    await serve(lane)
    assert lane.health()["models"] == ["m"]


# --- permits ---------------------------------------------------------------------------------------------------------


async def test_a_worker_that_dies_while_its_request_waits_for_a_permit(make, tmp_path):
    script, go = held(tmp_path)
    make.permits = Permits({"cpu": 1})
    busy, other = make(script), make()
    await asyncio.gather(busy.load(), other.load())
    first = asyncio.create_task(serve(busy, POISON))
    await until(lambda: make.permits.in_use("cpu") == 1)
    waiting = asyncio.create_task(serve(other))
    await asyncio.sleep(0.02)
    os.kill(other.health()["worker_pid"], signal.SIGKILL)
    await until(lambda: other.health()["strikes"] == 1)
    go.touch()
    # Nothing had been sent, so the request goes to the next worker.
    await asyncio.gather(first, waiting)
    assert other.health()["generation"] == 2 and make.permits.in_use("cpu") == 0


# --- strikes and quarantine ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["cool-down", "unload", "load"])
@pytest.mark.report("dask/distributed#1863")
@pytest.mark.report("huggingface/text-embeddings-inference#932")
async def test_a_quarantined_lane_starts_no_worker_until_its_cool_down_or_an_operator_ends_it(make, tmp_path, way):
    state = tmp_path / "state"
    cool_down = 1.0 if way == "cool-down" else 60.0
    lane = make({**KILLS, "state": str(state)}, config=dataclasses.replace(FAST, cool_down=cool_down))
    fingerprint = (await crash(lane)).details["fingerprint"]
    ids = hashlib.sha256(struct.pack("<2i", POISON, 1)).hexdigest()
    assert fingerprint == {"operation": "EMBED_BATCH", "model": "m", "ids_sha256": ids}
    await crash(lane)
    shut = await crash(lane, FINE)
    assert shut.quarantined and shut.exit_code == 3 and 0 < shut.retry_after_ms <= 1000 * cool_down
    health = lane.health()
    assert (health["state"], health["worker_pid"], health["strikes"]) == ("quarantined", None, 2)
    assert 0 < health["quarantine_remaining_s"] <= cool_down and spawns(state) == 2
    if way == "cool-down":
        await until(lambda: lane.health()["state"] != "quarantined")
    else:
        await (lane.unload() if way == "unload" else lane.load())
    assert lane.health()["strikes"] == 0
    await serve(lane)
    assert lane.health()["generation"] == spawns(state) == 3


async def test_a_legacy_lane_needs_a_probe(make, tmp_path):
    script = {"state": str(tmp_path / "state"), "generations": [KILLS, KILLS, KILLS, {"rules": []}]}
    lane = make(script, kind="legacy", config=dataclasses.replace(FAST, cool_down=0.05))
    await crash(lane)
    await crash(lane)
    await lane.unload()
    await asyncio.sleep(0.1)
    with pytest.raises(ProbeRequired):
        await serve(lane)
    assert lane.health()["quarantine_remaining_s"] is None and lane.health()["state"] == "quarantined"
    # A probe that crashes opens nothing.
    with pytest.raises(EngineCrashed):
        await lane.probe(embed([POISON]))
    with pytest.raises(ProbeRequired):
        await serve(lane)
    await lane.probe(embed([1]))
    assert lane.health()["strikes"] == 0
    await serve(lane)


@pytest.mark.parametrize("left", ["probe", "late probe", "recycle", "probe, then the lane is closed"])
async def test_whoever_leaves_while_a_worker_is_taken_down_leaves_no_worker_and_holds_up_nobody(make, left, tmp_path):
    began = tmp_path / "began"
    script = {
        "state": str(tmp_path / "spawns"),
        "generations": [{"shutdown": [{"touch": str(began)}, {"sleep": 60}]}, {}],
    }
    lane = make(script, config=dataclasses.replace(FAST, shutdown_grace=1.0))
    await lane.load()
    pid = lane.health()["worker_pid"]
    late = soon(0.3) if left == "late probe" else None
    leaving = asyncio.create_task(lane.recycle() if left == "recycle" else lane.probe(embed([1]), deadline=late))
    await until(began.exists)
    if late is not None:
        with pytest.raises(DeadlineExceeded, match="during probe, before its worker was ready"):
            await leaving
    else:
        leaving.cancel()
        await asyncio.wait({leaving})
        assert leaving.cancelled()
    if left.endswith("closed"):
        await lane.aclose()
    else:
        # One that spins here would hold up the loop, and every timeout with it.
        await serve(lane)
        assert lane.health()["generation"] == 2 and lane.health()["worker_pid"] != pid
    assert not psutil.pid_exists(pid), "two workers of one lane"


# --- load and unload -------------------------------------------------------------------------------------------------


async def test_what_is_loaded_is_known_and_comes_back(make):
    """LOAD is idempotent, UNLOAD too, and the next request loads what a refusal, an UNLOAD or a death has taken."""
    bad = on("LOAD", {"err": {"code": "artifact_invalid", "msg": "bad digest"}}, nth=[1, 2])
    gone = on("UNLOAD", {"err": {"code": "model_not_loaded"}}, nth=2)
    refused = on("UNLOAD", {"err": {"code": "inference_failed"}}, nth=3)
    lane = make({"dims": 5, "rules": [bad, gone, refused, *KILLS["rules"]]})

    async def refused_twice() -> None:
        for _ in range(2):
            with pytest.raises(WORKER_ERRORS[ErrorCode.ARTIFACT_INVALID], match="bad digest"):
                await lane.submit(embed([1]), stage=EMBED)
            assert lane.health()["models"] == []

    await refused_twice()
    await lane.load()
    await lane.load()
    pid = lane.health()["worker_pid"]
    for way in ("done", "not loaded", "refused"):
        assert lane.health()["models"] == ["m"]
        if way == "refused":
            with pytest.raises(WORKER_ERRORS[ErrorCode.INFERENCE_FAILED]):
                await lane.unload()
        else:
            await lane.unload()
            await lane.unload()
        assert lane.health()["models"] == []
        _, payload = await lane.submit(embed([1]), stage=EMBED)
        assert payload.shape == (5,)
    assert (lane.health()["worker_pid"], lane.health()["strikes"]) == (pid, 0)
    await crash(lane)
    await refused_twice()
    await lane.submit(embed([1]), stage=EMBED)
    assert lane.health()["models"] == ["m"] and lane.health()["generation"] == 2


async def test_an_upgrade_under_a_running_host_starts_no_worker_of_the_new_version(make, tmp_path, monkeypatch):
    lane = make()
    await serve(lane)
    await lane.recycle()
    upgrade = tmp_path / "site" / "synapse_workers-999.1.dist-info"
    upgrade.mkdir(parents=True)
    (upgrade / "METADATA").write_text("Metadata-Version: 2.1\nName: synapse-workers\nVersion: 999.1\n")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path / "site"))
        for call in (serve(lane), lane.load()):
            with pytest.raises(LaneRefused, match=r"999\.1 was installed under this host.*Restart the host"):
                await call
        assert (lane.health()["state"], lane.health()["strikes"]) == ("refused", 0)
        # A foreign worker has a release of its own.
        await make(own_worker=False).load()
    await lane.load()


# --- a process that can't be killed ----------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["silence", "close"])
async def test_a_deadline_holds_while_a_worker_is_being_ended(make, monkeypatch, end):
    config = SHORT if end == "silence" else FAST
    lane = make(poison({"sleep": 600}, ignore=["EOF"]), config=config, own_worker=False)
    await lane.load()
    pid = lane.health()["worker_pid"]
    with monkeypatch.context() as patch:
        patch.setattr(process_module, "REAP_LIMIT", 600)
        patch.setattr(WorkerProcess, "kill", lambda self: None)
        request = asyncio.create_task(serve(lane, POISON, deadline=soon(1.5)))
        await until(lambda: lane.health()["state"] == "serving")
        closing = asyncio.create_task(lane.aclose() if end == "close" else asyncio.sleep(0))
        # The window ends first, or the host closes; then nothing moves until the deadline.
        with pytest.raises(DeadlineExceeded):
            await asyncio.wait_for(request, 10)
    os.kill(pid, signal.SIGKILL)
    await closing
    if end == "silence":
        await lane.load()


# --- nothing to do ----------------------------------------------------------------------------------------------------

IDLE = dataclasses.replace(FAST, idle_unload=0.2, ping_interval=0.05)
"""A PING every now and then keeps no worker."""


async def test_an_idle_worker_ends_and_the_next_request_starts_another(make, tmp_path):
    bye, go = tmp_path / "bye", tmp_path / "go"
    held = on("serving", {"wait_for": str(go)}, first_id=POISON)
    lane = make({"rules": [held], "shutdown": [{"touch": str(bye)}]}, config=IDLE)
    work = asyncio.create_task(serve(lane, POISON))
    await until(lambda: lane.health()["state"] == "serving")
    await asyncio.sleep(0.5)
    assert lane.health()["state"] == "serving" and not bye.exists(), "what works isn't idle"
    pid = lane.health()["worker_pid"]
    go.touch()
    await work
    await until(lambda: lane.health()["worker_pid"] is None)
    assert bye.exists() and not Path(f"/proc/{pid}").exists()
    health = lane.health()
    assert (health["state"], health["models"], health["rss_mb"], health["strikes"]) == ("stopped", [], None, 0)
    await serve(lane)
    assert lane.generation == 2 and lane.health()["strikes"] == 0


async def test_whoever_comes_while_an_idle_worker_ends_is_served(make):
    lane = make(config=dataclasses.replace(FAST, idle_unload=0.01))
    for pause in range(6):
        await serve(lane)
        await asyncio.sleep(0.04 + 0.004 * pause)  # about where it begins to end
        await asyncio.gather(serve(lane), serve(lane))
    assert lane.generation > 1 and lane.health()["strikes"] == 0


# --- the end ---------------------------------------------------------------------------------------------------------


async def test_a_drain_that_is_hurried_ends_the_running_request(make):
    lane = make(poison({"sleep": 600}))
    running = asyncio.create_task(crash(lane))
    await until(lambda: lane.health()["state"] == "serving")
    closing = asyncio.create_task(lane.aclose(drain=600.0))
    await asyncio.sleep(0.01)
    assert not closing.done()
    await lane.aclose(drain=0.0)
    await closing
    error = await running
    assert error.details["reason"] == "stopping" and error.details["quarantined"] is False
    assert lane.health()["strikes"] == 0


@pytest.mark.parametrize("script", [{"start": [{"sleep": 600}]}, {"rules": [on("LOAD", {"sleep": 600})]}])
async def test_closing_during_the_start(make, script):
    lane = make(script)
    waiting = asyncio.create_task(serve(lane))
    await until(lambda: lane.health()["state"] == "loading" and (lane.health()["generation"] == 1))
    await asyncio.sleep(0.3)
    await lane.aclose()
    with pytest.raises(QueueFull):
        await waiting


async def test_closing_during_a_death(make, tmp_path):
    go = tmp_path / "go"
    lane = make(poison({"wait_for": str(go)}, {"signal": "SIGKILL"}))
    await lane.load()
    dying = asyncio.create_task(crash(lane))
    await until(lambda: lane.health()["state"] == "serving")
    go.touch()
    await asyncio.sleep(0.005)
    await lane.aclose()
    assert (await dying).code == "engine_crashed"
