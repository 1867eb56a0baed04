"""What the running exchange still allows: the next progress counter and phase, the one reply and its raw frame's size.

Both ends keep one: a worker compares what it is about to send, a host what it received. The checks raise the class of
error that they are given, LocalProtocolError or RemoteProtocolError, and change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from msgspec import UNSET

from engines.protocol.errors import ErrorCode, LocalProtocolError
from engines.protocol.messages import (
    ITEM_BYTES,
    MAX_ITEMS,
    REPLY_TO,
    U32_MAX,
    AnyReply,
    AnyRequest,
    EmbedBatch,
    Err,
    Generate,
    Item,
    Loaded,
    Phase,
    Progress,
    Reply,
    Request,
    Rerank,
    RerankSequences,
    Scores,
    Segment,
    Text,
    Unload,
    Vectors,
    phases,
    type_name,
)


def rows_of(request: Request) -> Sequence[Item | Segment]:
    """Return what the reply has a row for: items, candidates or sequences."""
    if isinstance(request, EmbedBatch):
        return request.items
    if isinstance(request, Rerank):
        return request.candidates
    return request.sequences if isinstance(request, RerankSequences) else ()


def check_request(request: Request, size: int) -> None:
    """Raise LocalProtocolError when a raw frame of *size* bytes doesn't fit *request*'s own counts."""
    if size % ITEM_BYTES:
        raise LocalProtocolError(f"i32 frame length {size} is not divisible by {ITEM_BYTES}")
    rows = rows_of(request)
    if len(rows) > MAX_ITEMS:
        raise LocalProtocolError(f"{len(rows)} items in one exchange, at most {MAX_ITEMS}")
    counted = sum([row.n_tokens for row in rows]) + (request.query_n_tokens if isinstance(request, Rerank) else 0)
    # GENERATE doesn't count its ids.
    if type(request) is not Generate and size != counted * ITEM_BYTES:
        raise LocalProtocolError(f"raw frame of {size} bytes where the header counts {counted} ids")


class Expectation:
    """The exchange in flight, if any, and the vector width of every loaded model, which outlives exchanges."""

    def __init__(self) -> None:
        self.request: AnyRequest | None = None
        self.completed = 0
        self._phases: tuple[Phase, ...]
        self._phase_index: int
        self._rows: int
        self._ids: int
        self._dims: dict[str, int] = {}

    @property
    def phase(self) -> Phase | None:
        """The phase of the running exchange, None when idle."""
        return self._phases[self._phase_index] if self.request is not None else None

    def open(self, request: AnyRequest, size: int, engine: str) -> None:
        """Start the exchange of *request*, whose raw frame has *size* bytes, with a worker of HELLO's *engine*."""
        self.request = request
        self.completed = 0
        self._phases = phases(type(request), engine)
        self._phase_index = 0
        self._rows = len(rows_of(request))
        self._ids = size // ITEM_BYTES

    def advance(self, progress: Progress, index: int) -> None:
        """Accept *progress*; *index* is what :meth:`check_progress` returned for it."""
        self._phase_index, self.completed = index, progress.completed

    def close(self, reply: AnyReply) -> AnyRequest:
        """End the exchange with its checked *reply* and return its request."""
        request: Any = self.request
        self.request = None
        kind = type(reply)
        if kind is Loaded:
            loaded = cast(Loaded, reply)
            self._dims[loaded.model_ref] = loaded.dims
        elif type(request) is Unload and (kind is not Err or cast(Err, reply).code == ErrorCode.MODEL_NOT_LOADED):
            # protocol-v3, 3: an UNLOAD answered with model_not_loaded counts as done.
            self._dims.pop(request.model_ref, None)
        return cast(AnyRequest, request)

    def check_progress(self, progress: Progress, error: type[Exception]) -> int:
        """Return the index of the phase that *progress* moves to."""
        request = cast(AnyRequest, self.request)
        if progress.req_id != request.req_id:
            raise error(f"PROGRESS for {progress.req_id!r} while {request.req_id!r} runs")
        # Spec: "counters strictly increase for completed work", so equal is wrong too.
        if progress.completed <= self.completed:
            raise error(f"progress {progress.completed} after {self.completed}")
        for index in range(self._phase_index, len(self._phases)):
            if progress.phase == self._phases[index]:
                return index
        accepted = ", ".join(phase.value for phase in self._phases[self._phase_index :])
        raise error(f"phase {progress.phase} in {type_name(request)}, accepted now: {accepted}")

    def check_reply(self, reply: Reply, error: type[Exception]) -> int:
        """Return how many bytes the raw frame behind *reply* must have."""
        request: Any = self.request
        known: Any = reply
        kind = type(reply)
        if kind is Err:
            req_id = known.req_id
            if req_id is not UNSET and req_id != request.req_id:
                raise error(f"ERR for {req_id!r} while {request.req_id!r} runs")
            return 0
        if kind is not REPLY_TO[type(request)]:
            raise error(f"{type_name(reply)} in answer to {type_name(request)}")
        if known.req_id != request.req_id:
            raise error(f"{type_name(reply)} for {known.req_id!r} while {request.req_id!r} runs")
        if kind is Vectors:
            rows = self._rows
            dims: int = known.dims
            if known.n != rows:
                raise error(f"VECTORS names {known.n} rows for {rows} items")
            loaded = self._dims.get(request.model_ref)
            if not 1 <= dims <= U32_MAX or (loaded is not None and dims != loaded):
                raise error(f"VECTORS names {dims} dims, the model has {loaded}")
            return rows * dims * ITEM_BYTES
        if kind is Scores:
            return self._rows * ITEM_BYTES
        if kind is Loaded:
            if known.dims == 0:
                raise error("LOADED names 0 dims")
            # Spec (protocol-v3, 3): "Duplicate model_refs never occur"; two models of one name would mix their answers.
            if known.model_ref in self._dims:
                raise error(f"LOADED names {known.model_ref[:80]!r}, which is loaded already")
        elif kind is Text:
            if known.n_prompt != self._ids:
                raise error(f"TEXT counts {known.n_prompt} prompt ids, {self._ids} were sent")
            if known.n_gen > request.max_tokens:
                raise error(f"TEXT counts {known.n_gen} generated tokens, at most {request.max_tokens} were asked for")
            generated = known.generated_token_ids
            if generated is not UNSET and len(generated) != known.n_gen:
                raise error(f"TEXT counts {known.n_gen} generated tokens and names {len(generated)}")
        return 0
