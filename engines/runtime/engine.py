"""What an engine has to provide: an identity, a floor probe, and models that answer requests.

An engine raises :class:`~engines.protocol.errors.EngineError` when a request fails and the worker may live (ERR, no
strike). Any other exception is a bug or a dead device: it ends the process, and the host sees a crash.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, NoReturn

from msgspec import Struct

from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import (
    EmbedBatch,
    Generate,
    Inventory,
    Load,
    PackedCapability,
    Pooling,
    Request,
    Rerank,
    RerankSequences,
)

if TYPE_CHECKING:
    from pathlib import Path

    from engines.runtime.batch import FloatArray, Generation, IntArray, RerankPairs, TokenBatch
    from engines.runtime.progress import ProgressReporter


# Structs, not dataclasses, in this module: `dataclasses` pulls in `inspect`, 10 ms that every spawn would pay.


class WorkerOptions(Struct, frozen=True):
    """The options of the command line that an engine gets."""

    device: str = "cpu"
    """``cpu``, ``cuda[:N]``, ``metal`` or ``ane``; echoed as ``build_flags.device``."""
    manifest: Path | None = None
    """The bundle's manifest.json, passed to owned workers."""
    packed: tuple[int, ...] | None = None
    """Packed widths the host qualifies; None without the flag, and then HELLO omits ``packed``."""


class EngineIdentity(Struct, frozen=True):
    """What HELLO says. ``manifest_digest`` and ``kernel_revision`` only from owned engines.

    The runtime adds ``build_flags.device`` from the command line where the engine doesn't set it itself.
    """

    engine: str
    version: str
    build_flags: dict[str, str] = {}
    manifest_digest: str | None = None
    kernel_revision: str | None = None
    packed: PackedCapability | None = None


class Probe(Struct, frozen=True):
    """The ``--probe-floor`` envelope; ``status`` is ``ok`` or ``refused``."""

    status: str
    code: str
    required: dict[str, object]
    observed: dict[str, object] | None


class ModelStatus(Struct, frozen=True):
    """A model's part of PONG; every field may be unknown."""

    placement_share: float | None = None
    buckets: tuple[int, ...] = ()
    resident_shapes: tuple[int, ...] = ()
    resident_packed: tuple[int, ...] = ()


class DeviceLost(EngineError):
    """The request failed and so would every later one (a sticky device error): ERR, then the process exits 1."""


class Model(ABC):
    """One loaded model. Methods it doesn't serve answer ``operation_mismatch``.

    Every method runs on the worker's main thread, one at a time. ``progress`` counts completed work only.
    """

    dims: int
    """Vector width of VECTORS; 1 for a reranker, n_embd for a generator."""
    buckets: tuple[int, ...] = ()
    """Sequence lengths the model runs, where it has fixed ones (LOADED.buckets)."""

    def embed(
        self,
        batch: TokenBatch,
        *,
        pooling: Pooling,
        normalize: bool,
        packed_width: int | None,
        progress: ProgressReporter,
    ) -> FloatArray:
        """Return float32 (rows, dims), C-contiguous, in row order."""
        self._mismatch("embed")

    def rerank(self, pairs: RerankPairs, *, progress: ProgressReporter) -> FloatArray:
        """Return raw logits, float32 (candidates,), in request order."""
        self._mismatch("rerank")

    def rerank_sequences(self, batch: TokenBatch, *, progress: ProgressReporter) -> FloatArray:
        """Return raw logits of already composed sequences, float32 (rows,), in request order."""
        self._mismatch("rerank")

    def generate(self, input_ids: IntArray, *, max_tokens: int, progress: ProgressReporter) -> Generation:
        """Generate greedily after the prompt *input_ids*, int32 (tokens,)."""
        self._mismatch("generate")

    def admit_shape(self, shape: int, *, progress: ProgressReporter) -> Inventory:
        """Make one bucket resident; idempotent."""
        raise refusal("ANE_ADMIT_SHAPE")

    def evict_shape(self, shape: int, *, progress: ProgressReporter) -> None:
        """Release one bucket; a bucket that isn't resident is fine."""
        raise refusal("ANE_EVICT_SHAPE")

    def admit_packed(self, width: int, *, progress: ProgressReporter) -> Inventory:
        """Make one packed width resident; idempotent."""
        raise refusal("ANE_ADMIT_PACKED")

    def evict_packed(self, width: int, *, progress: ProgressReporter) -> None:
        """Release one packed width."""
        raise refusal("ANE_EVICT_PACKED")

    def status(self) -> ModelStatus:
        """Return the cached part of PONG; never touches the device."""
        return ModelStatus()

    @abstractmethod
    def close(self) -> None:
        """Release native memory, contexts before models; idempotent."""

    def _mismatch(self, operation: str) -> NoReturn:
        raise EngineError(ErrorCode.OPERATION_MISMATCH, f"this model does not {operation}")


class Engine(ABC):
    """One kind of worker. Constructing it and :meth:`identity` must not import the native library."""

    serves: ClassVar[frozenset[type[Request]]]
    """Request types beyond LOAD, UNLOAD and PING; others are drained and answer ``unsupported_request``."""
    max_models: ClassVar[int | None] = None
    """Models this worker may hold at once; None for any number. One more LOAD is ``config_invalid``."""
    ref_prefix: ClassVar[str]
    """Model refs are ``<ref_prefix>:<n>``, n counting up per process."""

    @abstractmethod
    def identity(self) -> EngineIdentity:
        """Return what HELLO says, from package metadata and arguments only."""

    @abstractmethod
    def probe_floor(self) -> Probe:
        """Return whether this machine can run the engine at all; opens no artifact."""

    @abstractmethod
    def load(self, request: Load, *, progress: ProgressReporter) -> Model:
        """Verify and load one artifact; all or nothing."""

    def close(self) -> None:  # noqa: B027 - an optional hook
        """Release what outlives models; called once before exit 0."""


def own_version() -> str:
    """Return the installed version of this project, ``unknown`` in a bare checkout."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("synapse-workers")
    except PackageNotFoundError:
        return "unknown"


SEGMENT_SERVING: frozenset[type[Request]] = frozenset({EmbedBatch, Rerank, Generate})
"""What the llama worker serves."""
OWNED_SERVING: frozenset[type[Request]] = frozenset({EmbedBatch, RerankSequences})
"""What owned workers serve, before shapes and packing."""


def refusal(name: str) -> EngineError:
    """Return the answer to a request, by its wire name, that a worker does not serve."""
    return EngineError(ErrorCode.UNSUPPORTED_REQUEST, f"{name} is not supported by this worker")
