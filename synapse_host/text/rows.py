"""Token rows laid end to end, and the special ids around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from synapse_host.errors import InvalidRequest

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from engines.bundle.manifest import Bundle
    from synapse_host.arrays import IntArray


@dataclass(frozen=True, slots=True)
class Rows:
    """Token rows laid end to end: ``ids`` int32 (tokens,), one length per row, indices of rows that were cut."""

    ids: IntArray
    lengths: list[int]
    truncated: list[int]


@dataclass(frozen=True, slots=True)
class Frame:
    """Special ids around a row, and between the two parts of a pair."""

    prefix: tuple[int, ...] = ()
    middle: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.prefix) + len(self.middle) + len(self.suffix)


def flatten(rows: Sequence[Sequence[int]]) -> IntArray:
    """Return the rows end to end as int32 (tokens,)."""
    import numpy as np

    total = sum(map(len, rows))
    return np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=total)


def single_frame(tokenizer: Tokenizer, family: str, task: str, special: dict[str, int]) -> Frame:
    """Return the special ids around a text: as the tokenizer's post-processor puts them, else as the family says."""
    frame = _observed(tokenizer, ["a"])
    if len(frame):
        return frame
    # A tokenizer file without a post-processor: the family says what its models were trained with.
    if family in ("bert", "modernbert", "mpnet", "nomic_bert") and {"cls", "sep"} <= special.keys():
        return Frame(prefix=(special["cls"],), suffix=(special["sep"],))
    if family == "qwen3" and task == "embed" and "eos" in special:
        # Last-token pooling reads the end-of-text token.
        return Frame(suffix=(special["eos"],))
    return Frame()


def pair_frame(tokenizer: Tokenizer, special: dict[str, int]) -> Frame:
    """Return the special ids around and between the texts of a pair, found in the same way."""
    frame = _observed(tokenizer, ["a", "b"])
    if frame.middle:
        return frame
    if {"cls", "sep"} <= special.keys():
        return Frame((special["cls"],), (special["sep"],), (special["sep"],))
    return frame


def _observed(tokenizer: Tokenizer, parts: list[str]) -> Frame:
    """Read the special ids off an encoding of one or two short texts."""
    encoding = tokenizer.encode(parts[0], parts[1] if len(parts) == 2 else None, add_special_tokens=True)
    ids, mask, owners = encoding.ids, encoding.special_tokens_mask, encoding.sequence_ids
    real = [i for i, is_special in enumerate(mask) if not is_special]
    if not real:
        return Frame()
    middle: tuple[int, ...] = ()
    if len(parts) == 2:
        first = max((i for i in real if owners[i] == 0), default=real[0])
        second = min((i for i in real if owners[i] == 1), default=real[-1])
        middle = tuple(ids[first + 1 : second])
    return Frame(tuple(ids[: real[0]]), middle, tuple(ids[real[-1] + 1 :]))


def special_frame(bundle: Bundle, *, composed: bool = True) -> Frame:
    """Return the special ids of a pair by the manifest, for a bundle without a tokenizer.

    InvalidRequest where the manifest doesn't say them, unless a worker composes the pairs and only their number counts.
    """
    special = bundle.manifest.special_ids or {}
    separators = 2 if bundle.manifest.family in ("roberta", "xlm-roberta", "mpnet") else 1
    if composed and not {"cls", "sep"} <= special.keys():
        raise InvalidRequest(
            f"bundle {bundle.manifest.model_id} has neither a tokenizer nor special_ids cls and sep: "
            "pairs can't be composed"
        )
    cls, sep = special.get("cls", 0), special.get("sep", 0)
    return Frame((cls,), (sep,) * separators, (sep,))


def compose_ids(frame: Frame, query: IntArray, candidates: Rows) -> Rows:
    """Return composed rows for an owned rerank worker from bare segments of ids."""
    import numpy as np

    head = np.array([*frame.prefix, *query.tolist(), *frame.middle], np.int32)
    tail = np.array(frame.suffix, np.int32)
    lengths = np.array(candidates.lengths, np.int64) + (len(head) + len(tail))
    ends = np.cumsum(lengths)
    ids = np.empty(int(ends[-1]) if len(ends) else 0, np.int32)
    bare = np.ones(len(ids), bool)
    for part, starts in ((head, ends - lengths), (tail, ends - len(tail))):
        # One step for each place of the part or for each row, whichever are fewer.
        if len(part) < len(starts):
            for place, id in enumerate(part):
                ids[starts + place] = id
                bare[starts + place] = False
        else:
            for start in starts.tolist():
                ids[start : start + len(part)] = part
                bare[start : start + len(part)] = False
    ids[bare] = candidates.ids
    return Rows(ids, lengths.tolist(), [])
