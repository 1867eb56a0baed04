"""One loaded model: admission, eviction, embedding and reranking over its resident functions."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

import numpy as np

from engines.ane import compute_plan, inputs
from engines.ane.backend import HINTS
from engines.ane.shapes import Resident, Shapes, group
from engines.ane.signature import HIDDEN, SCORE, Key, check_signature
from engines.ane.stderr_scan import StderrScan
from engines.bundle import tight
from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import Inventory, Pooling
from engines.runtime.batch import check_vocabulary
from engines.runtime.engine import Model, ModelStatus

if TYPE_CHECKING:
    from engines.ane.backend import Backend, Program, Source
    from engines.ane.config import Settings
    from engines.ane.inputs import Feeds, InputRules
    from engines.ane.signature import FunctionSpec
    from engines.runtime.batch import FloatArray, TokenBatch
    from engines.runtime.progress import ProgressReporter

SLOW: Final = 2.0
"""A load whose best timed run takes longer than this times the certified one is a failed admission: Core ML may accept
a model and run it on the CPU instead of refusing (ane.md 4)."""

SMOKE_RUNS: Final = 3
MIN_NORM: Final = 1e-12

PlanCache = dict[tuple[str, ...], tuple[float, tuple[str, ...]]]
"""(bundle digest, function, OS build, units, hints) -> share and CPU stages; a plan takes seconds to minutes. One that
failed or came too late isn't kept: it is asked for again at the next admission."""


def pool(states: FloatArray, pooling: Pooling) -> FloatArray:
    """Pool one row's token states, float32 (tokens, dims) without padding, to float32 (dims,).

    On the host, since sums of several hundred fp16 values lose bits on the device (ane.md 2.5); in float64, since the
    order of a float32 sum depends on the array's stride, and a row must not change with the bucket it ran in.
    """
    if pooling is Pooling.MEAN:
        mean: FloatArray = (states.sum(axis=0, dtype=np.float64) / len(states)).astype(np.float32)
        return mean
    one: FloatArray = states[0 if pooling is Pooling.CLS else -1]
    return one


def finish(vectors: FloatArray, *, normalize: bool) -> FloatArray:
    """Divide finite rows by their L2 norm when *normalize*; float32 (rows, dims) in place.

    An all-zero row is ``nonfinite_output``: the Neural Engine is known to return zeros on internal overflow
    (apple/coremltools#1229, #1380), and such a row must not be served.
    """
    norms: np.ndarray = np.sqrt(np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64))
    bad = np.flatnonzero(norms <= 0.0)
    if len(bad):
        why = f"{len(bad)} of {len(vectors)} rows are all zeros, first {bad[0]}"
        raise EngineError(ErrorCode.NONFINITE_OUTPUT, why)
    if normalize:
        vectors /= np.maximum(norms, MIN_NORM)[:, None].astype(np.float32)
    return vectors


class AneModel(Model):
    """A model of one task whose functions are admitted one by one; nothing loads implicitly.

    *functions*: key -> (manifest name, where it lives, its signature). *recheck* raises EngineError when the artifact
    is no longer what LOAD verified. The smallest bucket is loaded, run once and resident when the constructor returns.
    Unit of progress: a function loaded, run, planned (setup); a finished row or pass (inference).
    """

    def __init__(
        self,
        *,
        backend: Backend,
        functions: Mapping[Key, tuple[str, Source, FunctionSpec]],
        recheck: Callable[[], None],
        rules: InputRules,
        task: str,
        hidden: int,
        layers: int,
        settings: Settings,
        bundle_digest: str,
        version: str,
        plans: PlanCache,
        progress: ProgressReporter,
    ) -> None:
        self._backend = backend
        self._functions = dict(functions)
        self._recheck = recheck
        self._rules = rules
        self._task = task
        self._layers = layers
        self._settings = settings
        self._bundle_digest = bundle_digest
        self._version = version
        self._plans = plans
        self._progress = progress
        self.dims = hidden if task == "embed" else 1
        self._hidden = hidden
        self.buckets = tuple(sorted(key.tokens for key in functions if key.kind == "shape"))
        self._shapes = Shapes(functions, self._open)
        self._shapes.admit(Key("shape", self.buckets[0]))

    def admit_shape(self, shape: int, *, progress: ProgressReporter) -> Inventory:
        """Load one bucket. EngineError: invalid_shape, ane_residency_limit, and what loading raises."""
        self._progress = progress
        return self._shapes.admit(Key("shape", shape))

    def evict_shape(self, shape: int, *, progress: ProgressReporter) -> None:
        """Release one bucket; returns after the model object is gone and its autorelease pool drained."""
        self._shapes.evict(Key("shape", shape))
        progress.advance()

    def admit_packed(self, width: int, *, progress: ProgressReporter) -> Inventory:
        """Load one packed width; the runtime lets only advertised ones through."""
        self._progress = progress
        return self._shapes.admit(Key("packed", width))

    def evict_packed(self, width: int, *, progress: ProgressReporter) -> None:
        """Release one packed width."""
        self._shapes.evict(Key("packed", width))
        progress.advance()

    def _open(self, key: Key) -> Resident:
        name, source, spec = self._functions[key]
        program: Program | None = None
        try:
            with StderrScan() as scan:
                program = self._backend.open(source, units=self._settings.compute_units)
                self._progress.advance()
                check_signature(name, program.signature(), spec)
                self._smoke(key, name, program)
                self._progress.advance()
                identity = self._identity(name)
                share, stages = self._placement(identity, program)
                self._progress.advance()
            # The framework has opened the path by now, perhaps more than once: what lay there must be what was hashed.
            self._recheck()
            # Behind the block: only there has everything been read.
            scan.check(f"function {name}", placement=self._settings.placement == "on")
        except BaseException:
            if program is not None:
                program.close()
            raise
        if share is not None:
            self._plans[tuple(identity.values())] = share, stages
        inventory = compute_plan.inventory(**identity, version=self._version, layers=self._layers, stages=list(stages))
        return Resident(program, inventory, share)

    def _identity(self, name: str) -> dict[str, str]:
        """What selects the program behind a function: placement and inventory belong to it."""
        return {
            "bundle": self._bundle_digest,
            "function": name,
            "os_build": self._backend.os_build(),
            "units": self._settings.compute_units,
            "hints": HINTS,
        }

    def _smoke(self, key: Key, name: str, program: Program) -> None:
        """Run once before anyone depends on it: a bad load may only show at the first prediction.

        With a certified time, run a few times more and compare the best: one hiccup proves nothing.
        """
        feeds = self._smoke_feeds(key)
        self._run(program, feeds)
        certified = self._settings.certified_ms.get(name)
        if certified is None:
            return
        took = math.inf
        for _ in range(SMOKE_RUNS):
            started = time.perf_counter()
            self._run(program, feeds)
            took = min(took, (time.perf_counter() - started) * 1000)
        if took > SLOW * certified:
            why = f"took {took:.1f} ms, certified {certified:.1f} ms: it doesn't run where it should"
            raise EngineError(ErrorCode.INVALID_PLACEMENT, f"function {name} {why}")

    def _smoke_feeds(self, key: Key) -> Feeds:
        row = np.full(min(3, key.tokens), min(1, self._rules.vocab - 1), np.int32)
        if key.kind == "shape":
            return inputs.single(row, key.tokens, self._rules)
        return inputs.packed([row, row] if 2 * len(row) <= key.tokens else [row], key.tokens, self._rules)

    def _placement(self, identity: dict[str, str], program: Program) -> tuple[float | None, tuple[str, ...]]:
        """Return share and CPU stages, from the cache where this function was planned before."""
        if self._settings.placement == "off":
            return None, ()
        known = self._plans.get(tuple(identity.values()))
        if known is not None:
            return known
        plan = program.plan()
        if plan is None:
            return None, ()
        # On the CPU alone everything is off the allow-list by construction; that mode measures speed-up only.
        judged = self._settings.compute_units == "cpu_and_ne"
        return compute_plan.share(plan), tuple(compute_plan.cpu_stages(plan)) if judged else ()

    def embed(
        self,
        batch: TokenBatch,
        *,
        pooling: Pooling,
        normalize: bool,
        packed_width: int | None,
        progress: ProgressReporter,
    ) -> FloatArray:
        """Return float32 (rows, dims). Every row is checked: finite, right shape, not all zeros."""
        if self._task != "embed":
            self._mismatch("embed")
        check_vocabulary(batch.input_ids, self._rules.vocab)
        vectors = np.empty((len(batch), self.dims), np.float32)
        found = self._each(batch, progress) if packed_width is None else self._packed(batch, packed_width, progress)
        for row, states in found:
            vectors[row] = pool(states, pooling)
        return finish(vectors, normalize=normalize)

    def rerank_sequences(self, batch: TokenBatch, *, progress: ProgressReporter) -> FloatArray:
        """Return raw logits of already composed sequences, float32 (rows,)."""
        if self._task != "rerank":
            self._mismatch("rerank")
        check_vocabulary(batch.input_ids, self._rules.vocab)
        scores = np.empty(len(batch), np.float32)
        for row, output in self._each(batch, progress):
            scores[row] = output[0]
        return scores

    def _each(self, batch: TokenBatch, progress: ProgressReporter) -> Iterator[tuple[int, FloatArray]]:
        """Run every row on its own rung, rungs ascending; yield its index with its states without padding, or score."""
        groups = group(batch.lengths.tolist(), self.buckets)
        # All rungs first: a refusal halfway would waste the rows before it.
        programs = {bucket: self._shapes.program(Key("shape", bucket)) for bucket in groups}
        rows = list(batch.rows())
        for bucket, members in groups.items():
            for row in members:
                output = self._run(programs[bucket], inputs.single(rows[row], bucket, self._rules))
                yield row, output[0, : len(rows[row])] if output.ndim == 3 else output
                progress.advance()

    def _packed(self, batch: TokenBatch, width: int, progress: ProgressReporter) -> Iterator[tuple[int, FloatArray]]:
        """Run several rows a pass; yield each row's index with its states."""
        program = self._shapes.program(Key("packed", width))
        rows = list(batch.rows())
        for one in tight.plan(batch.lengths.tolist(), width=width, max_rows=tight.MAX_ROWS):
            output = self._run(program, inputs.packed([rows[row] for row in one.rows], width, self._rules))
            for row, (start, end) in zip(one.rows, one.spans, strict=True):
                yield row, output[0, start:end]
            progress.advance()

    def _run(self, program: Program, feeds: Feeds) -> FloatArray:
        """Run a function and check its one output's shape (EnumeratedShapes bugs return another one silently)."""
        outputs = program.run(feeds)
        width = feeds["input_ids"].shape[1]
        name, shape = (SCORE, (1,)) if self._task == "rerank" else (HIDDEN, (1, width, self._hidden))
        output = outputs.get(name)
        if output is None or output.shape != shape:
            got = {key: list(value.shape) for key, value in outputs.items()}
            raise EngineError(ErrorCode.INFERENCE_FAILED, f"the function returned {got}, expected {name} {list(shape)}")
        if not np.isfinite(output).all():
            # Padding columns count: a NaN anywhere means the graph overflowed, whoever reads it.
            raise EngineError(ErrorCode.NONFINITE_OUTPUT, f"{name} of a {width}-token function holds NaN or infinity")
        return output

    def status(self) -> ModelStatus:
        """Return the cached part of PONG; never touches the framework."""
        return ModelStatus(
            placement_share=self._shapes.share,
            buckets=self.buckets,
            resident_shapes=self._shapes.resident("shape"),
            resident_packed=self._shapes.resident("packed"),
        )

    def close(self) -> None:
        """Release every function; idempotent."""
        self._shapes.close()
