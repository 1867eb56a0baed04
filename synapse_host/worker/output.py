"""What a worker wrote to stdout and stderr: the last bytes for diagnosis, and its lines into the host's log."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Final, Literal, TypeAlias

Stream: TypeAlias = Literal["stdout", "stderr"]

MAX_LINE: Final = 4096
"""Bytes of one forwarded line; the rest of a longer line goes to the ring only."""

_log = logging.getLogger("synapse_host.worker")


class LogRing:
    """The last *capacity* payload bytes of both streams, in order of arrival. Tags don't count."""

    def __init__(self, capacity: int = 8192) -> None:
        self.capacity = capacity
        self._segments: deque[tuple[Stream, bytes]] = deque()
        self._size = 0
        self.written = 0
        """Bytes ever written: the position that :meth:`since` counts in."""
        self.on_write: Callable[[], None] | None = None
        """Called after every write, for who follows."""

    def write(self, stream: Stream, data: bytes) -> None:
        """Append *data*, dropping the oldest bytes beyond the capacity."""
        self.written += len(data)
        data = data[max(0, len(data) - self.capacity) :]
        if not data:
            return
        segments = self._segments
        if segments and segments[-1][0] == stream and len(segments[-1][1]) < 512:
            # Byte-wise writers must not cost a segment per byte.
            last = segments.pop()[1]
            self._size -= len(last)
            data = last + data
        segments.append((stream, data))
        self._size += len(data)
        while (excess := self._size - self.capacity) > 0:
            stream, first = segments.popleft()
            if len(first) > excess:
                segments.appendleft((stream, first[excess:]))
            self._size -= min(len(first), excess)
        if self.on_write is not None:
            self.on_write()

    def since(self, position: int) -> tuple[list[tuple[Stream, bytes]], int]:
        """Return what was written after *position* as runs, and how many bytes of it the ring has lost already."""
        first = self.written - self._size
        if not 0 <= position <= self.written:
            position = 0
        skip = max(0, position - first)
        runs: list[tuple[Stream, bytes]] = []
        for stream, data in self._segments:
            part, skip = data[skip:], max(0, skip - len(data))
            if part and runs and runs[-1][0] == stream:
                runs[-1] = (stream, runs[-1][1] + part)
            elif part:
                runs.append((stream, part))
        return runs, max(0, first - position)

    def render(self, position: int = 0) -> str:
        """Return what came after *position* as text, each line behind ``[stdout] `` or ``[stderr] ``; lossy UTF-8."""
        lines: list[str] = []
        for stream, data in self.since(position)[0]:
            text = data.decode("utf-8", "replace")
            lines += [f"[{stream}] {line}" for line in text.removesuffix("\n").split("\n")]
        return "\n".join(lines)


class LineForwarder:
    """Sends a worker's complete lines to :mod:`logging`, at most *per_second* of them in each second.

    One budget for both streams; it outlives restarts of the worker. Lines over the budget are counted and the next
    forwarded one says ``dropped=N``. An unterminated last line stays in the ring only.
    """

    def __init__(self, lane_id: str, *, per_second: int = 50) -> None:
        self._lane_id = lane_id
        self._per_second = per_second
        self._partial: dict[Stream, bytes] = {}
        self._second = float("-inf")
        self._sent = 0
        self.dropped = 0

    def feed(self, worker: str, stream: Stream, data: bytes, now: float) -> None:
        """Take bytes of one stream of the worker named *worker*; *now* in seconds."""
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = self._partial.pop(stream, b"") + lines[0]
        else:
            rest = self._partial.pop(stream, b"") + rest
        if rest:
            self._partial[stream] = rest[: MAX_LINE + 1]
        for line in lines:
            self._forward(worker, stream, line, now)

    def restart(self) -> None:
        """Forget unterminated lines: the worker is gone."""
        self._partial.clear()

    def _forward(self, worker: str, stream: Stream, line: bytes, now: float) -> None:
        if now - self._second >= 1.0:
            self._second, self._sent = now, 0
        if self._sent >= self._per_second:
            self.dropped += 1
            return
        self._sent += 1
        text = line.removesuffix(b"\r")[:MAX_LINE].decode("utf-8", "replace")
        fields = {"worker": worker, "lane": self._lane_id, "stream": stream, "dropped": self.dropped}
        dropped = f" dropped={self.dropped}" if self.dropped else ""
        _log.info("%s %s: %s%s", worker, stream, text, dropped, extra=fields)
        self.dropped = 0
