"""The host facade: texts or token ids in, numpy arrays out, whatever engine serves and however often its worker dies.

One :class:`Host` owns its lanes' supervisors. Placement is decided at open and never changes. Nothing here retries:
errors are :class:`~synapse_host.errors.SynapseError` with ``safe_to_retry``.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from msgspec import UNSET

from engines.bundle.manifest import Bundle, BundleError
from engines.bundle.manifest import read as read_bundle
from engines.protocol.messages import (
    ITEM_BYTES,
    EmbedBatch,
    Generate,
    Item,
    Pooling,
    Rerank,
    RerankSequences,
    Segment,
    Text,
    Vectors,
)
from synapse_host import admission, certificates, hardware, rungs
from synapse_host.ane_lane import AneFleet, RungedLane
from synapse_host.assignment import Assignment, assign, find
from synapse_host.certificates import Certificate, Standing
from synapse_host.config import HostConfig
from synapse_host.counters import LaneCounters
from synapse_host.errors import BundleInvalid, DeadlineExceeded, InvalidRequest, NotCertified, SequenceTooLong
from synapse_host.health import LaneHealth
from synapse_host.lane import LaneSpec
from synapse_host.lane_lock import LaneLock
from synapse_host.listener import RuntimeDirectory
from synapse_host.logring import LogRing
from synapse_host.matrix import HardwareMatrix
from synapse_host.matrix import load as load_matrix
from synapse_host.permits import Permits
from synapse_host.results import EmbedResult, Generation, RerankResult, sigmoid
from synapse_host.slots import Limits
from synapse_host.supervisor import Supervisor
from synapse_host.sync import SyncHost
from synapse_host.tokenize import Rows, TextTokenizer, id_rows

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    FloatArray = npt.NDArray[np.float32]

__all__ = ["EmbedResult", "Generation", "Host", "RerankResult", "SyncHost"]

CHUNK: Final = 1024
"""Texts tokenised at once; with the next chunk's ids and the current one's vectors that bounds the host's memory."""
INLINE_CHARACTERS: Final = 16_384
"""Texts shorter than this in sum are tokenised on the loop's thread: a thread switch costs more than they do."""
AHEAD: Final = 2
"""Exchanges handed to the lane at once: one runs, the next is prepared and waits."""

T = TypeVar("T")


class Host:
    """A running set of lanes. Make it with :meth:`open`; every call may come from several tasks at once."""

    def __init__(
        self,
        *,
        matrix: HardwareMatrix,
        bundles: Mapping[str, Bundle],
        profile: hardware.HostProfile,
        config: HostConfig,
        runtime: RuntimeDirectory,
    ) -> None:
        self.matrix = matrix
        self.profile = profile
        self.config = config
        self.bundles = dict(bundles)
        self.assignments = assign(matrix, profile=profile, bundles=bundles)
        self._runtime = runtime
        self._permits = Permits(config.permits)
        self._supervisors: dict[str, Supervisor] = {}
        self._lane_lock: LaneLock | None = None
        self._fleet: AneFleet | None = None
        self._runged: dict[str, RungedLane] = {}
        self._qualifying = False
        self.counters = {lane_id: LaneCounters() for lane_id in self.assignments}
        """What each lane has done, for :mod:`synapse_host.metrics`."""
        self.logs = {lane_id: LogRing(config.log_ring_bytes) for lane_id in self.assignments}
        """The last output of each lane's workers."""
        self._tokenizers: dict[str, TextTokenizer] = {}
        self._standings: dict[str, Standing] = {}
        """Lanes that need a certificate, by id, with how they stand; looked up when the host opens."""
        self._closed = False
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        matrix: HardwareMatrix | Path | str | None = None,
        models: Mapping[str, Path | str] | None = None,
        config: HostConfig | None = None,
        *,
        qualifying: bool = False,
    ) -> AsyncIterator[Host]:
        """Open a host on *models* (name to bundle folder) and close it, workers and all, at the end of the block.

        Default matrix: the packaged one. Default models: the installed bundles of the models directory. Starts no
        worker: the first request of a lane does. *qualifying*: Neural Engine workers advertise every packed width of
        their manifest, for a certification to try; serving packs nothing then. Raises MatrixInvalid, BundleInvalid,
        InvalidRequest.
        """
        config = config or HostConfig()
        loaded = matrix if isinstance(matrix, HardwareMatrix) else load_matrix(matrix)
        bundles = open_bundles(models if models is not None else _installed(config))
        tasks = {bundle.manifest.task for bundle in bundles.values()}
        wanted = {id for lane in loaded.lanes.values() if lane.task in tasks for id in lane.engines}
        keys = hardware.floor_keys(loaded, wanted)
        profile = await asyncio.to_thread(hardware.detect, keys)
        runtime = RuntimeDirectory.open(config.runtime_dir)
        try:
            host = cls(matrix=loaded, bundles=bundles, profile=profile, config=config, runtime=runtime)
            host._qualifying = qualifying
            host._loop = asyncio.get_running_loop()
            try:
                await host._look_up_certificates()
                yield host
            finally:
                await host.aclose()
        finally:
            runtime.close()

    async def aclose(self, *, drain: float = 0.0) -> None:
        """Stop every worker; running requests get *drain* seconds to finish, waiting ones are refused at once.

        Idempotent; a call with a shorter *drain* hurries one that still waits.
        """
        self._closed = True
        if os.getpid() != self._pid:
            # A forked child leaves the block too: workers and sockets are its parent's.
            return
        supervisors = dict(self._supervisors)
        if supervisors:
            await asyncio.gather(*(supervisor.aclose(drain=drain) for supervisor in supervisors.values()))
        fleet, self._fleet = self._fleet, None
        if fleet is not None:
            await fleet.aclose()
        if self._lane_lock is not None:
            self._lane_lock.close()
            self._lane_lock = None
        for lane_id in supervisors:
            self._supervisors.pop(lane_id, None)

    # --- embeddings --------------------------------------------------------------------------------------------------

    async def embed(
        self,
        model: str,
        texts: Sequence[str],
        *,
        lane: str | None = None,
        deadline: float | None = None,
        truncate: bool = False,
    ) -> FloatArray:
        """Return the texts' vectors, float32 (n, dims), in input order. *deadline*: seconds from now."""
        return (await self.embed_result(model, texts, lane=lane, deadline=deadline, truncate=truncate)).vectors

    async def embed_result(
        self,
        model: str,
        texts: Sequence[str],
        *,
        lane: str | None = None,
        deadline: float | None = None,
        truncate: bool = False,
    ) -> EmbedResult:
        """Return vectors with what was cut and who served. Raises SequenceTooLong by index unless *truncate*."""
        until = _absolute(deadline)
        assignment = self._find(model, lane, "embed")
        _check_texts(texts, "texts")
        if len(texts) <= CHUNK:
            rows = await self._tokenised(texts, until, lambda: self._tokenizer(model).rows(texts, truncate=truncate))
            return self._embed_result(
                assignment, await self._embed_rows(assignment, rows, until), rows.truncated, len(rows.ids)
            )
        import numpy as np

        vectors = np.empty((len(texts), assignment.bundle.manifest.dims), np.float32)
        truncated: list[int] = []
        done = tokens = 0
        async for part in self.embed_stream(model, texts, lane=lane, deadline=deadline, truncate=truncate):
            vectors[done : done + len(part.vectors)] = part.vectors
            truncated += part.truncated
            done += len(part.vectors)
            tokens += part.tokens
        return self._embed_result(assignment, vectors, truncated, tokens)

    async def embed_stream(
        self,
        model: str,
        texts: Iterable[str],
        *,
        lane: str | None = None,
        deadline: float | None = None,
        truncate: bool = False,
        offset: int = 0,
    ) -> AsyncGenerator[EmbedResult, None]:
        """Yield results of consecutive chunks of at most 1,024 texts; memory stays bounded however many there are.

        The next chunk is read and tokenised in a thread while the worker computes. Indices (in ``truncated`` and in
        errors) count from *offset*. Aclose the iterator when leaving it early.
        """
        until = _absolute(deadline)
        assignment = self._find(model, lane, "embed")
        tokenizer = self._tokenizer(model)
        source = iter(texts)
        start = offset

        def prepare(first: int) -> Rows | None:
            chunk = list(islice(source, CHUNK))
            return tokenizer.rows(chunk, truncate=truncate, offset=first) if chunk else None

        ahead = asyncio.ensure_future(asyncio.to_thread(prepare, start))
        try:
            while (rows := await _within(ahead, until)) is not None:
                start += len(rows.lengths)
                ahead = asyncio.ensure_future(asyncio.to_thread(prepare, start))
                vectors = await self._embed_rows(assignment, rows, until)
                yield self._embed_result(assignment, vectors, rows.truncated, len(rows.ids))
        finally:
            if not ahead.done():
                # The thread can't be interrupted: wait until it has let go of the caller's iterator.
                await asyncio.wait([ahead])
            if not ahead.cancelled():
                ahead.exception()

    async def embed_ids(
        self, model: str, rows: Sequence[Any], *, lane: str | None = None, deadline: float | None = None
    ) -> FloatArray:
        """Return the vectors of rows of token ids (special tokens included), float32 (n, dims)."""
        until = _absolute(deadline)
        assignment = self._find(model, lane, "embed")
        checked = self._checked_ids(rows, assignment, "row")
        return await self._embed_rows(assignment, checked, until)

    async def embed_packed(
        self, model: str, rows: Sequence[Any], width: int, *, lane: str | None = None, deadline: float | None = None
    ) -> FloatArray:
        """Return the vectors of at most 64 rows that share passes of one packed width: what qualifies a width.

        Serving chooses by itself (:mod:`synapse_host.rungs`). InvalidRequest where the lane has no packed functions,
        ``unsupported_packed_width`` for a width that its worker doesn't advertise.
        """
        until = _absolute(deadline)
        assignment = self._find(model, lane, "embed")
        checked = self._checked_ids(rows, assignment, "row")
        serving = self._serving(assignment)
        if not isinstance(serving, RungedLane):
            raise InvalidRequest(f"lane {assignment.lane_id} has no packed functions: it is not on the Neural Engine")
        manifest = assignment.bundle.manifest
        pooling = Pooling(manifest.pooling) if manifest.pooling is not UNSET else Pooling.MEAN
        items = [Item(id=str(row), n_tokens=length) for row, length in enumerate(checked.lengths)]

        def build(req_id: str, model_ref: str) -> tuple[EmbedBatch, memoryview]:
            normalize = manifest.normalize is not False
            request = EmbedBatch(req_id=req_id, model_ref=model_ref, pooling=pooling, normalize=normalize, items=items)
            return request, _bytes(checked.ids)

        _, raw = await serving.submit_packed(width, build, deadline=until, stage="embed")
        vectors: FloatArray = raw.reshape(len(items), manifest.dims)
        return vectors

    async def _embed_rows(self, assignment: Assignment, rows: Rows, until: float | None) -> FloatArray:
        import numpy as np

        manifest = assignment.bundle.manifest
        dims = manifest.dims
        pooling = Pooling(manifest.pooling) if manifest.pooling is not UNSET else Pooling.MEAN
        normalize = manifest.normalize is not False
        exchanges = admission.split(
            rows.lengths, reply_row_bytes=ITEM_BYTES * dims, max_frame=self.config.max_frame, noun="text"
        )
        offsets = _offsets(rows.lengths)
        supervisor = self._serving(assignment)

        async def run(part: range) -> FloatArray:
            items = [Item(id=str(row), n_tokens=rows.lengths[row]) for row in part]
            payload = _bytes(rows.ids[offsets[part.start] : offsets[part.stop]])

            def build(req_id: str, model_ref: str) -> tuple[EmbedBatch, memoryview]:
                request = EmbedBatch(
                    req_id=req_id, model_ref=model_ref, pooling=pooling, normalize=normalize, items=items
                )
                return request, payload

            reply, raw = await supervisor.submit(build, deadline=until, stage="embed")
            assert isinstance(reply, Vectors)
            if reply.dims != dims:
                raise BundleInvalid(
                    f"bundle {assignment.model} says dims {dims}, its artifact gives {reply.dims}. Rebuild the bundle",
                    details={"expected": dims, "observed": reply.dims},
                )
            vectors: FloatArray = raw.reshape(len(part), dims)
            return vectors

        if len(exchanges) == 1:
            return await run(exchanges[0])
        vectors = np.empty((len(rows.lengths), dims), np.float32)

        async def place(part: range) -> None:
            vectors[part.start : part.stop] = await run(part)

        await _in_order([lambda part=part: place(part) for part in exchanges])  # type: ignore[misc]
        return vectors

    def _embed_result(
        self, assignment: Assignment, vectors: FloatArray, truncated: list[int], tokens: int
    ) -> EmbedResult:
        spec = assignment.require()
        return EmbedResult(
            vectors, truncated, assignment.model, assignment.lane_id, spec.engine_id, spec.device, tokens
        )

    # --- reranking ---------------------------------------------------------------------------------------------------

    async def rerank(
        self,
        model: str,
        query: str,
        documents: Sequence[str],
        *,
        raw: bool = False,
        lane: str | None = None,
        deadline: float | None = None,
        truncate: bool = False,
    ) -> FloatArray:
        """Return one score per document, float32 (n,), in input order: a probability, or the logit with *raw*."""
        result = await self.rerank_result(
            model, query, documents, raw=raw, lane=lane, deadline=deadline, truncate=truncate
        )
        return result.scores

    async def rerank_result(
        self,
        model: str,
        query: str,
        documents: Sequence[str],
        *,
        raw: bool = False,
        lane: str | None = None,
        deadline: float | None = None,
        truncate: bool = False,
    ) -> RerankResult:
        """Return scores with what was cut and who served. Truncation cuts documents only."""
        until = _absolute(deadline)
        assignment = self._find(model, lane, "rerank")
        _check_texts(documents, "documents")
        spec = assignment.require()
        tokenizer = self._tokenizer(model)
        if spec.owned:
            rows = await self._tokenised(documents, until, lambda: tokenizer.pairs(query, documents, truncate=truncate))
            logits = await self._score_sequences(assignment, rows, until)
        else:
            query_ids, rows = await self._tokenised(
                documents, until, lambda: tokenizer.segments(query, documents, truncate=truncate)
            )
            logits = await self._score_segments(assignment, query_ids, rows, until)
        return RerankResult(
            self._scored(assignment, logits, raw),
            rows.truncated,
            assignment.model,
            assignment.lane_id,
            spec.engine_id,
            spec.device,
        )

    async def rerank_ids(
        self,
        model: str,
        query_ids: Sequence[int],
        candidates: Sequence[Any],
        *,
        raw: bool = False,
        lane: str | None = None,
        deadline: float | None = None,
    ) -> FloatArray:
        """Return scores of candidates given as bare segments of token ids, without special tokens."""
        until = _absolute(deadline)
        assignment = self._find(model, lane, "rerank")
        spec = assignment.require()
        query = id_rows([query_ids], noun="query").ids
        rows = id_rows(candidates, noun="candidate")
        if not rows.lengths:
            raise InvalidRequest("candidates is empty: nothing to score")
        manifest = assignment.bundle.manifest
        if spec.owned:
            from synapse_host.tokenize import compose_ids

            rows = compose_ids(assignment.bundle, query, rows, self._tokenizers.get(model))
            admission.check_lengths(
                rows.lengths, max_tokens=manifest.max_tokens, model=assignment.model, noun="candidate"
            )
            logits = await self._score_sequences(assignment, rows, until)
        else:
            longest = [length + len(query) + 3 for length in rows.lengths]
            admission.check_lengths(longest, max_tokens=manifest.max_tokens, model=assignment.model, noun="candidate")
            logits = await self._score_segments(assignment, query, rows, until)
        return self._scored(assignment, logits, raw)

    def _scored(self, assignment: Assignment, logits: FloatArray, raw: bool) -> FloatArray:
        # SCORES are raw logits on every engine; the sigmoid is applied here, once (protocol-v3, 1).
        return sigmoid(logits) if not raw and assignment.bundle.manifest.score == "sigmoid" else logits

    async def _score_segments(
        self, assignment: Assignment, query: npt.NDArray[np.int32], rows: Rows, until: float | None
    ) -> FloatArray:
        import numpy as np

        exchanges = admission.split(
            rows.lengths,
            reply_row_bytes=ITEM_BYTES,
            max_frame=self.config.max_frame,
            common_tokens=len(query),
            noun="document",
        )
        offsets = _offsets(rows.lengths)

        def exchange(part: range) -> Callable[[str, str], tuple[Rerank, memoryview]]:
            candidates = [Segment(n_tokens=rows.lengths[row]) for row in part]
            ids = np.concatenate([query, rows.ids[offsets[part.start] : offsets[part.stop]]])

            def build(req_id: str, model_ref: str) -> tuple[Rerank, memoryview]:
                request = Rerank(req_id=req_id, model_ref=model_ref, query_n_tokens=len(query), candidates=candidates)
                return request, _bytes(ids)

            return build

        return await self._score(assignment, exchanges, exchange, until)

    async def _score_sequences(self, assignment: Assignment, rows: Rows, until: float | None) -> FloatArray:
        exchanges = admission.split(
            rows.lengths, reply_row_bytes=ITEM_BYTES, max_frame=self.config.max_frame, noun="document"
        )
        offsets = _offsets(rows.lengths)

        def exchange(part: range) -> Callable[[str, str], tuple[RerankSequences, memoryview]]:
            sequences = [Segment(n_tokens=rows.lengths[row]) for row in part]
            payload = _bytes(rows.ids[offsets[part.start] : offsets[part.stop]])

            def build(req_id: str, model_ref: str) -> tuple[RerankSequences, memoryview]:
                return RerankSequences(req_id=req_id, model_ref=model_ref, sequences=sequences), payload

            return build

        return await self._score(assignment, exchanges, exchange, until)

    async def _score(
        self,
        assignment: Assignment,
        exchanges: list[range],
        exchange: Callable[[range], Callable[[str, str], tuple[Any, memoryview]]],
        until: float | None,
    ) -> FloatArray:
        import numpy as np

        supervisor = self._serving(assignment)
        scores = np.empty(exchanges[-1].stop, np.float32)

        async def place(part: range) -> None:
            _, raw = await supervisor.submit(exchange(part), deadline=until, stage="rerank")
            scores[part.start : part.stop] = raw

        if len(exchanges) == 1:
            await place(exchanges[0])
        else:
            await _in_order([lambda part=part: place(part) for part in exchanges])  # type: ignore[misc]
        return scores

    # --- generation --------------------------------------------------------------------------------------------------

    async def generate(
        self,
        model: str,
        prompt: str | Sequence[Mapping[str, str]],
        *,
        max_tokens: int = 128,
        chat: bool = False,
        lane: str | None = None,
        deadline: float | None = None,
    ) -> Generation:
        """Continue a prompt greedily; with *chat* it is a message (or a list of them) put into the model's template."""
        until = _absolute(deadline)
        assignment = self._find(model, lane, "generate")
        tokenizer = self._tokenizer(model)
        if chat:
            from synapse_host.chat import chat_ids

            # A template is the bundle's own program: it never runs on the loop.
            job = asyncio.to_thread(chat_ids, assignment.bundle, tokenizer, prompt)
            ids: Any = await _within(asyncio.ensure_future(job), until)
        elif isinstance(prompt, str):
            ids = (await self._tokenised([prompt], until, lambda: tokenizer.prompt(prompt))).ids
        else:
            raise InvalidRequest("a list of messages needs chat=True")
        return await self._generate(assignment, ids, max_tokens, until)

    async def generate_ids(
        self,
        model: str,
        ids: Sequence[int],
        max_tokens: int,
        *,
        lane: str | None = None,
        deadline: float | None = None,
    ) -> Generation:
        """Continue a prompt of token ids greedily."""
        until = _absolute(deadline)
        assignment = self._find(model, lane, "generate")
        return await self._generate(assignment, ids, max_tokens, until)

    async def _generate(self, assignment: Assignment, ids: Any, max_tokens: int, until: float | None) -> Generation:
        if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or not 1 <= max_tokens <= 2**32 - 1:
            raise InvalidRequest(f"max_tokens is {max_tokens!r}, must be a whole number from 1")
        row = id_rows([ids], noun="prompt").ids
        limit = assignment.bundle.manifest.max_tokens
        if len(row) + max_tokens > limit:
            raise SequenceTooLong(
                f"the prompt has {len(row)} tokens and {max_tokens} are to follow, {assignment.model} takes {limit} "
                "for both. Shorten it or ask for fewer",
                details={"index": 0, "tokens": len(row), "max_tokens": limit},
            )
        if ITEM_BYTES * len(row) > self.config.max_frame:
            raise InvalidRequest(f"the prompt does not fit a frame of {self.config.max_frame} bytes")
        spec = assignment.require()

        def build(req_id: str, model_ref: str) -> tuple[Generate, memoryview]:
            return Generate(req_id=req_id, model_ref=model_ref, max_tokens=max_tokens), _bytes(row)

        reply, _ = await self._supervisor(assignment).submit(build, deadline=until, stage="generate")
        assert isinstance(reply, Text)
        generated = reply.generated_token_ids
        return Generation(
            reply.text,
            reply.n_prompt,
            reply.n_gen,
            str(reply.finish_reason),
            tuple(generated) if generated is not UNSET else (),
            assignment.model,
            assignment.lane_id,
            spec.engine_id,
            spec.device,
        )

    # --- lanes -------------------------------------------------------------------------------------------------------

    @property
    def runtime(self) -> RuntimeDirectory:
        """The directory this host holds."""
        return self._runtime

    async def load(self, model: str, *, lane: str | None = None, deadline: float | None = None) -> None:
        """Start the lane's worker and load the model now instead of at the first request; clears quarantine."""
        until = _absolute(deadline)
        await self._serving(self._any(model, lane)).load(deadline=until)

    async def unload(self, model: str, *, lane: str | None = None) -> None:
        """Unload the model from its worker and forget the lane's strikes; ModelInUse while requests run.

        The next request loads it again. A worker that doesn't hold it any more stays, until the host closes.
        """
        assignment = self._any(model, lane)
        supervisor = self._runged.get(assignment.lane_id) or self._supervisors.get(assignment.lane_id)
        if supervisor is not None:
            await supervisor.unload()

    async def ping(self, model: str, *, lane: str | None = None, deadline: float | None = None) -> dict[str, Any]:
        """PING the lane's worker now, in turn, and return its refreshed health; spawns nothing."""
        assignment = self._any(model, lane)
        supervisor = self._supervisors.get(assignment.lane_id)
        return _resting(assignment) if supervisor is None else await supervisor.ping(_absolute(deadline))

    async def probe(self, lane_id: str) -> None:
        """Prove a quarantined legacy lane with a fresh worker, LOAD and one served request, and open it again."""
        assignment = self._by_id(lane_id)
        await self._serving(assignment).probe(self._probe_request(assignment))

    def _probe_request(self, assignment: Assignment) -> Callable[[str, str], tuple[Any, memoryview]]:
        """Return a small real request of the lane's own task."""
        manifest = assignment.bundle.manifest
        tokenizer = self._tokenizer(assignment.model) if manifest.tokenizer is not UNSET else None
        # Without a tokenizer any id will do; 0 is in every vocabulary.
        row = tokenizer.rows(["probe"]) if tokenizer else id_rows([[0]])
        ids, n = row.ids, row.lengths[0]

        def build(req_id: str, model_ref: str) -> tuple[Any, memoryview]:
            if manifest.task == "generate":
                return Generate(req_id=req_id, model_ref=model_ref, max_tokens=1), _bytes(ids)
            if manifest.task == "embed":
                pooling = Pooling(manifest.pooling) if manifest.pooling is not UNSET else Pooling.MEAN
                items = [Item(id="0", n_tokens=n)]
                normalize = manifest.normalize is not False
                return EmbedBatch(
                    req_id=req_id, model_ref=model_ref, pooling=pooling, normalize=normalize, items=items
                ), _bytes(ids)
            if assignment.require().owned:
                return RerankSequences(req_id=req_id, model_ref=model_ref, sequences=[Segment(n_tokens=n)]), _bytes(ids)
            import numpy as np

            pair = np.concatenate([ids, ids])
            return Rerank(
                req_id=req_id, model_ref=model_ref, query_n_tokens=n, candidates=[Segment(n_tokens=n)]
            ), _bytes(pair)

        return build

    def health(self) -> dict[str, Any]:
        """Return the cached state of every lane; touches no worker."""
        lanes: dict[str, Any] = {}
        for lane_id, assignment in self.assignments.items():
            supervisor = self._supervisors.get(lane_id)
            if supervisor is not None:
                lanes[lane_id] = {"model": assignment.model, **supervisor.health()}
            else:
                lanes[lane_id] = _resting(assignment)
        return {"lanes": lanes, "closed": self._closed}

    def explain(self, lane: str | None = None) -> list[dict[str, Any]]:
        """Return, per lane, the placement and why each other engine was passed over."""
        return [
            {
                "lane": assignment.lane_id,
                "model": assignment.model,
                "placement": assignment.placement.engine,
                "considered": [item.to_dict() for item in assignment.placement.considered],
            }
            for assignment in self.assignments.values()
            if lane is None or lane in (assignment.lane, assignment.lane_id)
        ]

    def lane_of(self, model: str, lane: str | None = None) -> Assignment:
        """Return the assignment that a call for this model uses."""
        return self._any(model, lane)

    def _check_loop(self) -> None:
        # Futures of one loop are never woken by another's: a call from there would wait for ever.
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            return  # lane_of: it waits for nothing.
        if self._loop is not None and running is not self._loop and not self._closed:
            raise InvalidRequest("this host runs on another event loop; call it there, or use SyncHost from any thread")

    def _any(self, model: str, lane: str | None) -> Assignment:
        self._check_loop()
        bundle = self.bundles.get(model) if isinstance(model, str) else None
        return find(self.assignments, self.bundles, model=model, lane=lane, task=bundle.manifest.task if bundle else "")

    def _find(self, model: str, lane: str | None, task: str) -> Assignment:
        self._check_loop()
        return find(self.assignments, self.bundles, model=model, lane=lane, task=task)

    def _by_id(self, lane_id: str) -> Assignment:
        self._check_loop()
        assignment = self.assignments.get(lane_id) if isinstance(lane_id, str) else None
        if assignment is None:
            raise InvalidRequest(
                f"no lane {lane_id!r} (have: {', '.join(self.assignments) or 'none'})",
                details={"known": sorted(self.assignments)},
            )
        return assignment

    def _serving(self, assignment: Assignment) -> Supervisor | RungedLane:
        """Return what embeds and reranks on a lane: its supervisor, on the Neural Engine rung by rung under leases."""
        supervisor = self._supervisor(assignment)
        if supervisor.spec.device_kind != "ane" or assignment.placement.artifact is None:
            return supervisor
        lane = self._runged.get(assignment.lane_id)
        if lane is None:
            if self._fleet is None:
                # A quarter of the memory at most: the weights of every resident function count whole (ane.md 4).
                self._fleet = AneFleet(Limits(nbytes=self.profile.ram_total // 4))
            artifact, certificate = assignment.placement.artifact, self._packing_certificate(assignment)
            costs = rungs.costs(artifact, certificate.cost_ms) if certificate is not None else None
            lane = self._fleet.add(supervisor, artifact, bundle=assignment.bundle, costs=costs)
            self._runged[assignment.lane_id] = lane
        return lane

    def _packing_certificate(self, assignment: Assignment) -> Certificate | None:
        """Return the lane's certificate if it holds and qualifies packed widths; none counts while qualifying."""
        standing = self._standings.get(assignment.lane_id)
        if self._qualifying or standing is None or standing.why or standing.certificate is None:
            return None
        return standing.certificate if standing.certificate.packed_widths else None

    def _on_ane(self, assignment: Assignment, spec: LaneSpec) -> LaneSpec:
        """Add what a Neural Engine worker gets besides: the lane lock as stdin, packed widths, certified times."""
        # One host a user on the Neural Engine; the workers hold the lock too, as their standard input.
        self._lane_lock = self._lane_lock or LaneLock()
        widths: tuple[int, ...] = ()
        load = spec.load
        artifact, certificate = assignment.placement.artifact, self._packing_certificate(assignment)
        if self._qualifying and artifact is not None:
            widths = rungs.packed_widths(artifact)
        elif certificate is not None:
            widths = tuple(certificate.packed_widths)
            times = {"certified_ms": json.dumps(certificate.cost_ms), **load.runtime_config}
            load = replace(load, runtime_config=times)
        return replace(spec, stdin=self._lane_lock.fileno(), packed_widths=widths, load=load)

    def _supervisor(self, assignment: Assignment) -> Supervisor:
        supervisor = self._supervisors.get(assignment.lane_id)
        if supervisor is None:
            if self._closed:
                raise InvalidRequest("this host is closed")
            spec = self._certified(assignment, assignment.require())
            if spec.device_kind == "ane":
                spec = self._on_ane(assignment, spec)
            supervisor = Supervisor(
                spec,
                config=self.config,
                runtime=self._runtime,
                permits=self._permits,
                counters=self.counters[assignment.lane_id],
                journal=self.logs[assignment.lane_id],
            )
            self._supervisors[assignment.lane_id] = supervisor
        return supervisor

    def _needs_certificate(self, assignment: Assignment) -> bool:
        # The configuration may only strengthen what the matrix says.
        return self.config.require_certificate or self.matrix.lanes[assignment.lane].require_certificate

    def _may_pack(self, item: Assignment) -> bool:
        spec, artifact = item.spec, item.placement.artifact
        if self._qualifying or spec is None or spec.device_kind != "ane" or artifact is None:
            return False
        path = certificates.path_of(spec.engine_id, item.bundle.digest, self.config.data_dir)
        return bool(rungs.packed_widths(artifact)) and path.exists()

    async def _look_up_certificates(self) -> None:
        """Find out how the lanes stand that need a certificate, or may have one that qualifies packed widths.

        Their workers are asked who they are (--version).
        """
        placed = [item for item in self.assignments.values() if item.spec is not None]
        needing = [item for item in placed if self._needs_certificate(item) or self._may_pack(item)]
        if not needing:
            return
        engines = {item.spec.engine_id for item in needing if item.spec is not None}
        identities = await asyncio.to_thread(certificates.identities, self.matrix, engines)
        for item in needing:
            assert item.spec is not None and item.placement.artifact is not None
            self._standings[item.lane_id] = certificates.standing(
                matrix=self.matrix,
                engine_id=item.spec.engine_id,
                bundle=item.bundle,
                artifact=item.placement.artifact,
                profile=self.profile,
                identity=identities[item.spec.engine_id],
                data_dir=self.config.data_dir,
            )

    def _certified(self, assignment: Assignment, spec: LaneSpec) -> LaneSpec:
        """Return the spec that may run: NotCertified says why not; a certificate pins the kernel revision it names."""
        if not self._needs_certificate(assignment):
            return spec
        standing = self._standings.get(assignment.lane_id, certificates.Standing(None, "it has none on this machine"))
        if standing.why:
            raise NotCertified(
                f"lane {assignment.lane_id} needs a certificate for {assignment.model} on {spec.engine_id}: "
                f"{standing.why}. Run: synapse certify {assignment.lane} --model {assignment.model} "
                f"--engine {spec.engine_id}",
                details={
                    "lane_id": assignment.lane_id,
                    "model": assignment.model,
                    "engine": spec.engine_id,
                    "reason": standing.why,
                },
            )
        assert standing.certificate is not None
        revision = standing.certificate.binding.kernel_revision
        return spec if spec.kernel_revision is not None else replace(spec, kernel_revision=revision)

    def _tokenizer(self, model: str) -> TextTokenizer:
        tokenizer = self._tokenizers.get(model)
        if tokenizer is None:
            tokenizer = self._tokenizers[model] = TextTokenizer(self.bundles[model], model=model)
        return tokenizer

    async def _tokenised(self, texts: Sequence[str], until: float | None, encode: Callable[[], T]) -> T:
        """Run *encode* here for few and short texts, else in a thread; DeadlineExceeded when it takes too long."""
        try:
            small = sum(map(len, texts)) <= INLINE_CHARACTERS
        except TypeError:
            small = True  # Not all of them are texts: encode says which.
        if small:
            return encode()
        return await _within(asyncio.ensure_future(asyncio.to_thread(encode)), until)

    def _checked_ids(self, rows: Sequence[Any], assignment: Assignment, noun: str) -> Rows:
        checked = id_rows(rows, noun=noun)
        if not checked.lengths:
            raise InvalidRequest(f"no {noun}s: nothing to do")
        admission.check_lengths(
            checked.lengths, max_tokens=assignment.bundle.manifest.max_tokens, model=assignment.model, noun=noun
        )
        return checked


def open_bundles(models: Mapping[str, Path | str]) -> dict[str, Bundle]:
    """Read the manifests of bundle folders by name; BundleInvalid says which one can't be used."""
    bundles: dict[str, Bundle] = {}
    for name, path in models.items():
        try:
            bundles[name] = read_bundle(Path(path))
        except BundleError as exc:
            hint = ""
            if not Path(path).exists() and len(Path(path).parts) == 1:
                # Most likely a name where a folder is wanted.
                hint = f". A model is given by its folder; an installed one's: synapse models path {path}"
            raise BundleInvalid(f"model {name}: {exc}{hint}", details={"model": name, "path": str(path)}) from exc
    return bundles


def _installed(config: HostConfig) -> dict[str, Path | str]:
    from synapse_host import catalogue

    return dict(catalogue.installed(config.models_dir))


def _resting(assignment: Assignment) -> dict[str, Any]:
    spec = assignment.spec
    state: dict[str, Any] = {
        "model": assignment.model,
        "state": "idle" if spec else "refused",
        "engine": spec.engine_id if spec else None,
        "device": spec.device if spec else None,
        "worker_pid": None,
        "generation": 0,
        "kind": spec.kind if spec else None,
        "strikes": 0,
        "quarantine_remaining_s": 0.0,
        "waiting": 0,
        "models": [],
        "load_s": None,
        "progress": None,
        **LaneHealth().fields(0.0),
    }
    if spec is None:
        state["reason"] = assignment.placement.why_not()
    return state


def _check_texts(texts: Any, name: str) -> None:
    if isinstance(texts, str | bytes):
        raise InvalidRequest(f"{name} is one text; pass a list of texts")
    if not isinstance(texts, Sequence) and not hasattr(texts, "__array__"):
        # A set or a generator has no order to answer in.
        raise InvalidRequest(f"{name} is {type(texts).__name__}; pass a list of texts")
    if not len(texts):
        raise InvalidRequest(f"{name} is empty: nothing to do")


def _absolute(deadline: Any) -> float | None:
    if deadline is None:
        return None
    try:
        # Not what merely reads as a number: '5' is a mistake.
        seconds = math.nan if isinstance(deadline, str | bytes) else float(deadline)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if math.isnan(seconds):
        raise InvalidRequest("deadline is not a number of seconds")
    return asyncio.get_running_loop().time() + seconds


def _bytes(ids: npt.NDArray[np.int32]) -> memoryview:
    """Return the ids' bytes as they lie in memory (int32 little-endian on every platform we run on)."""
    return ids.data.cast("B")


def _offsets(lengths: Sequence[int]) -> list[int]:
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return offsets


async def _within(future: asyncio.Future[T], until: float | None) -> T:
    """Await *future* until a deadline; what runs in a thread goes on, its result is dropped."""
    timeout = None if until is None else max(0.0, until - asyncio.get_running_loop().time())
    done, _ = await asyncio.wait([future], timeout=timeout)
    if not done:
        raise DeadlineExceeded("the deadline passed while the texts were tokenised")
    return future.result()


async def _in_order(jobs: Sequence[Callable[[], Any]]) -> None:
    """Run coroutines with at most AHEAD of them under way, started in order; the first failure cancels the others."""
    pending: list[asyncio.Task[None]] = []
    try:
        for job in jobs:
            if len(pending) == AHEAD:
                await pending.pop(0)
            pending.append(asyncio.ensure_future(job()))
        while pending:
            await pending.pop(0)
    finally:
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.gather(*pending, return_exceptions=True)
