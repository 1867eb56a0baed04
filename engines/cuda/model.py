"""One loaded model: checks a request against the manifest, plans it, runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engines.cuda.buckets import Policy, plan
from engines.cuda.pipeline import Pipeline
from engines.cuda.staging import Filler
from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import Pooling
from engines.runtime.engine import Model

if TYPE_CHECKING:
    from engines.cuda.devices import CpuDevice, CudaDevice
    from engines.runtime.batch import FloatArray, TokenBatch
    from engines.runtime.progress import ProgressReporter

MAX_TOKENS = 8192
"""Longest row of any model (llama-cuda.md 6.2, ``admission.max_context_tokens``)."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a request is checked against. ``vocab``: ids are below it; ``separator``: only where token types matter."""

    task: str
    dims: int
    max_tokens: int
    vocab: int
    pad_id: int
    pooling: str | None = None
    normalize: bool | None = None
    separator: int | None = None


class OwnedModel(Model):
    """An embedder or reranker on either device. Pooling, normalisation and head are the manifest's, not a request's."""

    def __init__(self, facts: Facts, policy: Policy, device: CpuDevice | CudaDevice) -> None:
        self.facts, self.policy, self.device = facts, policy, device
        self.dims = facts.dims
        self.buckets = policy.ladder
        self._pipeline = Pipeline(device)

    def embed(
        self, batch: TokenBatch, *,
        pooling: Pooling, normalize: bool, packed_width: int | None, progress: ProgressReporter,
    ) -> FloatArray:  # fmt: skip
        """Return float32 (rows, dims), request order; a request that contradicts the manifest is refused."""
        if self.facts.task != "embed":
            self._mismatch("embed")
        if pooling.value != self.facts.pooling or normalize != self.facts.normalize:
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"pooling {pooling.value} and normalize {str(normalize).lower()} contradict the bundle's manifest: "
                f"{self.facts.pooling} and {str(self.facts.normalize).lower()}, which the graph was built for",
            )
        return self.forward(batch, progress)

    def rerank_sequences(self, batch: TokenBatch, *, progress: ProgressReporter) -> FloatArray:
        """Return raw logits, float32 (rows,), request order."""
        if self.facts.task != "rerank":
            self._mismatch("rerank")
        return self.forward(batch, progress)[:, 0]

    def close(self) -> None:
        """Release device memory and threads; idempotent."""
        self._pipeline.close()
        self.device.close()

    def forward(self, batch: TokenBatch, progress: ProgressReporter) -> FloatArray:
        """Return float32 (rows, dims): vectors, or logits with dims 1."""
        self._check(batch)
        chosen = plan(batch.lengths, self.policy)
        filler = Filler(batch, chosen, pad_id=self.facts.pad_id, separator=self.facts.separator)
        out = np.empty((len(batch), self.dims), np.float32)
        self._pipeline.run(filler, out, progress)
        return out

    def _check(self, batch: TokenBatch) -> None:
        """Refuse what would index beyond a table, before anything is staged. Negative ids were refused on arrival."""
        lengths, limit = batch.lengths, self.facts.max_tokens
        if int(lengths.max()) > limit:
            row = int((lengths > limit).argmax())
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"sequence_too_long: row {row} has {int(lengths[row])} tokens, at most {limit}",
            )
        ids = batch.input_ids
        if int(ids.max()) >= self.facts.vocab:
            place = int((ids >= self.facts.vocab).argmax())
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"token {place} has id {int(ids[place])}, the vocabulary ends at {self.facts.vocab - 1}",
            )
