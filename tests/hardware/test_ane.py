"""The hardware run of the Core ML engine: `make hw-ane` on a Mac. Nothing here has run anywhere until evidence/ says
so.

The default embedder and reranker are certified by the code of `synapse certify`: their verdict is made there and
nowhere else. The other tests look through the production binding at what a certification doesn't: every function
against the evaluator, residency limits, the GIL in every call, leaks over 10,000 predictions. The model that a task's
tests share is loaded without judging its placement: where one operation falls to the CPU, everything else is measured
all the same, and the placement tests say which. Figures that a gate of certification judges are judged by that gate.

evidence/ane-<chip>-<os>/ holds the documents of the certifications and hardware.json: figures and how each test ended,
also of a run that failed; it is written after every test, so that a crash keeps what came before. Without the models
nothing is measured and the run fails.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engines.ane import REVISION, inputs
from engines.ane import compute_plan as placement
from engines.ane.backend import HINTS, Source
from engines.ane.build.plan import counted
from engines.ane.build.prepare import prepare
from engines.ane.coreml import CoreML
from engines.ane.inputs import InputRules
from engines.ane.model import AneModel
from engines.bundle import preparation
from engines.bundle.manifest import Bundle
from engines.protocol.errors import EngineError
from engines.runtime.progress import silent
from synapse_host.certificates import document as documents
from synapse_host.certificates import metrics, verdict
from synapse_host.certificates.document import Evidence
from synapse_host.placement.matrix import load as load_matrix
from synapse_host.residency import plan as rungs
from tests.hardware import coreml_calls as calls
from tests.hardware import lanes
from tests.hardware.coreml_calls import Prepared, rows, run
from tests.hardware.record import Record
from tests.support.evidence import evidence
from tests.support.mil_reference import ReferenceBackend
from tests.support.rows import cosines

pytestmark = [pytest.mark.ane, pytest.mark.timeout(3600)]

SOFTWARE = ("coremltools", "pyobjc-core", "pyobjc-framework-CoreML", "numpy", "synapse-workers")
READMISSIONS = 20
LIMITS = {
    task: verdict.thresholds(load_matrix(), load_matrix().engines["ane"], task=task, dtype="f16")
    for task in ("embed", "rerank")
}
EMBED = pytest.mark.parametrize("subject", ["embed"], indirect=True)
"""For tests of one model that show nothing new of a second."""
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


class Subject(Prepared):
    """One task's model, prepared at the stable path."""

    @property
    def task(self) -> str:
        return self.bundle.manifest.task

    @property
    def package(self) -> Path:
        return self.bundle.path(self.artifact.path)

    @property
    def ladder(self) -> tuple[int, ...]:
        return rungs.buckets(self.artifact)

    def width(self, name: str) -> int | None:
        """Return a packed function's width, None for a bucket."""
        found = next(one for one in self.artifact.functions or () if one.name == name)
        return found.packed_width or None

    def bucket(self, tokens: int) -> str:
        """Return the name of the bucket of this size."""
        return next(name for name, size in self.names.items() if size == tokens and self.width(name) is None)

    @property
    def rules(self) -> InputRules:
        """What rows must look like, from the manifest; a reranker's separator starts the second text."""
        described, pairs = self.bundle.manifest, self.task == "rerank"
        assert isinstance(described.config, dict)
        sep = (described.special_ids or {})["sep"] if pairs else None
        return InputRules(vocab=described.config["vocab_size"], token_types=pairs, sep_id=sep)

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


def prepared(bundle: Bundle, record: Record) -> Subject:
    """Compile to the stable path and pay the cold first loads; times and digests go into the record."""
    (artifact,) = bundle.artifacts("coreml")
    started = time.monotonic()
    result = prepare(bundle.root)
    found = Subject(bundle, *preparation.find(preparation.default_cache(), artifact.digest))
    record.note(
        f"prepare {found.task}",
        prepare_s=round(time.monotonic() - started, 2),
        cold_ms=result["prepared"][0]["first_load_ms"],
        manifest_digest=bundle.digest,
        artifact={"digest": artifact.digest, "tree": artifact.tree, "bytes": artifact.bytes},
        kernel_revision=found.engine().identity().kernel_revision,
    )
    return found


@pytest.fixture(scope="module", params=["embed", "rerank"])
def subject(request: pytest.FixtureRequest, record: Record) -> Subject:
    """The installed MiniLM, or the MS MARCO cross-encoder, with its Core ML package."""
    return prepared(lanes.installed(request.param, format="coreml"), record)


def loaded(subject: Subject, record: Record) -> Iterator[AneModel]:
    """The model that a task's tests share, its smallest bucket resident; placement is judged in tests of its own."""
    started = time.monotonic()
    found = subject.load(placement="off")
    record.note(f"load {subject.task}", warm_load_ms=round((time.monotonic() - started) * 1000, 1))
    yield found
    found.close()


@pytest.fixture(scope="module")
def model(subject: Subject, record: Record) -> Iterator[AneModel]:
    yield from loaded(subject, record)


@contextmanager
def resident(model: AneModel, subject: Subject, name: str) -> Iterator[float]:
    """Admit one function for a block, which gets the milliseconds that took; the smallest bucket always stays."""
    width, tokens, started = subject.width(name), subject.names[name], time.perf_counter()
    if width is not None:
        model.admit_packed(width, progress=silent())
    else:
        model.admit_shape(tokens, progress=silent())
    try:
        yield round((time.perf_counter() - started) * 1000, 1)
    finally:
        if width is not None:
            model.evict_packed(width, progress=silent())
        elif tokens != subject.ladder[0]:
            model.evict_shape(tokens, progress=silent())


# --- numbers ---------------------------------------------------------------------------------------------------------


def reference(subject: Subject, found: list[np.ndarray], bucket: int) -> np.ndarray:
    """Return what the evaluator says of rows on one bucket."""
    program = ReferenceBackend().open(Source(subject.package, subject.bucket(bucket), True), units="cpu_and_ne")
    outputs = [program.run(inputs.single(row, bucket, subject.rules)) for row in found]
    if subject.task == "rerank":
        return np.concatenate([output["score"] for output in outputs])
    means = [
        o["last_hidden_state"][0, : len(row)].astype(np.float64).mean(0) for o, row in zip(outputs, found, strict=True)
    ]
    return np.stack([mean / np.linalg.norm(mean) for mean in means])


def test_the_numbers_of_every_function(model: AneModel, subject: Subject, record: Record) -> None:
    """Against the evaluator, which the ordinary tests hold to transformers; the fixtures do it in certification."""
    limits = LIMITS[subject.task]
    figures: dict[str, dict[str, Any]] = {}
    for name, tokens in subject.names.items():
        found = subject.rows(subject.fitting(name) * 2, seed=tokens)
        with resident(model, subject, name) as admit_ms:
            got = run(model, found, subject.width(name))
        # A packed row is what it is on its own bucket.
        wanted = reference(subject, found, next(n for n in subject.ladder if n >= min(tokens, subject.ladder[-1])))
        if subject.task == "rerank":
            scores = wanted.tolist(), got.tolist()
            one = {"max_error": metrics.max_error(*scores), "pearson": metrics.pearson(*scores)}
        else:
            one = {"min_cosine": float(cosines(got, wanted).min())}
        figures[name] = one | {"lengths": [len(row) for row in found], "admit_ms": admit_ms}
        record.note(f"numbers {subject.task}", functions=figures)
        assert np.isfinite(got).all(), name
    for name, one in figures.items():
        assert one.get("min_cosine", 1.0) >= limits.get("min_cosine", 0.0), name
        assert one.get("max_error", 0.0) <= limits.get("max_error", 0.0), name
        assert one.get("pearson", 1.0) >= limits.get("pearson", 0.0), name


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


def test_speed_up_over_the_cpu_alone(model: AneModel, subject: Subject, record: Record) -> None:
    """The only behavioural proof that the Neural Engine really ran, function by function; every token is a real one."""
    alone = subject.load(compute_units="cpu_only", placement="off")
    figures: dict[str, dict[str, float]] = {}

    def call(one: AneModel, name: str) -> Callable[[], Any]:
        tokens, width = subject.names[name], subject.width(name)
        found = subject.rows([tokens] if width is None else [tokens // 4] * 4)
        return lambda: run(one, found, width)

    try:
        for name, tokens in subject.names.items():
            times = {}
            for key, one in (("native_ms", model), ("forced_ms", alone)):
                with resident(one, subject, name):
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


# --- the process -----------------------------------------------------------------------------------------------------


@EMBED
def test_residency_limits(model: AneModel, subject: Subject, record: Record) -> None:
    ladder, widths = subject.ladder, rungs.packed_widths(subject.artifact)
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


@EMBED
def test_every_call_releases_the_gil(subject: Subject, record: Record) -> None:
    """Another thread ticks every 5 ms all the while; the longest silence is what a call took the GIL for."""
    tokens = subject.ladder[-1]
    source, _ = subject.functions()[subject.bucket(tokens)]
    feeds = inputs.single(subject.rows([tokens])[0], tokens, subject.rules)
    found = calls.gil(subject.package, source, feeds, units="cpu_and_ne")
    gaps = {call: gap for call, (_, gap) in found.items()}
    record.note("gil", longest_gap_s=gaps, call_s={call: took for call, (took, _) in found.items()})
    assert max(gaps.values()) <= calls.GIL_GAP_S, gaps


@EMBED
def test_nothing_leaks_over_10_000_predictions(model: AneModel, subject: Subject, record: Record) -> None:
    row = subject.rows([subject.ladder[0] // 2])
    first = run(model, row)
    grown = calls.grown_mib(model, row)
    record.note("leak", predictions=calls.PREDICTIONS, grown_mib=round(grown, 2))
    assert np.array_equal(first, run(model, row)), "the same input gives the same bytes"
    assert grown <= calls.LEAK_MIB


# --- placement -------------------------------------------------------------------------------------------------------


def test_placement_of_every_function(subject: Subject, record: Record) -> None:
    """Record where every function would run, operation by operation; the gates of a certification judge it."""
    backend, table, told = CoreML(), [], {}
    for name, (source, _) in subject.functions().items():
        handle = backend.open(source, units="cpu_and_ne")
        started = time.monotonic()
        plan = handle.plan()
        plan_ms = round((time.monotonic() - started) * 1000, 1)
        handle.close()
        kind = "bucket" if subject.width(name) is None else "packed"
        counts = {"name": name, "kind": kind, "tokens": subject.names[name], **counted(plan)}
        table.append(msgspec.convert(counts, documents.Function))
        one: dict[str, Any] = {"plan_ms": plan_ms, "share": placement.share(plan)}
        if plan is not None:
            try:
                one["cpu_stages"] = placement.cpu_stages(plan)
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


@EMBED
def test_a_load_that_judges_placement_keeps_its_share_over_evictions(subject: Subject, record: Record) -> None:
    """LOAD as the host asks for it: an operation that fell to the CPU refuses it, with its name."""
    judging = subject.load()
    try:
        for _ in range(2):
            judging.admit_shape(subject.ladder[1], progress=silent())
            judging.evict_shape(subject.ladder[1], progress=silent())
        share = judging.status().placement_share
    finally:
        judging.close()
    record.note("residency", share_after_evictions=share)
    assert share is not None and share >= LIMITS["embed"]["placement_share"]


# --- the whole path --------------------------------------------------------------------------------------------------


def test_certification_of_the_lane(subject: Subject, model: AneModel, record: Record) -> None:
    """Host, worker process, fixtures, placement, packed widths, costs: all that `synapse certify` does."""
    model.close()  # the worker process gets the engine for itself
    summary = lanes.certified(subject.task, "ane", bundle=subject.bundle.root)
    record.note(f"certification {subject.task}", **summary)
    lanes.assert_certified(summary)
