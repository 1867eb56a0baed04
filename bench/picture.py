"""The report as one self-contained HTML file: ratios with their spread and target, and every figure."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

WIDTH, LABEL, RIGHT, LINE = 1120, 520, 150, 26
STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1160px; padding: 0 1em; color: #1d2733;
 background: #fff }
h1 { font-size: 1.5em; margin-bottom: .2em } h2 { font-size: 1.1em; margin: 2em 0 .4em } p { margin: .3em 0;
 color: #52606d }
svg { width: 100%; height: auto; display: block } text { font: 12px system-ui, sans-serif; fill: #1d2733 }
.dim { fill: #7b8794 } .ok { fill: #2f9e6e } .no { fill: #d9822b } .plain { fill: #5b7fb5 }
 .axis { stroke: #cbd2d9 }
.whisker { stroke: #1d2733; stroke-width: 1.5 } .target { stroke: #b42318; stroke-width: 2 }
table { border-collapse: collapse; width: 100%; margin-top: .5em } th, td { text-align: left; padding: .3em .6em;
 border-bottom: 1px solid #e4e7eb }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums } td.note { color: #7b8794; font-size: 12px }
@media (prefers-color-scheme: dark) { body { background: #14181d; color: #e4e7eb } text { fill: #e4e7eb }
 .dim, td.note { fill: #9aa5b1; color: #9aa5b1 }
 .whisker { stroke: #e4e7eb } .axis { stroke: #3e4c59 } th, td { border-color: #323f4b } p { color: #9aa5b1 } }
"""


def page(document: dict[str, Any]) -> str:
    """Return the HTML of a report document (``__main__.report``)."""
    rows, machine = document["rows"], document["machine"]
    ratios = [row for row in rows if row["ratio"] is not None and not row.get("extra")]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>Synapse workers: benchmarks</title>",
        f"<style>{STYLE}</style><h1>Synapse workers: benchmarks</h1>",
        f"<p>{_text(machine['cpu'])}, {machine['cores']} cores, {machine['memory_gb']} GB · "
        f"{_text(machine['system'])} · Python {machine['python']}</p>",
        f"<p>{_text(document['made'])}, {'quick' if document['quick'] else 'full'} run of {document['seconds']:.0f} s; "
        f"load average {document['load']['before']} before, {document['load']['after']} after. Everything in one run, "
        "contestants taking turns within each round; bars are medians of rounds, whiskers the lowest and highest.</p>",
    ]
    if document["load"]["before"] and document["load"]["before"] > 0.7 * machine["cores"]:
        parts.append(
            "<p><b>The machine was busy with other work: read the ratios with care, the figures not at all.</b></p>"
        )
    if ratios:
        parts += ["<h2>Ours against the other one (1 = the same, more is better; red: the target)</h2>", bars(ratios)]
    parts += ["<h2>All figures</h2>", table(rows), "</html>"]
    return "\n".join(parts)


def bars(rows: Sequence[dict[str, Any]]) -> str:
    """Return horizontal bars of ratios, with whiskers and target ticks, on a logarithmic axis around 1."""
    high = max([2.0, *(row["spread"][1] for row in rows), *(row["target"] or 0 for row in rows)])
    low = min([0.5, *(row["spread"][0] for row in rows), *(row["target"] or 9 for row in rows)])
    span = WIDTH - LABEL - RIGHT

    def place(value: float) -> float:
        return LABEL + span * (math.log(max(value, low)) - math.log(low)) / (math.log(high) - math.log(low))

    height = LINE * len(rows) + 30
    out = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="ratios">']
    for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50):
        if low <= tick <= high:
            x = place(tick)
            out.append(f'<line class="axis" x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{height - 20}"/>')
            out.append(f'<text class="dim" x="{x:.1f}" y="{height - 5}" text-anchor="middle">{tick:g}</text>')
    for index, row in enumerate(rows):
        y = index * LINE + 4
        kind = {True: "ok", False: "no", None: "plain"}[row["reached"] if row["target_on"] == "ratio" else None]
        start, end = sorted((place(1), place(row["ratio"])))
        out.append(f'<text x="{LABEL - 10}" y="{y + 13}" text-anchor="end">{_text(_label(row))}</text>')
        out.append(
            f'<rect class="{kind}" x="{start:.1f}" y="{y}" width="{max(1.0, end - start):.1f}" height="{LINE - 9}"/>'
        )
        a, b = (place(value) for value in row["spread"])
        middle = y + (LINE - 9) / 2
        out.append(f'<line class="whisker" x1="{a:.1f}" y1="{middle}" x2="{b:.1f}" y2="{middle}"/>')
        if row["target"] is not None and row["target_on"] == "ratio":
            x = place(row["target"])
            out.append(f'<line class="target" x1="{x:.1f}" y1="{y - 2}" x2="{x:.1f}" y2="{y + LINE - 7}"/>')
        wanted = f"  (target {row['target']:g})" if row["target"] is not None and row["target_on"] == "ratio" else ""
        out.append(f'<text x="{WIDTH - RIGHT + 8}" y="{y + 13}">{row["ratio"]:.2f}{wanted}</text>')
    return "\n".join([*out, "</svg>"])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return every row with its figures."""
    head = "<tr><th>what<th class=n>ours<th>unit<th>other<th class=n>figure<th class=n>ratio<th>spread"
    head += "<th class=n>target<th>"
    lines = [head]
    for row in rows:
        spread = "" if row["spread"] is None else f"{row['spread'][0]:.2f} – {row['spread'][1]:.2f}"
        verdict = {True: "reached", False: "not reached", None: ""}[row["reached"]]
        target = (
            ""
            if row["target"] is None
            else f"{row['target']:g}" + (f" {row['unit']}" if row["target_on"] == "ours" else "")
        )
        lines.append(
            f"<tr><td>{_text(row['name'])}<td class=n>{number(row['ours'])}<td>{_text(row['unit'])}"
            f"<td>{_text(row['rival_name'])}<td class=n>{number(row['rival'])}<td class=n>{number(row['ratio'])}"
            f"<td>{spread}<td class=n>{target}<td>{verdict or _text(row['status'])}"
            f"<tr><td class=note colspan=9>{_text(row['note'])} (load {row['load']})"
        )
    return "<table>" + "\n".join(lines) + "</table>"


def number(value: float | None) -> str:
    """Return a figure with three significant digits."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _label(row: dict[str, Any]) -> str:
    name = row["rival_name"].split(",")[0]
    return f"{row['name']} / {name}" if row["rival_name"] else row["name"]


def _text(value: object) -> str:
    return html.escape(str(value))
