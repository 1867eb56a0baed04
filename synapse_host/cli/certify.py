"""``synapse certify``: does this lane give the right numbers on this machine, and does it run where it should?"""

from __future__ import annotations

import argparse
import math
from itertools import groupby
from pathlib import Path
from typing import Final

import msgspec

from synapse_host import certificates, certification, report
from synapse_host import evidence as documents
from synapse_host.cli.console import Console
from synapse_host.cli.parser import Parser, UsageError
from synapse_host.cli.session import DEFAULT_MODELS, bundle_of, config_of, model_name, run_orderly
from synapse_host.errors import EXIT_FAILED, EXIT_OK
from synapse_host.evidence import Evidence, Gate
from synapse_host.matrix import load
from synapse_host.recheck import recheck
from synapse_host.report import SIGNS

_WORDS: Final = {
    "reference_fixture": "reference probes",
    "reference_stale": "stale probes",
    "identity": "wrong engine facts",
    "fault": "faults",
    "worker_generations": "worker processes",
    "min_cosine": "min cosine",
    "mean_cosine": "mean cosine",
    "worst_decile": "worst decile",
    "norm_error": "norm error",
    "non_finite": "non-finite",
    "batch_single": "batch = single",
    "order": "misplaced rows",
    "max_error": "max error",
    "rank_order": "changed ranks",
    "top1": "same top 1",
    "first_token": "first token",
    "limits": "wrong edge cases",
    "repeat": "changed repeats",
    "placement_share": "share",
    "functions_unreported": "unreported functions",
    "function_share": "worst function",
    "cost_share": "cost share",
    "cpu_operations": "CPU ops off the list",
    "speedup": "× CPU-only",
}
_SECTIONS: Final = {
    "reference": "setting",
    "device": "setting",
    "worker": "setting",
    "agreement": "quality",
    "finite": "quality",
    "batch": "quality",
    "order": "quality",
    "limits": "quality",
    "placement": "placement",
}


def configure(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.description = (
        "Run a lane's model over its reference probes on a fresh worker, through the normal serving path; compare.\n"
        "Writes an evidence document (JSON) and a report (HTML); a lane that passes gets a certificate. Exit code 0\n"
        "certified, 1 not. --recheck computes the verdict of a document again, on any machine and without the model."
    )
    parser.examples("""
        synapse certify embed --model minilm
        synapse certify rerank --model ms-marco --engine llama-cpu --out evidence --json
        synapse certify --recheck evidence/embed-llama-cpu-minilm-cd3807a8.json
    """)
    parser.add_argument("lane", nargs="?", metavar="LANE", help="lane of the matrix")
    parser.add_argument("--model", metavar="M", help="bundle name or folder (default: the lane's default model)")
    parser.add_argument("--engine", metavar="E", help="this engine of the lane instead of the first that fits")
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("evidence"), help="folder (default: evidence)")
    parser.add_argument("--recheck", type=Path, metavar="FILE", help="compute a document's verdict again")
    parser.add_argument(
        "--min-placement-share", type=share, metavar="X", help="share of operations on the Neural Engine, 0 to 1"
    )


def share(text: str) -> float:
    """Parse a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the verb."""
    if args.recheck is not None:
        if args.lane is not None:
            raise UsageError("give a lane or --recheck, not both. See: synapse certify --help")
        return _recheck(args, console)
    if args.lane is None:
        raise UsageError("name a lane, or a document with --recheck. See: synapse certify --help")
    return _certify(args, console)


def _certify(args: argparse.Namespace, console: Console) -> int:
    matrix = load(args.matrix)
    lane = matrix.lanes.get(args.lane)
    source = args.model or (DEFAULT_MODELS[lane.task] if lane else None)
    if source is None:
        raise UsageError(f"no lane {args.lane!r} (have: {', '.join(matrix.lanes)}). See: synapse matrix explain")
    order = certification.Order(
        lane=args.lane,
        model=model_name(source),
        bundle=bundle_of(source, args, console),
        engine=args.engine,
        min_placement_share=args.min_placement_share,
    )
    with console.stages(f"certifying {args.lane} · {order.model}", rows=True) as progress:
        evidence = run_orderly(certification.certify(order, matrix, config_of(args), progress=progress))
    path = args.out / f"{_stem(evidence)}.json"
    digest = documents.write(path, evidence)
    page = report.write(path.with_suffix(".html"), evidence)
    if evidence.verdict == "certified":
        certificates.write(certificates.of_evidence(evidence, path=path.absolute(), digest=digest))
    else:
        certificates.remove(evidence.engine.id, evidence.model.manifest_digest)
    console.document(
        {
            "verdict": evidence.verdict,
            "evidence": str(path),
            "gates": msgspec.to_builtins(evidence.gates),
            "report": str(page),
            "reasons": evidence.reasons,
            "precision": evidence.precision,
            "reported": evidence.reported,
            "lane": evidence.lane,
            "engine": evidence.engine.id,
            "model": evidence.model.name,
        }
    )
    _page(evidence, console)
    mark = _mark(evidence.verdict == "certified", console)
    joint = "\n      " if 0 < console.width() < len(f"{path}{page}") + 17 else "   "
    console.line(f"{mark}  {path}{joint}report: {page}")
    return EXIT_OK if evidence.verdict == "certified" else EXIT_FAILED


def _stem(evidence: Evidence) -> str:
    model = "".join(char if char.isalnum() or char in "._-" else "_" for char in evidence.model.name)
    return f"{evidence.lane}-{evidence.engine.id}-{model}-{evidence.model.manifest_digest[:8]}"


def _recheck(args: argparse.Namespace, console: Console) -> int:
    found = recheck(args.recheck, load(args.matrix), share=args.min_placement_share)
    evidence = found.evidence
    verdict = evidence.verdict if not found.problems else "refused"
    console.document(
        {
            "verdict": verdict,
            "evidence": str(args.recheck),
            "gates": msgspec.to_builtins(evidence.gates),
            "problems": found.problems,
            "reasons": evidence.reasons,
        }
    )
    _page(evidence, console)
    for problem in found.problems:
        console.line(f"  {problem}")
    if found.problems:
        console.line(f"{console.style('REFUSED', 'red', 'bold')}  {args.recheck} does not say what was measured")
    else:
        console.line(f"{_mark(found.certified, console)}  {args.recheck}: the verdict follows from the measurements")
    return EXIT_OK if found.certified else EXIT_FAILED


def _mark(passed: bool, console: Console) -> str:
    return console.style("PASS", "green", "bold") if passed else console.style("FAIL", "red", "bold")


def _page(evidence: Evidence, console: Console) -> None:
    _title(evidence, console)
    sections = list(_SECTIONS.values())
    ordered = sorted(evidence.gates, key=lambda gate: sections.index(_SECTIONS[gate.group]))
    for section, group in groupby(ordered, lambda gate: _SECTIONS[gate.group]):
        gates = list(group)
        # In one line what is as it should be and has no number to look at; what fails has a row of its own.
        if section != "quality" and all(gate.passed for gate in gates):
            said = _setting(evidence) if section == "setting" else " · ".join(map(_placed, gates))
            console.hang(f"  {section:<11} ", f"{said}   {_word(True, console)}", 14)
        else:
            for gate in gates:
                bound = f"{SIGNS[gate.comparison]} {_threshold(gate)}"
                value = f"{_WORDS.get(gate.name, gate.name):<20} {_value(gate):<10} {bound:<10}"
                console.line(f"  {'' if gate is not gates[0] else section:<11} {value} {_word(gate.passed, console)}")
    if not evidence.placement_required:
        console.line(f"  {'placement':<11} not required on this engine")
    if evidence.reported:
        console.hang(f"  {'speed':<11} ", _speed(evidence), 14)
    if evidence.precision == "approximate":
        console.line("  precision   approximate: an int8 artifact; batch against single is reported only")
    if evidence.fixture is None:
        console.line("  The bundle has no reference fixtures (reference_fixture_missing): build it with them.")
    if evidence.fault is not None:
        console.line(f"  {evidence.fault.stage}: {evidence.fault.message}")


def _title(evidence: Evidence, console: Console) -> None:
    """Print what was certified, with a full bar where a person looks and there is room for it."""
    title = (
        f"certifying {evidence.lane} · {evidence.engine.id} · {evidence.model.name} {evidence.model.dtype} "
        f"(manifest {evidence.model.manifest_digest[:4]}…)"
    )
    wanted = evidence.fixture.probes if evidence.fixture else 0
    probes = f"{len(evidence.tokens) if evidence.inputs is not None else 0}/{wanted} probes"
    bar = console.style("█" * 20, "green") + " " if evidence.inputs is not None and console.interactive else ""
    room = console.width() - len(title) - len(probes) - (21 if bar else 0)
    if not console.width() or room >= 2:
        console.line(title + " " * max(2, min(room, 75 - len(title))) + bar + probes)
    else:
        console.hang("", f"{title} {probes}", 0)


def _setting(evidence: Evidence) -> str:
    """Say what the first gates made sure of."""
    probes = evidence.fixture.probes if evidence.fixture else 0
    said = [f"{probes} reference probes, this bundle's own", f"{evidence.engine.id} on {evidence.engine.device}"]
    return " · ".join([*said, "one worker process"] if evidence.generations else said)


def _placed(gate: Gate) -> str:
    word = _WORDS.get(gate.name, gate.name)
    number = f"{_value(gate)}{word}" if gate.name == "speedup" else f"{word} {_value(gate)}"
    return f"{number} {SIGNS[gate.comparison]} {_threshold(gate)}"


def _word(passed: bool, console: Console) -> str:
    return console.style("pass", "green") if passed else console.style("FAIL", "red", "bold")


def _value(gate: Gate) -> str:
    """Return a measured number; shortened it never looks better than it is."""
    value = gate.value
    if value is None:
        return "none"
    if gate.comparison == "==" or (value == int(value) and abs(value) >= 2):
        return f"{value:.0f}"
    if gate.comparison == ">=":
        return _decimals(math.floor(value * 1e5 + 1e-6) / 1e5)
    return f"{value:.3g}" if float(f"{value:.3g}") >= value or value == 0 else f"{value * 1.005:.3g}"


def _threshold(gate: Gate) -> str:
    return _decimals(gate.threshold) if gate.comparison == ">=" and gate.threshold <= 1 else f"{gate.threshold:g}"


def _decimals(value: float) -> str:
    """Return a number with two to five decimals."""
    whole, _, rest = f"{value:.5f}".partition(".")
    return f"{whole}.{rest.rstrip('0').ljust(2, '0')}"


def _speed(evidence: Evidence) -> str:
    reported = evidence.reported
    parts = []
    if "tokens_per_s" in reported:
        parts.append(f"{reported['tokens_per_s']:,.0f} tokens/s")
    if "rows_per_s" in reported and evidence.model.task != "generate":
        parts.append(f"{reported['rows_per_s']:,.0f} {'texts' if evidence.model.task == 'embed' else 'pairs'}/s mixed")
    if evidence.performance.single_ms:
        parts.append(f"p50 {reported['single_p50_ms']:.1f} ms, p95 {reported['single_p95_ms']:.1f} ms single")
    if "prefix_share" in reported:
        parts.append(f"prefix share {reported['prefix_share']:.3f}")
    return " · ".join(parts) or "not measured"
