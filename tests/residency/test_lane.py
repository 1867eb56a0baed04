"""Neural Engine lanes over real worker processes: what callers see when they are late, leave, or their worker dies."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engines.bundle import manifest
from engines.protocol.messages import ANE_ENGINE, Pooling
from synapse_host.config import HostConfig, Windows
from synapse_host.errors import (
    AneLaneBusy,
    DeadlineExceeded,
    EngineCrashed,
    ShapeCompiling,
    SynapseError,
)
from synapse_host.host import Host
from synapse_host.residency.lane import RungedLane
from synapse_host.residency.machine_lock import LaneLock
from synapse_host.residency.plan import Costs
from synapse_host.residency.shell import ResidencyShell
from synapse_host.residency.types import Key, Limits
from tests.residency.test_plan import ARTIFACT, COSTS
from tests.residency.world import charged, resident
from tests.support import scripted
from tests.support.lanes import FAST, Lanes, embed, on, soon, until

pytestmark = pytest.mark.process

DESCRIBED: dict[str, Any] = {
    "manifest_version": 1, "model_id": "toy", "family": "bert", "task": "embed", "dims": 2, "max_tokens": 512,
    "pooling": Pooling.MEAN, "normalize": True,
}  # fmt: skip
ECHO = {"engine": ANE_ENGINE, "vectors": "echo", "dims": 2}
SPEC: dict[str, Any] = {"expected_engine": ANE_ENGINE, "device": "ane"}


def shapes(*tokens: int) -> set[Key]:
    return {Key("ane", "shape", n) for n in tokens}


@pytest.fixture
def ane(make: Lanes) -> Callable[..., Any]:
    """Return what makes (books, supervisor, lane) of a worker that echoes ids and was started with these widths."""

    def start(
        script: dict[str, Any] | None = None,
        *,
        limits: Limits | None = None,
        costs: Costs | None = COSTS,
        widths: tuple[int, ...] = (256,),
        config: HostConfig = FAST,
    ) -> tuple[ResidencyShell, Any, Any]:
        one = ResidencyShell(limits)
        make.others.append(one)
        supervisor = make({**ECHO, **(script or {})}, lane_id="ane", packed_widths=widths, config=config, **SPEC)
        return one, supervisor, RungedLane(one, supervisor, ARTIFACT, costs=lambda: costs)

    return start


async def serve_rows(lane: Any, *rows: list[int], deadline: float | None = None) -> None:
    """Embed rows of which the worker echoes two ids, and check that each has its own."""
    reply, raw = await lane.submit(embed(*rows), deadline=deadline, stage="embed")
    assert reply.n == len(rows) and list(raw) == [value for row in rows for value in (row[0], row[1])]


MEDIUM = [5] * 200
"""A row for the bucket of 256."""


@pytest.mark.parametrize("way", [asyncio.CancelledError, DeadlineExceeded])
async def test_a_caller_who_leaves_keeps_lease_and_stream_until_the_reply_is_drained(
    way: type[BaseException], ane: Callable[..., Any]
) -> None:
    one, supervisor, lane = ane({"rules": [on("EMBED_BATCH", {"sleep": 0.4}, first_id=66)]})
    await lane.load()
    (slot,) = one.core.slots.values()
    deadline = soon(0.1 if way is DeadlineExceeded else 60)
    caller = asyncio.ensure_future(serve_rows(lane, [66, 1], deadline=deadline))
    await asyncio.sleep(0.1)
    if way is not DeadlineExceeded:
        caller.cancel()
    with pytest.raises(way):
        await caller
    assert slot.leases == 1, "still leased: its reply is on the way"
    assert supervisor.health()["state"] == "serving"
    await serve_rows(lane, [7, 8])
    assert supervisor.generation == 1, "the next reply belonged to the next request"
    await until(lambda: not slot.leases)


async def test_direct_ane_cold_admission_after_absolute_deadline_is_drained_without_inference(
    ane: Callable[..., Any], tmp_path: Any
) -> None:
    mark = tmp_path / "embedded"
    rules = [on("ANE_ADMIT_SHAPE", {"sleep": 0.4}), on("EMBED_BATCH", {"touch": str(mark)}, first_id=66)]
    one, supervisor, lane = ane({"rules": rules})
    await lane.load()
    with pytest.raises(ShapeCompiling) as late:
        await serve_rows(lane, [66] * 200, deadline=soon(0.1))
    assert late.value.details["shape"] == 256
    await serve_rows(lane, MEDIUM)
    assert not mark.exists(), "the late request never reached inference"
    assert Key("ane", "shape", 256) in resident(one.core, "ane") and supervisor.generation == 1


async def test_a_silent_admission_ends_with_its_process_and_is_refunded_then(
    ane: Callable[..., Any], tmp_path: Path
) -> None:
    silent = on("ANE_ADMIT_SHAPE", {"sleep": 30})
    windows = Windows(setup=1.0, control=20.0, ping=20.0, inference=20.0)
    script = {"state": str(tmp_path / "spawns"), "generations": [{"rules": [silent]}, {}]}
    one, supervisor, lane = ane(script, config=dataclasses.replace(FAST, windows=windows))
    with pytest.raises(EngineCrashed) as crashed:
        await serve_rows(lane, MEDIUM)
    assert crashed.value.details["cause"] == "silence"
    await serve_rows(lane, MEDIUM)
    assert supervisor.generation == 2 and charged(one.core)[0] == 2


async def test_a_forced_restart_kills_a_worker_that_still_serves(ane: Callable[..., Any], tmp_path: Path) -> None:
    """Its leases had their time to drain. Who held one is told, and the lane is open again at once."""
    slow = {"rules": [on("EMBED_BATCH", {"sleep": 600}, first_id=66)]}
    one, supervisor, lane = ane({"state": str(tmp_path / "spawns"), "generations": [slow, {}]})
    await lane.load()
    running = asyncio.ensure_future(serve_rows(lane, [66, 1]))
    await until(lambda: supervisor.health()["state"] == "serving")
    one.fault("ane", 1)
    waiting = asyncio.ensure_future(serve_rows(lane, [1, 2]))
    await asyncio.sleep(0.05)
    assert not running.done() and not waiting.done(), "drained first"
    one.core.expire(1e12)
    one._act()
    with pytest.raises(EngineCrashed, match="is gone"):
        await asyncio.wait_for(running, 20)
    await serve_rows(lane, [3, 4])
    assert supervisor.generation == 2 and supervisor.health()["strikes"] == 0
    await asyncio.gather(waiting, return_exceptions=True)


async def test_a_worker_that_dies_under_an_exchange_whose_caller_left_reaches_the_books(
    ane: Callable[..., Any], tmp_path: Path
) -> None:
    go = tmp_path / "go"
    one, supervisor, lane = ane({"rules": [on("EMBED_BATCH", {"wait_for": str(go)}, {"exit": 1}, first_id=66)]})
    await lane.load()
    caller = asyncio.ensure_future(serve_rows(lane, [66, 1]))
    await until(lambda: supervisor.health()["state"] == "serving")
    caller.cancel()
    await asyncio.wait({caller})
    go.touch()
    await until(lambda: charged(one.core) == (0, 0, 0))
    await serve_rows(lane, [3, 4])
    assert supervisor.generation == 2


async def test_unload_takes_the_worker_down_and_the_next_request_brings_it_back(ane: Callable[..., Any]) -> None:
    one, supervisor, lane = ane({"shutdown": [{"sleep": 0.2}]})
    assert supervisor.generation == 0, "nothing starts before the first request"
    await serve_rows(lane, MEDIUM)
    unloading = asyncio.ensure_future(lane.unload())
    await asyncio.sleep(0)
    # From the first moment on: nothing is leased on the worker that goes, who comes now waits for its successor.
    meanwhile = asyncio.ensure_future(serve_rows(lane, MEDIUM))
    await unloading
    await meanwhile
    assert supervisor.generation == 2
    await lane.unload()
    assert charged(one.core) == (0, 0, 0) and supervisor.health()["worker_pid"] is None
    await serve_rows(lane, MEDIUM)
    assert supervisor.generation == 3
    assert resident(one.core, "ane") == shapes(128, 256)


async def test_an_idle_worker_ends_with_its_functions(ane: Callable[..., Any]) -> None:
    one, supervisor, lane = ane(config=dataclasses.replace(FAST, idle_unload=0.2))
    for generation in (1, 2):
        await serve_rows(lane, MEDIUM)
        assert supervisor.generation == generation
        await until(lambda: charged(one.core) == (0, 0, 0))
        assert supervisor.health()["worker_pid"] is None and supervisor.health()["strikes"] == 0


def test_the_host_serves_mixed_rungs_on_a_neural_engine_lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrix, placement, Host, lane lock, fleet, a (scripted) worker with the production engine's name."""
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    artifact = msgspec.structs.replace(ARTIFACT, tree="sha256:" + "0" * 64)
    digest = manifest.write(bundle, manifest.Manifest(artifacts=[artifact], **DESCRIBED))
    command = scripted.command({**ECHO, "manifest_digest": digest})
    (tmp_path / "matrix.yaml").write_text(
        "version: 1\n"
        "hardware:\n  any: {}\n"
        "engines:\n  fake: {engine: ane, device: ane, format: coreml, requires: any,\n"
        f"    worker: {{command: {json.dumps(command)}}}}}\n"
        "lanes:\n  embed: {task: embed, engines: [fake]}\n"
    )

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    async def main() -> None:
        config = HostConfig(runtime_dir=tmp_path / "rt")
        async with Host.open(matrix=tmp_path / "matrix.yaml", models={"toy": bundle}, config=config) as host:
            rows = [[9] * 300, [1, 2], [7] * 130, [3, 4]]
            await host.load("toy")
            assert host._lanes.residency is not None
            books = host._lanes.residency.core
            assert books.limits.nbytes == host.profile.ram_total // 4 and books.limits.executables == 100
            assert charged(books) == (1, 22, 1000), "a load is charged like any other start"
            vectors = await host.embed_ids("toy", rows)
            assert charged(books) == (3, 66, 3000) and host.health()["lanes"]["embed"]["generation"] == 1
            assert vectors.tolist() == [[9, 9], [1, 2], [7, 7], [3, 4]]
            with pytest.raises(AneLaneBusy):
                LaneLock()
            await host.unload("toy")
            assert (await host.embed_ids("toy", [[5, 6]])).tolist() == [[5, 6]]

    asyncio.run(main())
    LaneLock().close()  # free again


# --- packed passes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "widths", "costs", "packed"),
    [
        ({"packed": True}, (256,), COSTS, True),
        ({"packed": True}, (256,), None, False),  # nothing measured
        ({"packed": True}, (), COSTS, False),  # not qualified here
        ({"packed": {"layout": "tight-v1", "widths": [128], "max_rows": 64}}, (256,), COSTS, False),
    ],
)
async def test_rows_are_packed_only_where_advertised_and_measured(
    script: dict[str, Any],
    widths: tuple[int, ...],
    costs: Costs | None,
    packed: bool,
    ane: Callable[..., Any],
    tmp_path: Path,
) -> None:
    mark = tmp_path / "packed"
    rules = [on("ANE_ADMIT_PACKED", {"touch": str(mark)})]
    one, supervisor, lane = ane({"rules": rules, **script}, widths=widths, costs=costs)
    rows = [[9] * 300, [1, 2], [7] * 100, [3, 4], [5, 6]]
    # The first time on their rungs, whose compilation they can't do without; in the background the width is admitted.
    await serve_rows(lane, *rows)
    assert not mark.exists() and resident(one.core, "ane") == shapes(128, 512)
    if packed:
        await until(lambda: Key("ane", "packed", 256) in resident(one.core, "ane"))
    rungs = supervisor.counters.requests["embed", "ok"]
    await serve_rows(lane, *rows)
    assert mark.exists() is packed and supervisor.generation == 1
    assert supervisor.counters.requests["embed", "ok"] == rungs + 2, "one exchange packed or on its rung, one long row"
    assert not any(slot.leases for slot in one.core.slots.values())


async def test_singles_are_served_while_a_packed_width_compiles(ane: Callable[..., Any], tmp_path: Path) -> None:
    """It holds the worker's stream, but no request waits for its function; and a guess that fails costs no caller."""
    err = on("ANE_ADMIT_PACKED", {"sleep": 0.3}, {"err": {"code": "ane_resources_exhausted"}})
    one, supervisor, lane = ane({"packed": True, "rules": [err]})
    for _ in range(4):
        await serve_rows(lane, [1, 2], [3, 4], [5, 6])
    await until(lambda: not one.core.busy("ane") and len(one.core.slots) == 1)
    assert supervisor.counters.requests["ane_admit_packed", "ane_resources_exhausted"] == 1, "once is enough"
    assert supervisor.generation == 1 and resident(one.core, "ane") == shapes(128)


async def test_a_packed_exchange_takes_at_most_64_rows(ane: Callable[..., Any], tmp_path: Path) -> None:
    """200 rows of 2 tokens: passes of 64 rows, one an exchange, and nobody is lost or doubled."""
    _, supervisor, lane = ane({"packed": True})
    await lane.submit_packed(256, embed([1, 2], [3, 4]), stage="embed")
    await serve_rows(lane, *([n, n + 1] for n in range(200)))
    assert supervisor.counters.requests["embed", "ok"] == 1 + 4


async def test_an_unadvertised_width_is_refused_before_anything_is_sent(ane: Callable[..., Any]) -> None:
    _, supervisor, lane = ane({"packed": True})
    with pytest.raises(SynapseError) as refused:
        await lane.submit_packed(128, embed([1], [2]), stage="embed")
    assert refused.value.code == "unsupported_packed_width" and supervisor.generation == 1
    _, raw = await lane.submit_packed(256, embed([1, 2], [3, 4]), stage="embed")
    assert list(raw) == [1, 2, 3, 4]


async def test_a_request_is_served_by_a_successor_that_may_not_pack(
    ane: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its certificate was voided under the running host: rows run alone, and nobody hears of it."""
    first = {"packed": True, "rules": [{"on": "EMBED_BATCH", "first_id": 9, "do": [{"exit": 3}]}]}
    later = {"packed": {"layout": "tight-v1", "widths": [128], "max_rows": 64}}
    one, supervisor, lane = ane({"state": str(tmp_path / "spawns"), "generations": [first, later]})
    await lane.submit_packed(256, embed([1, 2], [3, 4]), stage="embed")
    stale = one.core.resident("ane")
    assert Key("ane", "packed", 256) in stale
    with pytest.raises(EngineCrashed):
        await lane.submit(embed([9], [2]), stage="embed")
    monkeypatch.setattr(one.core, "resident", lambda lane: stale)  # planned before the books knew of its end
    await serve_rows(lane, [1, 2], [3, 4])
    assert supervisor.generation > 1


# --- the books -------------------------------------------------------------------------------------------------------


async def test_a_model_larger_than_the_budget_is_refused_typed_and_starts_nothing(ane: Callable[..., Any]) -> None:
    one, supervisor, lane = ane(limits=Limits(nbytes=999))
    for call in (lane.load(), serve_rows(lane, [1, 2])):
        with pytest.raises(SynapseError) as refused:
            await call
        assert refused.value.code == "ane_residency_limit" and not refused.value.transient
        assert refused.value.details["lane_id"] == "ane"
    assert supervisor.generation == 0 and charged(one.core) == (0, 0, 0)


async def test_self_check_waits_for_drains_and_blocks_new_serving(ane: Callable[..., Any], tmp_path: Path) -> None:
    """The probe of a lane is its self-check: a fresh worker proves itself behind what drains, before what comes."""
    go = tmp_path / "go"
    rules = [on("EMBED_BATCH", {"wait_for": str(go)}, first_id=66)]
    one, supervisor, lane = ane({"rules": rules})
    await lane.load()
    caller = asyncio.ensure_future(serve_rows(lane, [66, 1]))
    await until(lambda: supervisor.health()["state"] == "serving")
    caller.cancel()
    check = asyncio.ensure_future(lane.probe(embed([7])))
    later = asyncio.ensure_future(serve_rows(lane, [8, 8]))
    await asyncio.sleep(0.2)
    assert not check.done() and not later.done() and supervisor.generation == 1, "the reply isn't drained yet"
    go.touch()
    await check
    assert supervisor.generation == 2, "the check is a fresh worker's"
    await later
    assert supervisor.generation == 2
    assert charged(one.core)[0] == 1
