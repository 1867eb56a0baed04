"""What an operator says to a running host: a Unix socket, one JSON line each way, same user only.

A connection may carry many requests, one after the other. Each is an object with ``op`` (``ps``, ``ping``, ``logs``,
``load``, ``unload``, ``probe``, ``metrics``); the answer is a document, or ``{"error": {...}}`` as interfaces.md has
it. Bad input gets a typed answer and never harms the host: lines and connections are bounded, everything runs on the
host's loop without blocking it, and no request is trusted before it is decoded.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import logging
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from synapse_host.errors import InvalidRequest, QueueFull, SynapseError, UnknownModel
from synapse_host.host import Host
from synapse_host.serve.clients import Clients
from synapse_host.serve.operations import LoadModel, Logs, Metrics, Operation, Ping, ProbeLane, Ps, UnloadModel, decode
from synapse_host.worker.handshake import Peer
from synapse_host.worker.listener import peer_of
from synapse_host.worker.output import LogRing, Stream

MAX_LINE: Final = 64 * 1024
"""Bytes of one request line."""
MAX_CLIENTS: Final = 64
IDLE_S: Final = 300.0
"""How long a connection may say nothing."""
SEND_S: Final = 10.0
"""How long a client may take to read an answer."""
FLUSH_S: Final = 2.0
"""How long open requests may take to leave once the host is closed."""
MAX_WAIT_S: Final = 60.0
"""Longest wait of one ``logs`` request for something new."""

_log = logging.getLogger(__name__)


def admits(peer: Peer, uid: int) -> bool:
    """Return whether a client may talk to this host: the same user, told by the kernel; unknown is not the same."""
    return peer.uid is not None and peer.uid == uid


class ControlServer:
    """Answers operators of *host*. Make it with :meth:`open`."""

    def __init__(self, host: Host, *, about: dict[str, Any]) -> None:
        self.host = host
        self.about = about
        """What ``ps`` tells of the process: version, start, places."""
        self.stopping = False
        """True once the host drains: nothing new is started."""
        self._started = time.monotonic()
        self._clients = Clients()
        self._busy = 0
        self._news = asyncio.Event()
        self._closed = False

    @classmethod
    @asynccontextmanager
    async def open(cls, host: Host, *, about: dict[str, Any]) -> AsyncIterator[ControlServer]:
        """Listen on ``control.sock`` (0600) of the host's runtime directory until the end of the block.

        A dead host's socket is replaced; InvalidRequest for a live listener or anything else in its place.
        """
        control = cls(host, about=about)
        listener = host.runtime.listen_control()
        try:
            server = await asyncio.start_unix_server(control._accept, sock=listener.listening, limit=MAX_LINE)
            for ring in host.logs.values():
                ring.on_write = control._wake
            try:
                yield control
            finally:
                server.close()
                await control._close()
        finally:
            listener.close()

    # --- connections -------------------------------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with self._clients.connected(writer):
            peer = _peer(writer)
            if not admits(peer, os.getuid()):
                _log.warning("another user's connection was refused: uid=%s pid=%s", peer.uid, peer.pid)
            elif len(self._clients) > MAX_CLIENTS:
                await _send(writer, _failure(QueueFull(f"{MAX_CLIENTS} clients are connected already")))
            else:
                await self._serve(reader, writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not self._closed:
            try:
                async with asyncio.timeout(IDLE_S):
                    line = await reader.readuntil(b"\n")
            except asyncio.IncompleteReadError as exc:
                if exc.partial.strip():
                    await _send(writer, _failure(InvalidRequest("the line has no end", details=_CONTROL_LINE)))
                return
            except asyncio.LimitOverrunError:
                error = InvalidRequest(f"the line is longer than {MAX_LINE} bytes", details=_CONTROL_LINE)
                await _send(writer, _failure(error))
                return
            self._busy += 1
            try:
                await _send(writer, await self._answer(line))
            finally:
                self._busy -= 1

    async def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            return await self._do(decode(line))
        except SynapseError as exc:
            return _failure(exc)
        except Exception:  # a bug of ours ends one request, never the host
            _log.exception("control request failed: %.200r", line)
            return {
                "error": {
                    "code": "internal_error",
                    "class": "permanent",
                    "safe_to_retry_same_request": False,
                    "message": "internal error, see the host's log",
                    "details": {},
                }
            }

    async def _close(self) -> None:
        """Let answers that are due leave, then end every connection."""
        self._closed = self.stopping = True
        self._wake()
        for ring in self.host.logs.values():
            ring.on_write = None
        deadline = time.monotonic() + FLUSH_S
        while self._busy and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        await self._clients.end()

    # --- operations --------------------------------------------------------------------------------------------------

    async def _do(self, request: Operation) -> dict[str, Any]:
        match request:
            case Ps():
                return self.state()
            case Ping():
                return await self._ping(request)
            case Logs():
                return await self._logs(request)
            case LoadModel():
                self._check_open()
                lane_id = self._lane_of(request.model, request.lane)
                await self.host.load(request.model, lane=request.lane, deadline=_seconds(request.deadline))
                return self.state(lane_id)
            case UnloadModel():
                self._check_open()
                lane_id = self._lane_of(request.model, request.lane)
                await self.host.unload(request.model, lane=request.lane)
                return self.state(lane_id)
            case ProbeLane():
                self._check_open()
                lane_id, *others = self._lanes(request.lane)
                if others:
                    raise InvalidRequest(
                        f"{request.lane!r} means more than one lane; name one of {', '.join([lane_id, *others])}",
                        details={"known": [lane_id, *others]},
                    )
                await self.host.probe(lane_id, deadline=_seconds(request.deadline))
                return self.state(lane_id)
            case Metrics():
                from synapse_host.serve.metrics import text

                return {"text": text(self.host)}

    def state(self, *lane_ids: str) -> dict[str, Any]:
        """Return the host, its lanes (all, or those named) and their workers, as ``ps --json`` prints them."""
        lanes = self.host.health()["lanes"]
        if lane_ids:
            lanes = {lane_id: lanes[lane_id] for lane_id in lane_ids}
        workers = [
            {
                "lane": lane_id,
                "pid": lane["worker_pid"],
                "generation": lane["generation"],
                "model": lane["model"],
                "engine": lane["engine"],
                "device": lane["device"],
                "version": lane["worker_version"],
                "state": lane["state"],
                "rss_mb": lane["rss_mb"],
                "age_s": lane["age_s"],
            }
            for lane_id, lane in lanes.items()
            if lane["worker_pid"] is not None
        ]
        uptime = time.monotonic() - self._started
        host = {**self.about, "pid": os.getpid(), "uptime_s": uptime, "stopping": self.stopping}
        return {"host": host, "lanes": lanes, "workers": workers}

    async def _ping(self, request: Ping) -> dict[str, Any]:
        named = self._lanes(request.lane)
        deadline = _seconds(request.deadline)
        lanes = self.host.health()["lanes"]
        running = [lane_id for lane_id in named if lanes[lane_id]["worker_pid"] is not None]

        async def one(lane_id: str) -> dict[str, Any]:
            started = time.monotonic()
            try:
                await self.host.ping(self.host.assignments[lane_id].model, lane=lane_id, deadline=deadline)
            except SynapseError as exc:
                return _failure(exc)
            return {"round_trip_ms": (time.monotonic() - started) * 1000}

        pings = dict(zip(running, await asyncio.gather(*map(one, running)), strict=True))
        return {**self.state(*named), "pings": pings}

    async def _logs(self, request: Logs) -> dict[str, Any]:
        named = self._lanes(request.lane)
        wait = _seconds(request.wait) or 0.0
        deadline = time.monotonic() + min(wait, MAX_WAIT_S)
        while True:
            logs = {lane_id: _tail(self.host.logs[lane_id], request.after.get(lane_id, 0)) for lane_id in named}
            left = deadline - time.monotonic()
            if left <= 0 or self._closed or any(log["segments"] for log in logs.values()):
                return {"logs": logs}
            # Every waiter takes the event that is current before it looks again: no write is missed.
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._news.wait()

    def _wake(self) -> None:
        event, self._news = self._news, asyncio.Event()
        event.set()

    def _lanes(self, word: str | None) -> list[str]:
        """Return the ids of the lanes that *word* names: an id, a matrix lane, a model, or all."""
        assignments = self.host.assignments
        if word is None:
            return list(assignments)
        found = [item.lane_id for item in assignments.values() if word in (item.lane_id, item.lane, item.model)]
        if not found:
            raise InvalidRequest(
                f"no lane {word!r} (have: {', '.join(assignments) or 'none'})", details={"known": sorted(assignments)}
            )
        return found

    def _lane_of(self, model: str, lane: str | None) -> str:
        try:
            return self.host.lane_of(model, lane).lane_id
        except UnknownModel as exc:
            have = ", ".join(sorted(self.host.bundles)) or "none"
            raise UnknownModel(
                f"this host has no model {model!r} (it has: {have}). For a model installed since it started, restart "
                "synapse run",
                details=exc.details,
            ) from exc

    def _check_open(self) -> None:
        if self.stopping:
            raise QueueFull("the host is stopping", details={"reason": "stopping"})


_CONTROL_LINE: Final = {"reason": "control_line"}


def _seconds(value: float | None) -> float | None:
    if value is not None and not 0 <= value < 1e9:
        raise InvalidRequest(f"{value!r} is not a number of seconds")
    return value


def _tail(ring: LogRing, after: int) -> dict[str, Any]:
    runs, missed = ring.since(after)
    position = ring.written
    segments: list[tuple[Stream, str]] = []
    for left, (stream, data) in zip(range(len(runs) - 1, -1, -1), runs, strict=True):
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        if text := decoder.decode(data, final=left > 0):
            segments.append((stream, text))
        # A character that is only half there, at the very end, comes whole with the next answer.
        position -= len(decoder.getstate()[0])
    return {"segments": segments, "position": position, "missed": missed}


def _failure(error: SynapseError) -> dict[str, Any]:
    return {"error": error.to_dict("operator")}


def _peer(writer: asyncio.StreamWriter) -> Peer:
    # A transport's socket offers only part of a socket; a duplicate is a real one.
    with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as connection:
        return peer_of(connection)


async def _send(writer: asyncio.StreamWriter, document: dict[str, Any]) -> None:
    writer.write(json.dumps(document, default=str).encode() + b"\n")
    async with asyncio.timeout(SEND_S):
        await writer.drain()
