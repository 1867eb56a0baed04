"""Message -> Model call -> reply: the edge where a request is checked before an engine sees it.

No socket, thread or clock of its own, so every refusal can be tested by a call. An EngineError becomes ERR and the
worker lives; any other exception is a bug or a dead device; the caller lets it end the process.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple, assert_never

from msgspec import UNSET

from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import (
    DEFAULT_MAX_FRAME,
    ITEM_BYTES,
    MAX_ITEMS,
    U32_MAX,
    Admitted,
    AneAdmitPacked,
    AneAdmitShape,
    AneEvictPacked,
    AneEvictShape,
    AnyReply,
    AnyRequest,
    EmbedBatch,
    Err,
    Evicted,
    Generate,
    Load,
    Loaded,
    Ping,
    Pong,
    Rerank,
    RerankSequences,
    Scores,
    Segment,
    Text,
    Unload,
    Unloaded,
    Vectors,
    encode,
)
from engines.runtime.engine import DeviceLost, Engine, EngineIdentity, Model, refusal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engines.protocol.messages import Item
    from engines.runtime.batch import FloatArray, IntArray, TokenBatch
    from engines.runtime.progress import ProgressReporter

ALWAYS_SERVED: Final = frozenset({Load, Unload, Ping})
PACKED_REQUESTS: Final = frozenset({AneAdmitPacked, AneEvictPacked})
MAX_ERROR_BYTES: Final = 4096


class Answer(NamedTuple):
    """A terminal reply and its raw frame."""

    reply: AnyReply
    payload: memoryview | None = None


class Dispatcher:
    """The models of one worker and the answers to its requests. One call at a time."""

    def __init__(
        self,
        engine: Engine,
        identity: EngineIdentity,
        *,
        max_frame: int = DEFAULT_MAX_FRAME,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_frame = max_frame
        self.device_lost = False
        """True after a DeviceLost answer: the worker sends it and exits."""
        self._engine = engine
        self._clock = clock
        self._packed_widths = frozenset(identity.packed.widths) if identity.packed is not None else frozenset()
        self._packed = identity.packed is not None
        self._models: dict[str, Model] = {}
        self._next_ref = 0

    @property
    def models(self) -> dict[str, Model]:
        """The loaded models by ref; read only."""
        return self._models

    def handle(self, request: AnyRequest, payload: memoryview | None, progress: ProgressReporter) -> Answer:
        """Return the terminal reply to *request*. *payload* may be reused after the reply was sent."""
        try:
            answer = self._answer(request, payload, progress)
            if answer.payload is None and len(encode(answer.reply)) > self.max_frame:
                raise EngineError(ErrorCode.INVALID_REQUEST, f"the reply doesn't fit max_frame {self.max_frame}")
        except EngineError as exc:
            self.device_lost = self.device_lost or isinstance(exc, DeviceLost)
            return Answer(self._err(request.req_id, exc.code, exc.msg))
        except MemoryError as exc:
            return Answer(self._err(request.req_id, ErrorCode.OOM, str(exc) or "out of memory"))
        return answer

    def close(self) -> None:
        """Close every model, the last one first."""
        while self._models:
            self._models.popitem()[1].close()

    def _err(self, req_id: str, code: ErrorCode, msg: str) -> Err:
        """Return ERR with a message that is valid UTF-8 and short enough for the frame."""
        text = msg.encode(errors="replace").decode()
        limit = min(MAX_ERROR_BYTES, self.max_frame)
        while True:
            err = Err(req_id=req_id, code=code, msg=text)
            if not text or len(encode(err)) <= limit:
                return err
            text = text[: len(text) // 2]

    def _answer(self, request: AnyRequest, payload: memoryview | None, progress: ProgressReporter) -> Answer:
        kind = type(request)
        if kind not in ALWAYS_SERVED and kind not in self._engine.serves:
            raise refusal(request)
        if kind in PACKED_REQUESTS and not self._packed:
            raise refusal(request)
        match request:
            case Ping():
                return Answer(self._pong(request))
            case Load():
                return Answer(self._load(request, progress))
            case Unload():
                return Answer(self._unload(request))
            case EmbedBatch():
                return self._embed(request, _ids(payload), progress)
            case Rerank():
                return self._rerank(request, _ids(payload), progress)
            case RerankSequences():
                return self._rerank_sequences(request, _ids(payload), progress)
            case Generate():
                return self._generate(request, _ids(payload), progress)
            case AneAdmitShape():
                inventory = self._model(request.model_ref).admit_shape(request.shape, progress=progress)
                return Answer(Admitted(req_id=request.req_id, inventory=inventory))
            case AneAdmitPacked():
                self._check_width(request.width)
                inventory = self._model(request.model_ref).admit_packed(request.width, progress=progress)
                return Answer(Admitted(req_id=request.req_id, inventory=inventory))
            case AneEvictShape():
                self._model(request.model_ref).evict_shape(request.shape, progress=progress)
                return Answer(Evicted(req_id=request.req_id))
            case AneEvictPacked():
                self._check_width(request.width)
                self._model(request.model_ref).evict_packed(request.width, progress=progress)
                return Answer(Evicted(req_id=request.req_id))
            case _:
                assert_never(request)

    # --- models -------------------------------------------------------------------------------------------------------

    def _load(self, request: Load, progress: ProgressReporter) -> Loaded:
        limit = self._engine.max_models
        if limit is not None and len(self._models) >= limit:
            raise EngineError(
                ErrorCode.CONFIG_INVALID, f"this worker holds {limit} model(s) at most; UNLOAD before another LOAD"
            )
        if not request.artifact_digest:
            raise EngineError(ErrorCode.ARTIFACT_INVALID, "artifact_digest is empty; LOAD must name the file's SHA-256")
        started = self._clock()
        model = self._engine.load(request, progress=progress)
        assert 1 <= model.dims <= U32_MAX, f"a model of {model.dims} dims"
        ref = f"{self._engine.ref_prefix}:{self._next_ref}"
        self._next_ref += 1
        self._models[ref] = model
        return Loaded(
            req_id=request.req_id,
            model_ref=ref,
            dims=model.dims,
            cold_load_ms=max(0, round((self._clock() - started) * 1000)),
            buckets=list(model.buckets) or UNSET,
        )

    def _unload(self, request: Unload) -> Unloaded:
        model = self._model(request.model_ref)
        del self._models[request.model_ref]
        model.close()
        return Unloaded(req_id=request.req_id)

    def _model(self, ref: str) -> Model:
        model = self._models.get(ref)
        if model is None:
            raise EngineError(ErrorCode.MODEL_NOT_LOADED, f"no model {ref[:80]!r} in this worker")
        return model

    def _pong(self, request: Ping) -> Pong:
        statuses = {ref: model.status() for ref, model in self._models.items()}
        shares = [s.placement_share for s in statuses.values() if s.placement_share is not None]
        assert all(0.0 <= share <= 1.0 for share in shares), f"placement shares {shares}"
        shapes = {ref: sorted(s.resident_shapes) for ref, s in statuses.items() if s.resident_shapes}
        packed = {ref: sorted(s.resident_packed) for ref, s in statuses.items() if s.resident_packed}
        buckets = sorted({bucket for s in statuses.values() for bucket in s.buckets})
        return Pong(
            req_id=request.req_id,
            rss_mb=resident_bytes() // 2**20,
            models_loaded=len(self._models),
            # The gate asks whether everything runs where it should, so the worst model speaks for the worker.
            placement_share=min(shares) if shares else UNSET,
            buckets=buckets or UNSET,
            ane_resident_shapes=shapes or UNSET,
            ane_resident_packed=packed or UNSET,
        )

    # --- inference ----------------------------------------------------------------------------------------------------

    def _embed(self, request: EmbedBatch, ids: IntArray, progress: ProgressReporter) -> Answer:
        batch = _batch(ids, request.items, "item")
        model = self._model(request.model_ref)
        width = request.packed_width if request.packed_width is not UNSET else None
        if width is not None:
            self._check_width(width)
        rows = len(request.items)
        self._check_reply(rows * model.dims)
        vectors = model.embed(
            batch, pooling=request.pooling, normalize=request.normalize, packed_width=width, progress=progress
        )
        payload = _checked(vectors, (rows, model.dims))
        return Answer(Vectors(req_id=request.req_id, dims=model.dims, n=rows), payload)

    def _rerank(self, request: Rerank, ids: IntArray, progress: ProgressReporter) -> Answer:
        from engines.runtime.batch import RerankPairs

        query = request.query_n_tokens
        if query == 0:
            raise EngineError(ErrorCode.INVALID_REQUEST, "the query has no tokens")
        candidates = _batch(ids, request.candidates, "candidate", skip=query)
        model = self._model(request.model_ref)
        self._check_reply(len(candidates))
        scores = model.rerank(RerankPairs(query_ids=ids[:query], candidates=candidates), progress=progress)
        return Answer(Scores(req_id=request.req_id), _checked(scores, (len(candidates),)))

    def _rerank_sequences(self, request: RerankSequences, ids: IntArray, progress: ProgressReporter) -> Answer:
        batch = _batch(ids, request.sequences, "sequence")
        model = self._model(request.model_ref)
        self._check_reply(len(batch))
        scores = model.rerank_sequences(batch, progress=progress)
        return Answer(Scores(req_id=request.req_id), _checked(scores, (len(batch),)))

    def _generate(self, request: Generate, ids: IntArray, progress: ProgressReporter) -> Answer:
        if not len(ids):
            raise EngineError(ErrorCode.INVALID_REQUEST, "the prompt has no tokens")
        _check_ids(ids)
        model = self._model(request.model_ref)
        result = model.generate(
            ids,
            max_tokens=request.max_tokens,
            grammar=request.grammar if request.grammar is not UNSET else None,
            progress=progress,
        )
        return Answer(
            Text(
                req_id=request.req_id,
                text=result.text,
                n_prompt=result.n_prompt,
                n_gen=result.n_gen,
                finish_reason=result.finish_reason,
                generated_token_ids=list(result.generated_token_ids) or UNSET,
            )
        )

    def _check_width(self, width: int) -> None:
        if width not in self._packed_widths:
            advertised = ", ".join(map(str, sorted(self._packed_widths))) or "none"
            raise EngineError(
                ErrorCode.UNSUPPORTED_PACKED_WIDTH, f"packed width {width} is not advertised (advertised: {advertised})"
            )

    def _check_reply(self, elements: int) -> None:
        """Refuse before computing what could not be sent. Spec (protocol-v3, 1): ``invalid_request``."""
        size = elements * ITEM_BYTES
        if size > self.max_frame:
            raise EngineError(
                ErrorCode.INVALID_REQUEST, f"the reply of {size} bytes doesn't fit max_frame {self.max_frame}; split"
            )


def _ids(payload: memoryview | None) -> IntArray:
    """Return the raw frame as int32 (tokens,), uncopied."""
    import numpy as np

    assert payload is not None, "the connection delivers the raw frame with its request"
    if payload.nbytes % ITEM_BYTES:
        raise EngineError(ErrorCode.INVALID_REQUEST, f"raw frame of {payload.nbytes} bytes is not a row of int32")
    return np.frombuffer(payload, dtype="<i4")


def _batch(ids: IntArray, rows: Sequence[Item] | Sequence[Segment], what: str, *, skip: int = 0) -> TokenBatch:
    """Check counts against the raw frame and return its rows; the first *skip* ids belong to something else."""
    import numpy as np

    from engines.runtime.batch import TokenBatch

    if not 1 <= len(rows) <= MAX_ITEMS:
        raise EngineError(ErrorCode.INVALID_REQUEST, f"{len(rows)} {what}s in one request, allowed 1 to {MAX_ITEMS}")
    lengths = [row.n_tokens for row in rows]
    if 0 in lengths:
        raise EngineError(ErrorCode.INVALID_REQUEST, f"{what} {lengths.index(0)} has no tokens")
    total = skip + sum(lengths)
    if total != len(ids):
        raise EngineError(ErrorCode.INVALID_REQUEST, f"the header counts {total} ids, the raw frame has {len(ids)}")
    _check_ids(ids)
    cu_seqlens = np.fromiter(accumulate(lengths, initial=0), np.int32, len(lengths) + 1)
    return TokenBatch(input_ids=ids[skip:], cu_seqlens=cu_seqlens)


def _check_ids(ids: IntArray) -> None:
    if int(ids.min()) < 0:
        index = int((ids < 0).argmax())
        raise EngineError(ErrorCode.INVALID_REQUEST, f"token {index} has the negative id {int(ids[index])}")


def _checked(array: FloatArray, shape: tuple[int, ...]) -> memoryview:
    """Return a model's output as bytes. A wrong dtype or shape is our bug; a non-finite value is the model's answer."""
    import numpy as np

    assert isinstance(array, np.ndarray), f"a model returned {type(array).__name__}"
    assert array.dtype == np.float32 and array.shape == shape, f"{array.dtype} {array.shape} instead of f32 {shape}"
    assert array.flags.c_contiguous, "a model returned a strided array"
    if not np.isfinite(array).all():
        row = int(np.isfinite(array).reshape(shape[0], -1).all(axis=1).argmin())
        raise EngineError(ErrorCode.NONFINITE_OUTPUT, f"row {row} of {shape[0]} holds NaN or infinity")
    return array.data.cast("B")


def resident_bytes() -> int:
    """Return this process's resident set: /proc where there is one (no import), psutil elsewhere."""
    if sys.platform == "linux":
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - pathlib is an import more than a PING needs
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    else:
        import psutil

        return int(psutil.Process().memory_info().rss)
