"""``synapse ping``: do the workers of a running host answer?"""

from __future__ import annotations

import argparse
from typing import Final

from synapse_host.cli.console import Console
from synapse_host.cli.parser import Parser
from synapse_host.cli.ps import duration
from synapse_host.cli.remote import connect, runtime_dir
from synapse_host.errors import EXIT_FAILED, EXIT_OK, revive

WAIT_S: Final = 5.0


def configure(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.description = (
        "PING the workers of the running host, each in turn behind what its lane is doing. Exit code 1 when one does\n"
        f"not answer within the deadline (default: {WAIT_S:g} s), or when the lane that was named has no worker."
    )
    parser.examples("""
        synapse ping
        synapse ping embed
    """)
    parser.add_argument("lane", nargs="?", metavar="LANE", help="lane or model (default: every lane with a worker)")


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the verb."""
    with connect(runtime_dir(args), args.deadline) as remote:
        document = remote.post("/synapse/ping", lane=args.lane, timeout=args.deadline or WAIT_S)
    console.document(document)
    pings, code = document["pings"], EXIT_OK
    for lane_id, lane in document["lanes"].items():
        ping = pings.get(lane_id)
        if ping is None:
            console.line(f"{lane_id}: no worker; start it with: synapse load {lane['model']} --lane {lane_id}")
            code = code if args.lane is None else EXIT_FAILED
        elif "error" in ping:
            console.line(f"{lane_id}: no answer: {revive(ping['error']).message}")
            code = EXIT_FAILED
        else:
            worker = f"pid {lane['worker_pid']}, {lane['rss_mb']} MB, generation {lane['generation']}"
            console.line(f"{lane_id}: answered in {ping['round_trip_ms']:.1f} ms ({worker})")
    if not document["lanes"]:
        console.line(f"the host is up for {duration(document['host']['uptime_s'])}; it has no lanes")
    return code
