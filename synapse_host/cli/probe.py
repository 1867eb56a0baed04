"""``synapse probe``: prove a lane of the running host with a fresh worker, and open it."""

from __future__ import annotations

import argparse

from synapse_host.cli.console import Console
from synapse_host.cli.parser import Parser
from synapse_host.cli.remote import connect, runtime_dir
from synapse_host.errors import EXIT_OK


def configure(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.description = (
        "Prove a lane of the running host: its worker is stopped, a fresh one started, the model loaded and one small\n"
        "request served. A lane of kind legacy that two crashes have shut is opened by this alone; one that fails its\n"
        "probe stays shut."
    )
    parser.examples("""
        synapse probe embed
        synapse probe embed --deadline 60
    """)
    parser.add_argument("lane", metavar="LANE", help="lane, or model that has only one")


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the verb."""
    with connect(runtime_dir(args), args.deadline) as remote:
        state = remote.post("/synapse/probe", lane=args.lane, timeout=args.deadline)
    console.document(state)
    for lane_id, lane in state["lanes"].items():
        console.line(f"{lane_id} is proven and open: pid {lane['worker_pid']}, generation {lane['generation']}")
    return EXIT_OK
