"""What the Core ML hardware runs share, whatever the compute units: a prepared bundle, and what the binding's calls
cost: the GIL and memory."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from engines.ane.artifact import sources
from engines.ane.backend import Source
from engines.ane.binding import compile_package
from engines.ane.coreml import CoreML
from engines.ane.engine import AneEngine
from engines.ane.model import AneModel
from engines.ane.signature import FunctionSpec
from engines.bundle import preparation
from engines.bundle.manifest import Artifact, Bundle
from engines.protocol.messages import Load, Pooling
from engines.runtime.engine import WorkerOptions
from engines.runtime.progress import silent
from synapse_host.residency import plan as rungs
from tests.support.rows import batch_of

TICK_S = 0.005
PREDICTIONS, WARM_UP, GIL_PREDICTIONS = 10_000, 500, 200
GIL_GAP_S, LEAK_MIB = 0.25, 64.0


@dataclass(frozen=True)
class Prepared:
    """A bundle, where its Core ML artifact was prepared, and the record of that."""

    bundle: Bundle
    folder: Path
    record: preparation.Preparation

    @property
    def artifact(self) -> Artifact:
        return self.bundle.artifacts("coreml")[0]

    @property
    def names(self) -> dict[str, int]:
        """The functions and their tokens, buckets first: packed ones exist for embedders only."""
        found = [
            (not one.bucket, one.bucket or one.packed_width or 0, one.name) for one in self.artifact.functions or ()
        ]
        return {name: tokens for _, tokens, name in sorted(found)}

    def functions(self) -> dict[str, tuple[Source, FunctionSpec]]:
        """Return where each compiled function lies, and its signature."""
        return sources(self.folder, self.names, self.record)

    def engine(self) -> AneEngine:
        """Return an engine of this bundle, all its packed widths qualified."""
        widths = rungs.packed_widths(self.artifact)
        return AneEngine(WorkerOptions(device="ane", manifest=self.bundle.path("manifest.json"), packed=widths))

    def load(self, **config: str) -> AneModel:
        """Load the model; its smallest bucket is resident."""
        request = Load("hw", str(self.folder), self.record.compiled_digest, "mlmodelc", config)
        found = self.engine().load(request, progress=silent())
        assert isinstance(found, AneModel)
        return found


def rows(lengths: list[int], vocab: int, seed: int = 1) -> list[np.ndarray]:
    """Return rows of random ids, above the special ones of every vocabulary here."""
    rng = np.random.default_rng(seed)
    return [rng.integers(min(1000, vocab // 2), vocab, n).astype(np.int32) for n in lengths]


def run(model: AneModel, found: list[np.ndarray], width: int | None = None) -> np.ndarray:
    """Return the vectors or the scores of some rows."""
    if model.dims == 1:
        return model.rerank_sequences(batch_of(found), progress=silent())
    return model.embed(batch_of(found), pooling=Pooling.MEAN, normalize=True, packed_width=width, progress=silent())


def watched(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """Return what *work* returns, its seconds, and the longest that another thread waited for its tick meanwhile."""
    stop, worst = threading.Event(), [0.0]

    def tick() -> None:
        last = time.perf_counter()
        while not stop.is_set():
            time.sleep(TICK_S)
            now = time.perf_counter()
            worst[0] = max(worst[0], now - last)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    started = time.perf_counter()
    try:
        result = work()
    finally:
        took = time.perf_counter() - started
        stop.set()
        thread.join()
    return result, took, worst[0]


def gil(package: Path, source: Source, feeds: Mapping[str, Any], *, units: str) -> dict[str, tuple[float, float]]:
    """Make every call of the binding once; return (seconds it took, longest silence of another thread) by name."""
    found: dict[str, tuple[float, float]] = {}

    def watch(name: str, work: Callable[[], Any]) -> Any:
        result, *found[name] = watched(work)  # type: ignore[assignment]
        return result

    compiled = watch("compile", lambda: compile_package(package))
    shutil.rmtree(compiled, ignore_errors=True)
    handle = watch("load", lambda: CoreML().open(source, units=units))
    watch("signature", handle.signature)
    watch("plan", handle.plan)
    watch("predict", lambda: [handle.run(feeds) for _ in range(GIL_PREDICTIONS)])
    watch("close", handle.close)
    return found


def grown_mib(model: AneModel, found: list[np.ndarray]) -> float:
    """Return by how many MiB this process grows over :data:`PREDICTIONS` of the same rows, after a warm-up."""
    for _ in range(WARM_UP):
        run(model, found)
    process = psutil.Process()
    before = process.memory_info().rss
    for _ in range(PREDICTIONS):
        run(model, found)
    return float(process.memory_info().rss - before) / 2**20
