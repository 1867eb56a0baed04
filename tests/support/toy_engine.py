"""Engines that do as they are told, for tests of dispatch and worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from engines.protocol.messages import (
    ANE_ENGINE,
    AneAdmitPacked,
    AneAdmitShape,
    AneEvictPacked,
    AneEvictShape,
    Executable,
    FinishReason,
    Inventory,
    Load,
    PackedCapability,
    Request,
)
from engines.runtime.batch import Generation
from engines.runtime.engine import OWNED_SERVING, SEGMENT_SERVING, Engine, EngineIdentity, Model, ModelStatus, Probe
from engines.runtime.progress import ProgressReporter

Hook = Callable[..., Any]
ALL_SERVING: frozenset[type[Request]] = (
    SEGMENT_SERVING | OWNED_SERVING | {AneAdmitShape, AneEvictShape, AneAdmitPacked, AneEvictPacked}
)


class ToyModel(Model):
    """Sums ids. ``hook`` runs inside every serving call and may raise, report progress or replace the output."""

    def __init__(self, engine: ToyEngine) -> None:
        self.dims = engine.dims
        self.buckets = engine.buckets
        self.engine = engine
        self.closed = 0

    def _out(self, name: str, default: Any, progress: ProgressReporter, **details: Any) -> Any:
        self.engine.calls.append((name, details))
        if self.engine.hook is None:
            return default
        replaced = self.engine.hook(name=name, default=default, progress=progress, **details)
        return default if replaced is None else replaced

    def embed(self, batch, *, pooling, normalize, packed_width, progress):  # type: ignore[no-untyped-def]
        out = np.zeros((len(batch), self.dims), np.float32)
        out[:, 0] = [row.sum() for row in batch.rows()]
        return self._out("embed", out, progress, pooling=pooling, normalize=normalize, packed_width=packed_width)

    def rerank(self, pairs, *, progress):  # type: ignore[no-untyped-def]
        out = np.array([row.sum() + 1000 * pairs.query_ids.sum() for row in pairs.candidates.rows()], np.float32)
        return self._out("rerank", out, progress)

    def rerank_sequences(self, batch, *, progress):  # type: ignore[no-untyped-def]
        return self._out("rerank_sequences", np.array([row.sum() for row in batch.rows()], np.float32), progress)

    def generate(self, input_ids, *, max_tokens, progress):  # type: ignore[no-untyped-def]
        result = Generation("x" * max_tokens, len(input_ids), max_tokens, FinishReason.LENGTH, (1,) * max_tokens)
        return self._out("generate", result, progress)

    def admit_shape(self, shape: int, *, progress: ProgressReporter) -> Inventory:
        return Inventory([Executable(f"s{shape}", [0])], [])

    def evict_shape(self, shape: int, *, progress: ProgressReporter) -> None:
        pass

    def admit_packed(self, width: int, *, progress: ProgressReporter) -> Inventory:
        return Inventory([Executable(f"p{width}", [0])], [])

    def evict_packed(self, width: int, *, progress: ProgressReporter) -> None:
        pass

    def status(self) -> ModelStatus:
        return self.engine.status

    def close(self) -> None:
        self.closed += 1


class ToyEngine(Engine):
    """One engine per test; everything is an attribute."""

    name = ANE_ENGINE
    serves = ALL_SERVING
    ref_prefix = "toy"

    def __init__(self, *, dims: int = 4, packed: tuple[int, ...] | None = None) -> None:
        self.dims = dims
        self.buckets: tuple[int, ...] = ()
        self.packed = packed
        self.hook: Hook | None = None
        self.on_load: Callable[[Load, ProgressReporter], None] | None = None
        self.status = ModelStatus()
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.models: list[ToyModel] = []
        self.closed = 0

    def identity(self) -> EngineIdentity:
        packed = None if self.packed is None else PackedCapability("tight-v1", list(self.packed), 64)
        return EngineIdentity(engine=self.name, version="1", packed=packed)

    def probe_floor(self) -> Probe:
        return Probe(status="ok", code="ok", required={}, observed={})

    def load(self, request: Load, *, progress: ProgressReporter) -> Model:
        if self.on_load is not None:
            self.on_load(request, progress)
        model = ToyModel(self)
        self.models.append(model)
        return model

    def close(self) -> None:
        self.closed += 1
