"""From a run's measurements to gates and a verdict. Pure: the same document gives the same verdict anywhere.

Theory of operation of the room. A run (:mod:`synapse_host.certification`) fills a document with what it measured per
probe and with the facts of model, engine and machine, and :func:`judge` adds gates, reported numbers, reasons and the
verdict. A gate is a row of ``GATES``: it takes its figure from the measurements
(:mod:`synapse_host.certificates.figures`) and compares it with a threshold of ``BOUNDS``, which the matrix may set, or
with one fixed number. A figure that wasn't measured is None and fails; nothing is computed from series that are too
short or hold impossible numbers. ``GROUPS`` says what is wrong when a gate fails, and what to do then.

A document that passed is kept as the certificate of its engine, bundle and configuration
(:mod:`synapse_host.certificates.standing`). Whoever wants to know whether it holds asks ``standing.look_up``: it reads
the document anew, puts everything that it must be judged by (device, thresholds, expected outcomes, the bundle's facts)
in place from matrix and bundle, judges it again and refuses every difference
(:mod:`synapse_host.certificates.recheck`). Then it compares what numbers depend on, then and now
(:mod:`synapse_host.certificates.binding`). The host asks before every start of a worker, so an upgrade under a running
host voids a certificate at the next start; the running worker is still the one that was certified. The digest of a
document shows accidents, not forgers: it is no signature.

All of this is blocking and has no state but a memory of file digests; the host calls it in a thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from engines.bundle.fixtures import independent
from engines.checkpoint.layout import INT8
from synapse_host.certificates import figures, metrics
from synapse_host.certificates.document import Comparison, EmbedInputs, Evidence, Gate, Precision, Verdict
from synapse_host.certificates.figures import (
    Thresholds,
    apart,
    cost_share_of,
    cpu_operations,
    finite,
    least,
    mean,
    of_logits,
    share_of,
)

if TYPE_CHECKING:
    from synapse_host.placement.matrix import Engine, HardwareMatrix


class Bound(NamedTuple):
    """One threshold: where the matrix has it (None: it is fixed) and what holds without."""

    comparison: Comparison
    default: float
    section: str | None = None
    key: str | None = None


BOUNDS: Final[Mapping[str, Bound]] = {
    "reference_probes": Bound(">=", 256),
    "reference_distinct": Bound(">=", 0.9),
    "reference_varied": Bound("<=", 0.75),
    "reference_company": Bound(">=", 0.9),
    "norm_error": Bound("<=", 1e-3),
    "length_error": Bound("<=", 0.05),
    "batch_norm": Bound("<=", 0.01),
    "min_cosine": Bound(">=", 0.999, "embed", "min_cosine"),
    "mean_cosine": Bound(">=", 0.9995, "embed", "mean_cosine"),
    "worst_decile": Bound(">=", 0.90, "embed", "worst_decile"),
    "batch_single": Bound(">=", 0.9999, "embed", "batch_single"),
    "pearson": Bound(">=", 0.999, "rerank", "pearson"),
    "max_error": Bound("<=", 0.1, "rerank", "max_error"),
    "top1": Bound(">=", 0.95, "generate", "top1"),
    "first_token": Bound(">=", 0.98, "generate", "first_token"),
    "approximate_pearson": Bound(">=", 0.995, "approximate", "pearson"),
    "approximate_top1": Bound(">=", 0.95, "approximate", "top1"),
    "approximate_cosine": Bound(">=", 0.95),
    "approximate_scale": Bound("<=", 0.15),
    "approximate_batch": Bound("<=", 1e-3),
    "placement_share": Bound(">=", 0.90, "placement", "share"),
    "cost_share": Bound(">=", 0.98, "placement", "cost_share"),
    "speedup": Bound(">=", 1.5, "placement", "speedup"),
}
"""Thresholds by the name they have in a document. int8 lanes multiply a row by its own range, so that a batch changes a
logit by 1e-6 at most; 1e-3 leaves room for another order of summation and none for a neighbour's influence."""


class Group(NamedTuple):
    """What a failed gate means together with others: a heading, a section of the command line, and what to do."""

    title: str
    section: str
    advice: str


GROUPS: Final[Mapping[str, Group]] = {
    "reference": Group(
        "The reference",
        "setting",
        "Make the bundle and its fixtures together: `synapse models install` for a default model, "
        "`synapse build --fixtures` for another.",
    ),
    "device": Group(
        "Engine and device",
        "setting",
        "Another worker answered than the matrix names: `synapse doctor` and `synapse matrix explain` show which "
        "engine this machine has and why.",
    ),
    "worker": Group(
        "The worker",
        "setting",
        "The worker died or refused: `docs/operations.md` has its error code. Certify again when the cause is gone.",
    ),
    "agreement": Group(
        "Agreement with the reference",
        "quality",
        "Right model, wrong numbers: check the files with `synapse models verify`, then certify with `--engine` "
        "another of the lane's engines. If that passes, put it first in `hw_matrix.yaml`; if it fails too, the bundle "
        "doesn't fit its reference: build it again.",
    ),
    "finite": Group(
        "Every answer is there and finite",
        "quality",
        "Numbers overflow on this engine, alone or in a batch: use another dtype or engine for this model.",
    ),
    "batch": Group(
        "A row doesn't depend on its neighbours",
        "quality",
        "Results depend on what else is in the batch: use another engine or version for this model.",
    ),
    "order": Group(
        "Replies keep their order",
        "quality",
        "The worker mixes up rows: nothing it says can be used. Reinstall or replace it.",
    ),
    "limits": Group(
        "Edge lengths", "quality", "The bundle's max_tokens isn't what the engine serves: build the bundle again."
    ),
    "placement": Group(
        "Placement",
        "placement",
        "The lane doesn't run where it should, or nothing reports where it runs; the table below has the operators. "
        "Let the lane's next engine in `hw_matrix.yaml` serve.",
    ),
}


class Rule(NamedTuple):
    """One gate: ``label`` on the command line, ``meaning`` on the page.

    ``figure``: computed from the measurements of its task, without a task from the whole document; ``beyond`` names a
    threshold that it gets, too, from which on a difference counts. ``threshold``: one of ``BOUNDS`` by its
    name, or the one number that the figure must be. ``task`` and ``precision``: which runs it judges, None for all.
    ``when``: and which of those.
    """

    name: str
    group: str
    label: str
    meaning: str
    figure: Callable[..., float | None]
    threshold: str | float = 0
    task: str | None = None
    precision: Precision | None = None
    when: Callable[[Evidence], bool] = lambda run: True
    beyond: str | None = None

    def value(self, run: Evidence, wanted: Thresholds) -> float | None:
        """Return the figure of a run whose measurements have the right shape; None where it wasn't measured."""
        if self.beyond is not None:
            return self.figure(run.inputs, wanted[self.beyond]) if self.beyond in wanted else None
        return self.figure(run if self.task is None else run.inputs)


def _unit(run: Evidence) -> bool:
    return isinstance(run.inputs, EmbedInputs) and run.inputs.unit


_PROBES: Final = "probes with a reference in the bundle"
_LENGTH: Final = "largest distance of a vector's length from 1"
_COMPANY: Final = "a row in a batch, also in another order, against the same row alone"
_MOVED: Final = "rows of a batch that carry another row's answer"
_OF_RUN: Final = (
    Rule("reference_fixture", "reference", "reference probes", _PROBES,
         lambda run: run.fixture.probes if run.fixture else 0, "reference_probes"),
    Rule("reference_distinct", "reference", "distinct probes", "share of the probes that differ from all others",
         lambda run: run.fixture and run.fixture.distinct / max(1, run.fixture.probes), "reference_distinct"),
    Rule("reference_independent", "reference", "references of ours",
         "references computed by an engine that is to be judged by them",
         lambda run: run.fixture and not independent(run.fixture.computed_by)),
    Rule("reference_stale", "reference", "stale probes",
         "fixtures changed since the bundle was made, or made by another tokenizer",
         lambda run: run.fixture and run.fixture.stale_rows + (run.fixture.digest != run.fixture.expected_digest)),
    Rule("identity", "device", "wrong engine facts", "facts of the handshake that differ from the matrix",
         figures.foreign_facts),
    Rule("fault", "worker", "faults", "the run ended early",
         lambda run: run.fault is not None and run.fault.code != "lane_refused"),
    Rule("worker_generations", "worker", "worker processes",
         "worker processes that served the run; another one means a crash",
         lambda run: len(set(run.generations)), 1,
         when=lambda run: bool(run.generations) or run.inputs is not None),
)  # fmt: skip
"""Judged also where a run ended early."""

_OF_MEASUREMENTS: Final = (
    Rule("reference_varied", "reference", "commonest answer",
         "share of the reference's commonest answer: a constant would agree with it",
         figures.commonest, "reference_varied"),
    Rule("reference_company", "reference", "pairs in company",
         "share of pairs whose query has other documents too, so that a batch is tried",
         figures.in_company, "reference_company", "rerank"),
    Rule("min_cosine", "agreement", "min cosine", "smallest cosine of any row with its reference",
         lambda rows: least(rows.cosine), "min_cosine", "embed", "exact"),
    Rule("mean_cosine", "agreement", "mean cosine", "mean cosine over all rows",
         lambda rows: mean(rows.cosine), "mean_cosine", "embed", "exact"),
    Rule("worst_decile", "agreement", "worst decile", "nearest neighbours kept, in the worst tenth of the rows",
         lambda rows: metrics.worst_decile(finite(rows.overlap)), "worst_decile", "embed", "exact"),
    Rule("mean_cosine", "agreement", "mean cosine", "mean cosine over all rows",
         lambda rows: mean(rows.cosine), "approximate_cosine", "embed", "approximate"),
    Rule("pearson", "agreement", "pearson", "correlation of the similarities with the reference's",
         lambda rows: mean(rows.neighbour_pearson), "approximate_pearson", "embed", "approximate"),
    Rule("top1", "agreement", "same best", "rows whose nearest other row is the reference's",
         figures.same_neighbours, "approximate_top1", "embed", "approximate"),
    Rule("norm_error", "agreement", "norm error", _LENGTH,
         lambda rows: apart(rows.norm), "norm_error", "embed", when=_unit),
    Rule("length_error", "agreement", "length error", _LENGTH + ", in lengths of the reference's",
         lambda rows: apart(rows.norm), "length_error", "embed", when=lambda run: not _unit(run)),
    Rule("pearson", "agreement", "pearson", "correlation with the reference",
         lambda pairs: of_logits(metrics.pearson, pairs), "pearson", "rerank", "exact"),
    Rule("max_error", "agreement", "max error", "largest difference of one logit",
         lambda pairs: of_logits(metrics.max_error, pairs), "max_error", "rerank", "exact"),
    Rule("rank_order", "agreement", "changed ranks",
         "pairs of a query whose order changed although the reference tells them clearly apart",
         figures.order_flips, 0, "rerank", "exact", beyond="max_error"),
    Rule("pearson", "agreement", "pearson", "correlation with the reference",
         lambda pairs: of_logits(metrics.pearson, pairs), "approximate_pearson", "rerank", "approximate"),
    Rule("top1", "agreement", "same best", "queries whose best document is the reference's",
         lambda pairs: of_logits(metrics.same_best, pairs, grouped=True),
         "approximate_top1", "rerank", "approximate"),
    Rule("scale_error", "agreement", "scale error",
         "root mean square difference of the logits, as a share of the reference's spread",
         lambda pairs: of_logits(metrics.scale_error, pairs), "approximate_scale", "rerank", "approximate"),
    Rule("top1", "agreement", "next token", "prefixes of the reference with the same next token",
         figures.same_next, "top1", "generate"),
    Rule("first_token", "agreement", "first token", "prompts whose first token is the reference's",
         figures.same_first, "first_token", "generate"),
    Rule("unmeasured", "finite", "unmeasured", "probes without a number, in the way of asking that has most of them",
         figures.unmeasured),
    Rule("non_finite", "finite", "non-finite",
         "rows whose first answer, alone or with those beside them, held NaN or infinity", figures.non_finite),
    Rule("batch_single", "batch", "batch = single", _COMPANY,
         lambda rows: least(rows.batch_best, rows.permuted_best), "batch_single", "embed"),
    Rule("batch_norm", "batch", "batch norm", "a row's length in a batch against its length alone",
         lambda rows: apart(rows.batch_norm, rows.permuted_norm), "batch_norm", "embed"),
    Rule("batch_single", "batch", "batch = single", _COMPANY,
         figures.batch_error, "max_error", "rerank", "exact"),
    Rule("batch_single", "batch", "batch = single", _COMPANY,
         figures.batch_error, "approximate_batch", "rerank", "approximate"),
    Rule("repeat", "batch", "changed repeats", "rows whose bits changed when the same request was sent again",
         lambda run: run.repeat_differs),
    Rule("order", "order", "misplaced rows", _MOVED, figures.misplaced_rows, 0, "embed"),
    Rule("order", "order", "misplaced rows", _MOVED,
         figures.misplaced_scores, 0, "rerank", "exact", beyond="max_error"),
    Rule("order", "order", "misplaced rows", _MOVED,
         figures.misplaced_scores, 0, "rerank", "approximate", beyond="approximate_batch"),
    Rule("limits", "limits", "wrong edge cases", "of 1, 2, max − 1, max, max + 1 (to be refused) and a repeated token",
         figures.failed_cases),
)  # fmt: skip
_OF_PLACEMENT: Final = (
    Rule("placement_share", "placement", "share",
         "operations on the Neural Engine, as the worker reports after the run",
         figures.reported_share, "placement_share"),
    Rule("functions_unreported", "placement", "unreported functions", "functions whose placement is not known",
         figures.unreported),
    Rule("function_share", "placement", "worst function", "the same share in the worst function",
         lambda run: figures.worst(share_of, run), "placement_share"),
    Rule("cost_share", "placement", "cost share", "estimated cost on the Neural Engine, in the worst function",
         lambda run: figures.worst(cost_share_of, run), "cost_share"),
    Rule("cpu_operations", "placement", "CPU ops off the list", "operators that don't belong off the Neural Engine",
         lambda run: sum(len(cpu_operations(one, run.placement.cpu_allowed)) for one in figures.buckets(run))),
    Rule("speedup", "placement", "× CPU-only", "times as fast as with the engine forced to the CPU",
         figures.speedup, "speedup"),
)  # fmt: skip
GATES: Final = (*_OF_RUN, *_OF_MEASUREMENTS, *_OF_PLACEMENT)


def rule_of(name: str, task: str | None = None) -> Rule:
    """Return what a gate of a document is called and means; a name that no rule has is its own label."""
    found = [rule for rule in GATES if rule.name == name and (task is None or rule.task in (None, task))]
    return found[0] if found else Rule(name, "worker", name, "", lambda run: None)


def rules(task: str, precision: Precision, *, placement: bool) -> list[Rule]:
    """Return the gates that a run of this kind is judged by, in order."""
    kinds = GATES if placement else (*_OF_RUN, *_OF_MEASUREMENTS)
    return [rule for rule in kinds if rule.task in (None, task) and rule.precision in (None, precision)]


def precision_of(dtype: str) -> Precision:
    """Return the precision class of an artifact."""
    return "approximate" if dtype.lower() == INT8 else "exact"


def thresholds(
    matrix: HardwareMatrix, engine: Engine, *, task: str, dtype: str, share: float | None = None
) -> dict[str, float]:
    """Return every threshold that a run is judged by: the engine's own, else the file's, else the built-in one.

    *share* replaces the placement share (``--min-placement-share``).
    """
    placement, found = engine.device_kind == "ane", {}
    for rule in rules(task, precision_of(dtype), placement=placement):
        if isinstance(rule.threshold, str):
            bound = BOUNDS[rule.threshold]
            value = matrix.threshold(engine.id, bound.section, bound.key) if bound.section and bound.key else None
            found[rule.threshold] = float(bound.default if value is None else value)
    if share is not None and placement:
        found["placement_share"] = share
    return found


def weaker(recorded: Mapping[str, float], wanted: Mapping[str, float]) -> list[str]:
    """Return the thresholds of *recorded* that are missing or easier to pass than *wanted*."""
    return [
        name
        for name, value in wanted.items()
        if name not in recorded or not _holds(recorded[name], BOUNDS[name].comparison, value)
    ]


def on_ane(evidence: Evidence) -> bool:
    """Return whether the lane is to run on the Neural Engine, so that placement counts."""
    return evidence.engine.device.partition(":")[0] == "ane"


def judge(evidence: Evidence) -> Evidence:
    """Return the document with gates, reported numbers, reasons and verdict computed from its measurements.

    It is judged by its own thresholds, device and kind of model: a recheck puts the matrix's into it before.
    """
    gates = list(_gates(evidence))
    passed = evidence.inputs is not None and all(gate.passed for gate in gates)
    verdict: Verdict = "certified" if passed else "uncertified"
    reasons = []
    if evidence.fixture is None:
        reasons.append("reference_fixture_missing")
    if evidence.fault is not None:
        reasons.append(evidence.fault.code)
    if on_ane(evidence) and (evidence.placement or figures.UNPLACED).share is None:
        reasons.append("placement_unreported")
    reasons += [gate.name for gate in gates if not gate.passed]
    return msgspec.structs.replace(
        evidence, gates=gates, reported=figures.reported(evidence), reasons=reasons, verdict=verdict
    )


def _gates(evidence: Evidence) -> Iterator[Gate]:
    """Yield every gate of a run. One that ended early, or had no reference, is judged by what it came to."""
    ended = evidence.inputs is None and (evidence.fault is not None or evidence.fixture is None)
    sound, wanted = figures.whole(evidence), evidence.thresholds
    kind = evidence.model.task, precision_of(evidence.model.dtype)
    for rule in rules(*kind, placement=on_ane(evidence)):
        if not rule.when(evidence) or (ended and rule not in _OF_RUN):
            continue
        # Series of another length than the probes, or with impossible numbers: nothing is computed from them.
        value = rule.value(evidence, wanted) if sound or rule.task is None else None
        if isinstance(rule.threshold, str):
            # A document without a threshold that its kind needs fails there, whatever was measured.
            known = rule.threshold in wanted
            comparison = BOUNDS[rule.threshold].comparison
            yield _gate(rule, value if known else None, comparison, wanted.get(rule.threshold, 0.0))
        else:
            yield _gate(rule, value, "==", rule.threshold)


def _gate(rule: Rule, value: float | None, comparison: Comparison, threshold: float) -> Gate:
    measured = None if value is None or not math.isfinite(value) else float(value)
    passed = measured is not None and _holds(measured, comparison, threshold)
    return Gate(rule.name, rule.group, measured, comparison, float(threshold), passed)


def _holds(value: float, comparison: Comparison, threshold: float) -> bool:
    if comparison == "==":
        return value == threshold
    return value >= threshold if comparison == ">=" else value <= threshold


def qualified_widths(evidence: Evidence) -> list[int]:
    """Return the packed widths that may serve: each row as on its rung, whatever its neighbours, on the right device.

    Only where all of that was measured: no trial, a function without placement or one off the Neural Engine, and the
    width stays off.
    """
    placement = evidence.placement or figures.UNPLACED
    functions = {one.tokens: one for one in placement.functions if one.kind == "packed"}

    def placed(width: int) -> bool:
        function = functions.get(width)
        if function is None or cpu_operations(function, placement.cpu_allowed):
            return False
        shares = ((share_of(function), "placement_share"), (cost_share_of(function), "cost_share"))
        return all(value is not None and value >= evidence.thresholds.get(key, 1.0) for value, key in shares)

    trials: Sequence[int] = [one.width for one in evidence.packing if figures.packs(one)]
    return sorted(width for width in trials if placed(width) or not on_ane(evidence))
