"""The fault campaign: R1 to R17 of the reliability targets, a table and ``reports/faults.json``.

    python -m tests.faults.campaign [--size slice|ci|nightly] [--only R1,R5] [--report FILE]

Real supervisors over real processes, except where a row says that the process is played (R5's sessions, R6, R16's
sockets, R17). ``make faults`` runs the CI size, ``make faults-nightly`` the big numbers: 10,000 kills, an eight-hour
soak (``SYNAPSE_SOAK_S`` changes its seconds). R15, the mutation score, is ``make mutants``. Exit status 0 when every
row passed. Times are asserted here and nowhere else; the wait of this process for a CPU is taken off them and reported
beside them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from tests.faults import clocks, cycles, endings, floods, hangs, kills, ledger, mutations, quarantine_model, syscalls
from tests.faults.ledger import Row

REPORT = Path(__file__).parents[2] / "reports" / "faults.json"
SIZES = ("slice", "ci", "nightly")
Plan: TypeAlias = tuple[Callable[..., Row], dict[str, Any] | None, dict[str, Any] | None, dict[str, Any]]
PLANS: dict[str, Plan] = {
    "R1": (kills.r1, {"count": 10}, {"count": 200}, {"count": 10_000}),
    "R2": (hangs.r2, {"count": 4, "window": 1.0, "at_once": 4}, {"count": 100}, {"count": 2000}),
    "R3": (hangs.r3, {"windows": 2, "window": 1.5, "share": 0.4, "lanes": 2}, {"windows": 20}, {"windows": 200}),
    "R4": (hangs.r4, {}, {}, {"repeats": 10}),
    "R5": (
        mutations.r5,
        {"sessions": 200, "header_count": 20_000},
        {"sessions": 20_000, "header_count": 1_000_000},
        {"sessions": 1_000_000, "header_count": 20_000_000},
    ),
    "R6": (mutations.r6, {"step": 40}, {}, {}),
    "R7": (kills.r7, {"count": 30}, {"count": 1000}, {"count": 100_000}),
    "R8": (cycles.r8, {"count": 20}, {"count": 1000}, {"count": 50_000}),
    "R9": (cycles.r9, None, None, {"seconds": float(os.environ.get("SYNAPSE_SOAK_S", "28800"))}),
    "R10": (kills.r10, {"count": 3}, {"count": 50}, {"count": 1000}),
    "R11": (endings.r11, {"count": 1}, {"count": 5}, {"count": 500}),
    "R12": (floods.r12, {"mebibytes": 1}, {"mebibytes": 10}, {"mebibytes": 1024}),
    "R13": (endings.r13, {"count": 2}, {"count": 6}, {"count": 1000}),
    "R14": (quarantine_model.r14, {"steps": 2000}, {"steps": 2000}, {"steps": 200_000}),
    "R16": (syscalls.r16, {"limit": 2, "processes": False}, {}, {}),
    "R17": (clocks.r17, {}, {"rounds": 5}, {"rounds": 200}),
}
"""Each row and its options at each size; None: not at that size."""


def options(name: str, size: str) -> dict[str, Any] | None:
    """Return a row's options at *size*."""
    return PLANS[name][1 + SIZES.index(size)]  # type: ignore[return-value]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.campaign", description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="ci")
    parser.add_argument("--only", metavar="R1,R5", help="these rows only")
    parser.add_argument("--report", type=Path, default=REPORT)
    arguments = parser.parse_args(argv)
    names = arguments.only.split(",") if arguments.only else list(PLANS)
    if unknown := [name for name in names if name not in PLANS]:
        parser.error(f"no such row: {', '.join(unknown)}; there are {', '.join(PLANS)}")
    rows = []
    for name in names:
        if (chosen := options(name, arguments.size)) is None:
            print(f"{name}: not at this size")
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        rows.append(PLANS[name][0](**chosen))
        print(ledger.table(rows[-1:]).split("\n", 1)[1], file=sys.stderr, flush=True)
    print(ledger.table(rows))
    ledger.write(rows, arguments.report, size=arguments.size)
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
