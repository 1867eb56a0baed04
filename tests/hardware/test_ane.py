"""The hardware run of the Core ML engine: `make hw-ane` on a Mac. Nothing here has run anywhere until evidence/ says
so.

The default embedder and reranker are certified by the code of `synapse certify`: their verdict is made there and
nowhere else. The other tests look through the production binding at what a certification doesn't: every function
against the evaluator, residency limits, the GIL in every call, leaks over 10,000 predictions, coremltools' second
opinion. The model that most tests share is loaded without judging its placement: where one operation falls to the CPU,
everything else is measured all the same, and the placement tests say which. Figures that a gate of certification
judges are judged by that gate.

evidence/ane-<chip>-<os>/ holds the documents of the certifications and hardware.json: figures and how each test ended,
also of a run that failed; it is written after every test, so that a crash keeps what came before. Without the models
nothing is measured and the run fails.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engines.ane import REVISION, inputs
from engines.ane import compute_plan as placement
from engines.ane.artifact import sources
from engines.ane.backend import HINTS, Source
from engines.ane.build.plan import counted
from engines.ane.build.prepare import prepare
from engines.ane.coreml import CoreML
from engines.ane.engine import AneEngine
from engines.ane.inputs import InputRules
from engines.ane.model import AneModel
from engines.bundle import preparation
from engines.bundle.manifest import Artifact, Bundle, Function
from engines.protocol.errors import EngineError
from engines.protocol.messages import Load, Pooling
from engines.runtime.engine import WorkerOptions
from engines.runtime.progress import silent
from synapse_host.certificates import document as documents
from synapse_host.certificates import metrics, verdict
from synapse_host.certificates.document import Evidence, Packing
from synapse_host.certification.packing import mixes
from synapse_host.placement.matrix import load as load_matrix
from synapse_host.residency import plan as rungs
from tests.hardware import lanes
from tests.hardware.coreml_calls import batch, cosines, gil, grown_mib, rows
from tests.hardware.record import Record
from tests.support.coreml_plan import from_coremltools
from tests.support.evidence import evidence, function

pytestmark = [pytest.mark.ane, pytest.mark.timeout(3600)]

SOFTWARE = ("coremltools", "pyobjc-core", "pyobjc-framework-CoreML", "numpy", "synapse-workers")
PREDICTIONS, READMISSIONS = 10_000, 20
GIL_GAP_S, LEAK_MIB = 0.25, 64.0
THEIR_SHARE, THEIR_COSINE = 0.02, 0.9999
"""How far coremltools' plan and predictions may be from ours."""
LIMITS = {
    task: verdict.thresholds(load_matrix(), engine="ane", task=task, precision="exact", placement=True)
    for task in ("embed", "rerank")
}
PLACEMENT = ("placement_share", "functions_unreported", "function_share", "cost_share", "cpu_operations")


def judged(**measured: Any) -> Evidence:
    """Return a document of a Neural Engine lane, clean but for what was *measured*, as certification judges it."""
    return evidence("embed", ane=True, thresholds=LIMITS["embed"], **measured)


def clean() -> documents.Placement:
    """Return the placement of such a document, for what isn't in question."""
    found = judged().placement
    assert found is not None
    return found


def failed(document: Evidence, *names: str) -> dict[str, float | None]:
    """Return the gates of these names that failed, with their values."""
    return {gate.name: gate.value for gate in document.gates if gate.name in names and not gate.passed}


# --- what is measured ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """One task's model: its bundle and where it was prepared."""

    task: str
    bundle: Bundle
    folder: Path
    record: preparation.Preparation

    @property
    def artifact(self) -> Artifact:
        return self.bundle.artifacts("coreml")[0]

    @property
    def package(self) -> Path:
        return self.bundle.path(self.artifact.path)

    @property
    def ladder(self) -> tuple[int, ...]:
        return rungs.buckets(self.artifact)

    @property
    def names(self) -> dict[str, int]:
        """The functions and their tokens, buckets first: packed ones exist for embedders only."""
        functions = self.artifact.functions
        assert isinstance(functions, list)
        ordered = sorted(functions, key=lambda one: (one.bucket is msgspec.UNSET, tokens_of(one)))
        return {one.name: tokens_of(one) for one in ordered}

    def width(self, name: str) -> int | None:
        """Return a packed function's width, None for a bucket."""
        functions = self.artifact.functions
        assert isinstance(functions, list)
        found = next(one for one in functions if one.name == name)
        return None if found.packed_width is msgspec.UNSET else found.packed_width

    def bucket(self, tokens: int) -> str:
        """Return the name of the bucket of this size."""
        return next(name for name, size in self.names.items() if size == tokens and self.width(name) is None)

    @property
    def rules(self) -> InputRules:
        """What rows must look like, from the manifest; a reranker's separator starts the second text."""
        described, pairs = self.bundle.manifest, self.task == "rerank"
        assert isinstance(described.config, dict)
        special = described.special_ids
        sep = special["sep"] if pairs and isinstance(special, dict) else None
        return InputRules(vocab=described.config["vocab_size"], token_types=pairs, sep_id=sep)

    def functions(self) -> dict[str, Any]:
        """Return where each compiled function lies, and its signature."""
        return sources(self.folder, self.names, self.record)

    def rows(self, lengths: list[int], seed: int = 1) -> list[np.ndarray]:
        """Return random rows; a reranker's hold a separator."""
        rules = self.rules
        found = rows(lengths, rules.vocab, seed)
        for row in found if rules.sep_id is not None else []:
            row[len(row) // 2] = rules.sep_id
        return found

    def fitting(self, name: str) -> list[int]:
        """Return row lengths that run on this function: a bucket takes only what no smaller one does."""
        tokens, packed = self.names[name], self.width(name) is not None
        below = 0 if packed else max((n for n in self.ladder if n < tokens), default=0)
        return [n for n in (1, 2, tokens // 2, tokens - 1, tokens) if below < n <= self.ladder[-1]]


def tokens_of(one: Function) -> int:
    return one.bucket if one.bucket is not msgspec.UNSET else one.packed_width  # type: ignore[return-value]


@pytest.fixture(scope="module")
def record(request: pytest.FixtureRequest) -> Iterator[Record]:
    found = Record("ane", SOFTWARE, graph_revision=REVISION, configuration={"units": "cpu_and_ne", "hints": HINTS})
    found.expect(request)
    yield found
    print(f"\nevidence: {found.write()}")


@pytest.fixture(autouse=True)
def outcome(record: Record, request: pytest.FixtureRequest) -> Iterator[None]:
    """Write down how each test ended: figures alone don't say that a check failed, and the next one may crash."""
    yield
    record.ended(request)
    record.write()


def prepared(task: str, bundle: Bundle, record: Record) -> Subject:
    """Compile to the stable path and pay the cold first loads; times and digests go into the record."""
    (artifact,) = bundle.artifacts("coreml")
    started = time.monotonic()
    result = prepare(bundle.root)
    record.note(
        f"prepare {task}",
        prepare_s=round(time.monotonic() - started, 2),
        cold_ms=result["prepared"][0]["first_load_ms"],
        manifest_digest=bundle.digest,
        artifact={"digest": artifact.digest, "tree": artifact.tree, "bytes": artifact.bytes},
        kernel_revision=engine(bundle).identity().kernel_revision,
    )
    return Subject(task, bundle, *preparation.find(preparation.default_cache(), artifact.digest))


@pytest.fixture(scope="module")
def embedder(record: Record) -> Subject:
    """The installed MiniLM with its Core ML package."""
    return prepared("embed", lanes.installed("embed", format="coreml"), record)


@pytest.fixture(scope="module")
def reranker(record: Record) -> Subject:
    """The installed MS MARCO cross-encoder with its Core ML package."""
    return prepared("rerank", lanes.installed("rerank", format="coreml"), record)


def engine(bundle: Bundle) -> AneEngine:
    widths = rungs.packed_widths(bundle.artifacts("coreml")[0])
    return AneEngine(WorkerOptions(device="ane", manifest=bundle.path("manifest.json"), packed=widths))


def load(subject: Subject, **config: str) -> AneModel:
    request = Load(
        req_id="hw",
        artifact_path=str(subject.folder),
        artifact_digest=subject.record.compiled_digest,
        format="mlmodelc",
        runtime_config=config,
    )
    found = engine(subject.bundle).load(request, progress=silent())
    assert isinstance(found, AneModel)
    return found


def loaded(subject: Subject, record: Record) -> Iterator[AneModel]:
    """The model that a task's tests share, its smallest bucket resident; placement is judged in tests of its own."""
    started = time.monotonic()
    found = load(subject, placement="off")
    record.note(f"load {subject.task}", warm_load_ms=round((time.monotonic() - started) * 1000, 1))
    yield found
    found.close()


@pytest.fixture(scope="module")
def model(embedder: Subject, record: Record) -> Iterator[AneModel]:
    yield from loaded(embedder, record)


@pytest.fixture(scope="module")
def rerank_model(reranker: Subject, record: Record) -> Iterator[AneModel]:
    yield from loaded(reranker, record)


class Resident:
    """Admit one function for a block; the smallest bucket always stays. ``admit_ms``: what that took."""

    def __init__(self, model: AneModel, subject: Subject, name: str) -> None:
        self._model, self._subject, self._name = model, subject, name
        self.admit_ms = 0.0

    def __enter__(self) -> Resident:
        width, started = self._subject.width(self._name), time.perf_counter()
        if width is not None:
            self._model.admit_packed(width, progress=silent())
        else:
            self._model.admit_shape(self._subject.names[self._name], progress=silent())
        self.admit_ms = round((time.perf_counter() - started) * 1000, 1)
        return self

    def __exit__(self, *exc: object) -> None:
        width, tokens = self._subject.width(self._name), self._subject.names[self._name]
        if width is not None:
            self._model.evict_packed(width, progress=silent())
        elif tokens != self._subject.ladder[0]:
            self._model.evict_shape(tokens, progress=silent())


def embed(model: AneModel, found: list[np.ndarray], width: int | None = None) -> np.ndarray:
    return model.embed(batch(found), pooling=Pooling.MEAN, normalize=True, packed_width=width, progress=silent())


def score(model: AneModel, found: list[np.ndarray]) -> np.ndarray:
    return model.rerank_sequences(batch(found), progress=silent())


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_parity_with_the_reference_of_every_function(model: AneModel, embedder: Subject, record: Record) -> None:
    """Against the evaluator, which the ordinary tests hold to transformers; the fixtures do it in certification."""
    from tests.support.mil_reference import ReferenceBackend

    def expected(found: list[np.ndarray], bucket: int) -> np.ndarray:
        program = ReferenceBackend().open(Source(embedder.package, embedder.bucket(bucket), True), units="cpu_and_ne")
        means = []
        for row in found:
            states = program.run(inputs.single(row, bucket, embedder.rules))["last_hidden_state"][0, : len(row)]
            means.append(states.astype(np.float64).mean(0))
        program.close()
        return np.stack([mean / np.linalg.norm(mean) for mean in means])

    figures, worst = {}, 1.0
    for name, tokens in embedder.names.items():
        lengths = embedder.fitting(name)
        found = embedder.rows(lengths, seed=tokens)
        with Resident(model, embedder, name) as resident:
            got = embed(model, found, embedder.width(name))
        # A packed row is what it is on its own bucket.
        bucket = next(n for n in embedder.ladder if n >= min(tokens, embedder.ladder[-1]))
        cosine = cosines(got, expected(found, bucket))
        figures[name] = {
            "lengths": lengths,
            "cosine": [round(float(value), 9) for value in cosine],
            "admit_ms": resident.admit_ms,
        }
        record.note("parity", functions=figures)
        assert np.isfinite(got).all(), name
        worst = min(worst, float(cosine.min()))
    record.note("parity", min_cosine=worst)
    assert worst >= LIMITS["embed"]["min_cosine"]


def test_a_reranker_s_logits_are_the_reference_s(rerank_model: AneModel, reranker: Subject, record: Record) -> None:
    from tests.support.mil_reference import ReferenceBackend

    got: list[float] = []
    wanted: list[float] = []
    figures = {}
    for name, tokens in reranker.names.items():
        found = reranker.rows(reranker.fitting(name) * 2, seed=tokens)
        program = ReferenceBackend().open(Source(reranker.package, name, True), units="cpu_and_ne")
        expected = [float(program.run(inputs.single(row, tokens, reranker.rules))["score"][0]) for row in found]
        program.close()
        with Resident(rerank_model, reranker, name) as resident:
            scores = score(rerank_model, found).tolist()
        figures[name] = {
            "lengths": [len(row) for row in found],
            "scores": scores,
            "reference": expected,
            "admit_ms": resident.admit_ms,
        }
        got += scores
        wanted += expected
    worst, pearson = metrics.max_error(wanted, got), metrics.pearson(wanted, got)
    record.note("logits", functions=figures, max_error=worst, pearson=pearson)
    assert worst is not None and worst <= LIMITS["rerank"]["max_error"] and pearson >= LIMITS["rerank"]["pearson"]


def test_packing_qualifies(model: AneModel, embedder: Subject, record: Record) -> None:
    """What certification tries through the host, through the binding: also where the lane itself can't be loaded."""
    tried = []
    for name in embedder.names:
        width = embedder.width(name)
        if width is None:
            continue
        plan = [[min(n, embedder.ladder[0]) for n in lengths] for lengths in mixes(width)]
        cosine: list[float | None] = []
        alone: list[float | None] = []
        moved: list[float | None] = []
        with Resident(model, embedder, name):
            for seed, lengths in enumerate(plan):
                found = embedder.rows(lengths, seed=seed)
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
    where = msgspec.structs.replace(clean(), functions=[*clean().functions, *placed])
    assert verdict.qualified_widths(judged(packing=tried, placement=where)) == sorted(one.width for one in tried)


# --- speed -----------------------------------------------------------------------------------------------------------


def timed(work: Callable[[], Any], repeats: int = 20) -> float:
    """Return the median milliseconds of a call, after three warm ones."""
    for _ in range(3):
        work()
    samples = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        samples.append((time.perf_counter() - started) * 1000)
    return statistics.median(samples)


def speeds(model: AneModel, subject: Subject, record: Record) -> None:
    """Record each function's time here and on the CPU alone, and its tokens per second; every token is a real one."""
    alone = load(subject, compute_units="cpu_only", placement="off")
    figures: dict[str, dict[str, float]] = {}

    def call(one: AneModel, name: str) -> Callable[[], Any]:
        tokens, width = subject.names[name], subject.width(name)
        found = subject.rows([tokens] if width is None else [tokens // 4] * 4)
        return lambda: score(one, found) if subject.task == "rerank" else embed(one, found, width)

    try:
        for name, tokens in subject.names.items():
            times = {}
            for key, one in (("native_ms", model), ("forced_ms", alone)):
                with Resident(one, subject, name):
                    times[key] = round(timed(call(one, name)), 4)
            figures[name] = times | {"tokens_per_s": round(tokens / times["native_ms"] * 1000, 1)}
    finally:
        alone.close()
    record.note(f"speed {subject.task}", functions=figures)
    for name, times in figures.items():
        if subject.width(name) is None:
            measured = {key: [times[key]] for key in ("native_ms", "forced_ms")}
            where = msgspec.structs.replace(clean(), **measured)
            assert failed(judged(placement=where), "speedup") == {}, name


def test_speed_up_over_the_cpu_alone(model: AneModel, embedder: Subject, record: Record) -> None:
    """The only behavioural proof that the Neural Engine really ran, function by function."""
    speeds(model, embedder, record)


def test_a_reranker_is_faster_than_the_cpu_alone(rerank_model: AneModel, reranker: Subject, record: Record) -> None:
    speeds(rerank_model, reranker, record)


# --- the process -----------------------------------------------------------------------------------------------------


def test_residency_limits(model: AneModel, embedder: Subject, record: Record) -> None:
    ladder, widths = embedder.ladder, rungs.packed_widths(embedder.artifact)
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
    code, times = refused.value.code.value, {"median": statistics.median(cycle), "max": max(cycle)}
    record.note("residency", refused=code, readmissions=len(cycle), readmit_ms=times)
    assert code == "ane_residency_limit"


def test_every_call_releases_the_gil(embedder: Subject, record: Record) -> None:
    """Another thread ticks every 5 ms all the while; the longest silence is what a call took the GIL for."""
    tokens = embedder.ladder[-1]
    source, _ = embedder.functions()[embedder.bucket(tokens)]
    feeds = inputs.single(embedder.rows([tokens])[0], tokens, embedder.rules)
    found = gil(CoreML(), embedder.package, source, feeds, units="cpu_and_ne")
    gaps = {call: gap for call, (_, gap) in found.items()}
    record.note("gil", longest_gap_s=gaps, call_s={call: took for call, (took, _) in found.items()})
    assert max(gaps.values()) <= GIL_GAP_S, gaps


def test_nothing_leaks_over_10_000_predictions(model: AneModel, embedder: Subject, record: Record) -> None:
    row = embedder.rows([embedder.ladder[0] // 2])
    first = embed(model, row)
    grown = grown_mib(lambda: embed(model, row), PREDICTIONS)
    record.note("leak", predictions=PREDICTIONS, grown_mib=round(grown, 2))
    assert np.array_equal(first, embed(model, row)), "the same input gives the same bytes"
    assert grown <= LEAK_MIB


# --- placement -------------------------------------------------------------------------------------------------------


def place(subject: Subject, record: Record) -> None:
    """Record where every function would run, operation by operation; the gates of a certification judge it."""
    backend, table, told = CoreML(), [], {}
    for name, (source, _) in subject.functions().items():
        handle = backend.open(source, units="cpu_and_ne")
        started = time.monotonic()
        plan = handle.plan()
        plan_ms = round((time.monotonic() - started) * 1000, 1)
        handle.close()
        wanted = source.function if source.multi else None
        kind = "bucket" if subject.width(name) is None else "packed"
        counts = {"name": name, "kind": kind, "tokens": subject.names[name], **counted(plan, wanted)}
        table.append(msgspec.convert(counts, documents.Function))
        one: dict[str, Any] = {"plan_ms": plan_ms, "share": placement.share(plan, wanted)}
        if plan is not None:
            try:
                one["cpu_stages"] = placement.cpu_stages(plan, wanted)
            except EngineError as exc:
                one["refused"] = exc.msg
        told[name] = one | {"recorded_plan": msgspec.to_builtins(plan)}
    record.note(f"placement {subject.task}", functions=msgspec.to_builtins(table), plans=told)
    shares = [one["share"] for one in told.values()]
    # Packed functions are judged like buckets here: a certification would only leave them out.
    functions = [msgspec.structs.replace(one, kind="bucket") for one in table]
    where = msgspec.structs.replace(
        clean(),
        share=None if None in shares else min(shares),
        functions=functions,
        cpu_allowed=sorted(placement.CPU_ALLOWED),
    )
    assert failed(judged(placement=where), *PLACEMENT) == {}
    assert not [one["refused"] for one in told.values() if "refused" in one]


def test_placement_of_every_function(embedder: Subject, record: Record) -> None:
    place(embedder, record)


def test_placement_of_a_reranker(reranker: Subject, record: Record) -> None:
    place(reranker, record)


def test_a_load_that_judges_placement_keeps_its_share_over_evictions(embedder: Subject, record: Record) -> None:
    """LOAD as the host asks for it: an operation that fell to the CPU refuses it, with its name."""
    judging = load(embedder)
    try:
        for _ in range(2):
            judging.admit_shape(embedder.ladder[1], progress=silent())
            judging.evict_shape(embedder.ladder[1], progress=silent())
        share = judging.status().placement_share
    finally:
        judging.close()
    record.note("residency", share_after_evictions=share)
    assert share is not None and share >= LIMITS["embed"]["placement_share"]


def test_coremltools_second_opinion(embedder: Subject, record: Record) -> None:
    """The other binding: its plan of the default function, and its predictions of every bucket, on the CPU alone."""
    import coremltools as ct

    path = str(next(embedder.folder.glob("*.mlmodelc")))
    plan = ct.models.compute_plan.MLComputePlan.load_from_path(path=path, compute_units=ct.ComputeUnit.CPU_AND_NE)
    backend, worst, functions = CoreML(), 1.0, embedder.functions()
    default = embedder.bucket(embedder.ladder[0])
    theirs = placement.share(from_coremltools(plan), default)
    handle = backend.open(functions[default][0], units="cpu_and_ne")
    ours = placement.share(handle.plan(), default)
    handle.close()
    for tokens in embedder.ladder:
        source, _ = functions[embedder.bucket(tokens)]
        feeds = inputs.single(embedder.rows([tokens - 3], seed=9)[0], tokens, embedder.rules)
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


# --- the whole path --------------------------------------------------------------------------------------------------


def certify(subject: Subject, record: Record) -> None:
    """Host, worker process, fixtures, placement, packed widths, costs: all that `synapse certify` does."""
    summary = lanes.certified(subject.task, "ane", bundle=subject.bundle.root)
    record.note(f"certification {subject.task}", **summary)
    lanes.assert_certified(summary)


def test_certification_of_the_lane(embedder: Subject, model: AneModel, record: Record) -> None:
    model.close()  # the worker process gets the engine for itself
    certify(embedder, record)


def test_certification_of_the_rerank_lane(reranker: Subject, rerank_model: AneModel, record: Record) -> None:
    rerank_model.close()
    certify(reranker, record)
