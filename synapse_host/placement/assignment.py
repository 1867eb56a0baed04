"""Which lanes a host runs: every matrix lane times every model of its task, placed and turned into a LaneSpec.

Fixed at open. A lane's id is the matrix lane's name if one model uses it, else ``<lane>:<model>`` for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engines.bundle import manifest, preparation
from engines.bundle.manifest import FILE_NAME
from engines.protocol.messages import OWNED_ENGINES
from synapse_host.errors import BackendMissing, InvalidRequest, UnknownModel
from synapse_host.placement.interpreter import package_root, search_path
from synapse_host.placement.probe import worker_command
from synapse_host.placement.select import Placement, select
from synapse_host.placement.spec import LaneSpec, LoadSpec

if TYPE_CHECKING:
    from engines.bundle.manifest import Artifact, Bundle
    from synapse_host.placement.hardware import HostProfile
    from synapse_host.placement.matrix import HardwareMatrix


@dataclass(frozen=True, slots=True)
class Assignment:
    """One lane of a host. ``spec`` is None where no engine fits; ``placement`` then says why."""

    lane_id: str
    lane: str
    model: str
    bundle: Bundle
    placement: Placement
    spec: LaneSpec | None

    def require(self) -> LaneSpec:
        """Return the spec, or raise BackendMissing with the reason of every engine."""
        if self.spec is None:
            see = f"See: synapse matrix explain {self.lane}."
            raise BackendMissing(
                f"lane {self.lane} has no engine for {self.model} on this machine: {self.placement.why_not()}.",
                details={"lane_id": self.lane_id, "considered": [one.to_dict() for one in self.placement.considered]},
                advice={"python": f"See: host.explain({self.lane!r}).", "command": see, "operator": see},
            )
        return self.spec

    def served_by(self) -> tuple[str, str, str, str]:
        """Return what a result says of its maker: model, lane, engine and device. Raises as :meth:`require`."""
        spec = self.require()
        return self.model, self.lane_id, spec.engine_id, spec.device


def assign(
    matrix: HardwareMatrix, *, profile: HostProfile, bundles: Mapping[str, Bundle], lanes: set[str] | None = None
) -> dict[str, Assignment]:
    """Return the host's lanes by id, in matrix order. *lanes* limits them to some of the matrix's."""
    pairs = [
        (lane, model)
        for lane in matrix.lanes.values()
        if lanes is None or lane.id in lanes
        for model, bundle in bundles.items()
        if bundle.manifest.task == lane.task
    ]
    users = Counter(lane.id for lane, _ in pairs)
    placements = {
        (lane.id, model): select(matrix, lane_id=lane.id, profile=profile, bundle=bundles[model])
        for lane, model in pairs
    }
    # A lane that a call must name (quiet) doesn't take threads away from the ones that serve by default.
    at_home = Counter(
        matrix.engines[placement.engine].device_kind
        for (lane_id, model), placement in placements.items()
        if placement.engine is not None and lane_id == bundles[model].manifest.task
    )
    assignments: dict[str, Assignment] = {}
    for lane, model in pairs:
        lane_id = lane.id if users[lane.id] == 1 else f"{lane.id}:{model}"
        made = Assignment(lane_id, lane.id, model, bundles[model], placements[lane.id, model], None)
        if made.placement.engine is not None:
            sharing = at_home[matrix.engines[made.placement.engine].device_kind]
            made = replace(made, spec=_spec(matrix, made, threads=max(1, profile.cores // max(1, sharing))))
        assignments[lane_id] = made
    return assignments


def _spec(matrix: HardwareMatrix, made: Assignment, *, threads: int) -> LaneSpec:
    """Return what the lane's workers are started with. *threads*: where the matrix names none, on the CPU."""
    engine_id, artifact, bundle = made.placement.engine, made.placement.artifact, made.bundle
    assert engine_id is not None and artifact is not None
    engine = matrix.engines[engine_id]
    runtime_config = dict(engine.runtime_config)
    if engine.device_kind == "cpu":
        runtime_config.setdefault("threads", str(threads))
    owned = engine.worker_engine in OWNED_ENGINES
    return LaneSpec(
        lane_id=made.lane_id,
        model=made.model,
        kind=matrix.lanes[made.lane].kind,
        engine_id=engine.id,
        expected_engine=engine.worker_engine,
        owned=owned,
        device=engine.device,
        command=engine.command or worker_command(engine.engine),
        load=_load(bundle, artifact, engine.device_kind, runtime_config),
        cwd=matrix.path.parent if engine.command else package_root(),
        env=dict(engine.env) if engine.command else {**search_path(), **engine.env},
        manifest_path=bundle.path(FILE_NAME) if owned else None,
        manifest_digest=bundle.digest if owned else None,
        kernel_revision=engine.kernel_revision,
        own_worker=engine.command is None,
    )


def _load(bundle: Bundle, artifact: Artifact, device_kind: str, runtime_config: dict[str, str]) -> LoadSpec:
    """Return what LOAD names: the artifact, or on the Neural Engine the bundle that this machine compiled from it.

    Without a preparation LOAD names the package itself, and the worker answers ``specialization_missing`` with the fix.
    """
    if artifact.format == "coreml" and device_kind == "ane":
        with suppress(manifest.BundleError):
            path, record = preparation.find(preparation.default_cache(), artifact.digest)
            return LoadSpec(str(path), record.compiled_digest, "mlmodelc", runtime_config)
    return LoadSpec(str(bundle.path(artifact.path)), artifact.digest, artifact.format, runtime_config)


def find(
    assignments: Mapping[str, Assignment], bundles: Mapping[str, Bundle], *, model: str, lane: str | None, task: str
) -> Assignment:
    """Return the assignment a call means. Without *lane* the model's task names it.

    Raises UnknownModel, or InvalidRequest for a lane that doesn't exist or serves another task.
    """
    bundle = bundles.get(model) if isinstance(model, str) else None
    if bundle is None:
        raise unknown_model(model, bundles)
    if bundle.manifest.task != task:
        raise InvalidRequest(
            f"{model} is a model to {bundle.manifest.task}, not to {task}",
            details={"model": model, "task": bundle.manifest.task},
        )
    if lane is not None and not isinstance(lane, str):
        raise InvalidRequest(f"lane is {type(lane).__name__}, must be a lane's name")
    wanted = lane or bundle.manifest.task
    for assignment in assignments.values():
        if assignment.model == model and wanted in (assignment.lane, assignment.lane_id):
            return assignment
    have = sorted({item.lane for item in assignments.values() if item.model == model})
    # Without any lane it is most often the wrong model: `certify embed --model ms-marco`.
    hint = f"have: {', '.join(have)}" if have else f"it is a model to {bundle.manifest.task}"
    raise InvalidRequest(f"no lane {wanted!r} for {model} ({hint})", details={"lane": wanted, "known": have})


def unknown_model(model: str, known: Mapping[str, object]) -> UnknownModel:
    """Return the error that lists what there is."""
    have = ", ".join(sorted(known)) or "none"
    return UnknownModel(
        f"no model {model!r} (have: {have}).",
        details={"model": model, "known": sorted(known)},
        advice={"command": "List them: synapse models."},
    )
