"""Run a lane's model over its reference probes on a fresh worker, through the normal serving path; compare.
Writes an evidence document (JSON) and a page (HTML). A lane that passes gets a certificate, one that fails loses it;
--min-placement-share only asks, and changes neither. Exit code 0 certified, 1 not.
--all: every installed model on every engine that this machine can run, each kind of machine in a folder of its own.
--recheck computes the verdict of a document again, on any machine and without a worker.

Examples:
  synapse certify embed --model minilm
  synapse certify rerank --model ms-marco --engine llama-cpu --out evidence --json
  synapse certify --all
  synapse certify --recheck evidence/embed-llama-cpu-minilm-cd3807a8.json
"""

from __future__ import annotations

import argparse
import json
import math
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from synapse_host.certificates import document as documents
from synapse_host.certificates import standing
from synapse_host.certificates.document import Evidence, Gate
from synapse_host.certificates.recheck import recheck
from synapse_host.certificates.standing import Certificate, Listed
from synapse_host.certificates.verdict import GROUPS, rule_of
from synapse_host.certification import run as runs
from synapse_host.certification.report import ORIGINS, SIGNS, row_of
from synapse_host.certification.run import CarriedOut, Order
from synapse_host.cli.console import Console
from synapse_host.cli.operate import duration
from synapse_host.cli.parser import Parser, UsageError, share
from synapse_host.cli.session import DEFAULT_MODELS, bundle_of, config_of, model_name, run_orderly
from synapse_host.errors import EXIT_FAILED, EXIT_OK, SynapseError
from synapse_host.models import catalogue
from synapse_host.models.bundles import readable
from synapse_host.placement import hardware
from synapse_host.placement.matrix import load

_CERTIFICATES = """List the certificates of this machine, each judged now as a host judges it when a worker starts: does
its verdict follow from its measurements under the matrix, and was nothing changed that changes numbers?

Examples:
  synapse certificates
  synapse certificates --json
"""


def configure(parser: Parser) -> None:
    """Add the verb's arguments."""
    if parser.verb == "certificates":
        parser.describe(_CERTIFICATES)
        return
    parser.option("lane", "LANE", "lane of the matrix", nargs="?")
    parser.option("--model", "M", "bundle name or folder (default: the lane's default model)")
    parser.option("--engine", "E", "this engine of the lane instead of the first that fits")
    parser.option("--out", "DIR", "folder (default: evidence)", type=Path, default=Path("evidence"))
    parser.flag("--all", help="every installed model on every engine that runs here")
    parser.option("--recheck", "FILE", "compute a document's verdict again", type=Path)
    parser.flag("--schema", help="print the JSON Schema of evidence documents")
    parser.option("--min-placement-share", "X", "ask with this share of operations on the Neural Engine", type=share)


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the verb."""
    if args.verb == "certificates":
        return _certificates(args, console)
    wanted = [args.lane is not None, args.all, args.recheck is not None, args.schema]
    if sum(wanted) != 1:
        either = "name a lane, or give one of --all, --recheck and --schema, and not both"
        raise UsageError(f"{either}. See: synapse certify --help")
    if args.schema:
        # The schema is the document, with --json and without.
        print(json.dumps(documents.json_schema(), indent=2))
        return EXIT_OK
    if args.recheck is not None:
        return _recheck(args, console)
    return _all(args, console) if args.all else _certify(args, console)


def _certify(args: argparse.Namespace, console: Console) -> int:
    matrix = load(args.matrix)
    lane = matrix.lanes.get(args.lane)
    source = args.model or (DEFAULT_MODELS[lane.task] if lane else None)
    if source is None:
        raise UsageError(f"no lane {args.lane!r} (have: {', '.join(matrix.lanes)}). See: synapse matrix explain")
    asked = {"engine": args.engine, "min_placement_share": args.min_placement_share}
    order = Order(lane=args.lane, model=model_name(source), bundle=bundle_of(source, args, console), **asked)
    with console.stages(f"certifying {args.lane} · {order.model}", unit="probes") as progress:
        done = run_orderly(runs.carry_out(order, matrix, args.out, config_of(args), progress=progress))
    evidence = done.evidence
    measured = {"gates": msgspec.to_builtins(evidence.gates), "reported": evidence.reported}
    about = {"report": None if done.page is None else str(done.page), "precision": evidence.precision}
    console.document({**_outcome(done), **measured, **about})
    _page(evidence, console)
    # A certified run whose certificate no host would take is no success.
    good = evidence.verdict == "certified" and (done.certificate is None or done.certificate.valid)
    no_page = "none without jinja2: pip install 'synapse-workers[chat]'"
    console.line(f"{_mark(good, console)}  {done.document}")
    console.line(f"      report: {done.page or no_page}")
    console.hang("      ", f"certificate: {_standing(done.certificate, evidence)}", 6)
    return EXIT_OK if good else EXIT_FAILED


def _outcome(done: CarriedOut) -> dict[str, Any]:
    evidence, certificate = done.evidence, done.certificate
    return {
        "verdict": evidence.verdict,
        "evidence": str(done.document),
        "reasons": evidence.reasons,
        "lane": evidence.lane,
        "engine": evidence.engine.id,
        "model": evidence.model.name,
        "certificate": str(certificate.path) if certificate is not None and certificate.valid else None,
    }


def _standing(certificate: Certificate | None, evidence: Evidence) -> str:
    """Say what the run means for the lane."""
    if certificate is None:
        return "unchanged; this run asked another question than the matrix does"
    if certificate.valid:
        return str(certificate.path)
    return f"{'not valid: ' if evidence.verdict == 'certified' else ''}{'; '.join(certificate.why)}"


def _all(args: argparse.Namespace, console: Console) -> int:
    """Certify what this machine can run, one lane after the other; one that can't be run doesn't stop the rest."""
    if args.model or args.engine or args.min_placement_share is not None:
        raise UsageError("--all takes every model and engine by the matrix's thresholds. See: synapse certify --help")
    matrix, bundles = load(args.matrix), readable(args.models_dir)
    if not bundles:
        raise UsageError(f"no model is installed. Install them: synapse models install {' '.join(catalogue.DEFAULTS)}")
    profile = hardware.detect(hardware.floor_keys(matrix, matrix.engines))
    found, wide = runs.possible(matrix, bundles, profile)
    rows: list[dict[str, Any]] = []
    for number, order in enumerate(found, 1):
        with console.stages(f"{number} of {len(found)}: {order.lane} · {order.engine} · {order.model}") as progress:
            try:
                carried = runs.carry_out(order, wide, args.out, config_of(args), by_machine=True, progress=progress)
                row = _outcome(run_orderly(carried))
                said = ", ".join(row["reasons"]) or row["evidence"]
            except SynapseError as exc:
                row = {"verdict": "error", "evidence": None, "reasons": [exc.code], "lane": order.lane}
                row |= {"engine": order.engine, "model": order.model, "certificate": None}
                said = exc.said("command")
        rows.append(row)
        good = row["verdict"] == "certified" and row["certificate"] is not None
        console.hang(f"{_mark(good, console)}  ", f"{order.lane} · {order.engine} · {order.model}   {said}", 6)
    certified = sum(row["certificate"] is not None for row in rows)
    good = 0 < certified == len(rows)
    console.document({"verdict": "certified" if good else "uncertified", "runs": rows})
    console.line(f"{certified} of {len(rows)} certified. See them: synapse certificates")
    return EXIT_OK if good else EXIT_FAILED


def _recheck(args: argparse.Namespace, console: Console) -> int:
    recorded, _ = documents.read(args.recheck)
    installed = readable(args.models_dir).values()
    bundle = next((one for one in installed if one.digest == recorded.model.manifest_digest), None)
    found = recheck(args.recheck, load(args.matrix), bundle=bundle, share=args.min_placement_share)
    evidence = found.evidence
    verdict = {"verdict": "refused" if found.problems else evidence.verdict, "evidence": str(args.recheck)}
    why = {"problems": found.problems, "reasons": evidence.reasons, "gates": msgspec.to_builtins(evidence.gates)}
    console.document({**verdict, **why, "bundle": None if bundle is None else str(bundle.root)})
    _page(evidence, console)
    for problem in found.problems:
        console.line(f"  {problem}")
    if bundle is None:
        console.line("  Its bundle is not installed here: what the document says of the model was taken as it is.")
    if found.problems:
        console.line(f"{console.style('REFUSED', 'red', 'bold')}  {args.recheck} does not say what was measured")
    else:
        console.line(f"{_mark(found.certified, console)}  {args.recheck}: the verdict follows from the measurements")
    return EXIT_OK if found.certified else EXIT_FAILED


def _mark(passed: bool, console: Console, word: str = "PASS") -> str:
    return console.style(word, "green") if passed else console.style("FAIL", "red", "bold")


def _page(evidence: Evidence, console: Console) -> None:
    model, wanted = evidence.model, evidence.fixture.probes if evidence.fixture else 0
    asked = len(evidence.tokens) if evidence.inputs is not None else 0  # how far the run came
    what = f"{evidence.lane} · {evidence.engine.id} · {model.name} {model.dtype}"
    console.hang("", f"certifying {what} (manifest {model.manifest_digest[:4]}…)   {asked}/{wanted} probes", 0)
    sections = [group.section for group in GROUPS.values()]
    ordered = sorted(evidence.gates, key=lambda gate: sections.index(GROUPS[gate.group].section))
    for section, group in groupby(ordered, lambda gate: GROUPS[gate.group].section):
        gates = list(group)
        # In one line what is as it should be and has no number to look at; what fails has a row of its own.
        if section != "quality" and all(gate.passed for gate in gates):
            said = _setting(evidence) if section == "setting" else " · ".join(map(_placed, gates))
            console.hang(f"  {section:<11} ", f"{said}   {_mark(True, console, 'pass')}", 14)
        else:
            for gate in gates:
                bound = f"{SIGNS[gate.comparison]} {_threshold(gate)}"
                label = rule_of(gate.name, model.task).label
                value, word = f"{label:<20} {_value(gate):<10} {bound:<10}", _mark(gate.passed, console, "pass")
                console.line(f"  {'' if gate is not gates[0] else section:<11} {value} {word}")
    if not evidence.placement_required:
        console.line(f"  {'placement':<11} not required on this engine")
    if evidence.reported:
        console.hang(f"  {'speed':<11} ", _speed(evidence), 14)
    if evidence.precision == "approximate":
        console.line("  precision   approximate: an int8 artifact")
    if evidence.fixture is None:
        console.line("  No reference fixtures (reference_fixture_missing). Make them: synapse build --fixtures")
    if evidence.fault is not None:
        console.line(f"  {evidence.fault.stage}: {evidence.fault.message}")


def _setting(evidence: Evidence) -> str:
    """Say what the first gates made sure of."""
    fixture = evidence.fixture
    said = [f"{fixture.probes if fixture else 0} probes, {ORIGINS[fixture.origin] if fixture else 'no reference'}"]
    said += [f"{evidence.engine.id} on {evidence.engine.device}"]
    return " · ".join([*said, "one worker process"] if evidence.generations else said)


def _placed(gate: Gate) -> str:
    word = rule_of(gate.name).label
    number = f"{_value(gate)}{word}" if gate.name == "speedup" else f"{word} {_value(gate)}"
    return f"{number} {SIGNS[gate.comparison]} {_threshold(gate)}"


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
    if "rows_per_s_32x64" in reported:
        parts.append(f"{reported['rows_per_s_32x64']:,.0f} texts/s at 32 x 64")
    if evidence.performance.single_ms:
        parts.append(f"p50 {reported['single_p50_ms']:.1f} ms, p95 {reported['single_p95_ms']:.1f} ms single")
    if "prefix_share" in reported:
        parts.append(f"prefix share {reported['prefix_share']:.3f}")
    return " · ".join(parts) or "not measured"


# --- certificates ----------------------------------------------------------------------------------------------------


def _certificates(args: argparse.Namespace, console: Console) -> int:
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
