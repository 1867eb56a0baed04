"""What certificates let a lane do, asked whenever a worker starts.

Most hosts have no lane that asks: the modules that read and judge certificates are imported once one does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from synapse_host.errors import NotCertified
from synapse_host.placement.places import NoHome

if TYPE_CHECKING:
    from pathlib import Path

    from engines.bundle.manifest import Bundle
    from synapse_host.certificates.standing import Certificate
    from synapse_host.config import HostConfig
    from synapse_host.placement.assignment import Assignment
    from synapse_host.placement.hardware import HostProfile
    from synapse_host.placement.matrix import HardwareMatrix
    from synapse_host.placement.spec import LaneSpec
    from synapse_host.residency import plan


def speeds(
    matrix: HardwareMatrix, bundles: Iterable[Bundle], profile: HostProfile, *, data_dir: Path | None = None
) -> dict[str, dict[str, float]]:
    """Return the tokens per second of valid certificates, for ``HostProfile.speeds``, by manifest digest and engine.

    Looked up for lanes that choose the fastest, and for the engines of theirs that fit. Blocks as
    :func:`synapse_host.certificates.standing.look_up` does.
    """
    lanes = [lane for lane in matrix.lanes.values() if lane.choose == "fastest"]
    if not lanes:
        return {}
    from synapse_host.certificates import standing

    return standing.speeds(matrix, lanes, bundles, profile, data_dir=data_dir)


class LaneCertificates:
    """Asked before every start of a worker: may it serve, and what does a Neural Engine's get of what was measured?

    *qualifying*: Neural Engine workers advertise every packed width of their manifest, whatever a certificate says.
    """

    def __init__(self, matrix: HardwareMatrix, config: HostConfig, *, qualifying: bool = False) -> None:
        self._matrix = matrix
        self._config = config
        self._qualifying = qualifying
        self._held: dict[str, Certificate] = {}

    async def admit(self, assignment: Assignment, spec: LaneSpec) -> LaneSpec:
        """Return the spec that the lane's next worker is started with; NotCertified says why it may not start.

        A certificate pins the kernel revision it names and gives a Neural Engine lane its packed widths and the times
        that were certified. Nothing is remembered from one start to the next: an upgrade under a running host voids,
        and ``synapse certify`` helps at the next request.
        """
        artifact = assignment.placement.artifact
        on_ane = spec.device_kind == "ane"
        if self._qualifying and on_ane and artifact is not None:
            from synapse_host.residency import plan

            return replace(spec, packed_widths=plan.packed_widths(artifact))
        self._held.pop(assignment.lane_id, None)
        needed = self._config.require_certificate or self._matrix.lanes[assignment.lane].require_certificate
        if self._qualifying or artifact is None or not (needed or on_ane):
            return spec
        from synapse_host.certificates import standing, verdict

        try:
            engine, data_dir = self._matrix.engines[spec.engine_id], self._config.data_dir
            found = await asyncio.to_thread(
                standing.look_up, self._matrix, engine, assignment.bundle, artifact, data_dir=data_dir
            )
        except NoHome:
            if needed:
                raise
            return spec
        if found.evidence is None or found.why:
            if needed:
                raise _refused(assignment, spec, found)
            return spec
        self._held[assignment.lane_id] = found
        if needed and spec.kernel_revision is None:
            spec = replace(spec, kernel_revision=found.evidence.engine.kernel_revision)
        if not on_ane or not found.evidence.cost_ms:
            return spec
        # By the times the worker sees a function that Core ML has put on the CPU, packed or not.
        qualified = tuple(verdict.qualified_widths(found.evidence))
        times = {"certified_ms": json.dumps(found.evidence.cost_ms), **spec.load.runtime_config}
        return replace(spec, packed_widths=qualified, load=replace(spec.load, runtime_config=times))

    def costs(self, assignment: Assignment) -> plan.Costs | None:
        """Return what the functions of the lane's worker were measured to cost; None where nothing may be packed."""
        artifact, held = assignment.placement.artifact, self._held.get(assignment.lane_id)
        if artifact is None or held is None or held.evidence is None:
            return None
        from synapse_host.certificates import verdict
        from synapse_host.residency import plan

        if not verdict.qualified_widths(held.evidence):
            return None

        return plan.costs(artifact, held.evidence.cost_ms)


def _refused(assignment: Assignment, spec: LaneSpec, found: Certificate) -> NotCertified:
    why = "; ".join(found.why)
    reason = why if found.evidence is None else f"its certificate is void: {why}"
    return NotCertified(
        f"lane {assignment.lane_id} needs a certificate for {assignment.model} on {spec.engine_id}: {reason}. "
        f"Run: synapse certify {assignment.lane} --model {assignment.model} --engine {spec.engine_id}",
        details={
            "lane_id": assignment.lane_id,
            "model": assignment.model,
            "engine": spec.engine_id,
            "reason": reason,
        },
    )
