"""MPNet: BERT without token types, whose attention also knows how far apart two tokens are.

``encoder.relative_attention_bias`` has a number for each head and each of 32 ranges of distances; it is the same in
every layer. Positions begin behind the padding token's row, and the classification head is RoBERTa's. Names are BERT's.

Source: transformers, models/mpnet/modeling_mpnet.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from engines.bundle.manifest import Task
from engines.checkpoint.families.base import Spelling, Tensor
from engines.checkpoint.families.bert import TOKEN_TYPES, Bert
from engines.checkpoint.families.relatives import KEPT, Roberta

if TYPE_CHECKING:
    from engines.checkpoint.safetensors import FloatArray

BIAS: Final = "encoder.relative_attention_bias.weight"
BUCKETS: Final = 32
FARTHEST: Final = 128


class _Stored(Roberta):
    prefix = "mpnet"
    family = "mpnet"
    made = (TOKEN_TYPES,)
    kept = (*KEPT, "relative_attention_num_buckets")
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        *Roberta.renames,
        (r"\.attention\.attn\.q\.", ".attention.self.query."),
        (r"\.attention\.attn\.k\.", ".attention.self.key."),
        (r"\.attention\.attn\.v\.", ".attention.self.value."),
        (r"\.attention\.attn\.o\.", ".attention.output.dense."),
        (r"\.attention\.LayerNorm\.", ".attention.output.LayerNorm."),
    )

    def first(self, raw: Mapping[str, Any]) -> int:
        """The padding token's row is always the second, whatever config.json says of its id."""
        return 2

    def config(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """As every relative of BERT; there are no token types."""
        return Roberta.config(self, raw) | {"type_vocab_size": 1}


class Mpnet(Bert, kw_only=True):
    """``MPNetModel`` and ``MPNetForSequenceClassification``."""

    spelling: ClassVar[Spelling] = _Stored()

    relative_attention_num_buckets: Literal[32] = 32

    def unheld(self, task: Task) -> dict[str, str]:
        """llama.cpp's BERT adds nothing to attention."""
        return {"gguf": "llama.cpp has no architecture that adds numbers by distance to BERT's attention"}

    def tensors(self, task: Task) -> Iterator[Tensor]:
        """As BERT, and the biases by distance."""
        yield from Bert.tensors(self, task)
        yield BIAS, (BUCKETS, self.num_attention_heads)


def biases(table: FloatArray, positions: int) -> FloatArray:
    """Return what each head adds for a key at every distance, (2 * positions - 1, heads); the query itself is midway.

    Half of the ranges are for keys ahead. Up to 7 tokens away each distance has one of its own, beyond that they widen
    with the logarithm, and from 128 tokens on all share the last.
    """
    import numpy as np

    ahead = np.arange(-positions + 1, positions)
    far, half, exact = np.abs(ahead), BUCKETS // 2, BUCKETS // 4
    # In float32, as the reference has it: a distance that is nearly on a border must fall to the same side.
    ratio = np.log(np.maximum(far, 1).astype(np.float32) / np.float32(exact)) / np.float32(math.log(FARTHEST / exact))
    wide = np.minimum(exact + (ratio * np.float32(half - exact)).astype(np.int64), half - 1)
    found: FloatArray = table[np.where(ahead > 0, half, 0) + np.where(far < exact, far, wide)]
    return found
