"""The toy models in plain numpy, float64, one sequence at a time: what the GGUF must reproduce.

Written from the models' papers and configs, not from the builder: BERT (Devlin et al.) with erf GELU and post-norms,
Llama and Qwen3 with RMSNorm, half-split rotary positions, grouped queries and SwiGLU; Qwen3 norms each head's q and k.
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


def decoder_states(weights: Weights, ids: Sequence[int]) -> Matrix:
    """Return the normed last hidden states of a Llama or Qwen3 checkpoint, (tokens, hidden)."""
    c = weights.config
    heads, groups, width = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    n = len(ids)
    x = weights["embed_tokens.weight"][list(ids)]
    future = np.triu(np.full((n, n), -np.inf), 1)
    for number in range(c["num_hidden_layers"]):
        layer = f"layers.{number}"
        h = _rms_norm(weights, f"{layer}.input_layernorm", x)
        q = weights.linear(f"{layer}.self_attn.q_proj", h).reshape(n, heads, width)
        k = weights.linear(f"{layer}.self_attn.k_proj", h).reshape(n, groups, width)
        v = weights.linear(f"{layer}.self_attn.v_proj", h).reshape(n, groups, width)
        if f"{layer}.self_attn.q_norm.weight" in weights:
            q = _rms_norm(weights, f"{layer}.self_attn.q_norm", q)
            k = _rms_norm(weights, f"{layer}.self_attn.k_norm", k)
        q, k = (_rotate(part, c["rope_theta"]).swapaxes(0, 1) for part in (q, k))
        k, v = (np.repeat(part, heads // groups, axis=0) for part in (k, v.swapaxes(0, 1)))
        mixed = _softmax(q @ k.swapaxes(1, 2) / math.sqrt(width) + future) @ v
        x = x + weights.linear(f"{layer}.self_attn.o_proj", mixed.swapaxes(0, 1).reshape(n, -1))
        h = _rms_norm(weights, f"{layer}.post_attention_layernorm", x)
        gate = weights.linear(f"{layer}.mlp.gate_proj", h)
        x = x + weights.linear(
            f"{layer}.mlp.down_proj", gate / (1.0 + np.exp(-gate)) * weights.linear(f"{layer}.mlp.up_proj", h)
        )
    return _rms_norm(weights, "norm", x)


def decoder_logits(weights: Weights, ids: Sequence[int]) -> Matrix:
    """Return the logits behind the last token, (vocabulary,)."""
    head = "lm_head.weight" if "lm_head.weight" in weights else "embed_tokens.weight"
    return decoder_states(weights, ids)[-1] @ weights[head].T


def greedy(weights: Weights, ids: Sequence[int], count: int, *, end: set[int]) -> tuple[list[int], float]:
    """Return the tokens a greedy generation appends, and the smallest lead of a winner over the runner-up."""
    tokens: list[int] = []
    lead = math.inf
    while len(tokens) < count:
        logits = decoder_logits(weights, [*ids, *tokens])
        first, second = np.sort(logits)[-1], np.sort(logits)[-2]
        lead = min(lead, float(first - second))
        token = int(logits.argmax())
        if token in end:
            break
        tokens.append(token)
    return tokens, lead


def pooled(states: Matrix, pooling: str, *, normalize: bool = True) -> Matrix:
    """Return one vector of one sequence's states."""
    vector = {"mean": states.mean(axis=0), "cls": states[0], "last": states[-1]}[pooling]
    return vector / (math.sqrt(float((vector**2).sum())) + 1e-12) if normalize else vector


def cosine(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Return the cosine of each pair of rows, computed in float64."""
    a, b = np.atleast_2d(ours).astype(np.float64), np.atleast_2d(theirs).astype(np.float64)
    return (a * b).sum(axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


def _layer_norm(weights: Weights, name: str, x: Matrix) -> Matrix:
    centred = x - x.mean(axis=-1, keepdims=True)
    scale = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + weights.config["layer_norm_eps"])
    return centred / scale * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _rms_norm(weights: Weights, name: str, x: Matrix) -> Matrix:
    scale = np.sqrt((x**2).mean(axis=-1, keepdims=True) + weights.config["rms_norm_eps"])
    return x / scale * weights[f"{name}.weight"]


def _rotate(x: Matrix, theta: float) -> Matrix:
    """Rotate the halves of each head by the token's position; (tokens, heads, width)."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def _softmax(x: Matrix) -> Matrix:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)
