"""A host's tokenizers and where they run: on the loop's thread for little text, else beside it and under a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

from synapse_host.errors import DeadlineExceeded, QueueFull
from synapse_host.text.background import beside
from synapse_host.text.limits import FREE_CHARACTERS

if TYPE_CHECKING:
    from engines.bundle.manifest import Bundle
    from synapse_host.text.rows import Rows
    from synapse_host.text.tokenizer import TextTokenizer

CHUNK: Final = 1024
"""Texts tokenised at once; with the next chunk's ids and the current one's vectors that bounds the host's memory."""
FRAME_CHARACTERS: Final = 200
"""Characters that composing a pair adds to a document at most, beside the query."""

T = TypeVar("T")


class Encoders:
    """The tokenizers of a host's models, each opened at its first use, in a thread: a file may have 64 MiB."""

    def __init__(self, bundles: Mapping[str, Bundle]) -> None:
        self._bundles = bundles
        self._opened: dict[str, TextTokenizer] = {}
        self._opening: dict[str, asyncio.Future[TextTokenizer]] = {}

    async def of(self, model: str, until: float | None) -> TextTokenizer:
        """Return a model's tokenizer. Raises InvalidRequest where its bundle has none, BundleInvalid, DeadlineExceeded.

        Calls that come while it is being opened wait for the same one; a failure is tried again at the next call.
        """
        self._begin(model)
        tokenizer = self._opened.get(model)
        return await _within(self._opening[model], until) if tokenizer is None else tokenizer

    def begin(self, model: str) -> None:
        """Begin to open a model's tokenizer when the running task waits next: its worker is started by then.

        Nobody has to wait for it. Beside the thread's imports every system call of the start would take milliseconds.
        """

        def soon() -> None:
            with suppress(QueueFull):  # the first text's
                self._begin(model)

        asyncio.get_running_loop().call_soon(soon)

    def _begin(self, model: str) -> None:
        if model not in self._opened and model not in self._opening:
            opening = self._opening[model] = beside(lambda: _opened(self._bundles[model], model))
            opening.add_done_callback(lambda done: self._settle(model, done))

    async def begun(self, model: str, until: float | None) -> None:
        """Wait until what was begun is over, whatever became of it: a failure is the first text's."""
        opening = self._opening.get(model)
        if opening is not None:
            timeout = None if until is None else max(0.0, until - asyncio.get_running_loop().time())
            await asyncio.wait([opening], timeout=timeout)

    def _settle(self, model: str, done: asyncio.Future[TextTokenizer]) -> None:
        self._opening.pop(model, None)
        if not done.cancelled() and done.exception() is None:
            self._opened[model] = done.result()


def _opened(bundle: Bundle, model: str) -> TextTokenizer:
    from synapse_host.text.tokenizer import TextTokenizer  # here: a worker is started before the thread that imports it

    return TextTokenizer(bundle, model=model)


async def encoded(texts: Sequence[str], until: float | None, encode: Callable[[], T], *, query: str | None = None) -> T:
    """Run *encode* here for few and short texts, else in a thread; DeadlineExceeded when it takes too long.

    *query* is put before each of the texts.
    """
    small = len(texts) <= CHUNK
    if small:
        try:
            more = 0 if query is None else (len(query) + FRAME_CHARACTERS) * len(texts)
            small = more + sum(map(len, texts)) <= FREE_CHARACTERS
        except TypeError:
            pass  # Not all of them are texts: encode says which.
    return encode() if small else await in_thread(encode, until)


async def checked(rows: Any, until: float | None, check: Callable[[], T]) -> T:
    """Run the *check* of a caller's rows of ids here for few of them, else in a thread: 1,000,000 take seconds."""
    try:
        few = len(rows) <= CHUNK
    except TypeError:
        few = True  # No list of rows: the check says so.
    return check() if few else await in_thread(check, until)


async def in_thread(encode: Callable[[], T], until: float | None) -> T:
    """Run *encode* in a thread; past the deadline it goes on, and its result is dropped."""
    return await _within(beside(encode), until)


async def chunks(
    texts: Sequence[str], until: float | None, encode: Callable[[Sequence[str], int], Rows], *, query: str | None = None
) -> AsyncGenerator[Rows, None]:
    """Yield what *encode* makes of consecutive chunks of at most CHUNK texts, each with the index of its first text.

    Without texts one empty chunk. The next one is made in a thread while the caller has this one; past the deadline,
    and when the iterator is left early, it is finished and dropped. *query* is put before each of the texts.
    """
    rows = await encoded(texts[:CHUNK], until, lambda: encode(texts[:CHUNK], 0), query=query)
    for start in range(CHUNK, len(texts), CHUNK):
        ahead = beside(lambda start=start: encode(texts[start : start + CHUNK], start))  # type: ignore[misc]
        yield rows
        rows = await _within(ahead, until)
    yield rows


async def _within(future: asyncio.Future[T], until: float | None) -> T:
    timeout = None if until is None else max(0.0, until - asyncio.get_running_loop().time())
    done, _ = await asyncio.wait([future], timeout=timeout)
    if not done:
        raise DeadlineExceeded("the deadline passed while the texts were tokenised", details={"stage": "tokenise"})
    return future.result()
