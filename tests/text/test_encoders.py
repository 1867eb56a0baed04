"""Past a deadline nobody waits for the tokenizer: not the caller, not the loop, not the process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from engines.bundle.manifest import read
from synapse_host.errors import BundleInvalid, DeadlineExceeded, SequenceTooLong
from synapse_host.text import encoders as encoding
from synapse_host.text.encoders import Encoders
from synapse_host.text.limits import FREE_CHARACTERS
from synapse_host.text.rows import Rows
from synapse_host.text.tokenizer import TextTokenizer
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


def soon() -> float:
    return asyncio.get_running_loop().time() + 0.05


def test_a_request_and_a_stream_past_their_deadline(tokenizer: TextTokenizer, stuck: threading.Event) -> None:
    texts = ["a " * FREE_CHARACTERS]

    async def body() -> None:
        with pytest.raises(DeadlineExceeded) as caught:
            await encoding.encoded(texts, soon(), lambda: tokenizer.rows(texts))
        assert caught.value.details == {"stage": "tokenise"}

    asyncio.run(body())
    assert not stuck.is_set()


@pytest.mark.parametrize(
    ("texts", "query", "here"),
    [
        (["a"] * 10, None, True),
        (["a" * FREE_CHARACTERS, "b"], None, False),
        (["a"] * (encoding.CHUNK + 1), None, False),
        ([1, "a"], None, True),
        # Each pair holds the query once more.
        (["a"] * 10, "b" * 2000, False),
        (["a"], "b" * 2 * FREE_CHARACTERS, False),
        (["a"] * 10, "b", True),
    ],
)
def test_only_little_text_is_tokenised_on_the_loop(texts: list[Any], query: str | None, here: bool) -> None:
    async def body() -> bool:
        thread = await encoding.encoded(texts, None, threading.current_thread, query=query)
        return thread is threading.current_thread()

    assert asyncio.run(body()) is here


def test_the_next_chunk_is_made_ahead_and_a_failure_names_the_text(tokenizer: TextTokenizer) -> None:
    texts = ["a"] * 2 * encoding.CHUNK + ["a " * 100]
    begun: list[int] = []

    def encode(chunk: Sequence[str], start: int) -> Rows:
        begun.append(start)
        return tokenizer.rows(chunk, offset=start)

    async def body() -> None:
        chunks = encoding.chunks(texts, None, encode)
        assert [len((await anext(chunks)).lengths) for _ in range(2)] == [encoding.CHUNK] * 2
        assert begun == [0, encoding.CHUNK], "one ahead, not all"
        with pytest.raises(SequenceTooLong) as caught:
            await anext(chunks)
        assert caught.value.details["index"] == 2 * encoding.CHUNK
        late = encoding.chunks(texts, asyncio.get_running_loop().time(), encode)
        with pytest.raises(DeadlineExceeded):
            [rows async for rows in late]

    asyncio.run(body())


def test_a_tokenizer_is_opened_once_and_beside_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []
    go = threading.Event()
    real = TextTokenizer.__init__

    def opening(self: TextTokenizer, *args: Any, **options: Any) -> None:
        threads.append(threading.current_thread() is threading.main_thread())
        go.wait(60)
        real(self, *args, **options)

    monkeypatch.setattr(TextTokenizer, "__init__", opening)
    encoders = Encoders({"toy": read(write_bundle(tmp_path))})

    async def body() -> None:
        waiting = [asyncio.create_task(encoders.of("toy", None)) for _ in range(3)]
        with pytest.raises(DeadlineExceeded):
            await encoders.of("toy", soon())
        go.set()
        first, *others = await asyncio.gather(*waiting)
        assert all(other is first for other in [*others, await encoders.of("toy", 0.0)])

    asyncio.run(body())
    assert threads == [False]


def test_a_tokenizer_that_could_not_be_opened_is_tried_again(tmp_path: Path) -> None:
    bundle = read(write_bundle(tmp_path))
    file = bundle.path("tokenizer.json")
    good = file.read_bytes()
    encoders = Encoders({"toy": bundle})

    async def body() -> None:
        file.write_bytes(b"{}")
        with pytest.raises(BundleInvalid):
            await encoders.of("toy", None)
        file.write_bytes(good)
        assert (await encoders.of("toy", None)).rows(["a"]).lengths == [3]

    asyncio.run(body())
