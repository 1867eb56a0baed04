"""The hardware run of the Core ML engine: `make hw-ane` on a Mac. Nothing here has run anywhere until evidence/ says
so.

It builds MiniLM (or a seeded model of its size), prepares it, and measures through the production binding: parity,
placement, packing, residency limits, speed-up over the CPU alone, load and compile times, GIL release of every call,
leaks over 10,000 predictions, coremltools' second opinion, and a certification of the lane. One document,
evidence/ane-<chip>-<os build>.json, holds what was measured and the gates that follow (tests/hardware/ane_evidence.py);
a failed gate is written down, too, and then fails the run.
"""

from __future__ import annotations

import asyncio
import json
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from engines.ane import REVISION, inputs, placement
from engines.ane.artifact import sources
from engines.ane.backend import HINTS, Source
from engines.ane.coreml import CoreML
from engines.ane.engine import AneEngine
from engines.ane.floor import os_build
from engines.ane.inputs import InputRules
from engines.ane.model import AneModel
from engines.ane.prepare import prepare
from engines.bundle import manifest, preparation
from engines.bundle.checkpoint import Checkpoint
from engines.bundle.manifest import Bundle, FileRef
from engines.protocol.errors import EngineError
from engines.protocol.messages import Load, Pooling
from engines.runtime.batch import TokenBatch
from engines.runtime.engine import WorkerOptions
from engines.runtime.progress import silent
from tests.hardware import ane_evidence
from tests.hardware.ane_evidence import PREDICTIONS, READMISSIONS
from tests.support import toy_models
from tests.support.ane_bundle import packed, shape, write_bundle

pytestmark = [pytest.mark.ane, pytest.mark.timeout(3600)]

EVIDENCE = Path(__file__).parents[2] / "evidence"
BUCKETS, WIDTHS = (128, 256, 512), (128, 256)
NAMES = {**{f"s{n}": n for n in BUCKETS}, **{f"packed{n}": n for n in WIDTHS}}
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
        }

    def function(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.data["functions"][name]
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


@pytest.fixture(scope="module")
def document() -> Iterator[Document]:
    found = Document()
    yield found
    print(f"\nevidence: {found.write()}")


@pytest.fixture(scope="module")
def real() -> Bundle | None:
    """The installed MiniLM bundle, whose weights, tokenizer and fixtures are used."""
    from synapse_host import catalogue

    folder = catalogue.installed().get("minilm")
    found = None if folder is None else manifest.read(folder)
    return found if found is not None and found.artifacts("safetensors-package") else None


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, real: Bundle | None, document: Document) -> Bundle:
    """MiniLM's real weights where they are installed, else seeded weights of its size."""
    if real is not None:
        checkpoint = Checkpoint.from_package(
            real.path(real.artifacts("safetensors-package")[0].path),
            config=real.manifest.config,  # type: ignore[arg-type]
            family=real.manifest.family,
            task=real.manifest.task,
        )
    else:
        out = tmp_path_factory.mktemp("minilm-like")
        size = {"layers": 6, "hidden": 384, "heads": 12, "ffn": 1536, "vocab": 30522, "max_positions": 512}
        checkpoint = Checkpoint.open(toy_models.write_bert(out, **size))
    document.data["weights"] = "minilm" if real is not None else "seeded"
    started = time.monotonic()
    built = write_bundle(
        checkpoint, tmp_path_factory.mktemp("ane") / "bundle", shape(*BUCKETS) + packed(*WIDTHS), model_id="minilm"
    )
    document.data["build_s"] = round(time.monotonic() - started, 2)
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
    (artifact,) = built.artifacts("coreml")
    document.data["manifest_digest"] = built.digest
    document.data["artifact"] = {"digest": artifact.digest, "tree": artifact.tree, "bytes": artifact.bytes}
    return built


@pytest.fixture(scope="module")
def prepared(bundle: Bundle, document: Document) -> tuple[Path, Any]:
    """Compile to the stable path and pay the cold first loads; times go into the document."""
    started = time.monotonic()
    result = prepare(bundle.root)
    document.data["prepare_s"] = round(time.monotonic() - started, 2)
    for name, ms in result["prepared"][0]["first_load_ms"].items():
        document.function(name)["cold_load_ms"] = ms
    return preparation.find(preparation.default_cache(), bundle.artifacts("coreml")[0].digest)


def load(bundle: Bundle, prepared: tuple[Path, Any], **config: str) -> AneModel:
    engine = AneEngine(WorkerOptions(device="ane", manifest=bundle.path("manifest.json"), packed=WIDTHS))
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
def model(bundle: Bundle, prepared: tuple[Path, Any], document: Document) -> Iterator[AneModel]:
    """The loaded model, its smallest bucket resident."""
    started = time.monotonic()
    found = load(bundle, prepared)
    document.data["warm_load_ms"] = round((time.monotonic() - started) * 1000, 1)
    yield found
    found.close()


class Resident:
    """Admit one function for a block; the smallest bucket always stays."""

    def __init__(self, model: AneModel, name: str, document: Document | None = None) -> None:
        self._model, self._name, self._document = model, name, document

    def __enter__(self) -> None:
        started = time.perf_counter()
        if self._name.startswith("packed"):
            self._model.admit_packed(NAMES[self._name], progress=silent())
        else:
            self._model.admit_shape(NAMES[self._name], progress=silent())
        if self._document is not None:
            took = round((time.perf_counter() - started) * 1000, 1)
            self._document.function(self._name)["admit_ms"] = took

    def __exit__(self, *exc: object) -> None:
        if self._name.startswith("packed"):
            self._model.evict_packed(NAMES[self._name], progress=silent())
        elif self._name != f"s{BUCKETS[0]}":
            self._model.evict_shape(NAMES[self._name], progress=silent())


def rows(lengths: list[int], seed: int = 1) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1000, 30000, n).astype(np.int32) for n in lengths]


def batch(found: list[np.ndarray]) -> TokenBatch:
    return TokenBatch(np.concatenate(found), np.cumsum([0, *map(len, found)]).astype(np.int32))


def embed(model: AneModel, found: list[np.ndarray], width: int | None = None) -> np.ndarray:
    return model.embed(batch(found), pooling=Pooling.MEAN, normalize=True, packed_width=width, progress=silent())


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a.astype(np.float64) * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


def test_parity_with_the_reference_of_every_function(model: AneModel, bundle: Bundle, document: Document) -> None:
    """Against the evaluator, which the ordinary tests hold to transformers; MiniLM also against its own goldens."""
    from tests.support.mil_reference import ReferenceBackend

    reference = ReferenceBackend()
    package, rules = bundle.root / "model.mlpackage", InputRules(vocab=30522)

    def expected(found: list[np.ndarray], bucket: int) -> np.ndarray:
        program = reference.open(Source(package, f"s{bucket}", True), units="cpu_and_ne")
        means = []
        for row in found:
            states = program.run(inputs.single(row, bucket, rules))["last_hidden_state"][0, : len(row)]
            means.append(states.astype(np.float64).mean(0))
        program.close()
        return np.stack([mean / np.linalg.norm(mean) for mean in means])

    for name, tokens in NAMES.items():
        below = max((n for n in BUCKETS if n < tokens), default=0) if name.startswith("s") else 0
        lengths = [n for n in (1, 2, tokens // 2, tokens - 1, tokens) if n > below]
        found = rows(lengths, seed=tokens)
        with Resident(model, name, document):
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


def test_placement_of_every_function(prepared: tuple[Path, Any], document: Document) -> None:
    backend = CoreML()
    for name, (source, _) in sources(prepared[0], NAMES, backend, prepared[1]).items():
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
        document.function(name)["placement"] = told
    document.passes("share", "cost_share", "placement_reported", "cpu_operations")


def test_coremltools_second_opinion(prepared: tuple[Path, Any], bundle: Bundle, document: Document) -> None:
    """The other binding: its plan of the default function, and its predictions of every bucket, on the CPU alone."""
    import coremltools as ct

    path = str(next(prepared[0].glob("*.mlmodelc")))
    plan = ct.models.compute_plan.MLComputePlan.load_from_path(path=path, compute_units=ct.ComputeUnit.CPU_AND_NE)
    default = f"s{BUCKETS[0]}"
    theirs = placement.share(ane_evidence.from_coremltools(plan), default)
    ours = document.function(default).get("placement", {}).get("share")
    report = document.data["coremltools"] = {
        "share": theirs,
        "share_difference": None if theirs is None or ours is None else abs(theirs - ours),
    }
    backend, worst = CoreML(), 1.0
    for name, (source, _) in sources(prepared[0], [f"s{n}" for n in BUCKETS], backend, prepared[1]).items():
        feeds = inputs.single(rows([NAMES[name] - 3], seed=9)[0], NAMES[name], InputRules(vocab=30522))
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


def test_packing_qualifies(model: AneModel, document: Document) -> None:
    """At least 64 rows in 8 length mixes: alone against packed, neighbours, first and last place."""
    from synapse_host.qualification import mixes

    for width in WIDTHS:
        plan = [[min(n, BUCKETS[0]) for n in lengths] for lengths in mixes(width)]
        cosine, difference, bad = 1.0, 0.0, 0
        with Resident(model, f"packed{width}"):
            for seed, lengths in enumerate(plan):
                found = rows(lengths, seed=seed)
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


def timed(model: AneModel, found: list[np.ndarray], repeats: int = 20, width: int | None = None) -> float:
    for _ in range(3):
        embed(model, found, width)
    samples = []
    for _ in range(repeats):
        started = time.perf_counter()
        embed(model, found, width)
        samples.append((time.perf_counter() - started) * 1000)
    return statistics.median(samples)


def test_speed_up_over_the_cpu_alone(
    model: AneModel, bundle: Bundle, prepared: tuple[Path, Any], document: Document
) -> None:
    """The only behavioural proof that the Neural Engine really ran; also what the packer needs to know."""
    alone = load(bundle, prepared, compute_units="cpu_only")
    try:
        for name, tokens in NAMES.items():
            width = tokens if name.startswith("packed") else None
            found = rows([tokens // 4] * 4) if width else rows([tokens])
            for key, one in (("ane_ms", model), ("cpu_ms", alone)):
                with Resident(one, name):
                    document.function(name)[key] = round(timed(one, found, width=width), 4)
    finally:
        alone.close()
    document.passes("speedup")


def test_every_call_releases_the_gil(bundle: Bundle, prepared: tuple[Path, Any], document: Document) -> None:
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

    name = f"s{BUCKETS[-1]}"
    compiled = watch("compile", lambda: compile_package(bundle.root / "model.mlpackage"))
    shutil.rmtree(compiled, ignore_errors=True)
    backend = CoreML()
    source, _ = sources(prepared[0], [name], backend, prepared[1])[name]
    handle = watch("load", lambda: backend.open(source, units="cpu_and_ne"))
    watch("signature", handle.signature)
    watch("plan", handle.plan)
    feeds = inputs.single(rows([BUCKETS[-1]])[0], BUCKETS[-1], InputRules(vocab=30522))
    watch("predict", lambda: [handle.run(feeds) for _ in range(200)])
    watch("close", handle.close)
    document.data["gil_longest_gap_s"] = gaps
    document.data["gil_call_s"] = took
    document.data["compile_ms"] = round(took["compile"] * 1000, 1)
    document.passes("gil_gap_s")


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
    document.data["residency"] = {
        "refused": refused.value.code.value,
        "readmissions": len(cycle),
        "readmit_ms": {"median": statistics.median(cycle), "max": max(cycle)},
        "share_after_evictions": model.status().placement_share,
    }
    document.passes("residency_limit", "readmissions", "share_after_evictions")


def test_nothing_leaks_over_10_000_predictions(model: AneModel, document: Document) -> None:
    process, row = psutil.Process(), rows([BUCKETS[0] // 2])
    for _ in range(500):
        embed(model, row)
    before, first = process.memory_info().rss, embed(model, row)
    for _ in range(PREDICTIONS):
        embed(model, row)
    grown = (process.memory_info().rss - before) / 2**20
    document.data["leak"] = {"predictions": PREDICTIONS, "grown_mib": round(grown, 2)}
    assert np.array_equal(first, embed(model, row)), "the same input gives the same bytes"
    document.passes("predictions", "leak_mib")


def test_certification_of_the_lane(real: Bundle | None, bundle: Bundle, model: AneModel, document: Document) -> None:
    """The whole path: host, worker process, fixtures, placement, packed widths; needs the real model's fixtures."""
    if real is None:
        pytest.skip("MiniLM is not installed: `synapse models install minilm`, then run again for a certificate")
    from synapse_host import certificates, gates
    from synapse_host import evidence as documents
    from synapse_host.certification import Order, certify
    from synapse_host.matrix import load as load_matrix

    assert sys.platform == "darwin"
    model.close()  # the worker process gets the engine for itself
    order = Order(lane="embed", model="minilm", bundle=bundle.root, engine="ane")
    evidence = asyncio.run(certify(order, load_matrix(None)))
    path = EVIDENCE / f"embed-ane-minilm-{bundle.digest[:8]}.json"
    digest = documents.write(path, evidence)
    if evidence.verdict == "certified":
        certificates.write(certificates.of_evidence(evidence, path=path.absolute(), digest=digest))
    document.data["certification"] = {
        "verdict": evidence.verdict,
        "reasons": evidence.reasons,
        "packed_widths": gates.qualified_widths(evidence),
        "cost_ms": evidence.cost_ms,
        "evidence": path.name,
    }
    document.passes("certified")
