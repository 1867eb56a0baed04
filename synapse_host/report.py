"""The evidence document as a page for people: one HTML file, no scripts, no fonts, no network; plots are inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Final

from synapse_host.evidence import EmbedInputs, Evidence, Gate, GenerateInputs, RerankInputs
from synapse_host.gates import cost_share_of, cpu_operations, first_of, share_of
from synapse_host.plot import Bar, Line, bars, scatter

SIGNS: Final = {">=": "≥", "<=": "≤", "==": "="}
_GROUPS: Final = {
    "reference": "The reference",
    "device": "Engine and device",
    "worker": "The worker",
    "agreement": "Agreement with the reference",
    "finite": "Every answer is finite",
    "batch": "A row doesn't depend on its neighbours",
    "order": "Replies keep their order",
    "limits": "Edge lengths",
    "placement": "Placement",
}
_MEANINGS: Final = {
    "reference_fixture": "probes with an fp32 reference in the bundle",
    "reference_stale": "fixtures changed since the bundle was made, or made by another tokenizer",
    "identity": "facts of the handshake that differ from the matrix",
    "fault": "the run ended early",
    "worker_generations": "worker processes that served the run; another one means a crash",
    "min_cosine": "smallest cosine of any row with its reference",
    "mean_cosine": "mean cosine over all rows",
    "worst_decile": "nearest neighbours kept, in the worst tenth of the rows",
    "norm_error": "largest distance of a vector's length from 1",
    "pearson": "correlation with the reference",
    "max_error": "largest difference of one logit",
    "rank_order": "pairs of a query whose order changed although the reference tells them clearly apart",
    "top1": "nearest text, best document or next token the same as the reference's",
    "first_token": "prompts whose first token is the reference's",
    "non_finite": "rows that came back as NaN or infinity",
    "batch_single": "a row in a batch, also in another order, against the same row alone",
    "repeat": "rows whose bits changed when the same request was sent again",
    "order": "rows of a batch that carry another row's answer",
    "limits": "of 1, 2, max − 1, max, max + 1 (to be refused) and a repeated token",
    "placement_share": "operations on the Neural Engine, as the worker reports after the run",
    "functions_unreported": "functions whose placement is not known",
    "function_share": "the same share in the worst function",
    "cost_share": "estimated cost on the Neural Engine, in the worst function",
    "cpu_operations": "operators that don't belong off the Neural Engine",
    "speedup": "times as fast as with the engine forced to the CPU",
}
_ADVICE: Final = {
    "reference": "Make the bundle and its fixtures together: <code>synapse models install</code> for a default model, "
    "<code>synapse build --fixtures</code> for another.",
    "device": "Another worker answered than the matrix names: <code>synapse doctor</code> and "
    "<code>synapse matrix explain</code> show which engine this machine has and why.",
    "worker": "The worker died or refused: <code>docs/operations.md</code> has its error code. Certify again when the "
    "cause is gone.",
    "agreement": "Right model, wrong numbers: check the files with <code>synapse models verify</code>, then certify "
    "with <code>--engine</code> another of the lane's engines. If that passes, put it first in "
    "<code>hw_matrix.yaml</code>; if it fails too, the bundle doesn't fit its reference: build it again.",
    "finite": "Numbers overflow on this engine: use another dtype or engine for this model.",
    "batch": "Results depend on what else is in the batch: use another engine or version for this model.",
    "order": "The worker mixes up rows: nothing it says can be used. Reinstall or replace it.",
    "limits": "The bundle's max_tokens isn't what the engine serves: build the bundle again.",
    "placement": "The lane doesn't run where it should, or nothing reports where it runs; the table below has the "
    "operators. Let the lane's next engine in <code>hw_matrix.yaml</code> serve.",
}
_STYLE: Final = """
:root{--ink:#1c2430;--soft:#5b6675;--line:#d9dee5;--paper:#fff;--card:#f6f7f9;--good:#13794b;--bad:#b3261e;--dot:#2f6db5}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ee;--soft:#9aa5b4;--line:#333c48;--paper:#14181d;--card:#1b2027;
--good:#4cc38a;--bad:#ff7b72;--dot:#6ea8e8}}
*{box-sizing:border-box}body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1060px;margin:0 auto;padding:32px 24px 64px}h1{font-size:26px;margin:0 0 4px;line-height:1.25}
h2{font-size:17px;margin:36px 0 10px}p{margin:6px 0}.soft{color:var(--soft)}
.verdict{display:inline-block;font-weight:700;padding:3px 12px;border-radius:6px;color:#fff;letter-spacing:.02em}
.certified{background:#13794b}.uncertified{background:#b3261e}
table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:5px 12px 5px 0;vertical-align:top;
border-bottom:1px solid var(--line)}th{font-weight:600;color:var(--soft)}td.n,th.n{text-align:right;white-space:nowrap;
font-variant-numeric:tabular-nums}.pass{color:var(--good);font-weight:600}.fail{color:var(--bad);font-weight:700}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(440px,1fr));gap:18px}
figure{margin:0;background:var(--card);border-radius:10px;padding:14px}figcaption{font-weight:600;margin-bottom:6px}
svg{width:100%;height:auto;display:block}code{font:13px/1.4 ui-monospace,monospace;overflow-wrap:anywhere}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 18px;margin:0}dt{color:var(--soft)}dd{margin:0;
overflow-wrap:anywhere}.wide{overflow-x:auto}
"""


def write(path: Path, evidence: Evidence) -> Path:
    """Write the page and return its path."""
    path.write_text(render(evidence), "utf-8")
    return path


def render(evidence: Evidence) -> str:
    """Return the whole page."""
    model, engine = evidence.model, evidence.engine
    title = f"{evidence.lane} · {engine.id} · {model.name}"
    approximate = " · approximate (int8)" if evidence.precision == "approximate" else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}: {evidence.verdict}</title><style>{_STYLE}</style></head><body><main>"
        f"<h1>{escape(title)}</h1>"
        f'<p><span class="verdict {evidence.verdict}">{evidence.verdict}</span>'
        f'<span class="soft"> {escape(evidence.created)} · {len(evidence.tokens)} probes{approximate}</span></p>'
        f"{_summary(evidence)}{_gates(evidence.gates)}{_plots(evidence)}{_functions(evidence)}{_facts(evidence)}"
        '<p class="soft">Every number here follows from the evidence document beside this page; '
        "<code>synapse certify --recheck FILE</code> computes it again.</p>"
        "</main></body></html>\n"
    )


def _summary(evidence: Evidence) -> str:
    failed = [gate for gate in evidence.gates if not gate.passed]
    if evidence.fault is not None:
        fault = evidence.fault
        said = f'<p class="fail">The run ended during {escape(fault.stage)}: {escape(fault.message)}</p>'
        return said + _advice(["device" if fault.code == "lane_refused" else "worker"])
    if not failed:
        return (
            "<p>Every gate passed: this lane may serve where a certificate is asked for, until something changes.</p>"
        )
    groups = list(dict.fromkeys(gate.group for gate in failed))
    words = ", ".join(_GROUPS[group].lower() for group in groups)
    return f'<p class="fail">Not met: {escape(words)}.</p>' + _advice(groups)


def _advice(groups: Sequence[str]) -> str:
    return "<h2>What to do</h2><ul>" + "".join(f"<li>{_ADVICE[group]}</li>" for group in groups) + "</ul>"


def _gates(gates: Sequence[Gate]) -> str:
    rows = []
    for group, words in _GROUPS.items():
        for number, gate in enumerate(gate for gate in gates if gate.group == group):
            head = escape(words) if number == 0 else ""
            bound = f"{SIGNS[gate.comparison]} {gate.threshold:g}"
            word = '<span class="pass">pass</span>' if gate.passed else '<span class="fail">FAIL</span>'
            rows.append(
                f"<tr><td>{head}</td><td><code>{gate.name}</code><br>"
                f'<span class="soft">{escape(_MEANINGS.get(gate.name, ""))}</span></td>'
                f'<td class="n">{_number(gate.value)}</td><td class="n">{bound}</td>'
                f"<td>{word}</td></tr>"
            )
    head = '<tr><th></th><th>gate</th><th class="n">value</th><th class="n">threshold</th><th></th></tr>'
    return f'<h2>Gates</h2><div class="wide"><table>{head}{"".join(rows)}</table></div>'


def _number(value: float | None) -> str:
    if value is None:
        return "not measured"
    return f"{value:.0f}" if value == int(value) and abs(value) >= 2 else f"{value:.7g}"


# --- plots -----------------------------------------------------------------------------------------------------------


def _plots(evidence: Evidence) -> str:
    tokens, thresholds = evidence.tokens, evidence.thresholds
    figures = []
    match evidence.inputs:
        case EmbedInputs() as inputs:
            for title, cosines, key in (
                ("Distance from the reference by length", inputs.cosine, "min_cosine"),
                ("A row in a batch against the row alone", inputs.batch_best, "batch_single"),
            ):
                points = [(n, max(1e-9, 1 - c)) for n, c in zip(tokens, cosines, strict=True) if c is not None]
                figures.append(_errors(title, points, 1 - thresholds.get(key, 1.0), x="tokens", y="1 − cosine"))
        case RerankInputs() as inputs:
            pairs = [(r, s) for r, s in zip(inputs.reference, inputs.single, strict=True) if s is not None]
            figures.append(scatter("Logits against the reference", pairs, x="reference", y="this lane", diagonal=True))
            points = [
                (n, max(1e-7, abs(r - s)))
                for n, r, s in zip(tokens, inputs.reference, inputs.single, strict=True)
                if s is not None
            ]
            title, bound = "Error of a logit by length", thresholds.get("max_error", 0.0)
            figures.append(_errors(title, points, bound, x="tokens of the pair", y="absolute error"))
        case GenerateInputs() as inputs:
            figures.append(_depths(inputs, thresholds.get("top1")))
    times = evidence.performance.single_ms
    if len(times) == len(tokens) and times:
        what = "One request at a time: latency by length"
        figures.append(scatter(what, list(zip(tokens, times, strict=True)), x="tokens", y="milliseconds"))
    figures += _placement(evidence)
    return f'<h2>Plots</h2><div class="plots">{"".join(figures)}</div>' if figures else ""


def _errors(title: str, points: Sequence[tuple[float, float]], bound: float, *, x: str, y: str) -> str:
    """Return a plot of errors on a log scale, with what is allowed where anything is."""
    line = Line(bound, f"allowed: {bound:g}") if bound > 0 else None
    return scatter(title, points, x=x, y=y, log_y=True, line=line)


def _depths(inputs: GenerateInputs, bound: float | None) -> str:
    """Return next-token agreement by how many of the reference's tokens the prompt already held."""
    by_depth: dict[int, list[bool]] = {}
    for reference, depth, got in zip(inputs.reference, inputs.depth, inputs.next, strict=True):
        by_depth.setdefault(depth, []).append(first_of(reference[depth:], inputs.stops) == got)
    found = [
        Bar(str(depth), sum(same) / len(same), f"{sum(same)} of {len(same)}")
        for depth, same in sorted(by_depth.items())
    ]
    line = None if bound is None else Line(bound, f"asked over all: {bound:g}")
    return bars("Same next token, by tokens already continued", found, line=line)


def _placement(evidence: Evidence) -> list[str]:
    placement = evidence.placement
    if placement is None or not placement.functions:
        return []
    shares = [(function.name, share_of(function)) for function in placement.functions]
    found = [Bar(name, share or 0.0, "not reported" if share is None else "") for name, share in shares]
    bound = evidence.thresholds.get("placement_share")
    line = None if bound is None else Line(bound, f"asked: {bound:g}")
    return [bars("Operations on the Neural Engine, by function", found, line=line)]


# --- tables ----------------------------------------------------------------------------------------------------------


def _functions(evidence: Evidence) -> str:
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
        rows.append(
            f"<tr><td>{escape(function.name)}</td><td class='n'>{function.tokens}</td>"
            + "".join(f"<td class='n'>{count}</td>" for count in counts.values())
            + f"<td class='n'>{_number(share_of(function))}</td><td class='n'>{_number(cost_share_of(function))}</td>"
            f"<td>{escape(wrong)}</td></tr>"
        )
    head = "".join(
        f"<th{' class=n' if name not in ('function', 'misplaced') else ''}>{name}</th>"
        for name in ("function", "tokens", "ANE", "CPU", "GPU", "unknown", "const", "share", "cost share", "misplaced")
    )
    return f'<h2>Placement</h2><div class="wide"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _facts(evidence: Evidence) -> str:
    model, engine, machine = evidence.model, evidence.engine, evidence.machine
    reported = {name: f"{value:,.6g}" for name, value in evidence.reported.items()}
    facts: dict[str, str] = {
        "model": f"{model.model_id} ({model.family}, {model.task}, {model.dims} dims, up to {model.max_tokens} tokens)",
        "artifact": f"{model.format} {model.dtype}, {model.artifact_digest}",
        "manifest": model.manifest_digest,
        "engine": f"{engine.observed or 'no handshake'}, expected {engine.expected}, on {engine.device}",
        "version": engine.version or "unknown",
        "kernel revision": engine.kernel_revision or "none reported",
        "build": ", ".join(f"{key}={value}" for key, value in sorted(engine.build_flags.items())),
        "LOAD": ", ".join(f"{key}={value}" for key, value in sorted(engine.runtime_config.items())) or "defaults",
        "packages": ", ".join(
            f"{name} {number}" for name, number in sorted({**engine.packages, **evidence.software}.items())
        ),
        "machine": f"{machine.os} {machine.os_version} ({machine.os_build}), {machine.arch}, {machine.cpu}, "
        f"{machine.cores} of {machine.cores_total} cores, {machine.ram_bytes / 2**30:.1f} GiB",
        "accelerator": f"{machine.accelerator or 'none'}{', driver ' + machine.driver if machine.driver else ''}",
        "reference": f"{evidence.fixture.computed_by}, {evidence.fixture.digest}" if evidence.fixture else "missing",
        **reported,
    }
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    page = f"<h2>Facts</h2><dl>{items}</dl>"
    if not evidence.limits:
        return page
    edges = "".join(
        f"<tr><td>{escape(case.name)}</td><td class='n'>{case.tokens}</td><td>{escape(case.expected)}</td>"
        f"<td>{escape(case.outcome)}</td></tr>"
        for case in evidence.limits
    )
    head = "<tr><th>case</th><th class='n'>tokens</th><th>expected</th><th>outcome</th></tr>"
    return f"{page}<h2>Edge lengths</h2><table>{head}{edges}</table>"
