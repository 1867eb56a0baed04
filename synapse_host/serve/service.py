"""From a request to a call of the host and back: limits, deadline, a client that leaves, and failures as answers."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import re
import reprlib
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from synapse_host.errors import InvalidRequest, Place, QueueFull, SynapseError
from synapse_host.host import Host
from synapse_host.serve.bodies import Body

MAX_BODY: Final = 8 * 1024 * 1024
MAX_COMMAND: Final = 4 * MAX_BODY
"""The same for this user's own commands, whose longest text has more."""
MAX_ELEMENTS: Final = 256 * 1024
"""Commas in a body: reading numbers or rows costs a hundred times what the same bytes of text cost, and blocks."""
MAX_REQUESTS: Final = 1024
"""Requests that may be in the server at once, whether they wait or run; each lane's own queue is shorter."""
MAX_HELD: Final = 256 * 1024 * 1024
"""Bytes of bodies of those requests."""
BODY_S: Final = 60.0
"""How long a client may take to send its body."""
LINGER_S: Final = 5.0
"""How long the rest of a body is read that is too large."""

STATUS: Final[dict[str, int]] = {
    "invalid_request": 400,
    "config_invalid": 500,
    "unknown_model": 404,
    "model_in_use": 409,
    "sequence_too_long": 422,
    "unsupported_request": 422,
    "operation_mismatch": 422,
    "queue_full": 429,
    "deadline_exceeded": 504,
    **dict.fromkeys(
        (
            "engine_crashed", "probe_required", "lane_refused", "not_certified", "backend_missing", "shape_compiling",
            "ane_lane_busy", "ane_resources_exhausted", "oom",
        ),
        503,
    ),
}  # fmt: skip
"""The status of each error code; 500 for the rest, which are faults of the worker or of the bundle."""

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Refused(InvalidRequest):
    """A request that the server itself refuses, with a status of its own."""

    def __init__(self, status: int, message: str, **details: Any) -> None:
        super().__init__(message, details=details)
        self.status = status


class Service:
    """What every route shares: the host, whether it may be asked, and how much is asked at the moment."""

    def __init__(self, host: Host, *, about: dict[str, Any]) -> None:
        self.host = host
        self.about = about
        """What ``ps`` says of the process: version, start, places."""
        self.ready = False
        """True once the models that were named at the start are loaded."""
        self.stopping = False
        """True once the host drains: nothing new is started."""
        self.closing = False
        """True once the host is closed."""
        self.news = asyncio.Event()
        """Set when a worker writes something, and at the end."""
        for ring in host.logs.values():
            ring.on_write = self.wake
        self._started = time.monotonic()
        self.requests = 0
        """Requests of programs that are being answered."""
        self._held = 0

    def state(self, *lane_ids: str) -> dict[str, Any]:
        """Return the host, its lanes (all, or those named) and their workers, as ``ps --json`` prints them."""
        lanes = self.host.health()["lanes"]
        if lane_ids:
            lanes = {lane_id: lanes[lane_id] for lane_id in lane_ids}
        names = {"pid": "worker_pid", "version": "worker_version"}
        keys = ("pid", "generation", "model", "engine", "device", "version", "state", "rss_mb", "age_s")
        workers = [
            {"lane": lane_id, **{key: lane[names.get(key, key)] for key in keys}}
            for lane_id, lane in lanes.items()
            if lane["worker_pid"] is not None
        ]
        uptime = time.monotonic() - self._started
        host = {**self.about, "pid": os.getpid(), "uptime_s": uptime, "stopping": self.stopping}
        return {"host": host, "lanes": lanes, "workers": workers}

    def check_open(self) -> None:
        """Raise QueueFull once the host is stopping."""
        if self.stopping:
            raise QueueFull("the host is stopping", details={"reason": "stopping"})

    def close(self) -> None:
        """Answer who waits for news: the host is closed."""
        self.closing = True
        self.wake()

    def wake(self) -> None:
        """Wake who waits for news; every waiter takes :attr:`news` before it looks, so that nothing is missed."""
        event, self.news = self.news, asyncio.Event()
        event.set()

    def enter(self) -> None:
        """Count a program's request in; QueueFull where there are too many."""
        self.check_open()
        if self.requests >= MAX_REQUESTS:
            raise self._full()
        self.requests += 1

    def _full(self) -> QueueFull:
        return QueueFull(f"the server has {self.requests} requests already", retry_after_ms=1000)

    def leave(self, held: int, *, counted: bool) -> None:
        """Count out what a request held of its body, and the request itself where it was counted in."""
        self._held -= held
        self.requests -= counted

    async def read(self, request: Request, most: int) -> bytes:
        """Return a request's body. Refused for more than *most* bytes or a slow client, QueueFull for want of room."""
        parts: list[bytes] = []
        held, large = 0, int(request.headers.get("content-length", "0")[:20]) > most
        try:
            async with asyncio.timeout(LINGER_S if large else BODY_S) as limit:
                async for part in request.stream():
                    if large:
                        continue  # Closing now would reset the connection, and the client would never read why.
                    held += len(part)
                    request.state.held = held
                    self._held += len(part)
                    if self._held > MAX_HELD:
                        raise self._full()
                    parts.append(part)
                    if held > most:
                        large = True
                        parts.clear()
                        limit.reschedule(asyncio.get_running_loop().time() + LINGER_S)
        except TimeoutError:
            if not large:
                raise Refused(408, f"the body took more than {BODY_S:g} s") from None
        if large:
            raise Refused(413, f"the body has more than {most} bytes; send it in parts", limit=most)
        return b"".join(parts)


B = TypeVar("B", bound=Body)


def decode(data: bytes, kind: type[B], *, own: bool = False) -> B:
    """Return the request in a body. InvalidRequest names the parameter that is wrong, unknown or not honoured.

    *own*: it comes from a command of this user, and its texts may have any number of commas.
    """
    if not own and data.count(b",") > MAX_ELEMENTS:
        raise Refused(413, f"the body has more than {MAX_ELEMENTS} elements; send it in parts", limit=MAX_ELEMENTS)
    collecting = gc.isenabled()
    # The collector would run a hundred times while many small lists are made, and find nothing: none is garbage yet.
    gc.disable()
    try:
        body = msgspec.json.decode(data or b"{}", type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        text = str(exc)[:300]
        unknown = re.search(r"unknown field `(.{1,100})`", text)
        named = unknown or re.search(r"`\$\.(\w{1,100})", text) or re.search(r"required field `(\w{1,100})`", text)
        if unknown:
            text = f"the parameter {unknown[1]!r} is not known here, and it might be meant to change the answer"
        raise InvalidRequest(text, details={"param": named[1]} if named else {}) from None
    finally:
        if collecting:
            gc.enable()
    name = body.unsupported()
    if name is not None:
        value = reprlib.repr(getattr(body, name))[:80]
        raise InvalidRequest(
            f"the parameter {name!r} with the value {value} would change the answer, and is not supported",
            details={"param": name},
        )
    return body


def failure(error: SynapseError, place: Place = "python") -> Response:
    """Return the answer that says what went wrong."""
    status = status_of(error)
    # OpenAI's clients read this header and repeat a request by themselves, or don't.
    headers = {"x-should-retry": str(error.safe_to_retry).lower()}
    if status in (429, 503) and error.retry_after_ms is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_ms / 1000)))
    if status in (408, 413):
        headers["connection"] = "close"  # what is left of the body is not read
    return json_response({"error": error_of(error, place)}, status=status, headers=headers)


def status_of(error: SynapseError) -> int:
    """Return the status of an error."""
    stopping = error.details.get("reason") == "stopping"
    return error.status if isinstance(error, Refused) else 503 if stopping else STATUS.get(error.code, 500)


def error_of(error: SynapseError, place: Place = "python") -> dict[str, Any]:
    """Return an error in OpenAI's form, with our fields beside theirs."""
    status = status_of(error)
    kind = "invalid_request_error" if status < 429 else "rate_limit_error" if status == 429 else "api_error"
    return {**error.to_dict(place), "type": kind, "param": error.details.get("param")}


def json_response(document: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a document as an answer."""
    body = msgspec.json.encode(document, enc_hook=str)
    return Response(body, status, headers, media_type="application/json")


Handle: TypeAlias = Callable[[Request, Any], Coroutine[Any, Any, Response]]


class Endpoint:
    """One route that takes a body, as an ASGI application.

    *work*: the request is counted, and given up when its client leaves; otherwise it is an operator's, which goes on.
    """

    def __init__(
        self, service: Service, kind: type[Body], handle: Handle, *, place: Place = "python", work: bool = True
    ) -> None:
        self._service, self._kind, self._handle, self._place, self._work = service, kind, handle, place, work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; what it fails with, the application tells in the words of *place*."""
        request = Request(scope, receive, send)
        request.state.place, request.state.held = self._place, 0
        if self._work:
            self._service.enter()
        try:
            try:
                own = self._place == "command"
                data = await self._service.read(request, MAX_COMMAND if own else MAX_BODY)
                handled = self._handle(request, decode(data, self._kind, own=own))
                response = await (unless_gone(request, handled) if self._work else handled)
            except (SynapseError, ClientDisconnect):
                raise
            except Exception:
                response = internal_error(request)  # here: the application's answer would end the connection
            if response is not None:
                await response(scope, receive, send)
        except ClientDisconnect:
            pass  # nobody is left to read an answer
        finally:
            self._service.leave(request.state.held, counted=self._work)


def internal_error(request: Request) -> Response:
    """Log the bug of ours that is being handled, and return the answer for it."""
    kind, _, trace = sys.exc_info()
    # Without the exception's own words: they may quote what the request held.
    where = "".join(traceback.format_tb(trace))
    _log.error("a request failed: %s %s: %s\n%s", request.method, request.url.path, kind and kind.__name__, where)
    fields = {"class": "permanent", "safe_to_retry_same_request": False, "details": {}, "param": None}
    words = {"code": "internal_error", "type": "api_error", "message": "internal error, see the host's log"}
    return json_response({"error": {**words, **fields}}, status=500)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """Await *work*; when the client leaves first it is cancelled, as any caller's that leaves, and None returned."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(request.receive())  # the body is read: the next message says that the client left
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def deadline_of(request: Request, body: Body) -> float | None:
    """Return the seconds that a request may take: the header's, else the body's."""
    text = request.headers.get("x-synapse-deadline")
    if text is None:
        return body.timeout
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e9:
        raise InvalidRequest("X-Synapse-Deadline is not a positive number of seconds", details={"param": "timeout"})
    return value
