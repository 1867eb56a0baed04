"""The toy cross-encoder in plain numpy, float64, one pair at a time: what the GGUF must reproduce.

Written from the paper and the config, not from the builder: BERT (Devlin et al.) with erf GELU and post-norms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from engines.checkpoint.read import Checkpoint

Matrix = np.ndarray[Any, np.dtype[np.float64]]
_ERF = np.vectorize(math.erf)


class Weights:
    """A checkpoint's tensors in float64."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config = checkpoint.config
        self._checkpoint = checkpoint

    def __getitem__(self, name: str) -> Matrix:
        return self._checkpoint.f32(name).astype(np.float64)

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint.tensors

    def linear(self, name: str, x: Matrix) -> Matrix:
        y = x @ self[f"{name}.weight"].T
        return y + self[f"{name}.bias"] if f"{name}.bias" in self else y


def bert_states(weights: Weights, ids: Sequence[int], types: Sequence[int] | None = None) -> Matrix:
    """Return the last hidden states, (tokens, hidden)."""
    c = weights.config
    heads, width = c["num_attention_heads"], c["hidden_size"] // c["num_attention_heads"]
    x = weights["embeddings.word_embeddings.weight"][list(ids)]
    x = x + weights["embeddings.position_embeddings.weight"][: len(ids)]
    x = x + weights["embeddings.token_type_embeddings.weight"][list(types or [0] * len(ids))]
    x = _layer_norm(weights, "embeddings.LayerNorm", x)
    for n in range(c["num_hidden_layers"]):
        layer = f"encoder.layer.{n}"
        q, k, v = (
            weights.linear(f"{layer}.attention.self.{part}", x).reshape(len(ids), heads, width).swapaxes(0, 1)
            for part in ("query", "key", "value")
        )
        mixed = _softmax(q @ k.swapaxes(1, 2) / math.sqrt(width)) @ v
        mixed = mixed.swapaxes(0, 1).reshape(len(ids), -1)
        x = _layer_norm(
            weights, f"{layer}.attention.output.LayerNorm", x + weights.linear(f"{layer}.attention.output.dense", mixed)
        )
        inner = weights.linear(f"{layer}.intermediate.dense", x)
        inner = inner * 0.5 * (1.0 + _ERF(inner / math.sqrt(2.0)))
        x = _layer_norm(weights, f"{layer}.output.LayerNorm", x + weights.linear(f"{layer}.output.dense", inner))
    return x


def bert_score(weights: Weights, query: Sequence[int], document: Sequence[int], *, cls: int, sep: int) -> float:
    """Return the cross-encoder's logit; *query* and *document* without special tokens."""
    ids = [cls, *query, sep, *document, sep]
    types = [0] * (len(query) + 2) + [1] * (len(document) + 1)
    first = bert_states(weights, ids, types)[:1]
    return float(weights.linear("classifier", np.tanh(weights.linear("pooler.dense", first)))[0, 0])


def cosine(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Return the cosine of each pair of rows, computed in float64."""
    a, b = np.atleast_2d(ours).astype(np.float64), np.atleast_2d(theirs).astype(np.float64)
    return (a * b).sum(axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


def _layer_norm(weights: Weights, name: str, x: Matrix) -> Matrix:
    centred = x - x.mean(axis=-1, keepdims=True)
    scale = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + weights.config["layer_norm_eps"])
    return centred / scale * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _softmax(x: Matrix) -> Matrix:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)
