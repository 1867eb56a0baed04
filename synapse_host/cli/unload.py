"""``synapse unload``: free a model in the running host and forget its lane's strikes."""

from __future__ import annotations

import argparse

from synapse_host.cli.console import Console
from synapse_host.cli.parser import Parser
from synapse_host.cli.remote import connect, runtime_dir
from synapse_host.errors import EXIT_OK


def configure(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.description = (
        "Unload a model from its worker in the running host; quarantine and strikes of the lane are forgotten, but\n"
        "for the quarantine of a lane of kind legacy: see synapse probe.\n"
        "The next request loads it again. Refused while requests run."
    )
    parser.examples("""
        synapse unload minilm
    """)
    parser.add_argument("model", metavar="M", help="model of the running host")
    parser.add_argument("--lane", metavar="L", help="lane of the matrix (default: the model's task)")


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the verb."""
    with connect(runtime_dir(args), args.deadline) as remote:
        state = remote.post("/synapse/unload", model=args.model, lane=args.lane)
    console.document(state)
    for lane_id in state["lanes"]:
        console.line(f"{args.model} is unloaded from lane {lane_id}")
    return EXIT_OK
