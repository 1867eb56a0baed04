"""BERT (Devlin et al.): learned positions, token types, norms behind each block, tanh pooler before the classifier."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Final, Literal

from engines.bundle.manifest import Task
from engines.checkpoint.families.base import Count, Encoder, Number, Tensor, affine
from engines.protocol.messages import Pooling

POSITIONS: Final = "embeddings.position_embeddings.weight"
TOKEN_TYPES: Final = "embeddings.token_type_embeddings.weight"  # noqa: S105


class Bert(Encoder, kw_only=True):
    """``BertModel`` and ``BertForSequenceClassification``."""

    pooling: ClassVar[Pooling] = Pooling.MEAN
    prefix: ClassVar[str] = "bert"

    type_vocab_size: Count = 2
    layer_norm_eps: Number = 1e-12
    hidden_act: Literal["gelu"] = "gelu"
    position_embedding_type: Literal["absolute"] = "absolute"

    @property
    def token_types(self) -> bool:
        """Type 1 for the passage, where there is more than one."""
        return self.type_vocab_size > 1

    @property
    def head(self) -> dict[str, Any]:
        """Tanh pooler on the first token, then the classifier."""
        return {"kind": "pooler"}

    def tensors(self, task: Task) -> Iterator[Tensor]:
        """Yield the embeddings, the layers, and a reranker's head."""
        hidden, ffn = self.hidden_size, self.intermediate_size
        yield "embeddings.word_embeddings.weight", (self.vocab_size, hidden)
        yield POSITIONS, (self.max_position_embeddings, hidden)
        yield TOKEN_TYPES, (self.type_vocab_size, hidden)
        yield from affine("embeddings.LayerNorm", hidden)
        for n in range(self.num_hidden_layers):
            layer = f"encoder.layer.{n}"
            for part in ("query", "key", "value"):
                yield from affine(f"{layer}.attention.self.{part}", hidden, hidden)
            yield from affine(f"{layer}.attention.output.dense", hidden, hidden)
            yield from affine(f"{layer}.attention.output.LayerNorm", hidden)
            yield from affine(f"{layer}.intermediate.dense", ffn, hidden)
            yield from affine(f"{layer}.output.dense", hidden, ffn)
            yield from affine(f"{layer}.output.LayerNorm", hidden)
        if task == "rerank":
            yield from affine("pooler.dense", hidden, hidden)
            yield from affine("classifier", 1, hidden)
