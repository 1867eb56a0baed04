"""EMBED_BATCH, RERANK, RERANK_SEQUENCES and GENERATE: raw frame to arrays, model call, array to raw frame.

The one module of the runtime that imports numpy, also through :mod:`engines.finite`; the dispatcher loads it at the
first inference request, long after HELLO. A small exchange consists of little but the checks here, so each is the
cheapest exact form that was measured (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Final, TypeAlias, assert_never

import numpy as np
from msgspec import UNSET

from engines.finite import all_finite
from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import (
    ITEM_BYTES,
    MAX_ITEMS,
    EmbedBatch,
    Generate,
    Item,
    Rerank,
    RerankSequences,
    Scores,
    Segment,
    Text,
    Vectors,
)
from engines.runtime.batch import RerankPairs, TokenBatch

if TYPE_CHECKING:
    from engines.runtime.batch import FloatArray, IntArray
    from engines.runtime.engine import Model
    from engines.runtime.progress import ProgressReporter

ServingRequest: TypeAlias = EmbedBatch | Rerank | RerankSequences | Generate
Served: TypeAlias = tuple[Vectors | Scores | Text, memoryview | None]
"""A terminal reply and its raw frame."""

_INT32: Final = np.dtype("<i4")
_FLOAT32: Final = np.dtype(np.float32)


def answer(
    model: Model, request: ServingRequest, payload: memoryview, progress: ProgressReporter, *, max_frame: int
) -> Served:
    """Return the reply and its raw frame. Raises EngineError for whatever the request can't have."""
    ids = ids_of(payload)
    match request:
        case EmbedBatch():
            batch = batch_of(ids, request.items, "item")
            rows, dims = len(batch), model.dims
            check_reply(rows * dims, max_frame)
            width = None if request.packed_width is UNSET else request.packed_width
            vectors = model.embed(
                batch, pooling=request.pooling, normalize=request.normalize, packed_width=width, progress=progress
            )
            return Vectors(request.req_id, dims, rows), bytes_of(vectors, (rows, dims))
        case Rerank():
            query = request.query_n_tokens
            if query == 0:
                raise EngineError(ErrorCode.INVALID_REQUEST, "the query has no tokens")
            batch = batch_of(ids, request.candidates, "candidate", skip=query)
            check_reply(len(batch), max_frame)
            scores = model.rerank(RerankPairs(ids[:query], batch), progress=progress)
            return Scores(request.req_id), bytes_of(scores, (len(batch),))
        case RerankSequences():
            batch = batch_of(ids, request.sequences, "sequence")
            check_reply(len(batch), max_frame)
            scores = model.rerank_sequences(batch, progress=progress)
            return Scores(request.req_id), bytes_of(scores, (len(batch),))
        case Generate():
            return generate(model, request, ids, progress), None
        case _:
            assert_never(request)


def generate(model: Model, request: Generate, ids: IntArray, progress: ProgressReporter) -> Text:
    """Return the reply to GENERATE."""
    if not len(ids):
        raise EngineError(ErrorCode.INVALID_REQUEST, "the prompt has no tokens")
    check_ids(ids)
    # Spec: "non-empty grammar requests are rejected instead of silently ignored", blank ones too.
    if request.grammar:
        raise EngineError(ErrorCode.INVALID_REQUEST, "no engine here takes a grammar; leave it out")
    result = model.generate(ids, max_tokens=request.max_tokens, progress=progress)
    return Text(
        req_id=request.req_id,
        text=result.text,
        n_prompt=result.n_prompt,
        n_gen=result.n_gen,
        finish_reason=result.finish_reason,
        generated_token_ids=list(result.generated_token_ids) or UNSET,
    )


def ids_of(payload: memoryview) -> IntArray:
    """Return the raw frame as int32 (tokens,), uncopied."""
    size = len(payload)
    if size % ITEM_BYTES:
        raise EngineError(ErrorCode.INVALID_REQUEST, f"raw frame of {size} bytes is not a row of int32")
    return np.frombuffer(payload, _INT32)


def batch_of(ids: IntArray, rows: Sequence[Item] | Sequence[Segment], what: str, *, skip: int = 0) -> TokenBatch:
    """Check counts against the raw frame and return its rows; the first *skip* ids belong to something else."""
    count = len(rows)
    if not 1 <= count <= MAX_ITEMS:
        raise EngineError(ErrorCode.INVALID_REQUEST, f"{count} {what}s in one request, allowed 1 to {MAX_ITEMS}")
    lengths = [row.n_tokens for row in rows]
    if 0 in lengths:
        raise EngineError(ErrorCode.INVALID_REQUEST, f"{what} {lengths.index(0)} has no tokens")
    total = skip + sum(lengths)
    if total != len(ids):
        raise EngineError(ErrorCode.INVALID_REQUEST, f"the header counts {total} ids, the raw frame has {len(ids)}")
    check_ids(ids)
    cu_seqlens = np.fromiter(accumulate(lengths, initial=0), np.int32, count + 1)
    return TokenBatch(ids[skip:] if skip else ids, cu_seqlens)


def check_ids(ids: IntArray) -> None:
    """Refuse negative ids; *ids* has at least one element."""
    # Finding the smallest costs a third of reducing to it.
    index = ids.argmin()
    if ids.item(index) < 0:
        index = (ids < 0).argmax()
        raise EngineError(ErrorCode.INVALID_REQUEST, f"token {index} has the negative id {int(ids[index])}")


def check_reply(elements: int, max_frame: int) -> None:
    """Refuse before computing what could not be sent. Spec (protocol-v3, 1): ``invalid_request``."""
    size = elements * ITEM_BYTES
    if size > max_frame:
        raise EngineError(
            ErrorCode.INVALID_REQUEST, f"the reply of {size} bytes doesn't fit max_frame {max_frame}; split"
        )


def bytes_of(array: FloatArray, shape: tuple[int, ...]) -> memoryview:
    """Return a model's output as bytes. A wrong dtype or shape is our bug; a non-finite value is the model's answer."""
    assert isinstance(array, np.ndarray), f"a model returned {type(array).__name__}"
    assert array.dtype == _FLOAT32 and array.shape == shape, f"{array.dtype} {array.shape} instead of f32 {shape}"
    data = array.data
    assert data.c_contiguous, "a model returned a strided array"
    if not all_finite(array):
        row = int(np.isfinite(array).reshape(shape[0], -1).all(axis=1).argmin())
        raise EngineError(ErrorCode.NONFINITE_OUTPUT, f"row {row} of {shape[0]} holds NaN or infinity")
    return data.cast("B")
