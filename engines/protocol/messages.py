"""One frozen Struct per control frame of protocol v3, and the few tables that describe an exchange.

Field names, tags and types are those of the seed and of protocol-v3 section 3. Optional fields are omitted, never
null (``UNSET``). Unknown fields are refused everywhere but in HELLO. msgspec's own bounds stop at int64 and count
characters; :mod:`engines.protocol.decoding` adds the u64 ceilings and the limits in bytes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar, Final, Literal, TypeAlias, cast

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from engines.protocol.errors import ErrorCode

VERSION: Final = 3
# In bytes of payload: default and ceiling of a frame. HELLO is read under the smaller of the second and the maximum.
DEFAULT_MAX_FRAME: Final = 64 * 1024 * 1024
HELLO_MAX_FRAME: Final = 64 * 1024
MAX_NESTING: Final = 32
"""Levels of objects and arrays in HELLO, the one frame whose unknown fields are skipped, however deep they are.

Everywhere else the types are the limit: the decoder refuses the first value that they don't name.
"""
MAX_ITEMS: Final = 256
"""Items, candidates or sequences an exchange may carry."""
MAX_IDENTIFIER_BYTES: Final = 64
U32_MAX: Final = 2**32 - 1
U64_MAX: Final = 2**64 - 1

LLAMA_ENGINE: Final = "llama.cpp-worker"
ANE_ENGINE: Final = "ane-coreml-worker"
CUDA_ENGINE: Final = "owned-cuda"
OWNED_ENGINES: Final = frozenset({ANE_ENGINE, CUDA_ENGINE})
"""Workers that report manifest_digest and kernel_revision and serve RERANK_SEQUENCES instead of RERANK."""

Byte = Annotated[int, Meta(ge=0, le=255)]
U32 = Annotated[int, Meta(ge=0, le=U32_MAX)]
U64 = Annotated[int, Meta(ge=0)]
Identifier = Annotated[str, Meta(min_length=1, max_length=64)]
Dtype: TypeAlias = Literal["<i4", "<f4"]
ITEM_BYTES: Final = 4
"""Both payload dtypes, int32 and float32 little-endian, take four bytes an element."""


class Phase(StrEnum):
    """What the completed work of a PROGRESS frame belongs to."""

    SETUP = "setup"
    INFERENCE = "inference"
    CONTROL = "control"


class Pooling(StrEnum):
    """How token states become one vector."""

    MEAN = "mean"
    CLS = "cls"
    LAST = "last"


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"


# --- handshake: no type tag ------------------------------------------------------------------------------------------


class EngineInfo(Struct, frozen=True):
    """The ``engine`` object of HELLO."""

    engine: str
    version: str
    build_flags: dict[str, str] | UnsetType = UNSET

    def __post_init__(self) -> None:
        """Spec (protocol-v3, 2): ``build_flags`` is omitted when empty."""
        if not self.build_flags:
            msgspec.structs.force_setattr(self, "build_flags", UNSET)


class PackedCapability(Struct, frozen=True):
    """HELLO's ``packed``: which fixed widths several rows may share, and how many rows."""

    layout: str
    widths: list[U32]
    max_rows: U32


class Hello(Struct, frozen=True):
    """The worker's first frame. Unknown extra fields are ignored (the original's decode worker sends one)."""

    v: Byte
    nonce: str
    engine: EngineInfo
    pid: U32
    max_frame: U32
    manifest_digest: str | UnsetType = UNSET
    kernel_revision: str | UnsetType = UNSET
    packed: PackedCapability | UnsetType = UNSET


class HelloAck(Struct, frozen=True, forbid_unknown_fields=True):
    """The host's answer; ``max_frame`` rules both directions from then on."""

    v: Byte
    accept: bool
    max_frame: U32


# --- everything else: tagged -----------------------------------------------------------------------------------------


class Message(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """A tagged control frame. ``payload`` names the dtype of the raw frame that follows at once, if any."""

    payload: ClassVar[Dtype | None] = None


class Request(Message, frozen=True):
    """A frame that the host sends and the worker answers with exactly one terminal reply."""

    req_id: Identifier


class Reply(Message, frozen=True):
    """A terminal frame of an exchange."""


class Load(Request, frozen=True, tag="LOAD"):
    """Load one artifact; the worker verifies its digest on the open file first."""

    artifact_path: str
    artifact_digest: str
    format: str
    runtime_config: dict[str, str] = {}


class Item(Struct, frozen=True, forbid_unknown_fields=True):
    """One text of EMBED_BATCH."""

    id: Identifier
    n_tokens: U32


class Segment(Struct, frozen=True, forbid_unknown_fields=True):
    """One candidate of RERANK or one composed sequence of RERANK_SEQUENCES."""

    n_tokens: U32


class EmbedBatch(Request, frozen=True, tag="EMBED_BATCH"):
    """Embed the items; raw: their token ids, int32 (sum of n_tokens,), in item order."""

    payload: ClassVar[Dtype | None] = "<i4"
    model_ref: str
    pooling: Pooling
    normalize: bool
    items: list[Item]
    packed_width: U32 | UnsetType = UNSET


class Rerank(Request, frozen=True, tag="RERANK"):
    """Score candidates against a query; raw: query ids, then each candidate's ids, int32."""

    payload: ClassVar[Dtype | None] = "<i4"
    model_ref: str
    query_n_tokens: U32
    candidates: list[Segment]


class RerankSequences(Request, frozen=True, tag="RERANK_SEQUENCES"):
    """Score sequences that the host composed; the worker adds no token. Raw: their ids, int32."""

    payload: ClassVar[Dtype | None] = "<i4"
    model_ref: str
    sequences: list[Segment]


class Generate(Request, frozen=True, tag="GENERATE"):
    """Generate greedily from the prompt ids (raw, int32); their number is the raw frame's length / 4.

    ``grammar`` is a field of the wire alone: no worker takes one, and a non-empty one is ``invalid_request``.
    """

    payload: ClassVar[Dtype | None] = "<i4"
    model_ref: str
    max_tokens: U32
    grammar: str | UnsetType = UNSET


class Unload(Request, frozen=True, tag="UNLOAD"):
    """Forget a model."""

    model_ref: str


class Ping(Request, frozen=True, tag="PING"):
    """Ask for resident set size and placement."""


class AneAdmitShape(Request, frozen=True, tag="ANE_ADMIT_SHAPE"):
    """Load the function of one bucket; ``shape`` in tokens."""

    model_ref: str
    shape: U32


class AneEvictShape(Request, frozen=True, tag="ANE_EVICT_SHAPE"):
    """Release the function of one bucket."""

    model_ref: str
    shape: U32


class AneAdmitPacked(Request, frozen=True, tag="ANE_ADMIT_PACKED"):
    """Load the packed function of one width in tokens."""

    model_ref: str
    width: U32


class AneEvictPacked(Request, frozen=True, tag="ANE_EVICT_PACKED"):
    """Release the packed function of one width."""

    model_ref: str
    width: U32


class Shutdown(Message, frozen=True, tag="SHUTDOWN"):
    """The worker exits 0 after the current request; there is no reply."""


class Progress(Message, frozen=True, tag="PROGRESS"):
    """Completed work of the running exchange: never a timer tick, never a mere submission."""

    req_id: Identifier
    completed: U64
    phase: Phase


class Loaded(Reply, frozen=True, tag="LOADED"):
    """``dims``: vector width, 1 for a reranker, n_embd for a generator."""

    req_id: Identifier
    model_ref: str
    dims: U32
    cold_load_ms: U64
    buckets: list[U32] | UnsetType = UNSET


class Vectors(Reply, frozen=True, tag="VECTORS"):
    """Raw: float32 (n, dims), row-major, in item order."""

    payload: ClassVar[Dtype | None] = "<f4"
    req_id: Identifier
    dims: U32
    n: U64


class Scores(Reply, frozen=True, tag="SCORES"):
    """Raw: float32 (candidates,), raw logits on every engine, in request order."""

    payload: ClassVar[Dtype | None] = "<f4"
    req_id: Identifier


class Text(Reply, frozen=True, tag="TEXT"):
    """A finished generation."""

    req_id: Identifier
    text: str
    n_prompt: U32
    n_gen: U32
    finish_reason: FinishReason
    generated_token_ids: list[U32] | UnsetType = UNSET

    def __post_init__(self) -> None:
        """Spec (protocol-v3, 3): ``generated_token_ids`` is omitted when empty."""
        if not self.generated_token_ids:
            msgspec.structs.force_setattr(self, "generated_token_ids", UNSET)


class Unloaded(Reply, frozen=True, tag="UNLOADED"):
    """The model is gone."""

    req_id: Identifier


class Executable(Struct, frozen=True, forbid_unknown_fields=True):
    """One compiled program and the layers it computes."""

    id: str
    layers: list[U32]


class Inventory(Struct, frozen=True, forbid_unknown_fields=True):
    """What was admitted: programs on the accelerator and the stages left on the CPU."""

    executables: list[Executable]
    cpu_stages: list[str]


class Admitted(Reply, frozen=True, tag="ADMITTED"):
    """The shape or packed width is resident."""

    req_id: Identifier
    inventory: Inventory


class Evicted(Reply, frozen=True, tag="EVICTED"):
    """The shape or packed width is released."""

    req_id: Identifier


class Pong(Reply, frozen=True, tag="PONG"):
    """``rss_mb``: resident pages in MiB; ``placement_share`` in [0, 1], absent when unknown."""

    req_id: Identifier
    rss_mb: U64
    models_loaded: U64
    placement_share: float | UnsetType = UNSET
    buckets: list[U32] | UnsetType = UNSET
    ane_resident_shapes: dict[str, list[U32]] | UnsetType = UNSET
    ane_resident_packed: dict[str, list[U32]] | UnsetType = UNSET


class Err(Reply, frozen=True, kw_only=True, tag="ERR"):
    """The request failed, the worker lives. Never followed by a raw frame."""

    req_id: Identifier | UnsetType = UNSET
    code: ErrorCode
    msg: str


AnyRequest: TypeAlias = (
    Load
    | EmbedBatch
    | Rerank
    | RerankSequences
    | Generate
    | Unload
    | Ping
    | AneAdmitShape
    | AneEvictShape
    | AneAdmitPacked
    | AneEvictPacked
)
AnyReply: TypeAlias = Loaded | Vectors | Scores | Text | Unloaded | Admitted | Evicted | Pong | Err
FromHost: TypeAlias = AnyRequest | Shutdown
FromWorker: TypeAlias = AnyReply | Progress

REPLY_TO: Final[dict[type[Request], type[Reply]]] = {
    Load: Loaded,
    EmbedBatch: Vectors,
    Rerank: Scores,
    RerankSequences: Scores,
    Generate: Text,
    Unload: Unloaded,
    Ping: Pong,
    AneAdmitShape: Admitted,
    AneEvictShape: Evicted,
    AneAdmitPacked: Admitted,
    AneEvictPacked: Evicted,
}
"""The one successful reply of each request; ERR may answer any."""

SERVING: Final = frozenset({EmbedBatch, Rerank, RerankSequences, Generate})
"""Requests that do inference: they take an execution permit, and only their success clears strikes."""


_SETUP: Final = (Phase.SETUP,)
_INFERENCE: Final = (Phase.INFERENCE,)
_CONTROL: Final = (Phase.CONTROL,)
_SWITCHING: Final = (Phase.SETUP, Phase.INFERENCE)
_PHASES: Final[dict[type[Request], tuple[Phase, ...]]] = {
    Load: _SETUP,
    AneAdmitShape: _SETUP,
    AneAdmitPacked: _SETUP,
    AneEvictShape: _CONTROL,
    AneEvictPacked: _CONTROL,
    Unload: _CONTROL,
    Ping: _CONTROL,
    EmbedBatch: _INFERENCE,
    Rerank: _INFERENCE,
    RerankSequences: _INFERENCE,
    Generate: _INFERENCE,
}


def phases(request: type[Request], engine: str) -> tuple[Phase, ...]:
    """Return the phases an exchange passes through, in order; the first one is where it starts.

    Protocol-v3 section 4: only ``owned-cuda`` starts an inference exchange in ``setup``, and never goes back.
    """
    found = _PHASES[request]
    return _SWITCHING if found is _INFERENCE and engine == CUDA_ENGINE else found


Buffer: TypeAlias = bytes | bytearray | memoryview

_encoder = msgspec.json.Encoder()


def encode(message: Hello | HelloAck | Message) -> bytes:
    """Return the JSON bytes of a control frame: fields in the order of the type, the tag first, no spaces.

    Nothing is checked, since what we build is typed. Raises ValueError for text that JSON can't hold, such as the path
    of a file whose name isn't UTF-8.
    """
    return _encoder.encode(message)


def type_name(message: type[Struct] | Struct) -> str:
    """Return the wire name of a message: its tag, or HELLO / HELLO_ACK for the two untagged ones."""
    kind = message if isinstance(message, type) else type(message)
    if kind is Hello:
        return "HELLO"
    if kind is HelloAck:
        return "HELLO_ACK"
    return cast(str, kind.__struct_config__.tag)
