"""What callers pass, checked before anything is tokenised or sent."""

from __future__ import annotations

import asyncio
import math
import reprlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from msgspec import UNSET

from synapse_host.errors import InvalidRequest
from synapse_host.text import limits
from synapse_host.text.rows import Rows

if TYPE_CHECKING:
    from engines.bundle.manifest import Manifest
    from synapse_host.arrays import IntArray
    from synapse_host.placement.assignment import Assignment

NO_PROMPT: Final = "none"
"""The name that asks for no prompt, also where the model has a default one."""
BLOCK: Final = 4096
"""Rows that are joined at once."""


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


def check_texts(texts: Any, name: str) -> int:
    """Return how many *texts* there are; refuse what isn't a list.

    The texts themselves are looked at when they are tokenised.
    """
    if isinstance(texts, str | bytes):
        raise InvalidRequest(f"{name} is one text; pass a list of texts")
    # A set or a generator has no order to answer in.
    ordered = isinstance(texts, Sequence) or hasattr(texts, "__array__")
    count = _count(texts) if ordered else None
    if count is None:
        raise InvalidRequest(f"{name} is {type(texts).__name__}; pass a list of texts")
    return count


def _count(values: Any) -> int | None:
    """Return the length of *values*; None where it has none."""
    try:
        return len(values)
    except TypeError:  # a single value of an array's kind
        return None


def prompt_text(manifest: Manifest, name: str | None) -> str:
    """Return what is put before each text: the prompt called *name*; for None the model's default, if it has one.

    ``none`` is no prompt at all. InvalidRequest lists the names there are.
    """
    prompts = manifest.prompts if manifest.prompts is not UNSET else {}
    if name is None:
        return "" if manifest.default_prompt is UNSET else prompts[manifest.default_prompt]
    if isinstance(name, str) and (name in prompts or name == NO_PROMPT):
        return prompts.get(name, "")
    known = [*sorted(prompts), NO_PROMPT]
    raise InvalidRequest(
        f"{manifest.model_id} has no prompt {name!r}; there are: {', '.join(known)} ({NO_PROMPT}: no prompt)",
        details={"prompts": known},
    )


def width(manifest: Manifest, dimensions: Any) -> int:
    """Return how many numbers a vector has where a caller asks for *dimensions*; None is what the model gives itself.

    InvalidRequest for anything but a whole number from 1 to the model's own.
    """
    if dimensions is None:
        return manifest.dims if manifest.truncate_dim is UNSET else manifest.truncate_dim
    if isinstance(dimensions, int) and not isinstance(dimensions, bool) and 1 <= dimensions <= manifest.dims:
        return int(dimensions)
    raise InvalidRequest(
        f"dimensions is {reprlib.repr(dimensions)}: {manifest.model_id} gives {manifest.dims} numbers, of which the "
        f"first 1 to {manifest.dims} may be asked for",
        details={"param": "dimensions", "dims": manifest.dims},
    )


def check_rows(rows: Sequence[Any], assignment: Assignment) -> Rows:
    """Return a caller's rows of ids laid end to end; none may be empty or longer than the model takes."""
    return id_rows(rows, max_tokens=assignment.bundle.manifest.max_tokens, model=assignment.model)


def id_rows(rows: Sequence[Any], *, max_tokens: int, model: str, noun: str = "row") -> Rows:
    """Check rows of ids that a caller made (lists or integer arrays) and lay them end to end.

    Raises InvalidRequest {index} for what isn't a flat row of integers in [0, 2**31), and SequenceTooLong {index,
    tokens, max_tokens} before anything of that length is looked at.
    """
    import numpy as np

    count = _count(rows) if isinstance(rows, Sequence | np.ndarray) and not isinstance(rows, str | bytes) else None
    if count is None:
        raise InvalidRequest(f"the {noun}s are {type(rows).__name__}, must be a list of rows of token ids")
    arrays: list[IntArray] = []
    blocks: list[IntArray] = []
    lengths: list[int] = []
    for index, row in enumerate(rows):
        length = _count(row)
        if length is not None and length > max_tokens:
            raise limits.too_long(index, length, max_tokens, model=model, noun=noun)
        array = None if length is None else _id_row(row)
        if array is None:
            raise InvalidRequest(f"{noun} {index} is not a flat list of whole token ids", details={"index": index})
        if array.size == 0:
            raise InvalidRequest(f"{noun} {index} has no tokens", details={"index": index})
        low, high = int(array.min()), int(array.max())
        if low < 0 or high > 2**31 - 1:
            bad = low if low < 0 else high
            raise InvalidRequest(f"{noun} {index} holds {bad}, which is no token id", details={"index": index})
        lengths.append(array.size)
        arrays.append(array.astype(np.int32, copy=False))
        if len(arrays) == BLOCK:
            # In steps: numpy lets nothing else run while it joins a million arrays.
            blocks.append(np.concatenate(arrays))
            arrays.clear()
    blocks += arrays
    flat: IntArray = np.concatenate(blocks) if blocks else np.empty(0, np.int32)
    return Rows(flat, lengths, [])


def _id_row(row: Any) -> Any:
    """Return a row's ids as an integer array; None where it isn't a flat row of whole numbers."""
    import numpy as np

    try:
        array = np.asarray(row)
    except ValueError:  # rows of different lengths inside
        return None
    return array if array.ndim == 1 and (array.dtype.kind in "iu" or not array.size) else None
