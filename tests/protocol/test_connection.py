"""One end of the wire at a time, and both wired back to back."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from engines.protocol import messages as m
from engines.protocol.connection import (
    AckReceived,
    Connection,
    HelloReceived,
    PeerClosed,
    ProgressReceived,
    ReplyReceived,
    ReplyStarted,
    RequestReceived,
    Role,
    ShutdownReceived,
    State,
)
from engines.protocol.errors import ErrorCode, LocalProtocolError, RemoteProtocolError, VersionMismatch
from engines.protocol.framing import ReusedBuffer
from engines.protocol.states import KINDS, TRANSITIONS, Kind
from tests.support.pair import ConnectionPair, byte_by_byte, cut_at, joined, make_hello, random_cuts, ready, whole

MIB = 1 << 20


def embed(*lengths: int, req_id: str = "e", ref: str = "llama:0") -> m.EmbedBatch:
    items = [m.Item(id=str(index), n_tokens=length) for index, length in enumerate(lengths)]
    return m.EmbedBatch(req_id=req_id, model_ref=ref, pooling=m.Pooling.MEAN, normalize=True, items=items)


def ids(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int32)


def rows(n: int, dims: int) -> np.ndarray:
    return np.arange(n * dims, dtype=np.float32).reshape(n, dims)


def framed(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


# --- handshake -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("maximum", [0, -1, m.DEFAULT_MAX_FRAME + 1])
def test_own_maximum_is_bounded(maximum: int) -> None:
    with pytest.raises(ValueError, match="max_frame must be 1 to"):
        Connection(Role.HOST, max_frame=maximum)


@pytest.mark.parametrize(("host", "worker", "agreed"), [(MIB, MIB, MIB), (4096, MIB, 4096), (MIB, 4096, 4096)])
def test_max_frame_is_the_minimum_and_rules_both_ways(host: int, worker: int, agreed: int) -> None:
    pair = ConnectionPair(host_max_frame=host, worker_max_frame=worker)
    pair.handshake()
    assert pair.host.max_frame == pair.worker.max_frame == agreed
    fits, too_many = agreed // 4, agreed // 4 + 1
    with pytest.raises(LocalProtocolError, match=f"frame length {too_many * 4} exceeds max {agreed}"):
        pair.host.send(embed(too_many), ids(too_many))
    pair.host_sends(embed(fits), ids(fits))
    with pytest.raises(LocalProtocolError, match="exceeds max"):
        pair.worker.send(m.Vectors(req_id="e", dims=too_many, n=1), rows(1, too_many))
    pair.worker_sends(m.Vectors(req_id="e", dims=fits, n=1), rows(1, fits))
    for role in Role:
        with pytest.raises(RemoteProtocolError, match=f"frame length {agreed + 1} exceeds max {agreed}"):
            pair.deliver(role, struct.pack("<I", agreed + 1))


def test_an_ack_that_would_not_fit_the_negotiated_limit_still_leaves() -> None:
    """The agreed value rules from the ACK on, so a tiny offer can't make the host fail at its own ACK."""
    host = Connection(Role.HOST)
    hello = m.encode(make_hello(max_frame=10))
    (event,) = host.receive(framed(hello))
    assert isinstance(event, HelloReceived) and host.max_frame == 10
    host.send(m.HelloAck(v=3, accept=True, max_frame=10))
    with pytest.raises(LocalProtocolError, match="exceeds max 10"):
        host.send(m.Ping(req_id="p"))
    assert host.state is State.IDLE


def test_hello_is_read_under_64_kib_and_sent_under_it() -> None:
    worker = Connection(Role.WORKER)
    with pytest.raises(LocalProtocolError, match="exceeds max 65536"):
        worker.send(make_hello(nonce="x" * 70_000))
    assert worker.state is State.HELLO
    host = Connection(Role.HOST)
    with pytest.raises(RemoteProtocolError, match="frame length 65537 exceeds max 65536"):
        host.receive(struct.pack("<I", 65537))


@pytest.mark.parametrize(
    "hello", [make_hello(v=2), make_hello(max_frame=0), make_hello(max_frame=m.DEFAULT_MAX_FRAME), make_hello(pid=-1)]
)
def test_a_worker_does_not_promise_what_it_does_not_do(hello: m.Hello) -> None:
    worker = Connection(Role.WORKER, max_frame=MIB)
    with pytest.raises(LocalProtocolError):
        worker.send(hello)
    assert worker.state is State.HELLO and worker.max_frame == MIB


@pytest.mark.parametrize(
    "ack",
    [
        m.HelloAck(v=2, accept=True, max_frame=MIB),
        m.HelloAck(v=3, accept=False, max_frame=MIB),
        m.HelloAck(v=3, accept=True, max_frame=MIB - 1),
        m.HelloAck(v=3, accept=True, max_frame=MIB + 1),
    ],
)
def test_a_host_acks_exactly_what_was_agreed(ack: m.HelloAck) -> None:
    host = Connection(Role.HOST, max_frame=MIB)
    host.receive(framed(m.encode(make_hello())))
    with pytest.raises(LocalProtocolError, match="HELLO_ACK must accept version 3"):
        host.send(ack)
    assert host.state is State.ACK


def test_version_mismatch_says_both_versions() -> None:
    host = Connection(Role.HOST)
    with pytest.raises(VersionMismatch, match="version 2, this host speaks 3") as caught:
        host.receive(framed(m.encode(make_hello(v=2))))
    assert (caught.value.observed, caught.value.expected) == (2, 3)
    assert host.state is State.CLOSED


def test_the_engine_is_learnt_from_hello() -> None:
    pair = ConnectionPair(engine=m.CUDA_ENGINE)
    pair.host.engine = "something else"
    pair.handshake()
    assert pair.host.engine == pair.worker.engine == m.CUDA_ENGINE


def test_bytes_merged_behind_hello_are_found_before_the_ack() -> None:
    host = Connection(Role.HOST)
    data = framed(m.encode(make_hello())) + b"\0"
    with pytest.raises(RemoteProtocolError, match="data from the worker while waiting for HELLO_ACK"):
        host.receive(data)


def test_a_worker_that_was_not_asked_yet_refuses_bytes() -> None:
    worker = Connection(Role.WORKER)
    with pytest.raises(RemoteProtocolError, match="data from the host while waiting for HELLO"):
        worker.receive(b"\0")


# --- exchanges -------------------------------------------------------------------------------------------------------


def script(pair: ConnectionPair) -> list[type]:
    """Run a session with every shape of exchange; return the kinds of events at both ends."""
    pair.handshake()
    pair.host_sends(m.Load(req_id="l", artifact_path="/m", artifact_digest="d", format="gguf"))
    pair.worker_sends(m.Progress(req_id="l", completed=3, phase=m.Phase.SETUP))
    pair.worker_sends(m.Loaded(req_id="l", model_ref="llama:0", dims=4, cold_load_ms=1))
    pair.host_sends(embed(2, 1), ids(3))
    pair.worker_sends(m.Progress(req_id="e", completed=1, phase=m.Phase.INFERENCE))
    pair.worker_sends(m.Vectors(req_id="e", dims=4, n=2), rows(2, 4))
    segments = [m.Segment(n_tokens=1), m.Segment(n_tokens=2)]
    pair.host_sends(m.Rerank(req_id="r", model_ref="llama:0", query_n_tokens=1, candidates=segments), ids(4))
    pair.worker_sends(m.Scores(req_id="r"), rows(1, 2))
    pair.host_sends(m.RerankSequences(req_id="s", model_ref="llama:0", sequences=segments), ids(3))
    pair.worker_sends(m.Err(req_id="s", code=ErrorCode.UNSUPPORTED_REQUEST, msg="no"))
    pair.host_sends(m.Generate(req_id="g", model_ref="llama:0", max_tokens=2), ids(2))
    pair.worker_sends(m.Text(req_id="g", text="hi", n_prompt=2, n_gen=1, finish_reason=m.FinishReason.STOP))
    pair.host_sends(m.Ping(req_id="p"))
    pair.host_sends(m.Shutdown())
    pair.worker_sends(m.Pong(req_id="p", rss_mb=1, models_loaded=1))
    assert pair.host.state is pair.worker.state is State.CLOSED
    return [type(event) for event in pair.host_events + pair.worker_events if not isinstance(event, ReplyStarted)]


@pytest.mark.parametrize("cut", [whole, byte_by_byte, *map(random_cuts, range(5))])
def test_a_session_is_the_same_however_it_is_cut(cut: object) -> None:
    expected = [
        HelloReceived,
        ProgressReceived,
        ReplyReceived,
        ProgressReceived,
        *[ReplyReceived] * 5,
        AckReceived,
        *[RequestReceived] * 6,
        ShutdownReceived,
    ]
    assert script(ConnectionPair(cut=cut)) == expected  # type: ignore[arg-type]


def test_a_session_is_the_same_at_every_single_cut() -> None:
    expected = script(ConnectionPair())
    for point in range(1, 260):
        assert script(ConnectionPair(cut=cut_at(point))) == expected


def test_payloads_arrive_whole_and_belong_to_their_receiver() -> None:
    pair = ConnectionPair(worker_allocate=ReusedBuffer())
    pair.handshake()
    vectors = rows(2, 300_000)
    (first,) = pair.host_sends(embed(2, 3), ids(5))
    assert isinstance(first, RequestReceived) and first.payload is not None
    assert np.array_equal(np.frombuffer(first.payload, np.int32), ids(5))
    *_, done = pair.worker_sends(m.Vectors(req_id="e", dims=300_000, n=2), vectors)
    assert isinstance(done, ReplyReceived) and done.payload is not None
    (second,) = pair.host_sends(embed(5, req_id="e2"), ids(5) + 7)
    assert isinstance(second, RequestReceived) and second.payload is not None
    assert second.payload.obj is first.payload.obj  # the worker's receive buffer is reused
    pair.worker_sends(m.Vectors(req_id="e2", dims=1, n=1), rows(1, 1))
    assert np.array_equal(np.frombuffer(done.payload, np.float32).reshape(2, -1), vectors)  # the host's is not


def test_send_returns_the_payload_itself() -> None:
    host = ready(Role.HOST)
    array = ids(1000)
    head, body = host.send(embed(1000), array)
    assert np.shares_memory(np.frombuffer(body, np.int32), array)
    assert bytes(head[-4:]) == struct.pack("<I", 4000)


def test_the_header_of_a_reply_is_announced_once() -> None:
    pair = ConnectionPair(cut=byte_by_byte)
    pair.handshake()
    pair.host_sends(embed(1), ids(1))
    pair.worker_sends(m.Vectors(req_id="e", dims=2, n=1), rows(1, 2))
    assert [type(event) for event in pair.host_events[1:]] == [ReplyStarted, ReplyReceived]
    pair.host_sends(embed(1, req_id="e2"), ids(1))
    pair.worker_sends(m.Vectors(req_id="e2", dims=2, n=1), rows(1, 2))
    assert [type(event) for event in pair.host_events[3:]] == [ReplyStarted, ReplyReceived]


def test_a_long_text_behind_many_progress_frames_in_one_burst() -> None:
    pair = ConnectionPair()
    pair.handshake()
    pair.host_sends(m.Generate(req_id="g", model_ref="llama:0", max_tokens=200), ids(1))
    burst = b""
    for completed in range(1, 101):
        burst += joined(pair.worker.send(m.Progress(req_id="g", completed=completed, phase=m.Phase.INFERENCE)))
    text = m.Text(req_id="g", text="x" * 62_000, n_prompt=1, n_gen=100, finish_reason=m.FinishReason.STOP)
    *progress, reply = pair.host.receive(burst + joined(pair.worker.send(text)))
    assert len(progress) == 100 and isinstance(reply, ReplyReceived) and reply.reply == text


def test_phase_follows_validated_progress() -> None:
    pair = ConnectionPair(engine=m.CUDA_ENGINE)
    pair.handshake()
    assert pair.host.phase is None
    pair.host_sends(embed(1), ids(1))
    assert pair.host.phase is pair.worker.phase is m.Phase.SETUP
    pair.worker_sends(m.Progress(req_id="e", completed=1, phase=m.Phase.SETUP))
    assert pair.host.phase is m.Phase.SETUP and pair.host.completed == 1
    pair.worker_sends(m.Progress(req_id="e", completed=2, phase=m.Phase.INFERENCE))
    assert pair.host.phase is pair.worker.phase is m.Phase.INFERENCE and pair.worker.completed == 2
    pair.worker_sends(m.Err(req_id="e", code=ErrorCode.OOM, msg=""))
    assert pair.host.phase is None
    pair.host_sends(embed(1, req_id="e2"), ids(1))
    assert pair.host.phase is m.Phase.SETUP and pair.host.completed == 0


def test_dims_are_remembered_by_model_until_it_is_unloaded() -> None:
    pair = ConnectionPair()
    pair.handshake()
    for index, dims in enumerate((4, 8)):
        pair.host_sends(m.Load(req_id="l", artifact_path="/m", artifact_digest="d", format="gguf"))
        pair.worker_sends(m.Loaded(req_id="l", model_ref=f"llama:{index}", dims=dims, cold_load_ms=1))
    pair.host_sends(embed(1, ref="llama:1"), ids(1))
    with pytest.raises(LocalProtocolError, match="4 dims, the model has 8"):
        pair.worker.send(m.Vectors(req_id="e", dims=4, n=1), rows(1, 4))
    pair.worker_sends(m.Vectors(req_id="e", dims=8, n=1), rows(1, 8))
    pair.host_sends(m.Unload(req_id="u", model_ref="llama:1"))
    pair.worker_sends(m.Err(req_id="u", code=ErrorCode.INFERENCE_FAILED, msg=""))  # not done: still known
    pair.host_sends(embed(1, ref="llama:1"), ids(1))
    with pytest.raises(LocalProtocolError, match="the model has 8"):
        pair.worker.send(m.Vectors(req_id="e", dims=4, n=1), rows(1, 4))
    pair.worker_sends(m.Vectors(req_id="e", dims=8, n=1), rows(1, 8))
    pair.host_sends(m.Unload(req_id="u", model_ref="llama:1"))
    pair.worker_sends(m.Unloaded(req_id="u"))
    pair.host_sends(embed(1, ref="llama:1"), ids(1))
    pair.worker_sends(m.Vectors(req_id="e", dims=4, n=1), rows(1, 4))


# --- refusals leave the state as it was ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "payload", "complaint"),
    [
        (m.Ping(req_id="p"), b"", "takes no raw frame"),
        (embed(1), None, "needs its raw frame"),
        (embed(2), ids(1), "where the header counts 2 ids"),
        (embed(1), b"\0\0\0", "not divisible by 4"),
        (m.Generate(req_id="g", model_ref="m", max_tokens=1), b"\0" * 5, "not divisible by 4"),
        (embed(*[1] * 257), ids(257), "257 items in one exchange, at most 256"),
        (embed(5, -1), ids(4), "n_tokens"),
        (embed(1), rows(1, 1), "format 'f'"),
        (embed(2), ids(4)[::2], "C-contiguous"),
        (m.Pong(req_id="p", rss_mb=1, models_loaded=0), None, "can't be sent by the host"),
        (m.Hello, None, "can't be sent by the host"),
        (m.Ping(req_id=""), None, "PING"),
        ("PING", None, "str can't be sent"),
    ],
)
def test_a_refused_request_changes_nothing(message: m.Message, payload: memoryview, complaint: str) -> None:
    pair = ConnectionPair()
    pair.handshake()
    with pytest.raises(LocalProtocolError, match=complaint):
        pair.host.send(make_hello() if message is m.Hello else message, payload)
    assert pair.host.state is State.IDLE and pair.host.request is None
    pair.host_sends(m.Ping(req_id="p"))
    pair.worker_sends(m.Pong(req_id="p", rss_mb=1, models_loaded=0))


@pytest.mark.parametrize(
    ("message", "payload"),
    [
        (m.Progress(req_id="e", completed=1, phase=m.Phase.INFERENCE), None),
        (m.Progress(req_id="e", completed=2**64, phase=m.Phase.INFERENCE), None),
        (m.Progress(req_id="e", completed=3, phase=m.Phase.SETUP), None),
        (m.Progress(req_id="f", completed=3, phase=m.Phase.INFERENCE), None),
        (m.Vectors(req_id="e", dims=1, n=2), rows(1, 1)),
        (m.Vectors(req_id="e", dims=2, n=1), rows(1, 1)),
        (m.Vectors(req_id="e", dims=0, n=1), b""),
        (m.Vectors(req_id="e", dims=-1, n=1), b""),
        (m.Vectors(req_id="e", dims=1, n=1), rows(1, 1).astype(np.float64)),
        (m.Scores(req_id="e"), rows(1, 1)),
        (m.Err(req_id="f", code=ErrorCode.OOM, msg=""), None),
        (m.Err(req_id="e", code=ErrorCode.OOM, msg="\udc80"), None),
        (m.Err(req_id="e", code=ErrorCode.OOM, msg="x" * 5000), None),
        (m.Pong(req_id="e", rss_mb=1, models_loaded=0), None),
        (m.Ping(req_id="e"), None),
        (make_hello(), None),
    ],
)
def test_a_refused_reply_changes_nothing(message: m.Message, payload: memoryview) -> None:
    pair = ConnectionPair(worker_max_frame=4096)
    pair.handshake()
    pair.host_sends(embed(1), ids(1))
    pair.worker_sends(m.Progress(req_id="e", completed=2, phase=m.Phase.INFERENCE))
    with pytest.raises(LocalProtocolError):
        pair.worker.send(message, payload)
    assert (pair.worker.state, pair.worker.completed) == (State.BUSY, 2)
    pair.worker_sends(m.Progress(req_id="e", completed=3, phase=m.Phase.INFERENCE))
    (done,) = pair.worker_sends(m.Vectors(req_id="e", dims=1, n=1), rows(1, 1))
    assert isinstance(done, ReplyReceived)


def test_an_oversize_progress_frame_does_not_count() -> None:
    """A frame that never left must not have moved the counter."""
    hello = joined(Connection(Role.WORKER).send(make_hello()))
    host = Connection(Role.HOST)
    host.receive(hello)
    worker = Connection(Role.WORKER, max_frame=m.DEFAULT_MAX_FRAME)
    worker.send(make_hello())
    worker.receive(framed(b'{"v":3,"accept":true,"max_frame":60}'))
    worker.receive(framed(m.encode(m.Ping(req_id="p"))))
    with pytest.raises(LocalProtocolError, match="exceeds max 60"):
        worker.send(m.Progress(req_id="p", completed=10**18, phase=m.Phase.CONTROL))
    assert worker.completed == 0


# --- faults ----------------------------------------------------------------------------------------------------------


def test_a_fault_is_raised_once_and_later_bytes_are_swallowed() -> None:
    host = ready(Role.HOST)
    with pytest.raises(RemoteProtocolError):
        host.receive(framed(b"{"))
    assert host.state is State.CLOSED and not host.mid_frame
    assert host.receive(framed(b"{") * 10_000) == []
    assert host.next_event() is None
    assert host.receive_eof() == PeerClosed()
    with pytest.raises(LocalProtocolError, match="can't be sent by the host while closed"):
        host.send(m.Ping(req_id="p"))


def test_the_message_names_the_state_and_keeps_the_cause() -> None:
    host = ready(Role.HOST)
    host.send(m.Ping(req_id="p"))
    with pytest.raises(RemoteProtocolError, match="malformed frame while exchange running: ") as caught:
        host.receive(framed(b'{"type":"PONG"}'))
    assert caught.value.__cause__ is not None


def test_a_fault_does_not_quote_a_whole_frame() -> None:
    host = ready(Role.HOST)
    host.send(m.Ping(req_id="p"))
    with pytest.raises(RemoteProtocolError) as caught:
        host.receive(framed(b'{"type":"ERR","code":"' + b"x" * 50_000 + b'","msg":""}'))
    assert len(str(caught.value)) < 300


def test_a_torn_frame_and_an_orderly_end() -> None:
    for data, torn in ((b"", False), (b"\1", True), (framed(b"{}")[:5], True)):
        host = ready(Role.HOST)
        host.receive(data)
        if torn:
            with pytest.raises(RemoteProtocolError, match="the stream ended inside a frame"):
                host.receive_eof()
            assert host.receive_eof() == PeerClosed()  # the fault was told once
        else:
            assert host.receive_eof() == PeerClosed()
        assert host.state is State.CLOSED


def test_eof_between_a_header_and_its_raw_frame_is_between_frames() -> None:
    worker = ready(Role.WORKER)
    assert worker.receive(framed(m.encode(embed(1)))) == []
    assert not worker.mid_frame
    assert worker.receive_eof() == PeerClosed()


def test_events_before_a_fault_can_be_pulled() -> None:
    host = ready(Role.HOST)
    host.send(embed(1), ids(1))
    data = framed(m.encode(m.Progress(req_id="e", completed=1, phase=m.Phase.INFERENCE))) + framed(b"junk")
    buffer = host.get_buffer()
    buffer[: len(data)] = data
    host.buffer_updated(len(data))
    assert isinstance(host.next_event(), ProgressReceived)
    with pytest.raises(RemoteProtocolError):
        host.next_event()


def test_a_reply_that_could_never_arrive_is_refused_at_its_header() -> None:
    asked: list[int] = []

    def allocate(size: int) -> memoryview:
        asked.append(size)
        return memoryview(bytearray(size))

    host = Connection(Role.HOST, max_frame=MIB, allocate=allocate)
    host.receive(framed(m.encode(make_hello())))
    host.send(m.HelloAck(v=3, accept=True, max_frame=MIB))
    host.send(embed(1), ids(1))
    with pytest.raises(RemoteProtocolError, match=f"VECTORS promises {4 * MIB} bytes, max_frame is {MIB}"):
        host.receive(framed(m.encode(m.Vectors(req_id="e", dims=MIB, n=1))))
    assert asked == []


# --- the table -------------------------------------------------------------------------------------------------------


def test_every_frame_has_a_kind() -> None:
    assert set(KINDS) == {m.Hello, m.HelloAck, m.Shutdown, m.Progress, m.Err, *m.REPLY_TO, *m.REPLY_TO.values()}
    for kind, found in KINDS.items():
        carries = getattr(kind, "payload", None) is not None
        assert carries == (found in (Kind.REQUEST_WITH_PAYLOAD, Kind.REPLY_WITH_PAYLOAD))


def test_the_table_is_sound() -> None:
    """Every state but CLOSED can be left, is reachable, and no kind of frame may come from both ends."""
    assert {state for state, _, _ in TRANSITIONS} == set(State) - {State.CLOSED}
    assert set(TRANSITIONS.values()) == set(State) - {State.HELLO}
    senders: dict[Kind, set[Role]] = {}
    for _, role, kind in TRANSITIONS:
        senders.setdefault(kind, set()).add(role)
    assert all(len(roles) == 1 for kind, roles in senders.items() if kind is not Kind.PAYLOAD)
    for state, role, kind in TRANSITIONS:
        if kind in (Kind.REQUEST_WITH_PAYLOAD, Kind.REPLY_WITH_PAYLOAD):
            waiting = TRANSITIONS[state, role, kind]
            assert (waiting, role, Kind.PAYLOAD) in TRANSITIONS


def test_roles() -> None:
    assert Role.HOST.peer is Role.WORKER and Role.WORKER.peer is Role.HOST
