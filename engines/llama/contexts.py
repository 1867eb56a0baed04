"""The computing contexts of one model: made when first needed, kept, freed before the model (U8).

A context costs up to a millisecond and its buffers to make, so a request borrows the one of its shape. Contexts for
rows beyond the usual chunk are large; only one of those is kept.
"""

from __future__ import annotations

from typing import Final

from engines.llama.binding import ContextShape, NativeContext, NativeModel
from engines.llama.gguf import Array, Header
from engines.machine import free_memory
from engines.protocol.errors import EngineError, ErrorCode

F16_BYTES: Final = 2
F32_BYTES: Final = 4


class ContextPool:
    """Contexts keyed by shape and slot; a slot is one of the threads that compute chunks side by side."""

    def __init__(self, native: NativeModel, header: Header) -> None:
        self._native = native
        self._header = header
        self._contexts: dict[tuple[ContextShape, int], NativeContext] = {}

    def get(self, shape: ContextShape, *, slot: int = 0, threads: int = 1) -> NativeContext:
        """Return the context of *shape* and *slot*, set to *threads*. Raises EngineError as :meth:`make` does.

        Contexts for one long row (``n_seq_max`` 1) are large: a new one replaces the last.
        """
        key = (shape, slot)
        if key not in self._contexts:
            for other in [other for other in self._contexts if other[0].n_seq_max == shape.n_seq_max == 1]:
                self._contexts.pop(other).close()
            self._contexts[key] = self.make(shape)
        self._contexts[key].set_threads(threads)
        return self._contexts[key]

    def make(self, shape: ContextShape) -> NativeContext:
        """Return a new context that the caller keeps and closes. Raises EngineError ``oom`` or ``config_invalid``."""
        needed = context_bytes(self._header, shape)
        free = free_memory()
        if needed > free:
            raise EngineError(
                ErrorCode.OOM, f"a context of {shape.n_ctx} tokens takes {needed} bytes, {free} bytes are free"
            )
        return NativeContext(self._native, shape)

    def drop(self, shape: ContextShape, slot: int) -> None:
        """Free one context whose last call failed in a way that leaves it in doubt."""
        self._contexts.pop((shape, slot)).close()

    def close(self) -> None:
        """Free them all; idempotent."""
        while self._contexts:
            self._contexts.popitem()[1].close()


def context_bytes(header: Header, shape: ContextShape) -> int:
    """Estimate the bytes of a context from the header: f16 KV cache, one layer's activations, output buffer.

    llama.cpp's output buffer has room for the logits of every output token, also in an encoder that computes none
    (`llama_context::output_reserve`): vocabulary x outputs x 4 bytes, 8 GB for 8,192 tokens of a vocabulary of 250,000.
    """

    def number(key: str, default: int) -> int:
        value = header.metadata.get(f"{header.architecture}.{key}", default)
        if isinstance(value, Array):  # one number a layer
            return int(max(value.values)) if value.values else default
        return value if isinstance(value, int) else default

    heads = number("attention.head_count", 0)
    kv_heads = number("attention.head_count_kv", heads)
    hidden = number("embedding_length", 0)
    width = hidden // heads if heads else 0
    activations = shape.n_ubatch * (4 * hidden + number("feed_forward_length", 4 * hidden)) * F32_BYTES
    if shape.flash == "disabled":
        activations += heads * shape.n_ubatch**2 * F32_BYTES
    outputs = shape.n_ubatch if shape.embeddings else shape.n_seq_max
    logits = outputs * logits_bytes(header)
    buffer = logits + (outputs * hidden * F32_BYTES if shape.embeddings else 0)
    if header.metadata.get(f"{header.architecture}.attention.causal") is False:
        return activations + buffer
    key_value = number("attention.key_length", width) + number("attention.value_length", width)
    cache = shape.n_ctx * number("block_count", 0) * kv_heads * key_value * F16_BYTES
    return cache + activations + buffer + logits  # a decoder's graph holds its logits once more


def logits_bytes(header: Header) -> int:
    """Return what llama.cpp's output buffer reserves for the logits of one token, in bytes."""
    return (header.token_count or header.embedding_rows or 0) * F32_BYTES
