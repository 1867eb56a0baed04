"""From recorded measurements to gates and a verdict. Pure: the same document gives the same verdict anywhere.

Groups say what is wrong when a gate fails: ``reference`` (the fixtures), ``agreement`` (the numbers), ``batch`` (they
depend on their neighbours), ``order`` (replies changed places), ``finite``, ``limits``, ``device`` (another engine or
device than the matrix says), ``worker`` (it was lost), ``placement``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec

from engines.bundle.layout import INT8
from synapse_host import agreement
from synapse_host.evidence import (
    Comparison,
    EmbedInputs,
    Evidence,
    Function,
    Gate,
    GenerateInputs,
    Packing,
    Placement,
    Precision,
    RerankInputs,
    Series,
    Verdict,
)

if TYPE_CHECKING:
    from synapse_host.matrix import HardwareMatrix

MAX_UNKNOWN: Final = 0.02
"""A function with more of its operations unreported than this counts as not reported at all (ane.md 1.4)."""
MAX_ON_CPU: Final = 16
"""CPU operations that a function may keep for ids, mask and pooling; more means that it fell apart."""
CASES: Final = ("length 1", "length 2", "max - 1", "max", "max + 1", "repeated token")
"""Edge lengths that every run tries; only ``max + 1`` is to be refused, by the host."""
PACKED_ROWS: Final = 64
PACKED_MIXES: Final = 8
PACKED_COSINE: Final = 0.9999
PACKED_DIFFERENCE: Final = 1e-3
"""What a packed width must show before it serves (ane.md 3.3); fixed."""
UNPLACED: Final = Placement(share=None, generation=0)
"""What is known of a run that nothing was measured of."""


class Bound(NamedTuple):
    """One threshold: where the matrix has it (None: it is fixed) and what holds without."""

    comparison: Comparison
    default: float
    section: str | None = None
    key: str | None = None


BOUNDS: Final[Mapping[str, Bound]] = {
    "reference_probes": Bound(">=", 256),
    "norm_error": Bound("<=", 1e-3),
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
    "placement_share": Bound(">=", 0.90, "placement", "share"),
    "cost_share": Bound(">=", 0.98, "placement", "cost_share"),
    "speedup": Bound(">=", 1.5, "placement", "speedup"),
}
_BY_TASK: Final = {
    "embed": ("norm_error", "min_cosine", "mean_cosine", "worst_decile", "batch_single"),
    "rerank": ("pearson", "max_error"),
    "generate": ("top1", "first_token"),
}
_APPROXIMATE: Final = ("approximate_pearson", "approximate_top1")
_PLACEMENT: Final = ("placement_share", "cost_share", "speedup")


class Bounder(Protocol):
    """Makes the gate of a named threshold."""

    def __call__(self, name: str, group: str, value: float | None, key: str | None = None) -> Gate:
        """Compare *value* with the threshold *key* (default: the gate's own name)."""


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
    names = ["reference_probes", *_BY_TASK[task]]
    if precision == "approximate" and task != "generate":
        names += _APPROXIMATE
    if placement:
        names += _PLACEMENT
    found = {}
    for name in names:
        bound = BOUNDS[name]
        value = matrix.threshold(engine, bound.section, bound.key) if bound.section and bound.key else None
        found[name] = float(bound.default if value is None else value)
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


def judge(evidence: Evidence) -> Evidence:
    """Return the document with gates, reported numbers, reasons and verdict computed from its measurements."""
    gates = list(_gates(evidence))
    passed = evidence.inputs is not None and all(gate.passed for gate in gates)
    verdict: Verdict = "certified" if passed else "uncertified"
    return msgspec.structs.replace(
        evidence, gates=gates, reported=_reported(evidence), reasons=_reasons(evidence, gates), verdict=verdict
    )


def _reasons(evidence: Evidence, gates: Iterable[Gate]) -> list[str]:
    reasons = []
    if evidence.fixture is None:
        reasons.append("reference_fixture_missing")
    if evidence.fault is not None:
        reasons.append(evidence.fault.code)
    if evidence.placement_required and (evidence.placement or UNPLACED).share is None:
        reasons.append("placement_unreported")
    return [*reasons, *(gate.name for gate in gates if not gate.passed)]


def _holds(value: float, comparison: Comparison, threshold: float) -> bool:
    if comparison == "==":
        return value == threshold
    return value >= threshold if comparison == ">=" else value <= threshold


def _gate(name: str, group: str, value: float | None, comparison: Comparison, threshold: float) -> Gate:
    passed = value is not None and _holds(value, comparison, threshold)
    return Gate(name, group, None if value is None else float(value), comparison, float(threshold), passed)


def _zero(name: str, group: str, value: float) -> Gate:
    return _gate(name, group, value, "==", 0)


def _gates(evidence: Evidence) -> Iterator[Gate]:
    limits, inputs = evidence.thresholds, evidence.inputs

    def bound(name: str, group: str, value: float | None, key: str | None = None) -> Gate:
        # A document without a threshold that its kind needs fails there, whatever was measured.
        key = key or name
        return _gate(name, group, value if key in limits else None, BOUNDS[key].comparison, limits.get(key, 0.0))

    fixture = evidence.fixture
    yield bound("reference_fixture", "reference", fixture.probes if fixture else 0, "reference_probes")
    if fixture is not None:
        other = fixture.digest != fixture.expected_digest
        yield _zero("reference_stale", "reference", fixture.stale_rows + other)
    yield _zero("identity", "device", _foreign_facts(evidence))
    if evidence.fault is not None and evidence.fault.code != "lane_refused":
        yield _zero("fault", "worker", 1)
    if evidence.generations or inputs is not None:
        yield _gate("worker_generations", "worker", len(set(evidence.generations)), "==", 1)
    match inputs:
        case EmbedInputs():
            yield from _embed_gates(inputs, bound, evidence.precision)
        case RerankInputs():
            yield from _rerank_gates(inputs, bound, evidence.precision, limits)
        case GenerateInputs():
            yield bound("top1", "agreement", _next_share(inputs))
            yield bound("first_token", "agreement", _first_share(inputs))
        case None:
            return
    yield _zero("limits", "limits", _failed_cases(evidence))
    yield _zero("repeat", "batch", evidence.repeat_differs)
    if evidence.placement_required:
        yield from _placement_gates(evidence, bound)


def _failed_cases(evidence: Evidence) -> int:
    """Count the edge lengths with another outcome than expected, and those that weren't tried."""
    failed = sum(case.outcome != case.expected for case in evidence.limits)
    tried = {case.name for case in evidence.limits}
    return failed + sum(name not in tried for name in CASES)


def _foreign_facts(evidence: Evidence) -> int:
    """Count what the worker said of itself and the matrix didn't."""
    engine = evidence.engine
    if engine.observed is None:
        # Without a handshake the fault says more, unless it was the handshake that failed.
        refused = evidence.fault is not None and evidence.fault.code == "lane_refused"
        return int(refused or evidence.inputs is not None)
    kind = engine.device.partition(":")[0]
    wrong = [engine.observed != engine.expected, engine.build_flags.get("device", engine.device) != engine.device]
    if "backend" in engine.build_flags and kind in ("cpu", "cuda", "metal"):
        # The CUDA worker loads nothing unless every node went to its provider, so LOADED and this name say it all.
        wrong.append(engine.build_flags["backend"] != kind)
    return sum(wrong)


# --- per task --------------------------------------------------------------------------------------------------------


def _finite(series: Series) -> list[float]:
    return [value for value in series if value is not None]


def _both(one: Series, other: Series) -> tuple[list[float], list[float]]:
    kept = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    return [a for a, _ in kept], [b for _, b in kept]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _embed_gates(inputs: EmbedInputs, bound: Bounder, precision: Precision) -> Iterator[Gate]:
    cosine = _finite(inputs.cosine)
    if precision == "exact":
        yield bound("min_cosine", "agreement", min(cosine, default=None))
        yield bound("mean_cosine", "agreement", _mean(cosine))
        yield bound("worst_decile", "agreement", agreement.worst_decile(inputs.overlap) if inputs.overlap else None)
    else:
        yield bound("pearson", "agreement", _mean(inputs.neighbour_pearson), "approximate_pearson")
        same = [a == b for a, b in zip(inputs.neighbour, inputs.reference_neighbour, strict=True)]
        yield bound("top1", "agreement", _mean(same), "approximate_top1")
    if inputs.unit:
        error = max((abs(norm - 1) for norm in _finite(inputs.norm)), default=None)
        yield bound("norm_error", "agreement", error)
    yield _zero("non_finite", "finite", inputs.cosine.count(None))
    if precision == "exact":
        yield bound("batch_single", "batch", _batch_single(inputs))
    runs = ((inputs.batch_own, inputs.batch_best), (inputs.permuted_own, inputs.permuted_best))
    yield _zero("order", "order", sum(agreement.misplaced_rows(*_both(own, best)) for own, best in runs))


def _batch_single(inputs: EmbedInputs) -> float | None:
    return min([*_finite(inputs.batch_best), *_finite(inputs.permuted_best)], default=None)


def _rerank_gates(
    inputs: RerankInputs, bound: Bounder, precision: Precision, limits: Mapping[str, float]
) -> Iterator[Gate]:
    query, reference, scores = _answered(inputs)
    pearson = agreement.pearson(reference, scores) if scores else None
    if precision == "exact":
        yield bound("pearson", "agreement", pearson)
        yield bound("max_error", "agreement", _max_error(reference, scores))
        flips = agreement.order_flips(reference, scores, query, apart=limits.get("max_error", 0.0))
        yield _zero("rank_order", "agreement", flips)
    else:
        yield bound("pearson", "agreement", pearson, "approximate_pearson")
        yield bound("top1", "agreement", agreement.same_best(reference, scores, query), "approximate_top1")
    yield _zero("non_finite", "finite", inputs.single.count(None))
    if precision == "exact":
        yield bound("batch_single", "batch", _batch_error(inputs), "max_error")
    yield _zero("order", "order", sum(agreement.misplaced_scores(*pair) for pair in _exchanges(inputs)))


def _answered(inputs: RerankInputs) -> tuple[list[int], list[float], list[float]]:
    kept = [
        (query, reference, score)
        for query, reference, score in zip(inputs.query, inputs.reference, inputs.single, strict=True)
        if score is not None
    ]
    return [q for q, _, _ in kept], [r for _, r, _ in kept], [s for _, _, s in kept]


def _max_error(reference: Sequence[float], scores: Sequence[float]) -> float | None:
    return max((abs(a - b) for a, b in zip(reference, scores, strict=True)), default=None)


def _batch_error(inputs: RerankInputs) -> float:
    return max((agreement.batch_error(*pair) for pair in _exchanges(inputs)), default=0.0)


def _exchanges(inputs: RerankInputs) -> Iterator[tuple[list[float], list[float]]]:
    """Yield the finite scores of every batch exchange with the same rows' single scores."""
    for series in (inputs.batch, inputs.permuted):
        for number in dict.fromkeys(inputs.exchange):
            rows = [i for i, exchange in enumerate(inputs.exchange) if exchange == number]
            yield _both([series[i] for i in rows], [inputs.single[i] for i in rows])


def first_of(ids: Sequence[int], stops: Sequence[int]) -> int | None:
    """Return the first of *ids*; None for a stop, or where there is none."""
    return None if not ids or ids[0] in stops else ids[0]


def _first_share(inputs: GenerateInputs) -> float | None:
    pairs = zip(inputs.reference, inputs.greedy, strict=True)
    return _mean([first_of(a, inputs.stops) == first_of(b, inputs.stops) for a, b in pairs])


def _next_share(inputs: GenerateInputs) -> float | None:
    rows = zip(inputs.reference, inputs.depth, inputs.next, strict=True)
    return _mean([first_of(ids[depth:], inputs.stops) == got for ids, depth, got in rows])


def _prefix_share(inputs: GenerateInputs) -> float:
    shares = []
    for reference, greedy in zip(inputs.reference, inputs.greedy, strict=True):
        stop = next((i for i, id in enumerate(reference) if id in inputs.stops), None)
        wanted = reference if stop is None else reference[:stop]
        same = agreement.common_prefix(wanted, greedy)
        whole = same == len(wanted) and (stop is None or len(greedy) == stop)
        shares.append(1.0 if whole else same / max(1, len(wanted)))
    return _mean(shares) or 0.0


# --- placement -------------------------------------------------------------------------------------------------------


def _placement_gates(evidence: Evidence, bound: Bounder) -> Iterator[Gate]:
    placement = evidence.placement or UNPLACED
    # PING may have gone to another worker than the run's: its share is somebody else's.
    foreign = evidence.generations and placement.generation != evidence.generations[-1]
    # A packed function that is placed badly stays off by itself: see qualified_widths.
    functions = [one for one in placement.functions if one.kind == "bucket"]
    shares = [share_of(function) for function in functions]
    costs = [cost_share_of(function) for function in functions]
    misplaced = sum(len(cpu_operations(one, placement.cpu_allowed)) for one in functions)
    yield bound("placement_share", "placement", None if foreign else placement.share)
    yield _zero("functions_unreported", "placement", shares.count(None) if functions else 1)
    yield bound("function_share", "placement", min(_finite(shares), default=None), "placement_share")
    yield bound("cost_share", "placement", None if None in costs else min(_finite(costs), default=None))
    yield _zero("cpu_operations", "placement", misplaced)
    yield bound("speedup", "placement", _speedup(evidence))


def qualified_widths(evidence: Evidence) -> list[int]:
    """Return the packed widths that may serve: each row as on its rung, whatever its neighbours, on the right device.

    Only where all of that was measured: no trial, a function without placement or one off the Neural Engine, and the
    width stays off.
    """
    placement = evidence.placement or UNPLACED
    functions = {one.tokens: one for one in placement.functions if one.kind == "packed"}

    def placed(width: int) -> bool:
        function = functions.get(width)
        if function is None or cpu_operations(function, placement.cpu_allowed):
            return False
        pairs = ((share_of(function), "placement_share"), (cost_share_of(function), "cost_share"))
        return all(value is not None and value >= evidence.thresholds.get(key, 1.0) for value, key in pairs)

    return sorted(
        one.width for one in evidence.packing if _packs(one) and (placed(one.width) or not evidence.placement_required)
    )


def _packs(one: Packing) -> bool:
    rows = sum(map(len, one.mixes))
    cosine, alone, moved = (_finite(series) for series in (one.cosine, one.alone, one.moved))
    return (
        one.reason is None
        and rows >= PACKED_ROWS
        and len({tuple(mix) for mix in one.mixes}) >= PACKED_MIXES
        and len(cosine) == len(alone) == len(moved) == rows
        and min(cosine) >= PACKED_COSINE
        and max([*alone, *moved]) <= PACKED_DIFFERENCE
    )


def share_of(function: Function) -> float | None:
    """Return ANE-preferred / dispatchable operations; None where too little is reported to say (ane.md 1.1, 1.4)."""
    counts = dict.fromkeys(("cpu", "gpu", "neuralEngine", "unknown"), 0)
    for devices in function.operations.values():
        for device in counts:
            counts[device] += devices.get(device, 0)
    known = counts["cpu"] + counts["gpu"] + counts["neuralEngine"]
    if known == 0 or counts["unknown"] > MAX_UNKNOWN * (known + counts["unknown"]):
        return None
    return counts["neuralEngine"] / known


def cost_share_of(function: Function) -> float | None:
    """Return the Neural Engine's share of the estimated cost, None where the framework gave none."""
    whole = sum(function.cost.values())
    return function.cost.get("neuralEngine", 0.0) / whole if whole > 0 else None


def cpu_operations(function: Function, allowed: Sequence[str]) -> list[str]:
    """Return the operators that don't belong where they are: off the Neural Engine and off the list, or too many."""
    wrong = []
    on_cpu = 0
    for operator, devices in function.operations.items():
        on_cpu += devices.get("cpu", 0)
        if devices.get("gpu", 0) or (devices.get("cpu", 0) and operator.rpartition(".")[2] not in allowed):
            wrong.append(operator)
    return [*wrong, *(["too many"] if on_cpu > MAX_ON_CPU else [])]


def _speedup(evidence: Evidence) -> float | None:
    placement = evidence.placement or UNPLACED
    if not placement.forced_ms or not placement.native_ms:
        return None
    native = agreement.percentile(placement.native_ms, 0.5)
    return agreement.percentile(placement.forced_ms, 0.5) / native if native > 0 else None


# --- reported only ---------------------------------------------------------------------------------------------------


def _reported(evidence: Evidence) -> dict[str, float]:
    performance, inputs = evidence.performance, evidence.inputs
    found: dict[str, float | None] = {
        "single_p50_ms": agreement.percentile(performance.single_ms, 0.5),
        "single_p95_ms": agreement.percentile(performance.single_ms, 0.95),
        "tokens_per_s": performance.batch_tokens / performance.batch_s if performance.batch_s > 0 else None,
        "rows_per_s": len(evidence.tokens) / performance.batch_s if performance.batch_s > 0 else None,
    }
    match inputs:
        case EmbedInputs():
            cosine = _finite(inputs.cosine)
            found["min_cosine"] = min(cosine, default=None)
            found["mean_cosine"] = _mean(cosine)
            found["batch_single"] = _batch_single(inputs)
        case RerankInputs():
            query, reference, scores = _answered(inputs)
            found["max_error"] = _max_error(reference, scores)
            found["top1"] = agreement.same_best(reference, scores, query)
            found["batch_error"] = _batch_error(inputs)
        case GenerateInputs():
            found["prefix_share"] = _prefix_share(inputs)
        case None:
            pass
    return {name: round(value, 9) for name, value in found.items() if value is not None}
