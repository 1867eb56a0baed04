"""The verbs about the running host: ``ps`` shows it, ``logs`` what its workers wrote; ``load``, ``unload``, ``probe``
and ``ping`` are one request each, and what came of it."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from synapse_host.cli.console import Console
from synapse_host.cli.parser import Parser
from synapse_host.cli.remote import Remote, connect, runtime_dir
from synapse_host.errors import EXIT_FAILED, EXIT_OK, InvalidRequest, SynapseError, revive

REFRESH_S: Final = 0.2
PING_S: Final = 5.0
"""Seconds that a worker has for its PONG where no deadline is given."""

WAIT_S: Final = 30.0
"""Seconds that ``logs -f`` lets the host wait for something new, again and again."""

_HELP: Final = {
    "ps": (
        "Show the lanes and workers of the running host, from what it knows: no worker is asked.",
        "synapse ps\nsynapse ps --json\nsynapse ps --metrics",
    ),
    "logs": (
        "Print the last 8 KiB that each lane's workers wrote, across restarts, every line tagged with lane and stream.",
        "synapse logs\nsynapse logs embed\nsynapse logs embed -f",
    ),
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
    parser.describe("\nExamples:\n".join(_HELP[parser.verb]))
    match parser.verb:
        case "ps":
            parser.flag("--metrics", help="print the host's metrics instead (Prometheus text)")
        case "logs":
            parser.option("lane", "LANE", "lane or model (default: all lanes)", nargs="?")
            parser.flag("-f", "--follow", help="go on printing what comes, until Ctrl-C")
        case "load" | "unload":
            parser.option("model", "M", "model of the running host")
            parser.option("--lane", "L", "lane of the matrix (default: the model's task)")
        case "probe":
            parser.option("lane", "LANE", "lane, or model that has only one")
        case _:
            parser.option("lane", "LANE", "lane or model (default: every lane with a worker)", nargs="?")


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the verb."""
    directory, verb = runtime_dir(args), args.verb
    if verb == "logs" and args.follow and console.json:
        raise InvalidRequest("--json prints one document, --follow never ends: choose one")
    with connect(directory, args.deadline) as remote:
        if verb == "ps":
            return _ps(remote, args, console)
        if verb == "logs":
            return _logs(remote, args, console)
        fields = {"lane": args.lane, "model": getattr(args, "model", None)}
        if verb != "unload":  # the host takes no deadline for an unload: this end gives up
            fields["timeout"] = args.deadline or (PING_S if verb == "ping" else None)
        with _watched(directory, args, console):
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


def _logs(remote: Remote, args: argparse.Namespace, console: Console) -> int:
    logs = remote.post("/synapse/logs", lane=args.lane)["logs"]
    partial: dict[str, dict[str, str]] = {lane_id: {} for lane_id in logs}
    if console.json:
        state = remote.get("/synapse/lanes")
        lanes = {lane_id: lane for lane_id, lane in state["lanes"].items() if lane_id in logs}
        workers = [worker for worker in state["workers"] if worker["lane"] in logs]
        lines = {lane_id: _lines(lane_id, log, {}, end=True) for lane_id, log in logs.items()}
        console.document({**state, "lanes": lanes, "workers": workers, "logs": lines})
        return EXIT_OK
    after: dict[str, int] = {}
    while True:
        for lane_id, log in logs.items():
            if lane_id in after and log["missed"]:
                console.note(f"{log['missed']} bytes of {lane_id} were lost: it writes faster than they are read")
            after[lane_id] = log["position"]
            for line in _lines(lane_id, log, partial[lane_id], end=not args.follow):
                console.line(line)
        sys.stdout.flush()
        if not args.follow:
            return EXIT_OK
        logs = remote.post("/synapse/logs", lane=args.lane, after=after, wait=WAIT_S)["logs"]


def _lines(lane_id: str, log: dict[str, Any], partial: dict[str, str], *, end: bool) -> list[str]:
    """Return the lines that a log's segments complete, tagged with lane and stream; with *end* the unfinished too.

    *partial*: what each stream has written of a line that isn't finished yet.
    """
    found = []
    for stream, text in log["segments"]:
        *whole, partial[stream] = (partial.get(stream, "") + text).split("\n")
        found += [(stream, line) for line in whole]
    if end:
        found += [(stream, rest) for stream, rest in partial.items() if rest]
    return [f"{lane_id} [{stream}] {line.removesuffix(chr(13))}" for stream, line in found]


# --- ps: the state of a host for people ------------------------------------------------------------------------------


def _ps(remote: Remote, args: argparse.Namespace, console: Console) -> int:
    if args.metrics:
        text = remote.text("/metrics")
        console.document({"text": text})
        console.line(text.rstrip("\n"))
        return EXIT_OK
    state = remote.get("/synapse/lanes")
    console.document(state)
    page(state, console)
    return EXIT_OK


def page(state: dict[str, Any], console: Console) -> None:
    """Print what a person wants to see of a host's state."""
    host = state["host"]
    stopping = console.style(" · stopping", "yellow") if host["stopping"] else ""
    about = f"synapse {host['version']} · pid {host['pid']} · up {duration(host['uptime_s'])}"
    console.line(f"{about} · {host['runtime_dir']}{stopping}")
    console.line(host["url"])
    console.line()
    lanes_page(state, console)


def lanes_page(state: dict[str, Any], console: Console) -> None:
    """Print the table of lanes; one that is too wide has its remarks below the lanes, and fewer columns."""
    if not state["lanes"]:
        console.line("no lanes: no model is installed. See: synapse models")
        return
    rows: list[tuple[str, ...]] = [("LANE", "STATE", "MODEL", "ENGINE", "WORKER", "MEMORY", "HEARD", "")]
    rows += [_row(lane_id, lane) for lane_id, lane in state["lanes"].items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    columns, width = list(range(len(widths))), console.width()
    for spare in (7, 6, 5, 3):  # the remarks, what was heard when, memory, the engine
        if not width or sum(widths[column] + 2 for column in columns) <= width:
            break
        columns.remove(spare)
    colours = {"idle": "green", "serving": "green", "loading": "cyan", "quarantined": "red", "refused": "red"}
    for index, row in enumerate(rows):
        cells = [row[column].ljust(widths[column]) for column in columns]
        if index:
            cells[1] = console.style(cells[1], colours.get(row[1], "dim"))
        line = "  " + "  ".join(cells).rstrip()
        console.line(line if index else console.style(line, "dim"))
        if row[-1] and len(row) - 1 not in columns:
            console.hang("    ", row[-1], 4)


def _row(lane_id: str, lane: dict[str, Any]) -> tuple[str, ...]:
    worker, resting = lane["worker_pid"], lane["worker_pid"] is None
    return (
        lane_id,
        "not loaded" if resting and lane["state"] in ("idle", "stopped") else lane["state"],
        lane["model"],
        lane["engine"] or "-",
        "-" if resting else f"pid {worker} #{lane['generation']}",
        "-" if lane["rss_mb"] is None else f"{lane['rss_mb']} MB",
        "-" if lane["age_s"] is None else f"{duration(lane['age_s'])} ago",
        remarks(lane),
    )


def remarks(lane: dict[str, Any]) -> str:
    """Return what else matters about a lane now."""
    said = []
    progress = lane.get("progress")
    if progress:
        said.append(f"{progress['stage']}, {progress['completed']} units done, {duration(progress['running_s'])}")
    if lane["worker_pid"] is not None and not lane["models"] and lane["state"] != "loading":
        said.append("model unloaded")
    if lane.get("waiting"):
        said.append(f"{lane['waiting']} waiting")
    remaining = lane["quarantine_remaining_s"]
    if lane["state"] == "quarantined":
        said.append("until a probe" if remaining is None else f"for another {remaining:.0f} s")
    elif lane["strikes"]:
        said.append(f"{lane['strikes']} strike{'s' if lane['strikes'] > 1 else ''}")
    fault = lane.get("last_fault")
    if fault and lane["strikes"]:
        said.append(f"last: {fault['signal'] or fault['cause']} during {fault['stage']}")
    if lane.get("reason"):
        said.append(str(lane["reason"]))
    return ", ".join(said)


def busy_line(lanes: dict[str, Any]) -> str:
    """Return what lanes work at, each with its worker's count of finished work (a MiB read, layers, tokens, …)."""
    parts = []
    for lane_id, lane in lanes.items():
        progress = lane.get("progress")
        if progress:
            stage, done = progress["stage"], progress["completed"]
            label = lane_id if lane_id == stage else f"{lane_id} {stage}"
            parts.append(f"{label}: {f'{done} steps done, ' if done else ''}{progress['running_s']:.0f} s")
        elif lane["state"] == "loading":
            parts.append(f"{lane_id}: starting a worker for {lane['model']}")
    return " · ".join(parts) or "waiting"


def duration(seconds: float) -> str:
    """Return a length of time for people."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    return f"{minutes} min" if hours == 0 else f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d"
