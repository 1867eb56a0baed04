"""Mutation score of the wire and the policies: cosmic-ray changes one thing, the module's own tests must notice.

    make mutants                                  every mutant: hours
    make mutants SAMPLE=40                        so many of each module, always the same ones
    python -m tests.faults.mutants --module engines.protocol.framing --sample 40

Works on a copy of the tree, since cosmic-ray changes files where they stand. Writes ``reports/mutants.json``: by module
the number of mutants, how many were noticed, and the difference of each that was not. Exit status 1 below the score.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
SCORE: Final = 0.9
LIMIT_S: Final = 120.0
"""A mutant may hang; that is noticed."""
OPERATORS: Final = (
    *("ReplaceComparisonOperator_" + pair for pair in (
        "Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is", "In_NotIn", "NotIn_In",
    )),
    *("ReplaceBinaryOperator_" + pair for pair in ("Add_Sub", "Sub_Add", "Mul_Add", "BitAnd_BitXor")),
    "AddNot", "ExceptionReplacer", "NumberReplacer", "ReplaceAndWithOr", "ReplaceBreakWithContinue",
    "ReplaceContinueWithBreak", "ReplaceFalseWithTrue", "ReplaceOrWithAnd", "ReplaceTrueWithFalse",
    "ZeroIterationForLoop",
)  # fmt: skip
"""cosmic-ray's others change annotations (``X | None``) or give programs that mean the same."""
MODULES: Final = {
    "engines.protocol": "framing connection expectation decoding messages rules errors",
    "engines.bundle": "manifest digest fixtures",
    "engines.checkpoint": "read safetensors dense pipeline tokenizer facts quantize",
    "engines.llama": "gguf inputs config sequences",
    "engines.runtime": "artifact dispatch inference progress transport worker",
    "engines.ane": "inputs shapes compute_plan",
    "synapse_host.supervision": "quarantine queueing",
    "synapse_host.requests": "batching",
    "synapse_host.worker": "watchdog handshake",
    "synapse_host.residency": "core",
    "synapse_host.certificates": "verdict",
    "synapse_host.text": "background limits split_pattern tokenizer tokenizer_file validate",
}
"""Package -> its modules that are measured, each by the test of its own name and by those of MORE."""
MORE: Final[dict[str, tuple[str, ...]]] = {
    "engines.protocol.framing": ("vectors",),
    "engines.protocol.connection": ("vectors",),
    "engines.protocol.expectation": ("connection", "vectors"),
    "engines.protocol.decoding": ("messages", "vectors"),
    "engines.protocol.messages": ("vectors", "document"),
    "engines.protocol.rules": ("document", "vectors"),
    "engines.protocol.errors": ("messages", "vectors"),
    "engines.checkpoint.tokenizer": ("pipeline", "models/test_families"),
    "engines.checkpoint.facts": ("pipeline",),
    "engines.runtime.inference": ("dispatch",),
    "engines.runtime.transport": ("faults",),
    "engines.ane.compute_plan": ("binding",),
    "synapse_host.residency.core": ("machine",),
    "synapse_host.text.limits": ("tokenizer",),
    "synapse_host.text.split_pattern": ("tokenizer_file",),
    "synapse_host.text.tokenizer": ("bulk/test_corpus",),
    "synapse_host.text.tokenizer_file": ("tokenizer",),
}
"""Module -> other tests of its folder, or of another one, that are its own."""
TARGETS: Final = [f"{package}.{name}" for package, names in MODULES.items() for name in names.split()]


def tests_of(module: str) -> list[str]:
    """Return the files of tests that belong to *module*."""
    _, room, name = module.split(".")
    names = [each if "/" in each else f"{room}/test_{each}" for each in (name, *MORE.get(module, ()))]
    return [path for each in names if Path(path := f"tests/{each}.py").exists()]


def score(module: str, count: int | None) -> dict[str, Any]:
    """Mutate one module of the tree in the working directory; return how many mutants there were and were noticed."""
    from cosmic_ray.commands import execute, init
    from cosmic_ray.config import ConfigDict
    from cosmic_ray.work_db import WorkDB, use_db
    from cosmic_ray.work_item import WorkerOutcome, WorkResult

    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly"]
    command = [sys.executable, "-m", "pytest", *options, *tests_of(module)]
    config = ConfigDict(
        {"timeout": LIMIT_S, "test-command": " ".join(command), "distributor": {"name": "local"}, "operators": {}}
    )
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # or every mutant would seem to be noticed
    path = Path(*module.split(".")).with_suffix(".py")
    database = Path("session.sqlite")
    database.unlink(missing_ok=True)
    with use_db(str(database), WorkDB.Mode.create) as db:
        init([path], db, {})
        operators = {item.job_id: item.mutations[0].operator_name.removeprefix("core/") for item in db.work_items}
        telling = [job for job, operator in operators.items() if operator in OPERATORS]
        chosen = telling if count is None else random.Random(0).sample(telling, min(count, len(telling)))
        for job in operators.keys() - set(chosen):
            db.set_result(job, WorkResult(worker_outcome=WorkerOutcome.SKIPPED))
        execute(db, config)
        ran = [result for item, result in db.completed_work_items if item.job_id in chosen]
        survivors = [result.diff for result in ran if not result.is_killed]
    return {"mutants": len(ran), "killed": len(ran) - len(survivors), "survivors": survivors}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a line a module, write the report."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.mutants", description=__doc__.split("\n")[0])
    parser.add_argument("--sample", type=int, help="mutants of each module, chosen by a fixed seed")
    parser.add_argument("--module", choices=TARGETS, action="append")
    parser.add_argument("--report", type=Path, default=ROOT / "reports" / "mutants.json")
    arguments = parser.parse_args(argv)
    results = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for name in ("engines", "synapse_host", "tests", "docs"):
            shutil.copytree(ROOT / name, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "hw_matrix.yaml"):
            shutil.copy(ROOT / name, folder)
        os.chdir(folder)
        for module in arguments.module or TARGETS:
            results[module] = found = score(module, arguments.sample)
            print(f"{module}: {found['killed']} of {found['mutants']} noticed", flush=True)
        os.chdir(ROOT)
    arguments.report.parent.mkdir(exist_ok=True)
    arguments.report.write_text(json.dumps(results, indent=1) + "\n")
    killed, total = (sum(found[key] for found in results.values()) for key in ("killed", "mutants"))
    print(f"{killed} of {total} noticed, at least {SCORE:.0%} asked; what survived: {arguments.report}")
    return 0 if killed / total >= SCORE else 1


if __name__ == "__main__":
    sys.exit(main())
