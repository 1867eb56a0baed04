"""What operators ask of a running host, ``/synapse/…``; its health, and its metrics. Every answer is a document.

``ps``, ``ping``, ``logs``, ``load``, ``unload`` and ``probe`` of the command come here over the Unix socket, and so do
``embed``, ``rerank`` and ``generate`` (:class:`Calls`), which get what the host's own methods return.
"""

from __future__ import annotations

import asyncio
import codecs
import math
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from msgspec import structs
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from synapse_host.certificates import standing
from synapse_host.certification.report import row_of
from synapse_host.errors import InvalidRequest, SynapseError, UnknownModel
from synapse_host.results import EmbedResult, Generation, RerankResult
from synapse_host.serve import bodies, metrics
from synapse_host.serve.bodies import EmbedCall, GenerateCall, Lane, Load, Logs, Probe, RerankCall
from synapse_host.serve.service import Endpoint, Service, deadline_of, json_response
from synapse_host.worker.output import LogRing, Stream

MAX_WAIT_S: Final = 60.0
"""Longest wait of one ``logs`` request for something new."""
LOOK_S: Final = 10.0
"""How long what was found out about certificates is good."""


def routes(service: Service) -> list[BaseRoute]:
    """Return the operator's routes."""
    operator, calls = Operator(service), Calls(service)

    def post(kind: type[bodies.Body], handle: Any, *, work: bool = False) -> Route:
        endpoint = Endpoint(service, kind, handle, place="command" if work else "operator", work=work)
        return Route(f"/synapse/{handle.__name__}", endpoint, methods=["POST"])

    return [
        Route("/health", operator.health),
        Route("/ready", operator.ready),
        Route("/metrics", operator.metrics),
        Route("/synapse/lanes", operator.lanes),
        Route("/synapse/workers", operator.workers),
        Route("/synapse/models", operator.models),
        Route("/synapse/certificates", operator.certificates),
        post(bodies.Load, operator.load),
        post(bodies.Load, operator.unload),
        post(bodies.Probe, operator.probe),
        post(bodies.Lane, operator.ping),
        post(bodies.Logs, operator.logs),
        post(bodies.EmbedCall, calls.embed, work=True),
        post(bodies.RerankCall, calls.rerank, work=True),
        post(bodies.GenerateCall, calls.generate, work=True),
    ]


CHANGES: Final = ("/synapse/load", "/synapse/unload", "/synapse/probe")
"""Routes that change what others are served by: open to the host's own user, and to who shows the key."""
COMMANDS: Final = ("/synapse/embed", "/synapse/rerank", "/synapse/generate")
"""Routes of the user's own commands, with wider limits."""


class Operator:
    """What is up, and what may be done about it."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._host = service.host
        self._looking = asyncio.Lock()
        self._look_again = -math.inf
        self._certificates: list[dict[str, Any]] = []

    async def lanes(self, request: Request) -> Response:
        """The host, its lanes and their workers; no worker is touched."""
        return json_response(self._service.state())

    async def workers(self, request: Request) -> Response:
        """The workers that run."""
        return json_response({"workers": self._service.state()["workers"]})

    async def models(self, request: Request) -> Response:
        """The bundles that this host serves, the lanes of each, and why they have their engines."""
        found: dict[str, Any] = {}
        for name, bundle in self._host.bundles.items():
            task = bundle.manifest.task
            found[name] = {"path": str(bundle.root), "manifest_digest": bundle.digest, "task": task, "lanes": []}
        for lane in self._host.assignments.values():
            if (spec := lane.spec) is not None:
                served = {"lane": lane.lane_id, "engine": spec.engine_id, "device": spec.device}
                artifact = {"artifact_digest": spec.load.artifact_digest}
                found[lane.model]["lanes"].append({"matrix_lane": lane.lane, **served, **artifact})
        host, placements = self._service.state()["host"], self._host.explain()
        return json_response({"host": host, "models": found, "placements": placements})

    async def certificates(self, request: Request) -> Response:
        """What is certified here, each certificate judged anew."""

        def look() -> list[dict[str, Any]]:
            host = self._host
            rows = standing.listed(host.matrix, host.bundles, host.profile, data_dir=host.config.data_dir)
            return [row_of(one, datetime.now(UTC)) for one in rows]

        # In a thread and not more often: it reads files, and asks the engines' programs for their versions.
        async with self._looking:
            if time.monotonic() >= self._look_again:
                self._certificates = await asyncio.to_thread(look)
                self._look_again = time.monotonic() + LOOK_S
        return json_response({"certificates": self._certificates})

    async def health(self, request: Request) -> Response:
        """Whether the server lives, with the cached state of every lane."""
        lanes = self._host.health()["lanes"]
        return json_response({"status": "ok", "lanes": {lane_id: lane["state"] for lane_id, lane in lanes.items()}})

    async def ready(self, request: Request) -> Response:
        """200 where requests are welcome: the models named at the start are loaded, and the host isn't stopping."""
        ready = self._service.ready and not self._service.stopping
        return json_response({"ready": ready}, status=200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        """The metrics as Prometheus text."""
        return PlainTextResponse(metrics.text(self._host), media_type=metrics.CONTENT_TYPE)

    async def load(self, request: Request, body: Load) -> Response:
        """Start a lane's worker and load its model; answered when it is loaded, also where the client left."""
        self._service.check_open()
        lane_id = self._lane_of(body.model, body.lane)
        await self._host.load(body.model, lane=body.lane, deadline=deadline_of(request, body))
        return json_response(self._service.state(lane_id))

    async def unload(self, request: Request, body: Load) -> Response:
        """Unload a model and forget its lane's strikes."""
        self._service.check_open()
        lane_id = self._lane_of(body.model, body.lane)
        await self._host.unload(body.model, lane=body.lane)
        return json_response(self._service.state(lane_id))

    async def probe(self, request: Request, body: Probe) -> Response:
        """Prove a lane with a fresh worker, LOAD and one served request; success opens it, whatever shut it."""
        self._service.check_open()
        lane_id, *others = self._named(body.lane)
        if others:
            known = [lane_id, *others]
            raise InvalidRequest(
                f"{body.lane!r} means more than one lane; name one of {', '.join(known)}", details={"known": known}
            )
        await self._host.probe(lane_id, deadline=deadline_of(request, body))
        return json_response(self._service.state(lane_id))

    async def ping(self, request: Request, body: Lane) -> Response:
        """PING the workers of one lane, or of all lanes that have one."""
        named = self._named(body.lane)
        deadline = deadline_of(request, body)
        lanes = self._host.health()["lanes"]
        running = [lane_id for lane_id in named if lanes[lane_id]["worker_pid"] is not None]

        async def one(lane_id: str) -> dict[str, Any]:
            started = time.monotonic()
            try:
                await self._host.ping(self._host.assignments[lane_id].model, lane=lane_id, deadline=deadline)
            except SynapseError as exc:
                return {"error": exc.to_dict("operator")}
            return {"round_trip_ms": (time.monotonic() - started) * 1000}

        pings = dict(zip(running, await asyncio.gather(*map(one, running)), strict=True))
        return json_response({**self._service.state(*named), "pings": pings})

    async def logs(self, request: Request, body: Logs) -> Response:
        """What workers wrote, or what is new since the positions in ``after``, waiting for it at most ``wait``."""
        named = self._named(body.lane)
        until = time.monotonic() + min(body.wait, MAX_WAIT_S)
        while True:
            logs = {lane_id: _tail(self._host.logs[lane_id], body.after.get(lane_id, 0)) for lane_id in named}
            left = until - time.monotonic()
            if left <= 0 or self._service.closing or any(log["segments"] for log in logs.values()):
                return json_response({"logs": logs})
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._service.news.wait()

    def _named(self, word: str | None) -> list[str]:
        """Return the ids of the lanes that *word* names: an id, a matrix lane, a model, or all."""
        assignments = self._host.assignments
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
            return self._host.lane_of(model, lane).lane_id
        except UnknownModel as exc:
            have = ", ".join(sorted(self._host.bundles)) or "none"
            raise UnknownModel(
                f"this host has no model {model!r} (it has: {have}). For a model installed since it started, restart "
                "synapse serve; a folder is served by: synapse serve --load FOLDER",
                details=exc.details,
            ) from exc


class Calls:
    """The host's own calls, for commands of the same user. A body's fields are the call's arguments."""

    def __init__(self, service: Service) -> None:
        self._host = service.host

    async def embed(self, request: Request, body: EmbedCall) -> Response:
        """Vectors of texts."""
        return _result(await self._host.embed_result(**_arguments(request, body)))

    async def rerank(self, request: Request, body: RerankCall) -> Response:
        """Scores of documents."""
        return _result(await self._host.rerank_result(**_arguments(request, body)))

    async def generate(self, request: Request, body: GenerateCall) -> Response:
        """The continuation of a prompt."""
        return _result(await self._host.generate(**_arguments(request, body)))


def _arguments(request: Request, body: bodies.Body) -> dict[str, Any]:
    arguments = {**structs.asdict(body), "deadline": deadline_of(request, body)}
    del arguments["timeout"]
    return arguments


def _result(result: EmbedResult | RerankResult | Generation) -> Response:
    """Return all that a result holds, arrays as float32 in base64."""
    packed = msgspec.json.encode(result, enc_hook=lambda array: array.tobytes())
    return Response(packed, media_type="application/json")


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
