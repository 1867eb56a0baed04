"""``synapse certificates``: what is certified on this machine, how old that is, and what voids it."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime

from synapse_host.certificates import standing
from synapse_host.certificates.standing import Listed
from synapse_host.certification.report import row_of
from synapse_host.cli.console import Console
from synapse_host.cli.operate import duration
from synapse_host.cli.parser import Parser
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
    console.document({"certificates": [row_of(one, now) for one in found]})
    for one in found:
        _line(one, now, console)
    if not found:
        console.line("No lane is certified on this machine. Certify what it can run: synapse certify --all")
    return EXIT_OK


def _line(one: Listed, now: datetime, console: Console) -> None:
    row = row_of(one, now)
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
