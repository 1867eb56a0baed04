"""The hardware run of the Core ML engine: `make hw-ane` on a Mac. Nothing here has run anywhere until evidence/ says
so.

It builds MiniLM (or a seeded model of its size), prepares it, and measures through the production binding: parity,
placement, packing qualification, residency limits, speed-up over the CPU alone, load and compile times, GIL release,
leaks over 10,000 predictions, and coremltools' second opinion on the plan. One document, evidence/ane-<chip>-<os
build>.json, holds every input, threshold and number; a failed gate is written down, too, and then fails the run.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from engines.ane import REVISION, inputs, placement
from engines.ane.artifact import sources
from engines.ane.backend import HINTS, Source
from engines.ane.compute_plan import from_coremltools
from engines.ane.coreml import CoreML
from engines.ane.engine import AneEngine
from engines.ane.floor import os_build
from engines.ane.inputs import InputRules
from engines.ane.model import AneModel
from engines.ane.prepare import prepare
from engines.bundle import preparation
from engines.bundle.checkpoint import Checkpoint
from engines.bundle.manifest import Bundle
from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import Load, Pooling
from engines.runtime.batch import TokenBatch
from engines.runtime.engine import WorkerOptions
from engines.runtime.progress import silent
from tests.support import toy_models
from tests.support.ane_bundle import packed, shape, write_bundle

pytestmark = [pytest.mark.ane, pytest.mark.timeout(3600)]

EVIDENCE = Path(__file__).parents[2] / "evidence"
THRESHOLDS = {
    "min_cosine": 0.999,
    "packed_cosine": 0.9999,
    "neighbour_leak": 1e-3,
    "share": 0.90,
    "cost_share": 0.98,
    "speedup": 1.5,
    "leak_mib": 64.0,
    "gil_gap_s": 0.25,
}
BUCKETS, WIDTHS = (128, 256, 512), (128, 256)
PREDICTIONS = 10_000
GATES = frozenset(
    {"min_cosine", "share", "cost_share", "placement_reported", "packed_cosine", "neighbour_leak", "speedup"}
    | {"gil_gap", "share_after_evictions", "leak_mib"}
)
"""A document that lacks one of these can't say 'pass': a test that was left out proves nothing."""


def sysctl(name: str) -> str:
    found = subprocess.run(["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, check=False)
    return found.stdout.strip()


class Document:
    """The evidence, filled test by test and written at the end whatever happened."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {
            "schema": "ane-hardware-v1",
            "graph_revision": REVISION,
            "thresholds": THRESHOLDS,
            "configuration": {"units": "cpu_and_ne", "hints": HINTS},
            "machine": {
                "chip": sysctl("machdep.cpu.brand_string"),
                "model": sysctl("hw.model"),
                "os": platform.mac_ver()[0],
                "os_build": os_build(),
                "memory_gib": round(psutil.virtual_memory().total / 2**30),
            },
            "gates": [],
        }

    def gate(self, name: str, value: float | None, passed: bool, threshold: float | None = None) -> None:
        self.data["gates"].append({"name": name, "value": value, "threshold": threshold, "passed": bool(passed)})
        assert passed, f"{name}: {value} (threshold {threshold})"

    def write(self) -> Path:
        EVIDENCE.mkdir(exist_ok=True)
        chip = "".join(c if c.isalnum() else "-" for c in self.data["machine"]["chip"].lower()).strip("-") or "mac"
        path = EVIDENCE / f"ane-{chip}-{self.data['machine']['os_build']}.json"
        gates = self.data["gates"]
        verdict = all(gate["passed"] for gate in gates) and {gate["name"] for gate in gates} == GATES
        path.write_text(json.dumps({**self.data, "verdict": "pass" if verdict else "fail"}, indent=1) + "\n")
        return path


@pytest.fixture(scope="module")
def document() -> Iterator[Document]:
    found = Document()
    yield found
    print(f"\nevidence: {found.write()}")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, document: Document) -> Bundle:
    """MiniLM's real weights where they are installed, else seeded weights of its size."""
    from engines.bundle import manifest
    from synapse_host import catalogue

    folder = catalogue.installed().get("minilm")
    packages = [] if folder is None else manifest.read(folder).artifacts("safetensors-package")
    if folder is not None and packages:
        source = manifest.read(folder)
        checkpoint = Checkpoint.from_package(
            source.path(packages[0].path),
            config=source.manifest.config,  # type: ignore[arg-type]
            family=source.manifest.family,
            task=source.manifest.task,
        )
    else:
        out = tmp_path_factory.mktemp("minilm-like")
        size = {"layers": 6, "hidden": 384, "heads": 12, "ffn": 1536, "vocab": 30522, "max_positions": 512}
        checkpoint = Checkpoint.open(toy_models.write_bert(out, **size))
    document.data["weights"] = "minilm" if packages else "seeded"
    started = time.monotonic()
    built = write_bundle(
        checkpoint, tmp_path_factory.mktemp("ane") / "bundle", shape(*BUCKETS) + packed(*WIDTHS), model_id="minilm"
    )
    document.data["build_s"] = round(time.monotonic() - started, 2)
    document.data["manifest_digest"] = built.digest
    return built


@pytest.fixture(scope="module")
def prepared(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory, document: Document) -> tuple[Path, Any]:
    """Compile to a stable path and pay the first loads; times go into the document."""
    cache = tmp_path_factory.mktemp("cache")
    started = time.monotonic()
    result = prepare(bundle.root, cache)
    document.data["prepare_s"] = round(time.monotonic() - started, 2)
    document.data["first_load_ms"] = result["prepared"][0]["first_load_ms"]
    return preparation.find(cache, bundle.artifacts("coreml")[0].digest)


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
    started = time.monotonic()
    found = load(bundle, prepared)
    document.data["warm_load_ms"] = round((time.monotonic() - started) * 1000, 1)
    yield found
    found.close()


def rows(lengths: list[int], seed: int = 1) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1000, 30000, n).astype(np.int32) for n in lengths]


def batch(found: list[np.ndarray]) -> TokenBatch:
    return TokenBatch(np.concatenate(found), np.cumsum([0, *map(len, found)]).astype(np.int32))


def embed(model: AneModel, found: list[np.ndarray], width: int | None = None) -> np.ndarray:
    return model.embed(batch(found), pooling=Pooling.MEAN, normalize=True, packed_width=width, progress=silent())


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a.astype(np.float64) * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


def test_parity_with_the_reference_on_every_bucket(model: AneModel, bundle: Bundle, document: Document) -> None:
    """Against the evaluator, which the ordinary tests hold to transformers; MiniLM also against its own goldens."""
    from tests.support.mil_reference import ReferenceBackend

    worst: dict[str, float] = {}
    reference = ReferenceBackend()
    package = bundle.root / "model.mlpackage"
    rules = InputRules(vocab=30522)
    for bucket in BUCKETS:
        model.admit_shape(bucket, progress=silent())
        program = reference.open(Source(package, f"s{bucket}", True), units="cpu_and_ne")
        found = rows([1, 2, bucket // 2, bucket - 1, bucket], seed=bucket)
        if bucket > BUCKETS[0]:
            found = [row for row in found if len(row) > bucket // 2]  # shorter ones run on a smaller rung
        expected = []
        for row in found:
            states = program.run(inputs.single(row, bucket, rules))["last_hidden_state"][0, : len(row)]
            mean = states.astype(np.float64).mean(0)
            expected.append(mean / np.linalg.norm(mean))
        worst[f"s{bucket}"] = float(cosines(embed(model, found), np.array(expected)).min())
        program.close()
        if bucket != BUCKETS[0]:
            model.evict_shape(bucket, progress=silent())
    document.data["parity_min_cosine"] = worst
    if document.data["weights"] == "minilm":
        from tests.ane.make_goldens import GOLDENS
        from tests.ane.make_goldens import rows as golden_rows

        got = embed(model, [row.astype(np.int32) for row in golden_rows("minilm")])
        worst["goldens"] = float(cosines(got, np.load(GOLDENS)["minilm"]).min())
    document.gate("min_cosine", min(worst.values()), min(worst.values()) >= THRESHOLDS["min_cosine"], 0.999)


def test_placement_of_every_function(model: AneModel, prepared: tuple[Path, Any], document: Document) -> None:
    backend, record = CoreML(), prepared[1]
    names = [f"s{bucket}" for bucket in BUCKETS] + [f"packed{width}" for width in WIDTHS]
    table: dict[str, Any] = {}
    for name, (source, _) in sources(prepared[0], names, backend, record).items():
        handle = backend.open(source, units="cpu_and_ne")
        started = time.monotonic()
        plan = handle.plan()
        plan_ms = (time.monotonic() - started) * 1000
        handle.close()
        wanted = source.function if source.multi else None
        row = None if plan is None else placement.table(plan, wanted)
        table[name] = None if row is None else {**row.to_json(), "plan_ms": round(plan_ms, 1)}
        if plan is not None:
            table[name]["cpu_stages"] = placement.cpu_stages(plan, wanted)
            table[name]["recorded_plan"] = plan.to_json()
    document.data["placement"] = table
    share = placement.worst(None if row is None else row["share"] for row in table.values())
    document.gate("share", share, share is not None and share >= THRESHOLDS["share"], THRESHOLDS["share"])
    cost = placement.worst(None if row is None else row["cost_share"] for row in table.values())
    document.gate("cost_share", cost, cost is not None and cost >= THRESHOLDS["cost_share"], THRESHOLDS["cost_share"])
    reported = not any(row is None or row["unreported"] for row in table.values())
    document.gate("placement_reported", float(reported), reported)


def test_coremltools_second_opinion_on_the_default_function(prepared: tuple[Path, Any], document: Document) -> None:
    """coremltools plans the default function only; both bindings must count the same operations there."""
    import coremltools as ct

    path = next(prepared[0].glob("*.mlmodelc"))
    plan = ct.models.compute_plan.MLComputePlan.load_from_path(path=str(path), compute_units=ct.ComputeUnit.CPU_AND_NE)
    theirs = placement.share(from_coremltools(plan), f"s{BUCKETS[0]}")
    ours = document.data.get("placement", {}).get(f"s{BUCKETS[0]}", {}).get("share")
    document.data["coremltools_share"] = theirs
    assert theirs is not None and (ours is None or abs(theirs - ours) < 0.02)


def test_packing_qualifies(model: AneModel, document: Document) -> None:
    """At least 64 rows in 8 length mixes: alone against packed, neighbours, first and last place."""
    report: dict[str, Any] = {}
    for width in WIDTHS:
        model.admit_packed(width, progress=silent())
        mixes = [
            [width // 4] * 4, [width // 8] * 8, [width - 9, 9], [1] * 16, [width // 2, width // 3, 5],
            [3, width // 2, 4, width // 3], [width // 5] * 5, [width // 16] * 16, [7, 11, 13, 17, 19], [9] * 3,
        ]  # fmt: skip
        cosine, leak, count = 1.0, 0.0, 0
        for seed, lengths in enumerate(mixes):
            found = rows([min(n, BUCKETS[0]) for n in lengths], seed=seed)
            together = embed(model, found, width)
            alone = np.concatenate([embed(model, [row], width) for row in found])
            single = embed(model, found)
            cosine = min(cosine, float(cosines(together, single).min()))
            leak = max(leak, float(np.abs(together - alone).max()))
            backwards = embed(model, found[::-1], width)[::-1]
            leak = max(leak, float(np.abs(together - backwards).max()))
            count += len(found)
        report[f"packed{width}"] = {"rows": count, "mixes": len(mixes), "min_cosine": cosine, "max_difference": leak}
        model.evict_packed(width, progress=silent())
        assert count >= 64 and len(mixes) >= 8
    document.data["packing"] = report
    worst = min(entry["min_cosine"] for entry in report.values())
    document.gate("packed_cosine", worst, worst >= THRESHOLDS["packed_cosine"], THRESHOLDS["packed_cosine"])
    leak = max(entry["max_difference"] for entry in report.values())
    document.gate("neighbour_leak", leak, leak <= THRESHOLDS["neighbour_leak"], THRESHOLDS["neighbour_leak"])


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
    """The only behavioural proof that the Neural Engine really ran; also the cost table that the packer needs."""
    alone = load(bundle, prepared, compute_units="cpu_only")
    costs: dict[str, dict[str, float]] = {}
    try:
        for bucket in BUCKETS:
            for one in (model, alone):
                one.admit_shape(bucket, progress=silent())
            row = rows([bucket])
            costs[f"s{bucket}"] = {"ane_ms": timed(model, row), "cpu_ms": timed(alone, row)}
        for one in (model, alone):
            one.evict_shape(BUCKETS[2], progress=silent())
        for width in WIDTHS:
            model.admit_packed(width, progress=silent())
            costs[f"packed{width}"] = {"ane_ms": timed(model, rows([width // 4] * 4), width=width)}
            model.evict_packed(width, progress=silent())
    finally:
        alone.close()
    document.data["cost_ms"] = costs
    speedup = min(entry["cpu_ms"] / entry["ane_ms"] for entry in costs.values() if "cpu_ms" in entry)
    document.gate("speedup", speedup, speedup >= THRESHOLDS["speedup"], THRESHOLDS["speedup"])


def test_the_gil_is_released_during_load_and_prediction(
    model: AneModel, bundle: Bundle, prepared: tuple[Path, Any], document: Document
) -> None:
    gaps: dict[str, float] = {}

    def watch(name: str, work: Any) -> None:
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
        try:
            work()
        finally:
            stop.set()
            thread.join()
        gaps[name] = worst[0]

    watch("load_and_plan", lambda: load(bundle, prepared).close())
    watch("predict", lambda: [embed(model, rows([BUCKETS[0]])) for _ in range(200)])
    document.data["gil_longest_gap_s"] = gaps
    document.gate("gil_gap", max(gaps.values()), max(gaps.values()) <= THRESHOLDS["gil_gap_s"], THRESHOLDS["gil_gap_s"])


def test_residency_limits(model: AneModel, document: Document) -> None:
    for bucket in BUCKETS[1:]:
        model.admit_shape(bucket, progress=silent())
    model.admit_packed(WIDTHS[0], progress=silent())
    with pytest.raises(EngineError) as refused:
        model.admit_packed(WIDTHS[1], progress=silent())
    assert refused.value.code is ErrorCode.ANE_RESIDENCY_LIMIT
    cycle = []
    for _ in range(20):
        model.evict_shape(BUCKETS[2], progress=silent())
        started = time.perf_counter()
        model.admit_shape(BUCKETS[2], progress=silent())
        cycle.append((time.perf_counter() - started) * 1000)
    document.data["readmit_ms"] = {"median": statistics.median(cycle), "max": max(cycle)}
    for bucket in BUCKETS[1:]:
        model.evict_shape(bucket, progress=silent())
    model.evict_packed(WIDTHS[0], progress=silent())
    share = model.status().placement_share
    document.gate("share_after_evictions", share, share is not None and share >= THRESHOLDS["share"], 0.9)


def test_nothing_leaks_over_10_000_predictions(model: AneModel, document: Document) -> None:
    process, row = psutil.Process(), rows([BUCKETS[0] // 2])
    for _ in range(500):
        embed(model, row)
    before, first = process.memory_info().rss, embed(model, row)
    for _ in range(PREDICTIONS):
        embed(model, row)
    grown = (process.memory_info().rss - before) / 2**20
    document.data["leak_mib"] = grown
    assert np.array_equal(first, embed(model, row)), "the same input gives the same bytes"
    document.gate("leak_mib", grown, grown <= THRESHOLDS["leak_mib"], THRESHOLDS["leak_mib"])
