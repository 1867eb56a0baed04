"""The hardware run of the Core ML engine: `make hw-ane` on a Mac. Nothing here has run anywhere until evidence/ says
so.

Each default encoder is certified by the code of `synapse certify`: numbers, placement, packing, speed-up and costs are
measured and judged there and nowhere else. The other tests look at what a certification doesn't: every function against
the evaluator through the production binding, residency limits, GIL release of every call, leaks over 10,000
predictions, coremltools' second opinion. Where placement keeps a lane from loading they still say how far it came;
figures of theirs that a gate judges are judged by that gate.

evidence/ane-<chip>-<os>/ holds the documents of the certifications and hardware.json: figures and how each test ended,
also of a run that failed. Without the models nothing is measured and the run fails.
"""

from __future__ import annotations

import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import psutil
import pytest

from engines.ane import REVISION, inputs, placement
from engines.ane.artifact import sources
from engines.ane.backend import HINTS, Source
from engines.ane.coreml import CoreML
from engines.ane.engine import AneEngine
from engines.ane.inputs import InputRules
from engines.ane.model import AneModel
from engines.ane.plan import counted
from engines.ane.prepare import prepare
from engines.bundle import preparation
from engines.bundle.manifest import Artifact, Bundle, Function
from engines.protocol.errors import EngineError
from engines.protocol.messages import Load, Pooling
from engines.runtime.batch import TokenBatch
from engines.runtime.engine import WorkerOptions
from engines.runtime.progress import silent
from synapse_host import evidence as documents
from synapse_host import gates, rungs
from synapse_host.evidence import Evidence, Packing
from synapse_host.matrix import load as load_matrix
from synapse_host.qualification import mixes
from synapse_host.recheck import CPU_ALLOWED
from tests.hardware import lanes
from tests.hardware.record import Record
from tests.support.coreml_plan import from_coremltools
from tests.support.evidence import evidence, function

pytestmark = [pytest.mark.ane, pytest.mark.timeout(3600)]

Prepared: TypeAlias = tuple[Path, Any]
SOFTWARE = ("coremltools", "pyobjc-core", "pyobjc-framework-CoreML", "numpy", "synapse-workers")
PREDICTIONS, READMISSIONS = 10_000, 20
GIL_GAP_S, LEAK_MIB = 0.25, 64.0
THEIR_SHARE, THEIR_COSINE = 0.02, 0.9999
"""How far coremltools' plan and predictions may be from ours."""
LIMITS = gates.thresholds(load_matrix(), engine="ane", task="embed", precision="exact", placement=True)


def judged(**measured: Any) -> Evidence:
    """Return a document of a Neural Engine lane, clean but for what was *measured*, as certification judges it."""
    return evidence("embed", ane=True, thresholds=LIMITS, **measured)


def failed(document: Evidence, *names: str) -> dict[str, float | None]:
    """Return the gates of these names that failed, with their values."""
    return {gate.name: gate.value for gate in document.gates if gate.name in names and not gate.passed}


# --- what is measured ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def record(request: pytest.FixtureRequest) -> Iterator[Record]:
    found = Record("ane", SOFTWARE, graph_revision=REVISION, configuration={"units": "cpu_and_ne", "hints": HINTS})
    found.expect(request)
    yield found
    print(f"\nevidence: {found.write()}")


@pytest.fixture(autouse=True)
def outcome(record: Record, request: pytest.FixtureRequest) -> Iterator[None]:
    """Write down how each test ended: figures alone don't say that a check failed."""
    yield
    record.ended(request)


def artifact_of(bundle: Bundle) -> Artifact:
    return bundle.artifacts("coreml")[0]


def package_of(bundle: Bundle) -> Path:
    return bundle.path(artifact_of(bundle).path)


def functions_of(bundle: Bundle) -> dict[str, Function]:
    """Return the artifact's functions by name, buckets first, each kind by its tokens."""
    functions = artifact_of(bundle).functions
    assert isinstance(functions, list)
    ordered = sorted(functions, key=lambda one: (one.bucket is msgspec.UNSET, tokens_of(one)))
    return {one.name: one for one in ordered}


def tokens_of(one: Function) -> int:
    return one.bucket if one.bucket is not msgspec.UNSET else one.packed_width  # type: ignore[return-value]


def width_of(one: Function) -> int | None:
    return None if one.packed_width is msgspec.UNSET else one.packed_width


def rules_of(bundle: Bundle) -> InputRules:
    return InputRules(vocab=bundle.manifest.config["vocab_size"])  # type: ignore[index]


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    """The installed MiniLM with its Core ML package."""
    return lanes.installed("embed", format="coreml")


@pytest.fixture(scope="module")
def prepared(bundle: Bundle, record: Record) -> Prepared:
    """Compile to the stable path and pay the cold first loads; times go into the record."""
    started = time.monotonic()
    result = prepare(bundle.root)
    record.note(
        "prepare", prepare_s=round(time.monotonic() - started, 2), cold_ms=result["prepared"][0]["first_load_ms"]
    )
    return preparation.find(preparation.default_cache(), artifact_of(bundle).digest)


def load(bundle: Bundle, prepared: Prepared, **config: str) -> AneModel:
    widths = rungs.packed_widths(artifact_of(bundle))
    engine = AneEngine(WorkerOptions(device="ane", manifest=bundle.path("manifest.json"), packed=widths))
    request = Load(
        req_id="hw",
        artifact_path=str(prepared[0]),
        artifact_digest=prepared[1].compiled_digest,
        format="mlmodelc",
        runtime_config=config,
    )
    model = engine.load(request, progress=silent())
    assert isinstance(model, AneModel)
    return model


@pytest.fixture(scope="module")
def model(bundle: Bundle, prepared: Prepared, record: Record) -> Iterator[AneModel]:
    """The loaded model, its smallest bucket resident. Its placement is judged by a test of its own."""
    started = time.monotonic()
    found = load(bundle, prepared, placement="off")
    record.note("load", warm_load_ms=round((time.monotonic() - started) * 1000, 1))
    yield found
    found.close()


class Resident:
    """Admit one function for a block; the smallest bucket always stays."""

    def __init__(self, model: AneModel, one: Function, smallest: int) -> None:
        self._model, self._width, self._tokens, self._smallest = model, width_of(one), tokens_of(one), smallest

    def __enter__(self) -> None:
        if self._width is not None:
            self._model.admit_packed(self._width, progress=silent())
        else:
            self._model.admit_shape(self._tokens, progress=silent())

    def __exit__(self, *exc: object) -> None:
        if self._width is not None:
            self._model.evict_packed(self._width, progress=silent())
        elif self._tokens != self._smallest:
            self._model.evict_shape(self._tokens, progress=silent())


def rows(lengths: list[int], seed: int = 1) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1000, 30000, n).astype(np.int32) for n in lengths]


def batch(found: list[np.ndarray]) -> TokenBatch:
    return TokenBatch(np.concatenate(found), np.cumsum([0, *map(len, found)]).astype(np.int32))


def embed(model: AneModel, found: list[np.ndarray], width: int | None = None) -> np.ndarray:
    return model.embed(batch(found), pooling=Pooling.MEAN, normalize=True, packed_width=width, progress=silent())


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a.astype(np.float64) * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


# --- function by function --------------------------------------------------------------------------------------------


def test_parity_with_the_reference_of_every_function(model: AneModel, bundle: Bundle, record: Record) -> None:
    """Against the evaluator, which the ordinary tests hold to transformers; the fixtures do it in certification."""
    from tests.support.mil_reference import ReferenceBackend

    reference, ladder = ReferenceBackend(), rungs.buckets(artifact_of(bundle))
    found, worst = {}, 1.0

    def expected(rows: list[np.ndarray], bucket: int) -> np.ndarray:
        name = next(name for name, one in functions_of(bundle).items() if one.bucket == bucket)
        program = reference.open(Source(package_of(bundle), name, True), units="cpu_and_ne")
        means = []
        for row in rows:
            states = program.run(inputs.single(row, bucket, rules_of(bundle)))["last_hidden_state"][0, : len(row)]
            means.append(states.astype(np.float64).mean(0))
        program.close()
        return np.stack([mean / np.linalg.norm(mean) for mean in means])

    for name, one in functions_of(bundle).items():
        tokens, width = tokens_of(one), width_of(one)
        below = max((n for n in ladder if n < tokens), default=0) if width is None else 0
        # A packed row is what it is on its own bucket.
        bucket = next(n for n in ladder if n >= min(tokens, ladder[-1]))
        lengths = [n for n in (1, 2, tokens // 2, tokens - 1, tokens) if below < n <= ladder[-1]]
        tried = rows(lengths, seed=tokens)
        with Resident(model, one, ladder[0]):
            got = embed(model, tried, width)
        cosine = cosines(got, expected(tried, bucket))
        assert np.isfinite(got).all(), name
        found[name] = {"lengths": lengths, "cosine": [round(float(value), 9) for value in cosine]}
        worst = min(worst, float(cosine.min()))
    record.note("parity", functions=found, min_cosine=worst)
    assert worst >= LIMITS["min_cosine"]


def test_placement_of_every_function(prepared: Prepared, bundle: Bundle, record: Record) -> None:
    backend, table, shares, recorded = CoreML(), [], [], {}
    for name, (source, _) in sources(prepared[0], list(functions_of(bundle)), backend, prepared[1]).items():
        one = functions_of(bundle)[name]
        handle = backend.open(source, units="cpu_and_ne")
        plan = handle.plan()
        handle.close()
        wanted = source.function if source.multi else None
        kind = "bucket" if width_of(one) is None else "packed"
        told = {"name": name, "kind": kind, "tokens": tokens_of(one), **counted(plan, wanted)}
        table.append(msgspec.convert(told, documents.Function))
        shares.append(placement.share(plan, wanted))
        recorded[name] = msgspec.to_builtins(plan)
    record.note("placement", functions=msgspec.to_builtins(table), shares=shares, recorded_plans=recorded)
    known = [share for share in shares if share is not None]
    share = min(known) if known and len(known) == len(shares) else None
    names = ("placement_share", "functions_unreported", "function_share", "cost_share", "cpu_operations")
    clean = judged().placement
    assert clean is not None
    # Packed functions are judged like buckets here: a certification would only leave them out.
    functions = [msgspec.structs.replace(one, kind="bucket") for one in table]
    where = msgspec.structs.replace(clean, share=share, functions=functions, cpu_allowed=sorted(CPU_ALLOWED))
    assert failed(judged(placement=where), *names) == {}


def test_coremltools_second_opinion(prepared: Prepared, bundle: Bundle, record: Record) -> None:
    """The other binding: its plan of the default function, and its predictions of every bucket, on the CPU alone."""
    import coremltools as ct

    path = str(next(prepared[0].glob("*.mlmodelc")))
    plan = ct.models.compute_plan.MLComputePlan.load_from_path(path=path, compute_units=ct.ComputeUnit.CPU_AND_NE)
    buckets = [name for name, one in functions_of(bundle).items() if width_of(one) is None]
    backend, worst = CoreML(), 1.0
    for number, (name, (source, _)) in enumerate(sources(prepared[0], buckets, backend, prepared[1]).items()):
        tokens = tokens_of(functions_of(bundle)[name])
        feeds = inputs.single(rows([tokens - 3], seed=9)[0], tokens, rules_of(bundle))
        if number == 0:
            handle = backend.open(source, units="cpu_and_ne")
            ours = placement.share(handle.plan(), source.function if source.multi else None)
            handle.close()
            theirs = placement.share(from_coremltools(plan), name)
        handle = backend.open(source, units="cpu_only")
        mine = handle.run(feeds)["last_hidden_state"]
        handle.close()
        other = ct.models.CompiledMLModel(
            path=str(source.path),
            compute_units=ct.ComputeUnit.CPU_ONLY,
            function_name=source.function if source.multi else None,
        )
        # Copies of our own that outlive the call: coremltools may touch them later (apple/coremltools#2827).
        kept = {key: np.array(value) for key, value in feeds.items()}
        output = np.asarray(other.predict(kept)["last_hidden_state"], np.float32)
        worst = min(worst, float(cosines(mine[0], output[0]).min()))
        time.sleep(2)
        del kept
    record.note("coremltools", share=theirs, ours=ours, min_cosine=worst)
    assert ours is not None and theirs is not None and abs(theirs - ours) <= THEIR_SHARE
    assert worst >= THEIR_COSINE


def test_packing_qualifies(model: AneModel, bundle: Bundle, record: Record) -> None:
    """What certification tries through the host, through the binding: also where the lane itself can't be loaded."""
    smallest = rungs.buckets(artifact_of(bundle))[0]
    tried = []
    for one in functions_of(bundle).values():
        width = width_of(one)
        if width is None:
            continue
        plan = [[min(n, smallest) for n in lengths] for lengths in mixes(width)]
        cosine: list[float | None] = []
        alone: list[float | None] = []
        moved: list[float | None] = []
        with Resident(model, one, smallest):
            for seed, lengths in enumerate(plan):
                found = rows(lengths, seed=seed)
                together = embed(model, found, width)
                apart = np.concatenate([embed(model, [row], width) for row in found])
                turned = embed(model, found[::-1], width)[::-1]
                cosine += cosines(together, embed(model, found)).tolist()
                alone += np.abs(together - apart).max(1).tolist()
                moved += np.abs(together - turned).max(1).tolist()
        tried.append(Packing(width=width, mixes=plan, cosine=cosine, alone=alone, moved=moved))
    record.note("packing", trials=msgspec.to_builtins(tried))
    # Where they are placed is another test's question.
    placed = [function("p", kind="packed", tokens=one.width) for one in tried]
    clean = judged().placement
    assert clean is not None
    where = msgspec.structs.replace(clean, functions=[*clean.functions, *placed])
    assert gates.qualified_widths(judged(packing=tried, placement=where)) == sorted(one.width for one in tried)


def timed(model: AneModel, found: list[np.ndarray], repeats: int = 20, width: int | None = None) -> float:
    for _ in range(3):
        embed(model, found, width)
    samples = []
    for _ in range(repeats):
        started = time.perf_counter()
        embed(model, found, width)
        samples.append((time.perf_counter() - started) * 1000)
    return statistics.median(samples)


def test_speed_up_over_the_cpu_alone(model: AneModel, bundle: Bundle, prepared: Prepared, record: Record) -> None:
    """The only behavioural proof that the Neural Engine really ran, function by function."""
    alone = load(bundle, prepared, compute_units="cpu_only", placement="off")
    smallest, figures = rungs.buckets(artifact_of(bundle))[0], {}
    try:
        for name, one in functions_of(bundle).items():
            tokens, width = tokens_of(one), width_of(one)
            found = rows([max(1, tokens // 4)] * 4) if width else rows([tokens])
            times = {}
            for key, which in (("native", model), ("forced", alone)):
                with Resident(which, one, smallest):
                    times[key] = round(timed(which, found, width=width), 4)
            figures[name] = times | {"tokens_per_s": round(1000 * sum(map(len, found)) / times["native"])}
    finally:
        alone.close()
    record.note("speed", functions=figures)
    clean = judged().placement
    assert clean is not None
    for name, one in functions_of(bundle).items():
        if width_of(one) is None:
            times = figures[name]
            where = msgspec.structs.replace(clean, native_ms=[times["native"]], forced_ms=[times["forced"]])
            assert failed(judged(placement=where), "speedup") == {}, name


# --- what a certification doesn't look at ----------------------------------------------------------------------------


def test_every_call_releases_the_gil(bundle: Bundle, prepared: Prepared, record: Record) -> None:
    """Another thread ticks every 5 ms all the while; the longest silence is what a call took the GIL for."""
    from engines.ane.binding import compile_package

    gaps: dict[str, float] = {}
    took: dict[str, float] = {}

    def watch(name: str, work: Callable[[], Any]) -> Any:
        stop, worst = threading.Event(), [0.0]

        def tick() -> None:
            last = time.perf_counter()
            while not stop.is_set():
                time.sleep(0.005)
                now = time.perf_counter()
                worst[0] = max(worst[0], now - last)
                last = now

        thread = threading.Thread(target=tick)
        thread.start()
        started = time.perf_counter()
        try:
            return work()
        finally:
            took[name] = time.perf_counter() - started
            stop.set()
            thread.join()
            gaps[name] = worst[0]

    tokens = max(rungs.buckets(artifact_of(bundle)))
    name = next(name for name, function in functions_of(bundle).items() if function.bucket == tokens)
    compiled = watch("compile", lambda: compile_package(package_of(bundle)))
    shutil.rmtree(compiled, ignore_errors=True)
    backend = CoreML()
    source, _ = sources(prepared[0], [name], backend, prepared[1])[name]
    handle = watch("load", lambda: backend.open(source, units="cpu_and_ne"))
    watch("signature", handle.signature)
    watch("plan", handle.plan)
    feeds = inputs.single(rows([tokens])[0], tokens, rules_of(bundle))
    watch("predict", lambda: [handle.run(feeds) for _ in range(200)])
    watch("close", handle.close)
    record.note("gil", longest_gap_s=gaps, call_s=took)
    assert max(gaps.values()) <= GIL_GAP_S, gaps


def test_residency_limits(model: AneModel, bundle: Bundle, record: Record) -> None:
    ladder, widths = rungs.buckets(artifact_of(bundle)), rungs.packed_widths(artifact_of(bundle))
    for bucket in ladder[1:]:
        model.admit_shape(bucket, progress=silent())
    model.admit_packed(widths[0], progress=silent())
    with pytest.raises(EngineError) as refused:
        model.admit_packed(widths[1], progress=silent())
    cycle = []
    for _ in range(READMISSIONS):
        model.evict_shape(ladder[-1], progress=silent())
        started = time.perf_counter()
        model.admit_shape(ladder[-1], progress=silent())
        cycle.append((time.perf_counter() - started) * 1000)
    for bucket in ladder[1:]:
        model.evict_shape(bucket, progress=silent())
    model.evict_packed(widths[0], progress=silent())
    code, share = refused.value.code.value, model.status().placement_share
    times = {"median": statistics.median(cycle), "max": max(cycle)}
    record.note("residency", refused=code, readmissions=len(cycle), readmit_ms=times, share_after_evictions=share)
    assert code == "ane_residency_limit"
    assert share is None or share >= LIMITS["placement_share"]


def test_nothing_leaks_over_10_000_predictions(model: AneModel, bundle: Bundle, record: Record) -> None:
    process, row = psutil.Process(), rows([rungs.buckets(artifact_of(bundle))[0] // 2])
    for _ in range(500):
        embed(model, row)
    before, first = process.memory_info().rss, embed(model, row)
    for _ in range(PREDICTIONS):
        embed(model, row)
    grown = (process.memory_info().rss - before) / 2**20
    record.note("leak", predictions=PREDICTIONS, grown_mib=round(grown, 2))
    assert np.array_equal(first, embed(model, row)), "the same input gives the same bytes"
    assert grown <= LEAK_MIB


# --- the whole way ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", ["embed", "rerank"])
def test_certification(lane: str, record: Record, request: pytest.FixtureRequest) -> None:
    """Host, worker process, fixtures, placement, packed widths, costs: all that `synapse certify` does."""
    found = lanes.installed(lane, format="coreml")
    prepare(found.root)
    if lane == "embed":
        request.getfixturevalue("model").close()  # the worker process gets the engine for itself
    summary = lanes.certified(lane, "ane", bundle=found.root)
    record.note(f"certification of {lane}", **summary)
    lanes.assert_certified(summary)
