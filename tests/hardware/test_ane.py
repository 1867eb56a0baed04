"""The hardware run of the Core ML engine: `make hw-ane` on a Mac. Nothing here has run anywhere until evidence/ says
so.

It builds MiniLM and the MS MARCO cross-encoder (or seeded models of their size), prepares them, and measures through
the production binding: parity, packing, speed-up over the CPU alone, residency limits, the GIL in every call, leaks
over 10,000 predictions, placement, coremltools' second opinion, and a certification of both lanes. The model that most
tests share is loaded without judging its placement: where one operation falls to the CPU, everything else is measured
all the same, and the placement tests say which.

One document, evidence/ane-<chip>-<os build>.json, holds what was measured and the gates that follow
(tests/hardware/ane_evidence.py); it is written after every test, so that a crash keeps what came before. A failed gate
is written down, too, and then fails the run.
"""

from __future__ import annotations

import asyncio
import json
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from engines.ane import REVISION, inputs
from engines.ane import compute_plan as placement
from engines.ane.artifact import sources
from engines.ane.backend import HINTS, Source
from engines.ane.build.prepare import prepare
from engines.ane.coreml import CoreML, os_build
from engines.ane.engine import AneEngine
from engines.ane.inputs import InputRules
from engines.ane.model import AneModel
from engines.bundle import manifest, preparation
from engines.bundle.checkpoint import Checkpoint
from engines.bundle.manifest import Bundle, FileRef
from engines.protocol.errors import EngineError
from engines.protocol.messages import Load, Pooling
from engines.runtime.engine import WorkerOptions
from engines.runtime.progress import silent
from tests.hardware import ane_evidence
from tests.hardware.ane_evidence import PREDICTIONS, READMISSIONS
from tests.hardware.coreml_calls import batch, cosines, gil, grown_mib, rows
from tests.support import toy_models
from tests.support.ane_bundle import packed, shape, write_bundle

pytestmark = [pytest.mark.ane, pytest.mark.timeout(3600)]

EVIDENCE = Path(__file__).parents[2] / "evidence"
BUCKETS, WIDTHS = (128, 256, 512), (128, 256)
NAMES = {**{f"s{n}": n for n in BUCKETS}, **{f"packed{n}": n for n in WIDTHS}}
VOCAB = 30522
MODELS = {"embed": "minilm", "rerank": "ms-marco"}
MIN_PEARSON, MAX_ERROR = 0.999, 0.1
"""A reranker's logits against the reference, as the packaged matrix has it."""
SOFTWARE = ("coremltools", "pyobjc-core", "pyobjc-framework-CoreML", "numpy", "synapse-workers")


def sysctl(name: str) -> str:
    found = subprocess.run(["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


class Document:
    """The evidence, filled test by test and written at the end whatever happened."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {
            "format": ane_evidence.FORMAT,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "graph_revision": REVISION,
            "thresholds": ane_evidence.THRESHOLDS,
            "configuration": {"units": "cpu_and_ne", "hints": HINTS},
            "software": {"python": platform.python_version()} | {name: installed(name) for name in SOFTWARE},
            "machine": {
                "chip": sysctl("machdep.cpu.brand_string"),
                "model": sysctl("hw.model"),
                "os": platform.mac_ver()[0],
                "os_build": os_build(),
                "memory_gib": round(psutil.virtual_memory().total / 2**30),
            },
            "functions": {
                name: {"kind": "bucket" if name.startswith("s") else "packed", "tokens": tokens}
                for name, tokens in NAMES.items()
            },
            "rerank": {"functions": {f"s{tokens}": {"kind": "bucket", "tokens": tokens} for tokens in BUCKETS}},
        }

    def part(self, task: str) -> dict[str, Any]:
        """What is recorded of one task's model: the embedder's lies at the top."""
        found: dict[str, Any] = self.data if task == "embed" else self.data[task]
        return found

    def function(self, name: str, task: str = "embed") -> dict[str, Any]:
        found: dict[str, Any] = self.part(task)["functions"][name]
        return found

    def passes(self, *names: str) -> None:
        """Fail the test where one of these gates fails by now."""
        known = {gate["name"]: gate for gate in ane_evidence.gates(self.data)}
        failed = [known[name] for name in names if not known[name]["passed"]]
        assert not failed, failed

    def write(self) -> Path:
        EVIDENCE.mkdir(exist_ok=True)
        chip = "".join(c if c.isalnum() else "-" for c in self.data["machine"]["chip"].lower()).strip("-") or "mac"
        path = EVIDENCE / f"ane-{chip}-{self.data['machine']['os_build']}.json"
        judged = {"gates": ane_evidence.gates(self.data), "verdict": ane_evidence.verdict(self.data)}
        path.write_text(json.dumps(self.data | judged, indent=1) + "\n")
        return path


@dataclass(frozen=True)
class Subject:
    """One task's model: its bundle, where it was prepared, and the installed bundle whose weights it has, if any."""

    task: str
    bundle: Bundle
    folder: Path
    record: preparation.Preparation
    real: Bundle | None

    @property
    def names(self) -> dict[str, int]:
        """The functions and their tokens: packed ones exist for embedders only."""
        return {name: tokens for name, tokens in NAMES.items() if self.task == "embed" or name.startswith("s")}

    @property
    def rules(self) -> InputRules:
        """What rows must look like, from the manifest; a reranker's separator starts the second text."""
        described, pairs = self.bundle.manifest, self.task == "rerank"
        assert isinstance(described.config, dict) and isinstance(described.special_ids, dict)
        sep = described.special_ids["sep"] if pairs else None
        return InputRules(vocab=described.config["vocab_size"], token_types=pairs, sep_id=sep)

    @property
    def package(self) -> Path:
        return self.bundle.root / "model.mlpackage"

    def functions(self) -> dict[str, Any]:
        """Return where each compiled function lies, and its signature."""
        return sources(self.folder, self.names, CoreML(), self.record)

    def rows(self, lengths: list[int], seed: int = 1) -> list[np.ndarray]:
        """Return random rows; a reranker's hold a separator."""
        rules = self.rules
        found = rows(lengths, rules.vocab, seed)
        for row in found if rules.sep_id is not None else []:
            row[len(row) // 2] = rules.sep_id
        return found


@pytest.fixture(scope="module")
def document() -> Iterator[Document]:
    found = Document()
    yield found
    print(f"\nevidence: {found.write()}")


@pytest.fixture(autouse=True)
def kept(document: Document) -> Iterator[None]:
    """Write what there is after every test: Core ML may end the process in the next one."""
    yield
    document.write()


def installed_bundle(task: str) -> Bundle | None:
    """Return the installed default model of a task, whose weights, tokenizer and fixtures are used."""
    from synapse_host import catalogue

    folder = catalogue.installed().get(MODELS[task])
    found = None if folder is None else manifest.read(folder)
    return found if found is not None and found.artifacts("safetensors-package") else None


def build(task: str, folder: Path, real: Bundle | None, part: dict[str, Any]) -> Bundle:
    """Build a task's model with real weights where they are installed, else with seeded ones of the same size."""
    if real is not None:
        checkpoint = Checkpoint.from_package(
            real.path(real.artifacts("safetensors-package")[0].path),
            config=real.manifest.config,  # type: ignore[arg-type]
            family=real.manifest.family,
            task=real.manifest.task,
        )
    else:
        (folder / "seeded").mkdir()
        size = {"layers": 6, "hidden": 384, "heads": 12, "ffn": 1536, "vocab": VOCAB, "max_positions": 512}
        checkpoint = Checkpoint.open(
            toy_models.write_bert(folder / "seeded", cross_encoder=task == "rerank", **size)  # type: ignore[arg-type]
        )
    part["weights"] = MODELS[task] if real is not None else "seeded"
    started = time.monotonic()
    keys = shape(*BUCKETS) + (packed(*WIDTHS) if task == "embed" else [])
    built = write_bundle(checkpoint, folder / "bundle", keys, model_id=MODELS[task])
    part["build_s"] = round(time.monotonic() - started, 2)
    if real is not None:
        described = built.manifest
        for ref in (real.manifest.tokenizer, real.manifest.fixtures):
            if isinstance(ref, FileRef):
                shutil.copyfile(real.path(ref.path), built.root / ref.path)
        described = msgspec.structs.replace(
            described,
            tokenizer=real.manifest.tokenizer,
            fixtures=real.manifest.fixtures,
            max_tokens=min(real.manifest.max_tokens, BUCKETS[-1]),
        )
        manifest.write(built.root, described)
        built = manifest.read(built.root)
    return built


def prepared(task: str, bundle: Bundle, real: Bundle | None, document: Document) -> Subject:
    """Compile to the stable path and pay the cold first loads; times and digests go into the document."""
    part, (artifact,) = document.part(task), bundle.artifacts("coreml")
    part["manifest_digest"] = bundle.digest
    part["artifact"] = {"digest": artifact.digest, "tree": artifact.tree, "bytes": artifact.bytes}
    part["kernel_revision"] = engine(bundle).identity().kernel_revision
    started = time.monotonic()
    result = prepare(bundle.root)
    part["prepare_s"] = round(time.monotonic() - started, 2)
    for name, ms in result["prepared"][0]["first_load_ms"].items():
        document.function(name, task)["cold_load_ms"] = ms
    return Subject(task, bundle, *preparation.find(preparation.default_cache(), artifact.digest), real)


def subject_of(task: str, folder: Path, document: Document) -> Subject:
    real = installed_bundle(task)
    return prepared(task, build(task, folder, real, document.part(task)), real, document)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory, document: Document) -> Subject:
    return subject_of("embed", tmp_path_factory.mktemp("ane-embed"), document)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory, document: Document) -> Subject:
    return subject_of("rerank", tmp_path_factory.mktemp("ane-rerank"), document)


def engine(bundle: Bundle) -> AneEngine:
    return AneEngine(WorkerOptions(device="ane", manifest=bundle.path("manifest.json"), packed=WIDTHS))


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


def loaded(subject: Subject, document: Document) -> Iterator[AneModel]:
    """The model that a task's tests share, its smallest bucket resident; placement is judged in tests of its own."""
    started = time.monotonic()
    found = load(subject, placement="off")
    document.part(subject.task)["warm_load_ms"] = round((time.monotonic() - started) * 1000, 1)
    yield found
    found.close()


@pytest.fixture(scope="module")
def model(embedder: Subject, document: Document) -> Iterator[AneModel]:
    yield from loaded(embedder, document)


@pytest.fixture(scope="module")
def rerank_model(reranker: Subject, document: Document) -> Iterator[AneModel]:
    yield from loaded(reranker, document)


class Resident:
    """Admit one function for a block; the smallest bucket always stays."""

    def __init__(self, model: AneModel, name: str, row: dict[str, Any] | None = None) -> None:
        self._model, self._name, self._row = model, name, row

    def __enter__(self) -> None:
        started = time.perf_counter()
        if self._name.startswith("packed"):
            self._model.admit_packed(NAMES[self._name], progress=silent())
        else:
            self._model.admit_shape(NAMES[self._name], progress=silent())
        if self._row is not None:
            self._row["admit_ms"] = round((time.perf_counter() - started) * 1000, 1)

    def __exit__(self, *exc: object) -> None:
        if self._name.startswith("packed"):
            self._model.evict_packed(NAMES[self._name], progress=silent())
        elif self._name != f"s{BUCKETS[0]}":
            self._model.evict_shape(NAMES[self._name], progress=silent())


def embed(model: AneModel, found: list[np.ndarray], width: int | None = None) -> np.ndarray:
    return model.embed(batch(found), pooling=Pooling.MEAN, normalize=True, packed_width=width, progress=silent())


def score(model: AneModel, found: list[np.ndarray]) -> np.ndarray:
    return model.rerank_sequences(batch(found), progress=silent())


def fitting(name: str, tokens: int) -> list[int]:
    """Return row lengths that run on this function: a bucket takes only what no smaller one does."""
    below = max((n for n in BUCKETS if n < tokens), default=0) if name.startswith("s") else 0
    return [n for n in (1, 2, tokens // 2, tokens - 1, tokens) if n > below]


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_parity_with_the_reference_of_every_function(model: AneModel, embedder: Subject, document: Document) -> None:
    """Against the evaluator, which the ordinary tests hold to transformers; MiniLM also against its own goldens."""
    from tests.support.mil_reference import ReferenceBackend

    def expected(found: list[np.ndarray], bucket: int) -> np.ndarray:
        program = ReferenceBackend().open(Source(embedder.package, f"s{bucket}", True), units="cpu_and_ne")
        means = []
        for row in found:
            states = program.run(inputs.single(row, bucket, embedder.rules))["last_hidden_state"][0, : len(row)]
            means.append(states.astype(np.float64).mean(0))
        program.close()
        return np.stack([mean / np.linalg.norm(mean) for mean in means])

    for name, tokens in NAMES.items():
        lengths = fitting(name, tokens)
        found = embedder.rows(lengths, seed=tokens)
        with Resident(model, name, document.function(name)):
            got = embed(model, found, tokens if name.startswith("packed") else None)
        cosine = cosines(got, expected(found, tokens))
        document.function(name)["quality"] = {
            "lengths": lengths,
            "cosine": [round(float(value), 9) for value in cosine],
            "min_cosine": float(cosine.min()),
            "non_finite": int((~np.isfinite(got)).sum()),
        }
    if document.data["weights"] == "minilm":
        from tests.ane.make_goldens import GOLDENS
        from tests.ane.make_goldens import rows as golden_rows

        got = embed(model, [row.astype(np.int32) for row in golden_rows("minilm")])
        quality = document.function(f"s{BUCKETS[0]}")["quality"]
        quality["goldens"] = float(cosines(got, np.load(GOLDENS)["minilm"]).min())
        quality["min_cosine"] = min(quality["min_cosine"], quality["goldens"])
    document.passes("min_cosine", "non_finite")


def test_a_reranker_s_logits_are_the_reference_s(rerank_model: AneModel, reranker: Subject, document: Document) -> None:
    from tests.support.mil_reference import ReferenceBackend

    got: list[float] = []
    wanted: list[float] = []
    for name, tokens in reranker.names.items():
        found = reranker.rows(fitting(name, tokens) * 2, seed=tokens)
        program = ReferenceBackend().open(Source(reranker.package, name, True), units="cpu_and_ne")
        expected = [float(program.run(inputs.single(row, tokens, reranker.rules))["score"][0]) for row in found]
        program.close()
        with Resident(rerank_model, name, document.function(name, "rerank")):
            scores = score(rerank_model, found).tolist()
        error = max(abs(a - b) for a, b in zip(scores, expected, strict=True))
        quality = {"lengths": [len(row) for row in found], "scores": scores, "reference": expected, "max_error": error}
        document.function(name, "rerank")["quality"] = quality
        got += scores
        wanted += expected
    worst = max(abs(a - b) for a, b in zip(got, wanted, strict=True))
    pearson = float(np.corrcoef(got, wanted)[0, 1])
    document.part("rerank").update(max_error=worst, pearson=pearson)
    assert worst <= MAX_ERROR and pearson >= MIN_PEARSON


def test_packing_qualifies(model: AneModel, embedder: Subject, document: Document) -> None:
    """At least 64 rows in 8 length mixes: alone against packed, neighbours, first and last place."""
    from synapse_host.qualification import mixes

    for width in WIDTHS:
        plan = [[min(n, BUCKETS[0]) for n in lengths] for lengths in mixes(width)]
        cosine, difference, bad = 1.0, 0.0, 0
        with Resident(model, f"packed{width}"):
            for seed, lengths in enumerate(plan):
                found = embedder.rows(lengths, seed=seed)
                together = embed(model, found, width)
                alone = np.concatenate([embed(model, [row], width) for row in found])
                turned = embed(model, found[::-1], width)[::-1]
                cosine = min(cosine, float(cosines(together, embed(model, found)).min()))
                for other in (alone, turned):
                    difference = max(difference, float(np.abs(together - other).max()))
                bad += int((~np.isfinite(together)).sum())
        document.function(f"packed{width}")["packing"] = {
            "rows": sum(map(len, plan)),
            "mixes": len({tuple(mix) for mix in plan}),
            "min_cosine": cosine,
            "max_difference": difference,
            "non_finite": bad,
        }
    document.passes("packed_rows", "packed_mixes", "packed_cosine", "neighbour_leak")


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


def speeds(model: AneModel, subject: Subject, document: Document) -> None:
    """Record each function's time here and on the CPU alone, and its tokens per second; every token is a real one."""
    alone = load(subject, compute_units="cpu_only", placement="off")

    def call(one: AneModel, name: str) -> Callable[[], Any]:
        tokens = subject.names[name]
        if subject.task == "rerank":
            return lambda: score(one, subject.rows([tokens]))
        if name.startswith("packed"):
            return lambda: embed(one, subject.rows([tokens // 4] * 4), tokens)
        return lambda: embed(one, subject.rows([tokens]))

    try:
        for name, tokens in subject.names.items():
            row = document.function(name, subject.task)
            for key, one in (("ane_ms", model), ("cpu_ms", alone)):
                with Resident(one, name):
                    row[key] = round(timed(call(one, name)), 4)
            row["tokens_per_s"] = round(tokens / row["ane_ms"] * 1000, 1)
    finally:
        alone.close()


def test_speed_up_over_the_cpu_alone(model: AneModel, embedder: Subject, document: Document) -> None:
    """The only behavioural proof that the Neural Engine really ran; also what the packer needs to know."""
    speeds(model, embedder, document)
    document.passes("speedup")


def test_a_reranker_is_faster_than_the_cpu_alone(rerank_model: AneModel, reranker: Subject, document: Document) -> None:
    speeds(rerank_model, reranker, document)
    least = ane_evidence.THRESHOLDS["speedup"]
    found = document.part("rerank")["functions"]
    assert all(one["cpu_ms"] / one["ane_ms"] >= least for one in found.values()), found


# --- the process -----------------------------------------------------------------------------------------------------


def test_residency_limits(model: AneModel, document: Document) -> None:
    for bucket in BUCKETS[1:]:
        model.admit_shape(bucket, progress=silent())
    model.admit_packed(WIDTHS[0], progress=silent())
    with pytest.raises(EngineError) as refused:
        model.admit_packed(WIDTHS[1], progress=silent())
    cycle = []
    for _ in range(READMISSIONS):
        model.evict_shape(BUCKETS[2], progress=silent())
        started = time.perf_counter()
        model.admit_shape(BUCKETS[2], progress=silent())
        cycle.append((time.perf_counter() - started) * 1000)
    for bucket in BUCKETS[1:]:
        model.evict_shape(bucket, progress=silent())
    model.evict_packed(WIDTHS[0], progress=silent())
    document.data.setdefault("residency", {}).update(
        refused=refused.value.code.value,
        readmissions=len(cycle),
        readmit_ms={"median": statistics.median(cycle), "max": max(cycle)},
    )
    document.passes("residency_limit", "readmissions")


def test_every_call_releases_the_gil(embedder: Subject, document: Document) -> None:
    """Another thread ticks every 5 ms all the while; the longest silence is what a call took the GIL for."""
    name = f"s{BUCKETS[-1]}"
    source, _ = embedder.functions()[name]
    feeds = inputs.single(embedder.rows([BUCKETS[-1]])[0], BUCKETS[-1], embedder.rules)
    found = gil(CoreML(), embedder.package, source, feeds, units="cpu_and_ne")
    document.data["gil_longest_gap_s"] = {call: gap for call, (_, gap) in found.items()}
    document.data["gil_call_s"] = {call: took for call, (took, _) in found.items()}
    document.data["compile_ms"] = round(found["compile"][0] * 1000, 1)
    document.passes("gil_gap_s")


def test_nothing_leaks_over_10_000_predictions(model: AneModel, embedder: Subject, document: Document) -> None:
    row = embedder.rows([BUCKETS[0] // 2])
    first = embed(model, row)
    grown = grown_mib(lambda: embed(model, row), PREDICTIONS)
    document.data["leak"] = {"predictions": PREDICTIONS, "grown_mib": round(grown, 2)}
    assert np.array_equal(first, embed(model, row)), "the same input gives the same bytes"
    document.passes("predictions", "leak_mib")


# --- placement -------------------------------------------------------------------------------------------------------


def place(subject: Subject, document: Document) -> None:
    """Record where every function would run, operation by operation, and what judging it says."""
    backend = CoreML()
    for name, (source, _) in subject.functions().items():
        handle = backend.open(source, units="cpu_and_ne")
        started = time.monotonic()
        plan = handle.plan()
        plan_ms = (time.monotonic() - started) * 1000
        handle.close()
        wanted = source.function if source.multi else None
        row = None if plan is None else ane_evidence.table(plan, wanted)
        told: dict[str, Any] = {"plan_ms": round(plan_ms, 1)}
        if plan is not None and row is not None:
            told |= row
            try:
                told["cpu_stages"] = placement.cpu_stages(plan, wanted)
            except EngineError as exc:
                told["refused"] = exc.msg
            told["recorded_plan"] = msgspec.to_builtins(plan)
        document.function(name, subject.task)["placement"] = told


def test_placement_of_every_function(embedder: Subject, document: Document) -> None:
    place(embedder, document)
    document.passes("share", "cost_share", "placement_reported", "cpu_operations")


def test_placement_of_a_reranker(reranker: Subject, document: Document) -> None:
    place(reranker, document)
    for name in reranker.names:
        told = document.function(name, "rerank")["placement"]
        assert "refused" not in told and told["share"] >= ane_evidence.THRESHOLDS["share"], (name, told)


def test_a_load_that_judges_placement_keeps_its_share_over_evictions(embedder: Subject, document: Document) -> None:
    """LOAD as the host asks for it: an operation that fell to the CPU refuses it, with its name."""
    judged = load(embedder)
    try:
        for _ in range(2):
            judged.admit_shape(BUCKETS[1], progress=silent())
            judged.evict_shape(BUCKETS[1], progress=silent())
        share = judged.status().placement_share
    finally:
        judged.close()
    document.data.setdefault("residency", {})["share_after_evictions"] = share
    document.passes("share_after_evictions")


def test_coremltools_second_opinion(embedder: Subject, document: Document) -> None:
    """The other binding: its plan of the default function, and its predictions of every bucket, on the CPU alone."""
    import coremltools as ct

    path = str(next(embedder.folder.glob("*.mlmodelc")))
    plan = ct.models.compute_plan.MLComputePlan.load_from_path(path=path, compute_units=ct.ComputeUnit.CPU_AND_NE)
    default = f"s{BUCKETS[0]}"
    theirs = placement.share(ane_evidence.from_coremltools(plan), default)
    ours = document.function(default).get("placement", {}).get("share")
    report = document.data["coremltools"] = {
        "share": theirs,
        "share_difference": None if theirs is None or ours is None else abs(theirs - ours),
    }
    backend, worst = CoreML(), 1.0
    for name, (source, _) in embedder.functions().items():
        if not name.startswith("s"):
            continue
        feeds = inputs.single(embedder.rows([NAMES[name] - 3], seed=9)[0], NAMES[name], embedder.rules)
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
    report["min_cosine"] = worst
    document.passes("coremltools_share", "coremltools_cosine")


# --- the whole path --------------------------------------------------------------------------------------------------


def certify_lane(subject: Subject, document: Document) -> None:
    """Host, worker process, fixtures, placement, packed widths; needs the real model's fixtures."""
    model = MODELS[subject.task]
    if subject.real is None:
        pytest.skip(f"{model} is not installed: `synapse models install {model}`, then run again for a certificate")
    from synapse_host import certificates, gates
    from synapse_host import evidence as documents
    from synapse_host.certification import Order, certify
    from synapse_host.matrix import load as load_matrix

    assert sys.platform == "darwin"
    order = Order(lane=subject.task, model=model, bundle=subject.bundle.root, engine="ane")
    evidence = asyncio.run(certify(order, load_matrix(None)))
    path = EVIDENCE / f"{subject.task}-ane-{model}-{subject.bundle.digest[:8]}.json"
    digest = documents.write(path, evidence)
    if evidence.verdict == "certified":
        certificates.write(certificates.of_evidence(evidence, path=path.absolute(), digest=digest))
    document.part(subject.task)["certification"] = {
        "verdict": evidence.verdict,
        "reasons": evidence.reasons,
        "packed_widths": gates.qualified_widths(evidence),
        "cost_ms": evidence.cost_ms,
        "evidence": path.name,
    }


def test_certification_of_the_lane(embedder: Subject, model: AneModel, document: Document) -> None:
    model.close()  # the worker process gets the engine for itself
    certify_lane(embedder, document)
    document.passes("certified")


def test_certification_of_the_rerank_lane(reranker: Subject, rerank_model: AneModel, document: Document) -> None:
    rerank_model.close()
    certify_lane(reranker, document)
    assert document.part("rerank")["certification"]["verdict"] == "certified"
