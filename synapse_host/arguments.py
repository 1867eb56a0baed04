"""What callers pass, checked before anything is tokenised or sent."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
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
    if not isinstance(texts, Sequence) and not hasattr(texts, "__array__"):
        # A set or a generator has no order to answer in.
        raise InvalidRequest(f"{name} is {type(texts).__name__}; pass a list of texts")
    if not len(texts):
        raise InvalidRequest(f"{name} is empty: nothing to do")


def check_rows(rows: Sequence[Any], assignment: Assignment) -> Rows:
    """Return a caller's rows of ids laid end to end; none may be empty or longer than the model takes."""
    checked = id_rows(rows)
    if not checked.lengths:
        raise InvalidRequest("no rows: nothing to do")
    max_tokens = assignment.bundle.manifest.max_tokens
    admission.check_lengths(checked.lengths, max_tokens=max_tokens, model=assignment.model, noun="row")
    return checked
