"""The host's end of a connection under asyncio: placement, slices, order, faults."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading

import numpy as np
import pytest

from engines.protocol.connection import Connection, Role
from engines.protocol.errors import LocalProtocolError
from engines.protocol.events import ReplyReceived, ReplyStarted, RequestReceived
from engines.protocol.messages import EmbedBatch, EngineInfo, Hello, HelloAck, Item, Pooling, Vectors
from synapse_host.worker import transport as channel_module
from synapse_host.worker.transport import Channel


class Blocking:
    """A worker's end: blocking socket and protocol object."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.setblocking(True)
        self.connection = Connection(Role.WORKER)

    def send(self, message, payload=None):
        for buffer in self.connection.send(message, payload):
            self.sock.sendall(buffer)

    def receive(self):
        while (event := self.connection.next_event()) is None:
            view = self.connection.get_buffer()
            count = self.sock.recv_into(view)
            if count == 0:
                return self.connection.receive_eof()
            self.connection.buffer_updated(count)
        return event


class Host:
    """A channel and what it told."""

    def __init__(self) -> None:
        self.events: asyncio.Queue = asyncio.Queue()
        self.lost = asyncio.Event()
        self.faults: list[Exception] = []
        self.channel = Channel(
            max_frame=64 * 2**20, on_event=self.events.put_nowait, on_fault=self.fault, on_lost=self.lost.set
        )

    def fault(self, exc):
        self.faults.append(exc)
        self.lost.set()


HELLO = Hello(v=3, nonce="n", engine=EngineInfo("llama.cpp-worker", "1"), pid=1, max_frame=64 * 2**20)


def request(tokens: int) -> EmbedBatch:
    return EmbedBatch(req_id="1", model_ref="m", pooling=Pooling.MEAN, normalize=False, items=[Item("a", tokens)])


def connected(scenario, worker) -> None:
    """Run *scenario(host)* against *worker(blocking)* on a thread, after the handshake."""

    async def main():
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        ours.setblocking(False)
        host = Host()
        blocking = Blocking(theirs)

        def work():
            blocking.send(HELLO)
            blocking.receive()
            worker(blocking)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            async with asyncio.timeout(60):
                await asyncio.get_running_loop().connect_accepted_socket(lambda: host.channel, ours)
                await host.events.get()
                host.channel.send(HelloAck(v=3, accept=True, max_frame=64 * 2**20))
                await scenario(host)
        finally:
            host.channel.abort()
            await asyncio.sleep(0)
            thread.join(30)
            theirs.close()
        assert not thread.is_alive()

    asyncio.run(main())


@pytest.mark.parametrize("whole", [False, True], ids=["slices", "whole"])
@pytest.mark.parametrize("tokens", [1, 1000, 16_000, 17_000, 1_000_000, 6_000_000])
def test_payloads_of_every_size_arrive_in_both_directions(monkeypatch, whole, tokens):
    monkeypatch.setattr(channel_module, "WRITES_WHOLE", whole)
    ids = np.arange(tokens, dtype=np.int32)

    def worker(end: Blocking) -> None:
        event = end.receive()
        assert isinstance(event, RequestReceived) and event.payload is not None
        assert np.array_equal(np.frombuffer(event.payload, np.int32), ids)
        values = np.frombuffer(event.payload, np.int32).astype(np.float32)
        end.send(Vectors(req_id="1", dims=tokens, n=1), memoryview(values).cast("B"))

    async def scenario(host: Host) -> None:
        host.channel.send(request(tokens), ids)
        event = await host.events.get()
        if isinstance(event, ReplyStarted):
            event = await host.events.get()
        assert isinstance(event, ReplyReceived)
        result = np.frombuffer(event.payload, np.float32)
        assert result.flags.writeable and result.flags.aligned
        assert np.array_equal(result, ids.astype(np.float32))
        assert not host.channel.sending

    connected(scenario, worker)


def test_sending_is_true_until_the_worker_has_read_everything():
    go = threading.Event()

    def worker(end: Blocking) -> None:
        go.wait(30)
        end.receive()
        end.receive()

    async def scenario(host: Host) -> None:
        host.channel.send(request(4_000_000), np.zeros(4_000_000, np.int32))
        assert host.channel.sending
        go.set()
        while host.channel.sending:
            await asyncio.sleep(0.001)

    connected(scenario, worker)


@pytest.mark.parametrize(
    "payload",
    [
        struct.pack("<4i", 1, 2, 3, 4),
        bytearray(struct.pack("<4i", 1, 2, 3, 4)),
        memoryview(np.array([1, 2, 3, 4], np.int32)),
        np.array([[1, 2], [3, 4]], np.int32),
    ],
    ids=["bytes", "bytearray", "memoryview of int32", "matrix"],
)
def test_any_contiguous_buffer_is_a_payload(payload):
    def worker(end: Blocking) -> None:
        event = end.receive()
        end.send(Vectors(req_id="1", dims=4, n=1), struct.pack("<4f", *struct.unpack("<4i", event.payload)))

    async def scenario(host: Host) -> None:
        host.channel.send(request(4), payload)
        event = await host.events.get()
        assert np.frombuffer(event.payload, np.float32).tolist() == [1, 2, 3, 4]

    connected(scenario, worker)


def test_a_strided_array_is_refused_before_anything_is_written():
    async def scenario(host: Host) -> None:
        with pytest.raises(LocalProtocolError):
            host.channel.send(request(4), np.arange(8, dtype=np.int32)[::2])
        assert host.channel.connection.request is None

    connected(scenario, lambda end: None)


def test_a_violation_is_told_once_and_ends_the_feed():
    def worker(end: Blocking) -> None:
        end.sock.sendall(b"\x02\x00\x00\x00{}\x02\x00\x00\x00{}")
        end.sock.recv(1)

    async def scenario(host: Host) -> None:
        await host.lost.wait()
        assert len(host.faults) == 1 and host.events.empty()

    connected(scenario, worker)


def test_the_end_of_the_stream_is_told_once():
    async def scenario(host: Host) -> None:
        await host.lost.wait()
        assert host.faults == [] and host.channel.closed and host.channel.connected
        # A request after the loss writes nothing and fails nobody: the loss itself is the answer.
        host.channel.send(request(1), b"\0\0\0\0")

    connected(scenario, lambda end: end.sock.shutdown(socket.SHUT_RDWR))
