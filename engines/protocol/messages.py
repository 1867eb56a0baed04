"""One frozen Struct per control frame of protocol v3, and the few tables that describe an exchange.

Field names, tags and types are those of the seed and of protocol-v3 section 3. Optional fields are omitted, never
null (``UNSET``). Unknown fields are refused everywhere but in HELLO. msgspec's own bounds stop at int64, so the u64
ceilings and the limits in bytes are checked by hand, when decoding and by :func:`encode_checked`.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias, cast

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from engines.protocol.errors import ErrorCode

VERSION: Final = 3
DEFAULT_MAX_FRAME: Final = 64 * 1024 * 1024
"""Default and ceiling of a frame's payload in bytes."""
HELLO_MAX_FRAME: Final = 64 * 1024
"""HELLO is read under the smaller of this and the host's own maximum."""
MAX_NESTING: Final = 32
"""Levels of objects and arrays in HELLO, the one frame whose unknown fields are skipped, however deep they are.

Everywhere else the types are the limit: the decoder refuses the first value that they don't name.
"""
MAX_ITEMS: Final = 256
"""Items, candidates or sequences an exchange may carry."""
MAX_IDENTIFIER_BYTES: Final = 64
"""Length of a req_id or an item id; at least 1."""
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


def n_tokens(request: Request) -> int | None:
    """Return how many ids the raw frame must hold by the header's own count, or None where it doesn't say."""
    if isinstance(request, EmbedBatch):
        return sum([item.n_tokens for item in request.items])
    if isinstance(request, Rerank):
        return request.query_n_tokens + sum([segment.n_tokens for segment in request.candidates])
    if isinstance(request, RerankSequences):
        return sum([segment.n_tokens for segment in request.sequences])
    return None


def n_rows(request: Request) -> int:
    """Return how many rows the reply of a serving request describes (0 for other requests)."""
    if isinstance(request, EmbedBatch):
        return len(request.items)
    if isinstance(request, Rerank):
        return len(request.candidates)
    if isinstance(request, RerankSequences):
        return len(request.sequences)
    return 0


Buffer: TypeAlias = bytes | bytearray | memoryview

_NOT_BRACKETS: Final = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[^\[\]{}"]+', re.DOTALL)
"""What lies between the brackets of a JSON text: strings whole (the last one perhaps unfinished), and all else."""
_encoder = msgspec.json.Encoder()
_from_host: msgspec.json.Decoder[FromHost] = msgspec.json.Decoder(FromHost)
_from_worker: msgspec.json.Decoder[FromWorker] = msgspec.json.Decoder(FromWorker)
_hello: msgspec.json.Decoder[Hello] = msgspec.json.Decoder(Hello)
_ack: msgspec.json.Decoder[HelloAck] = msgspec.json.Decoder(HelloAck)


def encode(message: Hello | HelloAck | Message) -> bytes:
    """Return the JSON bytes of a control frame: fields in the order of the type, the tag first, no spaces."""
    return _encoder.encode(message)


def _too_long(text: str) -> bool:
    return len(text.encode("utf-8")) > MAX_IDENTIFIER_BYTES


def decode_from_host(data: Buffer) -> FromHost:
    """Decode what a worker reads after the handshake; raise one of :data:`DECODE_ERRORS`."""
    message = _from_host.decode(data)
    if type(message) is Shutdown:
        return message
    # The types count characters, the rule counts bytes; for ASCII both are the same.
    request: Any = message
    if not request.req_id.isascii() and _too_long(request.req_id):
        raise msgspec.ValidationError("req_id must have 1 to 64 bytes")
    if type(message) is EmbedBatch:
        text = bytes(data)
        # 256 ids one by one would cost more than the decoding; a plain frame has only plain ids.
        if not text.isascii() or b"\\" in text:
            for item in message.items:
                if _too_long(item.id):
                    raise msgspec.ValidationError("item id must have 1 to 64 bytes")
    return message


def decode_from_worker(data: Buffer) -> FromWorker:
    """Decode what a host reads after the handshake; raise one of :data:`DECODE_ERRORS`."""
    message = _from_worker.decode(data)
    req_id = message.req_id
    if req_id is not UNSET and not req_id.isascii() and _too_long(req_id):
        raise msgspec.ValidationError("req_id must have 1 to 64 bytes")
    kind = type(message)
    if isinstance(message, Vectors):  # the hot one, without the loop
        if message.n > U64_MAX:
            raise msgspec.ValidationError("n is above the u64 range")
    elif kind in _U64_FIELDS:
        for name in _U64_FIELDS[kind]:
            if getattr(message, name) > U64_MAX:
                raise msgspec.ValidationError(f"{name} is above the u64 range")
    return message


def decode_hello(data: Buffer) -> Hello:
    """Decode HELLO. ``v`` must be a JSON integer in a byte: ``3.0``, ``"3"``, ``true`` and 256 are refused."""
    # The decoder skips what it doesn't know without looking at its encoding; JSON text is UTF-8 as a whole. How deep it
    # can follow differs between versions of Python, so depth is limited before.
    text = bytes(data)
    text.decode("utf-8")
    depth = 0
    for bracket in _NOT_BRACKETS.sub(b"", text):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_NESTING:
            raise msgspec.ValidationError(f"HELLO nests deeper than {MAX_NESTING} levels")
    return _hello.decode(text)


def decode_ack(data: Buffer) -> HelloAck:
    """Decode HELLO_ACK."""
    return _ack.decode(data)


DECODE_ERRORS: Final = (msgspec.DecodeError, ValueError, RecursionError)
"""What decoding a stranger's bytes may raise: malformed or mistyped JSON, bad UTF-8, absurd numbers, deep nesting."""

_U64_FIELDS: Final[dict[type[Struct], tuple[str, ...]]] = {
    Progress: ("completed",),
    Loaded: ("cold_load_ms",),
    Pong: ("rss_mb", "models_loaded"),
}
_BATCHES: Final = frozenset({EmbedBatch, Rerank, RerankSequences})
_ANSWERS: Final = frozenset({Vectors, Scores, Progress})


def encode_checked(message: Hello | HelloAck | Message) -> bytes:
    """Return the JSON bytes of a frame that the peer's decoder accepts; raise :class:`msgspec.ValidationError`.

    Structs don't validate what they are built with, so a rare frame is decoded again. Frames of the hot path would pay
    more for that than for their encoding: the connection compares their fields with the exchange instead.
    """
    kind = type(message)
    try:
        data = _encoder.encode(message)
        if kind in _ANSWERS:
            if isinstance(message, Progress) and not 0 <= message.completed <= U64_MAX:
                raise msgspec.ValidationError(f"completed {message.completed} is outside the u64 range")
            return data
        if kind in _BATCHES:
            batch: Any = message
            _check_batch(batch, data)
        elif kind is Hello:
            decode_hello(data)
        elif kind is HelloAck:
            decode_ack(data)
        elif isinstance(message, Request | Shutdown):
            decode_from_host(data)
        else:
            decode_from_worker(data)
    except (*DECODE_ERRORS, TypeError, AttributeError, OverflowError) as exc:
        raise msgspec.ValidationError(str(exc)) from exc
    return data


def _check_batch(request: EmbedBatch | Rerank | RerankSequences, data: bytes) -> None:
    """Refuse what the worker's decoder would refuse, without decoding: wrong ids, negative counts, unknown pooling."""
    # Without other than ASCII characters a length in characters is one in bytes. A minus sign behind the first bracket
    # may be a negative count. (Searches for one byte: for two they cost as much as the encoding.)
    suspicious = (
        not data.isascii()
        or not 1 <= len(request.req_id) <= MAX_IDENTIFIER_BYTES
        or data.find(b"-", data.find(b"[")) >= 0
    )
    if isinstance(request, EmbedBatch):
        suspicious = suspicious or request.packed_width is not UNSET or type(request.pooling) is not Pooling
        if not suspicious:
            lengths = [len(item.id) for item in request.items]
            # An empty list is the connection's to refuse: it counts items.
            suspicious = bool(lengths) and (min(lengths) < 1 or max(lengths) > MAX_IDENTIFIER_BYTES)
    elif isinstance(request, Rerank) and request.query_n_tokens < 0:
        suspicious = True
    if suspicious:
        decode_from_host(data)


def type_name(message: type[Struct] | Struct) -> str:
    """Return the wire name of a message: its tag, or HELLO / HELLO_ACK for the two untagged ones."""
    kind = message if isinstance(message, type) else type(message)
    if kind is Hello:
        return "HELLO"
    if kind is HelloAck:
        return "HELLO_ACK"
    return cast(str, kind.__struct_config__.tag)
