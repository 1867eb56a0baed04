"""From a run's figures to gates and a verdict. Pure: the same document gives the same verdict anywhere.

``GATES`` is the one list of what is judged: for each gate its figure (:mod:`synapse_host.figures`), what that may be at
most or at least, which runs are judged by it, and the words that people read. A figure that wasn't measured fails.
``GROUPS`` says what is wrong when a gate fails, and what to do then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import msgspec

from engines.bundle.fixtures import independent
from engines.checkpoint.layout import INT8
from synapse_host import agreement, figures
from synapse_host.evidence import (
    Comparison,
    EmbedInputs,
    Evidence,
    Fixture,
    Gate,
    GenerateInputs,
    Placement,
    Precision,
    RerankInputs,
    Verdict,
)
from synapse_host.figures import (
    Thresholds,
    apart,
    buckets,
    cost_share_of,
    cpu_operations,
    finite,
    mean,
    measured,
    share_of,
)

if TYPE_CHECKING:
    from synapse_host.matrix import HardwareMatrix

Figure: TypeAlias = Callable[[Evidence, Thresholds], float | None]
"""What a gate compares, from the document's measurements; thresholds only tell where a difference begins to count."""


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

    ``threshold``: one of ``BOUNDS`` by its name, or the one number that the figure must be. ``task`` and
    ``precision``: which runs it judges, None for all. ``when``: and which of those.
    """

    name: str
    group: str
    label: str
    meaning: str
    figure: Figure
    threshold: str | float = 0
    task: str | None = None
    precision: Precision | None = None
    when: Callable[[Evidence], bool] = lambda run: True


def _run(figure: Callable[[Evidence], float | None]) -> Figure:
    return lambda run, _: figure(run)


def _fixture(figure: Callable[[Fixture], float]) -> Figure:
    return lambda run, _: None if run.fixture is None else figure(run.fixture)


def _embed(figure: Callable[[EmbedInputs], float | None]) -> Figure:
    return lambda run, _: figure(run.inputs) if isinstance(run.inputs, EmbedInputs) else None


def _least(*names: str) -> Figure:
    return _embed(lambda rows: measured(min, finite(*(getattr(rows, name) for name in names))))


def _mean(name: str) -> Figure:
    return _embed(lambda rows: measured(mean, finite(getattr(rows, name))))


def _apart(*names: str) -> Figure:
    return _embed(lambda rows: measured(apart, finite(*(getattr(rows, name) for name in names))))


def _rerank(figure: Callable[[RerankInputs], float | None]) -> Figure:
    return lambda run, _: figure(run.inputs) if isinstance(run.inputs, RerankInputs) else None


def _logits(figure: Callable[[list[Any], list[Any]], float | None]) -> Figure:
    """Return a figure of the reference's and the lane's single logits of every answered pair."""
    return _rerank(lambda pairs: figure(*figures.logits(pairs)[:2]) if finite(pairs.single) else None)


def _beyond(figure: Callable[[RerankInputs, float], float], key: str) -> Figure:
    """Return a count of logits that differ by more than a threshold of the matrix, never than a measured error."""
    return lambda run, wanted: (
        figure(run.inputs, wanted[key]) if isinstance(run.inputs, RerankInputs) and key in wanted else None
    )


def _generate(figure: Callable[[GenerateInputs], float | None]) -> Figure:
    return lambda run, _: figure(run.inputs) if isinstance(run.inputs, GenerateInputs) else None


def _placed(figure: Callable[[Placement], float | None]) -> Figure:
    return lambda run, _: figure(run.placement or figures.UNPLACED)


def _unit(run: Evidence) -> bool:
    return isinstance(run.inputs, EmbedInputs) and run.inputs.unit


_PROBES: Final = "probes with a reference in the bundle"
_LENGTH: Final = "largest distance of a vector's length from 1"
_COMPANY: Final = "a row in a batch, also in another order, against the same row alone"
_MOVED: Final = "rows of a batch that carry another row's answer"
_OF_RUN: Final = (
    Rule("reference_fixture", "reference", "reference probes", _PROBES,
         _run(lambda run: run.fixture.probes if run.fixture else 0), "reference_probes"),
    Rule("reference_distinct", "reference", "distinct probes", "share of the probes that differ from all others",
         _fixture(lambda of: of.distinct / max(1, of.probes)), "reference_distinct"),
    Rule("reference_independent", "reference", "references of ours",
         "references computed by an engine that is to be judged by them",
         _fixture(lambda of: not independent(of.computed_by))),
    Rule("reference_stale", "reference", "stale probes",
         "fixtures changed since the bundle was made, or made by another tokenizer",
         _fixture(lambda of: of.stale_rows + (of.digest != of.expected_digest))),
    Rule("identity", "device", "wrong engine facts", "facts of the handshake that differ from the matrix",
         _run(figures.foreign_facts)),
    Rule("fault", "worker", "faults", "the run ended early",
         _run(lambda run: run.fault is not None and run.fault.code != "lane_refused")),
    Rule("worker_generations", "worker", "worker processes",
         "worker processes that served the run; another one means a crash",
         _run(lambda run: len(set(run.generations))), 1,
         when=lambda run: bool(run.generations) or run.inputs is not None),
)  # fmt: skip
"""Judged also where a run ended early."""

_OF_MEASUREMENTS: Final = (
    Rule("reference_varied", "reference", "commonest answer",
         "share of the reference's commonest answer: a constant would agree with it",
         _run(figures.commonest), "reference_varied"),
    Rule("reference_company", "reference", "pairs in company",
         "share of pairs whose query has other documents too, so that a batch is tried",
         _rerank(figures.in_company), "reference_company", "rerank"),
    Rule("min_cosine", "agreement", "min cosine", "smallest cosine of any row with its reference",
         _least("cosine"), "min_cosine", "embed", "exact"),
    Rule("mean_cosine", "agreement", "mean cosine", "mean cosine over all rows",
         _mean("cosine"), "mean_cosine", "embed", "exact"),
    Rule("worst_decile", "agreement", "worst decile", "nearest neighbours kept, in the worst tenth of the rows",
         _embed(lambda rows: measured(agreement.worst_decile, finite(rows.overlap))),
         "worst_decile", "embed", "exact"),
    Rule("mean_cosine", "agreement", "mean cosine", "mean cosine over all rows",
         _mean("cosine"), "approximate_cosine", "embed", "approximate"),
    Rule("pearson", "agreement", "pearson", "correlation of the similarities with the reference's",
         _mean("neighbour_pearson"), "approximate_pearson", "embed", "approximate"),
    Rule("top1", "agreement", "same best", "rows whose nearest other row is the reference's",
         _embed(figures.same_neighbours), "approximate_top1", "embed", "approximate"),
    Rule("norm_error", "agreement", "norm error", _LENGTH, _apart("norm"), "norm_error", "embed", when=_unit),
    Rule("length_error", "agreement", "length error", _LENGTH + ", in lengths of the reference's",
         _apart("norm"), "length_error", "embed", when=lambda run: not _unit(run)),
    Rule("pearson", "agreement", "pearson", "correlation with the reference",
         _logits(agreement.pearson), "pearson", "rerank", "exact"),
    Rule("max_error", "agreement", "max error", "largest difference of one logit",
         _logits(agreement.max_error), "max_error", "rerank", "exact"),
    Rule("rank_order", "agreement", "changed ranks",
         "pairs of a query whose order changed although the reference tells them clearly apart",
         _beyond(figures.order_flips, "max_error"), 0, "rerank", "exact"),
    Rule("pearson", "agreement", "pearson", "correlation with the reference",
         _logits(agreement.pearson), "approximate_pearson", "rerank", "approximate"),
    Rule("top1", "agreement", "same best", "queries whose best document is the reference's",
         _rerank(lambda pairs: agreement.same_best(*figures.logits(pairs))),
         "approximate_top1", "rerank", "approximate"),
    Rule("scale_error", "agreement", "scale error",
         "root mean square difference of the logits, as a share of the reference's spread",
         _logits(agreement.scale_error), "approximate_scale", "rerank", "approximate"),
    Rule("top1", "agreement", "next token", "prefixes of the reference with the same next token",
         _generate(figures.same_next), "top1", "generate"),
    Rule("first_token", "agreement", "first token", "prompts whose first token is the reference's",
         _generate(figures.same_first), "first_token", "generate"),
    Rule("unmeasured", "finite", "unmeasured", "probes without a number, in the way of asking that has most of them",
         _run(figures.unmeasured)),
    Rule("non_finite", "finite", "non-finite",
         "rows whose first answer, alone or with those beside them, held NaN or infinity", _run(figures.non_finite)),
    Rule("batch_single", "batch", "batch = single", _COMPANY,
         _least("batch_best", "permuted_best"), "batch_single", "embed"),
    Rule("batch_norm", "batch", "batch norm", "a row's length in a batch against its length alone",
         _apart("batch_norm", "permuted_norm"), "batch_norm", "embed"),
    Rule("batch_single", "batch", "batch = single", _COMPANY,
         _rerank(figures.batch_error), "max_error", "rerank", "exact"),
    Rule("batch_single", "batch", "batch = single", _COMPANY,
         _rerank(figures.batch_error), "approximate_batch", "rerank", "approximate"),
    Rule("repeat", "batch", "changed repeats", "rows whose bits changed when the same request was sent again",
         _run(lambda run: run.repeat_differs)),
    Rule("order", "order", "misplaced rows", _MOVED, _embed(figures.misplaced_rows), 0, "embed"),
    Rule("order", "order", "misplaced rows", _MOVED,
         _beyond(figures.misplaced_scores, "max_error"), 0, "rerank", "exact"),
    Rule("order", "order", "misplaced rows", _MOVED,
         _beyond(figures.misplaced_scores, "approximate_batch"), 0, "rerank", "approximate"),
    Rule("limits", "limits", "wrong edge cases", "of 1, 2, max − 1, max, max + 1 (to be refused) and a repeated token",
         _run(figures.failed_cases)),
)  # fmt: skip
_OF_PLACEMENT: Final = (
    Rule("placement_share", "placement", "share",
         "operations on the Neural Engine, as the worker reports after the run",
         lambda run, _: figures.reported_share(run.placement or figures.UNPLACED, run), "placement_share"),
    Rule("functions_unreported", "placement", "unreported functions", "functions whose placement is not known",
         _placed(lambda placed: [*map(share_of, buckets(placed))].count(None) or not buckets(placed))),
    Rule("function_share", "placement", "worst function", "the same share in the worst function",
         _placed(lambda placed: figures.worst(share_of, buckets(placed))), "placement_share"),
    Rule("cost_share", "placement", "cost share", "estimated cost on the Neural Engine, in the worst function",
         _placed(lambda placed: figures.worst(cost_share_of, buckets(placed))), "cost_share"),
    Rule("cpu_operations", "placement", "CPU ops off the list", "operators that don't belong off the Neural Engine",
         _placed(lambda placed: sum(len(cpu_operations(one, placed.cpu_allowed)) for one in buckets(placed)))),
    Rule("speedup", "placement", "× CPU-only", "times as fast as with the engine forced to the CPU",
         _placed(figures.speedup), "speedup"),
)  # fmt: skip
GATES: Final = (*_OF_RUN, *_OF_MEASUREMENTS, *_OF_PLACEMENT)


def rule_of(name: str, task: str | None = None) -> Rule:
    """Return what a gate of a document is called and means; a name that no rule has stands for itself."""
    found = [rule for rule in GATES if rule.name == name and (task is None or rule.task in (None, task))]
    return found[0] if found else Rule(name, "worker", name, "", lambda run, _: None)


def rules(task: str, precision: Precision, *, placement: bool) -> list[Rule]:
    """Return the gates that a run of this kind is judged by, in order."""
    kinds = GATES if placement else (*_OF_RUN, *_OF_MEASUREMENTS)
    return [rule for rule in kinds if rule.task in (None, task) and rule.precision in (None, precision)]


def precision_of(dtype: str) -> Precision:
    """Return the precision class of an artifact."""
    return "approximate" if dtype.lower() == INT8 else "exact"


def thresholds(
    matrix: HardwareMatrix, *, engine: str, task: str, precision: Precision, placement: bool, share: float | None = None
) -> dict[str, float]:
    """Return every threshold that a run is judged by: the engine's own, else the file's, else the built-in one.

    *share* replaces the placement share (``--min-placement-share``). An engine that the matrix doesn't have gets the
    file's.
    """
    found = {}
    for rule in rules(task, precision, placement=placement):
        if isinstance(rule.threshold, str):
            bound = BOUNDS[rule.threshold]
            value = matrix.threshold(engine, bound.section, bound.key) if bound.section and bound.key else None
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


def judge(evidence: Evidence, wanted: Thresholds | None = None, *, placement: bool | None = None) -> Evidence:
    """Return the document with gates, reported numbers, reasons and verdict computed from its measurements.

    *wanted*: thresholds to judge by instead of the document's own, *placement*: whether the lane must run on the
    Neural Engine; a recheck takes both from the matrix. The kind of run is its model's task and dtype.
    """
    required = on_ane(evidence) if placement is None else placement
    gates = list(measure(evidence, evidence.thresholds if wanted is None else wanted, placement=required))
    passed = evidence.inputs is not None and all(gate.passed for gate in gates)
    verdict: Verdict = "certified" if passed else "uncertified"
    reasons = []
    if evidence.fixture is None:
        reasons.append("reference_fixture_missing")
    if evidence.fault is not None:
        reasons.append(evidence.fault.code)
    if required and (evidence.placement or figures.UNPLACED).share is None:
        reasons.append("placement_unreported")
    reasons += [gate.name for gate in gates if not gate.passed]
    return msgspec.structs.replace(
        evidence, gates=gates, reported=figures.reported(evidence), reasons=reasons, verdict=verdict
    )


def measure(evidence: Evidence, wanted: Thresholds, *, placement: bool) -> Iterator[Gate]:
    """Yield every gate of a run. One that ended early, or had no reference, is judged by what it came to."""
    ended = evidence.inputs is None and (evidence.fault is not None or evidence.fixture is None)
    sound = figures.whole(evidence)
    for rule in rules(evidence.model.task, precision_of(evidence.model.dtype), placement=placement):
        if not rule.when(evidence) or (ended and rule not in _OF_RUN):
            continue
        # Series of another length than the probes, or with impossible numbers: nothing is computed from them.
        value = rule.figure(evidence, wanted) if sound or rule.task is None else None
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


def qualified_widths(evidence: Evidence, wanted: Thresholds | None = None) -> list[int]:
    """Return the packed widths that may serve: each row as on its rung, whatever its neighbours, on the right device.

    Only where all of that was measured: no trial, a function without placement or one off the Neural Engine, and the
    width stays off.
    """
    wanted = evidence.thresholds if wanted is None else wanted
    placement = evidence.placement or figures.UNPLACED
    functions = {one.tokens: one for one in placement.functions if one.kind == "packed"}

    def placed(width: int) -> bool:
        function = functions.get(width)
        if function is None or cpu_operations(function, placement.cpu_allowed):
            return False
        shares = ((share_of(function), "placement_share"), (cost_share_of(function), "cost_share"))
        return all(value is not None and value >= wanted.get(key, 1.0) for value, key in shares)

    trials: Sequence[int] = [one.width for one in evidence.packing if figures.packs(one)]
    return sorted(width for width in trials if placed(width) or not on_ane(evidence))
