"""Random legal and illegal scripts through both ends, judged by the independent model beside this file."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from engines.protocol.connection import Connection
from engines.protocol.errors import LocalProtocolError, RemoteProtocolError
from engines.protocol.rules import ReplyStarted, Role, State
from tests.protocol.model import ANSWERS, LIMIT, RAW_REQUESTS, Model, next_frame, wire
from tests.protocol.test_vectors import build, snapshot
from tests.support.pair import Cut, byte_by_byte, joined, random_cuts, receive, whole

ENGINES = ["llama.cpp-worker", "owned-cuda"]


class Wire:
    """Two ends of ours and the model see the same script until something illegal was forced through."""

    def __init__(self, engine: str, cut: Cut) -> None:
        self.cut = cut
        self.model = Model(engine)
        self.ends = {"host": Connection(Role.HOST, max_frame=LIMIT), "worker": Connection(Role.WORKER, max_frame=LIMIT)}
        self.over = False
        self.verdicts: Counter[str] = Counter()

    def step(self, sender: str, message: dict[str, Any], raw: bytes | None, *, force: bool) -> None:
        """Let *sender* send; an illegal message is refused there, and with *force* put on the wire all the same."""
        receiver = "worker" if sender == "host" else "host"
        before_open = self.model.open
        verdict = self.model.judge(sender, message, raw)
        self.verdicts[verdict] += 1
        end = self.ends[sender]
        if verdict == "ok":
            data = joined(end.send(build(message), raw))
            assert data == wire(message, raw)
            events = self.feed(receiver, data)
            assert len(events) == 1, events
            self.compare(events[0], message, raw, before_open)
            return
        before = snapshot(end)
        with pytest.raises(LocalProtocolError):
            end.send(build(message), raw)
        assert snapshot(end) == before
        if not force:
            return
        self.over = True  # the two ends no longer share a history
        expects_raw = message.get("type") in ("VECTORS", "SCORES", *RAW_REQUESTS)
        if expects_raw != (raw is not None):
            return  # such a stream is not wrong yet, only unfinished or followed by something
        if verdict == "worker answers":
            (event,) = self.feed(receiver, wire(message, raw))
            assert bytes(event.payload) == raw
            return
        with pytest.raises(RemoteProtocolError):
            self.feed(receiver, wire(message, raw))
        assert self.ends[receiver].state is State.CLOSED
        assert self.feed(receiver, b"\1\2\3\4\5\6") == []

    def feed(self, receiver: str, data: bytes) -> list[Any]:
        events = []
        for piece in self.cut(data):
            events += receive(self.ends[receiver], piece)
        return [event for event in events if not isinstance(event, ReplyStarted)]

    def compare(self, event: Any, message: dict[str, Any], raw: bytes | None, asked: dict[str, Any] | None) -> None:
        kind = message.get("type")
        name = type(event).__name__
        if kind is None:
            assert name == ("HelloReceived" if "nonce" in message else "AckReceived")
        elif kind == "SHUTDOWN":
            assert name == "ShutdownReceived"
        elif kind == "PROGRESS":
            assert name == "ProgressReceived" and event.progress == build(message)
        else:
            assert name == ("RequestReceived" if kind in ANSWERS else "ReplyReceived")
            if name == "ReplyReceived":
                assert event.reply == build(message) and event.request == build(asked or {})
            else:
                assert event.request == build(message)
            assert (None if event.payload is None else bytes(event.payload)) == raw

    def leave(self, who: str, *, torn: bool) -> None:
        """Let *who* see the end of the stream, in the middle of a frame if it may be in one."""
        end = self.ends[who]
        self.over = True
        if torn and end.state in (State.IDLE, State.BUSY):
            receive(end, b"\7\0")
            with pytest.raises(RemoteProtocolError):
                end.receive_eof()
        end.receive_eof()
        assert end.state is State.CLOSED

    def agree(self) -> None:
        """Check that both ends stand where the model stands."""
        host, worker = self.ends["host"], self.ends["worker"]
        assert host.state is worker.state
        assert (host.request is not None) == (self.model.open is not None)
        if self.model.open is not None:
            assert host.completed == worker.completed == self.model.completed
            assert host.phase is worker.phase and host.phase == self.model.phases[0]
        assert (host.state is State.CLOSED) == self.model.closed


@pytest.mark.parametrize("seed", range(4))
def test_many_seeded_scripts(seed: int) -> None:
    """6,000 frames a seed, every third illegal one forced onto the wire."""
    rng = random.Random(seed)
    cuts = [whole, byte_by_byte, random_cuts(seed)]
    verdicts: Counter[str] = Counter()
    wire_ = Wire(rng.choice(ENGINES), rng.choice(cuts))
    for _ in range(6000):
        if wire_.over or wire_.model.closed:
            verdicts += wire_.verdicts
            wire_ = Wire(rng.choice(ENGINES), rng.choice(cuts))
        wire_.step(*next_frame(wire_.model, rng.choice), force=rng.random() < 0.3)
        if not wire_.over:
            wire_.agree()
            if rng.random() < 0.01:
                wire_.leave(rng.choice(["host", "worker"]), torn=rng.random() < 0.5)
    assert min(verdicts[verdict] for verdict in ("ok", "wrong", "worker answers")) > 20, verdicts
