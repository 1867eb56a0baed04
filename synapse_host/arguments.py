"""What callers pass, checked before anything is tokenised or sent."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from synapse_host import admission
from synapse_host.errors import InvalidRequest
from synapse_host.tokenize import Rows, id_rows

if TYPE_CHECKING:
    from synapse_host.assignment import Assignment


def absolute(deadline: Any) -> float | None:
    """Return the running loop's time *deadline* seconds from now; None stays None."""
    if deadline is None:
        return None
    try:
        # Not what merely reads as a number: '5' is a mistake.
        seconds = math.nan if isinstance(deadline, str | bytes) else float(deadline)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if math.isnan(seconds):
        raise InvalidRequest("deadline is not a number of seconds")
    return asyncio.get_running_loop().time() + seconds


def check_texts(texts: Any, name: str) -> None:
    """Refuse what isn't a list of at least one text; the texts themselves are looked at when they are tokenised."""
    if isinstance(texts, str | bytes):
        raise InvalidRequest(f"{name} is one text; pass a list of texts")
    # A set or a generator has no order to answer in.
    ordered = isinstance(texts, Sequence) or hasattr(texts, "__array__")
    try:
        count = len(texts) if ordered else None
    except TypeError:  # a single value of an array's kind
        count = None
    if count is None:
        raise InvalidRequest(f"{name} is {type(texts).__name__}; pass a list of texts")
    if not count:
        raise InvalidRequest(f"{name} is empty: nothing to do")


def check_source(texts: Any, offset: Any) -> Iterator[Any]:
    """Return an iterator over a stream's texts; refuse what isn't one, and an *offset* that is no whole number."""
    if isinstance(texts, str | bytes):
        raise InvalidRequest("texts is one text; pass an iterable of texts")
    if not hasattr(offset, "__index__"):
        raise InvalidRequest(f"offset is {offset!r}, must be a whole number")
    try:
        return iter(texts)
    except TypeError:
        raise InvalidRequest(f"texts is {type(texts).__name__}; pass an iterable of texts") from None


def check_rows(rows: Sequence[Any], assignment: Assignment) -> Rows:
    """Return a caller's rows of ids laid end to end; none may be empty or longer than the model takes."""
    checked = id_rows(rows)
    if not checked.lengths:
        raise InvalidRequest("no rows: nothing to do")
    max_tokens = assignment.bundle.manifest.max_tokens
    admission.check_lengths(checked.lengths, max_tokens=max_tokens, model=assignment.model, noun="row")
    return checked
