"""A foreign worker that gives the scripted answers, honestly or with one fault; put behind a host by the matrix.

    python tests/support/foreign.py MODE --socket PATH --nonce HEX16 ...

MODE: ``honest``, ``shuffle`` (the rows of a batch change places), ``nan`` (rows that begin with id 13 hold a NaN),
``neighbours`` (a row's answer depends on the row before it), ``restless`` (no two answers are the same bits),
``crash`` (dies at its hundredth request).
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

from engines.runtime import main as runtime_main
from engines.runtime.engine import Engine, Model, WorkerOptions
from engines.runtime.progress import ProgressReporter
from tests.support.scripted import ScriptedModel, expected_score, scripted_engine

UNLUCKY = 13
DIMS = 32


def command(mode: str) -> list[str]:
    """Return the ``worker.command`` of a mode; run in the repository's root."""
    return [sys.executable, "-m", "tests.support.foreign", mode]


class ForeignModel(ScriptedModel):
    """Scripted answers, bent."""

    def __init__(self, mode: str) -> None:
        super().__init__({"dims": DIMS})
        self._mode = mode
        self._count = 0

    def embed(self, batch, *, pooling, normalize, packed_width, progress):  # type: ignore[no-untyped-def]
        out = super().embed(batch, pooling=pooling, normalize=normalize, packed_width=packed_width, progress=progress)
        return self._bent(out, [row.tolist() for row in batch.rows()])

    def rerank(self, pairs, *, progress):  # type: ignore[no-untyped-def]
        query = pairs.query_ids.tolist()
        rows = [row.tolist() for row in pairs.candidates.rows()]
        scores = np.array([expected_score(query, row) for row in rows], np.float32)
        return self._bent(scores, rows)

    def _bent(self, out: Any, rows: list[list[int]]) -> Any:
        self._count += 1
        if self._mode == "crash" and self._count == 100:
            os.abort()
        if self._mode == "shuffle":
            return np.ascontiguousarray(np.roll(out, 1, axis=0))
        if self._mode == "nan":
            for number, row in enumerate(rows):
                if row[0] == UNLUCKY:
                    out[number] = np.nan
        if self._mode == "neighbours" and len(rows) > 1:
            out = out + 0.2 * np.roll(out, 1, axis=0)
        if self._mode == "restless":
            out = out * np.float32(1 + self._count * 1e-6)
        return out.astype(np.float32)


def factory(mode: str, options: WorkerOptions) -> Engine:
    """Return the scripted engine that loads a bent model."""
    engine = scripted_engine({"dims": DIMS}, options)

    def load(request: Any, *, progress: ProgressReporter) -> Model:
        return ForeignModel(mode)

    engine.load = load  # type: ignore[method-assign]
    return engine


if __name__ == "__main__":
    runtime_main_argv = sys.argv[2:]
    sys.exit(
        runtime_main.run(lambda options: factory(sys.argv[1], options), runtime_main_argv, program="foreign-worker")
    )
