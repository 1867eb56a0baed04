"""What may be sent: byte, token and length budgets, refused before any frame exists; and what is tokenised at once.

One exchange carries at most 256 rows, and both its request and its reply fit ``max_frame`` (protocol-v3, 1).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from engines.protocol.messages import ITEM_BYTES, MAX_ITEMS
from synapse_host.errors import InvalidRequest, SequenceTooLong

HEADER_BYTES: Final = 1024
"""More than a request header takes beside its rows: type, req_id, model_ref and fixed fields."""
ROW_HEADER_BYTES: Final = 64
"""More than one item of a header takes: its id (the row's number) and its token count."""
EXCHANGE_TOKENS: Final = 128 * 1024
"""Tokens beyond which an exchange isn't filled further: other callers of the lane get their turn in between."""
BUDGET_CHARACTERS: Final = 1024 * 1024
"""Characters in the tokenizers of all threads at once; a longer piece goes alone."""
FREE_CHARACTERS: Final = 16 * 1024
"""Calls with fewer never wait for the budget: they may run on the event loop's thread."""


def check_lengths(lengths: Sequence[int], *, max_tokens: int, model: str, noun: str = "text") -> None:
    """Raise SequenceTooLong {index, tokens, max_tokens} for a row beyond the model's maximum."""
    for index, length in enumerate(lengths):
        if length > max_tokens:
            raise too_long(index, length, max_tokens, model=model, noun=noun)


CUTTABLE: Final = ("text", "document")
"""What ``truncate`` may cut: texts of a caller. Prompts, queries and rows of ids are never cut."""


def named(noun: str, index: int) -> str:
    """Return what a message calls a text; a request has one query or prompt, where an index would only confuse."""
    return f"the {noun}" if noun in ("prompt", "query") else f"{noun} {index}"


def too_long(
    index: int, tokens: int, max_tokens: int, *, model: str, noun: str = "text", at_least: bool = False
) -> SequenceTooLong:
    """Return the error that names the row, its length and the way out; *at_least*: the rest was not counted."""
    advice = "Shorten it or pass {} (truncated texts are listed in the result)." if noun in CUTTABLE else "Shorten it."
    return SequenceTooLong(
        f"{named(noun, index)} has {'at least ' if at_least else ''}{tokens} tokens, {model} takes {max_tokens}.",
        details={"index": index, "tokens": tokens, "max_tokens": max_tokens},
        advice={"python": advice.format("truncate=True"), "command": advice.format("--truncate")},
    )


def most_rows(max_frame: int, reply_row_bytes: int) -> int:
    """Return how many rows an exchange takes at most."""
    return min(MAX_ITEMS, (max_frame - HEADER_BYTES) // ROW_HEADER_BYTES, max_frame // reply_row_bytes)


def split(
    lengths: Sequence[int], *, reply_row_bytes: int, max_frame: int, common_tokens: int = 0, noun: str = "text"
) -> list[range]:
    """Cut rows 0..n-1 into consecutive exchanges.

    *reply_row_bytes*: bytes of the reply's raw frame per row (4 x dims for vectors, 4 for scores). *common_tokens*: ids
    that every exchange carries (RERANK's query). Raises InvalidRequest where a single row can't fit.
    """
    payload_room = max_frame // ITEM_BYTES - common_tokens
    rows_limit = most_rows(max_frame, reply_row_bytes)
    if lengths and rows_limit < 1:
        raise InvalidRequest(
            f"one row does not fit a frame of {max_frame} bytes; raise max_frame", details={"max_frame": max_frame}
        )
    exchanges: list[range] = []
    start = tokens = 0
    for index, length in enumerate(lengths):
        if length > payload_room:
            raise InvalidRequest(
                f"{noun} {index} with {length + common_tokens} token ids does not fit a frame of {max_frame} bytes",
                details={"index": index, "max_frame": max_frame},
            )
        rows = index - start
        if rows and (rows == rows_limit or tokens + length > min(payload_room, max(EXCHANGE_TOKENS, length))):
            exchanges.append(range(start, index))
            start, tokens = index, 0
        tokens += length
    if start < len(lengths):
        exchanges.append(range(start, len(lengths)))
    return exchanges


class Budget:
    """Characters that are being tokenised, by all threads of the process.

    What the tokenizers library makes of a text takes up to 250 bytes a character while it runs, so a few long texts
    side by side would take the host's memory. A thread holds its characters for as long as the library works on them.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._used = 0

    @contextmanager
    def taken(self, characters: int) -> Iterator[None]:
        """Wait until there is room for *characters* and hold it; more than all there is goes alone."""
        if characters <= FREE_CHARACTERS:
            yield
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._used or self._used + characters <= BUDGET_CHARACTERS)
            self._used += characters
        try:
            yield
        finally:
            with self._changed:
                self._used -= characters
                self._changed.notify_all()


budget: Final = Budget()
