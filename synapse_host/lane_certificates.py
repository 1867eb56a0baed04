"""How a host's lanes stand with their certificates, looked up once when it opens, and what that lets them do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from synapse_host import certificates, rungs
from synapse_host.certificates import Certificate, Identity
from synapse_host.errors import NotCertified

if TYPE_CHECKING:
    from synapse_host.assignment import Assignment
    from synapse_host.config import HostConfig
    from synapse_host.hardware import HostProfile
    from synapse_host.lane import LaneSpec
    from synapse_host.matrix import HardwareMatrix


class Standing(NamedTuple):
    """Whether a lane may call itself certified. ``why`` is empty when ``certificate`` holds."""

    certificate: Certificate | None
    why: str


NONE: Final = Standing(None, "it has none on this machine")


class LaneCertificates:
    """The certificates of the lanes that need one, and of the Neural Engine's, whose workers get what it measured.

    *qualifying*: Neural Engine workers advertise every packed width of their manifest, whatever a certificate says.
    """

    def __init__(
        self, matrix: HardwareMatrix, profile: HostProfile, config: HostConfig, *, qualifying: bool = False
    ) -> None:
        self._matrix = matrix
        self._profile = profile
        self._config = config
        self._qualifying = qualifying
        self._found: dict[str, Standing] = {}

    async def look_up(self, assignments: Mapping[str, Assignment]) -> None:
        """Find out how the lanes stand. Their workers are asked who they are (--version)."""
        placed = [(item, item.spec) for item in assignments.values() if item.spec is not None]
        asked = [(item, spec) for item, spec in placed if self._needed(item) or self._measured(item, spec)]
        if not asked:
            return
        engines = {spec.engine_id for _, spec in asked}
        identities = await asyncio.to_thread(certificates.identities, self._matrix, engines)
        for item, spec in asked:
            self._found[item.lane_id] = self._standing(item, spec, identities[spec.engine_id])

    def _standing(self, assignment: Assignment, spec: LaneSpec, identity: Identity) -> Standing:
        """Say whether this engine and artifact have a certificate here that still holds."""
        artifact, path = assignment.placement.artifact, self._path(assignment, spec)
        assert artifact is not None
        if not path.exists():
            return NONE
        found = certificates.read(path)
        if found is None:
            return Standing(None, f"{path} can't be read")
        now = certificates.present(self._matrix.engines[spec.engine_id], artifact, self._profile, identity)
        reasons = [*certificates.void_because(found.binding, now), *certificates.stricter(found, self._matrix)]
        return Standing(found, f"its certificate is void since {'; '.join(reasons)}" if reasons else "")

    def certified(self, assignment: Assignment, spec: LaneSpec) -> LaneSpec:
        """Return the spec that may run: NotCertified says why not; a certificate pins the kernel revision it names."""
        if not self._needed(assignment):
            return spec
        standing = self._found.get(assignment.lane_id, NONE)
        if standing.why:
            raise NotCertified(
                f"lane {assignment.lane_id} needs a certificate for {assignment.model} on {spec.engine_id}: "
                f"{standing.why}. Run: synapse certify {assignment.lane} --model {assignment.model} "
                f"--engine {spec.engine_id}",
                details={
                    "lane_id": assignment.lane_id,
                    "model": assignment.model,
                    "engine": spec.engine_id,
                    "reason": standing.why,
                },
            )
        assert standing.certificate is not None
        revision = standing.certificate.binding.kernel_revision
        return spec if spec.kernel_revision is not None else replace(spec, kernel_revision=revision)

    def packed(self, assignment: Assignment, spec: LaneSpec) -> LaneSpec:
        """Return a Neural Engine lane's spec with the packed widths it may use and the times that were certified.

        By the times the worker sees a function that Core ML has put on the CPU: embedders and rerankers, packed or not.
        """
        artifact, certificate = assignment.placement.artifact, self._holding(assignment)
        if self._qualifying and artifact is not None:
            return replace(spec, packed_widths=rungs.packed_widths(artifact))
        if certificate is None or not certificate.cost_ms:
            return spec
        times = {"certified_ms": json.dumps(certificate.cost_ms), **spec.load.runtime_config}
        return replace(
            spec, packed_widths=tuple(certificate.packed_widths), load=replace(spec.load, runtime_config=times)
        )

    def costs(self, assignment: Assignment) -> rungs.Costs | None:
        """Return what the lane's functions were measured to cost; None where nothing may be packed."""
        artifact, certificate = assignment.placement.artifact, self._holding(assignment)
        if artifact is None or certificate is None or not certificate.packed_widths:
            return None
        return rungs.costs(artifact, certificate.cost_ms)

    def _holding(self, assignment: Assignment) -> Certificate | None:
        """Return the lane's certificate if it holds; none counts while qualifying."""
        standing = self._found.get(assignment.lane_id, NONE)
        if self._qualifying or standing.why or standing.certificate is None:
            return None
        return standing.certificate

    def _needed(self, assignment: Assignment) -> bool:
        # The configuration may only strengthen what the matrix says.
        return self._config.require_certificate or self._matrix.lanes[assignment.lane].require_certificate

    def _measured(self, assignment: Assignment, spec: LaneSpec) -> bool:
        if self._qualifying or spec.device_kind != "ane" or assignment.placement.artifact is None:
            return False
        return self._path(assignment, spec).exists()

    def _path(self, assignment: Assignment, spec: LaneSpec) -> Path:
        return certificates.path_of(spec.engine_id, assignment.bundle.digest, self._config.data_dir)
