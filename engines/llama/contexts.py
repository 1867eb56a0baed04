"""The computing contexts of one model: made when first needed, kept, freed before the model (U8).

A context costs up to a millisecond and its buffers to make, so a request borrows the one of its shape. Contexts for
rows beyond the usual chunk are large; only one of those is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Final

from engines.llama.binding import ContextShape, NativeContext, NativeModel
from engines.llama.gguf import Array, Header
from engines.llama.quota import free_memory
from engines.protocol.errors import EngineError, ErrorCode

F16_BYTES: Final = 2


class ContextPool:
    """Contexts keyed by shape and lane; a lane is one of the threads that compute at the same time."""

    def __init__(self, native: NativeModel, header: Header) -> None:
        self._native = native
        self._header = header
        self._contexts: dict[tuple[ContextShape, int], NativeContext] = {}
        self._singles: dict[str, NativeContext] = {}
        self.stop = threading.Event()
        """Set it to make watched contexts return early; only on the way out."""

    def __len__(self) -> int:
        return len(self._contexts)

    def get(self, shape: ContextShape, *, lane: int = 0, threads: int = 1, single: str | None = None) -> NativeContext:
        """Return the context of *shape* and *lane*, set to *threads*.

        *single* names a group of large contexts of which only one is kept. Raises EngineError ``oom`` when its cache
        doesn't fit the free memory, ``config_invalid`` when llama.cpp gives no context for another reason.
        """
        key = (shape, lane)
        context = self._contexts.get(key)
        if context is None:
            if single is not None and (previous := self._singles.pop(single, None)) is not None:
                self.drop(previous)
            needed = cache_bytes(self._header.metadata, self._header.architecture, shape.n_ctx)
            free = free_memory()
            if free is not None and needed > free:
                raise EngineError(
                    ErrorCode.OOM, f"a cache of {shape.n_ctx} tokens takes {needed} bytes, {free} bytes are free"
                )
            context = self._contexts[key] = NativeContext(self._native, shape, stop=self.stop)
            if single is not None:
                self._singles[single] = context
        context.set_threads(threads)
        return context

    def drop(self, context: NativeContext) -> None:
        """Free one context whose last call failed in a way that leaves it in doubt."""
        for key, value in list(self._contexts.items()):
            if value is context:
                del self._contexts[key]
        context.close()

    def close(self) -> None:
        """Free them all; idempotent."""
        self.stop.set()
        self._singles.clear()
        while self._contexts:
            self._contexts.popitem()[1].close()


def cache_bytes(metadata: Mapping[str, object], architecture: str, n_ctx: int) -> int:
    """Estimate the bytes of an f16 KV cache of *n_ctx* tokens from the header (an upper bound for encoders: 0)."""

    def number(key: str, default: int) -> int:
        value = metadata.get(f"{architecture}.{key}", default)
        if isinstance(value, Array):  # one number a layer
            return int(max(value.values)) if value.values else default
        return value if isinstance(value, int) else default

    if metadata.get(f"{architecture}.attention.causal") is False:
        return 0
    heads = number("attention.head_count", 0)
    kv_heads = number("attention.head_count_kv", heads)
    width = number("embedding_length", 0) // heads if heads else 0
    key_width = number("attention.key_length", width)
    value_width = number("attention.value_length", width)
    return n_ctx * number("block_count", 0) * kv_heads * (key_width + value_width) * F16_BYTES
