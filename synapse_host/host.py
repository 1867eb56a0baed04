"""The host facade: texts or token ids in, numpy arrays out, whatever engine serves and however often its worker dies.

One :class:`Host` owns its lanes (:mod:`synapse_host.lanes`). Nothing here retries: errors are
:class:`~synapse_host.errors.SynapseError` with ``safe_to_retry``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import UNSET

from synapse_host.certificates.admission import speeds as speeds_here
from synapse_host.config import HostConfig
from synapse_host.lanes import Lanes
from synapse_host.models.bundles import open_bundles, open_installed
from synapse_host.placement import hardware
from synapse_host.placement.assignment import Assignment
from synapse_host.placement.matrix import HardwareMatrix
from synapse_host.placement.matrix import load as load_matrix
from synapse_host.placement.select import pinned
from synapse_host.requests import embed as embedding
from synapse_host.requests import generate as generation
from synapse_host.requests import memory
from synapse_host.requests import rerank as reranking
from synapse_host.requests.parts import whole
from synapse_host.results import EmbedResult, Generation, Piece, RerankResult
from synapse_host.text import encoders
from synapse_host.text.chat import Renderer
from synapse_host.text.rows import Rows, special_frame
from synapse_host.text.validate import absolute, check_rows, check_texts, prompt_text, width
from synapse_host.worker.listener import RuntimeDirectory

if TYPE_CHECKING:
    from synapse_host.arrays import FloatArray, IntArray
    from synapse_host.worker.exchange import Build

T = TypeVar("T")

__all__ = ["EmbedResult", "Generation", "Host", "Piece", "RerankResult", "open_bundles"]


class Host:
    """A running set of lanes. Make it with :meth:`open`; every call may come from several tasks at once."""

    def __init__(self, matrix: HardwareMatrix, lanes: Lanes) -> None:
        self.matrix = matrix
        self.profile = lanes.profile
        self.config = lanes.config
        self.bundles = lanes.bundles
        self.runtime = lanes.runtime
        self._encoders = encoders.Encoders(lanes.bundles)
        self._renderer = Renderer(lanes.runtime.path)
        self._lanes = lanes
        self.assignments = lanes.assignments
        self.counters = lanes.counters
        """What each lane has done, for :mod:`synapse_host.serve.metrics`."""
        self.logs = lanes.logs
        """The last output of each lane's workers."""

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
        InvalidRequest, BackendMissing.
        """
        config = config or HostConfig()
        loaded = matrix if isinstance(matrix, HardwareMatrix) else load_matrix(matrix)
        bundles = open_bundles(models) if models is not None else open_installed(config.models_dir)
        tasks = {bundle.manifest.task for bundle in bundles.values()}
        wanted = {id for lane in loaded.lanes.values() if lane.task in tasks for id in lane.engines}
        keys = hardware.floor_keys(loaded, wanted)
        profile = await asyncio.to_thread(hardware.detect, keys)
        speeds = await asyncio.to_thread(speeds_here, loaded, bundles.values(), profile, data_dir=config.data_dir)
        profile = replace(profile, speeds=speeds)
        loaded = pinned(loaded, config.engines, profile=profile, bundles=bundles.values())
        runtime = RuntimeDirectory.open(config.runtime_dir)
        try:
            lanes = Lanes(
                matrix=loaded, bundles=bundles, profile=profile, config=config, runtime=runtime, qualifying=qualifying
            )
            host = cls(loaded, lanes)
            try:
                yield host
            finally:
                await host.aclose()
        finally:
            runtime.close()

    async def aclose(self, *, drain: float = 0.0) -> None:
        """Stop every worker; running requests get *drain* seconds to finish, waiting ones are refused at once.

        Idempotent; a call with a shorter *drain* hurries one that still waits.
        """
        try:
            await self._lanes.aclose(drain=drain)
        finally:
            await self._renderer.aclose()

    # --- embeddings --------------------------------------------------------------------------------------------------

    async def embed(
        self,
        model: str,
        texts: Sequence[str],
        *,
        lane: str | None = None,
        deadline: float | None = None,
        truncate: bool = False,
        prompt: str | None = None,
        dimensions: int | None = None,
    ) -> FloatArray:
        """Return the texts' vectors, float32 (n, dims), in input order. *deadline*: seconds from now.

        *prompt*: the name of a prompt of the model, put before each text; by default the model's own choice, if it has
        one; ``"none"`` for no prompt. InvalidRequest lists the names there are. *dimensions*: only the first so many
        numbers of each vector, for models trained for it (Matryoshka); of length 1 again where the model normalises.
        """
        options: dict[str, Any] = {"lane": lane, "truncate": truncate, "prompt": prompt, "dimensions": dimensions}
        return (await self.embed_result(model, texts, deadline=deadline, **options)).vectors

    @memory.typed
    async def embed_result(
        self,
        model: str,
        texts: Sequence[str],
        *,
        lane: str | None = None,
        deadline: float | None = None,
        truncate: bool = False,
        prompt: str | None = None,
        dimensions: int | None = None,
        offset: int = 0,
    ) -> EmbedResult:
        """Return vectors with what was cut and who served. Raises SequenceTooLong by index unless *truncate*.

        Indices, in ``truncated`` and in errors, count from *offset*. While 1,024 texts are computed, the next are
        tokenised.
        """
        until = absolute(deadline)
        assignment = self._lanes.find(model, lane, "embed")
        columns = width(assignment.bundle.manifest, dimensions)
        check_texts(texts, "texts")
        # A copy: the caller's list may change while it is embedded, and a row without an answer would hold old memory.
        texts = list(texts)
        tokenizer = await self._encoders.of(model, until)

        def encode(chunk: Sequence[str], start: int) -> Rows:
            return tokenizer.rows(chunk, truncate=truncate, offset=offset + start, prompt=prompt)

        chunks = encoders.chunks(texts, until, encode, query=prompt_text(assignment.bundle.manifest, prompt) or None)
        return await embedding.embed_chunks(self._lanes, assignment, chunks, len(texts), until, columns)

    @memory.typed
    async def embed_ids(
        self,
        model: str,
        rows: Sequence[Any],
        *,
        lane: str | None = None,
        deadline: float | None = None,
        dimensions: int | None = None,
    ) -> FloatArray:
        """Return the vectors of rows of token ids (special tokens included), float32 (n, dims)."""
        until = absolute(deadline)
        assignment = self._lanes.find(model, lane, "embed")
        columns = width(assignment.bundle.manifest, dimensions)
        checked = await encoders.checked(rows, until, lambda: check_rows(rows, assignment))
        return await embedding.embed(self._lanes, assignment, checked, until, columns)

    @memory.typed
    async def embed_packed(
        self, model: str, rows: Sequence[Any], width: int, *, lane: str | None = None, deadline: float | None = None
    ) -> FloatArray:
        """Return the vectors of at most 64 rows that share passes of one packed width: what qualifies a width.

        Serving chooses by itself (:mod:`synapse_host.residency.plan`). InvalidRequest where the lane has no packed
        functions, ``unsupported_packed_width`` for a width that its worker doesn't advertise.
        """
        until = absolute(deadline)
        assignment = self._lanes.find(model, lane, "embed")
        return await embedding.embed_packed(self._lanes, assignment, check_rows(rows, assignment), width, until)

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

    @memory.typed
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
        until = absolute(deadline)
        assignment = self._lanes.find(model, lane, "rerank")
        check_texts(documents, "documents")
        documents = list(documents)
        owned = assignment.require().owned
        tokenizer = await self._encoders.of(model, until)
        special = len(tokenizer.pair) or 3

        def compose() -> tuple[IntArray | None, Rows]:
            if owned:
                return None, tokenizer.pairs(query, documents, truncate=truncate)
            return tokenizer.segments(query, documents, truncate=truncate, special=special)

        query_ids, rows = await encoders.encoded(documents, until, compose, query=query)
        logits = await reranking.score(self._lanes, assignment, query_ids, rows, until)
        scores = reranking.scaled(assignment.bundle.manifest, logits, raw=raw)
        # Without owned pairs the worker puts the query and its special ids to each document.
        more = 0 if query_ids is None else (len(query_ids) + special) * len(documents)
        return RerankResult(scores, rows.truncated, *assignment.served_by(), len(rows.ids) + more)

    @memory.typed
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
        until = absolute(deadline)
        assignment = self._lanes.find(model, lane, "rerank")
        if assignment.bundle.manifest.tokenizer is not UNSET:
            frame = (await self._encoders.of(model, until)).pair
        else:
            frame = special_frame(assignment.bundle, composed=assignment.require().owned)
        query, rows = await encoders.checked(
            candidates, until, lambda: reranking.composed(assignment, frame, query_ids, candidates)
        )
        logits = await reranking.score(self._lanes, assignment, query, rows, until)
        return reranking.scaled(assignment.bundle.manifest, logits, raw=raw)

    # --- generation --------------------------------------------------------------------------------------------------

    @memory.typed
    async def generate(
        self,
        model: str,
        prompt: str | Sequence[Mapping[str, str]],
        *,
        max_tokens: int | None = 128,
        stop: str | Sequence[str] = (),
        chat: bool = False,
        lane: str | None = None,
        deadline: float | None = None,
    ) -> Generation:
        """Continue a prompt greedily; with *chat* it is a message (or a list of them) put into the model's template.

        *max_tokens*: None means as far as the model's context reaches. The text ends before the first of the *stop*
        strings. An error in the middle has the ``text`` and ``n_gen`` so far in its details.
        """
        until = absolute(deadline)
        assignment = self._lanes.find(model, lane, "generate")
        tokenizer = await self._encoders.of(model, until)
        ids = await generation.prompt_ids(assignment, tokenizer, self._renderer if chat else None, prompt, until)
        spoken = generation.Spoken(tokenizer.spell, stop)
        return await generation.generate(self._lanes, assignment, ids, max_tokens, until, spoken=spoken)

    @memory.typed_stream
    async def generate_stream(
        self,
        model: str,
        prompt: str | Sequence[Mapping[str, str]],
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        chat: bool = False,
        lane: str | None = None,
        deadline: float | None = None,
    ) -> AsyncGenerator[Piece, None]:
        """Yield a generation's pieces as they come; arguments and errors as :meth:`generate`.

        Aclose the iterator when leaving it early: the worker finishes the slice that it computes, and no more.
        """
        until = absolute(deadline)
        assignment = self._lanes.find(model, lane, "generate")
        tokenizer = await self._encoders.of(model, until)
        ids = await generation.prompt_ids(assignment, tokenizer, self._renderer if chat else None, prompt, until)
        spoken = generation.Spoken(tokenizer.spell, stop)
        stream = generation.pieces(self._lanes, assignment, ids, max_tokens, until, spoken=spoken)
        async with aclosing(stream):
            async for piece in stream:
                yield piece

    @memory.typed
    async def generate_ids(
        self,
        model: str,
        ids: Sequence[int],
        max_tokens: int | None,
        *,
        stop: str | Sequence[str] = (),
        lane: str | None = None,
        deadline: float | None = None,
    ) -> Generation:
        """Continue a prompt of token ids greedily; else as :meth:`generate`."""
        until = absolute(deadline)
        assignment = self._lanes.find(model, lane, "generate")
        named = assignment.bundle.manifest.tokenizer is not UNSET
        spoken = generation.Spoken((await self._encoders.of(model, until)).spell if named else None, stop)
        return await generation.generate(self._lanes, assignment, ids, max_tokens, until, spoken=spoken)

    # --- lanes -------------------------------------------------------------------------------------------------------

    @memory.typed
    async def load(self, model: str, *, lane: str | None = None, deadline: float | None = None) -> None:
        """Start the lane's worker and load the model now instead of later; opens a quarantined catalog lane."""
        until = absolute(deadline)
        serving = self._lanes.serving(self._lanes.find_any(model, lane))
        self._encoders.begin(model)  # beside the worker's start: the first text waits for neither
        await serving.load(deadline=until)
        await self._encoders.begun(model, until)

    async def unload(self, model: str, *, lane: str | None = None) -> None:
        """Unload the model from its worker and forget the lane's strikes; ModelInUse while requests run.

        The next request loads it again. A worker that doesn't hold it any more stays, until the host closes.
        """
        serving = self._lanes.used(self._lanes.find_any(model, lane))
        if serving is not None:
            await serving.unload()

    async def ping(self, model: str, *, lane: str | None = None, deadline: float | None = None) -> dict[str, Any]:
        """PING the lane's worker now, in turn, and return its refreshed health; spawns nothing."""
        return await self._lanes.ping(self._lanes.find_any(model, lane), absolute(deadline))

    @memory.typed
    async def probe(self, lane_id: str, *, deadline: float | None = None) -> None:
        """Prove a lane with a fresh worker, LOAD and one served request; opens it again, whatever shut it."""
        until = absolute(deadline)
        assignment = self._lanes.by_id(lane_id)
        await self._lanes.serving(assignment).probe(await self._probe_request(assignment), deadline=until)

    async def _probe_request(self, assignment: Assignment) -> Build:
        """Return a small real request of the lane's own task."""
        manifest = assignment.bundle.manifest
        if manifest.tokenizer is not UNSET:
            rows = (await self._encoders.of(assignment.model, None)).rows(["probe"])
        else:
            rows = check_rows([[0]], assignment)  # any id will do; 0 is in every vocabulary
        row = whole(rows)
        if manifest.task == "generate":
            return generation.request(row.ids, 1)
        if manifest.task == "embed":
            return embedding.request(manifest, row)
        return reranking.request(None if assignment.require().owned else row.ids, row)

    def health(self) -> dict[str, Any]:
        """Return the cached state of every lane; touches no worker. From any thread."""
        return self._lanes.on_loop(self._lanes.health)

    def on_loop(self, read: Callable[[], T]) -> T:
        """Run *read* on the host's loop, where nothing changes meanwhile; from any thread.

        DeadlineExceeded where the loop has no time for it.
        """
        return self._lanes.on_loop(read)

    def explain(self, lane: str | None = None) -> list[dict[str, Any]]:
        """Return, per lane, the placement and why each other engine was passed over."""
        return self._lanes.explain(lane)

    def lane_of(self, model: str, lane: str | None = None) -> Assignment:
        """Return the assignment that a call for this model uses."""
        return self._lanes.find_any(model, lane)
