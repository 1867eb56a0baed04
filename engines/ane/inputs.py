"""Token rows -> the arrays one Core ML function takes. Pure; int32 and float16 only.

Names are those the builder writes: ``input_ids``, ``attention_mask``, ``token_type_ids`` for a bucket; ``input_ids``,
``position_ids``, ``attention_bias`` and, for window layers, ``local_bias`` for a packed width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from engines.ane import packing
from engines.protocol.errors import EngineError, ErrorCode

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from engines.runtime.batch import IntArray, TokenBatch

    Feeds: TypeAlias = Mapping[str, npt.NDArray[np.int32] | npt.NDArray[np.float16]]


@dataclass(frozen=True, slots=True)
class InputRules:
    """What rows of this model must look like."""

    vocab: int
    pad_id: int = 0
    token_types: bool = False
    sep_id: int | None = None
    """Where token type 1 starts: behind the first of these (cross-encoders with token types)."""
    causal: bool = False
    window: int | None = None
    """Half-width of a local layer's attention window, in tokens."""


def check_ids(batch: TokenBatch, vocab: int) -> None:
    """Refuse ids at or above *vocab* with ``invalid_request``; empty rows and negative ids were refused on arrival.

    An in-graph gather clamps large ids, so a bad id would silently embed another token.
    """
    high = int(batch.input_ids.max())
    if high >= vocab:
        raise EngineError(ErrorCode.INVALID_REQUEST, f"token id {high} is outside the vocabulary of {vocab}")


def single(ids: IntArray, bucket: int, rules: InputRules) -> Feeds:
    """Lay one row out for a bucket: int32 [1, bucket] each.

    The mask follows the row's length, never ``id == pad``: Qwen's end token has the pad id and must stay attended.
    """
    import numpy as np

    n = len(ids)
    row = np.full((1, bucket), rules.pad_id, np.int32)
    row[0, :n] = ids
    mask = np.zeros((1, bucket), np.int32)
    mask[0, :n] = 1
    feeds = {"input_ids": row, "attention_mask": mask}
    if rules.token_types:
        feeds["token_type_ids"] = np.zeros((1, bucket), np.int32)
        if rules.sep_id is not None:
            feeds["token_type_ids"][0, :n] = token_types(ids, rules.sep_id)
    return feeds


def token_types(ids: IntArray, sep_id: int) -> IntArray:
    """Return token types of a composed pair: 0 up to and with the first separator, 1 behind it; int32 (tokens,)."""
    import numpy as np

    types = np.zeros(len(ids), np.int32)
    found = np.flatnonzero(ids == sep_id)
    if len(found):
        types[int(found[0]) + 1 :] = 1
    return types


def packed(rows: list[IntArray], width: int, rules: InputRules) -> Feeds:
    """Lay several rows out back to back in one pass of *width*; see :mod:`engines.ane.packing`."""
    import numpy as np

    lengths = tuple(len(row) for row in rows)
    ids = np.full((1, width), rules.pad_id, np.int32)
    ids[0, : sum(lengths)] = np.concatenate(rows)
    feeds: dict[str, npt.NDArray[np.int32] | npt.NDArray[np.float16]] = {
        "input_ids": ids,
        "position_ids": packing.positions(lengths, width),
        "attention_bias": packing.bias(lengths, width, causal=rules.causal),
    }
    if rules.window is not None:
        feeds["local_bias"] = packing.bias(lengths, width, causal=rules.causal, window=rules.window)
    return feeds
