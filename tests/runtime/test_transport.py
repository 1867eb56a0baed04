"""Telling that the peer is gone, on Linux for real and on macOS against a stand-in for kqueue."""

from __future__ import annotations

import select
import socket
import sys
import threading
from typing import Any

import pytest

from engines.runtime.transport import PeerWatcher, SocketTransport

pytestmark = pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="Unix sockets")


def test_wait_gone_sleeps_through_data_and_wakes_at_the_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        thread = threading.Thread(target=SocketTransport(ours).wait_gone, args=(threading.Event(),), daemon=True)
        thread.start()
        theirs.sendall(b"x" * 1000)
        thread.join(0.05)
        assert thread.is_alive()
        assert len(ours.recv(2000, socket.MSG_PEEK)) == 1000  # nothing was consumed
        theirs.close()
        thread.join(5)
        assert not thread.is_alive()
        assert len(ours.recv(2000)) == 1000
        SocketTransport(ours).wait_gone(threading.Event())  # it was gone before


class Kqueue:
    """Delivers data edges before the end, as a full receive buffer would."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, int, object]] = []
        self.pending = [0x0000, 0x0020, 0x8000]

    def control(self, changes: Any, count: int, timeout: object) -> list[Any]:
        self.calls.append((changes, count, timeout))
        return [type("Event", (), {"flags": self.pending.pop(0)})()]


def test_kqueue_waits_for_eof_and_ignores_data_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Kqueue()
    registered: list[dict[str, Any]] = []

    def kevent(ident: int, **fields: Any) -> str:
        registered.append({"ident": ident, **fields})
        return "event"

    constants = {
        "KQ_FILTER_READ": -1,
        "KQ_EV_ADD": 1,
        "KQ_EV_CLEAR": 0x20,
        "KQ_EV_EOF": 0x8000,
        "KQ_NOTE_LOWAT": 1,
        "kqueue": lambda: queue,
        "kevent": kevent,
    }
    for name, value in constants.items():
        monkeypatch.setattr(select, name, value, raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        SocketTransport(ours).wait_gone(threading.Event())
        assert registered[0]["ident"] == ours.fileno()
    assert registered[0]["flags"] == 0x21
    assert registered[0]["fflags"] == 1
    assert queue.calls == [(["event"], 1, None), (None, 1, None), (None, 1, None)]


# --- the watcher's rule ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wakes", [False, True])
@pytest.mark.parametrize("stopped", [False, True])
def test_the_watcher_acts_only_inside_a_request_and_never_once_stopped(stopped: bool, wakes: bool) -> None:
    gone, acted = threading.Event(), threading.Event()
    told: list[threading.Event] = []
    exits: list[int] = []

    def wait_gone(busy: threading.Event) -> None:
        told.append(busy)
        gone.wait(10)

    watcher = PeerWatcher(wait_gone, lambda status: (exits.append(status), acted.set()), wakes=wakes)
    watcher.start()
    with watcher:
        assert told[0].is_set() is wakes, "a transport that sleeps on the event is woken, no other pays for it"
    assert not told[0].is_set()
    gone.set()
    assert not acted.wait(0.05)  # the main thread is in a read, and sees a torn frame better than we do
    if stopped:
        watcher.stop()
    with watcher:
        assert stopped or acted.wait(5)
    watcher.stop()
    assert exits == ([] if stopped else [0])
