"""One trial of a lane: every probe through the normal serving path, measured and recorded, judged by nobody here.

What each task asks is in :mod:`synapse_host.certification.measurement`. Nothing is asked twice until it works: rows
that a first attempt left without an answer, because it held NaN or infinity, are counted by stage and have no number in
that stage.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
import numpy as np

from engines.bundle import digest as digests
from engines.bundle.fixtures import Fixtures
from engines.bundle.manifest import Bundle, FileRef
from synapse_host.certificates import figures
from synapse_host.certificates.document import (
    Case,
    EmbedInputs,
    Fault,
    Fixture,
    GenerateInputs,
    Packing,
    Performance,
    Placement,
    RerankInputs,
)
from synapse_host.certification import packing as qualification
from synapse_host.certification import probes as probe_set
from synapse_host.errors import SynapseError
from synapse_host.host import Host
from synapse_host.models import builder
from synapse_host.placement.assignment import Assignment
from synapse_host.supervision.health import Health

TIMED: Final = 16
"""Probes whose single requests are compared with the same engine forced to the CPU."""
ROUNDS: Final = 4

Answer = TypeVar("Answer")
Answers: TypeAlias = dict[int, Any]
"""What came back, by probe."""
Ask: TypeAlias = Callable[[Sequence[int]], Awaitable[Any]]
"""Ask for the probes of these numbers in one exchange."""
Progress: TypeAlias = Callable[[str, int, int], None]
"""``progress(stage, done, total)``; the unit is an answered probe."""


Measure: TypeAlias = "Callable[[Trial, Fixtures], Awaitable[EmbedInputs | RerankInputs | GenerateInputs]]"
"""What a task asks and measures: :func:`synapse_host.certification.measurement.measure`."""


@dataclass
class Trial:
    """One run on one open host; the attributes are what goes into the document."""

    host: Host
    assignment: Assignment
    progress: Progress
    data_dir: Path | None = None
    inputs: EmbedInputs | RerankInputs | GenerateInputs | None = None
    fixture: Fixture | None = None
    fault: Fault | None = None
    placement: Placement | None = None
    packing: list[Packing] = field(default_factory=list)
    cost_ms: dict[str, float] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    limits: list[Case] = field(default_factory=list)
    repeat_differs: int | None = None
    non_finite: dict[str, int] = field(default_factory=dict)
    facts: Health = field(default_factory=lambda: Health(model="", state="stopped"))
    single_ms: list[float] = field(default_factory=list)
    batch_tokens: int = 0
    batch_s: float = 0.0
    equal_ms: float | None = None
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

    async def everything(self, measure: Measure) -> None:
        """Load, probe, ping; what ends the run early becomes ``fault``."""
        self.assignment.require()
        probes = probe_set.opened(self.bundle)
        if probes is not None:
            self.fixture = self._described(probes)
        try:
            self.begin("load", 0)
            started = time.perf_counter()
            await self.host.load(self.model, lane=self.lane)
            self.load_ms = round((time.perf_counter() - started) * 1000, 3)
            self.note()
            if probes is not None:
                measured = await measure(self, probes)
                if self.assignment.require().device_kind == "ane":
                    self.begin("timing", 0)
                    calls = single_calls(self.host, self, probes)
                    self.native_ms = await self.first(lambda: timed(calls), len(calls)) or []
                self.begin("ping", 0)
                await self.host.ping(self.model, lane=self.lane)
                self.note()
                self.placement = Placement(share=self.facts.placement_share, generation=self.facts.generation)
                self.inputs = measured
                await self._functions(probes)
        except SynapseError as exc:
            self.note()
            self.fault = Fault(exc.code, exc.message, self._stage)
        finally:
            if self.facts.worker_engine is None:
                self.facts = self._health()

    async def _functions(self, probes: Fixtures) -> None:
        """Time a Neural Engine lane's functions, and try the packed widths that its worker advertises.

        Last, so that a width that fails costs itself only.
        """
        if probes.task == "generate" or self.assignment.require().device_kind != "ane":
            return
        widths = self.facts.packed_widths if probes.task == "embed" else []
        rows = probes.rows() if probes.task == "embed" else probes.rows("candidate")
        self.begin("packed widths", len(widths))
        for width in widths:
            self.packing.append(await qualification.packing(self.host, self.assignment, rows, width))
            self.advance()
        sound = [one.width for one in self.packing if one.reason is None]
        try:
            self.cost_ms = await qualification.costs(self.host, self.assignment, sound, rows)
        except SynapseError as exc:
            if not widths:
                raise
            self.packing = [msgspec.structs.replace(one, reason=one.reason or exc.message) for one in self.packing]

    def begin(self, stage: str, total: int) -> None:
        """Start a stage of *total* probes; a fault names the stage it came in."""
        self._stage, self._done, self._total = stage, 0, total
        self.non_finite.setdefault(stage, 0)
        self.progress(stage, 0, total)

    def advance(self, count: int = 1) -> None:
        """Count answered probes of the stage."""
        self._done += count
        self.progress(self._stage, self._done, self._total)

    def _health(self) -> Health:
        return msgspec.convert(self.host.health()["lanes"][self.assignment.lane_id], Health)

    def note(self) -> None:
        """Remember who serves; a second generation means that the first was lost."""
        health = self._health()
        if health.worker_engine is not None:
            self.facts = health
        if health.generation and health.generation not in self.generations:
            self.generations.append(health.generation)

    def performance(self) -> Performance:
        """Return the timings."""
        return Performance(
            single_ms=[round(ms, 3) for ms in self.single_ms],
            batch_tokens=self.batch_tokens,
            batch_s=round(self.batch_s, 6),
            equal_ms=self.equal_ms,
            load_ms=self.load_ms,
            rss_mb=self.facts.rss_mb,
        )

    def said(self) -> dict[str, Any]:
        """Return what LOAD sent and the worker said of itself, by the document's names."""
        facts = self.facts
        return {
            "runtime_config": dict(self.assignment.require().load.runtime_config),
            "observed": facts.worker_engine,
            "version": facts.worker_version,
            "build_flags": facts.build_flags,
            "kernel_revision": facts.kernel_revision,
            "packed_widths": facts.packed_widths,
            "buckets": facts.buckets or [],
        }

    def _described(self, probes: Fixtures) -> Fixture:
        """Compare the fixtures with the bundle they came in: digest, and ids against its own tokenizer."""
        ref = self.bundle.manifest.fixtures
        assert isinstance(ref, FileRef)
        digest = digests.PREFIX + digests.file_digest(self.bundle.path(ref.path))
        return Fixture(
            expected_digest=ref.digest,
            digest=digest,
            computed_by=probes.computed_by,
            probes=len(probes),
            stale_rows=probe_set.stale_rows(self.bundle, probes),
            distinct=probes.distinct,
            origin=builder.reference_origin(digest, self.data_dir),
        )

    # --- asking ------------------------------------------------------------------------------------------------------

    async def first(self, call: Callable[[], Awaitable[Answer]], rows: int) -> Answer | None:
        """Ask once; None where the answer was not finite, and its rows are counted to the stage."""
        try:
            return await call()
        except SynapseError as exc:
            if exc.code != "nonfinite_output":
                raise
            self.non_finite[self._stage] += rows
            return None
        finally:
            self.note()

    async def ask(self, call: Ask, rows: Sequence[int]) -> Answers:
        """Ask for *rows* at once and return the answers by row; none of them where one was not finite."""
        answers = await self.first(lambda: call(rows), len(rows))
        return {} if answers is None else dict(zip(rows, answers, strict=True))

    async def stage(self, name: str, call: Ask, exchanges: Sequence[Sequence[int]]) -> tuple[Answers, list[float]]:
        """Ask exchange by exchange; return the answers by row, and what each exchange took in milliseconds."""
        self.begin(name, sum(map(len, exchanges)))
        answers: Answers = {}
        times = []
        for rows in exchanges:
            started = time.perf_counter()
            answers |= await self.ask(call, rows)
            times.append((time.perf_counter() - started) * 1000)
            self.advance(len(rows))
        return answers, times

    async def rows(
        self, call: Ask, exchanges: Sequence[Sequence[int]], mixed: Sequence[Sequence[int]]
    ) -> tuple[Answers, Answers, Answers]:
        """Ask for every row alone, in batches, in other company, and for one batch again.

        Not timed: the first requests that a worker serves.
        """
        alone = [[row] for row in range(len(self.tokens))]
        await self.stage("warm-up", call, alone[:3])
        singles, self.single_ms = await self.stage("singles", call, alone)
        batch, _ = await self.stage("batches", call, exchanges)
        permuted, took = await self.stage("permuted", call, mixed)
        self.batch_s, self.batch_tokens = sum(took) / 1000, sum(self.tokens)
        await self.repeat(call, exchanges, batch)
        return singles, batch, permuted

    async def edges(self, rows: Sequence[Any], call: Ask, *, more: int = 0) -> None:
        """Try every edge length; any typed answer is an outcome, only a lost worker ends the run.

        *more*: tokens that a row is served with beside its own.
        """
        cases = probe_set.edge_rows(rows, self.bundle.manifest.max_tokens - more)
        self.begin("limits", len(cases))
        for name, ids in cases.items():
            try:
                await call(ids)
                outcome = "ok"
            except SynapseError as exc:
                if exc.code in ("engine_crashed", "lane_refused", "probe_required"):
                    raise
                outcome = exc.code
            self.limits.append(Case(name, len(ids) + more, figures.CASES[name], outcome))
            self.note()
            self.advance()

    async def repeat(self, call: Ask, exchanges: Sequence[Sequence[int]], before: Answers) -> None:
        """Send the first exchange that was answered again, and count the rows that are not the same bits."""
        rows = next((rows for rows in exchanges if all(n in before for n in rows)), [])
        self.begin("repeat", len(rows))
        again = await self.ask(call, rows) if rows else {}
        if again:
            self.repeat_differs = sum(not np.array_equal(np.asarray(before[n]), np.asarray(again[n])) for n in rows)


def single_calls(host: Host, trial: Trial, probes: Fixtures) -> list[Callable[[], Awaitable[Any]]]:
    """Return single requests for TIMED probes of all lengths, to be timed on one host and on another."""
    chosen = sorted(range(len(probes)), key=trial.tokens.__getitem__)[:: max(1, len(probes) // TIMED)][:TIMED]
    if probes.task == "embed":
        rows = probes.rows()
        return [partial(host.embed_ids, trial.model, [rows[n]], lane=trial.lane) for n in chosen]
    queries, of, candidates = probes.rows("query"), probes.arrays["query_of"].tolist(), probes.rows("candidate")
    asked = [(queries[of[n]].tolist(), [candidates[n]]) for n in chosen]
    return [partial(host.rerank_ids, trial.model, *pair, lane=trial.lane) for pair in asked]


async def timed(calls: Sequence[Callable[[], Awaitable[Any]]]) -> list[float]:
    """Return each call's best of ROUNDS in milliseconds: the machine's noise only ever adds."""
    best = [float("inf")] * len(calls)
    for _ in range(ROUNDS):
        for number, call in enumerate(calls):
            started = time.perf_counter()
            await call()
            best[number] = min(best[number], (time.perf_counter() - started) * 1000)
    return [round(ms, 3) for ms in best]
