"""A certification run: a lane's trial on a fresh worker and, on the Neural Engine, where it ran; then the verdict.

Theory of operation of the room. An order names a lane, a model and perhaps one of the lane's engines. :func:`certify`
narrows the matrix to that lane, opens a host of its own on it, which asks for no certificate, and hands both to a
:class:`~synapse_host.certification.trial.Trial`. The trial goes through the normal serving path, one request at a time
and nothing twice until it works: LOAD, the edge lengths, every probe alone (timed), in batches, in other company, one
exchange again, then PING for the placement share of that worker. Rows whose first answer held NaN or infinity are
counted and have no number. An error of the lane ends the run as its ``fault``: it is judged by what it came to. Only an
order that makes no sense raises.

On a Neural Engine lane the trial also tries each packed width and times each function, last, so that a width that fails
costs itself only. After the host has closed, Core ML is asked in a child where it would run each function, and the same
single requests are timed on a second host whose engine is forced to the CPU: one host at a time drives the device.

The document gets the facts of :mod:`synapse_host.certificates.binding` and is judged. Writing it, the page beside it
and the certificate is :mod:`synapse_host.certification.orders`' part. Everything runs on the caller's event loop; what
blocks (asking the plan, hashing an installation) holds up this run's loop only, which serves nobody.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Final

import msgspec

from synapse_host.certificates import binding, verdict
from synapse_host.certificates.document import Evidence, Placement
from synapse_host.certification import measurement
from synapse_host.certification import probes as probe_set
from synapse_host.certification.packing import Plans, plan_tool
from synapse_host.certification.trial import Progress, Trial, single_calls, timed
from synapse_host.config import HostConfig
from synapse_host.errors import InvalidRequest, SynapseError
from synapse_host.host import Host
from synapse_host.models.bundles import silent
from synapse_host.placement.matrix import HardwareMatrix

FORCED: Final = {"ane": {"compute_units": "cpu_only", "placement": "off"}}
"""LOAD keys that force an engine to the CPU, by its name in the matrix."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be certified. ``engine``: this engine of the lane instead of the first that fits."""

    lane: str
    model: str
    bundle: Path
    engine: str | None = None
    min_placement_share: float | None = None


async def certify(
    order: Order,
    matrix: HardwareMatrix,
    config: HostConfig | None = None,
    *,
    progress: Progress = silent,
    plans: Plans = plan_tool,
) -> Evidence:
    """Run the gate and return the judged document. A lane that refuses its worker or loses it ends uncertified.

    Raises InvalidRequest for an unknown lane, engine or a model of another task, BackendMissing where no engine fits.
    *plans* asks the framework where it would run a loaded artifact.
    """
    config = replace(config or HostConfig(), require_certificate=False)
    only = _single_lane(matrix, order)
    async with Host.open(only, {order.model: order.bundle}, config, qualifying=True) as host:
        assignment = host.lane_of(order.model, order.lane)
        run = Trial(host, assignment, progress, config.data_dir)
        await run.everything(measurement.measure)
    engine, artifact = only.engines[assignment.require().engine_id], assignment.placement.artifact
    assert artifact is not None
    model = binding.model_of(assignment.bundle, artifact, assignment.model)
    on_ane, placement = engine.device_kind == "ane", run.placement
    if on_ane and placement is not None:
        placement = await _placed(run, placement, only, order, config, plans)
    precision = verdict.precision_of(model.dtype)
    share = order.min_placement_share
    thresholds = verdict.thresholds(
        matrix, engine=engine.id, task=model.task, precision=precision, placement=on_ane, share=share
    )
    return verdict.judge(
        Evidence(
            format="synapse-evidence-v1",
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            lane=order.lane,
            software=binding.software_facts(),
            model=model,
            engine=binding.engine_facts(only, engine, **run.said()),
            machine=binding.machine_facts(engine, host.profile),
            precision=precision,
            thresholds=thresholds,
            placement_required=on_ane,
            fixture=run.fixture,
            tokens=run.tokens,
            generations=run.generations,
            limits=run.limits,
            repeat_differs=run.repeat_differs,
            non_finite=run.non_finite,
            performance=run.performance(),
            gates=[],
            reported={},
            verdict="uncertified",
            reasons=[],
            inputs=run.inputs,
            placement=placement,
            packing=run.packing,
            cost_ms=run.cost_ms,
            fault=run.fault,
        )
    )


def _single_lane(matrix: HardwareMatrix, order: Order) -> HardwareMatrix:
    """Return the matrix with this one lane, its engine pinned where one was asked for."""
    lane = matrix.lanes.get(order.lane)
    if lane is None:
        near = get_close_matches(order.lane, matrix.lanes, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise InvalidRequest(f"no lane {order.lane!r}{hint} (have: {', '.join(matrix.lanes)})")
    if order.engine is not None and order.engine not in lane.engines:
        raise InvalidRequest(f"lane {lane.id} has no engine {order.engine!r} (have: {', '.join(lane.engines)})")
    pinned = msgspec.structs.replace(lane, pin=order.engine or lane.pin, require_certificate=False)
    if order.engine is not None:
        # The others are not asked about: why this one doesn't fit is the whole answer.
        pinned = msgspec.structs.replace(pinned, engines=(order.engine,))
    return msgspec.structs.replace(matrix, lanes={lane.id: pinned})


async def _placed(
    trial: Trial, placement: Placement, matrix: HardwareMatrix, order: Order, config: HostConfig, plans: Plans
) -> Placement:
    """Add where the framework runs each function, and the same rows with the engine forced to the CPU."""
    functions, allowed, reason = plans(trial.assignment)
    forced, native = await _forced(trial, matrix, order, config), trial.native_ms
    return msgspec.structs.replace(
        placement, functions=functions, cpu_allowed=allowed, reason=reason, forced_ms=forced, native_ms=native
    )


async def _forced(trial: Trial, matrix: HardwareMatrix, order: Order, config: HostConfig) -> list[float]:
    engine = matrix.engines[trial.assignment.require().engine_id]
    keys = FORCED.get(engine.engine)
    probes = probe_set.opened(trial.bundle)
    if keys is None or probes is None:
        return []
    slow = msgspec.structs.replace(engine, runtime_config={**engine.runtime_config, **keys})
    matrix = msgspec.structs.replace(matrix, engines={**matrix.engines, engine.id: slow})
    try:
        async with Host.open(matrix, {order.model: order.bundle}, config) as host:
            trial.progress("forced to the CPU", 0, 0)
            return await timed(single_calls(host, trial, probes))
    except SynapseError:
        # An engine that can't be forced leaves the speed-up unmeasured, and unmeasured doesn't pass.
        return []
