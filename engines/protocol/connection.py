"""The rules of the wire as one sans-IO state machine, used by both ends.

A :class:`Connection` owns: HELLO first, the exact version, one exchange in flight, matching req_ids, a header glued to
its payload, rising progress counters, phase order, the negotiated max_frame. It does not own: nonce equality (host),
silence windows (watchdog), what a request means (dispatch), sockets, threads or clocks.

A violation while sending is a LocalProtocolError (our bug, nothing was written, the connection stays usable); while
receiving it is a RemoteProtocolError (close the transport; nothing later is valid).
"""

from __future__ import annotations

from typing import Any, Final, NoReturn, cast

from msgspec import Struct

from engines.protocol.decoding import DECODE_ERRORS, decode_ack, decode_from_host, decode_from_worker, decode_hello
from engines.protocol.errors import LocalProtocolError, RemoteProtocolError, VersionMismatch
from engines.protocol.expectation import Expectation, check_request
from engines.protocol.framing import LENGTH, Allocate, FrameReader, SpentReader, allocate_fresh, raw_view
from engines.protocol.messages import (
    DEFAULT_MAX_FRAME,
    HELLO_MAX_FRAME,
    REPLY_TO,
    VERSION,
    AnyReply,
    AnyRequest,
    Buffer,
    Dtype,
    Err,
    Hello,
    HelloAck,
    Message,
    Progress,
    Scores,
    Shutdown,
    Vectors,
    encode,
    type_name,
)
from engines.protocol.rules import (
    KINDS,
    TRANSITIONS,
    Event,
    Kind,
    PeerClosed,
    ReplyReceived,
    ReplyStarted,
    RequestReceived,
    Role,
    State,
)

_DTYPES: Final[dict[type[Struct], Dtype]] = {
    kind: kind.payload for kind in KINDS if issubclass(kind, Message) and kind.payload is not None
}


def _steps(role: Role, state: State) -> dict[type[Struct], State]:
    """Return the state after each control frame that *role* may send in *state*: the table, keyed for one look-up."""
    found = {struct: TRANSITIONS.get((state, role, kind)) for struct, kind in KINDS.items()}
    return {struct: following for struct, following in found.items() if following is not None}


# Read once: an enum's member costs a look-up in its class.
_BUSY: Final = State.BUSY
_IDLE: Final = State.IDLE
_pack: Final = LENGTH.pack

_STEPS: Final = {role: {state: _steps(role, state) for state in State} for role in Role}
_PAYLOAD_STEPS: Final = {state: after for (state, _, kind), after in TRANSITIONS.items() if kind is Kind.PAYLOAD}
"""The state after a raw frame; only the side that owes it is ever asked."""
_AWAITING: Final = {
    Role.HOST: frozenset({State.HELLO, State.REPLY_PAYLOAD, State.STOPPING_PAYLOAD}),
    Role.WORKER: frozenset({State.ACK, State.REQUEST_PAYLOAD}),
}
"""States, beside those of control frames, in which an end reads from its peer."""
_REPLIES: Final = frozenset({*REPLY_TO.values(), Err})


class Connection:
    """One end of a worker connection.

    Receiving: fill :meth:`get_buffer`, call :meth:`buffer_updated`, then :meth:`next_event` until it returns None.
    Sending: :meth:`send` returns the buffers to write, in order, without anything between them.

    Not thread-safe: a worker guards it, together with the socket's send, by one lock.
    """

    def __init__(self, role: Role, *, max_frame: int = DEFAULT_MAX_FRAME, allocate: Allocate = allocate_fresh) -> None:
        if not 1 <= max_frame <= DEFAULT_MAX_FRAME:
            raise ValueError(f"max_frame must be 1 to {DEFAULT_MAX_FRAME}, not {max_frame}")
        self.role = role
        self.state = State.HELLO
        self.max_frame = max_frame
        self.engine = ""  # HELLO names it
        self._peer = role.peer
        self._sending = _STEPS[role]
        self._receiving = _STEPS[role.peer]
        self._is_host = role is Role.HOST
        self.expectation = Expectation()
        self._header: Vectors | Scores | None = None
        self._raw_size = 0
        self._started = False
        self._pending: AnyRequest | None = None
        # Spec (protocol-v3, 1): HELLO is read under min(64 KiB, own maximum). The ACK is no larger.
        self._reader: FrameReader = FrameReader(max_frame=min(HELLO_MAX_FRAME, max_frame), allocate=allocate)

    # --- receiving ---------------------------------------------------------------------------------------------------

    def get_buffer(self) -> memoryview:
        """Return where the transport should put the next bytes."""
        return self._reader.get_buffer()

    def buffer_updated(self, count: int) -> None:
        """Record that *count* bytes arrived in the last :meth:`get_buffer`."""
        self._reader.buffer_updated(count)

    @property
    def mid_frame(self) -> bool:
        """True when part of an unfinished frame has arrived."""
        return not self._reader.at_boundary

    def receive_eof(self) -> PeerClosed:
        """Record the end of the stream: PeerClosed between two frames, RemoteProtocolError inside one.

        Between two frames also means: between a header and its raw frame. What an EOF costs is the owner's rule: a
        worker exits 0, a host with an exchange open counts a crash.
        """
        if self.mid_frame:
            self._fail(RemoteProtocolError("the stream ended inside a frame", reason="torn"))
        self.state = State.CLOSED
        return PeerClosed()

    def next_event(self) -> Event | None:
        """Return the next event in what has arrived, or None when more bytes are needed; handle it before the next.

        Raises RemoteProtocolError once; close the transport. The connection takes no notice of anything later.
        """
        try:
            return self._next_event()
        except RemoteProtocolError as exc:
            self._fail(exc)
        except DECODE_ERRORS as exc:
            # The text may quote the peer's bytes, up to a whole frame of them.
            text = f"malformed frame while {self.state.value}: {str(exc)[:200]}"
            self._fail(RemoteProtocolError(text, reason="malformed"), exc)

    def _fail(self, error: RemoteProtocolError, cause: BaseException | None = None) -> NoReturn:
        self.state = State.CLOSED
        self._reader = SpentReader()
        if cause is None:
            raise error
        raise error from cause

    def _next_event(self) -> Event | None:
        state = self.state
        reader = self._reader
        if state is _BUSY or state is _IDLE or state is State.STOPPING:
            frame = reader.next_control()
            if frame is None:
                return None
            return self._from_worker(frame) if self._is_host else self._from_host(frame)
        if state in _AWAITING[self.role]:
            if state is State.HELLO:
                frame = reader.next_control()
                return None if frame is None else self._hello(decode_hello(frame))
            if state is State.ACK:
                frame = reader.next_control()
                return None if frame is None else self._ack(decode_ack(frame))
            return self._reply_payload() if self._is_host else self._request_payload()
        # What is left: the peer has nothing to say in this state. Spec: "Anything else before HELLO_ACK = protocol
        # violation", so the first byte is one already.
        if reader.at_boundary:
            return None
        raise RemoteProtocolError(f"data from the {self._peer.value} while {state.value}", reason="out_of_turn")

    def _advance(self, kind: type[Struct]) -> None:
        """Move on a control frame from the peer."""
        following = self._receiving[self.state].get(kind)
        if following is None:
            text = f"{type_name(kind)} from the {self._peer.value} while {self.state.value}"
            raise RemoteProtocolError(text, reason="out_of_turn")
        self.state = following

    def _hello(self, hello: Hello) -> Event:
        # Spec: "v is the protocol version BYTE (integer); module accepts only an exact match."
        if hello.v != VERSION:
            raise VersionMismatch(hello.v, VERSION)
        if hello.max_frame == 0:
            raise RemoteProtocolError("HELLO offers a max_frame of 0")
        self._advance(Hello)
        self.engine = hello.engine.engine
        self.max_frame = min(self.max_frame, hello.max_frame)
        return hello

    def _ack(self, ack: HelloAck) -> Event:
        if ack.v != VERSION:
            raise RemoteProtocolError(f"HELLO_ACK speaks protocol version {ack.v}, not {VERSION}")
        if not ack.accept:
            raise RemoteProtocolError("the host refused this worker")
        # protocol-v3, 1: an ACK of 0 or above the worker's own maximum is refused.
        if not 1 <= ack.max_frame <= self.max_frame:
            raise RemoteProtocolError(f"HELLO_ACK names a max_frame of {ack.max_frame}, allowed 1 to {self.max_frame}")
        self._advance(HelloAck)
        self.max_frame = self._reader.max_frame = ack.max_frame
        return ack

    def _from_host(self, frame: memoryview) -> Event | None:
        message = decode_from_host(frame)
        kind = type(message)
        self._advance(kind)
        if isinstance(message, Shutdown):
            return message
        request: Any = message
        if request.payload is None:
            self.expectation.open(request, 0, self.engine)
            return RequestReceived(request, None)
        self._pending = request
        return self._request_payload()

    def _request_payload(self) -> Event | None:
        # Any length is read: the worker drains the raw frame even of a request it refuses.
        payload = self._reader.next_raw()
        if payload is None:
            return None
        request: Any = self._pending
        self._pending = None
        self.state = _PAYLOAD_STEPS[self.state]
        self.expectation.open(request, len(payload), self.engine)
        return RequestReceived(request, payload)

    def _from_worker(self, frame: memoryview) -> Event | None:
        message = decode_from_worker(frame)
        kind = type(message)
        self._advance(kind)
        if kind is Progress:
            progress: Any = message
            self.expectation.advance(progress, self.expectation.check_progress(progress, RemoteProtocolError))
            return cast(Progress, progress)
        reply: Any = message
        expected = self.expectation.check_reply(reply, RemoteProtocolError)
        if reply.payload is None:
            return self._answered(reply, None)
        if expected > self.max_frame:
            text = f"{type_name(reply)} promises {expected} bytes, max_frame is {self.max_frame}"
            raise RemoteProtocolError(text, reason="oversize")
        self._header = reply
        self._raw_size = expected
        self._started = False
        return self._reply_payload()

    def _reply_payload(self) -> Event | None:
        header: Any = self._header
        payload = self._reader.next_raw(self._raw_size)
        if payload is None:
            if self._started:
                return None
            self._started = True
            return ReplyStarted(header)
        self._header = None
        self.state = _PAYLOAD_STEPS[self.state]
        return self._answered(header, payload)

    def _answered(self, reply: AnyReply, payload: memoryview | None) -> Event:
        return ReplyReceived(self.expectation.close(reply), reply, payload)

    # --- sending -----------------------------------------------------------------------------------------------------

    def send(self, message: Hello | HelloAck | Message, payload: Buffer | None = None) -> list[Buffer]:
        """Return the buffers that carry *message* and its raw *payload*, to be written without a gap.

        The first buffer holds every length prefix and header, the second (if any) shows *payload* itself, uncopied:
        leave it unchanged until written. *payload* is any buffer that :func:`framing.raw_view` accepts.
        Raises LocalProtocolError before anything may be written; the state is then unchanged.
        """
        # What the type says is established by comparing `kind`; narrowing by calls would cost as much as the checks.
        known: Any = message
        kind = type(message)
        following = self._sending[self.state].get(kind)
        if following is None:
            raise LocalProtocolError(f"{kind.__name__} can't be sent by the {self.role.value} while {self.state.value}")
        dtype = _DTYPES.get(kind)
        if (dtype is None) != (payload is None):
            raise LocalProtocolError(f"{type_name(message)} {'takes no' if dtype is None else 'needs its'} raw frame")
        try:
            body = encode(message)
        except (ValueError, TypeError, OverflowError) as exc:  # such as an artifact's path that isn't UTF-8
            raise LocalProtocolError(f"{type_name(message)}: {exc}") from exc
        raw: Buffer | None = None
        size = index = 0
        limit = self.max_frame
        if payload is not None and dtype is not None:
            raw = payload if type(payload) is bytes else raw_view(payload)
            size = len(raw)
        request = kind in REPLY_TO
        answers = False
        if request:
            if raw is not None:
                check_request(known, size)
        elif kind is Progress:
            index = self.expectation.check_progress(known, LocalProtocolError)
        elif kind in _REPLIES:
            answers = True
            expected = self.expectation.check_reply(known, LocalProtocolError)
            if size != expected:
                raise LocalProtocolError(f"raw frame of {size} bytes where {type_name(message)} promises {expected}")
        elif kind is not Shutdown:
            limit = self._check_handshake(message)
        if (longest := max(len(body), size)) > limit:
            raise LocalProtocolError(f"frame length {longest} exceeds max {limit}")
        head = _pack(len(body)) + body
        if raw is not None:
            following = _PAYLOAD_STEPS[following]  # both frames leave together
            head += _pack(size)
        # Nothing can fail any more: from here on the state moves.
        self.state = following
        if request:
            self.expectation.open(known, size, self.engine)
        elif answers:
            self.expectation.close(known)
        elif kind is Progress:
            self.expectation.advance(known, index)
        elif kind is not Shutdown:
            self._greeted(message)
        return [head] if raw is None or not size else [head, raw]

    def _check_handshake(self, message: Struct) -> int:
        """Refuse a HELLO or ACK that doesn't say what this end will do; return the limit of its frame."""
        if isinstance(message, Hello):
            if message.v != VERSION or not 1 <= message.max_frame <= self.max_frame:
                raise LocalProtocolError(
                    f"HELLO must name version {VERSION} and a max_frame of 1 to {self.max_frame},"
                    f" not {message.v} and {message.max_frame}"
                )
            return min(HELLO_MAX_FRAME, self.max_frame)
        ack = cast(HelloAck, message)
        # Spec (protocol-v3, 1 and 2): ACK names min(host, worker); "accept:false is never sent".
        if ack.v != VERSION or not ack.accept or ack.max_frame != self.max_frame:
            raise LocalProtocolError(
                f"HELLO_ACK must accept version {VERSION} with a max_frame of {self.max_frame},"
                f" not {ack.v}, {ack.accept} and {ack.max_frame}"
            )
        return HELLO_MAX_FRAME  # the negotiated value rules from here on, not yet this frame

    def _greeted(self, message: Struct) -> None:
        if isinstance(message, Hello):
            self.engine = message.engine.engine
            self.max_frame = message.max_frame
        else:
            self._reader.max_frame = self.max_frame
