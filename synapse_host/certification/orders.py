"""Orders of a certification: which ones this machine can run, and carrying one out.

An order that is carried out leaves an evidence document and a page in a folder and, unless it asked another question
than the matrix does, settles the certificate. The command and the hardware runs do it here.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engines.bundle import manifest
from synapse_host.certificates import document as documents
from synapse_host.certificates import standing
from synapse_host.certificates.document import Evidence
from synapse_host.certification import report, run
from synapse_host.certification.packing import Plans, plan_tool
from synapse_host.certification.run import Order
from synapse_host.config import HostConfig
from synapse_host.models.bundles import silent
from synapse_host.placement import hardware
from synapse_host.placement.matrix import ENCODERS, HardwareMatrix
from synapse_host.placement.select import fit

if TYPE_CHECKING:
    from engines.bundle.manifest import Bundle
    from synapse_host.certificates.standing import Certificate
    from synapse_host.certification.trial import Progress
    from synapse_host.placement.hardware import HostProfile


@dataclass(frozen=True, slots=True)
class CarriedOut:
    """What an order left. ``certificate``: what there is for the lane's engine and model now, looked up anew.

    None where the order asked another question than the matrix does, and so changed nothing.
    """

    evidence: Evidence
    document: Path
    page: Path
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
        home = lanes.get(task) or next(lane for lane in lanes.values() if lane.task == task)
        named = {id for lane in lanes.values() if lane.task == task for id in lane.engines}
        others = [id for id, one in matrix.engines.items() if id not in named and _serves(one.engine, task)]
        lanes[home.id] = msgspec.structs.replace(home, engines=(*home.engines, *others))
    wide = msgspec.structs.replace(matrix, lanes=lanes)
    orders: list[Order] = []
    for name, bundle in bundles.items():
        done: set[str] = set()
        for lane in lanes.values():
            if lane.task != bundle.manifest.task:
                continue
            for id in lane.engines:
                if id not in done and fit(wide, wide.engines[id], profile, bundle)[0]:
                    done.add(id)
                    orders.append(Order(lane.id, name, bundle.root, id))
    return orders, wide


def _serves(engine: str, task: str) -> bool:
    return task != "generate" or engine not in ENCODERS


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
    """Certify, write document and page below *out* and settle the certificate. Errors as :func:`certification.certify`.

    *by_machine*: into a folder of the engine and this kind of machine, under a name that a later run takes again.
    """
    config = config or HostConfig()
    evidence = await run.certify(order, matrix, config, progress=progress, plans=plans)
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
    profile = hardware.detect(hardware.floor_keys(matrix, [engine.id]))
    return standing.look_up(matrix, engine, bundle, artifact, profile, data_dir=config.data_dir)


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
