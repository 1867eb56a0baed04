"""Models that compute what BERT computes, under other names: RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT.

They are read as BERT: :class:`Relative` says how config.json and the tensors' names are translated, and from which row
of the position table positions count. So every engine serves them, and a bundle's manifest says ``bert``. What differs
and can't be translated is refused by name. A new relative is one class here and a row in :data:`RELATIVES`.

Sources: transformers, models/roberta/modeling_roberta.py (positions begin at ``padding_idx + 1``, one token type, a
classification head of dense, tanh and ``out_proj`` on the first token) and models/distilbert/modeling_distilbert.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from engines.bundle.manifest import Task
from engines.checkpoint.families.base import CheckpointError, Spelling, need
from engines.checkpoint.families.bert import POSITIONS, TOKEN_TYPES

KEPT: Final = (
    *("architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("type_vocab_size", "layer_norm_eps", "hidden_act", "position_embedding_type"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id", "unk_token_id", "mask_token_id"),
)
"""Keys of config.json that mean the same in BERT's."""


class Relative(Spelling):
    """One kind of model that is read as BERT."""

    family: ClassVar[str] = "bert"
    keys: ClassVar[Mapping[str, str]] = {}
    """Keys of config.json that BERT spells otherwise."""
    kept: ClassVar[tuple[str, ...]] = KEPT
    rerank: ClassVar[bool] = True

    def first(self, raw: Mapping[str, Any]) -> int:
        """Return how many rows of the position table stand before the first position."""
        return 0

    def skipped(self, raw: Mapping[str, Any]) -> dict[str, int]:
        """Return the rows of the position table that no token has."""
        return {POSITIONS: self.first(raw)}

    def config(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return BERT's config.json. Raises CheckpointError naming the key."""
        found = {self.keys.get(key, key): value for key, value in raw.items() if value is not None}
        config = {key: found[key] for key in self.kept if key in found} | {"model_type": self.family}
        rows = found.get("max_position_embeddings")
        need(type(rows) is int and rows > self.first(raw), "max_position_embeddings", "must exceed what is skipped")
        config["max_position_embeddings"] = int(rows or 0) - self.first(raw)
        return config

    def check(self, task: Task, kind: str) -> None:
        """Refuse what can't be translated. *kind*: config.json's model_type."""
        if task == "generate" or (task == "rerank" and not self.rerank):
            raise CheckpointError(
                f"a {kind} checkpoint for {task} is not served: its head isn't BERT's. Served of {kind}: "
                f"{'embed and rerank' if self.rerank else 'embed'}"
            )


class Roberta(Relative):
    """``RobertaModel``, ``XLMRobertaModel``, ``CamembertModel`` and their ``ForSequenceClassification``."""

    prefix = "roberta"
    # The head's dense and tanh are what BERT calls its pooler; the pooler beside it, if any, takes no part.
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"^pooler\.", "cls.pooler."),
        (r"^classifier\.dense\.", "pooler.dense."),
        (r"^classifier\.out_proj\.", "classifier."),
        (r"^lm_head\.", "cls."),
    )

    def first(self, raw: Mapping[str, Any]) -> int:
        """Rows up to that of the padding token: positions begin behind it."""
        pad = raw.get("pad_token_id", 1)
        need(type(pad) is int and pad >= 0, "pad_token_id", "must be the index of the padding token")
        return int(pad) + 1


class DistilBert(Relative):
    """``DistilBertModel``: no token types and no pooler. Its classifier has a relu where BERT has a tanh: refused."""

    prefix = "distilbert"
    rerank = False
    made = (TOKEN_TYPES,)
    keys: ClassVar[Mapping[str, str]] = {
        "dim": "hidden_size",
        "hidden_dim": "intermediate_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "activation": "hidden_act",
    }
    renames = (
        (r"^transformer\.layer\.", "encoder.layer."),
        (r"\.attention\.q_lin\.", ".attention.self.query."),
        (r"\.attention\.k_lin\.", ".attention.self.key."),
        (r"\.attention\.v_lin\.", ".attention.self.value."),
        (r"\.attention\.out_lin\.", ".attention.output.dense."),
        (r"\.sa_layer_norm\.", ".attention.output.LayerNorm."),
        (r"\.ffn\.lin1\.", ".intermediate.dense."),
        (r"\.ffn\.lin2\.", ".output.dense."),
        (r"\.output_layer_norm\.", ".output.LayerNorm."),
        (r"^(vocab_|pre_classifier|classifier)", r"cls.\1"),
    )

    def config(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """As every relative; the norms' epsilon is fixed."""
        return Relative.config(self, raw) | {"layer_norm_eps": 1e-12, "type_vocab_size": 1}


RELATIVES: Final[Mapping[str, Relative]] = {
    "roberta": Roberta(),
    "xlm-roberta": Roberta(),
    "camembert": Roberta(),
    "distilbert": DistilBert(),
}
"""``model_type`` -> how it is read as BERT."""
