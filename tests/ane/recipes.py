"""The toy models of these tests, by name: what writes their checkpoint, and with which options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import toy_families, toy_models

RECIPES: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "bert": (toy_models.write_bert, {}),
    "cross": (toy_models.write_bert, {"cross_encoder": True}),
    "modernbert": (toy_models.write_modernbert, {}),
    "modernbert-rerank": (toy_models.write_modernbert, {"rerank": True}),
    "modernbert-rerank-cls": (toy_models.write_modernbert, {"rerank": True, "classifier_pooling": "cls"}),
    "qwen3": (toy_models.write_qwen3, {}),
    "mpnet": (toy_families.write_mpnet, {}),
    "qwen2": (toy_families.write_gte_qwen2, {}),
    "nomic_bert": (toy_families.write_nomic, {}),
}
