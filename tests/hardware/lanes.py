"""Certification of a default model on the device of a hardware run: what `synapse certify` does, by the same code."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engines.bundle.manifest import Bundle
from synapse_host.certificates import verdict
from synapse_host.certification import run as orders
from synapse_host.certification.packing import Plans, plan_tool
from synapse_host.certification.run import Order
from synapse_host.config import HostConfig
from synapse_host.errors import SynapseError
from synapse_host.models import catalogue
from synapse_host.placement.matrix import HardwareMatrix, load

EVIDENCE = Path(__file__).parents[2] / "evidence"
MODELS = {"embed": "minilm", "rerank": "ms-marco", "generate": "smollm2"}


def installed(lane: str, *, format: str | None = None) -> Bundle:
    """Return the lane's default model, made now if it isn't here. Skips, which `--hw` turns into a failure, without it.

    *format*: an artifact that its bundle must have.
    """
    name = MODELS[lane]
    try:
        found = catalogue.obtain(name)
    except SynapseError as exc:
        pytest.skip(f"{name} is not here: {exc}")
    if format is not None and not found.artifacts(format):
        pytest.skip(
            f"{name} has no {format}: install the extra and make it again: synapse models install {name} --force"
        )
    return found


def certified(
    lane: str,
    engine: str,
    *,
    bundle: Path | None = None,
    matrix: HardwareMatrix | None = None,
    out: Path = EVIDENCE,
    config: HostConfig | None = None,
    plans: Plans = plan_tool,
) -> dict[str, Any]:
    """Certify the lane's default model (or *bundle*) and settle its certificate; return what a run's document keeps.

    Document and page go below *out*, into the folder of the engine and this kind of machine.
    """
    bundle = bundle or installed(lane).root
    order = Order(lane, bundle.name, bundle, engine)
    done = asyncio.run(orders.carry_out(order, matrix or load(), out, config, by_machine=True, plans=plans))
    evidence, certificate = done.evidence, done.certificate
    return {
        "verdict": evidence.verdict,
        "reasons": evidence.reasons,
        "certificate": "none" if certificate is None else "; ".join(certificate.why) or "valid",
        "fault": None if evidence.fault is None else evidence.fault.message,
        "reported": evidence.reported,
        "gates": {gate.name: gate.value for gate in evidence.gates},
        "packed_widths": verdict.qualified_widths(evidence),
        "evidence": f"{done.document.parent.name}/{done.document.name}",
    }


def assert_certified(summary: dict[str, Any]) -> None:
    """Fail the test unless every gate passed and the certificate is one that a host takes now."""
    assert (summary["verdict"], summary["certificate"]) == ("certified", "valid"), summary
