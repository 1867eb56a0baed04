"""The hardware runs rehearsed on a stand-in for Core ML: they work, write what they should and fail where they should.

The rehearsals run the tests of tests/hardware/test_ane.py and test_mac_cpu.py with toy sizes through the production
binding; below it lies tests/ane/coreml_standin.py, which computes with the numpy evaluator. They prove that the
programs work; their numbers mean nothing and are kept nowhere. Committed documents of real runs are judged again.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.ane.model import AneModel
from engines.bundle import preparation
from engines.checkpoint.read import Checkpoint
from engines.protocol.errors import EngineError, ErrorCode
from synapse_host.certificates.recheck import recheck
from synapse_host.placement.matrix import load as load_matrix
from tests.ane.coreml_answers import MilFunction, Op
from tests.ane.coreml_standin import FLOOR, NEWEST, Framework
from tests.hardware import coreml_calls, test_mac_cpu
from tests.hardware import test_ane as hardware
from tests.hardware.record import Record
from tests.support.ane_bundle import packed, shape, write_bundle

pytestmark = pytest.mark.numerics

EVIDENCE = Path(__file__).parents[2] / "evidence"
EMBED = ("s16", "s32", "s64", "packed32", "packed64")


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
    patch.setattr("engines.ane.coreml.CoreML.os_build", lambda self: "25F1")
    patch.setattr(preparation, "default_cache", lambda: cache)
    # What a busy machine may miss, and what a few predictions can't show, is not rehearsed.
    for key, value in {"PREDICTIONS": 3, "WARM_UP": 1, "GIL_PREDICTIONS": 2, "GIL_GAP_S": 600.0}.items():
        patch.setattr(coreml_calls, key, value)
    patch.setattr(hardware, "READMISSIONS", 2)
    yield made
    patch.undo()
    assert made.faults == [] and made.pools == 0


@pytest.fixture(scope="module")
def clock(mac: Framework) -> Iterator[dict[str, float]]:
    """Milliseconds that a call is said to take on the CPU alone and else, whatever this machine is busy with."""
    patch = pytest.MonkeyPatch()
    used: list[int] = []
    said = {"cpu": 20.0, "ane": 5.0}

    def timed(work: Callable[[], Any]) -> float:
        work()
        return said["ane" if used[-1] else "cpu"]

    mac.predicted = used.append
    patch.setattr(hardware, "timed", timed)
    yield said
    patch.undo()


Subjects = Callable[[str], hardware.Subject]


@pytest.fixture(scope="module")
def record() -> Record:
    return Record("ane", hardware.SOFTWARE)


@pytest.fixture(scope="module")
def subjects(
    clock: dict[str, float],
    record: Record,
    checkpoints: Callable[[str], Checkpoint],
    tmp_path_factory: pytest.TempPathFactory,
) -> Subjects:
    """Both tasks' toys, built and prepared once."""

    @functools.cache
    def get(task: str) -> hardware.Subject:
        keys = shape(16, 32, 64) + packed(32, 64) if task == "embed" else shape(16, 64)
        bundle = write_bundle(
            checkpoints("bert" if task == "embed" else "cross"), tmp_path_factory.mktemp("hw") / "b", keys
        )
        return hardware.prepared(bundle, record)

    return get


@pytest.fixture(scope="module")
def rehearsed(subjects: Subjects, record: Record) -> dict[str, Any]:
    """The figures of one whole rehearsal."""
    for task in ("embed", "rerank"):
        subject = subjects(task)
        for model in hardware.loaded(subject, record):
            hardware.test_the_numbers_of_every_function(model, subject, record)
            hardware.test_speed_up_over_the_cpu_alone(model, subject, record)
            if task == "embed":
                hardware.test_residency_limits(model, subject, record)
                hardware.test_every_call_releases_the_gil(subject, record)
                hardware.test_nothing_leaks_over_10_000_predictions(model, subject, record)
        hardware.test_placement_of_every_function(subject, record)
    hardware.test_a_load_that_judges_placement_keeps_its_share_over_evictions(subjects("embed"), record)
    found: dict[str, Any] = json.loads(json.dumps(record.data["results"]))
    return found


@pytest.mark.timeout(600)
def test_the_hardware_run_works_and_keeps_its_figures(
    rehearsed: dict[str, Any], record: Record, tmp_path: Path
) -> None:
    for task, names in (("embed", EMBED), ("rerank", ("s16", "s64"))):
        assert rehearsed[f"prepare {task}"]["kernel_revision"].startswith("mil-encoder-1/coreml-macos-")
        assert set(rehearsed[f"prepare {task}"]["cold_ms"]) == set(names)
        assert rehearsed[f"load {task}"]["warm_load_ms"] > 0
        assert all({"lengths", "admit_ms"} <= set(rehearsed[f"numbers {task}"]["functions"][name]) for name in names)
        assert [one["name"] for one in rehearsed[f"placement {task}"]["functions"]] == list(names)
        for name, one in rehearsed[f"speed {task}"]["functions"].items():
            tokens = int(name.removeprefix("packed").removeprefix("s"))
            assert one["tokens_per_s"] == pytest.approx(tokens / one["native_ms"] * 1000, rel=0.01)
    assert set(rehearsed["gil"]["longest_gap_s"]) == {"compile", "load", "signature", "plan", "predict", "close"}
    assert rehearsed["residency"]["refused"] == "ane_residency_limit"
    assert rehearsed["residency"]["share_after_evictions"] >= 0.9 and rehearsed["leak"]["predictions"] == 3
    record.data["outcomes"] = {"a test": "passed", "another": "not run"}
    written = json.loads(record.write(tmp_path).read_text())
    assert not written["passed"] and written["results"].keys() == rehearsed.keys()


# --- where it must fail ----------------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
def test_one_operation_on_the_cpu_fails_the_placement_tests_alone(
    subjects: Subjects, mac: Framework, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a first run on a Mac may well meet: everything else is measured all the same."""
    monkeypatch.setattr(mac, "place", lambda op, units: "cpu" if op.operator.endswith("softmax") else place(op, units))
    subject, record = subjects("embed"), Record("ane", hardware.SOFTWARE)
    for model in hardware.loaded(subject, record):
        hardware.test_the_numbers_of_every_function(model, subject, record)
    with pytest.raises(AssertionError, match="cpu_operations"):
        hardware.test_placement_of_every_function(subject, record)
    assert "softmax" in record.data["results"]["placement embed"]["plans"]["s16"]["refused"]
    with pytest.raises(EngineError) as refused:
        hardware.test_a_load_that_judges_placement_keeps_its_share_over_evictions(subject, record)
    assert refused.value.code is ErrorCode.INVALID_PLACEMENT


# --- the CPU alone ---------------------------------------------------------------------------------------------------


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
    model = toy.load(compute_units="cpu_only")
    yield model
    model.close()


@pytest.mark.parametrize("name", MAC_CPU)
def test_the_run_on_the_cpu_alone_works(
    name: str, toy: test_mac_cpu.Subject, toy_model: AneModel, tmp_path: Path
) -> None:
    given = {"subject": toy, "model": toy_model, "tmp_path": tmp_path}
    test = getattr(test_mac_cpu, name)
    test(**{key: given[key] for key in test.__annotations__ if key != "return"})


def test_committed_documents_are_what_they_say() -> None:
    found = [path for path in sorted(EVIDENCE.glob("*/*.json")) if path.name != "hardware.json"]
    for path in found:
        assert path.stat().st_size < 200_000, path
        assert recheck(path, load_matrix()).problems == [], path
