"""One connection, whatever carries it: the same suite over every transport; the pipe's half runs on Windows only."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engines.protocol.connection import Connection
from engines.protocol.messages import EmbedBatch, Hello, HelloAck, Item, Load, Loaded, Pooling, Vectors
from engines.protocol.rules import ReplyReceived, RequestReceived, Role
from engines.runtime.engine import EngineIdentity
from engines.runtime.main import connect
from engines.runtime.transport import Channel as WorkerChannel
from engines.runtime.transport import Transport
from engines.runtime.worker import hello
from synapse_host.worker import transport as host_transport
from synapse_host.worker import windows
from synapse_host.worker.counters import LaneCounters
from synapse_host.worker.listener import Listener, RuntimeDirectory
from synapse_host.worker.transport import Channel

MIB = 2**20
NONCE = "0123456789abcdef"
WAIT_S = 30.0


@pytest.fixture(params=["unix", pytest.param("pipe", marks=pytest.mark.windows)])
def listen(request: pytest.FixtureRequest, directory: RuntimeDirectory) -> Callable[[], Listener]:
    """Return what makes a listener."""
    if request.param == "pipe":
        return lambda: windows.listen(directory.path, "toy-1")
    if sys.platform == "win32":
        pytest.skip("asyncio has no Unix sockets on Windows")
    return lambda: directory.listen("toy-1")


def reach(listener: Listener) -> Transport:
    """Connect as a worker does, by the arguments that it would get."""
    option, value = listener.arguments
    socket_path, pipe_name = (value, None) if option == "--socket" else (None, value)
    return connect(socket_path, pipe_name, deadline=time.monotonic() + 5.0)


class HostSide:
    """A host's channel that collects what happens to it."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[Any] = asyncio.Queue()
        self.faults: list[Exception] = []
        self.lost = asyncio.Event()
        self.counters = LaneCounters()
        self.channel = Channel(
            max_frame=64 * MIB,
            on_event=self.events.put_nowait,
            on_fault=self.faults.append,
            on_lost=self.lost.set,
            counters=self.counters,
        )


def conversation(
    listen: Callable[[], Listener], worker: Callable[[Transport], None], host: Callable[[HostSide], Any]
) -> None:
    """Run a worker's part on a thread and the host's part on a loop, over one connection."""
    failures: list[BaseException] = []

    async def main() -> None:
        listener = listen()
        side = HostSide()

        def body() -> None:
            try:
                transport = reach(listener)
                try:
                    worker(transport)
                finally:
                    transport.close()
            except BaseException as exc:
                failures.append(exc)

        thread = threading.Thread(target=body)
        thread.start()
        try:
            async with asyncio.timeout(WAIT_S):
                await listener.connect(side.channel, lambda peer: True)
                await host(side)
        finally:
            side.channel.abort()
            listener.close()
            await asyncio.to_thread(thread.join, WAIT_S)
            # The transport's last callback runs in the next turn of the loop.
            await asyncio.sleep(0)

    asyncio.run(main())
    assert not failures, failures


def greet(transport: Transport) -> WorkerChannel:
    """Return a worker's protocol over *transport* after its HELLO."""
    channel = WorkerChannel(transport, Connection(Role.WORKER, max_frame=64 * MIB))
    channel.send(hello(EngineIdentity("llama.cpp-worker", "1"), NONCE))
    assert isinstance(channel.receive(), HelloAck)
    return channel


async def shake_hands(side: HostSide) -> None:
    event = await side.events.get()
    assert isinstance(event, Hello) and event.nonce == NONCE
    side.channel.send(HelloAck(v=3, accept=True, max_frame=side.channel.connection.max_frame))


def embed(tokens: int, req_id: str) -> EmbedBatch:
    items = [Item("0", tokens)]
    return EmbedBatch(req_id=req_id, model_ref="llama:0", pooling=Pooling.MEAN, normalize=False, items=items)


@pytest.mark.parametrize("whole", [False, True], ids=["slices", "whole"])
@pytest.mark.parametrize("tokens", [1, 16_383, 16_384, 17_000, 4 * MIB])
def test_payloads_of_every_size_cross_both_ways(
    listen: Callable[[], Listener], tokens: int, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small ones joined with their header, large ones in slices or whole; a reply belongs to whoever gets it."""
    monkeypatch.setattr(host_transport, "WRITES_WHOLE", whole)
    ids = np.arange(tokens, dtype=np.int32)
    reading = threading.Event()

    def worker(transport: Transport) -> None:
        channel = greet(transport)
        channel.receive()
        channel.send(Loaded(req_id="l", model_ref="llama:0", dims=tokens, cold_load_ms=1))
        for _ in range(2):
            reading.wait(WAIT_S)
            reading.clear()
            event = channel.receive()
            assert isinstance(event, RequestReceived) and event.payload is not None
            out = np.frombuffer(event.payload, np.int32).astype(np.float32)
            channel.send(Vectors(req_id=event.request.req_id, dims=tokens, n=1), out)

    async def host(side: HostSide) -> None:
        await shake_hands(side)
        side.channel.send(Load("l", "p", "sha256:" + "0" * 64, "gguf"))
        assert isinstance(await side.events.get(), ReplyReceived)
        for turn in ("a", "b"):
            side.channel.send(embed(tokens, turn), ids)
            assert side.channel.sending or tokens < 4 * MIB, "what the worker hasn't read is still being sent"
            reading.set()
            while not isinstance(event := await side.events.get(), ReplyReceived):
                pass
            assert event.reply.req_id == turn
            vectors = np.frombuffer(event.payload, np.float32)
            assert vectors.flags.writeable and np.array_equal(vectors, ids.astype(np.float32))
            assert not side.channel.sending
        assert side.faults == []
        # Headers and lengths are some 200 bytes a message; ids and vectors have four bytes a token.
        for counted in (side.counters.sent, side.counters.received):
            assert 8 * tokens < counted < 8 * tokens + 1000

    conversation(listen, worker, host)


def test_the_host_sees_the_worker_go(listen: Callable[[], Listener]) -> None:
    async def host(side: HostSide) -> None:
        await shake_hands(side)
        await side.lost.wait()
        assert side.channel.closed and side.channel.connected and side.faults == []
        # A request after the loss writes nothing and fails nobody: the loss itself is the answer.
        side.channel.send(embed(1, "late"), b"\0\0\0\0")

    conversation(listen, lambda transport: greet(transport), host)


def test_the_worker_sees_the_host_go(listen: Callable[[], Listener]) -> None:
    def worker(transport: Transport) -> None:
        greet(transport)
        busy = threading.Event()
        busy.set()
        watcher = threading.Thread(target=transport.wait_gone, args=(busy,), daemon=True)
        watcher.start()
        watcher.join(WAIT_S)
        assert not watcher.is_alive(), "a worker that computes doesn't see its host go"
        assert transport.recv_into(memoryview(bytearray(8))) == 0

    async def host(side: HostSide) -> None:
        await shake_hands(side)
        side.channel.abort()

    conversation(listen, worker, host)
