"""The hardware runs rehearsed on a stand-in for Core ML, and the document of the Neural Engine's: its gates can fail.

The rehearsals run the tests of tests/hardware/test_ane.py and test_mac_cpu.py with toy sizes through the production
binding; below it lies tests/ane/coreml_standin.py, which computes with the numpy evaluator. They prove that the
programs work and write what they should; their numbers mean nothing and are written nowhere.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engines.ane.compute_plan import Device, Function, Operation, PlanView
from engines.ane.model import AneModel
from engines.bundle import preparation
from engines.checkpoint.read import Checkpoint
from engines.protocol.errors import EngineError, ErrorCode
from tests.ane.coreml_answers import MilFunction, Op
from tests.ane.coreml_standin import FLOOR, NEWEST, Framework
from tests.hardware import ane_evidence, coreml_calls, test_mac_cpu
from tests.hardware import test_ane as hardware
from tests.support.ane_bundle import packed, shape, write_bundle

pytestmark = pytest.mark.numerics

EVIDENCE = Path(__file__).parents[2] / "evidence"


def plan_of(name: str) -> PlanView:
    """A plan as a Mac gives it: all on the Neural Engine but for the look-up of the ids."""
    operations = [Operation("ios18.conv", Device.ANE, 0.01) for _ in range(99)]
    operations += [
        Operation("ios18.gather", Device.CPU, 0.01, inputs=("input_ids",)),
        Operation("const", Device.UNKNOWN),
    ]
    return PlanView("program", {name: Function(("input_ids",), tuple(operations))})


def place(op: Op, units: int) -> str:
    return "cpu" if not units or op.operator.endswith("gather") else "ane"


@pytest.fixture(scope="module")
def mac(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Framework]:
    """A stand-in for a Mac: framework, floor and OS build."""
    patch = pytest.MonkeyPatch()
    made = Framework(functools.cache(MilFunction), place).install(patch)
    made.scratch = tmp_path_factory.mktemp("compiled")
    cache = tmp_path_factory.mktemp("cache")
    patch.setattr("engines.ane.coreml.floor", lambda: "ok")
    for module in ("engines.ane.coreml", "tests.hardware.test_mac_cpu"):
        patch.setattr(f"{module}.mac_version", lambda: "{}.{}".format(*made.os))
    patch.setattr("engines.ane.coreml.os_build", lambda: "25F1")
    patch.setattr(preparation, "default_cache", lambda: cache)
    patch.setattr(hardware, "PREDICTIONS", 3)
    patch.setattr(test_mac_cpu, "PREDICTIONS", 3)
    patch.setattr(test_mac_cpu, "MAX_GAP_S", 600.0)
    for module in (hardware, test_mac_cpu):
        patch.setattr(module, "gil", functools.partial(coreml_calls.gil, predictions=2))
        patch.setattr(module, "grown_mib", functools.partial(coreml_calls.grown_mib, warm_up=1))
    yield made
    patch.undo()
    assert made.faults == [] and made.pools == 0


@pytest.fixture(scope="module")
def sizes(mac: Framework) -> Iterator[None]:
    """Toy sizes for the Neural Engine's run; what a busy machine may miss is not rehearsed."""
    patch = pytest.MonkeyPatch()
    names = {"s16": 16, "s32": 32, "s64": 64, "packed32": 32, "packed64": 64}
    for key, value in {"BUCKETS": (16, 32, 64), "WIDTHS": (32, 64), "NAMES": names, "READMISSIONS": 2}.items():
        patch.setattr(hardware, key, value)
    patch.setattr(hardware, "sysctl", lambda name: "toy")
    used: list[int] = []

    def timed(work: Callable[[], Any]) -> float:
        """Run once; the CPU alone is said to take four times as long, whatever this machine is busy with."""
        work()
        return 20.0 if used[-1] == 0 else 5.0

    mac.predicted = used.append
    patch.setattr(hardware, "timed", timed)
    patch.setitem(ane_evidence.THRESHOLDS, "gil_gap_s", 600.0)
    patch.setattr(ane_evidence, "PREDICTIONS", 3)
    patch.setattr(ane_evidence, "READMISSIONS", 2)
    yield
    patch.undo()


Subjects = Callable[[str], tuple[hardware.Subject, hardware.Document]]


@pytest.fixture(scope="module")
def subjects(
    sizes: None, checkpoints: Callable[[str], Checkpoint], tmp_path_factory: pytest.TempPathFactory
) -> Subjects:
    """Both tasks' toys, built and prepared once, with the document of the run."""
    document = hardware.Document()

    @functools.cache
    def get(task: str) -> tuple[hardware.Subject, hardware.Document]:
        keys = shape(16, 32, 64) + (packed(32, 64) if task == "embed" else [])
        checkpoint = checkpoints("bert" if task == "embed" else "cross")
        document.part(task)["weights"] = "seeded"
        bundle = write_bundle(checkpoint, tmp_path_factory.mktemp("hw") / "b", keys)
        return hardware.prepared(task, bundle, None, document), document

    return get


@pytest.fixture(scope="module")
def rehearsed(subjects: Subjects) -> dict[str, Any]:
    """The document of one whole rehearsal."""
    subject, document = subjects("embed")
    for model in hardware.loaded(subject, document):
        hardware.test_parity_with_the_reference_of_every_function(model, subject, document)
        hardware.test_packing_qualifies(model, subject, document)
        hardware.test_speed_up_over_the_cpu_alone(model, subject, document)
        hardware.test_residency_limits(model, document)
        hardware.test_every_call_releases_the_gil(subject, document)
        hardware.test_nothing_leaks_over_10_000_predictions(model, subject, document)
    hardware.test_placement_of_every_function(subject, document)
    hardware.test_a_load_that_judges_placement_keeps_its_share_over_evictions(subject, document)
    document.data["coremltools"] = {"share": 0.99, "share_difference": 0.0, "min_cosine": 1.0}
    subject, document = subjects("rerank")
    for model in hardware.loaded(subject, document):
        hardware.test_a_reranker_s_logits_are_the_reference_s(model, subject, document)
        hardware.test_a_reranker_is_faster_than_the_cpu_alone(model, subject, document)
    hardware.test_placement_of_a_reranker(subject, document)
    data = json.loads(json.dumps(document.data))
    return {**data, "gates": ane_evidence.gates(data), "verdict": ane_evidence.verdict(data)}


@pytest.mark.timeout(600)
def test_the_hardware_run_works_and_its_document_is_honest(rehearsed: dict[str, Any]) -> None:
    assert rehearsed["verdict"] == "pass", [gate for gate in rehearsed["gates"] if not gate["passed"]]
    assert ane_evidence.problems(rehearsed) == []
    told = {"placement", "quality", "ane_ms", "cpu_ms", "tokens_per_s", "cold_load_ms", "admit_ms"}
    for part in (rehearsed, rehearsed["rerank"]):
        assert part["kernel_revision"].startswith("mil-encoder-1/coreml-macos-") and part["warm_load_ms"] > 0
        for one in part["functions"].values():
            assert told <= set(one)
            assert one["tokens_per_s"] == pytest.approx(one["tokens"] / one["ane_ms"] * 1000, rel=0.01)
    assert set(rehearsed["rerank"]["functions"]) == {"s16", "s32", "s64"}
    assert set(rehearsed["gil_longest_gap_s"]) == set(ane_evidence.GIL_CALLS)


@pytest.mark.timeout(600)
def test_one_operation_on_the_cpu_fails_the_placement_tests_alone(
    subjects: Subjects, mac: Framework, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a first run on a Mac may well meet: everything else is measured all the same."""
    monkeypatch.setattr(mac, "place", lambda op, units: "cpu" if op.operator.endswith("softmax") else place(op, units))
    subject, document = subjects("embed")
    document = copy.deepcopy(document)
    for model in hardware.loaded(subject, document):
        hardware.test_parity_with_the_reference_of_every_function(model, subject, document)
    with pytest.raises(AssertionError, match="cpu_operations"):
        hardware.test_placement_of_every_function(subject, document)
    assert "softmax" in document.function("s16")["placement"]["refused"]
    with pytest.raises(EngineError) as refused:
        hardware.test_a_load_that_judges_placement_keeps_its_share_over_evictions(subject, document)
    assert refused.value.code is ErrorCode.INVALID_PLACEMENT


MAC_CPU = [name for name in dir(test_mac_cpu) if name.startswith("test_")]


@pytest.fixture(scope="module", params=[FLOOR, NEWEST], ids=["macos14", "newest"])
def toy(
    request: pytest.FixtureRequest, mac: Framework, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[test_mac_cpu.Subject]:
    """The run's toy on the oldest system, whose packages hold one function each, and on the newest."""
    mac.os = request.param
    yield test_mac_cpu.build(tmp_path_factory.mktemp("mac-cpu"))
    mac.os = NEWEST


@pytest.fixture
def toy_model(toy: test_mac_cpu.Subject) -> Iterator[AneModel]:
    model = test_mac_cpu.load(toy)
    yield model
    model.close()


@pytest.mark.parametrize("name", MAC_CPU)
def test_the_run_on_the_cpu_alone_works(
    name: str, toy: test_mac_cpu.Subject, toy_model: AneModel, tmp_path: Path
) -> None:
    given = {"subject": toy, "model": toy_model, "tmp_path": tmp_path}
    test = getattr(test_mac_cpu, name)
    test(**{key: given[key] for key in test.__annotations__ if key != "return"})


def test_an_exception_of_the_bridge_fails_one_request_and_the_model_serves_on(
    toy_model: AneModel, mac: Framework, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = coreml_calls.rows([3, 9], 1000)
    before = test_mac_cpu.embed(toy_model, found)

    def exception(*given: Any) -> Any:
        raise mac.exception("NSInvalidArgumentException")

    with monkeypatch.context() as bent:
        bent.setitem(mac.answers.table, "-[MLModel predictionFromFeatures:error:]", exception)
        with pytest.raises(EngineError) as refused:
            test_mac_cpu.embed(toy_model, found)
    assert refused.value.code is ErrorCode.INFERENCE_FAILED and "out of sorts" in refused.value.msg
    assert np.array_equal(test_mac_cpu.embed(toy_model, found), before)


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
