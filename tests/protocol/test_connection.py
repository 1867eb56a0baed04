"""One end of the wire at a time, and both wired back to back."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from engines.protocol import messages as m
from engines.protocol.connection import Connection
from engines.protocol.errors import ErrorCode, LocalProtocolError, RemoteProtocolError, VersionMismatch
from engines.protocol.framing import ReusedBuffer
from engines.protocol.messages import encode
from engines.protocol.rules import (
    ReplyReceived,
    ReplyStarted,
    RequestReceived,
    Role,
    State,
)
from tests.support.pair import ConnectionPair, byte_by_byte, joined, make_hello, ready, receive

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


def test_an_ack_that_would_not_fit_the_negotiated_limit_still_leaves() -> None:
    """The agreed value rules from the ACK on, so a tiny offer can't make the host fail at its own ACK."""
    pair = ConnectionPair(worker_max_frame=4096)
    (event,) = pair.worker_sends(make_hello(max_frame=1))
    assert isinstance(event, m.Hello) and pair.host.max_frame == 1
    pair.host_sends(m.HelloAck(v=3, accept=True, max_frame=1))
    with pytest.raises(LocalProtocolError, match="exceeds max 1"):
        pair.host.send(m.Ping(req_id="p"))
    assert pair.host.state is pair.worker.state is State.IDLE
    assert Connection(Role.HOST, max_frame=1).max_frame == 1


# --- exchanges -------------------------------------------------------------------------------------------------------


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
    host = ready()
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


# --- refusals leave the state as it was ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "payload", "complaint"),
    [
        (m.Ping(req_id="p"), b"", "takes no raw frame"),
        (embed(1), None, "needs its raw frame"),
        (embed(1), np.zeros(1), "where the header counts 1 ids"),
        (embed(2), ids(4)[::2], "C-contiguous"),
        ("PING", None, "str can't be sent"),
    ],
)
def test_a_refused_request_changes_nothing(message: m.Message, payload: memoryview, complaint: str) -> None:
    pair = ConnectionPair()
    pair.handshake()
    with pytest.raises(LocalProtocolError, match=complaint):
        pair.host.send(message, payload)
    assert pair.host.state is State.IDLE and pair.host.expectation.request is None
    pair.host_sends(m.Ping(req_id="p"))
    pair.worker_sends(m.Pong(req_id="p", rss_mb=1, models_loaded=0))


@pytest.mark.parametrize(
    ("message", "payload"),
    [
        (m.Progress(req_id="e", completed=2, phase=m.Phase.INFERENCE), None),
        (m.Vectors(req_id="e", dims=2, n=1), rows(1, 1)),
        (m.Vectors(req_id="e", dims=1, n=1), rows(1, 1).astype(np.float64)),
        (m.Err(req_id="e", code=ErrorCode.OOM, msg="\udc80"), None),
        (m.Err(req_id="e", code=ErrorCode.OOM, msg="x" * 5000), None),
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
    assert (pair.worker.state, pair.worker.expectation.completed) == (State.BUSY, 2)
    pair.worker_sends(m.Progress(req_id="e", completed=3, phase=m.Phase.INFERENCE))
    (done,) = pair.worker_sends(m.Vectors(req_id="e", dims=1, n=1), rows(1, 1))
    assert isinstance(done, ReplyReceived)


def test_an_oversize_progress_frame_does_not_count() -> None:
    """A frame that never left must not have moved the counter."""
    hello = joined(Connection(Role.WORKER).send(make_hello()))
    host = Connection(Role.HOST)
    receive(host, hello)
    worker = Connection(Role.WORKER, max_frame=m.DEFAULT_MAX_FRAME)
    worker.send(make_hello())
    receive(worker, framed(b'{"v":3,"accept":true,"max_frame":60}'))
    receive(worker, framed(encode(m.Ping(req_id="p"))))
    with pytest.raises(LocalProtocolError, match="exceeds max 60"):
        worker.send(m.Progress(req_id="p", completed=10**18, phase=m.Phase.CONTROL))
    assert worker.expectation.completed == 0


# --- faults ----------------------------------------------------------------------------------------------------------


HELLO = framed(encode(make_hello(max_frame=1024)))


@pytest.mark.parametrize(
    ("data", "eof", "reason"),
    [
        (struct.pack("<I", 2**31), False, "oversize"),
        (framed(b"not JSON"), False, "malformed"),
        (HELLO[:9], True, "torn"),
        (HELLO + framed(b"{}"), False, "out_of_turn"),
        (framed(encode(make_hello(max_frame=0))), False, "invalid"),
        (framed(encode(make_hello(v=2))), False, "version"),
    ],
)
def test_a_fault_is_counted_under_its_reason(data: bytes, eof: bool, reason: str) -> None:
    host = Connection(Role.HOST)
    with pytest.raises(RemoteProtocolError) as caught:
        receive(host, data)
        if eof:
            host.receive_eof()
    assert caught.value.reason == reason and host.state is State.CLOSED
    if isinstance(caught.value, VersionMismatch):
        assert (caught.value.observed, caught.value.expected) == (2, 3)
        assert "version 2, this host speaks 3" in str(caught.value)


def test_a_fault_names_the_state_keeps_the_cause_and_does_not_quote_a_whole_frame() -> None:
    host = ready()
    host.send(m.Ping(req_id="p"))
    with pytest.raises(RemoteProtocolError, match="malformed frame while exchange running: ") as caught:
        receive(host, framed(b'{"type":"ERR","code":"' + b"x" * 50_000 + b'","msg":""}'))
    assert len(str(caught.value)) < 300 and caught.value.__cause__ is not None


def test_events_before_a_fault_can_be_pulled() -> None:
    host = ready()
    host.send(embed(1), ids(1))
    data = framed(encode(m.Progress(req_id="e", completed=1, phase=m.Phase.INFERENCE))) + framed(b"junk")
    buffer = host.get_buffer()
    buffer[: len(data)] = data
    host.buffer_updated(len(data))
    assert isinstance(host.next_event(), m.Progress)
    with pytest.raises(RemoteProtocolError):
        host.next_event()
