"""One loaded model: checks a request against the manifest, plans it, runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engines.cuda.buckets import Policy, plan
from engines.cuda.pipeline import Run
from engines.cuda.staging import Filler
from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import Pooling
from engines.runtime.batch import check_lengths, check_vocabulary
from engines.runtime.engine import Model

if TYPE_CHECKING:
    from engines.cuda.devices import CpuDevice, CudaDevice
    from engines.cuda.graphs.builder import ModelSpec
    from engines.runtime.batch import FloatArray, TokenBatch
    from engines.runtime.progress import ProgressReporter


class OwnedModel(Model):
    """An embedder or reranker on either device. Pooling, normalisation and head are the manifest's, not a request's."""

    def __init__(self, spec: ModelSpec, policy: Policy, device: CpuDevice | CudaDevice) -> None:
        self.spec, self.policy, self.device = spec, policy, device
        self.dims = spec.dims
        self.buckets = policy.ladder

    def embed(
        self, batch: TokenBatch, *,
        pooling: Pooling, normalize: bool, packed_width: int | None, progress: ProgressReporter,
    ) -> FloatArray:  # fmt: skip
        """Return float32 (rows, dims), request order; a request that contradicts the manifest is refused."""
        spec = self.spec
        if spec.task != "embed":
            self._mismatch("embed")
        if (pooling.value, normalize) != (spec.pooling, spec.normalize):
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"pooling {pooling.value} and normalize {str(normalize).lower()} contradict the bundle's manifest: "
                f"{spec.pooling} and {str(spec.normalize).lower()}, which the graph was built for",
            )
        return self.forward(batch, progress)

    def rerank_sequences(self, batch: TokenBatch, *, progress: ProgressReporter) -> FloatArray:
        """Return raw logits, float32 (rows,), request order."""
        if self.spec.task != "rerank":
            self._mismatch("rerank")
        return self.forward(batch, progress)[:, 0]

    def close(self) -> None:
        """Release device memory and threads; idempotent."""
        self.device.close()

    def forward(self, batch: TokenBatch, progress: ProgressReporter) -> FloatArray:
        """Return float32 (rows, dims): vectors, or logits with dims 1."""
        check_lengths(batch, limit=self.spec.max_tokens, what="row")
        check_vocabulary(batch.input_ids, self.spec.config["vocab_size"])
        chosen = plan(batch.lengths, self.policy)
        filler = Filler(batch, chosen, pad_id=self.spec.pad_id, separator=self.spec.separator)
        out = np.empty((len(batch), self.dims), np.float32)
        Run(self.device, filler, out, progress).all()
        return out
