"""What a trial measures of each task: singles go against the reference, batches against the singles.

So each fault shows where it belongs. Shapes and rounding are those of :mod:`synapse_host.certificates.document`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from synapse_host.certificates import figures, metrics
from synapse_host.certificates.document import DIGITS, EmbedInputs, GenerateInputs, RerankInputs, Series
from synapse_host.certification import probes as probe_set
from synapse_host.certification.trial import Trial, timed

if TYPE_CHECKING:
    from engines.bundle.fixtures import Fixtures

ROWS: Final = 32
"""Rows of one batch exchange: enough for every kind of padding, few enough to find a bad row quickly."""
SEED: Final = 20261129
EQUAL: Final = 64
"""Tokens of each row of the batch that is only timed."""
REPEATED: Final = 8
"""Prompts whose continuation is asked for twice."""


async def measure(trial: Trial, probes: Fixtures) -> EmbedInputs | RerankInputs | GenerateInputs:
    """Ask for every probe in every way of its task and return what the gates judge."""
    if probes.task == "embed":
        return await embed(trial, probes)
    return await (rerank(trial, probes) if probes.task == "rerank" else generate(trial, probes))


async def embed(trial: Trial, probes: Fixtures) -> EmbedInputs:
    """Measure vectors: singles, batches, and everything at once in another order."""
    rows = probes.rows()
    trial.tokens = [len(row) for row in rows]

    dims = probes.arrays["vectors_q"].shape[1]  # all that the model computes, whatever its truncate_dim says

    async def ask(numbers: Sequence[int]) -> Any:
        return await trial.host.embed_ids(trial.model, [rows[n] for n in numbers], lane=trial.lane, dimensions=dims)

    bare = [row[1:-1] for row in rows if len(row) > 2] or rows
    await trial.edges(bare, lambda ids: trial.host.embed_ids(trial.model, [ids], lane=trial.lane))
    exchanges = _chunks(range(len(rows)))
    # Everything in one call, as bulk work goes: it is timed, too.
    mixed = [np.random.default_rng(SEED).permutation(len(rows)).tolist()]
    singles, batch, permuted = await trial.rows(ask, exchanges, mixed)
    if trial.bundle.manifest.max_tokens >= EQUAL:
        equal = np.resize(np.concatenate(rows), (ROWS, EQUAL))
        call = timed([lambda: trial.host.embed_ids(trial.model, list(equal), lane=trial.lane)])
        took = await trial.first(lambda: call, ROWS)
        trial.equal_ms = took[0] if took else None
    known = sorted(singles)
    reference = probes.vectors
    ours = np.array([singles[n] for n in known]) if known else np.zeros((0, reference.shape[1]))
    theirs = reference[known]
    cosine = metrics.cosines(ours, theirs)
    unit = trial.bundle.manifest.normalize is not False
    norms = _lengths(ours) / (1 if unit else _lengths(theirs).clip(1e-30))

    def series(values: Any) -> Series:
        return _series(dict(zip(known, values, strict=True)), len(rows))

    def neighbours(vectors: Any) -> list[int | None]:
        found = {n: known[near] for n, near in zip(known, metrics.nearest(vectors), strict=True)}
        return [found.get(n) for n in range(len(rows))]

    own, best, lengths = _against(batch, singles, exchanges, len(rows))
    permuted_own, permuted_best, permuted_lengths = _against(permuted, singles, mixed, len(rows))
    return EmbedInputs(
        cosine=series(cosine),
        norm=series(norms),
        overlap=series(metrics.rank_overlaps(theirs, ours)),
        batch_own=own,
        batch_best=best,
        permuted_own=permuted_own,
        permuted_best=permuted_best,
        batch_norm=lengths,
        permuted_norm=permuted_lengths,
        neighbour=neighbours(ours),
        reference_neighbour=neighbours(theirs),
        neighbour_pearson=series(metrics.neighbour_pearson(theirs, ours)),
        unit=unit,
    )


async def rerank(trial: Trial, probes: Fixtures) -> RerankInputs:
    """Measure logits: singles, each query's candidates at once, and the same in another order."""
    queries, candidates = probes.rows("query"), probes.rows("candidate")
    of: list[int] = probes.arrays["query_of"].tolist()
    trial.tokens = [len(queries[q]) + len(row) + 3 for q, row in zip(of, candidates, strict=True)]

    async def ask(numbers: Sequence[int]) -> Any:
        query = queries[of[numbers[0]]]
        rows = [candidates[n] for n in numbers]
        return await trial.host.rerank_ids(trial.model, query.tolist(), rows, raw=True, lane=trial.lane)

    async def pair(candidate: Sequence[int]) -> Any:
        query = candidates[0][:1].tolist()
        return await trial.host.rerank_ids(trial.model, query, [candidate], raw=True, lane=trial.lane)

    await trial.edges(candidates, pair, more=1 + 3)
    exchanges = [part for q in range(len(queries)) for part in _chunks([n for n, query in enumerate(of) if query == q])]
    random = np.random.default_rng(SEED)
    mixed = [random.permutation(rows).tolist() for rows in exchanges]
    singles, batch, permuted = await trial.rows(ask, exchanges, mixed)
    carried = {n: number for number, rows in enumerate(exchanges) for n in rows}
    return RerankInputs(
        query=of,
        reference=[round(logit, DIGITS) for logit in probes.arrays["logits"].tolist()],
        single=_series(singles, len(candidates)),
        batch=_series(batch, len(candidates)),
        permuted=_series(permuted, len(candidates)),
        exchange=[carried[n] for n in range(len(candidates))],
    )


async def generate(trial: Trial, probes: Fixtures) -> GenerateInputs:
    """Measure greedy continuations, and single next tokens where the reference's choice is clear."""
    prompts = [row.tolist() for row in probes.rows()]
    reference: list[list[int]] = probes.arrays["greedy"].tolist()
    clear: list[list[int]] = probes.arrays["clear"].tolist()
    trial.tokens = [len(row) for row in prompts]
    stops = probe_set.stops(trial.bundle)

    async def ask(ids: Sequence[int], count: int) -> list[int]:
        made = await trial.host.generate_ids(trial.model, ids, count, lane=trial.lane)
        trial.note()
        return list(made.generated_token_ids)

    # One token follows each prompt and counts, so a prompt of max - 1 fills the model's context.
    await trial.edges([[id for id in row if id not in stops] for row in prompts], lambda ids: ask(ids, 1), more=1)
    trial.begin("warm-up", 1)
    await ask(prompts[0], 1)
    trial.begin("continuations", len(prompts))
    greedy = []
    for row, wanted in zip(prompts, reference, strict=True):
        started = time.perf_counter()
        greedy.append(await ask(row, len(wanted)))
        took = time.perf_counter() - started
        trial.single_ms.append(took * 1000)
        trial.batch_s += took
        trial.batch_tokens += len(greedy[-1])
        trial.advance()
    trial.begin("next tokens", len(prompts))
    depths, following = [], []
    for number, (row, wanted, apart) in enumerate(zip(prompts, reference, clear, strict=True)):
        known = next((i for i, id in enumerate(wanted) if id in stops), len(wanted) - 1)
        usable = [depth for depth in range(known + 1) if apart[depth]] or [0]
        depth = usable[number % len(usable)]
        made = await ask([*row, *wanted[:depth]], 1)
        depths.append(depth)
        following.append(made[0] if made else figures.STOP)
        trial.advance()
    trial.begin("repeat", REPEATED)
    again = [await ask(row, len(wanted)) for row, wanted in zip(prompts[:REPEATED], reference, strict=False)]
    trial.repeat_differs = sum(a != b for a, b in zip(again, greedy, strict=False))
    return GenerateInputs(reference, greedy, depths, following, sorted(stops))


def _chunks(rows: Sequence[int]) -> list[Sequence[int]]:
    return [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]


def _series(answers: dict[int, Any], count: int) -> Series:
    return [round(float(answers[n]), DIGITS) if n in answers else None for n in range(count)]


def _lengths(vectors: Any) -> Any:
    return np.linalg.norm(np.asarray(vectors, np.float64), axis=1)


def _against(
    batch: dict[int, Any], singles: dict[int, Any], exchanges: Sequence[Sequence[int]], count: int
) -> tuple[Series, Series, Series]:
    """Compare each exchange's vectors with the same rows' single answers; rows without either are null.

    Returns cosines with their own single answer, best cosines, and lengths in those of that best answer.
    """
    owns: dict[int, float] = {}
    bests: dict[int, float] = {}
    lengths: dict[int, float] = {}
    for rows in exchanges:
        known = [n for n in rows if n in batch and n in singles]
        if known:
            found = metrics.own_and_best(np.array([batch[n] for n in known]), np.array([singles[n] for n in known]))
            for values, of in zip((owns, bests, lengths), found, strict=True):
                values |= zip(known, of, strict=True)
    return _series(owns, count), _series(bests, count), _series(lengths, count)
