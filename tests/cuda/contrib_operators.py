"""onnxruntime's fused operators in numpy, for onnx's ReferenceEvaluator: what the GPU's graphs mean, computed.

Written from the operators' own documentation (`get_all_operator_schema()` of the installed onnxruntime), not from our
graphs. float32 and slow; no kernel of the vendor takes part, so nothing here says anything about a GPU. Where the
documentation leaves a value open (the output at a padded position) a large one is written: a graph that reads it fails.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from engines.cuda.graphs.builder import CONTRIB, Graph

OPEN = np.float32(1000.0)
"""Written where an operator's output is not defined."""
_erf = np.vectorize(math.erf, otypes=[np.float64])


def _softmax(scores: np.ndarray) -> np.ndarray:
    exps = np.exp(scores - scores.max(-1, keepdims=True))
    return exps / exps.sum(-1, keepdims=True)


def _rms(x: np.ndarray, gamma: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + epsilon) * gamma


def _rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Half-split rotation of (S, heads, d) at positions 0 to S - 1."""
    cos, sin = cos[: len(x), None], sin[: len(x), None]
    low, high = np.split(x, 2, axis=-1)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


class BiasGelu(OpRun):
    op_domain = CONTRIB

    def _run(self, x: np.ndarray, bias: np.ndarray) -> tuple[np.ndarray]:  # type: ignore[override]
        total = x + bias
        return ((total * 0.5 * (1 + _erf(total / np.sqrt(2)))).astype(x.dtype),)


class QuickGelu(OpRun):
    op_domain = CONTRIB

    def _run(self, x: np.ndarray, alpha: float | None = None) -> tuple[np.ndarray]:  # type: ignore[override]
        return ((x / (1 + np.exp(-(alpha or self.alpha) * x))).astype(x.dtype),)


class SimplifiedLayerNormalization(OpRun):
    op_domain = ""

    def _run(self, x: np.ndarray, gamma: np.ndarray, **_: Any) -> tuple[np.ndarray]:  # type: ignore[override]
        return (_rms(x, gamma, self.epsilon),)


class SkipLayerNormalization(OpRun):
    op_domain = CONTRIB

    def _run(  # type: ignore[override]
        self, x: np.ndarray, skip: np.ndarray, gamma: np.ndarray, beta: Any = None, bias: Any = None, **_: Any
    ) -> tuple[np.ndarray, ...]:
        total = x + skip + (0 if bias is None else bias)
        centred = total - total.mean(-1, keepdims=True)
        normed = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + self.epsilon) * gamma
        return _outputs(self, normed + (0 if beta is None else beta), total)


class SkipSimplifiedLayerNormalization(OpRun):
    op_domain = CONTRIB

    def _run(  # type: ignore[override]
        self, x: np.ndarray, skip: np.ndarray, gamma: np.ndarray, bias: Any = None, **_: Any
    ) -> tuple[np.ndarray, ...]:
        total = x + skip + (0 if bias is None else bias)
        return _outputs(self, _rms(total, gamma, self.epsilon), total)


def _outputs(node: OpRun, normed: np.ndarray, total: np.ndarray) -> tuple[np.ndarray, ...]:
    """The norm, two statistics of training that nobody reads, and the sum."""
    full = (normed.astype(np.float32), np.zeros(1, np.float32), np.zeros(1, np.float32), total.astype(np.float32))
    return full[: len(node.output)]


class PackedMultiHeadAttention(OpRun):
    op_domain = CONTRIB

    def _run(  # type: ignore[override]
        self,
        query: np.ndarray,
        key: np.ndarray,
        value: np.ndarray,
        bias: np.ndarray | None,
        token_offset: np.ndarray,
        cumulative: np.ndarray,
        **_: Any,
    ) -> tuple[np.ndarray]:
        if bias is not None:
            parts = np.split(bias, [query.shape[1], query.shape[1] + key.shape[1]])
            query, key, value = (x + part for x, part in zip((query, key, value), parts, strict=True))
        lens = np.diff(cumulative)
        rows, width = token_offset.shape
        assert len(lens) == rows and lens.max() <= width and cumulative[-1] == len(query), "rows that do not fit"
        # "Token_offset records the offset of token in the unpacked input": real tokens first, then the padding.
        places = np.flatnonzero(np.arange(width) < lens[:, None])
        assert (token_offset.reshape(-1)[: len(query)] == places).all(), "token_offset contradicts the lengths"
        out = np.empty_like(value)
        for start, end in itertools.pairwise(cumulative):
            q, k, v = (x[start:end].reshape(end - start, self.num_heads, -1) for x in (query, key, value))
            weights = _softmax(np.einsum("qhd,khd->hqk", q, k) * self.scale)
            out[start:end] = np.einsum("hqk,khd->qhd", weights, v).reshape(end - start, -1)
        return (out,)


class GroupQueryAttention(OpRun):
    op_domain = CONTRIB

    def _run(self, *inputs: np.ndarray | None, **_: Any) -> tuple[np.ndarray, ...]:  # type: ignore[override]
        # The evaluator hands over whatever was last written to the empty name: an input without a name is absent.
        given = [x if name else None for name, x in zip(self.onnx_node.input, inputs, strict=True)]
        given += [None] * (16 - len(given))
        query, key, value, past_key, past_value, seqlens, total, cos, sin, *more = given
        *unused, q_norm, k_norm = more
        assert past_key is None and past_value is None and all(item is None for item in unused)
        assert query is not None and key is not None and value is not None and seqlens is not None
        assert total is not None and total.reshape(()) == query.shape[1], "the longest row's length, no past"
        heads, groups = self.num_heads, self.kv_num_heads
        rows, width, _hidden = query.shape
        out = np.full(query.shape, OPEN, query.dtype)
        present = [np.full((rows, groups, width, key.shape[2] // groups), OPEN, key.dtype) for _ in range(2)]
        for row, last in enumerate(seqlens):  # "Equivalent to (total_sequence_lengths - 1)"
            n = int(last) + 1
            q = query[row, :n].reshape(n, heads, -1)
            k, v = (x[row, :n].reshape(n, groups, -1) for x in (key, value))
            if q_norm is not None and k_norm is not None:  # "before any rotary embedding"
                q, k = _rms(q, q_norm, self.qk_norm_epsilon), _rms(k, k_norm, self.qk_norm_epsilon)
            if getattr(self, "do_rotary", 0):
                assert cos is not None and sin is not None
                q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
            present[0][row, :, :n], present[1][row, :, :n] = k.transpose(1, 0, 2), v.transpose(1, 0, 2)
            k, v = (np.repeat(x, heads // groups, axis=1) for x in (k, v))
            scores = np.einsum("qhd,khd->hqk", q, k) * self.scale
            if getattr(self, "causal", 1):
                scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
            out[row, :n] = np.einsum("hqk,khd->qhd", _softmax(scores), v).reshape(n, -1)
        return (out, *present)[: len(self.output)]


OPERATORS = [
    BiasGelu,
    GroupQueryAttention,
    PackedMultiHeadAttention,
    QuickGelu,
    SimplifiedLayerNormalization,
    SkipLayerNormalization,
    SkipSimplifiedLayerNormalization,
]


def evaluate(graph: Graph, feed: dict[str, np.ndarray]) -> np.ndarray:
    """Compute a graph's output with numpy alone; *feed* may hold more than it reads."""
    model = onnx.load_model_from_string(graph.model)
    for initializer in model.graph.initializer:
        if initializer.name in graph.weights:
            initializer.CopyFrom(onnx.numpy_helper.from_array(graph.weights[initializer.name], initializer.name))
    evaluator = ReferenceEvaluator(model, new_ops=OPERATORS)
    output: np.ndarray = evaluator.run(None, {name: feed[name] for name in graph.inputs})[0]
    return output
