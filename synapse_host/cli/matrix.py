"""check: validate the matrix; an error names file, line, column, key and the nearest valid one.
explain: per lane the chosen engine, and why each other one was passed over on this machine.
schema: the file's JSON Schema, for an editor.

Examples:
  synapse matrix check
  synapse matrix check --matrix my_matrix.yaml
  synapse matrix explain embed
  synapse matrix schema
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from engines.bundle import manifest
from engines.bundle.manifest import Bundle
from synapse_host.certificates.admission import speeds as speeds_here
from synapse_host.cli.console import Console
from synapse_host.cli.parser import Parser, UsageError, nearest
from synapse_host.cli.session import DEFAULT_MODELS, bundle_of
from synapse_host.errors import EXIT_HARDWARE, EXIT_OK, BundleInvalid, SynapseError
from synapse_host.models import catalogue
from synapse_host.placement import hardware
from synapse_host.placement.matrix import HardwareMatrix, Lane, json_schema
from synapse_host.placement.matrix import load as load_matrix
from synapse_host.placement.select import Considered, Placement, select


def configure(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.option("action", "check|explain|schema", "what to do", choices=["check", "explain", "schema"])
    parser.option("lane", "LANE", "one lane (default: all)", nargs="?")
    parser.option("--model", "M", "explain for this bundle (default: the lane's default model, if installed)")


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the verb."""
    if args.action == "schema":
        # The schema is the document, with --json and without.
        print(json.dumps(json_schema(), indent=2))
        return EXIT_OK
    matrix = load_matrix(args.matrix)
    if args.lane is not None and args.lane not in matrix.lanes:
        near = nearest(args.lane, matrix.lanes) or f" (have: {', '.join(matrix.lanes)})"
        raise UsageError(f"no lane {args.lane!r} in {matrix.name}{near}")
    lanes = [matrix.lanes[args.lane]] if args.lane else list(matrix.lanes.values())
    if args.action == "check":
        console.document({"matrix": str(matrix.path), "lanes": [_listed(lane) for lane in lanes]})
        size = f"{len(matrix.hardware)} hardware classes, {len(matrix.engines)} engines, {len(matrix.lanes)} lanes"
        console.line(f"{matrix.name}: ok, {size}")
        return EXIT_OK
    return _explain(matrix, lanes, args, console)


def _listed(lane: Lane) -> dict[str, Any]:
    # The keys of `explain` too: nothing is decided here, for no hardware is looked at.
    why = "check looks at no hardware; see synapse matrix explain"
    considered = [Considered(engine, "not_reached", why).to_dict() for engine in lane.engines]
    facts = {"task": lane.task, "kind": lane.kind, "engines": list(lane.engines), "pin": lane.pin}
    return {"lane": lane.id, "placement": None, "considered": considered, **facts}


def _explain(matrix: HardwareMatrix, lanes: list[Lane], args: argparse.Namespace, console: Console) -> int:
    keys = hardware.floor_keys(matrix, {id for lane in lanes for id in lane.engines})
    profile = hardware.detect(keys)
    documents = []
    missing = False
    for number, lane in enumerate(lanes):
        bundle, remark = _bundle(lane, args, console)
        speeds = speeds_here(matrix, [bundle] if bundle else [], profile)
        placement = select(matrix, lane_id=lane.id, profile=replace(profile, speeds=speeds), bundle=bundle)
        missing = missing or placement.engine is None
        considered = [item.to_dict() for item in placement.considered]
        model = bundle.manifest.model_id if bundle else None
        documents.append({"lane": lane.id, "model": model, "placement": placement.engine, "considered": considered})
        if number:
            console.line()
        _page(matrix, lane, placement, remark, console)
    console.document({"matrix": str(matrix.path), "host": profile.summary(), "lanes": documents})
    # Asked about one lane, 'no engine fits' is the failure it would be for a request.
    return EXIT_HARDWARE if missing and args.lane else EXIT_OK


def _bundle(lane: Lane, args: argparse.Namespace, console: Console) -> tuple[Bundle | None, str]:
    """Return the bundle to explain for; without one the question is answered for any bundle of a fitting format."""
    if args.model is not None:
        bundle = manifest.read(bundle_of(args.model, args, console))
        if bundle.manifest.task != lane.task:
            if args.lane:
                what = f"{args.model} is a model to {bundle.manifest.task}, lane {lane.id} is to {lane.task}"
                raise BundleInvalid(what)
            return None, f"{args.model} is not for this task; formats not looked at"
        return bundle, ""
    name = DEFAULT_MODELS[lane.task]
    path = catalogue.installed(args.models_dir).get(name)
    if path is None:
        return None, f"{name} is not installed; formats not looked at"
    try:
        return manifest.read(path), ""
    except (SynapseError, manifest.BundleError) as exc:
        return None, f"{name}: {exc}"


def _page(matrix: HardwareMatrix, lane: Lane, placement: Placement, remark: str, console: Console) -> None:
    title = console.style(f"lane {lane.id}", "bold")
    console.line(f"{title} (task {lane.task}, {lane.kind})  {matrix.name}:{lane.line}")
    width = max(len(item.engine) for item in placement.considered)
    words = {"yes": console.style("YES", "green", "bold"), "no": "no ", "not_reached": "-  "}
    for number, item in enumerate(placement.considered, 1):
        console.hang(f"  {number} {item.engine:<{width}}  {words[item.verdict]}  ", item.reason, width + 11)
    if placement.engine is None:
        console.line(f"  {console.style('no engine fits', 'red')}: a request to this lane ends with backend_missing")
    elif matrix.engines[placement.engine].command is not None:
        console.line("  (its worker command was not asked; synapse doctor runs its probe)")
    if lane.require_certificate:
        console.line(f"  (serves only with a certificate: synapse certify {lane.id})")
    if remark:
        console.line(f"  ({remark})")
