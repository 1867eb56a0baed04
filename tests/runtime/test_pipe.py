"""The named-pipe transport over a stand-in for `_winapi`.

This proves our side of each call: order, arguments, loops, what each error code means. What Windows really does is not
measured here; ``tests/worker/test_transport.py`` runs the suite over ``--pipe`` on Windows.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from engines.runtime.pipe import GONE, PipeTransport, connect_pipe
from engines.runtime.transport import PeerGone, TransportFailed

NAME = r"\\.\pipe\synapse-test"
DENIED, MISSING, BUSY, BROKEN = 5, 2, 231, 109


class WinApi:
    """One pipe, whose peer is a script: ``inbound`` comes from it, ``errors`` are what the next opens answer."""

    def __init__(self) -> None:
        self.errors: list[int] = []
        self.inbound: list[bytes] = []
        self.outbound = b""
        self.fails = 0
        self.write_limit = 10**9
        self.calls: list[str] = []

    def _call(self, name: str, handle: int = 77) -> None:
        self.calls.append(name)
        assert handle == 77
        if self.fails:
            self._raise(self.fails)

    def _raise(self, code: int) -> None:
        error = OSError(f"Windows error {code}")
        error.winerror = code  # type: ignore[attr-defined,unused-ignore]
        raise error

    def CreateFile(self, *arguments: Any) -> int:
        self.calls.append("CreateFile")
        # Read and write, not shared, it must exist, SECURITY_SQOS_PRESENT | SECURITY_ANONYMOUS, not overlapped.
        assert arguments == (NAME, 0xC0000000, 0, 0, 3, 0x00100000, 0)
        if self.errors:
            self._raise(self.errors.pop(0))
        return 77

    def PeekNamedPipe(self, handle: int, size: int) -> tuple[int, int]:
        self._call("PeekNamedPipe", handle)
        return sum(map(len, self.inbound)), 0

    def ReadFile(self, handle: int, size: int) -> tuple[bytes, int]:
        self._call("ReadFile", handle)
        chunk = self.inbound.pop(0)
        if len(chunk) > size:
            self.inbound.insert(0, chunk[size:])
        return chunk[:size], 0

    def WriteFile(self, handle: int, data: memoryview) -> tuple[int, int]:
        self._call("WriteFile", handle)
        taken = bytes(data)[: self.write_limit]
        self.outbound += taken
        return len(taken), 0

    def CloseHandle(self, handle: int) -> None:
        self._call("CloseHandle", handle)


@pytest.fixture
def api() -> WinApi:
    return WinApi()


def transport(api: WinApi, limit: float = 5.0) -> PipeTransport:
    return connect_pipe(NAME, deadline=time.monotonic() + limit, api=api)


@pytest.mark.parametrize(
    ("errors", "limit", "fails"),
    [([MISSING, BUSY], 5.0, False), ([BUSY] * 99, 0.12, True), ([DENIED], 5.0, True)],
)
def test_a_pipe_that_is_coming_or_busy_is_tried_again(api: WinApi, errors: list[int], limit: float, fails: bool):
    api.errors = list(errors)
    if fails:
        with pytest.raises(TransportFailed, match=f"no host listens on .*{errors[0]}"):
            transport(api, limit)
    else:
        transport(api, limit)
    assert (len(api.calls) == 1) is (errors == [DENIED]) and len(api.calls) < 9


def test_reads_fill_the_given_view_and_an_empty_write_is_not_the_end(api: WinApi) -> None:
    api.inbound = [b"", b"abcdef"]
    target = bytearray(4)
    assert transport(api).recv_into(memoryview(target)) == 4
    assert target == b"abcd"


@pytest.mark.parametrize("code", [*sorted(GONE), DENIED])
def test_how_a_pipe_ends(api: WinApi, code: int) -> None:
    connected = transport(api)
    api.fails = code
    if code in GONE:
        assert connected.recv_into(memoryview(bytearray(4))) == 0
        with pytest.raises(PeerGone):
            connected.send([b"x"])
    else:
        with pytest.raises(TransportFailed, match="reading from the host failed"):
            connected.recv_into(memoryview(bytearray(4)))
        with pytest.raises(TransportFailed, match="writing to the host failed"):
            connected.send([b"x"])


@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_writes_keep_order_and_resume(api: WinApi, limit: int) -> None:
    api.write_limit = limit
    transport(api).send([b"head", bytearray(b"payload"), memoryview(b""), memoryview(b"tail")])
    assert api.outbound == b"headpayloadtail"


def test_the_ack_wait_is_bounded_without_reading(api: WinApi) -> None:
    connected = transport(api)
    connected.set_deadline(time.monotonic() + 0.03)
    with pytest.raises(TimeoutError):
        connected.recv_into(memoryview(bytearray(4)))
    assert api.calls.count("PeekNamedPipe") >= 2 and "ReadFile" not in api.calls
    api.inbound = [b"ok"]
    assert connected.recv_into(memoryview(bytearray(4))) == 2


@pytest.mark.parametrize("how", ["the pipe closes", "shutdown"])
def test_the_watcher_waits_while_nothing_is_served_and_then_sees_the_end(api: WinApi, how: str) -> None:
    connected = transport(api)
    busy = threading.Event()
    thread = threading.Thread(target=connected.wait_gone, args=(busy,), daemon=True)
    thread.start()
    thread.join(0.05)
    assert "PeekNamedPipe" not in api.calls  # it would wait behind the main thread's read
    busy.set()
    thread.join(0.05)
    assert thread.is_alive()
    if how == "shutdown":
        connected.shutdown()
    else:
        api.fails = BROKEN
    thread.join(5)
    assert not thread.is_alive()


def test_close_releases_the_handle_once(api: WinApi) -> None:
    connected = transport(api)
    connected.close()
    connected.close()
    assert api.calls.count("CloseHandle") == 1
