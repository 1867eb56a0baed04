"""One trial of a lane: every probe through the normal serving path, measured and recorded, judged by nobody here.

Singles go against the reference, batches against the singles, so that each fault shows where it belongs. Rows whose
answer is not finite are found one by one and left out of everything else.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from engines.bundle import digest as digests
from engines.bundle.manifest import FileRef
from engines.protocol.errors import ErrorCode
from synapse_host import agreement, probe_set, qualification
from synapse_host.errors import WORKER_ERRORS, SynapseError
from synapse_host.evidence import (
    DIGITS,
    Case,
    EmbedInputs,
    Fault,
    Fixture,
    GenerateInputs,
    Packing,
    Performance,
    Placement,
    RerankInputs,
    Series,
)

if TYPE_CHECKING:
    from engines.bundle.fixtures import Fixtures
    from engines.bundle.manifest import Bundle
    from synapse_host.assignment import Assignment
    from synapse_host.host import Host

ROWS: Final = 32
"""Rows of one batch exchange: enough for every kind of padding, few enough to find a bad row quickly."""
SEED: Final = 20261129
TIMED: Final = 16
"""Probes whose single requests are compared with the same engine forced to the CPU."""
ROUNDS: Final = 4
REPEATED: Final = 8
"""Prompts whose continuation is asked for twice."""

Ask: TypeAlias = Callable[[Sequence[int]], Awaitable[Any]]
"""Ask for the probes of these numbers in one exchange."""
Progress: TypeAlias = Callable[[str, int, int], None]
"""``progress(stage, done, total)``; the unit is an answered probe."""


@dataclass
class Trial:
    """One run on one open host; the attributes are what goes into the document."""

    host: Host
    assignment: Assignment
    progress: Progress
    inputs: EmbedInputs | RerankInputs | GenerateInputs | None = None
    fixture: Fixture | None = None
    fault: Fault | None = None
    placement: Placement | None = None
    packing: list[Packing] = field(default_factory=list)
    cost_ms: dict[str, float] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    limits: list[Case] = field(default_factory=list)
    repeat_differs: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    single_ms: list[float] = field(default_factory=list)
    batch_tokens: int = 0
    batch_s: float = 0.0
    load_ms: float | None = None
    native_ms: list[float] = field(default_factory=list)
    _stage: str = "start"
    _done: int = 0
    _total: int = 0

    @property
    def model(self) -> str:
        """The model's name on this host."""
        return self.assignment.model

    @property
    def lane(self) -> str:
        """The matrix lane under trial."""
        return self.assignment.lane

    @property
    def bundle(self) -> Bundle:
        """The model's bundle."""
        return self.assignment.bundle

    @property
    def artifact_dtype(self) -> str:
        """The dtype of the artifact that the lane loads."""
        artifact = self.assignment.placement.artifact
        assert artifact is not None
        return artifact.dtype

    async def everything(self) -> None:
        """Load, probe, ping; what ends the run early becomes ``fault``."""
        self.assignment.require()
        probes = probe_set.opened(self.bundle)
        if probes is not None:
            self.fixture = await self._described(probes)
        try:
            self._begin("load", 0)
            started = time.perf_counter()
            await self.host.load(self.model, lane=self.lane)
            self.load_ms = round((time.perf_counter() - started) * 1000, 3)
            self._note()
            if probes is not None:
                measured = await self._measured(probes)
                if self.assignment.require().device_kind == "ane":
                    self._begin("timing", 0)
                    # A probe that isn't finite has failed its own gate already: without its time, no speed-up.
                    with suppress(WORKER_ERRORS[ErrorCode.NONFINITE_OUTPUT]):
                        self.native_ms = await timed(single_calls(self.host, self, probes))
                self._begin("ping", 0)
                await self.host.ping(self.model, lane=self.lane)
                self._note()
                self.placement = Placement(share=self.facts["placement_share"], generation=self.facts["generation"])
                self.inputs = measured
                await self._packed(probes)
        except SynapseError as exc:
            self._note()
            self.fault = Fault(exc.code, exc.message, self._stage)
        finally:
            self.facts = self.facts or self._health()

    async def _measured(self, probes: Fixtures) -> EmbedInputs | RerankInputs | GenerateInputs:
        if probes.task == "embed":
            return await self._embed(probes)
        return await (self._rerank(probes) if probes.task == "rerank" else self._generate(probes))

    async def _packed(self, probes: Fixtures) -> None:
        """Try the packed widths that the worker advertises: last, so that a width that fails costs itself only."""
        widths = self.facts.get("packed_widths") or []
        if not widths or probes.task != "embed" or self.assignment.require().device_kind != "ane":
            return
        rows = probes.rows()
        self._begin("packed widths", len(widths))
        for width in widths:
            self.packing.append(await qualification.packing(self.host, self.assignment, rows, width))
            self._advance()
        sound = [one.width for one in self.packing if one.reason is None]
        try:
            self.cost_ms = await qualification.costs(self.host, self.assignment, sound, rows)
        except SynapseError as exc:
            self.packing = [msgspec.structs.replace(one, reason=one.reason or exc.message) for one in self.packing]

    def _begin(self, stage: str, total: int) -> None:
        self._stage, self._done, self._total = stage, 0, total
        self.progress(stage, 0, total)

    def _advance(self, count: int = 1) -> None:
        self._done += count
        self.progress(self._stage, self._done, self._total)

    def _health(self) -> dict[str, Any]:
        found: dict[str, Any] = self.host.health()["lanes"][self.assignment.lane_id]
        return found

    def _note(self) -> None:
        """Remember who serves; a second generation means that the first was lost."""
        health = self._health()
        if health.get("worker_engine") is not None:
            self.facts = health
        generation = health["generation"]
        if generation and generation not in self.generations:
            self.generations.append(generation)

    def performance(self) -> Performance:
        """Return the timings."""
        return Performance(
            single_ms=[round(ms, 3) for ms in self.single_ms],
            batch_tokens=self.batch_tokens,
            batch_s=round(self.batch_s, 6),
            load_ms=self.load_ms,
            rss_mb=self.facts.get("rss_mb"),
        )

    async def _described(self, probes: Fixtures) -> Fixture:
        """Compare the fixtures with the bundle they came in: digest, and ids against its own tokenizer."""
        ref = self.bundle.manifest.fixtures
        assert isinstance(ref, FileRef)
        return Fixture(
            expected_digest=ref.digest,
            digest=digests.PREFIX + digests.file_digest(self.bundle.path(ref.path)),
            computed_by=probes.computed_by,
            probes=len(probes),
            stale_rows=probe_set.stale_rows(self.bundle, probes),
        )

    # --- asking ------------------------------------------------------------------------------------------------------

    async def _finite(self, call: Ask, rows: Sequence[int]) -> dict[int, Any]:
        """Ask for *rows* at once and return the answers by row; a row whose answer is not finite is missing."""
        try:
            answers = await call(rows)
        except SynapseError as exc:
            if exc.code != "nonfinite_output":
                raise
            if len(rows) == 1:
                return {}
            half = len(rows) // 2
            return {**await self._finite(call, rows[:half]), **await self._finite(call, rows[half:])}
        finally:
            self._note()
        return dict(zip(rows, answers, strict=True))

    async def _singles(self, call: Ask, count: int) -> dict[int, Any]:
        """Ask row by row, timed."""
        self._begin("singles", count)
        answers: dict[int, Any] = {}
        for row in range(count):
            started = time.perf_counter()
            answers |= await self._finite(call, [row])
            self.single_ms.append((time.perf_counter() - started) * 1000)
            self._advance()
        return answers

    async def _batches(self, stage: str, call: Ask, exchanges: Sequence[Sequence[int]]) -> dict[int, Any]:
        self._begin(stage, sum(map(len, exchanges)))
        answers: dict[int, Any] = {}
        for rows in exchanges:
            answers |= await self._finite(call, rows)
            self._advance(len(rows))
        return answers

    async def _edges(self, cases: Sequence[tuple[str, int, str, Callable[[], Awaitable[Any]]]]) -> None:
        """Try every edge length; any typed answer is an outcome, only a lost worker ends the run."""
        self._begin("limits", len(cases))
        for name, tokens, expected, call in cases:
            try:
                await call()
                outcome = "ok"
            except SynapseError as exc:
                if exc.code in ("engine_crashed", "lane_refused", "probe_required"):
                    raise
                outcome = exc.code
            self.limits.append(Case(name, tokens, expected, outcome))
            self._note()
            self._advance()

    # --- embed -------------------------------------------------------------------------------------------------------

    async def _embed(self, probes: Fixtures) -> EmbedInputs:
        import numpy as np

        rows = probes.rows()
        self.tokens = [len(row) for row in rows]

        async def ask(numbers: Sequence[int]) -> Any:
            return await self.host.embed_ids(self.model, [rows[n] for n in numbers], lane=self.lane)

        await self._edges([
            (name, len(ids), expected, lambda ids=ids: self.host.embed_ids(self.model, [ids], lane=self.lane))  # type: ignore[misc]
            for name, ids, expected in probe_set.edge_rows(rows, self.bundle.manifest.max_tokens)
        ])  # fmt: skip
        for n in range(min(3, len(rows))):
            await self._finite(ask, [n])
        singles = await self._singles(ask, len(rows))
        exchanges = _chunks(range(len(rows)))
        batch = await self._batches("batches", ask, exchanges)
        shuffled = np.random.default_rng(SEED).permutation(len(rows)).tolist()
        mixed = _chunks(shuffled)
        permuted = await self._batches("permuted", ask, mixed)
        self.repeat_differs = await self._differs(ask, exchanges[0], batch)
        await self._throughput(rows)
        known = sorted(singles)
        reference = probes.vectors
        ours = np.array([singles[n] for n in known]) if known else np.zeros((0, reference.shape[1]))
        theirs = reference[known]
        cosine = agreement.cosines(ours, theirs)
        norms = np.linalg.norm(ours.astype(np.float64), axis=1)
        own, best = _against(batch, singles, exchanges, len(rows))
        permuted_own, permuted_best = _against(permuted, singles, mixed, len(rows))
        return EmbedInputs(
            cosine=_series(dict(zip(known, cosine.tolist(), strict=True)), len(rows)),
            norm=_series(dict(zip(known, norms.tolist(), strict=True)), len(rows)),
            overlap=_rounded(agreement.rank_overlaps(theirs, ours).tolist()),
            batch_own=own,
            batch_best=best,
            permuted_own=permuted_own,
            permuted_best=permuted_best,
            neighbour=agreement.nearest(ours),
            reference_neighbour=agreement.nearest(theirs),
            neighbour_pearson=_rounded(agreement.neighbour_pearson(theirs, ours).tolist()),
            unit=self.bundle.manifest.normalize is not False,
        )

    async def _differs(self, ask: Ask, rows: Sequence[int], before: dict[int, Any]) -> int:
        """Send an exchange again and return how many rows are not the same bits."""
        import numpy as np

        again = await self._finite(ask, rows)
        return sum(
            n in before and n in again and not np.array_equal(np.asarray(before[n]), np.asarray(again[n])) for n in rows
        )

    async def _throughput(self, rows: Sequence[Any]) -> None:
        """Time everything in one call, as bulk work goes; a lane with bad rows can't be timed so."""
        self._begin("throughput", len(rows))
        started = time.perf_counter()
        try:
            await self.host.embed_ids(self.model, rows, lane=self.lane)
        except SynapseError as exc:
            if exc.code != "nonfinite_output":
                raise
            return
        self.batch_s = time.perf_counter() - started
        self.batch_tokens = sum(self.tokens)

    # --- rerank ------------------------------------------------------------------------------------------------------

    async def _rerank(self, probes: Fixtures) -> RerankInputs:
        import numpy as np

        queries, candidates = probes.rows("query"), probes.rows("candidate")
        of: list[int] = probes.arrays["query_of"].tolist()
        self.tokens = [len(queries[q]) + len(row) + 3 for q, row in zip(of, candidates, strict=True)]

        async def ask(numbers: Sequence[int]) -> Any:
            query = queries[of[numbers[0]]]
            rows = [candidates[n] for n in numbers]
            return await self.host.rerank_ids(self.model, query.tolist(), rows, raw=True, lane=self.lane)

        async def pair(query: Any, candidate: Any) -> Any:
            return await self.host.rerank_ids(self.model, query, [candidate], raw=True, lane=self.lane)

        await self._edges([
            (name, len(query) + len(ids) + 3, expected, lambda q=query, c=ids: pair(q, c))  # type: ignore[misc]
            for name, query, ids, expected in probe_set.edge_pairs(candidates, self.bundle.manifest.max_tokens)
        ])  # fmt: skip
        for n in range(min(3, len(candidates))):
            await self._finite(ask, [n])
        singles = await self._singles(ask, len(candidates))
        exchanges = [
            part for q in range(len(queries)) for part in _chunks([n for n, query in enumerate(of) if query == q])
        ]
        started = time.perf_counter()
        batch = await self._batches("batches", ask, exchanges)
        self.batch_s, self.batch_tokens = time.perf_counter() - started, sum(self.tokens)
        random = np.random.default_rng(SEED)
        mixed = [random.permutation(rows).tolist() for rows in exchanges]
        permuted = await self._batches("permuted", ask, mixed)
        self.repeat_differs = await self._differs(ask, exchanges[0], batch)
        carried = {n: number for number, rows in enumerate(exchanges) for n in rows}
        return RerankInputs(
            query=of,
            reference=_rounded(probes.arrays["logits"].tolist()),
            single=_series(singles, len(candidates)),
            batch=_series(batch, len(candidates)),
            permuted=_series(permuted, len(candidates)),
            exchange=[carried[n] for n in range(len(candidates))],
        )

    # --- generate ----------------------------------------------------------------------------------------------------

    async def _generate(self, probes: Fixtures) -> GenerateInputs:
        prompts = [row.tolist() for row in probes.rows()]
        reference: list[list[int]] = probes.arrays["greedy"].tolist()
        clear: list[list[int]] = probes.arrays["clear"].tolist()
        self.tokens = [len(row) for row in prompts]
        stops = probe_set.stops(self.bundle)
        limit = self.bundle.manifest.max_tokens

        async def ask(ids: Sequence[int], count: int) -> list[int]:
            made = await self.host.generate_ids(self.model, ids, count, lane=self.lane)
            self._note()
            return list(made.generated_token_ids)

        base = [id for row in prompts for id in row if id not in stops]
        # One token follows each prompt and counts, so a prompt of max - 1 fills the model's context.
        lengths = (("length 1", 1), ("length 2", 2), ("max - 1", limit - 2), ("max", limit - 1), ("max + 1", limit))
        cases = [(name, probe_set.repeated(base, length)) for name, length in lengths]
        cases.append(("repeated token", base[:1] * min(64, limit - 1)))
        await self._edges([
            (name, len(ids), "sequence_too_long" if name == "max + 1" else "ok", lambda ids=ids: ask(ids, 1))  # type: ignore[misc]
            for name, ids in cases
        ])  # fmt: skip
        await ask(prompts[0], 1)
        self._begin("continuations", len(prompts))
        greedy = []
        for row, wanted in zip(prompts, reference, strict=True):
            started = time.perf_counter()
            greedy.append(await ask(row, len(wanted)))
            took = time.perf_counter() - started
            self.single_ms.append(took * 1000)
            self.batch_s += took
            self.batch_tokens += len(greedy[-1])
            self._advance()
        self._begin("next tokens", len(prompts))
        depths, following = [], []
        for number, (row, wanted, apart) in enumerate(zip(prompts, reference, clear, strict=True)):
            known = next((i for i, id in enumerate(wanted) if id in stops), len(wanted) - 1)
            usable = [depth for depth in range(known + 1) if apart[depth]] or [0]
            depth = usable[number % len(usable)]
            made = await ask([*row, *wanted[:depth]], 1)
            depths.append(depth)
            following.append(made[0] if made else None)
            self._advance()
        for row, wanted, made in zip(prompts[:REPEATED], reference, greedy, strict=False):
            self.repeat_differs += await ask(row, len(wanted)) != made
        return GenerateInputs(reference, greedy, depths, following, sorted(stops))


def single_calls(host: Host, trial: Trial, probes: Fixtures) -> list[Callable[[], Awaitable[Any]]]:
    """Return single requests for TIMED probes of all lengths, to be timed on one host and on another."""
    chosen = sorted(range(len(probes)), key=trial.tokens.__getitem__)[:: max(1, len(probes) // TIMED)][:TIMED]
    if probes.task == "embed":
        rows = probes.rows()
        return [lambda n=n: host.embed_ids(trial.model, [rows[n]], lane=trial.lane) for n in chosen]  # type: ignore[misc]
    queries, of, candidates = probes.rows("query"), probes.arrays["query_of"].tolist(), probes.rows("candidate")
    return [
        lambda n=n: host.rerank_ids(trial.model, queries[of[n]].tolist(), [candidates[n]], lane=trial.lane)  # type: ignore[misc]
        for n in chosen
    ]


async def timed(calls: Sequence[Callable[[], Awaitable[Any]]]) -> list[float]:
    """Return each call's best of ROUNDS in milliseconds: the machine's noise only ever adds."""
    best = [float("inf")] * len(calls)
    for _ in range(ROUNDS):
        for number, call in enumerate(calls):
            started = time.perf_counter()
            await call()
            best[number] = min(best[number], (time.perf_counter() - started) * 1000)
    return [round(ms, 3) for ms in best]


def _chunks(rows: Sequence[int]) -> list[Sequence[int]]:
    return [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(float(value), DIGITS) for value in values]


def _series(answers: dict[int, Any], count: int) -> Series:
    return [round(float(answers[n]), DIGITS) if n in answers else None for n in range(count)]


def _against(
    batch: dict[int, Any], singles: dict[int, Any], exchanges: Sequence[Sequence[int]], count: int
) -> tuple[Series, Series]:
    """Compare each exchange's vectors with the same rows' single answers; rows without either are null."""
    import numpy as np

    owns: dict[int, float] = {}
    bests: dict[int, float] = {}
    for rows in exchanges:
        known = [n for n in rows if n in batch and n in singles]
        if known:
            own, best = agreement.own_and_best(
                np.array([batch[n] for n in known]), np.array([singles[n] for n in known])
            )
            owns |= zip(known, own.tolist(), strict=True)
            bests |= zip(known, best.tolist(), strict=True)
    return _series(owns, count), _series(bests, count)
