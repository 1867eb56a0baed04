"""Branch coverage of the wire and of the host's policy, each module by its own tests alone.

    python -m tests.faults.branches [--only NAME ...]

What a module's own tests don't reach, only an accident elsewhere holds. Exit status 1 when a module has less than the
limit. ``make faults-nightly`` runs it; ``make coverage`` does it by hand (about two minutes).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
LIMIT: Final = 95.0
GROUPS: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "protocol": (("engines.protocol",), ("tests/protocol",)),
    "residency": (
        ("synapse_host.residency.core", "synapse_host.residency.types"),
        ("tests/residency/test_core.py", "tests/residency/test_machine.py"),
    ),
    "matrix": (
        ("synapse_host.placement.matrix", "synapse_host.placement.source"),
        ("tests/placement/test_matrix.py",),
    ),
    **{
        name: ((f"synapse_host.{room}.{name}",), (f"tests/{room}/test_{name}.py",))
        for room, names in (
            ("text", ("limits",)),
            ("certificates", ("metrics",)),
            ("worker", ("counters", "handshake", "output", "watchdog")),
            ("placement", ("select",)),
            ("supervision", ("quarantine", "standing")),
        )
        for name in names
    },
    "errors": (("synapse_host.errors",), ("tests/host/test_errors.py",)),
    "queueing": (
        ("synapse_host.supervision.queueing",),
        ("tests/supervision/test_turns.py", "tests/supervision/test_permits.py"),
    ),
}
"""Name -> (modules, their own tests)."""


def measure(modules: Sequence[str], tests: Sequence[str]) -> dict[str, float]:
    """Return file -> percent of its statements and branches that *tests* reach."""
    with tempfile.TemporaryDirectory(prefix="branches-") as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--cov-branch", *tests]
        command += [f"--cov={module}" for module in modules] + [f"--cov-report=json:{report}"]
        environment = {**os.environ, "COVERAGE_FILE": str(Path(folder, "data"))}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{', '.join(tests)}: the tests fail\n{done.stdout[-3000:]}")
        files = json.loads(report.read_text())["files"]
        return {name: entry["summary"]["percent_covered"] for name, entry in files.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.branches", description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=sorted(GROUPS), help="these alone")
    arguments = parser.parse_args(argv)
    low = False
    for name in arguments.only or GROUPS:
        for file, percent in measure(*GROUPS[name]).items():
            low = low or percent < LIMIT
            print(f"{percent:6.1f} %  {file}{'' if percent >= LIMIT else f'   below {LIMIT:g} %'}", flush=True)
    return int(low)


if __name__ == "__main__":
    sys.exit(main())
