"""Neural Engine lanes: parts of a request, leases and exchanges put together over one Supervisor a lane.

A request's rows are cut into parts (:mod:`synapse_host.residency.plan`); each part is one exchange under one lease, one
lease at a time. The exchange owns its lease as it owns turn and permit: until the reply is drained, whether or not its
caller still waits. Everything that brings a worker up goes through the books, LOAD's smallest bucket included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from engines.protocol.errors import ErrorCode
from engines.protocol.messages import (
    AneAdmitPacked,
    AneAdmitShape,
    AneEvictPacked,
    AneEvictShape,
    AnyRequest,
    EmbedBatch,
    Item,
    Ping,
    RerankSequences,
    Segment,
    Vectors,
)
from synapse_host.errors import WORKER_ERRORS, EngineCrashed, SynapseError
from synapse_host.residency.plan import Costs, buckets, charge, packed_widths, parts
from synapse_host.residency.shell import ResidencyShell, Withdrawn
from synapse_host.residency.types import Key
from synapse_host.supervision.supervisor import Supervisor
from synapse_host.worker import refusals
from synapse_host.worker.exchange import Build, Outcome

if TYPE_CHECKING:
    from engines.bundle.manifest import Artifact

Kind = Literal["shape", "packed"]


def _rows(request: AnyRequest) -> Sequence[Item | Segment]:
    assert isinstance(request, EmbedBatch | RerankSequences)
    return request.items if isinstance(request, EmbedBatch) else request.sequences


class RungedLane:
    """One Neural Engine lane: serves EMBED_BATCH and RERANK_SEQUENCES part by part, with Supervisor's ``submit``.

    Rows come back in request order, whatever functions they ran on. *costs* tells what this machine's certificate
    measured when the worker started; with them packed passes are used where they are cheaper and their function is
    resident. One that would be cheaper and isn't resident is admitted in the background, behind the request that would
    have liked it. BundleInvalid for an artifact that can't be charged.

    For :class:`~synapse_host.residency.shell.ResidencyShell` it is the lane that carries out what the core decides
    (``admit``, ``evict``, ``stop``, ``start``).
    """

    def __init__(
        self,
        shell: ResidencyShell,
        supervisor: Supervisor,
        artifact: Artifact,
        *,
        costs: Callable[[], Costs | None] = lambda: None,
    ) -> None:
        self.supervisor = supervisor
        self._shell = shell
        self._lane = lane_id = supervisor.spec.lane_id
        self._ladder = buckets(artifact)
        self._costs = costs if packed_widths(artifact) else None
        self._probe: Build | None = None
        """The request that the next start has to serve, on a lane that is being probed."""
        shell.add(lane_id, self, charge(artifact))
        # A worker that dies takes its functions with it, also while nobody waits: the books follow at once.
        supervisor.lost = lambda: shell.fault(lane_id, shell.core.workers[lane_id].generation)
        supervisor.idle.rest = self.rest

    # --- requests ----------------------------------------------------------------------------------------------------

    async def submit(self, build: Build, *, deadline: float | None = None, stage: str) -> Outcome:
        """Run one request as one exchange for each part it needs; the reply describes all rows.

        *deadline* is absolute loop time: after it nothing is written any more, the caller gets ``shape_compiling`` or
        ``deadline_exceeded``, and what is on the wire is drained without it.
        """
        request, payload = build("parts", "parts")
        lengths = [row.n_tokens for row in _rows(request)]
        packs = isinstance(request, EmbedBatch) and len(lengths) > 1 and self._costs is not None
        resident = self._shell.core.resident(self._lane) if packs else ()
        widths = tuple(key.tokens for key in resident if key.kind == "packed")
        try:
            outcome = await self._run(request, payload, lengths, widths, deadline, stage)
        except WORKER_ERRORS[ErrorCode.UNSUPPORTED_PACKED_WIDTH]:
            if not widths:
                raise
            # The worker was replaced meanwhile, and what certified its predecessor's widths holds no more.
            outcome = await self._run(request, payload, lengths, (), deadline, stage)
        if packs:
            self._prefetch(lengths)
        return outcome

    async def submit_packed(self, width: int, build: Build, *, deadline: float | None = None, stage: str) -> Outcome:
        """Run one EMBED_BATCH through one packed width, whatever it costs: qualification does that.

        Raises ``unsupported_packed_width`` before anything is sent where the worker doesn't advertise the width.
        """
        if self.supervisor.advertised is None:
            await self._start(deadline)  # a worker that isn't up is brought up to say
        if width not in (self.supervisor.advertised or ()):
            raise unqualified(self._lane, width)
        return await self._serve("packed", width, build, deadline, stage)

    async def load(self, deadline: float | None = None) -> None:
        """Start the worker and load the model, its smallest bucket charged first; clears quarantine and refusal."""
        self.supervisor.reopen()
        await self._start(deadline)

    async def probe(self, build: Build, *, deadline: float | None = None) -> None:
        """Prove a shut lane: what runs drains, the worker goes, a fresh one loads and serves *build*."""
        self._shell.park(self._lane)
        self._probe = build
        try:
            await self._start(deadline)
        finally:
            self._probe = None

    async def unload(self) -> None:
        """Unload the model and take the worker down: every function it held goes with it. ModelInUse while in use."""
        with self.supervisor.counters.call("unload"):
            core = self._shell.core
            if core.busy(self._lane):
                waiting = sum(ticket.key.worker == self._lane for ticket in core.waiting())
                raise refusals.in_use(self.supervisor.spec, waiting)
            self.supervisor.clear()
            # From here on nobody gets a lease; who asks meanwhile waits for the next worker.
            await self._shell.parked(self._lane)

    def rest(self) -> None:
        """Take an idle worker down until the next request, its functions with it."""
        if not self._shell.core.busy(self._lane):
            self._shell.park(self._lane)

    async def _start(self, deadline: float | None) -> None:
        """Bring a worker up, if none is, for its smallest bucket."""
        (await self._shell.lease(Key(self._lane, "shape", self._ladder[0]), deadline=deadline)).release()

    async def _run(
        self,
        request: AnyRequest,
        payload: Any,
        lengths: Sequence[int],
        widths: tuple[int, ...],
        deadline: float | None,
        stage: str,
    ) -> Outcome:
        """Run a request's parts one after the other; these packed *widths* serve rows where that is cheaper."""
        import numpy as np

        plan = parts(lengths, self._ladder, costs=self._costs() if widths and self._costs else None, widths=widths)
        view, starts = memoryview(payload).cast("B"), [0, *accumulate(lengths)]
        field, rows = "items" if isinstance(request, EmbedBatch) else "sequences", _rows(request)
        merged: Any = None
        reply: Any = None
        for one in plan:
            some = [rows[row] for row in one.rows]
            ids = memoryview(b"".join(view[4 * starts[row] : 4 * starts[row + 1]] for row in one.rows))

            def part(req_id: str, ref: str, some: Any = some, ids: memoryview = ids) -> tuple[AnyRequest, Any]:
                return msgspec.structs.replace(request, req_id=req_id, model_ref=ref, **{field: some}), ids

            reply, raw = await self._serve(one.kind, one.tokens, part, deadline, stage)
            if len(plan) == 1:
                return reply, raw
            if merged is None:
                merged = np.empty((len(lengths), len(raw) // len(one.rows)), np.float32)
            merged[list(one.rows)] = np.asarray(raw).reshape(len(one.rows), -1)
        if isinstance(reply, Vectors):
            reply = msgspec.structs.replace(reply, n=len(lengths))
        return reply, merged.reshape(-1)

    async def _serve(self, kind: Kind, tokens: int, build: Build, deadline: float | None, stage: str) -> Outcome:
        """Run one exchange through one function under one lease; all its rows run there."""
        shell, supervisor = self._shell, self.supervisor
        lease = await shell.lease(Key(self._lane, kind, tokens), deadline=deadline)
        held = shell.core.workers[self._lane].generation

        def request(req_id: str, model_ref: str) -> tuple[AnyRequest, Any]:
            made, payload = build(req_id, model_ref)
            if kind == "packed":
                assert isinstance(made, EmbedBatch)
                if tokens not in (supervisor.advertised or ()):
                    raise unqualified(self._lane, tokens)
                made = msgspec.structs.replace(made, packed_width=tokens)
            return made, payload

        try:
            return await supervisor.submit(
                request, deadline=deadline, stage=stage, generation=supervisor.generation, lease=lease
            )
        except SynapseError as exc:
            # A function that should be there and isn't: the books are wrong, so they are closed with the process.
            if isinstance(exc, EngineCrashed) or exc.code == ErrorCode.SHAPE_NOT_ADMITTED:
                shell.fault(self._lane, held)
            raise
        finally:
            if not lease.taken:
                lease.release()

    def _prefetch(self, lengths: Sequence[int]) -> None:
        """Admit the packed width that rows of these lengths would best have run on, for the next ones like them."""
        advertised = self.supervisor.advertised or ()
        possible = {width for width in advertised if self._shell.core.guessable(Key(self._lane, "packed", width))}
        if possible and self._costs is not None:
            for part in parts(lengths, self._ladder, costs=self._costs(), widths=advertised):
                if part.kind == "packed" and part.tokens in possible:
                    self._shell.prefetch(Key(self._lane, "packed", part.tokens))

    # --- what the core decides ---------------------------------------------------------------------------------------

    async def admit(self, key: Key, wanted: Callable[[], bool]) -> None:
        """ANE_ADMIT_SHAPE or ANE_ADMIT_PACKED. Compilation takes no execution permit."""
        await self._exchange(key, AneAdmitShape, AneAdmitPacked, "ane_admit", wanted)

    async def evict(self, key: Key) -> None:
        """ANE_EVICT_SHAPE or ANE_EVICT_PACKED."""
        await self._exchange(key, AneEvictShape, AneEvictPacked, "ane_evict", lambda: True)

    async def stop(self) -> bool:
        """Take the worker down; True once its exit is confirmed."""
        return await self.supervisor.recycle()

    async def start(self) -> None:
        """Bring a worker up with its model loaded, as any request does: a quarantined or refused lane says so."""
        probe, self._probe = self._probe, None
        if probe is not None:
            await self.supervisor.probe(probe)
        else:
            await self.supervisor.submit(lambda req_id, ref: (Ping(req_id=req_id), None), stage="load")

    async def _exchange(
        self,
        key: Key,
        shape: type[AneAdmitShape | AneEvictShape],
        packed: type[AneAdmitPacked | AneEvictPacked],
        stage: str,
        wanted: Callable[[], bool],
    ) -> None:
        def build(req_id: str, model_ref: str) -> tuple[AnyRequest, Any]:
            # Behind every wait for the stream: whoever asked may have left meanwhile.
            if not wanted():
                raise Withdrawn(f"lane {key.worker}: nobody waits for {key.kind} {key.tokens} any more")
            if key.kind == "shape":
                return shape(req_id=req_id, model_ref=model_ref, shape=key.tokens), None
            return packed(req_id=req_id, model_ref=model_ref, width=key.tokens), None

        await self.supervisor.submit(build, stage=f"{stage}_{key.kind}", generation=self.supervisor.generation)


def unqualified(lane_id: str, width: int) -> SynapseError:
    """The worker's HELLO doesn't advertise the width, so it is never sent (protocol-v3, 3)."""
    return WORKER_ERRORS[ErrorCode.UNSUPPORTED_PACKED_WIDTH](
        f"lane {lane_id}: its worker does not advertise packed width {width}",
        details={"lane_id": lane_id, "width": width},
    )
