"""The evidence document as a page for people: one HTML file, no scripts, no fonts, no network; plots are inline SVG.

``report.html`` beside this module is the page, a template of jinja2. What a list says of a stored certificate is here,
too: the commands and the server show the same row.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from synapse_host.certificates.document import EmbedInputs, Evidence, Function, GenerateInputs, RerankInputs
from synapse_host.certificates.figures import cost_share_of, cpu_operations, share_of, wanted_next
from synapse_host.certificates.standing import Listed
from synapse_host.certificates.verdict import GROUPS, Group, rule_of

SIGNS: Final = {">=": "≥", "<=": "≤", "==": "="}
ORIGINS: Final = {
    "project": "this project's own reference",
    "computed_here": "a reference computed on this machine",
    "bundle": "the reference of the bundle's author",
}
"""Whose reference a model was judged by."""


def row_of(one: Listed, now: datetime) -> dict[str, Any]:
    """Return what lists say of a stored certificate: whose it is, whether it is valid and why not, how old."""
    found, evidence = one.certificate, one.certificate.evidence
    fixture = None if evidence is None else evidence.fixture
    # What can't be read helps nobody. What this matrix has no use for may be another matrix's, so it stays.
    fix = f"rm {found.path}" if evidence is None else one.fix
    return {
        "lane": one.lane or None,
        "model": one.model or None,
        "engine": one.engine,
        "valid": found.valid,
        "why": "; ".join(found.why) or None,
        "at": None if evidence is None else evidence.created,
        "age_s": None if evidence is None else round(_age(evidence.created, now)),
        "precision": None if evidence is None else evidence.precision,
        "reference": None if fixture is None else f"{ORIGINS[fixture.origin]}: {fixture.computed_by}",
        "path": str(found.path),
        "fix": None if found.valid else fix,
    }


def _age(created: str, now: datetime) -> float:
    try:
        return (now - datetime.fromisoformat(created).astimezone()).total_seconds()
    except (ValueError, OverflowError):
        return 0.0


def write(path: Path, evidence: Evidence) -> Path | None:
    """Write the page and return its path; None where jinja2, which the extra ``chat`` brings, isn't installed."""
    try:
        path.write_text(render(evidence), "utf-8")
    except ImportError:
        path.unlink(missing_ok=True)  # an older run's, which says something else than the document beside it
        return None
    return path


def render(evidence: Evidence) -> str:
    """Return the whole page. ImportError without jinja2."""
    from jinja2 import Environment, StrictUndefined

    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return page.from_string(Path(__file__).with_name("report.html").read_text("utf-8")).render(
        run=evidence,
        failed=_failed(evidence),
        plots=_plots(evidence),
        depths=_depths(evidence.inputs) if isinstance(evidence.inputs, GenerateInputs) else {},
        groups=GROUPS,
        signs=SIGNS,
        origins=ORIGINS,
        rule_of=rule_of,
        operations=_operations,
        share_of=share_of,
        cost_share_of=cost_share_of,
        cpu_operations=cpu_operations,
    )


def _failed(evidence: Evidence) -> list[Group]:
    """Return the groups of gates to give advice on; of a run that ended early the one that its fault belongs to."""
    names = list(dict.fromkeys(gate.group for gate in evidence.gates if not gate.passed))
    if names and evidence.fault is not None:
        names = ["device" if evidence.fault.code == "lane_refused" else "worker"]
    return [GROUPS[name] for name in names]


def _operations(function: Function) -> dict[str, int]:
    """Return how many operations of a function are on each device."""
    return dict(sum((Counter(devices) for devices in function.operations.values()), Counter[str]()))


def _depths(inputs: GenerateInputs) -> dict[int, list[bool]]:
    """Return whether next tokens agreed, by how many of the reference's tokens the prompt already held."""
    found: dict[int, list[bool]] = {}
    for depth, wanted, got in zip(inputs.depth, wanted_next(inputs), inputs.next, strict=True):
        found.setdefault(depth, []).append(wanted == got)
    return found


# --- plots -----------------------------------------------------------------------------------------------------------


def _plots(evidence: Evidence) -> list[dict[str, Any]]:
    tokens, limits, found = evidence.tokens, evidence.thresholds, []
    match evidence.inputs:
        case EmbedInputs() as rows:
            for title, cosines, key in (
                ("Distance from the reference by length", rows.cosine, "min_cosine"),
                ("A row in a batch against the row alone", rows.batch_best, "batch_single"),
            ):
                points = [(n, max(1e-9, 1 - c)) for n, c in zip(tokens, cosines, strict=True) if c is not None]
                found.append(
                    scatter(title, points, x="tokens", y="1 − cosine", log=True, allowed=1 - limits.get(key, 1))
                )
        case RerankInputs() as pairs:
            both = [(n, r, s) for n, r, s in zip(tokens, pairs.reference, pairs.single, strict=True) if s is not None]
            logits, errors = [(r, s) for _, r, s in both], [(n, max(1e-7, abs(r - s))) for n, r, s in both]
            title, bound = "Error of a logit by length", limits.get("max_error", 0)
            found.append(scatter("Logits against the reference", logits, x="reference", y="this lane", same=True))
            found.append(scatter(title, errors, x="tokens of the pair", y="error", log=True, allowed=bound))
    times = evidence.performance.single_ms
    if times and len(times) == len(tokens):
        title = "One request at a time: latency by length"
        found.append(scatter(title, list(zip(tokens, times, strict=True)), x="tokens", y="milliseconds"))
    return found


def scatter(
    title: str,
    points: Sequence[tuple[float, float]],
    *,
    x: str,
    y: str,
    log: bool = False,
    allowed: float = 0,
    same: bool = False,
) -> dict[str, Any]:
    """Return a plot with one dot a point, its places from 0 to 1 along the axes.

    *log*: heights are logarithms. *allowed*: a height to be marked, 0 for none. *same*: both axes have one scale.
    """

    def scaled(value: float) -> float:
        return math.log10(value) if log else value

    heights = [scaled(b) for b in (*(b for _, b in points), allowed) if b or not log]
    right, up = _span([a for a, _ in points]), _span(heights if log or same else [0.0, *heights])
    if log:
        up = math.floor(up[0]), math.ceil(up[1])
    if same:
        right = up = (min(right[0], up[0]), max(right[1], up[1]))

    def placed(value: float, axis: tuple[float, float]) -> float:
        return (value - axis[0]) / (axis[1] - axis[0])

    return {
        "title": title,
        "x": x,
        "y": y,
        "same": same,
        "points": [(placed(a, right), placed(scaled(b), up)) for a, b in points],
        "across": [(placed(tick, right), f"{tick:.3g}") for tick in _ticks(*right)],
        "up": [(placed(tick, up), f"{10**tick if log else tick:.3g}") for tick in _ticks(*up)],
        "allowed": [(placed(scaled(allowed), up), f"{allowed:g}")] if allowed else [],
    }


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
