"""The hardware run is rehearsed: every test of tests/hardware/test_ane.py with a stand-in for the framework, toy sizes.

It proves that the program works, writes what it should and fails where it should; its numbers mean nothing and are kept
nowhere. Committed documents of real runs are judged again.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engines.ane import binding
from engines.ane import prepare as tool
from engines.ane.backend import Source
from engines.ane.compute_plan import Device, Function, Operation, PlanView
from engines.ane.engine import AneEngine
from engines.ane.model import AneModel
from engines.ane.package import PackageSpec, read_spec
from engines.bundle import preparation
from engines.bundle.checkpoint import Checkpoint
from engines.bundle.manifest import Bundle
from engines.protocol.messages import ANE_ENGINE
from synapse_host.matrix import load as load_matrix
from synapse_host.recheck import recheck
from tests.hardware import test_ane as hardware
from tests.hardware.record import Record
from tests.support.ane_bundle import packed, shape, write_bundle
from tests.support.mil_reference import ReferenceBackend, ReferenceProgram

EVIDENCE = Path(__file__).parents[2] / "evidence"


def plan_of(name: str, *, on_cpu: int = 0, silent: int = 0, gpu: int = 0) -> PlanView:
    """A plan as a Mac gives it: all on the Neural Engine but for the look-up of the ids, and what is asked for."""
    devices = [Device.CPU] * on_cpu + [Device.UNKNOWN] * silent + [Device.GPU] * gpu
    devices += [Device.ANE] * (99 - len(devices))
    operations = [Operation("ios18.conv", device, 0.01) for device in devices]
    operations += [Operation("ios18.gather", Device.CPU, 0.01), Operation("const", Device.UNKNOWN)]
    return PlanView("program", {name: Function(("input_ids",), tuple(operations))})


class StandInProgram(ReferenceProgram):
    def __init__(self, source: Source, slow: bool) -> None:
        super().__init__(source, read_spec(source.path).functions[source.function])
        self._name, self._slow = source.function, slow

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        if self._slow:
            time.sleep(0.08)
        return super().run(feeds)

    def plan(self) -> PlanView:  # type: ignore[override]
        return plan_of(self._name)


class StandIn(ReferenceBackend):
    """Takes the framework's place: compiled bundles only, a plan, and a CPU that is slower."""

    engine = ANE_ENGINE
    formats = frozenset({"mlmodelc", "coreml"})
    reads_packages = False

    def specs(self, path: Path) -> PackageSpec | None:  # type: ignore[override]
        return None

    def open(self, source: Source, *, units: str) -> StandInProgram:
        return StandInProgram(source, slow=units == "cpu_only")


def compiled(package: Path) -> Path:
    target = Path(tempfile.mkdtemp()) / "m.mlmodelc"
    shutil.copytree(package, target)
    return target


def rows(lengths: list[int], seed: int = 1) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(5, 128, n).astype(np.int32) for n in lengths]


def once(model: Any, found: list[np.ndarray], repeats: int = 1, width: int | None = None) -> float:
    started = time.perf_counter()
    hardware.embed(model, found, width)
    return (time.perf_counter() - started) * 1000


@pytest.fixture(scope="module")
def toy(checkpoints: Callable[[str], Checkpoint], tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_bundle(checkpoints("bert"), tmp_path_factory.mktemp("hw") / "b", shape(16, 32, 64) + packed(32, 64))


@pytest.fixture(scope="module")
def stage(toy: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """What the run's own fixtures make, on the stand-in."""
    patch = pytest.MonkeyPatch()
    cache = tmp_path_factory.mktemp("cache")
    # What a busy machine may miss, and what a few predictions can't show, is not rehearsed.
    for key, value in {"PREDICTIONS": 3, "READMISSIONS": 2, "GIL_GAP_S": 600.0, "LEAK_MIB": 4096.0}.items():
        patch.setattr(hardware, key, value)
    patch.setattr(hardware, "CoreML", StandIn)
    patch.setattr(hardware, "AneEngine", lambda options: AneEngine(options, StandIn()))
    patch.setattr(binding, "compile_package", compiled)
    patch.setattr(preparation, "default_cache", lambda: cache)
    patch.setattr(hardware, "timed", once)
    patch.setattr(hardware, "rows", rows)
    tool.prepare(toy.root, backend=StandIn(), compiler=compiled)
    found = preparation.find(cache, toy.artifacts("coreml")[0].digest)
    model = hardware.load(toy, found, placement="off")
    try:
        yield SimpleNamespace(model=model, bundle=toy, prepared=found, record=Record("ane", hardware.SOFTWARE))
    finally:
        model.close()
        patch.undo()


def play(stage: SimpleNamespace, test: Callable[..., None]) -> dict[str, Any]:
    """Run one test of the hardware run and return the figures it kept."""
    names = test.__code__.co_varnames[: test.__code__.co_argcount]
    test(**{name: getattr(stage, name) for name in names})
    results: dict[str, Any] = stage.record.data["results"]
    return results


@pytest.mark.timeout(600)
def test_the_hardware_run_works_and_keeps_its_figures(stage: SimpleNamespace, tmp_path: Path) -> None:
    for test in (
        hardware.test_parity_with_the_reference_of_every_function,
        hardware.test_placement_of_every_function,
        hardware.test_packing_qualifies,
        hardware.test_speed_up_over_the_cpu_alone,
        hardware.test_every_call_releases_the_gil,
        hardware.test_residency_limits,
        hardware.test_nothing_leaks_over_10_000_predictions,
    ):
        results = play(stage, test)
    functions = {"s16", "s32", "s64", "packed32", "packed64"}
    assert set(results["parity"]["functions"]) == set(results["speed"]["functions"]) == functions
    assert {one["name"] for one in results["placement"]["functions"]} == functions
    assert [trial["width"] for trial in results["packing"]["trials"]] == [32, 64]
    assert set(results["gil"]["longest_gap_s"]) == {"compile", "load", "signature", "plan", "predict", "close"}
    assert results["residency"]["refused"] == "ane_residency_limit" and results["leak"]["predictions"] == 3
    stage.record.data["outcomes"] = {"a test": "passed", "another": "not run"}
    written = json.loads(stage.record.write(tmp_path).read_text())
    assert not written["passed"] and written["results"].keys() == results.keys()


@pytest.mark.parametrize("bent", [{"on_cpu": 12}, {"silent": 9}, {"gpu": 1}])
def test_a_bad_plan_fails_the_placement_gates(
    bent: dict[str, int], stage: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandInProgram, "plan", lambda self: plan_of(self._name, **bent))
    with pytest.raises(AssertionError):
        play(stage, hardware.test_placement_of_every_function)


def bent_embed(stage: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, bend: Callable[..., np.ndarray]) -> None:
    good = AneModel.embed

    def embed(self: AneModel, batch: Any, **options: Any) -> np.ndarray:
        return bend(good(self, batch, **options), options["packed_width"])

    monkeypatch.setattr(AneModel, "embed", embed)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("bend", "test"),
    [
        # A row that takes something of its neighbour, everything wrong, and a CPU that is as fast.
        (lambda out, width: out + 0.02 * np.roll(out, 1, 0) if width else out, hardware.test_packing_qualifies),
        (lambda out, width: np.roll(out, 1, 1), hardware.test_parity_with_the_reference_of_every_function),
        (lambda out, width: out * np.nan, hardware.test_parity_with_the_reference_of_every_function),
    ],
)
def test_wrong_numbers_fail(
    bend: Callable[..., np.ndarray], test: Callable[..., None], stage: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    bent_embed(stage, monkeypatch, bend)
    with pytest.raises(AssertionError):
        play(stage, test)


@pytest.mark.timeout(600)
def test_a_cpu_as_fast_as_the_engine_fails(stage: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "timed", lambda *args, **options: 3.0)
    with pytest.raises(AssertionError):
        play(stage, hardware.test_speed_up_over_the_cpu_alone)


def test_committed_documents_are_what_they_say() -> None:
    found = [path for path in sorted(EVIDENCE.glob("*/*.json")) if path.name != "hardware.json"]
    for path in found:
        assert path.stat().st_size < 200_000, path
        assert recheck(path, load_matrix()).problems == [], path
