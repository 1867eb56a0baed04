"""``synapse ps``: what a running host holds: lanes, their workers, how they fare."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from synapse_host.cli.console import Console
from synapse_host.cli.parser import Parser
from synapse_host.cli.remote import connect, runtime_dir
from synapse_host.errors import EXIT_OK


def configure(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.description = "Show the lanes and workers of the running host, from what it knows: no worker is asked."
    parser.examples("""
        synapse ps
        synapse ps --json
        synapse ps --metrics
    """)
    parser.add_argument("--metrics", action="store_true", help="print the host's metrics as Prometheus text instead")


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the verb."""
    with connect(runtime_dir(args), args.deadline) as remote:
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
    console.line(
        f"synapse {host['version']} · pid {host['pid']} · up {duration(host['uptime_s'])} · "
        f"{host['runtime_dir']}{stopping}"
    )
    console.line(host["url"])
    console.line()
    lanes_page(state, console)


def lanes_page(state: dict[str, Any], console: Console) -> None:
    """Print the table of lanes."""
    colours = {"idle": "green", "serving": "green", "loading": "cyan", "quarantined": "red", "refused": "red"}
    rows = [("LANE", "STATE", "MODEL", "ENGINE", "WORKER", "MEMORY", "HEARD", "")]
    for lane_id, lane in state["lanes"].items():
        worker, resting = lane["worker_pid"], lane["worker_pid"] is None
        rows.append(
            (
                lane_id,
                "not loaded" if resting and lane["state"] in ("idle", "stopped") else lane["state"],
                lane["model"],
                lane["engine"] or "-",
                "-" if resting else f"pid {worker} #{lane['generation']}",
                "-" if lane["rss_mb"] is None else f"{lane['rss_mb']} MB",
                "-" if lane["age_s"] is None else f"{duration(lane['age_s'])} ago",
                remarks(lane),
            )
        )
    if len(rows) == 1:
        console.line("no lanes: no model is installed. See: synapse models")
        return
    columns, below = _fitting(rows, console.width())
    widths = [max(len(row[column]) for row in rows) for column in columns]
    for index, row in enumerate(rows):
        cells = [row[column].ljust(width) for column, width in zip(columns, widths, strict=True)]
        if index == 0:
            cells = [console.style(cell.rstrip() if cell is cells[-1] else cell, "dim") for cell in cells]
        else:
            cells[1] = console.style(cells[1], colours.get(row[1], "dim"))
        console.line("  " + "  ".join(cells).rstrip())
        if below and index and row[-1]:
            console.hang("    ", row[-1], 4)


def _fitting(rows: Sequence[tuple[str, ...]], width: int) -> tuple[list[int], bool]:
    """Return the columns that fit a terminal *width* wide, and whether remarks go below their lane; 0 is any width.

    The remarks leave the line first, then what was heard when, memory, the engine.
    """
    columns = list(range(len(rows[0])))
    needed = {column: 2 + max(len(row[column]) for row in rows) for column in columns}
    for spare in (7, 6, 5, 3):
        if not width or sum(needed[column] for column in columns) <= width:
            break
        columns.remove(spare)
    return columns, 7 not in columns


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
