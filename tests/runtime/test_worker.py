"""The request loop on a socketpair: refusals drain, progress keeps its place, every end has its status."""

from __future__ import annotations

import contextlib
import errno
import itertools
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from engines.protocol import messages as m
from engines.protocol.errors import ErrorCode
from engines.runtime.engine import DeviceLost
from engines.runtime.progress import ProgressReporter
from tests.support.desk import WorkerThread
from tests.support.toy_engine import ToyEngine

LENGTH = struct.Struct("<I")


def frame(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


def embed(n: int = 2, ref: str = "toy:0") -> m.EmbedBatch:
    return m.EmbedBatch("e", ref, m.Pooling.CLS, False, [m.Item("0", n)])


def raw(n: int = 2) -> bytes:
    return struct.pack(f"<{n}i", *range(n))


def ticking() -> Callable[[], float]:
    """Return a clock that moves on by a second whenever it is read: nothing is coalesced."""
    ticks = itertools.count()
    return lambda: float(next(ticks))


def engine(hook: Callable[..., Any] | None = None, **kwargs: Any) -> ToyEngine:
    result = ToyEngine(**kwargs)
    result.hook = hook
    return result


# --- handshake -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"\x30\0"])
def test_an_ack_that_never_comes_whole_ends_the_worker(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.runtime.worker.HANDSHAKE_S", 0.05)
    with WorkerThread(engine()) as worker:
        worker.end.socket.sendall(sent)
        assert worker.join() == 1


BYE = frame(b'{"v":3,"accept":true,"max_frame":1024}') + frame(msgspec.json.encode(embed()))


@pytest.mark.parametrize(
    ("sent", "leaves", "status"),
    [
        (b"", True, 0),
        (frame(b'{"v":3,"accept":false,"max_frame":1024}'), False, 1),
        # protocol-v3, 1 calls an EOF between two frames orderly; a header without its payload ends on such a boundary.
        (BYE, True, 0),
        (BYE + frame(raw())[:6], True, 1),
        (BYE + frame(raw()) + frame(b"{"), False, 1),
        (BYE + frame(raw()) + LENGTH.pack(1025), False, 1),
    ],
)
def test_how_a_worker_ends_when_the_host_has_sent_this(
    sent: bytes, leaves: bool, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with WorkerThread(engine()) as worker:
        worker.end.event()
        worker.end.socket.sendall(sent)
        if leaves:
            worker.end.socket.shutdown(socket.SHUT_WR)
        assert worker.join() == status
    assert worker.exits == ([] if not sent else [status]), "at once: nobody is left to clean up for"
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == status and all("fatal:" in line for line in lines)


# --- ends ------------------------------------------------------------------------------------------------------------


def test_shutdown_closes_models_and_engine() -> None:
    toy = engine()
    with WorkerThread(toy).ready() as worker:
        worker.end.send(m.Shutdown())
        assert worker.join() == 0
    assert toy.models[0].closed == 1
    assert toy.closed == 1
    assert worker.exits == []


def test_a_lost_device_is_answered_then_ends_the_worker() -> None:
    def hook(**details: Any) -> None:
        raise DeviceLost(ErrorCode.INFERENCE_FAILED, "CUDA error 700")

    with WorkerThread(engine(hook)).ready() as worker:
        assert isinstance(worker.end.call(embed(), raw()).reply, m.Err)
        assert worker.join() == 1 and worker.exits == [1], "at once: a native library's destructors may abort"


def test_the_host_leaving_during_a_request_ends_the_process_while_the_call_runs() -> None:
    entered, leave = threading.Event(), threading.Event()

    def hook(**details: Any) -> None:
        entered.set()
        assert leave.wait(10)

    with WorkerThread(engine(hook)).ready() as worker:
        worker.end.send(embed(), raw())
        assert entered.wait(10)
        worker.end.close()
        deadline = time.monotonic() + 10
        while not worker.exits and time.monotonic() < deadline:  # while the model still computes
            time.sleep(0.001)
        assert worker.exits == [0]
        leave.set()


# --- progress --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [m.LLAMA_ENGINE, m.CUDA_ENGINE])
def test_progress_precedes_the_reply_and_rises(name: str) -> None:
    """A CUDA worker starts in setup and switches, the others start in inference."""

    def hook(*, progress: ProgressReporter, **details: Any) -> None:
        for _ in range(3):
            progress.advance(2)
        if name == m.CUDA_ENGINE:
            progress.switch(7)

    toy = engine(hook)
    toy.name = name  # type: ignore[misc]
    with WorkerThread(toy, clock=ticking()).ready() as worker:
        seen = [(frame.completed, frame.phase.value) for frame in worker.end.call(embed(), raw()).progress]
    first = "setup" if name == m.CUDA_ENGINE else "inference"
    assert seen == [(2, first), (4, first), (6, first), *([(7, "inference")] if name == m.CUDA_ENGINE else [])]


def test_progress_to_a_host_that_has_left_ends_the_worker_with_0() -> None:
    def hook(*, progress: ProgressReporter, **details: Any) -> None:
        worker.end.close()
        progress.advance()

    with WorkerThread(engine(hook), clock=ticking()).ready() as worker:
        worker.end.send(embed(), raw())
        assert worker.join() == 0
    assert set(worker.exits) == {0}


def test_a_phase_that_the_exchange_does_not_have_is_a_bug_even_if_a_callback_loses_it() -> None:

    def hook(*, progress: ProgressReporter, **details: Any) -> None:
        progress._phase = "setup"  # type: ignore[assignment]
        with contextlib.suppress(Exception):  # what a native callback does with an exception
            progress.advance()

    with WorkerThread(engine(hook), clock=ticking()).ready() as worker:
        worker.end.send(embed(), raw())
        worker.join()
        assert "setup" in str(worker.bug)


class Failing:
    """A socket that takes three bytes of the frame after :attr:`armed` was set and then refuses once."""

    def __init__(self, sock: socket.socket, error: BaseException) -> None:
        self._socket, self._error = sock, error
        self.armed = False
        self.sent: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def send(self, view: Any) -> int:
        if not self.armed:
            return self._socket.send(view)
        self.sent.append(len(view))
        if len(self.sent) == 2:
            raise self._error
        return self._socket.send(view[:3])


@pytest.mark.parametrize(
    ("error", "status"),
    [(OSError(errno.ENOBUFS, "no room"), 1), (KeyboardInterrupt(), 130), (MemoryError("the send"), None)],
)
def test_a_send_that_fails_in_a_native_callback_is_the_last_one(error: BaseException, status: int | None) -> None:
    """Half a frame is on the stream and the callback lost the exception: nothing may be written behind it."""
    sockets: list[Failing] = []

    def wrap(sock: socket.socket) -> Any:
        sockets.append(Failing(sock, error))
        return sockets[0]

    def hook(*, progress: ProgressReporter, **details: Any) -> None:
        sockets[0].armed = True
        for _ in range(3):
            with contextlib.suppress(BaseException):  # what a native callback does with an exception
                progress.advance()

    with WorkerThread(engine(hook), clock=ticking(), wrap=wrap).ready() as worker:
        worker.end.send(embed(), raw())
        assert worker.join() == status
        assert worker.bug is (error if status is None else None)
        assert len(sockets[0].sent) == 2


def test_nothing_comes_between_header_and_payload_while_a_thread_reports() -> None:
    """The host's Connection refuses a frame in the wrong place, so finishing is the proof."""
    stop = threading.Event()
    reporters: list[ProgressReporter] = []

    def hook(*, progress: ProgressReporter, **details: Any) -> None:
        reporters.append(progress)
        while progress.completed < 3:  # so that the threads are at it when the reply goes out
            time.sleep(0)

    def report() -> None:
        while not stop.is_set():
            for progress in reporters[-1:]:
                progress.advance()

    threads = [threading.Thread(target=report) for _ in range(2)]
    frames = 0
    with WorkerThread(engine(hook, dims=4096), clock=ticking()).ready() as worker:
        for thread in threads:
            thread.start()
        try:
            for _ in range(200):
                outcome = worker.end.call(embed(), raw())
                assert isinstance(outcome.reply, m.Vectors)
                assert outcome.payload is not None
                assert np.frombuffer(outcome.payload, "<f4")[0] == 1.0
                frames += len(outcome.progress)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert frames >= 200 * 3
