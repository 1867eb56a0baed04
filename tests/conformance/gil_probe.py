"""Run in a child: one long embedding while another Python thread counts. Prints one JSON line.

    python tests/conformance/gil_probe.py '{"factory": "package.module:Class", "device": .., "path": .., ...}'

``ticks`` is how often the other thread got to run during the call, ``longest_gap_s`` the longest time it could not.
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from engines.protocol.messages import Load, Pooling
from engines.runtime.batch import TokenBatch
from engines.runtime.engine import WorkerOptions
from engines.runtime.progress import silent


def main(task: dict[str, Any]) -> None:
    """Load, then embed under observation."""
    module, _, name = task["factory"].partition(":")
    options = WorkerOptions(device=task["device"], manifest=Path(task["manifest"]) if task["manifest"] else None)
    engine = getattr(importlib.import_module(module), name)(options)
    request = Load(
        req_id="load",
        artifact_path=task["path"],
        artifact_digest=task["digest"],
        format=task["format"],
        runtime_config=task["config"],
    )
    model = engine.load(request, progress=silent())
    rows, length = task["rows"], task["length"]
    ids = np.random.default_rng(0).integers(5, task["vocab"], rows * length).astype(np.int32)
    batch = TokenBatch(ids, np.arange(0, rows * length + 1, length, dtype=np.int32))

    def embed(part: TokenBatch) -> None:
        model.embed(part, pooling=Pooling.MEAN, normalize=True, packed_width=None, progress=silent())

    embed(TokenBatch(ids[:length], batch.cu_seqlens[:2]))  # whatever is set up once is set up now
    woken, done = [], threading.Event()

    def tick() -> None:
        while not done.wait(0.001):
            woken.append(time.perf_counter())

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    started = time.perf_counter()
    embed(batch)
    ended = time.perf_counter()
    done.set()
    ticker.join()
    at = [started, *(t for t in woken if started <= t <= ended), ended]
    gaps = [later - earlier for earlier, later in itertools.pairwise(at)]
    model.close()
    engine.close()
    print(json.dumps({"call_s": ended - started, "ticks": len(at) - 2, "longest_gap_s": max(gaps)}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
