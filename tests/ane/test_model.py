"""LOAD, admission, eviction, serving and PONG in this process: codes, caps, idempotence, caching, checks, progress."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engines.ane.backend import Source
from engines.ane.compute_plan import Device, Function, Operation
from engines.ane.model import AneModel
from engines.bundle import manifest
from engines.bundle.manifest import Bundle
from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import Phase, Pooling
from engines.runtime.engine import WorkerOptions
from engines.runtime.progress import ProgressReporter, silent
from tests.ane.conftest import load_request, refusal
from tests.support.ane_worker import ReferenceEngine
from tests.support.mil_reference import ReferenceBackend, ReferenceProgram
from tests.support.rows import batch_of

LoadModel = Callable[..., AneModel]
Bundles = Callable[[str], Bundle]


def embed(
    model: AneModel,
    *lengths: int,
    width: int | None = None,
    normalize: bool = True,
    progress: ProgressReporter | None = None,
) -> np.ndarray:
    batch = batch_of([range(5, 5 + length) for length in lengths])
    progress = progress or silent()
    return model.embed(batch, pooling=Pooling.MEAN, normalize=normalize, packed_width=width, progress=progress)


def counting() -> tuple[ProgressReporter, list[int]]:
    """A reporter without coalescing and the counts it sent."""
    sent: list[int] = []
    ticks = iter(range(0, 10**9, 10))
    return ProgressReporter(lambda n, phase: sent.append(n), phase=Phase.SETUP, clock=lambda: float(next(ticks))), sent


class FakeProgram(ReferenceProgram):
    """The evaluator with a plan, an output that may be bent, and a count of what was asked."""

    def __init__(self, backend: FakeBackend, source: Source) -> None:
        super().__init__(source)
        self.backend, self.source = backend, source

    def plan(self) -> Function | None:  # type: ignore[override]
        self.backend.plans += 1
        return self.backend.plan_of(self.source.function)

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return self.backend.bend(super().run(feeds))

    def close(self) -> None:
        super().close()
        self.backend.closed.append(self.source.function)


class FakeBackend(ReferenceBackend):
    def __init__(self) -> None:
        self.plans = 0
        self.opened: list[str] = []
        self.closed: list[str] = []
        self.plan_of: Callable[[str], Function | None] = lambda function: None
        self.bend: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] = lambda outputs: outputs
        self.fail: Exception | None = None

    def open(self, source: Source, *, units: str) -> FakeProgram:
        if self.fail is not None:
            raise self.fail
        self.opened.append(source.function)
        return FakeProgram(self, source)


@pytest.fixture
def fake() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def opened(load: LoadModel, bundles: Bundles, fake: FakeBackend) -> LoadModel:
    """Load a bundle on *fake* in a new engine, or in *engine*; closed afterwards."""

    def call(bundle: Bundle | None = None, *, engine: ReferenceEngine | None = None, **config: str) -> AneModel:
        found = bundle or bundles("bert")
        return load(found, engine=engine or engine_on(found, fake), **config)

    return call


def engine_on(bundle: Bundle, backend: Any) -> ReferenceEngine:
    return ReferenceEngine(WorkerOptions(device="ane", manifest=bundle.path("manifest.json"), packed=(64,)), backend)


def ane_plan(function: str, cpu: int = 0, ane: int = 9) -> Function:
    """A plan with so many operations on each device; those on the CPU cast the mask, as they may."""
    ops = (Operation("ios18.conv", Device.ANE),) * ane
    ops += (Operation("ios18.cast", Device.CPU, inputs=("attention_mask",)),) * cpu
    return Function(("input_ids", "attention_mask"), ops)


# --- LOAD ------------------------------------------------------------------------------------------------------------


def test_load_admits_the_smallest_bucket_only(load: LoadModel) -> None:
    progress, sent = counting()
    model = load("bert", progress=progress)
    status = model.status()
    assert model.dims == 64 and model.buckets == (16, 32, 64)
    assert status.resident_shapes == (16,) and status.resident_packed == ()
    assert status.placement_share is None, "the evaluator has no plan and so no share"
    assert sent == sorted(set(sent)) and sent[-1] == 1 + 3, "one MiB hashed; opened, run, planned"


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"compute_units": "all"}, ErrorCode.CONFIG_INVALID),
        ({"prepare": "maybe"}, ErrorCode.CONFIG_INVALID),
        ({"placement": "yes"}, ErrorCode.CONFIG_INVALID),
        ({"pooling": "max"}, ErrorCode.CONFIG_INVALID),
        ({"normalize": "1"}, ErrorCode.CONFIG_INVALID),
        ({"certified_ms": "["}, ErrorCode.CONFIG_INVALID),
        ({"certified_ms": '{"s16": -1}'}, ErrorCode.CONFIG_INVALID),
        ({"profile": "another"}, ErrorCode.CONFIG_INVALID),
        ({"operation": "rerank"}, ErrorCode.OPERATION_MISMATCH),
        ({"backend": "cuda"}, ErrorCode.BACKEND_MISSING),
    ],
)
def test_bad_configuration(config: dict[str, str], code: ErrorCode, load: LoadModel) -> None:
    assert refusal(lambda: load("bert", **config)).code is code


@pytest.mark.parametrize("attack", ["changed byte", "root symlink", "fifo", "not a folder"])
def test_a_tampered_artifact_is_refused(attack: str, bundles: Bundles, fake: FakeBackend, tmp_path: Path) -> None:
    bundle = bundles("bert")
    request = load_request(bundle)
    path = tmp_path / "compiled"
    shutil.copytree(request.artifact_path, path)
    file = path / "model.mlmodelc" / "Manifest.json"
    if attack == "changed byte":
        file.write_bytes(file.read_bytes().replace(b"CoreML", b"CoreMl", 1))
    elif attack == "root symlink":
        path.rename(tmp_path / "real")
        path.symlink_to(tmp_path / "real")
    elif attack == "fifo":
        os.mkfifo(path / "pipe")
    found = file if attack == "not a folder" else path
    request = msgspec.structs.replace(request, artifact_path=str(found))
    found = refusal(lambda: engine_on(bundle, fake).load(request, progress=silent()))
    assert found.code is ErrorCode.ARTIFACT_INVALID and fake.opened == []


def replaced(file: Path) -> None:
    """Another file of the same size and time under the name, as an installer leaves it."""
    before, other = file.stat(), file.with_suffix(".other")
    other.write_bytes(file.read_bytes()[::-1])
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(file)


def overwritten(file: Path) -> None:
    """Other bytes in the same file, its size and its time of modification as they were."""
    before = file.stat()
    file.write_bytes(file.read_bytes()[::-1])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def added(file: Path) -> None:
    file.with_name("another").write_bytes(b"")


def functions(*found: dict[str, Any]) -> Callable[[Any], None]:
    """Let a manifest name these functions instead."""
    return lambda document: document["artifacts"][0].update(functions=list(found))


@pytest.fixture
def own(bundles: Bundles, tmp_path: Path) -> tuple[Bundle, Path]:
    """A copy of bert's bundle, and a file of its compiled folder."""
    shutil.copytree(bundles("bert").root, tmp_path / "bundle")
    bundle = manifest.read(tmp_path / "bundle")
    return bundle, Path(load_request(bundle).artifact_path) / "model.mlmodelc" / "Manifest.json"


@pytest.mark.parametrize("change", [replaced, overwritten, added, Path.unlink], ids=lambda one: one.__name__)
def test_files_that_changed_after_they_were_hashed_reach_no_program(
    change: Callable[[Path], None], opened: LoadModel, own: tuple[Bundle, Path], fake: FakeBackend
) -> None:
    """Core ML opens functions by path, most of them long after LOAD hashed what lay there."""
    model = opened(own[0])
    model.admit_shape(32, progress=silent())
    change(own[1])
    assert refusal(lambda: model.admit_shape(64, progress=silent())).code is ErrorCode.ARTIFACT_INVALID
    assert fake.closed == ["s64"] and model.status().resident_shapes == (16, 32)


def test_files_that_change_during_load_reach_no_program(
    opened: LoadModel, own: tuple[Bundle, Path], fake: FakeBackend
) -> None:
    def changing(outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        overwritten(own[1])
        return outputs

    fake.bend = changing
    assert refusal(lambda: opened(own[0])).code is ErrorCode.ARTIFACT_INVALID
    assert fake.opened == fake.closed == ["s16"]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (functions({"name": "s48", "bucket": 48}), ErrorCode.ARTIFACT_INVALID),
        (functions({"name": "s16", "bucket": 16}, {"name": "s32", "bucket": 16}), ErrorCode.ARTIFACT_INVALID),
        (functions({"name": "s32"}), ErrorCode.ARTIFACT_INVALID),
        (functions({"name": "s32", "bucket": 16}), ErrorCode.ARTIFACT_INVALID),
        (lambda m: m["config"].update(hidden_size=32, num_attention_heads=2), ErrorCode.ARTIFACT_INVALID),
        (functions({"name": "p", "packed_width": 64}), ErrorCode.ARTIFACT_INVALID),
        (lambda m: m.pop("config"), ErrorCode.ARTIFACT_INVALID),
        (lambda m: m.update(family="llama"), ErrorCode.MODEL_UNSUPPORTED),
        (lambda m: m["artifacts"][0].update(format="gguf"), ErrorCode.ARTIFACT_INVALID),
    ],
    ids=["no such function", "twice", "no kind", "width", "hidden", "no bucket", "no config", "family", "format"],
)
def test_a_manifest_that_does_not_fit_the_package(
    change: Callable[[Any], Any], code: ErrorCode, bundles: Bundles, fake: FakeBackend, tmp_path: Path
) -> None:
    bundle = bundles("bert")
    document = json.loads((bundle.root / "manifest.json").read_bytes())
    change(document)
    (tmp_path / "manifest.json").write_text(json.dumps(document))
    changed = manifest.read(tmp_path)
    assert refusal(lambda: engine_on(changed, fake).load(load_request(bundle), progress=silent())).code is code
    assert fake.opened == []


def test_without_a_manifest_load_says_so_and_hello_has_no_digest(bundles: Bundles) -> None:
    lost = ReferenceEngine(WorkerOptions(device="ane"))
    assert lost.identity().manifest_digest is None
    assert refusal(lambda: lost.load(load_request(bundles("bert")), progress=silent())).code is ErrorCode.CONFIG_INVALID


def test_a_load_is_all_or_nothing(opened: LoadModel, bundles: Bundles, fake: FakeBackend) -> None:
    made = engine_on(bundles("bert"), fake)
    fake.bend = lambda outputs: {name: value * np.nan for name, value in outputs.items()}
    found = refusal(lambda: opened(engine=made))
    assert found.code is ErrorCode.NONFINITE_OUTPUT, "the smoke prediction looks at what comes out"
    assert fake.opened == fake.closed == ["s16"]
    fake.bend = lambda outputs: outputs
    opened(engine=made)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"E5RT encountered an STL exception: MILCompilerForANE error", ErrorCode.INVALID_PLACEMENT),
        (b"[ANE] ANECCompile() FAILED", ErrorCode.INVALID_PLACEMENT),
        (b"Program load failure (0x50004)", ErrorCode.ANE_RESOURCES_EXHAUSTED),
    ],
)
@pytest.mark.report("apple/coremltools#2758")
def test_a_failure_told_on_stderr_only_refuses_the_load(
    line: bytes, code: ErrorCode, opened: LoadModel, fake: FakeBackend, capfd: pytest.CaptureFixture[str]
) -> None:
    def shout(outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        os.write(2, b"harmless\n" + line + b"\n")
        return outputs

    fake.bend = shout
    assert refusal(opened).code is code
    assert line.decode() in capfd.readouterr().err, "the host's log keeps the line"
    assert fake.closed == ["s16"]
    if code is ErrorCode.INVALID_PLACEMENT:
        opened(placement="off")
    else:
        assert refusal(lambda: opened(placement="off")).code is code


def test_a_run_slower_than_twice_the_certified_time_is_a_failed_admission(opened: LoadModel, fake: FakeBackend) -> None:
    assert refusal(lambda: opened(certified_ms='{"s16": 0.000001}')).code is ErrorCode.INVALID_PLACEMENT
    assert fake.closed == ["s16"]
    opened(certified_ms='{"s16": 1e9}')


# --- admission -------------------------------------------------------------------------------------------------------


def test_admission_is_idempotent_and_eviction_of_a_known_shape_too(load: LoadModel) -> None:
    model = load("bert")
    first = model.admit_shape(32, progress=silent())
    assert model.admit_shape(32, progress=silent()) == first
    assert [one.layers for one in first.executables] == [[0, 1]] and first.cpu_stages == []
    model.evict_shape(64, progress=silent())
    model.evict_shape(32, progress=silent())
    model.evict_shape(32, progress=silent())
    assert model.status().resident_shapes == (16,)
    other = model.admit_packed(64, progress=silent())
    assert other.executables[0].id != model.admit_shape(64, progress=silent()).executables[0].id
    assert model.status().resident_packed == (64,)


def test_codes_of_shapes(load: LoadModel) -> None:
    model = load("bert")
    for call in (model.admit_shape, model.evict_shape):
        assert refusal(lambda call=call: call(48, progress=silent())).code is ErrorCode.INVALID_SHAPE
    for call in (model.admit_packed, model.evict_packed):
        assert refusal(lambda call=call: call(32, progress=silent())).code is ErrorCode.UNSUPPORTED_PACKED_WIDTH
    assert refusal(lambda: embed(model, 20)).code is ErrorCode.SHAPE_NOT_ADMITTED
    assert refusal(lambda: embed(model, 5, width=64)).code is ErrorCode.SHAPE_NOT_ADMITTED
    assert refusal(lambda: embed(model, 65)).code is ErrorCode.INVALID_REQUEST
    model.admit_packed(64, progress=silent())
    assert refusal(lambda: embed(model, 5, 65, width=64)).code is ErrorCode.PACKED_ROWS_TOO_WIDE


def test_a_failed_admission_takes_no_place(opened: LoadModel, fake: FakeBackend) -> None:
    model = opened()
    fake.fail = EngineError(ErrorCode.ANE_RESOURCES_EXHAUSTED, "no memory")
    for _ in range(5):
        assert refusal(lambda: model.admit_shape(32, progress=silent())).code is ErrorCode.ANE_RESOURCES_EXHAUSTED
    fake.fail = None
    model.admit_shape(32, progress=silent())


# --- placement -------------------------------------------------------------------------------------------------------


def test_the_share_is_the_minimum_of_the_resident_and_leaves_with_them(opened: LoadModel, fake: FakeBackend) -> None:
    fake.plan_of = lambda function: (
        None if function == "s64" else ane_plan(function, cpu={"s16": 1, "s32": 3}.get(function, 0))
    )
    model = opened()
    shares = [model.status().placement_share]
    for step, shape in (
        (model.admit_shape, 32), (model.admit_shape, 64), (model.evict_shape, 64), (model.evict_shape, 32),
        (model.evict_shape, 16),
    ):  # fmt: skip
        step(shape, progress=silent())
        shares.append(model.status().placement_share)
    assert shares == [0.9, 9 / 12, None, 9 / 12, 0.9, None], "one function without a share makes the model's absent"


def test_a_plan_is_computed_once_per_function_and_configuration(
    opened: LoadModel, bundles: Bundles, fake: FakeBackend
) -> None:
    fake.plan_of = ane_plan
    made = engine_on(bundles("bert"), fake)
    model = opened(engine=made)
    for _ in range(3):
        model.admit_shape(32, progress=silent())
        model.evict_shape(32, progress=silent())
        model.status()
    assert fake.plans == 2
    opened(engine=made)
    assert fake.plans == 2, "the same bundle, function, OS build, units and hints"
    opened(engine=made, compute_units="cpu_only")
    assert fake.plans == 3
    opened(engine=made, placement="off")
    assert fake.plans == 3


@pytest.mark.parametrize("told", [None, Function((), ())])
def test_a_failed_or_late_plan_is_asked_for_again(told: Function | None, opened: LoadModel, fake: FakeBackend) -> None:
    fake.plan_of = lambda function: told if function == "s32" else ane_plan(function)
    model = opened()
    model.admit_shape(32, progress=silent())
    assert model.status().placement_share is None
    model.evict_shape(32, progress=silent())
    fake.plan_of = ane_plan
    model.admit_shape(32, progress=silent())
    assert model.status().placement_share == 1.0 and fake.plans == 3


def test_real_work_on_the_cpu_refuses_the_admission_and_allowed_work_is_listed(
    opened: LoadModel, fake: FakeBackend
) -> None:
    bad = Operation("ios18.matmul", Device.CPU, outputs=("scores",))
    refused = Function((), (bad, Operation("ios18.conv", Device.ANE)))
    fake.plan_of = lambda function: ane_plan(function, cpu=2) if function == "s16" else refused
    model = opened()
    assert model.admit_shape(16, progress=silent()).cpu_stages == ["mask_position"]
    assert refusal(lambda: model.admit_shape(32, progress=silent())).code is ErrorCode.INVALID_PLACEMENT
    assert model.status().resident_shapes == (16,) and fake.closed == ["s32"]


# --- serving ---------------------------------------------------------------------------------------------------------


def test_rows_come_back_in_input_order_from_mixed_rungs(load: LoadModel) -> None:
    model = load("bert")
    for bucket in (32, 64):
        model.admit_shape(bucket, progress=silent())
    lengths = [40, 3, 64, 16, 17, 1]
    together = embed(model, *lengths)
    for row, length in enumerate(lengths):
        assert np.array_equal(together[row], embed(model, length)[0])
    assert together.flags.c_contiguous and together.dtype == np.float32
    assert np.allclose(np.linalg.norm(together, axis=1), 1)
    assert abs(np.linalg.norm(embed(model, 3, normalize=False)) - 1) > 1e-3


def test_progress_counts_finished_rows_and_passes(load: LoadModel) -> None:
    model = load("bert")
    model.admit_packed(64, progress=silent())
    progress, sent = counting()
    embed(model, 3, 5, 7, progress=progress)
    assert sent == [1, 2, 3]
    progress, sent = counting()
    embed(model, 30, 30, 30, 30, width=64, progress=progress)
    assert sent == [1, 2], "four rows in two passes"


def test_one_missing_rung_refuses_before_any_row_runs(load: LoadModel) -> None:
    progress, sent = counting()
    model = load("bert")
    assert refusal(lambda: embed(model, 3, 60, progress=progress)).code is ErrorCode.SHAPE_NOT_ADMITTED
    assert sent == []


@pytest.mark.parametrize(
    ("bend", "code"),
    [
        (lambda v: np.where(np.arange(v.size).reshape(v.shape) == 0, np.nan, v), ErrorCode.NONFINITE_OUTPUT),
        (lambda v: v * np.float32(np.inf), ErrorCode.NONFINITE_OUTPUT),
        (lambda v: v * 0, ErrorCode.NONFINITE_OUTPUT),
        (lambda v: v[:, :8], ErrorCode.INFERENCE_FAILED),
        (lambda v: np.concatenate([v, v]), ErrorCode.INFERENCE_FAILED),
    ],
    ids=["nan", "inf", "zeros", "short", "batch of two"],
)
def test_every_output_is_checked(bend: Any, code: ErrorCode, opened: LoadModel, fake: FakeBackend) -> None:
    model = opened()
    fake.bend = lambda outputs: {name: bend(value).astype(np.float32) for name, value in outputs.items()}
    assert refusal(lambda: embed(model, 3)).code is code
    fake.bend = lambda outputs: outputs
    assert np.isfinite(embed(model, 3)).all()
