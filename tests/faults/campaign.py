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
import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.faults import (
    clocks,
    cycles,
    endings,
    floods,
    hangs,
    kills,
    ledger,
    mutations,
    quarantine_model,
    syscalls,
)
from tests.faults.arena import run
from tests.faults.inprocess import SteppedLoop
from tests.faults.ledger import Row

REPORT = Path(__file__).parents[2] / "reports" / "faults.json"
SIZES = ("slice", "ci", "nightly")
Make = Callable[..., tuple[Row, Callable[[], Any]]]


class Plan:
    """One row: how to make it at each size (None: not at that size), and the loop it needs."""

    def __init__(
        self,
        make: Make,
        *sizes: dict[str, Any] | None,
        loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
    ) -> None:
        self.make = make
        self.sizes = dict(zip(SIZES, sizes, strict=True))
        self.loop = loop

    def run(self, size: str) -> Row | None:
        """Run the row at *size*."""
        options = self.sizes[size]
        if options is None:
            return None
        row, body = self.make(**options)
        return run(row, body, loop_factory=self.loop)


PLANS: dict[str, Plan] = {
    "R1": Plan(kills.r1, {"count": 10}, {"count": 200}, {"count": 10_000}),
    "R2": Plan(hangs.r2, {"count": 4, "window": 0.5, "at_once": 4}, {"count": 100}, {"count": 2000}),
    "R3": Plan(hangs.r3, {"windows": 2, "window": 1.5, "share": 0.4, "lanes": 2}, {"windows": 20}, {"windows": 200}),
    "R4": Plan(hangs.r4, {}, {}, {"repeats": 10}),
    "R5": Plan(
        mutations.r5,
        {"sessions": 200, "header_count": 20_000},
        {"sessions": 20_000, "header_count": 1_000_000},
        {"sessions": 1_000_000, "header_count": 20_000_000},
    ),
    "R6": Plan(mutations.r6, {"step": 40}, {}, {}, loop=SteppedLoop),
    "R7": Plan(kills.r7, {"count": 30}, {"count": 1000}, {"count": 100_000}),
    "R8": Plan(cycles.r8, {"count": 20}, {"count": 1000}, {"count": 50_000}),
    "R9": Plan(cycles.r9, None, None, {"seconds": float(os.environ.get("SYNAPSE_SOAK_S", "28800"))}),
    "R10": Plan(kills.r10, {"count": 3}, {"count": 50}, {"count": 1000}),
    "R11": Plan(endings.r11, {"count": 1}, {"count": 5}, {"count": 500}),
    "R12": Plan(floods.r12, {"mebibytes": 1}, {"mebibytes": 10}, {"mebibytes": 1024}),
    "R13": Plan(endings.r13, {"count": 2}, {"count": 6}, {"count": 1000}),
    "R14": Plan(quarantine_model.r14, {"steps": 2000}, {"steps": 2000}, {"steps": 200_000}),
    "R16": Plan(syscalls.r16, {"limit": 2, "processes": False}, {}, {}, loop=SteppedLoop),
    "R17": Plan(clocks.r17, {}, {"rounds": 5}, {"rounds": 200}, loop=SteppedLoop),
}


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
        print(f"{name} ...", file=sys.stderr, flush=True)
        if (row := PLANS[name].run(arguments.size)) is not None:
            rows.append(row)
            print(ledger.table([row]).split("\n", 1)[1], file=sys.stderr, flush=True)
    print(ledger.table(rows))
    left_out = [name for name in names if PLANS[name].sizes[arguments.size] is None]
    if left_out:
        print(f"not at this size: {', '.join(left_out)}")
    ledger.write(rows, arguments.report, size=arguments.size)
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
