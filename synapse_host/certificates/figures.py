"""From what a run recorded to the figures that gates compare: one number each, or None where it wasn't measured.

Pure: the same document gives the same figures anywhere. What they mean and how large they may be is in
:mod:`synapse_host.certificates.verdict`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from synapse_host.certificates import metrics
from synapse_host.certificates.document import (
    EmbedInputs,
    Evidence,
    Function,
    GenerateInputs,
    Packing,
    Placement,
    RerankInputs,
)

Thresholds = Mapping[str, float]

STOP: Final = -1
"""Stands for the end of a continuation where a token id is recorded."""
CASES: Final = {
    "length 1": "ok",
    "length 2": "ok",
    "max - 1": "ok",
    "max": "ok",
    "max + 1": "sequence_too_long",
    "repeated token": "ok",
}
"""Edge lengths that every run tries, and what must come of each: only ``max + 1`` is refused, by the host."""
STAGES: Final = {
    "embed": ("warm-up", "singles", "batches", "permuted", "repeat"),
    "rerank": ("warm-up", "singles", "batches", "permuted", "repeat"),
    "generate": ("warm-up", "continuations", "next tokens", "repeat"),
}
"""Ways of asking that each task's run goes through; each counts the rows its first attempts left without an answer."""
INPUTS: Final = {"embed": EmbedInputs, "rerank": RerankInputs, "generate": GenerateInputs}
MISPLACED: Final = 1e-3
"""Rounding moves a cosine by far less; another text's answer differs by more, or can't be told apart."""
MAX_UNKNOWN: Final = 0.02
"""A function with more of its operations unreported than this counts as not reported at all (ane.md 1.4)."""
MAX_ON_CPU: Final = 16
"""CPU operations that a function may keep for ids, mask and pooling; more means that it fell apart."""
PACKED_ROWS: Final = 64
PACKED_MIXES: Final = 8
PACKED_COSINE: Final = 0.9999
PACKED_DIFFERENCE: Final = 1e-3
"""What a packed width must show before it serves (ane.md 3.3); fixed."""
UNPLACED: Final = Placement(share=None, generation=0)
"""What is known of a run that nothing was measured of."""
_MOST: Final = 1e30
_COUNT: Final = float(2**31)


def finite(*series: Iterable[float | None]) -> list[float]:
    """Return the numbers of one or several series without their gaps."""
    return [value for values in series for value in values if value is not None and math.isfinite(value)]


def least(*series: Iterable[float | None]) -> float | None:
    """Return the smallest number, None where there is none."""
    return min(finite(*series), default=None)


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the numbers, None where there is none."""
    numbers = finite(values)
    return metrics.total(numbers) / len(numbers) if numbers else None


def apart(*ratios: Iterable[float | None]) -> float | None:
    """Return the largest distance from 1, None where there is no number."""
    return max((abs(ratio - 1) for ratio in finite(*ratios)), default=None)


# --- the run ---------------------------------------------------------------------------------------------------------


def columns(inputs: EmbedInputs | RerankInputs | GenerateInputs) -> dict[str, tuple[Sequence[Any], float, float]]:
    """Return what has one entry a probe, with the smallest and the largest value that an entry can have."""
    match inputs:
        case EmbedInputs():
            cosines = ("cosine", "batch_own", "batch_best", "permuted_own", "permuted_best", "neighbour_pearson")
            ranges = dict.fromkeys(cosines, (-1.0, 1.0)) | {"overlap": (0.0, 1.0)}
            ranges |= dict.fromkeys(("norm", "batch_norm", "permuted_norm"), (0.0, _MOST))
            ranges |= dict.fromkeys(("neighbour", "reference_neighbour"), (0.0, _COUNT))
        case RerankInputs():
            ranges = dict.fromkeys(("reference", "single", "batch", "permuted"), (-_MOST, _MOST))
            ranges |= dict.fromkeys(("query", "exchange"), (0.0, _COUNT))
        case GenerateInputs():
            wanted, greedy = ([len(row) for row in rows] for rows in (inputs.reference, inputs.greedy))
            return {
                "reference": (wanted, 1.0, _COUNT),
                "greedy": (greedy, 0.0, _COUNT),
                "depth": (inputs.depth, 0.0, float(min(wanted, default=0)) - 1),
                "next": (inputs.next, float(STOP), _COUNT),
            }
    return {name: (getattr(inputs, name), low, high) for name, (low, high) in ranges.items()}


def misshapen(evidence: Evidence) -> Iterator[str]:
    """Yield what is wrong with the shape of the measurements, so that nothing can be computed from them.

    They are another task's, a series has more or fewer entries than there are probes, or one that can't be measured.
    """
    n, inputs = len(evidence.tokens), evidence.inputs
    if inputs is None:
        return
    if not isinstance(inputs, INPUTS[evidence.model.task]):
        yield f"inputs: not those of a model to {evidence.model.task}"
    for name, (values, low, high) in columns(inputs).items():
        if len(values) != n:
            yield f"inputs.{name}: {len(values)} entries, {n} expected"
        elif any(value is not None and not low <= value <= high for value in values):
            yield f"inputs.{name}: a value that no measurement gives"


def whole(evidence: Evidence) -> bool:
    """Return whether there are measurements, and of the right shape."""
    return evidence.inputs is not None and not any(misshapen(evidence))


def unmeasured(evidence: Evidence) -> int:
    """Return how many probes the worst series has no possible number for; more numbers than probes count as well."""
    probes = evidence.fixture.probes if evidence.fixture else 0
    if evidence.inputs is None:
        return max(probes, 1)
    series = [*columns(evidence.inputs).values(), (evidence.tokens, 1.0, _MOST)]
    return max(
        abs(len(values) - probes) + sum(value is None or not low <= value <= high for value in values)
        for values, low, high in series
    )


def non_finite(evidence: Evidence) -> int | None:
    """Return the rows of first attempts that came back as NaN or infinity; None where a way of asking is missing."""
    counts = evidence.non_finite
    return sum(map(abs, counts.values())) if counts.keys() >= set(STAGES[evidence.model.task]) else None


def failed_cases(evidence: Evidence) -> int:
    """Count the edge lengths with another outcome than they must have, and those that weren't tried."""
    failed = sum(case.outcome != CASES.get(case.name) for case in evidence.limits)
    return failed + len(CASES.keys() - {case.name for case in evidence.limits})


def foreign_facts(evidence: Evidence) -> int:
    """Count what the worker said of itself and the matrix didn't."""
    engine = evidence.engine
    if engine.observed is None:
        # Without a handshake the fault says more, unless it was the handshake that failed.
        refused = evidence.fault is not None and evidence.fault.code == "lane_refused"
        return int(refused or evidence.inputs is not None)
    kind = engine.device.partition(":")[0]
    # A worker that doesn't echo its device claims nothing: of an accelerator that is too little.
    wrong = [engine.observed != engine.expected, engine.build_flags.get("device", "cpu") != engine.device]
    if "backend" in engine.build_flags and kind in ("cpu", "cuda", "metal"):
        # The CUDA worker loads nothing unless every node went to its provider, so LOADED and this name say it all.
        wrong.append(engine.build_flags["backend"] != kind)
    return sum(wrong)


def commonest(evidence: Evidence) -> float | None:
    """Return the share of the reference's commonest answer: nearest neighbour, logit or next token."""
    answers: Sequence[Any] = []
    match evidence.inputs if whole(evidence) else None:
        case EmbedInputs() as inputs:
            answers = inputs.reference_neighbour
        case RerankInputs() as inputs:
            answers = inputs.reference
        case GenerateInputs() as inputs:
            answers = wanted_next(inputs)
    return max(Counter(answers).values()) / len(answers) if answers else None


# --- embedding and reranking -----------------------------------------------------------------------------------------


def same_neighbours(inputs: EmbedInputs) -> float | None:
    """Return the share of rows whose nearest other row is the reference's."""
    pairs = zip(inputs.neighbour, inputs.reference_neighbour, strict=True)
    return mean(ours == theirs for ours, theirs in pairs if ours is not None)


def misplaced_rows(inputs: EmbedInputs) -> int:
    """Count the batch rows that carry another row's answer.

    Another single answer is nearer to it than its own by more than MISPLACED. Low cosines with both are wrong numbers.
    """
    runs = ((inputs.batch_own, inputs.batch_best), (inputs.permuted_own, inputs.permuted_best))
    return sum(best - own > MISPLACED for run in runs for own, best in zip(*_both(*run), strict=True))


def _both(*series: Sequence[Any]) -> tuple[list[Any], ...]:
    """Return the entries that every series has."""
    kept = [entries for entries in zip(*series, strict=True) if None not in entries]
    return tuple(map(list, zip(*kept, strict=True))) if kept else ([],) * len(series)


def of_logits(figure: Callable[..., float | None], inputs: RerankInputs, *, grouped: bool = False) -> float | None:
    """Return a figure of the reference and the single logits of the pairs with an answer; None where there is none.

    *grouped*: the figure gets the queries, too.
    """
    reference, single, query = _both(inputs.reference, inputs.single, inputs.query)
    groups = [query] if grouped else []
    return figure(reference, single, *groups) if single else None


def exchanges(inputs: RerankInputs) -> Iterator[tuple[list[Any], ...]]:
    """Yield the logits of every batch exchange with the same rows' single ones."""
    members: dict[int, list[int]] = {}
    for row, exchange in enumerate(inputs.exchange):
        members.setdefault(exchange, []).append(row)
    for series in (inputs.batch, inputs.permuted):
        for rows in members.values():
            yield _both([series[i] for i in rows], [inputs.single[i] for i in rows])


def batch_error(inputs: RerankInputs) -> float | None:
    """Return the largest difference of a batch's logits from the single ones, whatever their order.

    Sorting pairs them as well as any order can, so rows that merely changed places don't count here.
    """
    errors = (metrics.max_error(sorted(batch), sorted(single)) for batch, single in exchanges(inputs))
    return max(finite(errors), default=None)


def order_flips(inputs: RerankInputs, apart: float) -> int:
    """Count the pairs of a query that changed order although the reference has them more than *apart* apart."""
    return metrics.order_flips(*_both(inputs.reference, inputs.single, inputs.query), apart=apart)


def misplaced_scores(inputs: RerankInputs, apart: float) -> int:
    """Count the batch rows that carry another row's logit: within *apart* of that one, and not of their own."""
    return sum(
        abs(score - own) > apart and any(abs(score - other) <= apart for other in single)
        for batch, single in exchanges(inputs)
        for score, own in zip(batch, single, strict=True)
    )


def in_company(inputs: RerankInputs) -> float | None:
    """Return the share of pairs that were asked together with others: a request of one row tries no batch."""
    sizes = Counter(inputs.exchange)
    return mean(sizes[exchange] > 1 for exchange in inputs.exchange)


# --- generation ------------------------------------------------------------------------------------------------------


def first_of(ids: Sequence[int], stops: Sequence[int]) -> int:
    """Return the first of *ids*; STOP for a stop, or where there is none."""
    return STOP if not ids or ids[0] in stops else ids[0]


def wanted_next(inputs: GenerateInputs) -> list[int]:
    """Return the reference's next token for each prompt and the first ``depth`` ids after it."""
    return [first_of(ids[depth:], inputs.stops) for ids, depth in zip(inputs.reference, inputs.depth, strict=True)]


def same_next(inputs: GenerateInputs) -> float | None:
    """Return the share of the reference's prefixes whose next token is the reference's."""
    return mean(a == b for a, b in zip(wanted_next(inputs), inputs.next, strict=True))


def same_first(inputs: GenerateInputs) -> float | None:
    """Return the share of prompts whose first token is the reference's."""
    pairs = zip(inputs.reference, inputs.greedy, strict=True)
    return mean(first_of(a, inputs.stops) == first_of(b, inputs.stops) for a, b in pairs)


def prefix_share(inputs: GenerateInputs) -> float | None:
    """Return how much of the reference's continuations the lane's own ones keep, in the mean."""
    shares = []
    for reference, greedy in zip(inputs.reference, inputs.greedy, strict=True):
        stop = next((i for i, id in enumerate(reference) if id in inputs.stops), None)
        wanted = reference if stop is None else reference[:stop]
        pairs = enumerate(zip(wanted, greedy, strict=False))
        kept = next((i for i, (a, b) in pairs if a != b), min(len(wanted), len(greedy)))
        entire = kept == len(wanted) and (stop is None or len(greedy) == stop)
        shares.append(1.0 if entire else kept / max(1, len(wanted)))
    return mean(shares)


# --- placement -------------------------------------------------------------------------------------------------------


def reported_share(run: Evidence) -> float | None:
    """Return PONG's share; None where nobody reports one, or another worker than the run's answered the PING."""
    placement = run.placement or UNPLACED
    foreign = run.generations and placement.generation != run.generations[-1]
    return None if foreign or not 0 <= (placement.share or 0.0) <= 1 else placement.share


def buckets(run: Evidence) -> list[Function]:
    """Return the functions that must be placed well. A packed one that isn't stays off by itself."""
    return [one for one in (run.placement or UNPLACED).functions if one.kind == "bucket"]


def unreported(run: Evidence) -> int:
    """Count the functions whose placement is not known; a run without any has one."""
    return [*map(share_of, buckets(run))].count(None) if buckets(run) else 1


def worst(share: Callable[[Function], float | None], run: Evidence) -> float | None:
    """Return the smallest share of any function; None where one reports none."""
    shares = [*map(share, buckets(run))]
    return least(shares) if None not in shares else None


def speedup(run: Evidence) -> float | None:
    """Return how many times as fast the lane is as with its engine forced to the CPU, by the medians."""
    placement = run.placement or UNPLACED
    forced, native = finite(placement.forced_ms), finite(placement.native_ms)
    if not forced or len(forced) != len(native) or min(native) <= 0:
        return None
    return metrics.percentile(forced, 0.5) / metrics.percentile(native, 0.5)


def share_of(function: Function) -> float | None:
    """Return ANE-preferred / dispatchable operations; None where too little is reported to say (ane.md 1.1, 1.4)."""
    counts = dict.fromkeys(("cpu", "gpu", "neuralEngine", "unknown"), 0)
    for devices in function.operations.values():
        for device in counts:
            counts[device] += devices.get(device, 0)
    known = counts["cpu"] + counts["gpu"] + counts["neuralEngine"]
    if known == 0 or min(counts.values()) < 0 or counts["unknown"] > MAX_UNKNOWN * (known + counts["unknown"]):
        return None
    return counts["neuralEngine"] / known


def cost_share_of(function: Function) -> float | None:
    """Return the Neural Engine's share of the estimated cost, None where the framework gave none."""
    whole = metrics.total(list(function.cost.values()))
    sane = math.isfinite(whole) and whole > 0 and min(function.cost.values()) >= 0
    return function.cost.get("neuralEngine", 0.0) / whole if sane else None


def cpu_operations(function: Function, allowed: Sequence[str]) -> list[str]:
    """Return the operators that don't belong where they are: off the Neural Engine and off the list, or too many."""
    wrong = []
    on_cpu = 0
    for operator, devices in function.operations.items():
        on_cpu += devices.get("cpu", 0)
        if devices.get("gpu", 0) or (devices.get("cpu", 0) and operator.rpartition(".")[2] not in allowed):
            wrong.append(operator)
    return [*wrong, *(["too many"] if on_cpu > MAX_ON_CPU else [])]


def packs(one: Packing) -> bool:
    """Return whether a packed width's trial shows each row as on its rung, whatever its neighbours."""
    rows = sum(map(len, one.mixes))
    cosine, alone, moved = (finite(series) for series in (one.cosine, one.alone, one.moved))
    return (
        one.reason is None
        and rows >= PACKED_ROWS
        and len({tuple(mix) for mix in one.mixes}) >= PACKED_MIXES
        and len(cosine) == len(alone) == len(moved) == rows
        and min(cosine) >= PACKED_COSINE
        and max([*alone, *moved]) <= PACKED_DIFFERENCE
    )


def reported(evidence: Evidence) -> dict[str, float]:
    """Return the figures that people read and that don't decide, at least not in every class of precision."""
    performance, inputs = evidence.performance, evidence.inputs
    took = performance.batch_s if performance.batch_s > 0 else None
    found: dict[str, float | None] = {
        "single_p50_ms": metrics.percentile(performance.single_ms, 0.5),
        "single_p95_ms": metrics.percentile(performance.single_ms, 0.95),
        "tokens_per_s": took and performance.batch_tokens / took,
        "rows_per_s": took and len(evidence.tokens) / took,
        "rows_per_s_32x64": 32_000 / performance.equal_ms if performance.equal_ms else None,
    }
    match inputs if whole(evidence) else None:
        case EmbedInputs() as inputs:
            found["min_cosine"], found["mean_cosine"] = least(inputs.cosine), mean(inputs.cosine)
        case RerankInputs() as inputs:
            found["max_error"] = of_logits(metrics.max_error, inputs)
            found["top1"] = of_logits(metrics.same_best, inputs, grouped=True) or 0.0
        case GenerateInputs() as inputs:
            found["prefix_share"] = prefix_share(inputs)
    return {name: round(value, 9) for name, value in found.items() if value is not None and math.isfinite(value)}
