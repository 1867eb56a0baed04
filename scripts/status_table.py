#!/usr/bin/env python3
"""README's table of what has been certified where, made from the documents under evidence/.

    python scripts/status_table.py            print it
    python scripts/status_table.py --write    put it into README.md

Each document is judged again: one that doesn't say what it measured is 'refused', whatever it says. An engine of the
matrix without a document is 'not measured'.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from synapse_host.certificates.document import Evidence
from synapse_host.certificates.recheck import recheck
from synapse_host.placement.matrix import HardwareMatrix, load

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- made by scripts/status_table.py -->", "<!-- end of what scripts/status_table.py made -->"
COLUMNS = ("engine", "model", "machine", "verdict", "worst against the reference", "speed", "day")


def table(matrix: HardwareMatrix, folder: Path) -> str:
    """Return the table for the documents below *folder* and the engines of *matrix*."""
    order = list(matrix.engines)
    rows = sorted(_rows(matrix, folder), key=lambda row: (order.index(row[0]) if row[0] in order else len(order), row))
    measured = {row[0] for row in rows}
    rows += [(id, "", "", "not measured", "", "", "") for id in order if id not in measured]
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def _rows(matrix: HardwareMatrix, folder: Path) -> Iterator[tuple[str, ...]]:
    for path in sorted(folder.glob("*/*.json")):
        if path.name == "hardware.json":
            continue
        found = recheck(path, matrix)
        run = found.evidence
        verdict = "refused" if found.problems else run.verdict
        approximate = ", approximate" if run.precision == "approximate" else ""
        machine = f"{run.machine.accelerator or run.machine.cpu}, {run.machine.os} {run.machine.arch}"
        model = f"{run.model.name} {run.model.dtype}"
        yield run.engine.id, model, machine, verdict + approximate, _worst(run), _speed(run), run.created[:10]


def _worst(run: Evidence) -> str:
    told = {gate.name: gate.value for gate in run.gates} | dict(run.reported)
    words = {"min_cosine": "cosine", "max_error": "logit", "first_token": "same first token"}
    said = [f"{word} {told[name]:.4g}" for name, word in words.items() if told.get(name) is not None]
    return ", ".join(said)


def _speed(run: Evidence) -> str:
    if "tokens_per_s" in run.reported:
        return f"{run.reported['tokens_per_s']:,.0f} tokens/s"
    median = run.reported.get("single_p50_ms")
    return "" if median is None else f"{median:.0f} ms a prompt"


def placed(text: str, made: str) -> str:
    """Return README's text with the table between its marks."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"README.md has no {BEGIN}")
    return pattern.sub(lambda _: f"{BEGIN}\n{made}\n{END}", text)


def main() -> int:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put it into README.md")
    made = table(load(ROOT / "hw_matrix.yaml"), ROOT / "evidence")
    if not parser.parse_args().write:
        print(made)
        return 0
    readme = ROOT / "README.md"
    readme.write_text(placed(readme.read_text("utf-8"), made), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
