"""A foreign worker that gives the scripted answers, honestly or with one fault; put behind a host by the matrix.

    python -m tests.support.foreign MODE --socket PATH --nonce HEX16 ...

MODE: ``honest``, a name of ``BENDS``, ``crash`` (dies at its hundredth request), ``device`` (says at the handshake that
it runs on a GPU), ``short`` (fails at rows of 24 tokens and more), ``mute`` (generates nothing) or ``same token``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np

from engines.protocol.errors import EngineError, ErrorCode
from engines.runtime import main as runtime_main
from engines.runtime.batch import Generation
from engines.runtime.engine import Engine, Model, WorkerOptions
from engines.runtime.progress import ProgressReporter
from tests.support.scripted import ScriptedModel, expected_score, scripted_engine

UNLUCKY = 13
DIMS = 32


def _poisoned(out: Any) -> Any:
    bad = out.copy()
    bad[0] = np.nan
    return bad


def _late(model: ForeignModel, out: Any) -> Any:
    """Return what the same place of the request before was answered."""
    before, model.before = model.before, out
    return before if before is not None and before.shape == out.shape else out


BENDS: Final[dict[str, Callable[[Any, Any, list[list[int]]], Any]]] = {
    "shuffle": lambda model, out, rows: np.roll(out, 1, axis=0),
    "shuffle in bulk": lambda model, out, rows: np.roll(out, 1, axis=0) if len(rows) > 32 else out,
    # A NaN in rows that begin with UNLUCKY; in company only; in bulk only; once, in the sixth request.
    "nan": lambda model, out, rows: np.where(np.array([row[0] for row in rows]) == UNLUCKY, np.nan, out.T).T,
    "nan in company": lambda model, out, rows: _poisoned(out) if len(rows) > 2 else out,
    "nan in bulk": lambda model, out, rows: _poisoned(out) if len(rows) > 32 else out,
    "nan once": lambda model, out, rows: _poisoned(out) if model.count == 6 else out,
    "neighbours": lambda model, out, rows: out + 0.2 * np.roll(out, 1, axis=0) if len(rows) > 1 else out,
    "restless": lambda model, out, rows: out * np.float32(1 + model.count * 1e-6),
    "late": lambda model, out, rows: _late(model, out),
    "zeros": lambda model, out, rows: out * 0,
    "double batches": lambda model, out, rows: out * 2 if len(rows) > 1 else out,
    "same answer": lambda model, out, rows: np.full_like(out, 0.5),
    "doubled": lambda model, out, rows: out * 2,
}
"""What becomes of a right answer, by mode: ``(model, answers, ids of the rows)``."""


class ForeignModel(ScriptedModel):
    """Scripted answers, bent. ``count``: requests so far; ``before``: the answer of the last."""

    def __init__(self, mode: str) -> None:
        super().__init__({"dims": DIMS})
        self._mode = mode
        self.count = 0
        self.before: Any = None

    def embed(self, batch, *, pooling, normalize, packed_width, progress):  # type: ignore[no-untyped-def]
        out = super().embed(batch, pooling=pooling, normalize=normalize, packed_width=packed_width, progress=progress)
        return self._bent(out, [row.tolist() for row in batch.rows()])

    def rerank(self, pairs, *, progress):  # type: ignore[no-untyped-def]
        query = pairs.query_ids.tolist()
        rows = [row.tolist() for row in pairs.candidates.rows()]
        scores = np.array([expected_score(query, row) for row in rows], np.float32)
        return self._bent(scores, rows)

    def generate(self, input_ids, *, max_tokens, progress):  # type: ignore[no-untyped-def]
        made = super().generate(input_ids, max_tokens=max_tokens, progress=progress)
        if self._mode == "mute":
            return Generation("", made.n_prompt, 0, made.finish_reason, ())
        if self._mode == "same token":
            return Generation("7", made.n_prompt, 1, made.finish_reason, (7,))
        return made

    def _bent(self, out: Any, rows: list[list[int]]) -> Any:
        self.count += 1
        if self._mode == "crash" and self.count == 100:
            os.abort()
        if self._mode == "short" and max(map(len, rows)) >= 24:
            raise EngineError(ErrorCode.INFERENCE_FAILED, "no kernel for 24 tokens and more")
        bend = BENDS.get(self._mode)
        return np.ascontiguousarray(bend(self, out, rows) if bend else out, np.float32)


def factory(mode: str, options: WorkerOptions) -> Engine:
    """Return the scripted engine that loads a bent model."""
    engine = scripted_engine({"dims": DIMS}, options)
    said = engine.identity()

    def load(request: Any, *, progress: ProgressReporter) -> Model:
        return ForeignModel(mode)

    engine.load = load  # type: ignore[method-assign]
    if mode == "device":
        said = msgspec.structs.replace(said, build_flags={**said.build_flags, "device": "cuda", "backend": "cuda"})
        engine.identity = lambda: said  # type: ignore[method-assign]
    return engine


if __name__ == "__main__":
    sys.exit(runtime_main.run(lambda options: factory(sys.argv[1], options), sys.argv[2:], program="foreign-worker"))
