"""The rules of the wire as one sans-IO state machine, used by both ends.

A :class:`Connection` owns: HELLO first, the exact version, one exchange in flight, matching req_ids, a header glued to
its payload, rising progress counters, phase order, the negotiated max_frame. It does not own: nonce equality (host),
silence windows (watchdog), what a request means (dispatch), sockets, threads or clocks.

A violation while sending is a LocalProtocolError (our bug, nothing was written, the connection stays usable); while
receiving it is a RemoteProtocolError (close the transport; nothing later is valid).
"""

from __future__ import annotations

from enum import Enum
from typing import Final, TypeAlias, cast

import msgspec
from msgspec import UNSET, Struct

from engines.protocol.errors import LocalProtocolError, RemoteProtocolError, VersionMismatch
from engines.protocol.framing import LENGTH, Allocate, FrameReader, allocate_fresh, encode_frame
from engines.protocol.messages import (
    DEFAULT_MAX_FRAME,
    HELLO_MAX_FRAME,
    ITEM_BYTES,
    MAX_ITEMS,
    REPLY_TO,
    VERSION,
    AnyReply,
    AnyRequest,
    Buffer,
    Err,
    FromHost,
    FromWorker,
    Hello,
    HelloAck,
    Loaded,
    Message,
    Phase,
    Progress,
    Reply,
    Request,
    Scores,
    Shutdown,
    Unloaded,
    Vectors,
    check,
    decode_ack,
    decode_from_host,
    decode_from_worker,
    decode_hello,
    encode,
    n_rows,
    n_tokens,
    phases,
    type_name,
)


class Role(Enum):
    """The two ends of a connection."""

    HOST = "host"
    WORKER = "worker"

    @property
    def peer(self) -> Role:
        """The other end."""
        return Role.WORKER if self is Role.HOST else Role.HOST


class State(Enum):
    """Where a connection stands."""

    HELLO = "waiting for HELLO"
    ACK = "waiting for HELLO_ACK"
    IDLE = "idle"
    REQUEST_PAYLOAD = "waiting for a request's raw frame"
    BUSY = "exchange running"
    REPLY_PAYLOAD = "waiting for a reply's raw frame"
    STOPPING = "exchange running, shutdown sent"
    STOPPING_PAYLOAD = "waiting for the last reply's raw frame"
    CLOSED = "closed"


class Kind(Enum):
    """Classes of frames that the rules tell apart."""

    HELLO = "HELLO"
    ACK = "HELLO_ACK"
    REQUEST = "request"
    REQUEST_WITH_PAYLOAD = "request with raw frame"
    PROGRESS = "PROGRESS"
    REPLY = "reply"
    REPLY_WITH_PAYLOAD = "reply with raw frame"
    PAYLOAD = "raw frame"
    SHUTDOWN = "SHUTDOWN"


TRANSITIONS: Final[dict[tuple[State, Role, Kind], State]] = {
    (State.HELLO, Role.WORKER, Kind.HELLO): State.ACK,
    (State.ACK, Role.HOST, Kind.ACK): State.IDLE,
    (State.IDLE, Role.HOST, Kind.REQUEST): State.BUSY,
    (State.IDLE, Role.HOST, Kind.REQUEST_WITH_PAYLOAD): State.REQUEST_PAYLOAD,
    (State.REQUEST_PAYLOAD, Role.HOST, Kind.PAYLOAD): State.BUSY,
    (State.BUSY, Role.WORKER, Kind.PROGRESS): State.BUSY,
    (State.BUSY, Role.WORKER, Kind.REPLY): State.IDLE,
    (State.BUSY, Role.WORKER, Kind.REPLY_WITH_PAYLOAD): State.REPLY_PAYLOAD,
    (State.REPLY_PAYLOAD, Role.WORKER, Kind.PAYLOAD): State.IDLE,
    # Spec: "SHUTDOWN {} -> worker exits 0 after current request."
    (State.IDLE, Role.HOST, Kind.SHUTDOWN): State.CLOSED,
    (State.BUSY, Role.HOST, Kind.SHUTDOWN): State.STOPPING,
    (State.REPLY_PAYLOAD, Role.HOST, Kind.SHUTDOWN): State.STOPPING_PAYLOAD,
    (State.STOPPING, Role.WORKER, Kind.PROGRESS): State.STOPPING,
    (State.STOPPING, Role.WORKER, Kind.REPLY): State.CLOSED,
    (State.STOPPING, Role.WORKER, Kind.REPLY_WITH_PAYLOAD): State.STOPPING_PAYLOAD,
    (State.STOPPING_PAYLOAD, Role.WORKER, Kind.PAYLOAD): State.CLOSED,
}
"""(state, sender, kind of frame) -> next state. What is not here is a violation."""


class HelloReceived(Struct, frozen=True):
    """Host: a well-formed HELLO of the right version; the host checks nonce, peer and identity, then sends ACK."""

    hello: Hello


class AckReceived(Struct, frozen=True):
    """Worker: accepted; ``max_frame`` is in force."""

    ack: HelloAck


class RequestReceived(Struct, frozen=True):
    """Worker: a request with its whole payload. The payload's length is not compared with the header's counts: a
    mismatch is the request's fault (``invalid_request``), not the stream's.
    """

    request: AnyRequest
    payload: memoryview | None


class ShutdownReceived(Struct, frozen=True):
    """Worker: leave the loop and exit 0."""


class ProgressReceived(Struct, frozen=True):
    """Host: validated progress of the running exchange."""

    progress: Progress


class ReplyStarted(Struct, frozen=True):
    """Host: a terminal header whose raw frame is still on its way; renews the silence window once."""

    reply: Vectors | Scores


class ReplyReceived(Struct, frozen=True):
    """Host: the exchange is over and drained."""

    request: AnyRequest
    reply: AnyReply
    payload: memoryview | None


class PeerClosed(Struct, frozen=True):
    """The peer closed the stream between two frames."""


Event: TypeAlias = (
    HelloReceived
    | AckReceived
    | RequestReceived
    | ShutdownReceived
    | ProgressReceived
    | ReplyStarted
    | ReplyReceived
    | PeerClosed
)


class Connection:
    """One end of a worker connection.

    Receiving: fill :meth:`get_buffer`, call :meth:`buffer_updated`, then :meth:`next_event` until it returns None.
    Sending: :meth:`send` returns the buffers to write, in order, without anything between them.

    Not thread-safe: a worker guards it, together with the socket's send, by one lock.
    """

    def __init__(
        self, role: Role, *, max_frame: int = DEFAULT_MAX_FRAME, allocate: Allocate = allocate_fresh, engine: str = ""
    ) -> None:
        if not 1 <= max_frame <= DEFAULT_MAX_FRAME:
            raise ValueError(f"max_frame must be 1 to {DEFAULT_MAX_FRAME}, not {max_frame}")
        self.role = role
        self.state = State.HELLO
        self.max_frame = max_frame
        self.engine = engine
        self.request: AnyRequest | None = None
        self.completed = 0
        self._phases: tuple[Phase, ...] = ()
        self._phase_index = 0
        self._header: Vectors | Scores | None = None
        self._started = False
        self._pending: AnyRequest | None = None
        self._dims: dict[str, int] = {}
        # Spec (protocol-v3, 1): HELLO is read under min(64 KiB, own maximum).
        self._reader = FrameReader(max_frame=min(HELLO_MAX_FRAME, max_frame), allocate=allocate)

    # --- receiving ---------------------------------------------------------------------------------------------------

    def get_buffer(self) -> memoryview:
        """Return where the transport should put the next bytes."""
        return self._reader.get_buffer()

    def buffer_updated(self, count: int) -> None:
        """Record that *count* bytes arrived in the last :meth:`get_buffer`."""
        self._reader.buffer_updated(count)

    @property
    def phase(self) -> Phase | None:
        """The phase of the running exchange, None when idle."""
        return self._phases[self._phase_index] if self.request is not None else None

    @property
    def mid_frame(self) -> bool:
        """True when part of an unfinished frame has arrived."""
        return not self._reader.at_boundary

    def receive(self, data: Buffer) -> list[Event]:
        """Feed bytes from the peer and return the events they complete; handle each before feeding more.

        Raises RemoteProtocolError once; close the transport, nothing later is valid.
        """
        events: list[Event] = []
        view = memoryview(data)
        while view:
            target = self.get_buffer()
            count = min(len(target), len(view))
            target[:count] = view[:count]
            self.buffer_updated(count)
            view = view[count:]
            while (event := self.next_event()) is not None:
                events.append(event)
        return events

    def receive_eof(self) -> PeerClosed:
        """Record the end of the stream: PeerClosed between two frames, RemoteProtocolError inside one."""
        torn = self.mid_frame
        self.state = State.CLOSED
        if torn:
            raise RemoteProtocolError("the stream ended inside a frame")
        return PeerClosed()

    def next_event(self) -> Event | None:
        """Return the next event in what has arrived, or None when more bytes are needed.

        Raises RemoteProtocolError; the connection is closed then.
        """
        try:
            return self._next_event()
        except RemoteProtocolError:
            self.state = State.CLOSED
            raise
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            expected = "HELLO" if self.state is State.HELLO else "control frame"
            self.state = State.CLOSED
            raise RemoteProtocolError(f"malformed {expected}: {exc}") from exc

    def _next_event(self) -> Event | None:
        reader = self._reader
        state = self.state
        if state is State.REPLY_PAYLOAD or state is State.STOPPING_PAYLOAD:
            if self.role is Role.HOST:
                return self._reply_payload()
        elif state is State.REQUEST_PAYLOAD and self.role is Role.WORKER:
            payload = reader.next_frame(raw=True)
            if payload is None:
                return None
            self._advance(Kind.PAYLOAD)
            request = cast(AnyRequest, self._pending)
            self._open(request)
            return RequestReceived(request, payload)
        if state is State.CLOSED:
            if reader.at_boundary:
                return None
            raise RemoteProtocolError("data after the end of the connection")
        frame = reader.next_frame(raw=False)
        if frame is None:
            return None
        if self.role is Role.HOST:
            if state is State.HELLO:
                return self._hello(decode_hello(frame))
            if state is State.ACK:
                raise RemoteProtocolError("the worker sent a frame before HELLO_ACK")
            return self._from_worker(decode_from_worker(frame))
        if state is State.ACK:
            return self._ack(decode_ack(frame))
        if state is State.HELLO:
            raise RemoteProtocolError("the host sent a frame before HELLO")
        return self._from_host(decode_from_host(frame))

    def _advance(self, kind: Kind) -> None:
        """Move on a frame from the peer."""
        following = TRANSITIONS.get((self.state, self.role.peer, kind))
        if following is None:
            raise RemoteProtocolError(f"{kind.value} from the {self.role.peer.value} while {self.state.value}")
        self.state = following

    def _hello(self, hello: Hello) -> Event:
        # Spec: "v is the protocol version BYTE (integer); module accepts only an exact match."
        if hello.v != VERSION:
            raise VersionMismatch(hello.v, VERSION)
        if hello.max_frame == 0:
            raise RemoteProtocolError("HELLO offers a max_frame of 0")
        self._advance(Kind.HELLO)
        self.engine = hello.engine.engine
        self.max_frame = min(self.max_frame, hello.max_frame)
        return HelloReceived(hello)

    def _ack(self, ack: HelloAck) -> Event:
        if ack.v != VERSION:
            raise RemoteProtocolError(f"HELLO_ACK speaks protocol version {ack.v}, not {VERSION}")
        if not ack.accept:
            raise RemoteProtocolError("the host refused this worker")
        # protocol-v3, 1: an ACK of 0 or above the worker's own maximum is refused.
        if not 1 <= ack.max_frame <= self.max_frame:
            raise RemoteProtocolError(f"HELLO_ACK names a max_frame of {ack.max_frame}, allowed 1 to {self.max_frame}")
        self._advance(Kind.ACK)
        self.max_frame = self._reader.max_frame = ack.max_frame
        return AckReceived(ack)

    def _from_host(self, message: FromHost) -> Event | None:
        if isinstance(message, Shutdown):
            self._advance(Kind.SHUTDOWN)
            return ShutdownReceived()
        if message.payload is None:
            self._advance(Kind.REQUEST)
            self._open(message)
            return RequestReceived(message, None)
        self._advance(Kind.REQUEST_WITH_PAYLOAD)
        self._pending = message
        return self._next_event()

    def _from_worker(self, message: FromWorker) -> Event | None:
        if isinstance(message, Progress):
            self._advance(Kind.PROGRESS)
            self._check_progress(message, RemoteProtocolError)
            return ProgressReceived(message)
        if message.payload is None:
            self._advance(Kind.REPLY)
            self._check_reply(message, RemoteProtocolError)
            return self._close_exchange(message, None)
        self._advance(Kind.REPLY_WITH_PAYLOAD)
        self._check_reply(message, RemoteProtocolError)
        self._header = cast(Vectors | Scores, message)
        self._started = False
        return self._reply_payload()

    def _reply_payload(self) -> Event | None:
        header = cast(Vectors | Scores, self._header)
        payload = self._reader.next_frame(raw=True, exact=self._payload_bytes(header))
        if payload is None:
            if self._started:
                return None
            self._started = True
            return ReplyStarted(header)
        self._advance(Kind.PAYLOAD)
        self._header = None
        return self._close_exchange(header, payload)

    # --- sending -----------------------------------------------------------------------------------------------------

    def send(self, message: Hello | HelloAck | Message, payload: Buffer | None = None) -> list[Buffer]:
        """Return the buffers that carry *message* and its raw *payload*, to be written without a gap.

        The first buffer holds every length prefix and header, the second (if any) is *payload* itself, uncopied.
        Raises LocalProtocolError before anything may be written; the state is then unchanged.
        """
        kind = _kind(message)
        following = TRANSITIONS.get((self.state, self.role, kind))
        if following is None:
            raise LocalProtocolError(f"{type_name(message)} can't be sent while {self.state.value}")
        dtype = message.payload if isinstance(message, Message) else None
        if (dtype is None) != (payload is None):
            raise LocalProtocolError(f"{type_name(message)} {'takes no' if dtype is None else 'needs its'} raw frame")
        if isinstance(message, Message):
            try:
                check(message)
            except msgspec.ValidationError as exc:
                raise LocalProtocolError(f"{type_name(message)}: {exc}") from exc
        if isinstance(message, Request):
            self._check_request(message, payload)
        elif isinstance(message, Progress):
            self._check_progress(message, LocalProtocolError)
        elif isinstance(message, Reply):
            self._check_reply(message, LocalProtocolError)
            if payload is not None and _size(payload) != self._payload_bytes(cast(Vectors | Scores, message)):
                raise LocalProtocolError(f"raw frame of {_size(payload)} bytes does not fit {type_name(message)}")
        limit = min(HELLO_MAX_FRAME, self.max_frame) if isinstance(message, Hello) else self.max_frame
        head = encode_frame(encode(message), max_frame=limit)
        buffers: list[Buffer] = [head]
        if payload is not None:
            size = _size(payload)
            if size > self.max_frame:
                raise LocalProtocolError(f"frame length {size} exceeds max {self.max_frame}")
            buffers = [head + LENGTH.pack(size), payload] if size else [head + LENGTH.pack(0)]
            following = TRANSITIONS[(following, self.role, Kind.PAYLOAD)]
        self._sent(message)
        self.state = following
        return buffers

    def _sent(self, message: Hello | HelloAck | Message) -> None:
        if isinstance(message, Request):
            self._open(cast(AnyRequest, message))
        elif isinstance(message, Reply):
            self._close_exchange(cast(AnyReply, message), None)
        elif isinstance(message, Hello):
            self.engine = message.engine.engine
            self.max_frame = message.max_frame
        elif isinstance(message, HelloAck):
            self.max_frame = self._reader.max_frame = message.max_frame

    def _check_request(self, request: Request, payload: Buffer | None) -> None:
        if payload is None:
            return
        size = _size(payload)
        if size % ITEM_BYTES:
            raise LocalProtocolError(f"i32 frame length {size} is not divisible by {ITEM_BYTES}")
        expected = n_tokens(request)
        if expected is not None and size != expected * ITEM_BYTES:
            raise LocalProtocolError(f"raw frame of {size} bytes where the header counts {expected} ids")
        if n_rows(request) > MAX_ITEMS:
            raise LocalProtocolError(f"{n_rows(request)} items in one exchange, at most {MAX_ITEMS}")

    # --- rules of an exchange, the same for both ends -----------------------------------------------------------------

    def _open(self, request: AnyRequest) -> None:
        self.request = request
        self.completed = 0
        self._phases = phases(type(request), self.engine)
        self._phase_index = 0

    def _close_exchange(self, reply: AnyReply, payload: memoryview | None) -> Event:
        request = cast(AnyRequest, self.request)
        self.request = None
        if isinstance(reply, Loaded):
            self._dims[reply.model_ref] = reply.dims
        elif isinstance(reply, Unloaded):
            self._dims.pop(getattr(request, "model_ref", ""), None)
        return ReplyReceived(request, reply, payload)

    def _payload_bytes(self, reply: Vectors | Scores) -> int:
        rows = n_rows(cast(Request, self.request))
        width = reply.dims if isinstance(reply, Vectors) else 1
        return rows * width * ITEM_BYTES

    def _check_progress(self, progress: Progress, error: type[Exception]) -> None:
        request = cast(AnyRequest, self.request)
        if progress.req_id != request.req_id:
            raise error(f"PROGRESS for {progress.req_id!r} while {request.req_id!r} runs")
        # Spec: "counters strictly increase for completed work", so equal is wrong too.
        if progress.completed <= self.completed:
            raise error(f"progress {progress.completed} after {self.completed}")
        if progress.phase not in self._phases[self._phase_index :]:
            accepted = ", ".join(phase.value for phase in self._phases[self._phase_index :])
            raise error(f"phase {progress.phase.value} in {type_name(request)}, accepted now: {accepted}")
        self._phase_index = self._phases.index(progress.phase)
        self.completed = progress.completed

    def _check_reply(self, reply: Reply, error: type[Exception]) -> None:
        request = cast(AnyRequest, self.request)
        req_id = getattr(reply, "req_id", UNSET)
        if req_id is not UNSET and req_id != request.req_id:
            raise error(f"{type_name(reply)} for {req_id!r} while {request.req_id!r} runs")
        if isinstance(reply, Err):
            return
        if type(reply) is not REPLY_TO[type(request)]:
            raise error(f"{type_name(reply)} in answer to {type_name(request)}")
        if isinstance(reply, Vectors):
            if reply.n != n_rows(request):
                raise error(f"VECTORS names {reply.n} rows for {n_rows(request)} items")
            known = self._dims.get(getattr(request, "model_ref", ""))
            if reply.dims == 0 or (known is not None and reply.dims != known):
                raise error(f"VECTORS names {reply.dims} dims, the model has {known}")
        elif isinstance(reply, Loaded) and reply.dims == 0:
            raise error("LOADED names 0 dims")


def _size(payload: Buffer) -> int:
    return payload.nbytes if isinstance(payload, memoryview) else len(payload)


def _kind(message: Hello | HelloAck | Message) -> Kind:
    match message:
        case Hello():
            return Kind.HELLO
        case HelloAck():
            return Kind.ACK
        case Progress():
            return Kind.PROGRESS
        case Shutdown():
            return Kind.SHUTDOWN
        case Request():
            return Kind.REQUEST if message.payload is None else Kind.REQUEST_WITH_PAYLOAD
        case Reply():
            return Kind.REPLY if message.payload is None else Kind.REPLY_WITH_PAYLOAD
    raise LocalProtocolError(f"{type_name(message)} is not a frame of this protocol")
