"""What the Core ML hardware runs measure of the binding's calls, whatever the compute units: the GIL and memory."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from engines.ane.backend import Source
from engines.ane.binding import compile_package
from engines.ane.coreml import CoreML
from engines.runtime.batch import TokenBatch

TICK_S = 0.005


def rows(lengths: list[int], vocab: int, seed: int = 1) -> list[np.ndarray]:
    """Return rows of random ids, above the special ones of every vocabulary here."""
    rng = np.random.default_rng(seed)
    return [rng.integers(min(1000, vocab // 2), vocab, n).astype(np.int32) for n in lengths]


def batch(found: list[np.ndarray]) -> TokenBatch:
    """Return rows as a worker's loop hands them on."""
    return TokenBatch(np.concatenate(found), np.cumsum([0, *map(len, found)]).astype(np.int32))


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the cosine of each pair of rows, in float64."""
    wide = a.astype(np.float64), b.astype(np.float64)
    return (wide[0] * wide[1]).sum(-1) / np.linalg.norm(wide[0], axis=-1) / np.linalg.norm(wide[1], axis=-1)


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


def gil(
    backend: CoreML, package: Path, source: Source, feeds: Mapping[str, Any], *, units: str, predictions: int = 200
) -> dict[str, tuple[float, float]]:
    """Make every call of the binding once; return (seconds it took, longest silence of another thread) by name."""
    found: dict[str, tuple[float, float]] = {}

    def watch(name: str, work: Callable[[], Any]) -> Any:
        result, *found[name] = watched(work)  # type: ignore[assignment]
        return result

    compiled = watch("compile", lambda: compile_package(package))
    shutil.rmtree(compiled, ignore_errors=True)
    handle = watch("load", lambda: backend.open(source, units=units))
    watch("signature", handle.signature)
    watch("plan", handle.plan)
    watch("predict", lambda: [handle.run(feeds) for _ in range(predictions)])
    watch("close", handle.close)
    return found


def grown_mib(run: Callable[[], Any], predictions: int, warm_up: int = 500) -> float:
    """Return by how many MiB this process grows over so many runs, after a warm-up."""
    for _ in range(warm_up):
        run()
    process = psutil.Process()
    before = process.memory_info().rss
    for _ in range(predictions):
        run()
    return float(process.memory_info().rss - before) / 2**20
