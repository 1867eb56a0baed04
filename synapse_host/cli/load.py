"""``synapse load``: start a lane's worker in the running host and load its model."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from synapse_host.cli.console import Console
from synapse_host.cli.parser import Parser
from synapse_host.cli.ps import loading_line
from synapse_host.cli.remote import connect, runtime_dir
from synapse_host.errors import EXIT_OK, SynapseError

REFRESH_S: Final = 0.2


def configure(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.description = (
        "Start the worker of a model's lane in the running host and load the model, so that the first request doesn't\n"
        "wait. On a quarantined or refused lane this is the reload that opens it again; a lane of kind legacy that is\n"
        "quarantined needs synapse probe."
    )
    parser.examples("""
        synapse load minilm
        synapse load minilm --lane quiet --deadline 60
    """)
    parser.add_argument("model", metavar="M", help="model of the running host")
    parser.add_argument("--lane", metavar="L", help="lane of the matrix (default: the model's task)")


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the verb."""
    directory = runtime_dir(args)
    with connect(directory, args.deadline) as remote, _watched(directory, args.model, console):
        state = remote.post("/synapse/load", model=args.model, lane=args.lane, timeout=args.deadline)
    console.document(state)
    for lane_id, lane in state["lanes"].items():
        took = "" if lane["load_s"] is None else f" (LOAD took {lane['load_s']:.1f} s)"
        console.line(f"{args.model} is loaded on lane {lane_id}, {lane['engine']}, pid {lane['worker_pid']}{took}")
    return EXIT_OK


@contextmanager
def _watched(directory: Path, model: str, console: Console) -> Iterator[None]:
    """Show on a terminal how far the load is: a thread asks meanwhile, for the answer comes at its end."""
    if not console.bars:
        yield
        return
    done = threading.Event()

    def watch() -> None:
        # What is wrong with the host is said by the load itself.
        with suppress(SynapseError), connect(directory) as remote, console.status() as show:
            while not done.wait(REFRESH_S):
                lanes = remote.get("/synapse/lanes")["lanes"].items()
                show(loading_line({lane_id: lane for lane_id, lane in lanes if lane["model"] == model}))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(REFRESH_S * 2)
