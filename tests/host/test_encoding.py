"""Past a deadline nobody waits for the tokenizer: not the caller, not the loop, not the process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.bundle.manifest import read
from synapse_host import background, encoding
from synapse_host.errors import DeadlineExceeded, SequenceTooLong
from synapse_host.tokenize import TextTokenizer
from tests.support.small_bundle import write_bundle


@pytest.fixture
def tokenizer(tmp_path: Path) -> TextTokenizer:
    return TextTokenizer(read(write_bundle(tmp_path)))


@pytest.fixture
def stuck(tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Make the tokenizer wait for the event; it is set at the end."""
    go = threading.Event()
    real = TextTokenizer.rows

    def rows(self: TextTokenizer, texts: Any, **options: Any) -> Any:
        go.wait(60)
        return real(self, texts, **options)

    monkeypatch.setattr(TextTokenizer, "rows", rows)
    yield go
    go.set()


def test_a_request_past_its_deadline(tokenizer: TextTokenizer, stuck: threading.Event) -> None:
    texts = ["a " * encoding.INLINE_CHARACTERS]

    async def body() -> None:
        until = asyncio.get_running_loop().time() + 0.05
        with pytest.raises(DeadlineExceeded) as caught:
            await encoding.encoded(texts, until, lambda: tokenizer.rows(texts))
        assert caught.value.details == {"stage": "tokenise"}

    asyncio.run(body())
    assert not stuck.is_set()


def test_a_stream_past_its_deadline_has_let_go_of_the_texts(tokenizer: TextTokenizer, stuck: threading.Event) -> None:
    def endless() -> Iterator[str]:
        while True:
            yield "a"

    texts = endless()

    async def body() -> None:
        until = asyncio.get_running_loop().time() + 0.05
        with pytest.raises(DeadlineExceeded):
            async for _ in encoding.chunks(tokenizer, texts, until, truncate=False, offset=0):
                pass

    asyncio.run(body())
    assert not stuck.is_set()
    texts.close()  # ValueError while another thread runs it


def test_a_stream_that_is_left_waits_until_the_texts_are_free(tokenizer: TextTokenizer) -> None:
    go, reading = threading.Event(), threading.Event()

    def slow() -> Iterator[str]:
        yield from ["a"] * encoding.CHUNK
        reading.set()
        go.wait(60)
        yield "b"

    texts = slow()

    async def body() -> None:
        rows = encoding.chunks(tokenizer, texts, None, truncate=False, offset=0)
        first = await anext(rows)
        assert len(first.lengths) == encoding.CHUNK
        await asyncio.to_thread(reading.wait, 60)
        closing = asyncio.ensure_future(rows.aclose())
        await asyncio.sleep(0.05)
        assert not closing.done()
        go.set()
        await closing
        texts.close()

    asyncio.run(body())


def blocked(reading: threading.Event, go: threading.Event, taken: list[str]) -> Iterator[str]:
    """Give a text, then none until *go*."""
    yield "a"
    reading.set()
    go.wait(60)
    for text in "bcd":
        taken.append(text)
        yield text


@pytest.fixture
def gate() -> Iterator[tuple[threading.Event, threading.Event]]:
    reading, go = threading.Event(), threading.Event()
    yield reading, go
    go.set()


def test_a_deadline_does_not_wait_for_texts_that_do_not_come(
    tokenizer: TextTokenizer, gate: tuple[threading.Event, threading.Event]
) -> None:
    reading, go = gate
    taken: list[str] = []

    async def body() -> None:
        until = asyncio.get_running_loop().time() + 0.05
        with pytest.raises(DeadlineExceeded):
            async for _ in encoding.chunks(tokenizer, blocked(reading, go, taken), until, truncate=False, offset=0):
                pass
        assert reading.is_set() and not go.is_set()

    asyncio.run(asyncio.wait_for(body(), 30))
    assert background.busy()
    go.set()
    while background.busy():
        time.sleep(0.01)
    assert taken == ["b"]  # the thread asks for no further text


@pytest.mark.parametrize("end", ["aclose", "cancel"])
def test_a_stream_is_left_although_its_texts_do_not_come(
    tokenizer: TextTokenizer, gate: tuple[threading.Event, threading.Event], monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(encoding, "LET_GO_S", 0.05)
    reading, go = gate

    def texts() -> Iterator[str]:
        yield from ["a"] * (encoding.CHUNK - 1)
        yield from blocked(reading, go, [])

    async def body() -> None:
        rows = encoding.chunks(tokenizer, texts(), None, truncate=False, offset=0)
        await anext(rows)
        await asyncio.to_thread(reading.wait, 60)
        if end == "cancel":
            waiting = asyncio.ensure_future(anext(rows))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        else:
            await rows.aclose()

    asyncio.run(asyncio.wait_for(body(), 30))
    assert not go.is_set()


def test_texts_that_do_not_come_keep_nobody_else_waiting(
    tokenizer: TextTokenizer, gate: tuple[threading.Event, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "LIMIT", 1)
    reading, go = gate

    async def body() -> None:
        waiting = [
            asyncio.ensure_future(
                anext(encoding.chunks(tokenizer, blocked(reading, go, []), None, truncate=False, offset=0))
            )
            for _ in range(3)
        ]
        await asyncio.to_thread(reading.wait, 60)
        texts = ["a " * encoding.INLINE_CHARACTERS]
        await encoding.encoded(texts, None, lambda: tokenizer.rows(texts, truncate=True))
        assert not go.is_set()
        go.set()
        assert [len(rows.lengths) for rows in await asyncio.gather(*waiting)] == [4] * 3

    asyncio.run(asyncio.wait_for(body(), 30))


def test_an_iterable_that_is_slow_to_begin_does_not_hold_up_the_loop(tokenizer: TextTokenizer) -> None:
    here = threading.current_thread()

    class Texts:
        def __iter__(self) -> Iterator[str]:
            assert threading.current_thread() is not here
            return iter(["a"])

    async def body() -> list[int]:
        found = encoding.chunks(tokenizer, Texts(), None, truncate=False, offset=0)
        return [length async for rows in found for length in rows.lengths]

    assert asyncio.run(body()) == [3]


def test_a_streams_failure_is_the_callers_and_names_the_text(tokenizer: TextTokenizer) -> None:
    async def body() -> list[int]:
        texts = ["a"] * encoding.CHUNK + ["a " * 100]
        sizes = []
        with pytest.raises(SequenceTooLong) as caught:
            async for rows in encoding.chunks(tokenizer, texts, None, truncate=False, offset=5):
                sizes.append(len(rows.lengths))
        assert caught.value.details["index"] == encoding.CHUNK + 5
        return sizes

    assert asyncio.run(body()) == [encoding.CHUNK]
