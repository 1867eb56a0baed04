"""Probe every engine of the matrix in a throw-away child and check the machine around them: versions, threads, memory,
disk, descriptors, socket paths, installed packages, bundles and their digests. Exit code 1 when something has to be
fixed.

Examples:
  synapse doctor
  synapse doctor --json
"""

from __future__ import annotations

import argparse
from typing import Final

from synapse_host import doctor
from synapse_host.cli.console import Console
from synapse_host.cli.parser import Parser
from synapse_host.doctor import Report
from synapse_host.errors import EXIT_FAILED, EXIT_OK
from synapse_host.models import catalogue
from synapse_host.placement.matrix import load

GB: Final = 1024**3


def configure(parser: Parser) -> None:
    """Add nothing: the verb has no arguments of its own."""


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the verb."""
    matrix = load(args.matrix)
    with console.stages("examining"):
        report = doctor.examine(
            matrix,
            models_dir=None if args.models_dir is None else catalogue.models_dir(args.models_dir),
            runtime_dir=args.runtime_dir,
            # Its threads are waited for, whatever ends the command.
            probe_limit=args.deadline,
        )
    console.document(report.to_dict())
    _page(report, console)
    return EXIT_FAILED if report.count("failure") else EXIT_OK


def _page(report: Report, console: Console) -> None:
    host = report.host
    quota = f" (quota {host['quota']:.1f})" if host["quota"] is not None else ""
    about = f"synapse {host['version']} · {host['os']} {host['arch']} · Python {host['python']}"
    memory = f"{host['ram_bytes'] / GB:.1f} GB RAM, {host['ram_free_bytes'] / GB:.1f} free"
    console.hang("", f"{about} · {host['cores']} cores{quota} · {memory}", 0)
    console.line()
    width = max(len(engine.id) for engine in report.engines) + 2
    words = {"ok": console.style("ok  ", "green"), "passed_over": "--  ", "failed": console.style("no  ", "yellow")}
    for engine in report.engines:
        console.hang(f"  {words[engine.status]}  {engine.id:<{width}}", engine.what, width + 8)
    marks = {
        "info": console.style("ok  ", "green"),
        "warning": console.style("WARN", "yellow", "bold"),
        "failure": console.style("FAIL", "red", "bold"),
    }
    if report.findings:
        console.line()
    for finding in sorted(report.findings, key=lambda item: ("info", "warning", "failure").index(item.severity)):
        console.hang(f"  {marks[finding.severity]}  ", finding.what, 8)
        if finding.fix:
            # Not wrapped: it is there to be copied.
            console.line(f"        fix: {finding.fix}")
    failures, warnings = report.count("failure"), report.count("warning")
    console.line()
    if not failures and not warnings:
        console.line("Nothing to fix.")
        return
    counted = [f"{n} {noun}{'' if n == 1 else 's'}" for n, noun in ((failures, "failure"), (warnings, "warning"))]
    console.line(f"{', '.join(counted)}. Exit {EXIT_FAILED if failures else EXIT_OK}.")
