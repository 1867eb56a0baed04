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
TARGETS: Final[dict[str, tuple[str, ...]]] = {
    "engines.protocol.framing": ("tests/protocol/test_framing.py", "tests/protocol/test_vectors.py"),
    "engines.protocol.connection": ("tests/protocol/test_connection.py", "tests/protocol/test_vectors.py"),
    "engines.protocol.expectation": ("tests/protocol/test_connection.py", "tests/protocol/test_vectors.py"),
    "engines.protocol.decoding": ("tests/protocol/test_messages.py", "tests/protocol/test_vectors.py"),
    "engines.protocol.messages": (
        *("tests/protocol/test_messages.py", "tests/protocol/test_vectors.py", "tests/protocol/test_document.py"),
    ),
    "engines.protocol.rules": ("tests/protocol/test_document.py", "tests/protocol/test_vectors.py"),
    "engines.protocol.errors": ("tests/protocol/test_messages.py", "tests/protocol/test_vectors.py"),
    "engines.bundle.manifest": ("tests/bundle/test_manifest.py",),
    "engines.bundle.digest": ("tests/bundle/test_digest.py",),
    "engines.bundle.fixtures": ("tests/bundle/test_fixtures.py",),
    "engines.checkpoint.read": ("tests/checkpoint/test_read.py",),
    "engines.checkpoint.safetensors": ("tests/checkpoint/test_safetensors.py",),
    "engines.checkpoint.dense": ("tests/checkpoint/test_dense.py",),
    "engines.checkpoint.pipeline": ("tests/checkpoint/test_pipeline.py",),
    "engines.checkpoint.tokenizer": ("tests/checkpoint/test_pipeline.py", "tests/models/test_families.py"),
    "engines.checkpoint.facts": ("tests/checkpoint/test_pipeline.py",),
    "engines.checkpoint.quantize": ("tests/checkpoint/test_quantize.py",),
    "engines.llama.gguf": ("tests/llama/test_gguf.py",),
    "engines.llama.inputs": ("tests/llama/test_inputs.py",),
    "engines.llama.config": ("tests/llama/test_config.py",),
    "engines.llama.sequences": ("tests/llama/test_sequences.py",),
    "synapse_host.supervision.quarantine": ("tests/supervision/test_quarantine.py",),
    "synapse_host.requests.batching": ("tests/requests/test_batching.py",),
    "synapse_host.worker.watchdog": ("tests/worker/test_watchdog.py",),
    "synapse_host.worker.handshake": ("tests/worker/test_handshake.py",),
    "synapse_host.supervision.queueing": ("tests/supervision/test_queueing.py",),
    "synapse_host.residency.core": ("tests/residency/test_core.py", "tests/residency/test_machine.py"),
    "synapse_host.certificates.verdict": ("tests/certificates/test_verdict.py",),
    "synapse_host.text.background": ("tests/text/test_background.py",),
    "synapse_host.text.limits": ("tests/text/test_limits.py", "tests/text/test_tokenizer.py"),
    "synapse_host.text.split_pattern": ("tests/text/test_split_pattern.py", "tests/text/test_tokenizer_file.py"),
    "synapse_host.text.tokenizer": ("tests/text/test_tokenizer.py",),
    "synapse_host.text.tokenizer_file": ("tests/text/test_tokenizer_file.py", "tests/text/test_tokenizer.py"),
    "synapse_host.text.validate": ("tests/text/test_validate.py",),
    "engines.runtime.artifact": ("tests/runtime/test_artifact.py",),
    "engines.runtime.dispatch": ("tests/runtime/test_dispatch.py",),
    "engines.runtime.inference": ("tests/runtime/test_inference.py", "tests/runtime/test_dispatch.py"),
    "engines.runtime.progress": ("tests/runtime/test_progress.py",),
    "engines.runtime.transport": ("tests/runtime/test_transport.py", "tests/runtime/test_faults.py"),
    "engines.runtime.worker": ("tests/runtime/test_worker.py",),
    "engines.ane.inputs": ("tests/ane/test_inputs.py",),
    "engines.ane.shapes": ("tests/ane/test_shapes.py",),
    "engines.ane.compute_plan": ("tests/ane/test_compute_plan.py", "tests/ane/test_binding.py"),
}
"""Module -> its own tests."""


def score(module: str, tests: Sequence[str], count: int | None, *, seed: int = 0) -> dict[str, Any]:
    """Mutate one module of the tree in the working directory; return how many mutants there were and were noticed."""
    from cosmic_ray.commands import execute, init
    from cosmic_ray.config import ConfigDict
    from cosmic_ray.work_db import WorkDB, use_db
    from cosmic_ray.work_item import WorkerOutcome, WorkResult

    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", *tests]
    config = ConfigDict(
        {"timeout": LIMIT_S, "test-command": " ".join(command), "distributor": {"name": "local"}, "operators": {}}
    )
    path = Path(*module.split(".")).with_suffix(".py")
    database = Path("session.sqlite")
    database.unlink(missing_ok=True)
    with use_db(str(database), WorkDB.Mode.create) as db:
        init([path], db, {})
        all_jobs = [item.job_id for item in db.work_items]
        telling = [
            item.job_id for item in db.work_items if item.mutations[0].operator_name.removeprefix("core/") in OPERATORS
        ]
        wanted = len(telling) if count is None else min(count, len(telling))
        chosen = set(random.Random(seed).sample(telling, wanted))
        for job in set(all_jobs) - chosen:
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
            results[module] = found = score(module, TARGETS[module], arguments.sample)
            print(f"{module}: {found['killed']} of {found['mutants']} noticed", flush=True)
        os.chdir(ROOT)
    arguments.report.parent.mkdir(exist_ok=True)
    arguments.report.write_text(json.dumps(results, indent=1) + "\n")
    killed, total = (sum(found[key] for found in results.values()) for key in ("killed", "mutants"))
    print(f"{killed} of {total} noticed, at least {SCORE:.0%} asked; what survived: {arguments.report}")
    return 0 if killed / total >= SCORE else 1


if __name__ == "__main__":
    sys.exit(main())
