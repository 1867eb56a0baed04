"""The table of a host's lanes: which one a call means, and what serves it.

Placement is decided at open and never changes. A lane's supervisor is made at its first use; the Neural Engine's lanes
share one budget and one lock a user.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from msgspec import structs, to_builtins

from synapse_host.certificates.admission import LaneCertificates
from synapse_host.errors import DeadlineExceeded, InvalidRequest
from synapse_host.placement.assignment import Assignment, assign, find
from synapse_host.supervision.health import Health, LaneHealth
from synapse_host.supervision.queueing import Permits
from synapse_host.supervision.supervisor import Supervisor
from synapse_host.worker.counters import LaneCounters
from synapse_host.worker.output import LogRing
from synapse_host.worker.startup import LaneContext

READ_S: Final = 5.0
"""How long a reader on another thread waits for the host's loop."""

T = TypeVar("T")

if TYPE_CHECKING:
    from engines.bundle.manifest import Bundle
    from engines.checkpoint.dense import Weights
    from synapse_host.config import HostConfig
    from synapse_host.placement.hardware import HostProfile
    from synapse_host.placement.matrix import HardwareMatrix
    from synapse_host.residency.lane import RungedLane
    from synapse_host.residency.machine_lock import LaneLock
    from synapse_host.residency.shell import ResidencyShell
    from synapse_host.worker.listener import RuntimeDirectory


class Lanes:
    """All lanes of one host. Make and use it on one event loop."""

    def __init__(
        self,
        *,
        matrix: HardwareMatrix,
        bundles: Mapping[str, Bundle],
        profile: HostProfile,
        config: HostConfig,
        runtime: RuntimeDirectory,
        qualifying: bool = False,
    ) -> None:
        self.config = config
        self.bundles = bundles
        self.profile = profile
        self.runtime = runtime
        self.assignments = assign(matrix, profile=profile, bundles=bundles)
        self.counters = {lane_id: LaneCounters() for lane_id in self.assignments}
        self.logs = {lane_id: LogRing(config.log_ring_bytes) for lane_id in self.assignments}
        self.residency: ResidencyShell | None = None
        """The books of the Neural Engine's lanes, once one of them was used."""
        self.dense: dict[str, Sequence[Weights]] = {}
        """The dense layers of the models that have been asked for vectors."""
        self._certificates = LaneCertificates(matrix, config, qualifying=qualifying)
        self._permits = Permits(config.permits)
        self._supervisors: dict[str, Supervisor] = {}
        self._runged: dict[str, RungedLane] = {}
        self._lane_lock: LaneLock | None = None
        self._closed = False
        self._pid = os.getpid()
        self._loop = asyncio.get_running_loop()

    async def aclose(self, *, drain: float) -> None:
        """Stop every worker; running requests get *drain* seconds. Idempotent; a shorter *drain* hurries one."""
        if os.getpid() != self._pid:
            # A forked child leaves the block too: workers and sockets are its parent's.
            self._closed = True
            return
        self._check_loop()
        self._closed = True
        supervisors = dict(self._supervisors)
        if supervisors:
            await asyncio.gather(*(supervisor.aclose(drain=drain) for supervisor in supervisors.values()))
        if self.residency is not None:
            await self.residency.aclose()
        if self._lane_lock is not None:
            self._lane_lock.close()
            self._lane_lock = None
        for lane_id in supervisors:
            self._supervisors.pop(lane_id, None)

    # --- which lane --------------------------------------------------------------------------------------------------

    def find(self, model: str, lane: str | None, task: str) -> Assignment:
        """Return the lane that serves *task* with this model; errors as :func:`placement.assignment.find`."""
        self._check_loop()
        return find(self.assignments, self.bundles, model=model, lane=lane, task=task)

    def find_any(self, model: str, lane: str | None) -> Assignment:
        """Return the lane that serves the model's own task."""
        bundle = self.bundles.get(model) if isinstance(model, str) else None
        return self.find(model, lane, bundle.manifest.task if bundle else "")

    def by_id(self, lane_id: str) -> Assignment:
        """Return a lane by its id; InvalidRequest lists what there is."""
        self._check_loop()
        assignment = self.assignments.get(lane_id) if isinstance(lane_id, str) else None
        if assignment is None:
            raise InvalidRequest(
                f"no lane {lane_id!r} (have: {', '.join(self.assignments) or 'none'})",
                details={"known": sorted(self.assignments)},
            )
        return assignment

    def _check_loop(self) -> None:
        # Futures of one loop are never woken by another's: a call from there would wait for ever.
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            return  # lane_of: it waits for nothing.
        if running is not self._loop and not self._closed:
            raise InvalidRequest("this host runs on another event loop; call it there, or use SyncHost from any thread")

    # --- what serves it ----------------------------------------------------------------------------------------------

    def serving(self, assignment: Assignment) -> Supervisor | RungedLane:
        """Return what embeds and reranks on a lane: its supervisor, on the Neural Engine rung by rung under leases."""
        supervisor = self.supervisor(assignment)
        artifact = assignment.placement.artifact
        if supervisor.spec.device_kind != "ane" or artifact is None:
            return supervisor
        lane = self._runged.get(assignment.lane_id)
        if lane is None:
            from synapse_host.residency.lane import RungedLane
            from synapse_host.residency.shell import ResidencyShell
            from synapse_host.residency.types import Limits

            # A quarter of the memory at most: the weights of every resident function count whole (ane.md 4).
            self.residency = self.residency or ResidencyShell(Limits(nbytes=self.profile.ram_total // 4))
            costs = partial(self._certificates.costs, assignment)
            lane = self._runged[assignment.lane_id] = RungedLane(self.residency, supervisor, artifact, costs=costs)
        return lane

    def supervisor(self, assignment: Assignment) -> Supervisor:
        """Return a lane's supervisor, made at its first use. Raises BackendMissing, InvalidRequest."""
        supervisor = self._supervisors.get(assignment.lane_id)
        if supervisor is None:
            if self._closed:
                raise InvalidRequest("this host is closed")
            spec = assignment.require()
            if spec.device_kind == "ane":
                from synapse_host.residency.machine_lock import LaneLock

                # One host a user on the Neural Engine; the workers hold the lock too, as their standard input.
                self._lane_lock = self._lane_lock or LaneLock()
                spec = replace(spec, stdin=self._lane_lock.fileno())
            lane_id = assignment.lane_id
            context = LaneContext(spec, self.config, self.runtime, self.counters[lane_id], self.logs[lane_id])
            admit = partial(self._certificates.admit, assignment)
            supervisor = Supervisor(context, permits=self._permits, admit=admit)
            self._supervisors[assignment.lane_id] = supervisor
        return supervisor

    def used(self, assignment: Assignment) -> Supervisor | RungedLane | None:
        """Return what serves a lane if it was used before."""
        return self._runged.get(assignment.lane_id) or self._supervisors.get(assignment.lane_id)

    def on_loop(self, read: Callable[[], T]) -> T:
        """As :meth:`synapse_host.host.Host.on_loop`."""
        loop = self._loop
        try:
            here: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is loop or not loop.is_running():
            return read()  # A loop that doesn't run changes nothing.
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                answer.set_result(read())
            except BaseException as exc:  # it belongs to the thread that waits
                answer.set_exception(exc)

        try:
            loop.call_soon_threadsafe(run)
        except RuntimeError:
            return read()  # The loop was closed in this moment.
        try:
            return answer.result(READ_S)
        except TimeoutError as exc:
            raise DeadlineExceeded(f"the host's loop was busy for {READ_S:g} s", details={"stage": "health"}) from exc

    # --- how it is ---------------------------------------------------------------------------------------------------

    async def ping(self, assignment: Assignment, until: float | None) -> dict[str, Any]:
        """PING a lane's worker and return its refreshed health; a lane that wasn't used stays as it is."""
        supervisor = self._supervisors.get(assignment.lane_id)
        return _resting(assignment) if supervisor is None else await supervisor.ping(until)

    def health(self) -> dict[str, Any]:
        """Return the cached state of every lane. On the loop's thread: see :meth:`on_loop`."""
        lanes: dict[str, Any] = {}
        for lane_id, assignment in self.assignments.items():
            supervisor = self._supervisors.get(lane_id)
            lanes[lane_id] = _resting(assignment) if supervisor is None else supervisor.health()
        return {"lanes": lanes, "closed": self._closed}

    def explain(self, lane: str | None) -> list[dict[str, Any]]:
        """Return, per lane, the placement and why each other engine was passed over."""
        return [
            {
                "lane": assignment.lane_id,
                "model": assignment.model,
                "placement": assignment.placement.engine,
                "considered": [item.to_dict() for item in assignment.placement.considered],
            }
            for assignment in self.assignments.values()
            if lane is None or lane in (assignment.lane, assignment.lane_id)
        ]


def _resting(assignment: Assignment) -> dict[str, Any]:
    """Return the health of a lane that wasn't used yet."""
    spec = assignment.spec
    if spec is None:
        health = Health(model=assignment.model, state="refused", reason=assignment.placement.why_not())
    else:
        health = structs.replace(LaneHealth(spec).facts, state="idle")
    document: dict[str, Any] = to_builtins(health)
    return document
