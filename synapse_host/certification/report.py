"""The evidence document as a page for people: one HTML file, no scripts, no fonts, no network; plots are inline SVG."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Final

from synapse_host.certificates.document import EmbedInputs, Evidence, GenerateInputs, RerankInputs
from synapse_host.certificates.figures import cost_share_of, cpu_operations, first_of, share_of
from synapse_host.certificates.verdict import GROUPS, rule_of

SIGNS: Final = {">=": "≥", "<=": "≤", "==": "="}
ORIGINS: Final = {
    "project": "this project's own reference",
    "computed_here": "a reference computed on this machine",
    "bundle": "the reference of the bundle's author",
}
"""Whose reference a model was judged by."""
WIDTH, HEIGHT = 460, 270
LEFT, RIGHT, TOP, BASE = 62, WIDTH - 14, 14, HEIGHT - 42
"""A plot in pixels: the whole, and the frame that its points stay in."""
_STYLE: Final = """
:root{--ink:#1c2430;--soft:#5b6675;--line:#d9dee5;--paper:#fff;--card:#f6f7f9;--good:#13794b;--bad:#b3261e;--dot:#2f6db5}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ee;--soft:#9aa5b4;--line:#333c48;--paper:#14181d;--card:#1b2027;
--good:#4cc38a;--bad:#ff7b72;--dot:#6ea8e8}}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1060px;margin:0 auto;padding:32px 24px 64px}h1{font-size:26px;margin:0}
h2{font-size:17px;margin:36px 0 10px}
.soft,th{color:var(--soft)}.certified,.uncertified{font-weight:700;padding:3px 12px;border-radius:6px;color:#fff}
.certified{background:#13794b}.uncertified{background:#b3261e}.pass{color:var(--good)}
.fail{color:var(--bad);font-weight:700}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:5px 12px 5px 0;
vertical-align:top;border-bottom:1px solid var(--line);overflow-wrap:anywhere}td.n{white-space:nowrap}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(440px,1fr));gap:18px}
figure{margin:0;background:var(--card);border-radius:10px;padding:14px}figcaption{font-weight:600;margin-bottom:6px}
svg{width:100%;display:block;font-size:11px;fill:var(--soft)}circle{fill:var(--dot);fill-opacity:.6}
"""


class Html(str):
    """Markup of this page; any other text of a cell is escaped."""


def write(path: Path, evidence: Evidence) -> Path:
    """Write the page and return its path."""
    path.write_text(render(evidence), "utf-8")
    return path


def render(evidence: Evidence) -> str:
    """Return the whole page."""
    title = f"{evidence.lane} · {evidence.engine.id} · {evidence.model.name}"
    approximate = " · approximate (int8)" if evidence.precision == "approximate" else ""
    whose = f" · {escape(ORIGINS[evidence.fixture.origin])}" if evidence.fixture else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}: {evidence.verdict}</title><style>{_STYLE}</style></head><body><main>"
        f'<h1>{escape(title)}</h1><p><span class="{evidence.verdict}">{evidence.verdict}</span><span class="soft"> '
        f"{escape(evidence.created)} · {len(evidence.tokens)} probes{whose}{approximate}</span></p>"
        f"{_summary(evidence)}{_gates(evidence)}{_plots(evidence)}{_placement(evidence)}{_facts(evidence)}"
        '<p class="soft">Every number here follows from the evidence document beside this page; '
        "<code>synapse certify --recheck FILE</code> computes it again.</p></main></body></html>\n"
    )


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str | float | None]]) -> str:
    """Return a headed table; numbers are written so that they can be compared."""

    def cell(value: str | float | None) -> str:
        if isinstance(value, str):
            return f"<td>{value if isinstance(value, Html) else escape(value)}</td>"
        return f'<td class="n">{_number(value)}</td>'

    names = f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>" if head else ""
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return f'<h2>{title}</h2><div class="wide"><table>{names}{body}</table></div>'


def _number(value: float | None) -> str:
    if value is None:
        return "not measured"
    return f"{value:.0f}" if value == int(value) and (abs(value) >= 2 or value == 0) else f"{value:.7g}"


def _summary(evidence: Evidence) -> str:
    groups = list(dict.fromkeys(gate.group for gate in evidence.gates if not gate.passed))
    if not groups:
        return (
            "<p>Every gate passed: this lane may serve where a certificate is asked for, until something changes.</p>"
        )
    said = f"Not met: {', '.join(GROUPS[group].title.lower() for group in groups)}."
    if evidence.fault is not None:
        said = f"The run ended during {evidence.fault.stage}: {evidence.fault.message}"
        groups = ["device" if evidence.fault.code == "lane_refused" else "worker"]
    advice = (re.sub("`([^`]*)`", r"<code>\1</code>", escape(GROUPS[group].advice)) for group in groups)
    items = "".join(f"<li>{words}</li>" for words in advice)
    return f'<p class="fail">{escape(said)}</p><h2>What to do</h2><ul>{items}</ul>'


def _gates(evidence: Evidence) -> str:
    rows = []
    for group, words in GROUPS.items():
        for number, gate in enumerate(gate for gate in evidence.gates if gate.group == group):
            meaning = escape(rule_of(gate.name, evidence.model.task).meaning)
            said = Html(f'<code>{escape(gate.name)}</code><br><span class="soft">{meaning}</span>')
            word = Html('<span class="pass">pass</span>' if gate.passed else '<span class="fail">FAIL</span>')
            bound = f"{SIGNS[gate.comparison]} {gate.threshold:g}"
            rows.append((words.title if number == 0 else "", said, gate.value, bound, word))
    return _table("Gates", ("", "gate", "value", "threshold", ""), rows)


def scatter(
    title: str,
    points: Sequence[tuple[float, float]],
    *,
    x: str,
    y: str,
    log_y: bool = False,
    allowed: float | None = None,
    diagonal: bool = False,
) -> str:
    """Return a figure with one dot a point; *allowed* draws that height, *diagonal* where both axes are equal."""

    def scaled(value: float) -> float:
        return math.log10(value) if log_y else value

    heights = [scaled(b) for _, b in points] + ([scaled(allowed)] if allowed else [])
    across, up = _span([a for a, _ in points]), _span(heights if log_y or diagonal else [0.0, *heights])
    if log_y:
        up = math.floor(up[0]), math.ceil(up[1])
    if diagonal:
        across = up = (min(across[0], up[0]), max(across[1], up[1]))

    def place(a: float, b: float) -> tuple[float, float]:
        right, high = (a - across[0]) / (across[1] - across[0]), (b - up[0]) / (up[1] - up[0])
        return LEFT + right * (RIGHT - LEFT), BASE + high * (TOP - BASE)

    def line(one: tuple[float, float], other: tuple[float, float], colour: str) -> str:
        ends = "".join(f' x{n}="{a:.1f}" y{n}="{b:.1f}"' for n, (a, b) in ((1, one), (2, other)))
        return f'<line{ends} stroke="var(--{colour})"/>'

    def text(a: float, b: float, words: str, anchor: str) -> str:
        return f'<text x="{a:.1f}" y="{b:.1f}" text-anchor="{anchor}">{escape(words)}</text>'

    parts = [text((LEFT + RIGHT) / 2, HEIGHT - 6, x, "middle"), text(LEFT, TOP - 3, y, "start")]
    for tick in _ticks(*up):
        _, height = place(across[0], tick)
        parts.append(line((LEFT, height), (RIGHT, height), "line"))
        parts.append(text(LEFT - 7, height + 4, f"{10**tick if log_y else tick:.3g}", "end"))
    parts += [text(place(tick, up[0])[0], BASE + 16, f"{tick:.3g}", "middle") for tick in _ticks(*across)]
    if diagonal:
        parts.append(line(place(across[0], up[0]), place(across[1], up[1]), "soft"))
    if allowed:
        _, height = place(across[0], scaled(allowed))
        parts += [line((LEFT, height), (RIGHT, height), "bad"), text(RIGHT, height - 5, f"allowed: {allowed:g}", "end")]
    for a, b in points:
        right, height = place(a, scaled(b))
        parts.append(f'<circle cx="{right:.1f}" cy="{height:.1f}" r="2.6"/>')
    inner = "".join(parts) if points else text(LEFT, HEIGHT / 2, "nothing finite to show", "start")
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title, quote=True)}">{inner}</svg></figure>'
    )


def _span(values: Sequence[float]) -> tuple[float, float]:
    """Return an axis' ends: the values' own with a little room, but none below zero where no value is."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = (high - low) * 0.04 or max(1e-9, abs(high) * 0.1)
    return (low - room if low < 0 else max(0.0, low - room)), high + room


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round values between an axis' ends, in steps of 1, 2 or 5."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _plots(evidence: Evidence) -> str:
    tokens, limits, found, after = evidence.tokens, evidence.thresholds, [], ""
    match evidence.inputs:
        case EmbedInputs() as rows:
            for title, cosines, key in (
                ("Distance from the reference by length", rows.cosine, "min_cosine"),
                ("A row in a batch against the row alone", rows.batch_best, "batch_single"),
            ):
                points = [(n, max(1e-9, 1 - c)) for n, c in zip(tokens, cosines, strict=True) if c is not None]
                bound = 1 - limits.get(key, 1.0)
                found.append(scatter(title, points, x="tokens", y="1 − cosine", log_y=True, allowed=bound))
        case RerankInputs() as pairs:
            both = [(n, r, s) for n, r, s in zip(tokens, pairs.reference, pairs.single, strict=True) if s is not None]
            logits = [(r, s) for _, r, s in both]
            found.append(scatter("Logits against the reference", logits, x="reference", y="this lane", diagonal=True))
            errors, bound = [(n, max(1e-7, abs(r - s))) for n, r, s in both], limits.get("max_error", 0.0)
            title = "Error of a logit by length"
            found.append(scatter(title, errors, x="tokens of the pair", y="error", log_y=True, allowed=bound))
        case GenerateInputs() as texts:
            after = _depths(texts)
    times = evidence.performance.single_ms
    if times and len(times) == len(tokens):
        title = "One request at a time: latency by length"
        found.append(scatter(title, list(zip(tokens, times, strict=True)), x="tokens", y="milliseconds"))
    return (f'<h2>Plots</h2><div class="plots">{"".join(found)}</div>' if found else "") + after


def _share(value: float | None) -> Html:
    """Return a share as a bar and a number."""
    return Html("not reported" if value is None else f'<meter value="{value:.4f}"></meter> {value:.4f}')


def _depths(inputs: GenerateInputs) -> str:
    """Return next-token agreement by how many of the reference's tokens the prompt already held."""
    by_depth: dict[int, list[bool]] = {}
    for reference, depth, got in zip(inputs.reference, inputs.depth, inputs.next, strict=True):
        by_depth.setdefault(depth, []).append(first_of(reference[depth:], inputs.stops) == got)
    rows = [(depth, _share(sum(same) / len(same)), len(same)) for depth, same in sorted(by_depth.items())]
    return _table("Same next token", ("tokens already continued", "share", "prompts"), rows)


def _placement(evidence: Evidence) -> str:
    placement = evidence.placement
    if not evidence.placement_required or placement is None:
        return ""
    if not placement.functions:
        return f'<h2>Placement</h2><p class="fail">No table: {escape(placement.reason or "not measured")}</p>'
    rows = []
    for function in placement.functions:
        counts = dict.fromkeys(("neuralEngine", "cpu", "gpu", "unknown", "const"), 0)
        for devices in function.operations.values():
            for device, count in devices.items():
                counts[device] = counts.get(device, 0) + count
        wrong = ", ".join(cpu_operations(function, placement.cpu_allowed)) or "none"
        shares = (_share(share_of(function)), _share(cost_share_of(function)))
        rows.append((function.name, function.tokens, ", ".join(f"{n} {d}" for d, n in counts.items()), *shares, wrong))
    return _table("Placement", ("function", "tokens", "operations", "share", "cost share", "misplaced"), rows)


def _facts(evidence: Evidence) -> str:
    model, engine, machine, fixture = evidence.model, evidence.engine, evidence.machine, evidence.fixture

    def listed(values: dict[str, str], sign: str = "=") -> str:
        return ", ".join(f"{key}{sign}{value}" for key, value in sorted(values.items())) or "none"

    facts = {
        "model": f"{model.model_id} ({model.family}, {model.task}, {model.dims} dims, up to {model.max_tokens} tokens)",
        "artifact": f"{model.format} {model.dtype}, {model.artifact_digest}",
        "manifest": model.manifest_digest,
        "engine": f"{engine.observed or 'no handshake'}, expected {engine.expected}, on {engine.device}",
        "version": engine.version or "unknown",
        "kernel revision": engine.kernel_revision or "none reported",
        "build": listed(engine.build_flags),
        "LOAD": listed(engine.runtime_config),
        "packages": listed({**engine.packages, **evidence.software}, " "),
        "machine": f"{machine.os} {machine.os_version} ({machine.os_build}), {machine.arch}, {machine.cpu}, "
        f"{machine.cores} of {machine.cores_total} cores, {machine.ram_bytes / 2**30:.1f} GiB",
        "accelerator": f"{machine.accelerator or 'none'}{', driver ' + machine.driver if machine.driver else ''}",
        "reference": f"{ORIGINS[fixture.origin]}: {fixture.computed_by}; {fixture.digest}" if fixture else "missing",
        **{name: f"{value:,.6g}" for name, value in evidence.reported.items()},
    }
    page = _table("Facts", (), facts.items())
    if not evidence.limits:
        return page
    cases = [(case.name, case.tokens, case.expected, case.outcome) for case in evidence.limits]
    return page + _table("Edge lengths", ("case", "tokens", "expected", "outcome"), cases)
