"""The model families that this engine serves, one row each; the worker and the builder both read this table.

A new family is one row here and one file ``engines/ane/build/<family>.py``, which writes its network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final


def _half_window(config: Mapping[str, Any]) -> int | None:
    """Return ModernBERT's ``local_attention`` as tokens to each side; None for a model without a local layer."""
    return int(config["local_attention"]) // 2 if "sliding_attention" in config["layer_types"] else None


@dataclass(frozen=True, slots=True)
class Family:
    """What of a family decides how its rows are laid out; everything else is in its network.

    Attributes:
        tasks: which of ``embed`` and ``rerank`` the builder can make of it.
        token_types: whether a reranker that has two token types gets them; the second text has type 1.
        causal: from a complete config, whether a token sees only the tokens before it.
        window: from a complete config, how many tokens to each side a local layer sees; None without local layers.
    """

    tasks: frozenset[str] = frozenset({"embed", "rerank"})
    token_types: bool = False
    causal: Callable[[Mapping[str, Any]], bool] = lambda config: False
    window: Callable[[Mapping[str, Any]], int | None] = lambda config: None


FAMILIES: Final[Mapping[str, Family]] = {
    "bert": Family(token_types=True),
    "modernbert": Family(window=_half_window),
    "mpnet": Family(),
    "nomic_bert": Family(tasks=frozenset({"embed"})),
    # A reranker's yes/no read-out is not part of this engine.
    **dict.fromkeys(("qwen3", "qwen2"), Family(tasks=frozenset({"embed"}), causal=lambda config: config["is_causal"])),
}


def serves(family: str, task: str) -> bool:
    """Tell whether a model of this family and task can be built and loaded."""
    return family in FAMILIES and task in FAMILIES[family].tasks
