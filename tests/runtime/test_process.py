"""A worker as a real process on a real socket."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from engines.protocol.messages import EmbedBatch, Item, Ping, Pong, Pooling, Vectors
from tests.support.peer import WorkerProcess
from tests.support.scripted import command, expected_vector

pytestmark = pytest.mark.process
DIGEST = "sha256:" + "0" * 64


def test_a_well_behaved_worker_answers_and_obeys_shutdown(runtime_dir: Path) -> None:
    with WorkerProcess(command(), runtime_dir) as worker:
        worker.end.shake_hands()
        assert isinstance(worker.end.call(Ping(req_id="p")).reply, Pong)
        ref = worker.load("x", DIGEST)
        items = [Item("0", 3), Item("1", 1)]
        request = EmbedBatch(req_id="e", model_ref=ref, pooling=Pooling.MEAN, normalize=True, items=items)
        outcome = worker.end.call(request, struct.pack("<4i", 1, 2, 3, 4))
        assert isinstance(outcome.reply, Vectors)
        assert struct.unpack("<16f", outcome.payload) == (*expected_vector([1, 2, 3]), *expected_vector([4]))
        assert worker.stop() == 0
        assert worker.stdout() == b""
