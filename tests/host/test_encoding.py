"""Past a deadline nobody waits for the tokenizer: not the caller, not the loop, not the process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.bundle.manifest import read
from synapse_host import encoding
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
