"""A host's tokenizers and where they run: on the loop's thread for little text, else beside it and under a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Final, TypeVar

from engines.bundle.manifest import Bundle
from synapse_host.background import beside
from synapse_host.errors import DeadlineExceeded
from synapse_host.tokenize import Rows, TextTokenizer

CHUNK: Final = 1024
"""Texts tokenised at once; with the next chunk's ids and the current one's vectors that bounds the host's memory."""
INLINE_CHARACTERS: Final = 16_384
"""Texts shorter than this in sum are tokenised on the loop's thread: a thread switch costs more than they do."""

T = TypeVar("T")


class Encoders:
    """The tokenizers of a host's models, each opened at its first use."""

    def __init__(self, bundles: Mapping[str, Bundle]) -> None:
        self._bundles = bundles
        self._opened: dict[str, TextTokenizer] = {}

    def of(self, model: str) -> TextTokenizer:
        """Return a model's tokenizer; InvalidRequest where its bundle has none."""
        tokenizer = self._opened.get(model)
        if tokenizer is None:
            tokenizer = self._opened[model] = TextTokenizer(self._bundles[model], model=model)
        return tokenizer

    def opened(self, model: str) -> TextTokenizer | None:
        """Return a model's tokenizer if it was used before."""
        return self._opened.get(model)


async def encoded(texts: Sequence[str], until: float | None, encode: Callable[[], T]) -> T:
    """Run *encode* here for few and short texts, else in a thread; DeadlineExceeded when it takes too long."""
    try:
        small = sum(map(str.__len__, texts)) <= INLINE_CHARACTERS
    except TypeError:
        small = True  # Not all of them are texts: encode says which.
    return encode() if small else await in_thread(encode, until)


async def in_thread(encode: Callable[[], T], until: float | None) -> T:
    """Run *encode* in a thread; past the deadline it goes on, and its result is dropped."""
    return await _within(beside(encode), until)


async def chunks(
    tokenizer: TextTokenizer, texts: Iterable[str], until: float | None, *, truncate: bool, offset: int
) -> AsyncGenerator[Rows, None]:
    """Yield the rows of consecutive chunks of at most CHUNK texts; the next one is made while the caller has this one.

    Indices count from *offset*. Aclose the iterator: it waits until the thread has let go of *texts*.
    """
    source, loop = iter(texts), asyncio.get_running_loop()
    free = asyncio.Event()

    def prepare(first: int) -> Rows | None:
        try:
            chunk = list(islice(source, CHUNK))
        finally:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(free.set)
        return tokenizer.rows(chunk, truncate=truncate, offset=first) if chunk else None

    ahead = beside(partial(prepare, offset))
    try:
        while (rows := await _within(ahead, until)) is not None:
            offset += len(rows.lengths)
            free.clear()
            ahead = beside(partial(prepare, offset))
            yield rows
    finally:
        # The thread can't be interrupted: wait until it has let go of the caller's iterator.
        await free.wait()


async def _within(future: asyncio.Future[T], until: float | None) -> T:
    timeout = None if until is None else max(0.0, until - asyncio.get_running_loop().time())
    done, _ = await asyncio.wait([future], timeout=timeout)
    if not done:
        raise DeadlineExceeded("the deadline passed while the texts were tokenised", details={"stage": "tokenise"})
    return future.result()
