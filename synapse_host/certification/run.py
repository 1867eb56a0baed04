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

The document gets the facts of :mod:`synapse_host.certificates.binding` and is judged. :func:`carry_out` then writes it,
with a page beside it, and unless the order asked another question than the matrix does settles the certificate.
Everything runs on the caller's event loop; what blocks (asking the plan, hashing an installation) holds up this run's
loop only, which serves nobody.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from engines.bundle import manifest
from synapse_host.certificates import binding, standing, verdict
from synapse_host.certificates import document as documents
from synapse_host.certificates.document import Evidence
from synapse_host.certification import measurement, report
from synapse_host.certification import probes as probe_set
from synapse_host.certification.packing import Plans, plan_tool
from synapse_host.certification.trial import Progress, Trial, single_calls, timed
from synapse_host.config import HostConfig
from synapse_host.errors import InvalidRequest, SynapseError
from synapse_host.host import Host
from synapse_host.models.bundles import silent
from synapse_host.placement.matrix import ENCODERS, HardwareMatrix
from synapse_host.placement.select import fit

if TYPE_CHECKING:
    from engines.bundle.manifest import Bundle
    from synapse_host.certificates.standing import Certificate
    from synapse_host.placement.hardware import HostProfile

FORCED: Final = {"compute_units": "cpu_only", "placement": "off"}
"""LOAD keys that force the Neural Engine's worker to the CPU."""


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
    on_ane = engine.device_kind == "ane"
    placement = await _placement(run, only, order, config, plans) if on_ane else run.placement
    return verdict.judge(
        Evidence(
            format="synapse-evidence-v1",
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            lane=order.lane,
            software=binding.software_facts(),
            model=model,
            engine=binding.engine_facts(only, engine, **run.said()),
            machine=binding.machine_facts(engine, host.profile),
            precision=verdict.precision_of(model.dtype),
            thresholds=verdict.thresholds(
                only, engine, task=model.task, dtype=model.dtype, share=order.min_placement_share
            ),
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


async def _placement(
    run: Trial, matrix: HardwareMatrix, order: Order, config: HostConfig, plans: Plans
) -> documents.Placement | None:
    """Return what the run saw of the placement, with what the framework plans and what the CPU alone takes."""
    if run.placement is None:
        return None
    functions, allowed, reason = plans(run.assignment)
    forced = await _forced(run, matrix, order, config)
    return msgspec.structs.replace(
        run.placement,
        functions=functions,
        cpu_allowed=allowed,
        reason=reason,
        forced_ms=forced,
        native_ms=run.native_ms,
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


async def _forced(trial: Trial, matrix: HardwareMatrix, order: Order, config: HostConfig) -> list[float]:
    """Time the trial's single requests with the engine forced to the CPU."""
    engine = matrix.engines[trial.assignment.require().engine_id]
    probes = probe_set.opened(trial.bundle)
    assert probes is not None, "without probes nothing is known of placement"
    slow = msgspec.structs.replace(engine, runtime_config={**engine.runtime_config, **FORCED})
    matrix = msgspec.structs.replace(matrix, engines={**matrix.engines, engine.id: slow})
    try:
        async with Host.open(matrix, {order.model: order.bundle}, config) as host:
            trial.progress("forced to the CPU", 0, 0)
            return await timed(single_calls(host, trial, probes))
    except SynapseError:
        # An engine that can't be forced leaves the speed-up unmeasured, and unmeasured doesn't pass.
        return []


# --- orders: which ones this machine can run, and what one leaves ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class CarriedOut:
    """What an order left. ``page``: None without jinja2, which renders it.

    ``certificate``: what there is for the lane's engine and model now, looked up anew; None where the order asked
    another question than the matrix does, and so changed nothing.
    """

    evidence: Evidence
    document: Path
    page: Path | None
    certificate: Certificate | None


def possible(
    matrix: HardwareMatrix, bundles: Mapping[str, Bundle], profile: HostProfile
) -> tuple[list[Order], HardwareMatrix]:
    """Return an order for every engine and model that this machine can run, and the matrix to carry them out by.

    Each pair comes once, on the first lane that has it. An engine that no lane names is tried on the lane its task is
    served by; the matrix returned names it there. *profile* needs the floors of all engines.
    """
    lanes = dict(matrix.lanes)
    for task in dict.fromkeys(lane.task for lane in matrix.lanes.values()):
        of_task = [lane for lane in lanes.values() if lane.task == task]
        home = next((lane for lane in of_task if lane.id == task), of_task[0])
        named = {id for lane in of_task for id in lane.engines}
        fitting = {id for id, one in matrix.engines.items() if task != "generate" or one.engine not in ENCODERS}
        others = [id for id in matrix.engines if id in fitting - named]
        lanes[home.id] = msgspec.structs.replace(home, engines=(*home.engines, *others))
    wide = msgspec.structs.replace(matrix, lanes=lanes)
    orders: list[Order] = []
    for name, bundle in bundles.items():
        of_task = [lane for lane in lanes.values() if lane.task == bundle.manifest.task]
        homes = {id: lane.id for lane in reversed(of_task) for id in lane.engines}  # the first lane that has it
        fits = (id for id in homes if fit(wide, wide.engines[id], profile, bundle)[0])
        orders += [Order(homes[id], name, bundle.root, id) for id in fits]
    return orders, wide


async def carry_out(
    order: Order,
    matrix: HardwareMatrix,
    out: Path,
    config: HostConfig | None = None,
    *,
    by_machine: bool = False,
    progress: Progress = silent,
    plans: Plans = plan_tool,
) -> CarriedOut:
    """Certify, write document and page below *out* and settle the certificate. Errors as :func:`certify`.

    *by_machine*: into a folder of the engine and this kind of machine, under a name that a later run takes again.
    """
    config = config or HostConfig()
    evidence = await certify(order, matrix, config, progress=progress, plans=plans)
    path = out / (_by_machine(evidence) if by_machine else f"{_full_stem(evidence)}.json")
    documents.write(path, evidence)
    page = report.write(path.with_suffix(".html"), evidence)
    certificate = None
    if order.min_placement_share is None:
        standing.settle(evidence, matrix, config.data_dir)
        certificate = await asyncio.to_thread(_standing, order, evidence, matrix, config)
    return CarriedOut(evidence, path, page, certificate)


def _standing(order: Order, evidence: Evidence, matrix: HardwareMatrix, config: HostConfig) -> Certificate | None:
    engine, bundle = matrix.engines[evidence.engine.id], manifest.read(order.bundle)
    artifacts = bundle.artifacts(engine.format)
    artifact = next((one for one in artifacts if one.digest == evidence.model.artifact_digest), None)
    if artifact is None:
        return None
    return standing.look_up(matrix, engine, bundle, artifact, data_dir=config.data_dir)


def folder_of(engine_id: str, *, chip: str, os: str, os_version: str) -> str:
    """Return the folder of an engine and a kind of machine, ``<engine>-<chip>-<os>``: nothing names one machine."""
    # On Linux that is the kernel's release, which says nothing about a kind of machine.
    system = os if os == "linux" else f"{os}-{os_version}"
    kind = re.sub(r"\((R|TM)\)|\bCPU\b|@.*", " ", chip, flags=re.IGNORECASE)
    return "-".join(_slug(part) for part in (engine_id, kind, system))


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9._]+", "-", text.lower()).strip("-")


def _by_machine(evidence: Evidence) -> str:
    machine = evidence.machine
    chip = machine.accelerator or machine.cpu
    folder = folder_of(evidence.engine.id, chip=chip, os=machine.os, os_version=machine.os_version)
    return f"{folder}/{evidence.lane}-{_slug(evidence.model.name)}.json"


def _full_stem(evidence: Evidence) -> str:
    model = re.sub(r"[^\w.-]", "_", evidence.model.name, flags=re.ASCII)
    return f"{evidence.lane}-{evidence.engine.id}-{model}-{evidence.model.manifest_digest[:8]}"
