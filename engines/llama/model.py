"""One GGUF and what it answers: EMBED_BATCH, RERANK, GENERATE, guarded before any native compute.

Each guard names the fault it prevents (U1 to U8 of llama-cuda.md, 2.9): what would abort, crash or answer wrong in
llama.cpp becomes a typed ERR here or is computed another way.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from engines.llama import inputs
from engines.llama.binding import POOLING_NONE, POOLING_RANK, ContextShape, NativeContext, NativeModel
from engines.llama.contexts import ContextPool, logits_bytes
from engines.llama.sequences import SequenceCache
from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import FinishReason, Pooling
from engines.runtime.batch import Generation, TokenBatch, check_lengths, check_vocabulary
from engines.runtime.engine import Model

if TYPE_CHECKING:
    from engines.llama.config import LlamaConfig
    from engines.llama.gguf import Header
    from engines.llama.inputs import Chunk
    from engines.runtime.batch import FloatArray, IntArray, RerankPairs
    from engines.runtime.progress import ProgressReporter

SMALL_MODEL: Final = 200_000_000
"""Parameters below which several one-thread contexts beat one context with several threads (4.3)."""
NARROW: Final = 512
"""Width up to which chunks are cut to :data:`NARROW_CHUNK_TOKENS`: the attention of a chunk scans the mask of all its
pairs of tokens, which costs a narrow model's processor more than reading the weights once more."""
NARROW_CHUNK_TOKENS: Final = 256
SLOW_CALL_S: Final = 5.0
"""A call predicted to take longer also reports each finished layer (4.5)."""
FLOPS_PER_THREAD: Final = 20e9
"""A cautious rate for that prediction; measured here: about 100e9 for MiniLM."""
BLOCK_S: Final = 10.0
"""A block of a prompt is cut so that it is predicted to take no longer: each finished one is reported, and the host
ends a worker after 120 s without a report."""
MIN_BLOCK_TOKENS: Final = 16
GRANULE: Final = 64
"""n_ubatch is a multiple of this, as pooling inside llama.cpp needs it to be one of n_seq_max (U4)."""
LOGITS_BUDGET_BYTES: Final = 256 * 2**20
"""Most that the logits of one chunk may take: llama.cpp makes room for them, also where nobody reads them."""


class Work(NamedTuple):
    """Rows to compute; *read* takes the results of a call's rows out of its context, into their places of *out*."""

    batch: TokenBatch
    out: FloatArray
    read: Callable[[NativeContext, TokenBatch], FloatArray]
    progress: ProgressReporter


class LlamaModel(Model):
    """A loaded GGUF: an encoder (embeds), a cross-encoder (reranks) or a decoder (generates, embeds)."""

    def __init__(self, native: NativeModel, header: Header, config: LlamaConfig, *, typeless: bool) -> None:
        """Take over *native*; *typeless* says the file lost the token types its classifier was trained with.

        Raises EngineError ``config_invalid`` for ``forward_pass=encode`` on a model with a cache (U2) and
        ``model_unsupported`` for an encoder-decoder.
        """
        self._native = native
        self._header = header
        self._config = config
        self._typeless = typeless
        self._contexts = ContextPool(native, header)
        self._pool: ThreadPoolExecutor | None = None
        fits = LOGITS_BUDGET_BYTES // max(1, logits_bytes(header)) // GRANULE * GRANULE
        self._chunk_tokens = min(config.encode_chunk_tokens, max(GRANULE, fits))
        if native.n_embd <= NARROW and not config.gpu_layers:
            self._chunk_tokens = min(self._chunk_tokens, NARROW_CHUNK_TOKENS)
        # Not on an accelerator, where asking for a node means waiting for it, nor where dense layers follow the states:
        # llama.cpp gives their result the same name.
        dense = any(name.startswith("dense_") for name in header.tensors)
        self._headless = not config.gpu_layers and not dense
        self._qwen3 = "qwen3" in header.architecture.lower()
        self._reranks = header.has_rank_head and not self._qwen3
        self._ends = header.end_ids
        self.dims = 1 if self._reranks else native.n_embd_out
        limits = [native.n_ctx_train, header.context_length, header.position_rows]  # U3
        self.limit = min(limit for limit in limits if limit)
        sizes = [header.vocab_size, header.token_type_vocab_offset or native.n_vocab]
        self.vocab_size = min(size for size in sizes if size)
        self._prompt_block = self._block_tokens(min(config.ubatch_size, config.batch_size))
        self._sequences = SequenceCache(self._generation_context, self._prompt_block)
        if native.is_encoder_decoder:
            raise EngineError(
                ErrorCode.MODEL_UNSUPPORTED, f"{header.architecture!r} is an encoder-decoder, which no request serves"
            )
        probe = NativeContext(native, ContextShape(n_ctx=256, n_ubatch=GRANULE))
        self.has_memory = probe.has_memory
        probe.close()
        if self.has_memory and config.forward_pass == "encode":  # noqa: S105
            raise EngineError(
                ErrorCode.CONFIG_INVALID,
                f"forward_pass=encode on {header.architecture!r}, which keeps a cache: use auto or decode",
            )

    def embed(
        self,
        batch: TokenBatch,
        *,
        pooling: Pooling,
        normalize: bool,
        packed_width: int | None,
        progress: ProgressReporter,
    ) -> FloatArray:
        """Return float32 (rows, n_embd), pooled over token states in float32. Unit of progress: a finished layer."""
        if self._header.pooling_type == POOLING_RANK:
            raise EngineError(ErrorCode.OPERATION_MISMATCH, "the model reranks, it does not embed")
        check_lengths(batch, limit=self.limit, what="item")  # U3
        check_vocabulary(batch.input_ids, self.vocab_size)
        vectors = np.empty((len(batch), self.dims), dtype=np.float32)

        def read(context: NativeContext, rows: TokenBatch) -> FloatArray:
            return inputs.pool(context.states(len(rows.input_ids)), rows.cu_seqlens, pooling)

        self._run(Work(batch, vectors, read, progress), POOLING_NONE)
        return inputs.normalize_rows(vectors) if normalize else vectors

    def rerank(self, pairs: RerankPairs, *, progress: ProgressReporter) -> FloatArray:
        """Return raw logits, float32 (candidates,). Unit of progress: a finished layer."""
        if self._qwen3:
            raise EngineError(
                ErrorCode.OPERATION_MISMATCH,
                "Qwen3 rerankers are not served from GGUF: llama.cpp's rank head and prompt template are not theirs",
            )
        if not self._reranks:  # U7: llama.cpp would return a component of a vector as the score
            raise EngineError(ErrorCode.OPERATION_MISMATCH, "the GGUF has no rank head: it can't rerank")
        if self._native.n_cls_out != 1:
            raise EngineError(
                ErrorCode.MODEL_UNSUPPORTED, f"the rank head gives {self._native.n_cls_out} numbers, a score is one"
            )
        if self._typeless:
            raise EngineError(
                ErrorCode.MODEL_UNSUPPORTED,
                "llama.cpp feeds token type 0 only, this cross-encoder was trained with two: rebuild the GGUF with a "
                "split vocabulary (synapse build)",
            )
        check_vocabulary(pairs.query_ids, self.vocab_size)
        check_vocabulary(pairs.candidates.input_ids, self.vocab_size)
        batch = inputs.compose_pairs(
            pairs,
            self._header.special,
            separators=inputs.pair_separators(self._header),
            passage_shift=self._header.token_type_vocab_offset or 0,
        )
        check_lengths(batch, limit=self.limit, what="pair")
        scores = np.empty(len(batch), dtype=np.float32)
        self._run(Work(batch, scores, lambda context, rows: context.scores(len(rows)), progress), POOLING_RANK)
        return scores

    def generate(self, input_ids: IntArray, *, max_tokens: int, progress: ProgressReporter) -> Generation:
        """Generate greedily, the first of equal logits wins. Unit of progress: a prompt block, a token decoded.

        The tokens are the same whether asked for in one call or in slices (:mod:`engines.llama.sequences`).
        """
        n_prompt = len(input_ids)
        self._check_generate(input_ids, max_tokens)
        if max_tokens == 0:
            return Generation("", n_prompt, 0, FinishReason.LENGTH)
        sequence = self._sequences.take(array("i", input_ids.tobytes()), room=n_prompt + max_tokens)
        tokens: list[int] = []
        reason = FinishReason.LENGTH
        try:
            while True:
                for start, end in sequence.calls(self._prompt_block):
                    sequence.compute(start, end)
                    progress.advance()
                assert sequence.context is not None
                token = self._choose(sequence.context)
                if token in self._ends or self._native.is_end(token):
                    reason = FinishReason.STOP
                    break
                sequence.ids.append(token)
                tokens.append(token)
                if len(tokens) == max_tokens:  # nobody would read the logits behind the last token
                    break
        except BaseException:
            self._sequences.forget(sequence)
            raise
        # Decoded once at the end: a character may be spread over several tokens.
        text = b"".join(map(self._native.piece, tokens)).decode("utf-8", "replace")
        return Generation(text, n_prompt, len(tokens), reason, tuple(tokens))

    def close(self) -> None:
        """Stop the helper threads, free the contexts, then the weights; idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)
        self._sequences.close()
        self._contexts.close()
        self._native.close()

    # --- guards ------------------------------------------------------------------------------------------------------

    def _check_generate(self, input_ids: IntArray, max_tokens: int) -> None:
        if not self.has_memory or self._reranks:
            raise EngineError(ErrorCode.OPERATION_MISMATCH, "the model is an encoder, it does not generate")
        if POOLING_NONE < (self._header.pooling_type or 0) < POOLING_RANK:
            raise EngineError(ErrorCode.OPERATION_MISMATCH, "the model embeds, it does not generate")
        if not self._native.has_vocab:
            raise EngineError(ErrorCode.MODEL_UNSUPPORTED, "the GGUF has no vocabulary: it can't say text")
        if max_tokens > self._config.microllm_max_tokens:
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"max_tokens is {max_tokens}, this worker gives at most {self._config.microllm_max_tokens} "
                "(runtime_config microllm_max_tokens)",
            )
        check_vocabulary(input_ids, self.vocab_size)
        if len(input_ids) + max_tokens > self.limit:
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"a prompt of {len(input_ids)} tokens and {max_tokens} new ones exceed the model's {self.limit}",
            )

    def _choose(self, context: NativeContext) -> int:
        logits = context.logits()
        best = int(logits.argmax())  # NaN counts as the greatest, so it can't hide
        if not np.isfinite(logits[best]):
            raise EngineError(ErrorCode.NONFINITE_OUTPUT, "the logits came out as NaN or infinity")
        return best

    # --- running chunks ----------------------------------------------------------------------------------------------

    def _run(self, work: Work, native_pooling: int) -> None:
        """Compute every row: usual chunks side by side where that is faster, long rows one by one."""
        cap = self._chunk_tokens
        chunks = inputs.plan_chunks(work.batch.lengths.tolist(), cap=cap, slots=self._slots())
        usual = [chunk for chunk in chunks if chunk.tokens <= cap]
        shape = self._row_shape(_round_up(cap, GRANULE), native_pooling)
        slots = min(self._slots(), len(usual))
        if slots > 1:
            self._side_by_side(work, usual, shape, slots)
        else:
            for chunk in usual:
                self._one(work, chunk, shape, 0, self._config.threads)
        for chunk in chunks:
            if chunk.tokens > cap:
                size = max(_round_up(cap, GRANULE), _round_up(_power_of_two(chunk.tokens), GRANULE))
                long = self._row_shape(min(size, _round_up(self.limit, GRANULE)), native_pooling, long=True)
                self._one(work, chunk, long, 0, self._config.threads)

    def _side_by_side(self, work: Work, chunks: Sequence[Chunk], shape: ContextShape, slots: int) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=self._slots(), thread_name_prefix="llama-slot")
        # Every thread of the budget computes: the first slots take the rest of the division.
        each, rest = divmod(self._config.threads, slots)
        free: SimpleQueue[tuple[int, int]] = SimpleQueue()
        for number in range(slots):  # made here, one after the other: the pool isn't for several threads
            threads = each + (number < rest)
            self._contexts.get(shape, slot=number, threads=threads)
            free.put((number, threads))

        def run(chunk: Chunk) -> None:
            number, threads = free.get()
            try:
                self._one(work, chunk, shape, number, threads)
            finally:
                free.put((number, threads))

        computing = [self._pool.submit(run, chunk) for chunk in chunks]
        wait(computing, return_when=FIRST_EXCEPTION)
        for future in computing:
            future.cancel()
        wait(computing)  # those that had begun still use the contexts
        for future in computing:
            if not future.cancelled():
                future.result()

    def _one(self, work: Work, chunk: Chunk, shape: ContextShape, slot: int, threads: int) -> None:
        context = self._contexts.get(shape, slot=slot, threads=threads)
        rows = inputs.gather(work.batch, chunk.rows)
        layers = max(1, self._native.n_layer)
        reported = 0

        def on_layer() -> None:
            nonlocal reported
            if reported < layers - 1:  # the last one is reported with the chunk, once it is pooled
                reported += 1
                work.progress.advance()

        context.on_layer = on_layer
        try:
            context.clear(data=True)
            context.run_rows(rows.input_ids, rows.cu_seqlens)
            work.out[list(chunk.rows)] = work.read(context, rows)
        except EngineError as exc:
            if exc.code is not ErrorCode.INVALID_REQUEST:  # a refused batch leaves the context as it was
                self._contexts.drop(shape, slot)
            raise
        finally:
            context.on_layer = None
        work.progress.advance(layers - reported)

    # --- shapes ------------------------------------------------------------------------------------------------------

    def _slots(self) -> int:
        if self._config.contexts:
            return min(self._config.contexts, self._config.threads)  # more would exceed the quota
        small = self._computed_weights() < SMALL_MODEL and not self._config.gpu_layers
        return self._config.threads if small else 1

    def _row_shape(self, n_ubatch: int, native_pooling: int, *, long: bool = False) -> ContextShape:
        return ContextShape(
            n_ctx=_round_up(n_ubatch, 256),
            n_ubatch=n_ubatch,
            n_seq_max=1 if long else inputs.MAX_SEQUENCES,
            pooling=native_pooling,
            # Without a cache attention sees the whole row, whatever the file forgot to say about it.
            causal=None if self.has_memory else False,
            flash=self._config.flash_attention,
            watched=self._is_slow(n_ubatch),
            headless=self._headless and self.has_memory,
        )

    def _is_slow(self, tokens: int) -> bool:
        """Predict whether computing *tokens* at once takes longer than :data:`SLOW_CALL_S`.

        Never on an accelerator: watching a layer there means waiting for it, which halves the speed.
        """
        return not self._config.gpu_layers and self._seconds(tokens) > SLOW_CALL_S

    def _block_tokens(self, most: int) -> int:
        """Return how many prompt tokens go into one call; fewer than *most* where it is predicted to take long."""
        size = most
        while size > MIN_BLOCK_TOKENS and not self._config.gpu_layers and self._seconds(size) > BLOCK_S:
            size //= 2
        return size

    def _seconds(self, tokens: int) -> float:
        """Predict, on the slow side, how long the processor computes *tokens* in one call."""
        attention = self._native.n_layer * self._native.n_embd * tokens
        return 2.0 * tokens * (self._computed_weights() + attention) / FLOPS_PER_THREAD / self._config.threads

    def _computed_weights(self) -> int:
        """Return the parameters that take part in a product: the embedding table is only looked up."""
        table = self._header.tensors.get("token_embd.weight")
        looked_up = table.shape[0] * table.shape[1] if table is not None and len(table.shape) > 1 else 0
        return max(0, self._native.n_params - looked_up)

    def _generation_context(self, tokens: int) -> NativeContext:
        """Return a new context in which one answer has room for so many tokens."""
        n_ctx = min(max(self._config.ctx_size, _power_of_two(tokens)), _round_up(self.limit, 256))
        n_ctx = _round_up(max(n_ctx, tokens), 256)
        shape = ContextShape(
            n_ctx=n_ctx,
            n_ubatch=min(self._prompt_block, n_ctx),
            embeddings=False,
            causal=True,
            flash=self._config.flash_attention,
        )
        context = self._contexts.make(shape)
        context.set_threads(self._config.threads)
        return context


def _round_up(value: int, granule: int) -> int:
    return -(-value // granule) * granule


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()
