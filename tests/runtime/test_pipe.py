"""The named-pipe transport against a stand-in for kernel32.

This proves our side of each call: order, arguments, loops, what each error code means. What Windows really does is not
measured here; ``tests/worker/test_pipe.py`` runs the same conformance suite over ``--pipe`` on Windows.
"""

from __future__ import annotations

import ctypes
import threading
import time

import pytest

from engines.runtime import pipe
from engines.runtime.pipe import PipeTransport, connect_pipe
from engines.runtime.transport import PeerGone, TransportFailed

NAME = r"\\.\pipe\synapse-test"


class Kernel32:
    """What the transport needs of kernel32: one pipe, whose peer is a script."""

    def __init__(self) -> None:
        self.opens: list[int | None] = [77]
        self.inbound = b""
        self.outbound = b""
        self.gone = False
        self.code = 0
        self.server_alive = True
        self.server_known = True
        self.write_limit = 10**9
        self.calls: list[str] = []
        self.closed: list[int] = []

    def error(self) -> int:
        return self.code

    def _refuse(self, code: int) -> int:
        self.code = code
        return 0

    def CreateFileW(self, name, access, share, security, disposition, flags, template):  # type: ignore[no-untyped-def]
        self.calls.append("CreateFileW")
        assert name == NAME
        assert (access, share, disposition) == (0xC0000000, 0, 3)
        assert flags == 0x00100000  # SECURITY_SQOS_PRESENT | SECURITY_ANONYMOUS, and not overlapped
        handle = self.opens.pop(0) if len(self.opens) > 1 else self.opens[0]
        return handle if handle is not None else pipe.INVALID_HANDLE

    def GetNamedPipeServerProcessId(self, handle, pid):  # type: ignore[no-untyped-def]
        pid._obj.value = 4711
        return int(self.server_known)

    def OpenProcess(self, access, inherit, pid):  # type: ignore[no-untyped-def]
        assert (access, inherit, pid.value) == (0x00100000, False, 4711)
        return 88

    def WaitForSingleObject(self, handle, milliseconds):  # type: ignore[no-untyped-def]
        assert handle.value == 88
        self.calls.append("WaitForSingleObject")
        time.sleep(0.001)
        return 0x102 if self.server_alive else 0

    def PeekNamedPipe(self, handle, buffer, size, read, available, left):  # type: ignore[no-untyped-def]
        self.calls.append("PeekNamedPipe")
        if self.gone and not self.inbound:
            return self._refuse(pipe.ERROR_BROKEN_PIPE)
        if available is not None:
            available._obj.value = len(self.inbound)
        return 1

    def ReadFile(self, handle, target, size, count, overlapped):  # type: ignore[no-untyped-def]
        assert overlapped is None
        if not self.inbound:
            return self._refuse(self.code if self.code not in (0,) else pipe.ERROR_BROKEN_PIPE)
        chunk, self.inbound = self.inbound[:size], self.inbound[size:]
        ctypes.memmove(target, chunk, len(chunk))
        count._obj.value = len(chunk)
        return 1

    def WriteFile(self, handle, data, size, count, overlapped):  # type: ignore[no-untyped-def]
        if self.gone:
            return self._refuse(pipe.ERROR_NO_DATA)
        if self.code:
            return 0
        taken = min(size, self.write_limit)
        self.outbound += bytes(data)[:taken]
        count._obj.value = taken
        return 1

    def CloseHandle(self, handle):  # type: ignore[no-untyped-def]
        self.closed.append(handle.value)
        return 1


@pytest.fixture
def api() -> Kernel32:
    return Kernel32()


def transport(api: Kernel32) -> PipeTransport:
    return connect_pipe(NAME, deadline=time.monotonic() + 5, api=api, error=api.error)


def test_a_pipe_that_is_not_there_yet_is_tried_again(api: Kernel32, monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(time, "sleep", naps.append)
    api.opens = [None, None, None, 77]
    api.code = pipe.ERROR_FILE_NOT_FOUND
    transport(api)
    assert api.calls.count("CreateFileW") == 4
    assert naps == [0.05] * 3


def test_a_busy_pipe_is_tried_until_the_deadline(api: Kernel32) -> None:
    api.opens = [None]
    api.code = pipe.ERROR_PIPE_BUSY
    with pytest.raises(TransportFailed, match="231"):
        connect_pipe(NAME, deadline=time.monotonic() + 0.12, api=api, error=api.error)
    assert api.calls.count("CreateFileW") >= 2


def test_access_denied_is_not_tried_again(api: Kernel32) -> None:
    api.opens = [None]
    api.code = 5
    with pytest.raises(TransportFailed, match="error 5"):
        transport(api)
    assert api.calls == ["CreateFileW"]


def test_reads_fill_the_given_view(api: Kernel32) -> None:
    api.inbound = b"abcdef"
    target = bytearray(4)
    assert transport(api).recv_into(memoryview(target)) == 4
    assert target == b"abcd"


@pytest.mark.parametrize("code", sorted(pipe.GONE))
def test_each_way_a_pipe_ends_is_eof(api: Kernel32, code: int) -> None:
    api.code = code
    assert transport(api).recv_into(memoryview(bytearray(4))) == 0


def test_another_read_error_is_a_failure(api: Kernel32) -> None:
    api.code = 5
    with pytest.raises(TransportFailed, match="reading"):
        transport(api).recv_into(memoryview(bytearray(4)))


@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_writes_keep_order_and_resume(api: Kernel32, limit: int) -> None:
    api.write_limit = limit
    transport(api).send([b"head", bytearray(b"payload"), memoryview(b""), memoryview(b"tail")])
    assert api.outbound == b"headpayloadtail"


def test_a_write_without_a_peer_is_peer_gone(api: Kernel32) -> None:
    connected = transport(api)
    api.gone = True
    with pytest.raises(PeerGone):
        connected.send([b"x"])


def test_another_write_error_is_a_failure(api: Kernel32) -> None:
    connected = transport(api)
    api.code = 5
    with pytest.raises(TransportFailed, match="writing"):
        connected.send([b"x"])


def test_the_ack_wait_is_bounded_without_reading(api: Kernel32) -> None:
    connected = transport(api)
    connected.set_deadline(time.monotonic() + 0.03)
    with pytest.raises(TimeoutError):
        connected.recv_into(memoryview(bytearray(4)))
    assert api.calls.count("PeekNamedPipe") >= 2


def test_the_watcher_waits_while_nothing_is_served(api: Kernel32) -> None:
    connected = transport(api)
    busy = threading.Event()
    thread = threading.Thread(target=connected.wait_gone, args=(busy,), daemon=True)
    api.server_alive = False
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    assert "PeekNamedPipe" not in api.calls  # it would wait behind the main thread's read
    busy.set()
    thread.join(5)
    assert not thread.is_alive()


@pytest.mark.parametrize("how", ["the process ends", "the pipe closes", "the pipe closes, process unknown", "shutdown"])
def test_the_watcher_sees_the_end(api: Kernel32, how: str) -> None:
    api.server_known = "unknown" not in how
    connected = transport(api)
    busy = threading.Event()
    busy.set()
    thread = threading.Thread(target=connected.wait_gone, args=(busy,), daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    if how == "the process ends":
        api.server_alive = False
    elif how == "shutdown":
        connected.shutdown()
    else:
        api.gone = True
    thread.join(5)
    assert not thread.is_alive()


def test_close_releases_both_handles_once(api: Kernel32) -> None:
    connected = transport(api)
    connected.close()
    connected.close()
    assert api.closed == [77, 88]
