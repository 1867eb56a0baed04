"""Neural Engine lanes: rungs, leases and exchanges put together over one Supervisor a lane.

A request's rows are grouped by the smallest rung that fits, rungs run in ascending order, one lease at a time. The task
that serves a rung keeps lease, turn and permit until the reply is drained, whether or not its caller still waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET

from engines.bundle.manifest import Artifact
from engines.protocol.errors import ErrorCode
from engines.protocol.messages import (
    AneAdmitPacked,
    AneAdmitShape,
    AneEvictPacked,
    AneEvictShape,
    AnyRequest,
    EmbedBatch,
    Ping,
    RerankSequences,
    Vectors,
)
from synapse_host.errors import DeadlineExceeded, EngineCrashed, SequenceTooLong, SynapseError
from synapse_host.residency_shell import ResidencyShell
from synapse_host.slots import Key, Limits, Model
from synapse_host.supervisor import Build, Outcome, Supervisor

Rung: TypeAlias = tuple[int, tuple[int, ...]]
"""A bucket in tokens and the rows that run on it."""


def rungs(lengths: Sequence[int], buckets: Sequence[int]) -> list[Rung]:
    """Group rows by their smallest fitting bucket, ascending; SequenceTooLong for a row that fits nowhere."""
    ladder = sorted(buckets)
    groups: dict[int, list[int]] = {}
    for row, tokens in enumerate(lengths):
        bucket = next((rung for rung in ladder if tokens <= rung), None)
        if bucket is None:
            raise SequenceTooLong(
                f"text {row} has {tokens} tokens, the largest bucket takes {ladder[-1]}",
                details={"index": row, "tokens": tokens, "max_tokens": ladder[-1]},
            )
        groups.setdefault(bucket, []).append(row)
    return [(bucket, tuple(groups[bucket])) for bucket in sorted(groups)]


def buckets(artifact: Artifact) -> tuple[int, ...]:
    """Return an artifact's buckets in tokens, ascending."""
    functions = artifact.functions if artifact.functions is not UNSET else []
    return tuple(sorted(function.bucket for function in functions if function.bucket is not UNSET))


def cost(artifact: Artifact) -> Model:
    """Return what one function of an artifact is charged: the manifest's layers, and its bytes.

    Weights are shared on disk, not provably in the engine's memory, so every function counts them all (ane.md 4).
    """
    layers = artifact.layers if artifact.layers is not UNSET else 1
    nbytes = artifact.bytes if artifact.bytes is not UNSET else 0
    return Model(layers=layers, nbytes=nbytes, smallest=buckets(artifact)[0])


class AneLane:
    """One lane's exchanges for :class:`~synapse_host.residency_shell.ResidencyShell`."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self.lane_id = supervisor.spec.lane_id

    async def admit(self, key: Key) -> object:
        """ANE_ADMIT_SHAPE or ANE_ADMIT_PACKED; the inventory. Compilation takes no execution permit."""
        reply, _ = await self._exchange(key, AneAdmitShape, AneAdmitPacked, "ane_admit")
        return reply

    async def evict(self, key: Key) -> None:
        """ANE_EVICT_SHAPE or ANE_EVICT_PACKED."""
        await self._exchange(key, AneEvictShape, AneEvictPacked, "ane_evict")

    async def stop(self) -> bool:
        """Take the worker down; True once its exit is confirmed."""
        return await self._supervisor.recycle()

    async def start(self) -> None:
        """Bring a worker up with its model loaded, as any request does: a quarantined or refused lane says so."""
        await self._supervisor.submit(lambda req_id, ref: (Ping(req_id=req_id), None), stage="load")

    async def _exchange(
        self,
        key: Key,
        shape: type[AneAdmitShape | AneEvictShape],
        packed: type[AneAdmitPacked | AneEvictPacked],
        stage: str,
    ) -> Outcome:
        generation = self._supervisor.generation

        def build(req_id: str, model_ref: str) -> tuple[AnyRequest, Any]:
            if self._supervisor.generation != generation:
                raise lost(self.lane_id, stage)
            if key.kind == "shape":
                return shape(req_id=req_id, model_ref=model_ref, shape=key.tokens), None
            return packed(req_id=req_id, model_ref=model_ref, width=key.tokens), None

        return await self._supervisor.submit(build, stage=f"{stage}_{key.kind}")


def _subset(request: AnyRequest, payload: Any, rows: Sequence[int]) -> tuple[AnyRequest, memoryview]:
    """Return the request for some of its rows, and their ids out of the whole payload (int32)."""
    view = memoryview(payload).cast("B")
    lengths = _lengths(request)
    starts = [0, *accumulate(lengths)]
    part = b"".join(view[4 * starts[row] : 4 * starts[row + 1]] for row in rows)
    if isinstance(request, EmbedBatch):
        return msgspec.structs.replace(request, items=[request.items[row] for row in rows]), memoryview(part)
    assert isinstance(request, RerankSequences)
    return msgspec.structs.replace(request, sequences=[request.sequences[row] for row in rows]), memoryview(part)


def _lengths(request: AnyRequest) -> list[int]:
    if isinstance(request, EmbedBatch):
        return [item.n_tokens for item in request.items]
    return [segment.n_tokens for segment in request.sequences] if isinstance(request, RerankSequences) else []


class RungedLane:
    """Serves a lane's EMBED_BATCH and RERANK_SEQUENCES rung by rung, with Supervisor's ``submit``.

    Rows come back in request order, whatever rungs they ran on. Everything else is the supervisor's own.
    """

    def __init__(self, fleet: AneFleet, supervisor: Supervisor, ladder: tuple[int, ...]) -> None:
        self._fleet = fleet
        self.supervisor = supervisor
        self._ladder = ladder

    async def submit(self, build: Build, *, deadline: float | None = None, stage: str) -> Outcome:
        """Run one request as one exchange for each rung it needs, ascending; the reply describes all rows."""
        request, payload = build("rungs", "rungs")
        groups = rungs(_lengths(request), self._ladder)
        if len(groups) == 1:
            return await self._serve(groups[0][0], build, deadline, stage)
        import numpy as np

        rows = sum(len(members) for _, members in groups)
        merged: Any = None
        reply: Any = None
        for bucket, members in groups:

            def part(req_id: str, model_ref: str, members: Sequence[int] = members) -> tuple[AnyRequest, Any]:
                return _subset(build(req_id, model_ref)[0], payload, members)

            reply, raw = await self._serve(bucket, part, deadline, stage)
            if merged is None:
                merged = np.empty((rows, len(raw) // len(members)), np.float32)
            merged[list(members)] = np.asarray(raw).reshape(len(members), -1)
        if isinstance(reply, Vectors):
            reply = msgspec.structs.replace(reply, n=rows)
        return reply, merged.reshape(-1)

    async def unload(self) -> None:
        """Unload the model and take the worker down: every function it held goes with it. ModelInUse while in use."""
        await self.supervisor.unload()
        self._fleet.shell.park(self.supervisor.spec.lane_id)

    async def _serve(self, bucket: int, build: Build, deadline: float | None, stage: str) -> Outcome:
        return await self._fleet.serve(self.supervisor.spec.lane_id, bucket, build, deadline=deadline, stage=stage)


def lost(lane_id: str, stage: str) -> EngineCrashed:
    """The worker that held the function was replaced; what it held is gone."""
    return EngineCrashed(
        f"lane {lane_id}: the worker was replaced while this request waited",
        details={"lane_id": lane_id, "stage": stage, "cause": "exit", "quarantined": False},
    )


class AneFleet:
    """All Neural Engine lanes of a host: one budget. Use it from one event loop."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._supervisors: dict[str, Supervisor] = {}
        self.shell = ResidencyShell({}, {}, limits=limits)
        self._tasks: set[asyncio.Task[Outcome]] = set()

    def add(self, supervisor: Supervisor, artifact: Artifact) -> RungedLane:
        """Take a lane in and return what serves its requests; its worker starts when its first function fits."""
        lane = supervisor.spec.lane_id
        self._supervisors[lane] = supervisor
        self.shell.add(lane, AneLane(supervisor), {supervisor.spec.model: cost(artifact)})
        return RungedLane(self, supervisor, buckets(artifact))

    async def serve(
        self, lane: str, bucket: int, build: Build, *, deadline: float | None = None, stage: str = "embed"
    ) -> Outcome:
        """Run one serving exchange on one rung; rows of one exchange belong to one rung.

        *deadline* is absolute loop time: after it nothing is written any more, the caller gets ``shape_compiling`` or
        ``deadline_exceeded``, and what is on the wire is drained without it.
        """
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._run(lane, bucket, build, deadline, stage))
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        if deadline is None:
            return await asyncio.shield(task)
        await asyncio.wait({task}, timeout=max(0.0, deadline - loop.time()))
        for _ in range(4):
            # The lease's own timer is due at the same instant and may say shape_compiling, which tells more.
            if not task.done():
                await asyncio.sleep(0)
        if task.done():
            return task.result()
        raise self._late(lane, stage)

    async def aclose(self) -> None:
        """Stop leasing and let what runs be drained by its supervisors."""
        await self.shell.aclose()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, lane: str, bucket: int, build: Build, deadline: float | None, stage: str) -> Outcome:
        supervisor = self._supervisors[lane]
        key = Key(lane, supervisor.spec.model, "shape", bucket)
        async with self.shell.lease(key, deadline=deadline):
            generation = supervisor.generation
            held = self.shell.generation(lane)

            def guarded(req_id: str, model_ref: str) -> tuple[AnyRequest, Any]:
                # Behind every wait: the function went with its worker, and nothing is written after the deadline.
                if supervisor.generation != generation:
                    raise lost(supervisor.spec.lane_id, stage)
                if deadline is not None and asyncio.get_running_loop().time() >= deadline:
                    raise self._late(lane, stage)
                return build(req_id, model_ref)

            try:
                return await supervisor.submit(guarded, stage=stage)
            except SynapseError as exc:
                # A function that should be there and isn't: the books are wrong, so they are closed with the process.
                if isinstance(exc, EngineCrashed) or exc.code == ErrorCode.SHAPE_NOT_ADMITTED:
                    self.shell.fault(lane, held)
                raise

    def _late(self, lane: str, stage: str) -> DeadlineExceeded:
        lane_id = self._supervisors[lane].spec.lane_id
        return DeadlineExceeded(
            f"lane {lane_id}: the deadline passed during {stage}", details={"lane_id": lane_id, "stage": stage}
        )

    def _forget(self, task: asyncio.Task[Outcome]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # looked at: its caller may have left
