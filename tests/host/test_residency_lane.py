"""Neural Engine lanes over real worker processes: what callers see when they are late, leave, or their worker dies."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engines.bundle.manifest import Artifact, Function
from engines.protocol.messages import ANE_ENGINE, Pooling
from synapse_host.ane_lane import AneFleet
from synapse_host.config import Windows
from synapse_host.errors import AneLaneBusy, DeadlineExceeded, EngineCrashed, SequenceTooLong, ShapeCompiling
from synapse_host.lane_lock import LaneLock
from synapse_host.rungs import Part, charge, parts
from synapse_host.slots import Key, Model
from tests.host.conftest import FAST, Lanes, Scenario, embed

pytestmark = pytest.mark.process

ARTIFACT = Artifact(
    format="coreml",
    path="m.mlpackage",
    digest="sha256:" + "0" * 64,
    dtype="f16",
    bytes=1000,
    layers=22,
    functions=[Function(f"s{n}", bucket=n) for n in (128, 256, 512)] + [Function("packed256", packed_width=256)],
)


def fleet(made: Lanes, script: dict[str, Any], **changes: Any) -> tuple[AneFleet, Any]:
    supervisor = made(
        {"engine": ANE_ENGINE, "buckets": [128, 256, 512], **script},
        expected_engine=ANE_ENGINE,
        device="ane",
        lane_id="ane",
        **changes,
    )
    one = AneFleet()
    one.add(supervisor, ARTIFACT)
    return one, supervisor


def run(lanes: Callable[[Scenario], None], script: dict[str, Any], body: Callable[[AneFleet, Any], Any]) -> None:
    async def scenario(made: Lanes) -> None:
        one, supervisor = fleet(made, script)
        try:
            await body(one, supervisor)
        finally:
            await one.aclose()

    lanes(scenario)


def test_rungs_ascend_and_a_row_beyond_the_ladder_is_named() -> None:
    groups = [(128, (1, 2)), (256, (3,)), (512, (0,))]
    assert parts([300, 5, 128, 129], [512, 128, 256]) == [Part("shape", *group) for group in groups]
    with pytest.raises(SequenceTooLong) as refused:
        parts([5, 513], [128, 512])
    assert refused.value.details == {"index": 1, "tokens": 513, "max_tokens": 512}


def test_a_function_is_charged_the_manifest_s_layers_and_all_bytes() -> None:
    assert charge(ARTIFACT) == Model(layers=22, nbytes=1000, smallest=128)


def test_rungs_are_admitted_once_and_served(lanes: Callable[[Scenario], None]) -> None:
    async def body(one: AneFleet, supervisor: Any) -> None:
        replies = [await one.serve("ane", bucket, embed([7, 8])) for bucket in (128, 256, 256, 512)]
        assert len({bytes(memoryview(raw)) for _, raw in replies}) == 1
        assert one.shell.core.resident("ane") == {Key("ane", "m", "shape", n) for n in (128, 256, 512)}
        assert supervisor.generation == 1

    run(lanes, {}, body)


def test_serving_caller_cancellation_drains_reply_without_restart(lanes: Callable[[Scenario], None]) -> None:
    async def body(one: AneFleet, supervisor: Any) -> None:
        await one.serve("ane", 128, embed([1]))
        caller = asyncio.ensure_future(one.serve("ane", 128, embed([66])))
        await asyncio.sleep(0.1)
        caller.cancel()
        _, raw = await one.serve("ane", 128, embed([7, 8]))
        assert raw is not None and supervisor.generation == 1, "the next reply belongs to the next request"

    run(lanes, {"rules": [{"on": "EMBED_BATCH", "first_id": 66, "do": [{"sleep": 0.4}]}]}, body)


def test_cancelled_direct_ane_keeps_module_permit_and_inflight_until_reply_drains(
    lanes: Callable[[Scenario], None],
) -> None:
    async def body(one: AneFleet, supervisor: Any) -> None:
        await one.serve("ane", 128, embed([1]))
        caller = asyncio.ensure_future(one.serve("ane", 128, embed([66])))
        await asyncio.sleep(0.1)
        caller.cancel()
        await asyncio.sleep(0)
        slot = next(iter(one.shell.core.slots.values()))
        assert slot.leases == 1, "still leased: its reply is on the way"
        assert supervisor.health()["state"] == "serving"
        while slot.leases:
            await asyncio.sleep(0.01)
        assert supervisor.generation == 1

    run(lanes, {"rules": [{"on": "EMBED_BATCH", "first_id": 66, "do": [{"sleep": 0.4}]}]}, body)


def test_direct_ane_warm_reply_after_absolute_deadline_is_discarded(lanes: Callable[[Scenario], None]) -> None:
    async def body(one: AneFleet, supervisor: Any) -> None:
        await one.serve("ane", 128, embed([1]))
        loop = asyncio.get_running_loop()
        with pytest.raises(DeadlineExceeded):
            await one.serve("ane", 128, embed([66]), deadline=loop.time() + 0.1)
        _, first = await one.serve("ane", 128, embed([7, 8]))
        _, second = await one.serve("ane", 128, embed([7, 8]))
        assert bytes(memoryview(first)) == bytes(memoryview(second)) and supervisor.generation == 1

    run(lanes, {"rules": [{"on": "EMBED_BATCH", "first_id": 66, "do": [{"sleep": 0.4}]}]}, body)


def test_direct_ane_cold_admission_after_absolute_deadline_is_drained_without_inference(
    lanes: Callable[[Scenario], None], tmp_path: Any
) -> None:
    mark = tmp_path / "embedded"

    async def body(one: AneFleet, supervisor: Any) -> None:
        await one.serve("ane", 128, embed([1]))
        loop = asyncio.get_running_loop()
        with pytest.raises(ShapeCompiling) as late:
            await one.serve("ane", 256, embed([66]), deadline=loop.time() + 0.1)
        assert late.value.details["shape"] == 256
        await one.serve("ane", 256, embed([5]))
        assert not mark.exists(), "the late request never reached inference"
        assert Key("ane", "m", "shape", 256) in one.shell.core.resident("ane") and supervisor.generation == 1

    rules = [
        {"on": "ANE_ADMIT_SHAPE", "do": [{"sleep": 0.4}]},
        {"on": "EMBED_BATCH", "first_id": 66, "do": [{"touch": str(mark)}]},
    ]
    run(lanes, {"rules": rules}, body)


def test_a_worker_that_dies_while_serving_is_restarted_once_and_serves_again(lanes: Callable[[Scenario], None]) -> None:
    async def body(one: AneFleet, supervisor: Any) -> None:
        await one.serve("ane", 256, embed([1]))
        with pytest.raises(EngineCrashed):
            await one.serve("ane", 256, embed([66]))
        _, raw = await one.serve("ane", 256, embed([7]))
        assert raw is not None and supervisor.generation == 2
        assert one.shell.generation("ane") == 2

    run(lanes, {"rules": [{"on": "EMBED_BATCH", "first_id": 66, "do": [{"signal": "SIGKILL"}]}]}, body)


def test_err_ack_restarts_the_worker_drops_its_shapes_and_resumes_waiters(
    lanes: Callable[[Scenario], None], tmp_path: Path
) -> None:
    async def body(one: AneFleet, supervisor: Any) -> None:
        await one.serve("ane", 256, embed([1]))
        with pytest.raises(Exception) as refused:
            await one.serve("ane", 512, embed([1]))
        assert refused.value.code == "invalid_placement"  # type: ignore[attr-defined]
        await one.serve("ane", 256, embed([1]))
        assert supervisor.generation == 2
        assert one.shell.core.resident("ane") == {Key("ane", "m", "shape", n) for n in (128, 256)}

    err = {
        "on": "ANE_ADMIT_SHAPE",
        "nth": 2,
        "do": [{"err": {"code": "invalid_placement", "msg": "matmul on the CPU"}}],
    }
    run(lanes, {"state": str(tmp_path / "spawns"), "generations": [{"rules": [err]}, {}]}, body)


def test_a_silent_admission_ends_with_its_process_and_is_refunded_then(
    lanes: Callable[[Scenario], None], tmp_path: Path
) -> None:
    silent = {"on": "ANE_ADMIT_SHAPE", "do": [{"sleep": 30}]}
    windows = Windows(setup=1.0, control=20.0, ping=20.0, inference=20.0)

    async def scenario(made: Lanes) -> None:
        script = {"state": str(tmp_path / "spawns"), "generations": [{"rules": [silent]}, {}]}
        one, supervisor = fleet(made, script, config=dataclasses.replace(FAST, windows=windows))
        try:
            with pytest.raises(EngineCrashed) as crashed:
                await one.serve("ane", 256, embed([1]))
            assert crashed.value.details["cause"] == "silence"
            await one.serve("ane", 256, embed([1]))
            assert supervisor.generation == 2 and one.shell.core.charged()[0] == 2
        finally:
            await one.aclose()

    lanes(scenario)


def test_identical_models_in_two_lanes_compile_independently(lanes: Callable[[Scenario], None]) -> None:
    async def scenario(made: Lanes) -> None:
        script = {"engine": ANE_ENGINE, "rules": [{"on": "ANE_ADMIT_SHAPE", "do": [{"sleep": 0.5}]}]}
        one = AneFleet()
        one.add(made(script, expected_engine=ANE_ENGINE, device="ane", lane_id="slow"), ARTIFACT)
        one.add(made({"engine": ANE_ENGINE}, expected_engine=ANE_ENGINE, device="ane", lane_id="quick"), ARTIFACT)
        try:
            compiling = asyncio.ensure_future(one.serve("slow", 256, embed([1])))
            await one.serve("quick", 256, embed([1]))
            assert not compiling.done(), "compilation holds no permit: the other lane serves meanwhile"
            await compiling
        finally:
            await one.aclose()

    lanes(scenario)


def test_unload_takes_the_worker_down_and_the_next_request_brings_it_back(lanes: Callable[[Scenario], None]) -> None:
    async def scenario(made: Lanes) -> None:
        one = AneFleet()
        supervisor = made({"engine": ANE_ENGINE}, expected_engine=ANE_ENGINE, device="ane", lane_id="ane")
        lane = one.add(supervisor, ARTIFACT)
        try:
            assert supervisor.generation == 0, "nothing starts before the first request"
            await lane.submit(embed([1] * 200), stage="embed")
            await lane.unload()
            while one.shell.core.charged() != (0, 0, 0):
                await asyncio.sleep(0.01)
            await lane.submit(embed([1] * 200), stage="embed")
            assert supervisor.generation == 2
            assert one.shell.core.resident("ane") == {Key("ane", "m", "shape", n) for n in (128, 256)}
        finally:
            await one.aclose()

    lanes(scenario)


def test_one_request_over_several_rungs_keeps_its_order(lanes: Callable[[Scenario], None]) -> None:
    async def scenario(made: Lanes) -> None:
        one = AneFleet()
        script = {"engine": ANE_ENGINE, "vectors": "echo", "dims": 2}
        lane = one.add(made(script, expected_engine=ANE_ENGINE, device="ane", lane_id="ane"), ARTIFACT)
        try:
            rows = [[9] * 300, [1, 2], [7] * 130, [3, 4]]
            reply, raw = await lane.submit(embed(*rows), stage="embed")
            assert reply.n == 4 and list(raw) == [9, 9, 1, 2, 7, 7, 3, 4]
        finally:
            await one.aclose()

    lanes(scenario)


def test_the_host_serves_mixed_rungs_on_a_neural_engine_lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrix, placement, Host, lane lock, fleet, a (scripted) worker with the production engine's name."""
    import json

    from engines.bundle import manifest
    from synapse_host.config import HostConfig
    from synapse_host.host import Host
    from tests.support import scripted

    bundle = tmp_path / "bundle"
    bundle.mkdir()
    described = manifest.Manifest(
        manifest_version=1,
        model_id="toy",
        family="bert",
        task="embed",
        dims=2,
        max_tokens=512,
        pooling=Pooling.MEAN,
        normalize=True,
        artifacts=[msgspec.structs.replace(ARTIFACT, tree="sha256:" + "0" * 64)],
    )
    digest = manifest.write(bundle, described)
    command = scripted.command({"engine": ANE_ENGINE, "vectors": "echo", "dims": 2, "manifest_digest": digest})
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
            vectors = await host.embed_ids("toy", rows)
            assert vectors.tolist() == [[9, 9], [1, 2], [7, 7], [3, 4]]
            with pytest.raises(AneLaneBusy):
                LaneLock()
            await host.unload("toy")
            assert (await host.embed_ids("toy", [[5, 6]])).tolist() == [[5, 6]]

    asyncio.run(main())
    LaneLock().close()  # free again
