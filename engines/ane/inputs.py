"""Token rows -> the arrays one Core ML function takes. Pure; int32 and float16 only.

Names are those the builder writes: ``input_ids``, ``attention_mask``, ``token_type_ids`` for a bucket; ``input_ids``,
``position_ids``, ``attention_bias`` and, for window layers, ``local_bias`` for a packed width (ane.md 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from engines.ane.families import FAMILIES

if TYPE_CHECKING:
    from engines.runtime.batch import IntArray

Feeds: TypeAlias = Mapping[str, npt.NDArray[np.int32] | npt.NDArray[np.float16]]

MASKED: Final = -10_000.0
"""Additive bias of a forbidden pair. Finite on purpose: an infinity or the fp32 minimum turns a whole fp16 output into
NaN (apple/coremltools#2669)."""


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

    @classmethod
    def of(cls, family: str, config: Mapping[str, Any], **row: Any) -> InputRules:
        """Return the rules of a model by its family and complete config; *row* gives the other fields."""
        about = FAMILIES[family]
        return cls(config["vocab_size"], causal=about.causal(config), window=about.window(config), **row)


def single(ids: IntArray, bucket: int, rules: InputRules) -> Feeds:
    """Lay one row out for a bucket: int32 [1, bucket] each.

    The mask follows the row's length, never ``id == pad``: Qwen's end token has the pad id and must stay attended.
    """
    n = len(ids)
    row = np.full((1, bucket), rules.pad_id, np.int32)
    row[0, :n] = ids
    mask = np.zeros((1, bucket), np.int32)
    mask[0, :n] = 1
    feeds = {"input_ids": row, "attention_mask": mask}
    if rules.token_types:
        types = feeds["token_type_ids"] = np.zeros((1, bucket), np.int32)
        # A composed pair: type 0 up to and with the first separator, 1 behind it.
        found = np.flatnonzero(ids == rules.sep_id)
        if len(found):
            types[0, int(found[0]) + 1 : n] = 1
    return feeds


def packed(rows: list[IntArray], width: int, rules: InputRules) -> Feeds:
    """Lay several rows out back to back in one pass of *width*; the rest of the pass is padding, at position 0."""
    lengths = tuple(len(row) for row in rows)
    ids, positions = np.full((1, width), rules.pad_id, np.int32), np.zeros((1, width), np.int32)
    ids[0, : sum(lengths)] = np.concatenate(rows)
    positions[0, : sum(lengths)] = np.concatenate([np.arange(length) for length in lengths])
    feeds: dict[str, npt.NDArray[np.int32] | npt.NDArray[np.float16]] = {
        "input_ids": ids,
        "position_ids": positions,
        "attention_bias": bias(lengths, width, causal=rules.causal),
    }
    if rules.window is not None:
        feeds["local_bias"] = bias(lengths, width, causal=rules.causal, window=rules.window)
    return feeds


@lru_cache(maxsize=64)
def bias(
    lengths: tuple[int, ...], width: int, *, causal: bool = False, window: int | None = None
) -> npt.NDArray[np.float16]:
    """Return a packed pass's additive attention bias [1, 1, width, width] (query, key): 0 allowed, else -10,000.

    A query sees only keys of its own row: earlier ones in a causal model, |i - j| <= *window* in a local layer. A
    padding query sees itself alone, so that its softmax stays finite without a look at any row. Read-only; the 64 most
    recent length tuples are kept (128 KiB each at width 256).
    """
    row_of = np.full(width, -1, np.int32)
    row_of[: sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
    place = np.arange(width)
    allowed = (row_of[:, None] == row_of[None, :]) & (row_of[:, None] >= 0)
    if causal:
        allowed &= place[None, :] <= place[:, None]
    if window is not None:
        allowed &= np.abs(place[:, None] - place[None, :]) <= window
    allowed |= (row_of[:, None] < 0) & (place[:, None] == place[None, :])
    table = np.where(allowed, np.float16(0), np.float16(MASKED))[None, None]
    table.setflags(write=False)
    return table
