"""The toy models of the graph tests: a seed and a shape each; weights are never stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support import toy_families, toy_models

LENGTHS = (1, 2, 3, 7, 8, 9, 16, 17, 18, 25, 31, 40, 57, 64)
"""Below, at and above ModernBERT's toy half window (8) and its multiples; the last one is BERT's toy maximum."""


@dataclass(frozen=True)
class Case:
    """One toy model and the rows it is asked."""

    name: str
    write: Callable[..., Path]
    task: str = "embed"
    options: dict[str, Any] = field(default_factory=dict)
    vocab: int = 128
    lengths: tuple[int, ...] = LENGTHS
    separator: bool = False

    def rows(self) -> list[list[int]]:
        """Return the token rows; cross-encoder rows hold one separator in the middle and one at the end."""
        rows = toy_models.toy_rows(11, list(self.lengths), self.vocab)
        if self.separator:
            for row in rows:
                row[0] = 2
                row[len(row) // 2] = row[-1] = 3
        # The pad id as a real token: masks come from lengths, never from ids.
        rows[4][2] = rows[10][-1 if not self.separator else 5] = 0
        return rows

    def checkpoint(self, folder: Path) -> Path:
        """Write the checkpoint."""
        return self.write(folder, **self.options)


LONG = (*LENGTHS, 96, 127, 200)
CASES = (
    Case("bert-mean", toy_models.write_bert, options={"seed": 1}),
    Case("bert-cls", toy_models.write_bert, options={"seed": 2, "pooling": "cls", "normalize": False}),
    Case("bert-rerank", toy_models.write_bert, "rerank", {"seed": 3, "cross_encoder": True}, separator=True),
    Case("modernbert-cls", toy_models.write_modernbert, options={"seed": 4}, vocab=320, lengths=LONG),
    Case("modernbert-mean", toy_models.write_modernbert, "embed", {"seed": 5, "pooling": "mean"}, 320, LONG),
    Case("modernbert-rerank", toy_models.write_modernbert, "rerank", {"seed": 6, "rerank": True}, 320, LONG),
    Case(
        "modernbert-rerank-cls",
        toy_models.write_modernbert,
        "rerank",
        {"seed": 7, "rerank": True, "classifier_pooling": "cls"},
        320,
        LONG,
    ),
    Case("qwen3-last", toy_models.write_qwen3, "embed", {"seed": 8}, 320, LONG),
    Case("qwen3-rerank", toy_models.write_qwen3, "rerank", {"seed": 9, "rerank": True}, 320, LONG),
    Case("mpnet-mean", toy_families.write_mpnet, options={"seed": 10, "max_positions": 200}, lengths=LONG),
    Case("qwen2-last", toy_families.write_gte_qwen2, "embed", {"seed": 14}, 320, LONG),
    Case("nomic-mean", toy_families.write_nomic, options={"seed": 13}, lengths=LONG),
    Case("gemma-mean", toy_families.write_gemma, "embed", {"seed": 12, "dense": False}, 320, LONG),
    Case("mpnet-cls", toy_families.write_mpnet, options={"seed": 11, "pooling": "cls"}),
)

SERVED = {
    "minilm": Case(
        "minilm", toy_models.write_bert, vocab=30522,
        options={"layers": 6, "hidden": 384, "heads": 12, "ffn": 1536, "vocab": 30522, "max_positions": 512},
    ),
    "modernbert": Case(
        "modernbert", toy_models.write_modernbert, vocab=50368,
        options={
            "layers": 22, "hidden": 768, "heads": 12, "ffn": 1152, "vocab": 50368, "max_positions": 8192,
            "local_attention": 128,
        },
    ),
    "qwen3": Case(
        "qwen3", toy_models.write_qwen3, vocab=151669,
        options={
            "layers": 28, "hidden": 1024, "heads": 16, "kv_heads": 8, "head_dim": 128, "ffn": 3072, "vocab": 151669,
            "max_positions": 8192,
        },
    ),
}  # fmt: skip
"""The served models' real shapes, with random weights."""


def case(name: str) -> Case:
    """Return a toy or a served shape by name."""
    return SERVED.get(name) or next(c for c in CASES if c.name == name)
