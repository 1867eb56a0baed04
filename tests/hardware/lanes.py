"""Certification of a default model on the device of a hardware run: host, worker process, probes, gates, report."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from synapse_host import catalogue, certificates, report
from synapse_host import evidence as documents
from synapse_host.certification import Order, certify
from synapse_host.errors import SynapseError
from synapse_host.matrix import load

MODELS = {"embed": "minilm", "rerank": "ms-marco", "generate": "smollm2"}


def certified(lane: str, engine: str, folder: Path) -> dict[str, Any]:
    """Certify the lane's default model, write document, page and (where it passes) certificate; return the summary.

    Skips where the model is neither here nor to be fetched: `--hw` makes that a failure.
    """
    model = MODELS[lane]
    try:
        bundle = catalogue.obtain(model)
    except SynapseError as exc:
        pytest.skip(f"{model} is not here: {exc}")
    evidence = asyncio.run(certify(Order(lane, model, bundle.root, engine), load()))
    path = folder / f"{lane}-{engine}-{model}-{bundle.digest[:8]}.json"
    digest = documents.write(path, evidence)
    report.write(path.with_suffix(".html"), evidence)
    if evidence.verdict == "certified":
        certificates.write(certificates.of_evidence(evidence, path=path.absolute(), digest=digest))
    return {
        "verdict": evidence.verdict,
        "reasons": evidence.reasons,
        "fault": None if evidence.fault is None else evidence.fault.message,
        "reported": evidence.reported,
        "gates": {gate.name: gate.value for gate in evidence.gates},
        "evidence": path.name,
    }
