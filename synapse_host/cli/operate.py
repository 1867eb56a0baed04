"""``synapse load``, ``unload``, ``probe`` and ``ping``: one request to the running host, and what came of it."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from synapse_host.cli.console import Console
from synapse_host.cli.parser import Parser
from synapse_host.cli.ps import busy_line, duration
from synapse_host.cli.remote import connect, runtime_dir
from synapse_host.errors import EXIT_FAILED, EXIT_OK, SynapseError, revive

REFRESH_S: Final = 0.2
PING_S: Final = 5.0
"""Seconds that a worker has for its PONG where no deadline is given."""

_HELP: Final = {
    "load": (
        "Start the worker of a model's lane in the running host and load the model, so that the first request doesn't\n"
        "wait. On a quarantined or refused lane this is the reload that opens it again; a lane of kind legacy that is\n"
        "quarantined needs synapse probe.",
        "synapse load minilm\nsynapse load minilm --lane quiet --deadline 60",
    ),
    "unload": (
        "Unload a model from its worker in the running host; quarantine and strikes of the lane are forgotten, but\n"
        "for the quarantine of a lane of kind legacy: see synapse probe.\n"
        "The next request loads it again. Refused while requests run.",
        "synapse unload minilm",
    ),
    "probe": (
        "Prove a lane of the running host: its worker is stopped, a fresh one started, the model loaded and one small\n"
        "request served. A lane of kind legacy that two crashes have shut is opened by this alone; one that fails its\n"
        "probe stays shut.",
        "synapse probe embed\nsynapse probe embed --deadline 60",
    ),
    "ping": (
        "PING the workers of the running host, each in turn behind what its lane is doing. Exit code 1 when one does\n"
        f"not answer within the deadline (default: {PING_S:g} s), or when the lane that was named has no worker.",
        "synapse ping\nsynapse ping embed",
    ),
}
"""What each verb's help says, and its examples."""


def configure(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.description, examples = _HELP[parser.verb]
    parser.examples(examples)
    if parser.verb in ("load", "unload"):
        parser.add_argument("model", metavar="M", help="model of the running host")
        parser.add_argument("--lane", metavar="L", help="lane of the matrix (default: the model's task)")
    elif parser.verb == "probe":
        parser.add_argument("lane", metavar="LANE", help="lane, or model that has only one")
    else:
        parser.add_argument("lane", nargs="?", metavar="LANE", help="lane or model (default: every lane with a worker)")


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the verb."""
    directory, verb = runtime_dir(args), args.verb
    limit = args.deadline or (PING_S if verb == "ping" else None)
    fields = {"lane": args.lane, "model": getattr(args, "model", None)}
    # The host takes no deadline for an unload: this end gives up.
    fields |= {} if verb == "unload" else {"timeout": limit}
    with connect(directory, args.deadline) as remote, _watched(directory, args, console):
        state = remote.post(f"/synapse/{verb}", **fields)
    console.document(state)
    if verb == "ping":
        return _pings(state, console, named=args.lane is not None)
    for lane_id, lane in state["lanes"].items():
        if verb == "load":
            took = "" if lane["load_s"] is None else f" (LOAD took {lane['load_s']:.1f} s)"
            console.line(f"{args.model} is loaded on lane {lane_id}, {lane['engine']}, pid {lane['worker_pid']}{took}")
        elif verb == "unload":
            console.line(f"{args.model} is unloaded from lane {lane_id}")
        else:
            console.line(f"{lane_id} is proven and open: pid {lane['worker_pid']}, generation {lane['generation']}")
    return EXIT_OK


def _pings(state: dict[str, Any], console: Console, *, named: bool) -> int:
    """Say which workers answered; *named*: a lane was asked for, and one without a worker is a failure."""
    code = EXIT_OK
    for lane_id, lane in state["lanes"].items():
        ping = state["pings"].get(lane_id)
        if ping is None:
            console.line(f"{lane_id}: no worker; start it with: synapse load {lane['model']} --lane {lane_id}")
            code = EXIT_FAILED if named else code
        elif "error" in ping:
            console.line(f"{lane_id}: no answer: {revive(ping['error']).message}")
            code = EXIT_FAILED
        else:
            worker = f"pid {lane['worker_pid']}, {lane['rss_mb']} MB, generation {lane['generation']}"
            console.line(f"{lane_id}: answered in {ping['round_trip_ms']:.1f} ms ({worker})")
    if not state["lanes"]:
        console.line(f"the host is up for {duration(state['host']['uptime_s'])}; it has no lanes")
    return code


@contextmanager
def _watched(directory: Path, args: argparse.Namespace, console: Console) -> Iterator[None]:
    """Show on a terminal how far a load is: a thread asks meanwhile, for the answer comes at its end."""
    if args.verb != "load" or not console.bars:
        yield
        return
    done = threading.Event()

    def watch() -> None:
        # What is wrong with the host is said by the load itself.
        with suppress(SynapseError), connect(directory) as remote, console.status() as show:
            while not done.wait(REFRESH_S):
                lanes = remote.get("/synapse/lanes")["lanes"].items()
                show(busy_line({lane_id: lane for lane_id, lane in lanes if lane["model"] == args.model}))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(REFRESH_S * 2)
