"""The floor of the wire: two blocking Python processes, one ``recv_into`` and one ``sendmsg`` a message, no checks.

    python bench/floor.py SOCKET          the answering end

A message is a 100-byte header and a raw frame, each with its length prefix, as on our wire. Orders from the client are
the header's first byte: ``E`` echo the message; ``S`` swallow it and answer one byte; ``P`` produce a raw frame as long
as its header says. Large frames are received into a fresh array, as a host has to: the caller owns it.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

LENGTH = struct.Struct("<I")
HEADER_BYTES = 100
STAGING_BYTES = 64 * 1024


def header(order: bytes, size: int = 0, wanted: int = 0) -> bytes:
    """Return prefix and 100-byte header of one order, with the prefix of a raw frame of *size* bytes after it."""
    text = (order + b" %d" % wanted).ljust(HEADER_BYTES)
    return LENGTH.pack(HEADER_BYTES) + text + LENGTH.pack(size)


PREFIX_BYTES = len(header(b"E"))


def received(sock: socket.socket, view: memoryview) -> int:
    """Receive into *view*; ConnectionError at the end of the stream."""
    count = sock.recv_into(view)
    if not count:
        raise ConnectionError("the other end of the floor is gone")
    return count


def receive_large(sock: socket.socket, size: int, arrived: memoryview) -> Any:
    """Receive a raw frame of *size* bytes into a fresh array; *arrived* came with the header."""
    import numpy as np

    array = np.empty(size, np.uint8)
    view = array.data
    view[: len(arrived)] = arrived
    filled = len(arrived)
    while filled < size:
        count = received(sock, view[filled:])
        filled += count
    return array


def serve(path: str) -> None:
    """Answer orders until the client closes."""
    import numpy as np

    sock = socket.socket(socket.AF_UNIX)
    sock.connect(path)
    staging = memoryview(bytearray(STAGING_BYTES))
    source = np.empty(0, np.uint8)
    while True:
        filled = 0
        while filled < PREFIX_BYTES:
            count = sock.recv_into(staging[filled:])
            if not count:
                return
            filled += count
        order = staging[4]
        size = LENGTH.unpack_from(staging, PREFIX_BYTES - 4)[0]
        if order == ord("P"):
            wanted = int(bytes(staging[5 : 4 + HEADER_BYTES]))
            if len(source) != wanted:
                source = np.zeros(wanted, np.uint8)
            send_all(sock, [header(b"R", wanted), source.data])
            continue
        if PREFIX_BYTES + size <= STAGING_BYTES:
            while filled < PREFIX_BYTES + size:
                filled += received(sock, staging[filled:])
            raw = staging[PREFIX_BYTES : PREFIX_BYTES + size]
        else:
            raw = receive_large(sock, size, staging[PREFIX_BYTES:filled]).data
        if order == ord("E"):
            send_all(sock, [header(b"R", size), raw])
        else:
            sock.send(b"!")


def send_all(sock: socket.socket, buffers: list[Any]) -> None:
    """Gathered send of everything."""
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    while views:
        count = sock.sendmsg(views)
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if views and count:
            views[0] = views[0][count:]


class Floor:
    """The client, and the process at its other end."""

    def __init__(self, folder: Path) -> None:
        import subprocess

        path = str(folder / "floor.sock")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(1)
        self.process = subprocess.Popen([sys.executable, str(Path(__file__).resolve()), path])
        self.sock, _ = listener.accept()
        listener.close()
        # One floor after another uses this folder.
        Path(path).unlink()
        self._staging = memoryview(bytearray(STAGING_BYTES))

    def echo(self, raw: bytes, calls: int) -> list[float]:
        """Return the seconds of each of *calls* round trips of a small raw frame."""
        sock, staging, clock = self.sock, self._staging, time.perf_counter
        size = len(raw)
        head = header(b"E", size)
        whole = PREFIX_BYTES + size
        times = []
        for _ in range(calls):
            begun = clock()
            sock.sendmsg([head, raw])
            filled = received(sock, staging)
            while filled < whole:
                filled += received(sock, staging[filled:])
            bytes(staging[PREFIX_BYTES:whole])
            times.append(clock() - begun)
        return times

    def send(self, raw: Any) -> float:
        """Return the seconds until the other end has received *raw* into a fresh array."""
        view = memoryview(raw).cast("B")
        begun = time.perf_counter()
        send_all(self.sock, [header(b"S", len(view)), view])
        received(self.sock, self._staging)
        return time.perf_counter() - begun

    def fetch(self, size: int) -> float:
        """Return the seconds to get *size* bytes from the other end into a fresh array."""
        begun = time.perf_counter()
        self.sock.send(header(b"P", wanted=size))
        filled = 0
        while filled < PREFIX_BYTES:
            filled += received(self.sock, self._staging[filled:])
        receive_large(self.sock, size, self._staging[PREFIX_BYTES:filled])
        return time.perf_counter() - begun

    def close(self) -> None:
        """End the other process."""
        self.sock.close()
        self.process.wait()


if __name__ == "__main__":
    try:
        serve(sys.argv[1])
    except (ConnectionError, KeyboardInterrupt):
        os._exit(0)
