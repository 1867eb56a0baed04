"""Requests as an engine sees them: numpy views of the payload, no copies.

Structs: making one costs a tenth of a frozen dataclass, and one is made for every request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from msgspec import Struct

from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    import numpy.typing as npt

    IntArray: TypeAlias = npt.NDArray[np.int32]
    FloatArray: TypeAlias = npt.NDArray[np.float32]


class TokenBatch(Struct, frozen=True, eq=False):
    """Rows of token ids, laid end to end.

    ``input_ids``: int32 (tokens,), read-only by convention, valid until the reply was sent.
    ``cu_seqlens``: int32 (rows + 1,), starting at 0; row i is ``input_ids[cu_seqlens[i]:cu_seqlens[i + 1]]``.
    """

    input_ids: IntArray
    cu_seqlens: IntArray

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def lengths(self) -> IntArray:
        """Tokens of each row, int32 (rows,)."""
        lengths: IntArray = self.cu_seqlens[1:] - self.cu_seqlens[:-1]
        return lengths

    def rows(self) -> Iterator[IntArray]:
        """Yield each row's ids as a view."""
        for start, end in zip(self.cu_seqlens[:-1].tolist(), self.cu_seqlens[1:].tolist(), strict=True):
            yield self.input_ids[start:end]


class RerankPairs(Struct, frozen=True, eq=False):
    """One query and its candidates, in request order; the engine composes the pairs."""

    query_ids: IntArray
    candidates: TokenBatch


class Generation(Struct, frozen=True):
    """A finished greedy generation; ``n_gen`` excludes the stop token."""

    text: str
    n_prompt: int
    n_gen: int
    finish_reason: FinishReason
    generated_token_ids: tuple[int, ...] = ()


def check_lengths(batch: TokenBatch, *, limit: int, what: str) -> None:
    """Raise ``invalid_request`` for a row of more than *limit* tokens; empty ones were refused on arrival."""
    lengths = batch.lengths
    row = int(lengths.argmax())
    if lengths[row] > limit:
        raise EngineError(
            ErrorCode.INVALID_REQUEST, f"sequence_too_long: {what} {row} has {lengths[row]} tokens, at most {limit}"
        )


def check_vocabulary(ids: IntArray, size: int) -> None:
    """Raise ``invalid_request`` unless every id is below *size*; negative ones were refused on arrival.

    A table would be read beyond its end, or clamp the id and silently embed another token.
    """
    if (high := int(ids.max())) >= size:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"token id {high} is outside the vocabulary of {size}: use the bundle's tokenizer",
        )
