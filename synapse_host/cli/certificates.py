"""``synapse certificates``: what is certified on this machine, how old that is, and what voids it."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from typing import Any

from synapse_host.certificates import standing
from synapse_host.certificates.standing import Listed
from synapse_host.certification.report import ORIGINS
from synapse_host.cli.console import Console
from synapse_host.cli.parser import Parser
from synapse_host.cli.ps import duration
from synapse_host.errors import EXIT_OK
from synapse_host.models.bundles import readable
from synapse_host.placement import hardware
from synapse_host.placement.matrix import load


def configure(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.description = (
        "List the certificates of this machine, each judged now as a host judges it when a worker starts: its verdict\n"
        "follows from its measurements under the matrix, and nothing that changes numbers was changed since."
    )
    parser.examples("""
        synapse certificates
        synapse certificates --json
    """)


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the verb."""
    matrix = load(args.matrix)
    with console.stages("looking"):
        profile = hardware.detect(hardware.floor_keys(matrix, matrix.engines))
        found = list(standing.listed(matrix, readable(args.models_dir), profile))
    now = datetime.now(UTC)
    console.document({"certificates": [_row(one, now) for one in found]})
    for one in found:
        _line(one, now, console)
    if not found:
        console.line("No lane is certified on this machine. Certify what it can run: synapse certify --all")
    return EXIT_OK


def _row(one: Listed, now: datetime) -> dict[str, Any]:
    found, evidence = one.certificate, one.certificate.evidence
    fixture = None if evidence is None else evidence.fixture
    # What can't be read helps nobody. What this matrix has no use for may be another matrix's, so it stays.
    fix = f"rm {found.path}" if evidence is None else one.fix
    return {
        "lane": one.lane or None,
        "model": one.model or None,
        "engine": one.engine,
        "valid": found.valid,
        "why": "; ".join(found.why) or None,
        "at": None if evidence is None else evidence.created,
        "age_s": None if evidence is None else round(_age(evidence.created, now)),
        "precision": None if evidence is None else evidence.precision,
        "reference": None if fixture is None else f"{ORIGINS[fixture.origin]}: {fixture.computed_by}",
        "path": str(found.path),
        "fix": None if found.valid else fix,
    }


def _age(created: str, now: datetime) -> float:
    try:
        at = datetime.fromisoformat(created)
    except ValueError:
        return 0.0
    return (now - (at if at.tzinfo else at.replace(tzinfo=UTC))).total_seconds()


def _line(one: Listed, now: datetime, console: Console) -> None:
    row = _row(one, now)
    mark = console.style("valid", "green") if row["valid"] else console.style("void ", "yellow", "bold")
    if row["at"] is None:
        console.hang(f"{mark}  ", f"{one.engine} · {row['why']}", 7)
    else:
        approximate = " · approximate" if row["precision"] == "approximate" else ""
        age = f"{duration(max(0, row['age_s']))} old"
        said = f"{row['lane']} · {row['engine']} · {row['model']} · {age}{approximate} · reference: {row['reference']}"
        console.hang(f"{mark}  ", said, 7)
        if row["why"]:
            console.hang("       ", row["why"], 7)
    if row["fix"]:
        # Not wrapped: it is there to be copied.
        console.line(f"       fix: {row['fix']}")
