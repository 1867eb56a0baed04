"""A host's tokenizers and where they run: on the loop's thread for little text, else beside it and under a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, Final, TypeVar

from engines.bundle.manifest import Bundle
from synapse_host.arguments import check_source
from synapse_host.background import beside
from synapse_host.errors import DeadlineExceeded
from synapse_host.tokenize import Rows, TextTokenizer

CHUNK: Final = 1024
"""Texts tokenised at once; with the next chunk's ids and the current one's vectors that bounds the host's memory."""
INLINE_CHARACTERS: Final = 16_384
"""Texts shorter than this in sum are tokenised on the loop's thread: a thread switch costs more than they do."""
LET_GO_S: Final = 1.0
"""Seconds that a stream's end waits for the caller's iterator to give its next text, which sets it free."""
LATE_S: Final = 0.02
"""The same where the deadline has passed."""

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


async def checked(rows: Any, until: float | None, check: Callable[[], T]) -> T:
    """Run the *check* of a caller's rows of ids here for few of them, else in a thread: 1,000,000 take seconds."""
    try:
        few = len(rows) <= CHUNK
    except (TypeError, ValueError, OverflowError):
        few = True  # No list of rows: the check says so.
    return check() if few else await in_thread(check, until)


async def in_thread(encode: Callable[[], T], until: float | None) -> T:
    """Run *encode* in a thread; past the deadline it goes on, and its result is dropped."""
    return await _within(beside(encode), until)


async def chunks(
    tokenizer: TextTokenizer, texts: Iterable[str], until: float | None, *, truncate: bool, offset: int
) -> AsyncGenerator[Rows, None]:
    """Yield the rows of consecutive chunks of at most CHUNK texts; the next one is made while the caller has this one.

    Indices count from *offset*. Aclose the iterator: it gives the thread a moment to let go of *texts*.
    """
    reader = _Reader(texts)

    async def prepare(first: int) -> Rows | None:
        chunk = await reader.chunk()
        return await beside(partial(tokenizer.rows, chunk, truncate=truncate, offset=first)) if chunk else None

    def ahead_from(first: int) -> asyncio.Task[Rows | None]:
        task = asyncio.ensure_future(prepare(first))
        # Where nobody waits any more, a failure is no news.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    ahead = ahead_from(offset)
    try:
        while (rows := await _within(ahead, until)) is not None:
            offset += len(rows.lengths)
            ahead = ahead_from(offset)
            yield rows
    finally:
        ahead.cancel()
        await reader.leave(until)


class _Reader:
    """A caller's iterable, read in threads of its own: it may wait as long as it likes, and nobody else waits then."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = texts
        self._source: Iterator[str] | None = None
        self._left = False
        self._loop = asyncio.get_running_loop()
        self._free = asyncio.Event()
        self._free.set()

    async def chunk(self) -> list[str]:
        """Return the next CHUNK texts, fewer at the end. InvalidRequest where there is nothing to iterate over."""
        self._free.clear()
        return await beside(self._read, apart=True)

    def _read(self) -> list[str]:
        chunk: list[str] = []
        try:
            if self._source is None:
                self._source = check_source(self._texts)
            for text in islice(self._source, CHUNK):
                chunk.append(text)
                if self._left:
                    break
        finally:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(self._free.set)
        return chunk

    async def leave(self, until: float | None) -> None:
        """Read no further text; wait until the thread has let go of the iterable, but not for ever.

        It can't be interrupted while the iterable waits for its next text: past the moment it stays behind, ends with
        that text, and holds up nothing until then.
        """
        self._left = True
        moment = LET_GO_S
        if until is not None:
            moment = min(moment, max(LATE_S, until - self._loop.time()))
        if not self._free.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._free.wait(), moment)


async def _within(future: asyncio.Future[T], until: float | None) -> T:
    timeout = None if until is None else max(0.0, until - asyncio.get_running_loop().time())
    done, _ = await asyncio.wait([future], timeout=timeout)
    if not done:
        raise DeadlineExceeded("the deadline passed while the texts were tokenised", details={"stage": "tokenise"})
    return future.result()
