"""``synapse logs``: what workers wrote to stdout and stderr, the last of it or as it comes."""

from __future__ import annotations

import argparse
import sys
from typing import Any, Final

from synapse_host.cli.console import Console
from synapse_host.cli.parser import Parser
from synapse_host.cli.remote import connect, runtime_dir
from synapse_host.errors import EXIT_OK, InvalidRequest

WAIT_S: Final = 30.0


def configure(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.description = (
        "Print the last 8 KiB that each lane's workers wrote, across restarts, every line tagged with lane and stream."
    )
    parser.examples("""
        synapse logs
        synapse logs embed
        synapse logs embed -f
    """)
    parser.add_argument("lane", nargs="?", metavar="LANE", help="lane or model (default: all lanes)")
    parser.add_argument("-f", "--follow", action="store_true", help="go on printing what comes, until Ctrl-C")


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the verb."""
    if args.follow and console.json:
        raise InvalidRequest("--json prints one document, --follow never ends: choose one")
    with connect(runtime_dir(args), args.deadline) as remote:
        logs = remote.post("/synapse/logs", lane=args.lane)["logs"]
        tails = {lane_id: Tail(lane_id) for lane_id in logs}
        if console.json:
            state = remote.get("/synapse/lanes")
            lanes = {lane_id: lane for lane_id, lane in state["lanes"].items() if lane_id in logs}
            workers = [worker for worker in state["workers"] if worker["lane"] in logs]
            lines = {lane_id: tails[lane_id].lines(log) for lane_id, log in logs.items()}
            console.document({**state, "lanes": lanes, "workers": workers, "logs": lines})
            return EXIT_OK
        after: dict[str, int] = {}
        while True:
            for lane_id, log in logs.items():
                after[lane_id] = log["position"]
                if args.follow and log["missed"] and lane_id in tails and tails[lane_id].started:
                    console.note(f"{log['missed']} bytes of {lane_id} were lost: it writes faster than they are read")
                for line in tails[lane_id].lines(log, end=not args.follow):
                    console.line(line)
            sys.stdout.flush()
            if not args.follow:
                return EXIT_OK
            logs = remote.post("/synapse/logs", lane=args.lane, after=after, wait=WAIT_S)["logs"]


class Tail:
    """Turns segments of one lane into tagged lines; a line that isn't finished yet waits for its end."""

    def __init__(self, lane_id: str) -> None:
        self._lane_id = lane_id
        self._partial: dict[str, str] = {}
        self.started = False

    def lines(self, log: dict[str, Any], *, end: bool = True) -> list[str]:
        """Return the lines that *log* completes; with *end* also the unfinished ones."""
        self.started = True
        found = []
        for stream, text in log["segments"]:
            *whole, rest = (self._partial.pop(stream, "") + text).split("\n")
            found += [self._tagged(stream, line) for line in whole]
            if rest:
                self._partial[stream] = rest
        if end:
            found += [self._tagged(stream, rest) for stream, rest in self._partial.items()]
            self._partial.clear()
        return found

    def _tagged(self, stream: str, line: str) -> str:
        return f"{self._lane_id} [{stream}] {line.removesuffix(chr(13))}"
