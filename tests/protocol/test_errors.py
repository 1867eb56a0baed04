"""What a fault says about itself: its sentence, the word it is counted under, and the numbers of a wrong version."""

from __future__ import annotations

import struct

import pytest

from engines.protocol.connection import Connection, Role
from engines.protocol.errors import RemoteProtocolError, VersionMismatch

LENGTH = struct.Struct("<I")
HELLO = (
    b'{"v":3,"nonce":"0123456789abcdef","engine":{"engine":"llama.cpp-worker","version":"1"},"pid":1,"max_frame":1024}'
)


def fault(connection: Connection, data: bytes, *, eof: bool = False) -> RemoteProtocolError:
    with pytest.raises(RemoteProtocolError) as caught:
        connection.receive(data)
        if eof:
            connection.receive_eof()
    return caught.value


def framed(payload: bytes) -> bytes:
    return LENGTH.pack(len(payload)) + payload


def test_a_plain_fault_is_invalid_and_keeps_its_words():
    error = RemoteProtocolError("the counter fell")
    assert (str(error), error.reason) == ("the counter fell", "invalid")


def test_a_wrong_version_carries_both_numbers():
    error = fault(Connection(Role.HOST), framed(HELLO.replace(b'"v":3', b'"v":2')))
    assert isinstance(error, VersionMismatch)
    assert (error.observed, error.expected, error.reason) == (2, 3, "version")
    assert "version 2" in str(error)
    assert "speaks 3" in str(error)


@pytest.mark.parametrize(
    ("data", "eof", "reason"),
    [
        (LENGTH.pack(2**31), False, "oversize"),
        (framed(b"not JSON"), False, "malformed"),
        (framed(HELLO)[:9], True, "torn"),
        (framed(HELLO) + framed(b"{}"), False, "out_of_turn"),
        (framed(HELLO.replace(b"1024", b"0")), False, "invalid"),
    ],
)
def test_a_fault_is_counted_under_its_reason(data: bytes, eof: bool, reason: str):
    assert fault(Connection(Role.HOST), data, eof=eof).reason == reason
