"""The hardware run's document: its gates can fail, committed ones are computed again, and the run is rehearsed.

The rehearsal runs every test of tests/hardware/test_ane.py with a stand-in for the framework and toy sizes. It proves
that the program works and writes what it should; its numbers mean nothing and are written nowhere.
"""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engines.ane import binding
from engines.ane import prepare as tool
from engines.ane.backend import Source
from engines.ane.compute_plan import Device, Function, Operation, PlanView
from engines.ane.engine import AneEngine
from engines.ane.package import PackageSpec, read_spec
from engines.bundle import preparation
from engines.bundle.checkpoint import Checkpoint
from engines.bundle.manifest import Bundle
from engines.protocol.messages import ANE_ENGINE
from tests.hardware import ane_evidence
from tests.hardware import test_ane as hardware
from tests.support.ane_bundle import packed, shape, write_bundle
from tests.support.mil_reference import ReferenceBackend, ReferenceProgram

pytestmark = pytest.mark.numerics

EVIDENCE = Path(__file__).parents[2] / "evidence"


def plan_of(name: str) -> PlanView:
    """A plan as a Mac gives it: all on the Neural Engine but for the look-up of the ids."""
    operations = [Operation("ios18.conv", Device.ANE, 0.01) for _ in range(99)]
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


@pytest.fixture(scope="module")
def toy(checkpoints: Callable[[str], Checkpoint], tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_bundle(checkpoints("bert"), tmp_path_factory.mktemp("hw") / "b", shape(16, 32, 64) + packed(32, 64))


@pytest.fixture(scope="module")
def rehearsed(toy: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The document of one whole rehearsal."""
    patch = pytest.MonkeyPatch()
    cache = tmp_path_factory.mktemp("cache")
    names = {"s16": 16, "s32": 32, "s64": 64, "packed32": 32, "packed64": 64}
    for key, value in {"BUCKETS": (16, 32, 64), "WIDTHS": (32, 64), "NAMES": names, "PREDICTIONS": 3}.items():
        patch.setattr(hardware, key, value)
    patch.setattr(hardware, "CoreML", StandIn)
    patch.setattr(hardware, "READMISSIONS", 2)
    patch.setattr(hardware, "AneEngine", lambda options: AneEngine(options, StandIn()))
    patch.setattr(binding, "compile_package", compiled)
    patch.setattr(preparation, "default_cache", lambda: cache)
    patch.setattr(hardware, "prepare", lambda root: tool.prepare(root, backend=StandIn(), compiler=compiled))
    patch.setattr(hardware, "sysctl", lambda name: "toy")
    patch.setattr(hardware, "timed", lambda *a, **k: once(*a, **k))
    patch.setattr(hardware, "rows", rows)
    # What a busy machine may miss, and what three predictions can't show, is not rehearsed.
    patch.setitem(ane_evidence.THRESHOLDS, "gil_gap_s", 600.0)
    patch.setattr(ane_evidence, "PREDICTIONS", 3)
    patch.setattr(ane_evidence, "READMISSIONS", 2)
    document = hardware.Document()
    document.data["weights"] = "seeded"
    prepared = hardware.prepare(toy.root)
    for name, ms in prepared["prepared"][0]["first_load_ms"].items():
        document.function(name)["cold_load_ms"] = ms
    found = preparation.find(cache, toy.artifacts("coreml")[0].digest)
    model = hardware.load(toy, found)
    try:
        hardware.test_parity_with_the_reference_of_every_function(model, toy, document)
        hardware.test_placement_of_every_function(found, document)
        document.data["coremltools"] = {"share": 0.99, "share_difference": 0.0, "min_cosine": 1.0}
        hardware.test_packing_qualifies(model, document)
        hardware.test_speed_up_over_the_cpu_alone(model, toy, found, document)
        hardware.test_every_call_releases_the_gil(toy, found, document)
        hardware.test_residency_limits(model, document)
        hardware.test_nothing_leaks_over_10_000_predictions(model, document)
        data = json.loads(json.dumps(document.data))
        yield {**data, "gates": ane_evidence.gates(data), "verdict": ane_evidence.verdict(data)}
    finally:
        model.close()
        patch.undo()


def rows(lengths: list[int], seed: int = 1) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(5, 128, n).astype(np.int32) for n in lengths]


def once(model: Any, found: list[np.ndarray], repeats: int = 1, width: int | None = None) -> float:
    started = time.perf_counter()
    hardware.embed(model, found, width)
    return (time.perf_counter() - started) * 1000


@pytest.mark.timeout(600)
def test_the_hardware_run_works_and_its_document_is_honest(rehearsed: dict[str, Any]) -> None:
    assert rehearsed["verdict"] == "pass", [gate for gate in rehearsed["gates"] if not gate["passed"]]
    assert ane_evidence.problems(rehearsed) == []
    for one in rehearsed["functions"].values():
        assert {"quality", "placement", "ane_ms", "cpu_ms", "cold_load_ms", "admit_ms"} <= set(one)
    assert set(rehearsed["gil_longest_gap_s"]) == set(ane_evidence.GIL_CALLS)


def changed(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    bent = copy.deepcopy(document)
    *parents, last = path.split(".")
    place = bent
    for key in parents:
        place = place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return bent


UNPLACED = {"share", "cost_share", "placement_reported", "cpu_operations"}
GPU = msgspec.json.decode(msgspec.json.encode(plan_of("s16")))
GPU["functions"]["s16"]["operations"][0]["on"] = "gpu"
MUCH_CPU = msgspec.json.decode(msgspec.json.encode(plan_of("s16")))
for operation in MUCH_CPU["functions"]["s16"]["operations"][:12]:
    operation["on"] = "cpu"
SILENT = msgspec.json.decode(msgspec.json.encode(plan_of("s16")))
for operation in SILENT["functions"]["s16"]["operations"][:9]:
    operation["on"] = "unknown"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("path", "value", "gates"),
    [
        ("functions.s16.quality.min_cosine", 0.9989, {"min_cosine"}),
        ("functions.s64.quality.non_finite", 1, {"non_finite"}),
        ("functions.s64.quality", None, {"min_cosine", "non_finite"}),
        ("functions.s16.placement.recorded_plan", GPU, {"cpu_operations"}),
        ("functions.s16.placement.recorded_plan", MUCH_CPU, {"share", "cost_share", "cpu_operations"}),
        ("functions.s16.placement.recorded_plan", SILENT, {"placement_reported"}),
        (
            "functions.s16.placement.recorded_plan",
            None,
            {"share", "cost_share", "placement_reported", "cpu_operations"},
        ),
        ("functions.packed64.packing.rows", 63, {"packed_rows"}),
        ("functions.packed64.packing.mixes", 7, {"packed_mixes"}),
        ("functions.packed32.packing.min_cosine", 0.99989, {"packed_cosine"}),
        ("functions.packed32.packing.max_difference", 0.0011, {"neighbour_leak"}),
        ("functions.s32.cpu_ms", 0.1, {"speedup"}),
        ("functions.s32.cpu_ms", None, {"speedup"}),
        ("gil_longest_gap_s.plan", 601.0, {"gil_gap_s"}),
        ("gil_longest_gap_s.close", None, {"gil_gap_s"}),
        ("residency.refused", "oom", {"residency_limit"}),
        ("residency.readmissions", 1, {"readmissions"}),
        ("residency.share_after_evictions", 0.5, {"share_after_evictions"}),
        ("leak.predictions", 2, {"predictions"}),
        ("leak.grown_mib", 65.0, {"leak_mib"}),
        ("coremltools.share_difference", 0.03, {"coremltools_share"}),
        ("coremltools.min_cosine", 0.9998, {"coremltools_cosine"}),
        ("weights", "minilm", {"certified"}),
    ],
)
def test_every_gate_can_fail_and_nothing_missing_passes(
    path: str, value: Any, gates: set[str], rehearsed: dict[str, Any]
) -> None:
    bent = changed(rehearsed, path, value)
    assert {gate["name"] for gate in ane_evidence.gates(bent) if not gate["passed"]} == gates
    assert ane_evidence.verdict(bent) == "fail" and ane_evidence.problems(bent)


def test_an_empty_document_passes_nothing() -> None:
    assert not any(gate["passed"] for gate in ane_evidence.gates({}))
    assert ane_evidence.verdict({}) == "fail" and len(ane_evidence.problems({})) == 4


def test_committed_evidence_is_what_it_says_and_without_any_the_readme_says_so() -> None:
    found = sorted(EVIDENCE.glob("ane-*.json"))
    for path in found:
        assert ane_evidence.problems(json.loads(path.read_bytes())) == [], path.name
    if not found:
        text = (EVIDENCE.parent / "README.md").read_text().lower()
        assert "not measured" in text or "never executed" in text
