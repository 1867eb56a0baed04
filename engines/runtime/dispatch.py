"""Message -> Model call -> reply: the edge where a request is checked before an engine sees it.

No socket, thread or clock of its own, so every refusal can be tested by a call. An EngineError becomes ERR and the
worker lives; any other exception is a bug or a dead device; the caller lets it end the process.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, assert_never

from msgspec import UNSET

from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import (
    DEFAULT_MAX_FRAME,
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
    Unload,
    Unloaded,
    encode,
    type_name,
)
from engines.runtime.engine import DeviceLost, Engine, EngineIdentity, Model, refusal

if TYPE_CHECKING:
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
        self, engine: Engine, identity: EngineIdentity, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_frame = DEFAULT_MAX_FRAME
        self.device_lost = False
        """True after a DeviceLost answer: the worker sends it and exits."""
        self._engine = engine
        self._clock = clock
        self._packed_widths = None if identity.packed is None else frozenset(identity.packed.widths)
        self._models: dict[str, Model] = {}
        self._next_ref = 0

    def handle(self, request: AnyRequest, payload: memoryview | None, progress: ProgressReporter) -> Answer:
        """Return the terminal reply to *request*. *payload* may be reused after the reply was sent."""
        try:
            answer = self._answer(request, payload, progress)
            if answer.payload is None and len(encode(answer.reply)) > self.max_frame:
                raise EngineError(ErrorCode.INVALID_REQUEST, f"the reply doesn't fit max_frame {self.max_frame}")
        except EngineError as exc:
            self.device_lost = self.device_lost or isinstance(exc, DeviceLost)
            return Answer(self._err(request.req_id, exc))
        except MemoryError as exc:
            return Answer(self._err(request.req_id, EngineError(ErrorCode.OOM, str(exc) or "out of memory")))
        return answer

    def close(self) -> None:
        """Close every model, the last one first."""
        while self._models:
            self._models.popitem()[1].close()

    def _err(self, req_id: str, error: EngineError) -> Err:
        """Return ERR with a message that is short enough for the frame."""
        text = error.msg
        limit = min(MAX_ERROR_BYTES, self.max_frame)
        while True:
            err = Err(req_id=req_id, code=error.code, msg=text)
            if not text or len(encode(err)) <= limit:
                return err
            text = text[: len(text) // 2]

    def _answer(self, request: AnyRequest, payload: memoryview | None, progress: ProgressReporter) -> Answer:
        kind = type(request)
        served = kind in ALWAYS_SERVED or kind in self._engine.serves
        if not served or (kind in PACKED_REQUESTS and self._packed_widths is None):
            raise refusal(type_name(request))
        if isinstance(request, Ping):
            return Answer(self._pong(request))
        if isinstance(request, Load):
            return Answer(self._load(request, progress))
        if isinstance(request, AneAdmitPacked | AneEvictPacked):
            self._check_width(request.width)
        elif isinstance(request, EmbedBatch) and request.packed_width is not UNSET:
            self._check_width(request.packed_width)
        model = self._models.get(request.model_ref)
        if model is None:
            raise EngineError(ErrorCode.MODEL_NOT_LOADED, f"no model {request.model_ref[:80]!r} in this worker")
        match request:
            case EmbedBatch() | Rerank() | RerankSequences() | Generate():
                from engines.runtime import inference  # numpy comes with it: now, not before HELLO

                assert payload is not None, "the connection delivers the raw frame with its request"
                return Answer(*inference.answer(model, request, payload, progress, max_frame=self.max_frame))
            case Unload():
                del self._models[request.model_ref]
                model.close()
                return Answer(Unloaded(req_id=request.req_id))
            case AneAdmitShape():
                inventory = model.admit_shape(request.shape, progress=progress)
                return Answer(Admitted(req_id=request.req_id, inventory=inventory))
            case AneAdmitPacked():
                inventory = model.admit_packed(request.width, progress=progress)
                return Answer(Admitted(req_id=request.req_id, inventory=inventory))
            case AneEvictShape():
                model.evict_shape(request.shape, progress=progress)
                return Answer(Evicted(req_id=request.req_id))
            case AneEvictPacked():
                model.evict_packed(request.width, progress=progress)
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
        started = self._clock()
        model = self._engine.load(request, progress=progress)
        ref = f"{self._engine.ref_prefix}:{self._next_ref}"
        self._next_ref += 1
        self._models[ref] = model
        return Loaded(
            req_id=request.req_id,
            model_ref=ref,
            dims=model.dims,
            cold_load_ms=round((self._clock() - started) * 1000),
            buckets=list(model.buckets) or UNSET,
        )

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
            # The gate asks whether everything runs where it should, so the worker reports its worst model.
            placement_share=min(shares) if shares else UNSET,
            buckets=buckets or UNSET,
            ane_resident_shapes=shapes or UNSET,
            ane_resident_packed=packed or UNSET,
        )

    def _check_width(self, width: int) -> None:
        if width not in (self._packed_widths or ()):
            advertised = ", ".join(map(str, sorted(self._packed_widths or ()))) or "none"
            raise EngineError(
                ErrorCode.UNSUPPORTED_PACKED_WIDTH, f"packed width {width} is not advertised (advertised: {advertised})"
            )


def resident_bytes() -> int:
    """Return this process's resident set: /proc where there is one (no import), psutil elsewhere."""
    if sys.platform == "linux":
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - pathlib is an import more than a PING needs
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    else:
        import psutil

        return int(psutil.Process().memory_info().rss)
