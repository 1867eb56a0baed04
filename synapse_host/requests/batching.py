"""Calls that share an exchange: which of those who wait go along, and which rows of the answer are whose. Pure.

The calls of a lane that wait while its worker is busy leave together in its next exchange: in order of arrival, as many
as are of one kind and fit, up to the first that doesn't. A lane that is free takes a call at once, alone. What happens
to an exchange of several calls is the supervisor's part: :mod:`synapse_host.supervision.supervisor`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgspec

from engines.protocol.messages import EmbedBatch, Item, Pooling, RerankSequences, Segment, Vectors
from synapse_host.requests.parts import buffer

if TYPE_CHECKING:
    from engines.protocol.messages import AnyReply
    from synapse_host.arrays import FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A build of EMBED_BATCH, or without *pooling* of RERANK_SEQUENCES, whose rows may share an exchange with others'.

    Each row stands for itself: its id is its number, counted from *first*.
    """

    lengths: Sequence[int]
    ids: IntArray
    pooling: Pooling | None = None
    normalize: bool = False
    first: int = 0

    def __call__(self, req_id: str, model_ref: str) -> tuple[EmbedBatch | RerankSequences, memoryview]:
        """Return the request and its ids."""
        if self.pooling is None:
            sequences = [Segment(n_tokens=length) for length in self.lengths]
            return RerankSequences(req_id=req_id, model_ref=model_ref, sequences=sequences), buffer(self.ids)
        items = [Item(id=str(row), n_tokens=length) for row, length in enumerate(self.lengths, self.first)]
        batch = EmbedBatch(
            req_id=req_id, model_ref=model_ref, pooling=self.pooling, normalize=self.normalize, items=items
        )
        return batch, buffer(self.ids)

    def fingerprint(self) -> bytes:
        """Return what identifies the call's content."""
        return hashlib.sha256(buffer(self.ids)).digest()

    def company(self, waiting: Sequence[Any], *, rows: int, tokens: int, alone: Container[bytes] = ()) -> int:
        """Return how many of the *waiting* builds, longest waiting first, go along.

        *rows* and *tokens*: what one exchange takes. *alone*: fingerprints of calls that share with nobody.
        """
        rows -= len(self.lengths)
        tokens -= len(self.ids)
        if alone and self.fingerprint() in alone:
            return 0
        for count, other in enumerate(waiting):
            alike = isinstance(other, Batch) and (other.pooling, other.normalize) == (self.pooling, self.normalize)
            if not alike or (alone and other.fingerprint() in alone):
                return count
            rows -= len(other.lengths)
            tokens -= len(other.ids)
            if rows < 0 or tokens < 0:
                return count
        return len(waiting)

    def joined(self, others: Sequence[Batch]) -> Batch:
        """Return the build of this call's rows and then those of *others*."""
        import numpy as np

        calls = (self, *others)
        lengths = [length for call in calls for length in call.lengths]
        return Batch(lengths, np.concatenate([call.ids for call in calls]), self.pooling, self.normalize)

    def shares(self, others: Sequence[Batch], reply: AnyReply, array: FloatArray) -> list[tuple[AnyReply, FloatArray]]:
        """Return each call's own part of the reply to :meth:`joined`; its array is its own memory, as any answer's."""
        counts = [len(call.lengths) for call in (self, *others)]
        width = len(array) // sum(counts)
        ends = list(accumulate(counts))
        return [
            (
                msgspec.structs.replace(reply, n=count) if isinstance(reply, Vectors) else reply,
                array[(end - count) * width : end * width].copy(),
            )
            for count, end in zip(counts, ends, strict=True)
        ]
