"""The Core ML binding with CPU-only compute units: `make hw-mac-cpu` on any Apple-silicon machine, virtual ones too.

The same calls as on the Neural Engine: compiling, loading by function name, arrays by strides, the plan, the GIL,
leaks. What it can't show is everything that only the Neural Engine does: placement, its numbers, its speed, its limits.
Nothing here has been executed on a Mac yet; tests/ane rehearses it on a stand-in for Core ML.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engines.ane import compute_plan, inputs
from engines.ane.backend import Source
from engines.ane.binding import Handle
from engines.ane.build.prepare import prepare
from engines.ane.compute_plan import Device
from engines.ane.coreml import MULTI_FUNCTION_MACOS, CoreML, mac_version
from engines.ane.inputs import InputRules
from engines.ane.model import AneModel
from engines.bundle import preparation
from engines.checkpoint.read import Checkpoint
from engines.protocol.errors import EngineError, ErrorCode
from engines.runtime.progress import silent
from tests.hardware import coreml_calls as calls
from tests.hardware.coreml_calls import Prepared, rows, run
from tests.support import toy_models
from tests.support.ane_bundle import packed, shape, write_bundle
from tests.support.mil_reference import ReferenceBackend
from tests.support.rows import cosines

pytestmark = [getattr(pytest.mark, "mac-cpu"), pytest.mark.timeout(1200)]

NAMES = {"s16": 16, "s64": 64, "packed64": 64}
RULES = InputRules(vocab=1000)


class CpuOnly(CoreML):
    """The production backend, every function opened for the CPU alone: some of these machines have nothing else."""

    def open(self, source: Source, *, units: str) -> Handle:
        return super().open(source, units="cpu_only")


class Subject(Prepared):
    """A toy encoder whose rows of 200 fp16 values fill no whole number of 64-byte lines."""

    def package(self, name: str) -> tuple[Path, str]:
        """Return the package of a function and its name there."""
        root = self.bundle.path(self.artifact.path)
        return (root, name) if root.suffix else (root / f"{name}.mlpackage", "main")


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return build(tmp_path_factory.mktemp("mac-cpu"))


def build(folder: Path) -> Subject:
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    toy_models.write_bert(checkpoint, hidden=200, vocab=RULES.vocab, max_positions=64)
    several = int(mac_version().partition(".")[0]) >= MULTI_FUNCTION_MACOS
    target = "macos15" if several else "macos14"
    bundle = write_bundle(Checkpoint.open(checkpoint), folder / "bundle", shape(16, 64) + packed(64), target=target)
    prepare(bundle.root, folder / "cache", backend=CpuOnly())
    return Subject(bundle, *preparation.find(folder / "cache", bundle.artifacts("coreml")[0].digest))


@pytest.fixture(scope="module")
def model(subject: Subject) -> Iterator[AneModel]:
    found = subject.load(compute_units="cpu_only")
    yield found
    found.close()


def feeds(name: str, seed: int = 1) -> inputs.Feeds:
    tokens = NAMES[name]
    if name.startswith("packed"):
        return inputs.packed(rows([tokens // 2, tokens // 4, 3], RULES.vocab, seed), tokens, RULES)
    return inputs.single(rows([tokens - 3], RULES.vocab, seed)[0], tokens, RULES)


def test_each_function_was_loaded_once_and_is_the_one_that_its_name_says(subject: Subject) -> None:
    assert all(function.first_load_ms is not None for function in subject.record.functions.values())
    for name, (source, spec) in subject.functions().items():
        handle = CoreML().open(source, units="cpu_only")
        assert handle.signature() == spec, name
        handle.close()


def test_outputs_are_read_by_their_strides(subject: Subject) -> None:
    """Token by token against the evaluator: read as if dense, a padded row shifts all that follow it."""
    reference = ReferenceBackend()
    for name, (source, _) in subject.functions().items():
        handle = CoreML().open(source, units="cpu_only")
        expected = reference.open(Source(*subject.package(name), source.multi), units="cpu_only")
        for seed in (1, 2):  # the second run reuses the first one's arrays
            got, wanted = (one.run(feeds(name, seed))["last_hidden_state"] for one in (handle, expected))
            assert got.shape == wanted.shape and cosines(got[0], wanted[0]).min() >= 0.999, name
        handle.close()
        expected.close()


def test_a_plan_has_the_function_alone_everything_on_the_cpu_and_every_value_s_origin(subject: Subject) -> None:
    for name, (source, spec) in subject.functions().items():
        handle = CoreML().open(source, units="cpu_only")
        function = handle.plan()
        handle.close()
        assert function is not None, name
        assert set(function.inputs) == set(spec.inputs) and set(function.outputs) == set(spec.outputs)
        operations = list(function.walk())
        assert {one.preferred for one in operations} <= {Device.CPU, Device.UNKNOWN}
        assert compute_plan.share(function) == 0.0
        known = {*function.inputs, *(made for one in operations for made in one.outputs)}
        assert all(one.inputs and known.issuperset(one.inputs) for one in operations if not one.is_const), name
        stages = {stage for _, stage in compute_plan.stages(function)}
        assert "token_embedding" in stages and ("mask_position" in stages or name.startswith("packed"))


def test_load_admit_embed_pack_evict(model: AneModel) -> None:
    found = rows([2, 16, 40, 64, 7], RULES.vocab)
    model.admit_shape(64, progress=silent())
    model.admit_packed(64, progress=silent())
    alone = run(model, found)
    assert np.isfinite(alone).all() and np.abs(np.linalg.norm(alone, axis=1) - 1).max() < 1e-3
    assert cosines(run(model, found, 64), alone).min() >= 0.9999
    assert model.status().placement_share == 0.0
    model.evict_shape(64, progress=silent())
    model.evict_packed(64, progress=silent())
    assert model.status().resident_shapes == (16,) and model.status().resident_packed == ()


def test_every_call_releases_the_gil(subject: Subject) -> None:
    source, _ = subject.functions()["s64"]
    found = calls.gil(subject.package("s64")[0], source, feeds("s64"), units="cpu_only")
    assert all(gap <= calls.GIL_GAP_S for _, gap in found.values()), found


def test_nothing_leaks(model: AneModel) -> None:
    row = rows([9], RULES.vocab)
    first = run(model, row)
    assert calls.grown_mib(model, row) <= calls.LEAK_MIB and np.array_equal(first, run(model, row))


def test_what_is_not_there_is_a_typed_error(subject: Subject, tmp_path: Path) -> None:
    (source, _), backend = subject.functions()["s16"], CoreML()
    with pytest.raises(EngineError) as refused:
        backend.open(Source(tmp_path / "absent.mlmodelc", source.function, source.multi), units="cpu_only")
    assert refused.value.code is ErrorCode.ARTIFACT_INVALID
    with pytest.raises(EngineError):
        backend.open(Source(source.path, "absent", True), units="cpu_only")
