"""Token rows to llama.cpp batches and token states back to vectors: pure, no native library.

Sources: llama-cuda.md 2.5 (pooling and normalisation), 2.6 (pairs), 4.3 (chunks).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import chain
from typing import TYPE_CHECKING, Final

import numpy as np

from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import Pooling
from engines.runtime.batch import TokenBatch

if TYPE_CHECKING:
    from engines.llama.gguf import Header, SpecialIds
    from engines.runtime.batch import FloatArray, IntArray, RerankPairs

MAX_SEQUENCES: Final = 64
"""Sequences in one native call. A power of two that divides every n_ubatch we use (U4)."""
EPSILON: Final = 1e-12
_PAIR_SEPARATORS: Final = {
    ("bert", "no_vocab"): 1,  # as `synapse build` writes it
    ("bert", "bert"): 1,
    ("modern-bert", "no_vocab"): 1,
    ("modern-bert", "gpt2"): 1,
    ("nomic-bert", "bert"): 1,
    ("jina-bert-v2", "bert"): 1,
    ("bert", "gpt2"): 2,  # RoBERTa
    ("bert", "t5"): 2,  # XLM-RoBERTa: llama.cpp's name of a Unigram vocabulary
    ("jina-bert-v2", "gpt2"): 2,
    ("jina-bert-v3", "t5"): 2,
}
"""(architecture, ``tokenizer.ggml.model``) -> separators between query and document."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows that share one native call, as indices into the request."""

    rows: tuple[int, ...]
    tokens: int


def plan_chunks(lengths: Sequence[int], *, cap: int, slots: int) -> list[Chunk]:
    """Spread rows over chunks of at most *cap* tokens and :data:`MAX_SEQUENCES` rows; a longer row is its own chunk.

    The chunks are a multiple of *slots*, as far as there are rows, and their token sums differ as little as the rows
    allow, so that slots which compute side by side finish together: each row, the longest first, goes to the chunk
    with the fewest tokens. The cut depends on the request alone, never on timing, so that a repeated request gives the
    same bytes.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    chunks = [Chunk((row,), lengths[row]) for row in order if lengths[row] > cap]
    usual = order[len(chunks) :]
    fewest = max(-(-sum(lengths[row] for row in usual) // cap), -(-len(usual) // MAX_SEQUENCES))
    filled: list[list[int]] = [[] for _ in range(min(len(usual), -(-fewest // slots) * slots))]
    open_chunks = [(0, number) for number in range(len(filled))]  # a heap of (tokens, chunk)
    for row in usual:
        if not open_chunks or open_chunks[0][0] + lengths[row] > cap:
            for _ in range(slots):
                heappush(open_chunks, (0, len(filled)))
                filled.append([])
        tokens, number = open_chunks[0]
        filled[number].append(row)
        if len(filled[number]) < MAX_SEQUENCES:
            heapreplace(open_chunks, (tokens + lengths[row], number))
        else:
            heappop(open_chunks)
    chunks += [Chunk(tuple(sorted(rows)), sum(lengths[row] for row in rows)) for rows in filled if rows]
    return chunks


def pair_separators(header: Header) -> int:
    """Return how many separators stand between query and document: 1 as BERT was trained, 2 as RoBERTa was.

    `synapse build` writes it down. In other files the kind of vocabulary tells, since llama.cpp calls RoBERTa and
    XLM-RoBERTa `bert` too. A score under the wrong template looks plausible and is wrong, so ``model_unsupported`` is
    raised for an architecture we don't know.
    """
    if (said := header.integer("synapse.pair_separators")) in (1, 2):
        return said
    kind = header.metadata.get("tokenizer.ggml.model")
    separators = _PAIR_SEPARATORS.get((header.architecture, str(kind)))
    if separators is None:
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED,
            f"the pair template of {header.architecture!r} with a vocabulary of kind {kind!r} is not known here: "
            "its scores would be wrong without any sign of it",
        )
    return separators


def compose_pairs(
    pairs: RerankPairs, special: SpecialIds, *, separators: int = 1, passage_shift: int = 0
) -> TokenBatch:
    """Build [BOS] query [SEP] document [END] for each candidate, END being EOS, or SEP where there is no EOS.

    With two *separators*: [BOS] query [END] [SEP] document [END], RoBERTa's ``<s> q </s></s> d </s>``.
    *passage_shift* is added to every id after the first SEP (the document and its END: token type 1 in a split
    vocabulary). Raises ``model_unsupported`` without BOS or SEP, ``invalid_request`` for an empty segment.
    """
    bos, sep = special.bos, special.sep
    if bos is None or sep is None:
        missing = "BOS" if bos is None else "SEP"
        raise EngineError(ErrorCode.MODEL_UNSUPPORTED, f"the GGUF names no {missing} token: pairs can't be built")
    end = special.eos if special.eos is not None else sep
    query = trim(pairs.query_ids.tolist(), special)
    if not query:
        raise EngineError(ErrorCode.INVALID_REQUEST, "the query is empty once its special tokens are taken off")
    head = [bos, *query, sep] if separators == 1 else [bos, *query, end, sep]
    made: list[list[int]] = []
    for index, row in enumerate(pairs.candidates.rows()):
        document = trim(row.tolist(), special)
        if not document:
            raise EngineError(
                ErrorCode.INVALID_REQUEST, f"candidate {index} is empty once its special tokens are taken off"
            )
        made.append([*head, *(id_ + passage_shift for id_ in (*document, end))])
    return TokenBatch(np.array([*chain(*made)], dtype=np.int32), np.cumsum([0, *map(len, made)]).astype(np.int32))


def trim(ids: list[int], special: SpecialIds) -> list[int]:
    """Drop one leading BOS and every trailing SEP or EOS."""
    start, end = int(ids[:1] == [special.bos]), len(ids)
    while end > start and ids[end - 1] in (special.sep, special.eos):
        end -= 1
    return ids[start:end]


def gather(batch: TokenBatch, rows: Sequence[int]) -> TokenBatch:
    """Return the named rows laid end to end."""
    bounds = batch.cu_seqlens
    parts = [batch.input_ids[bounds[row] : bounds[row + 1]] for row in rows]
    return TokenBatch(np.concatenate(parts), np.cumsum([0, *map(len, parts)]).astype(np.int32))


def pool(states: FloatArray, bounds: IntArray, pooling: Pooling) -> FloatArray:
    """Reduce token states, float32 (tokens, dims), to one vector a row, float32 (rows, dims), in float32."""
    starts, ends = bounds[:-1], bounds[1:]
    if pooling is Pooling.CLS:
        return np.ascontiguousarray(states[starts])
    if pooling is Pooling.LAST:
        return np.ascontiguousarray(states[ends - 1])
    sums = np.add.reduceat(states, starts, axis=0)
    vectors: FloatArray = (sums / (ends - starts).astype(np.float32)[:, None]).astype(np.float32, copy=False)
    return vectors


def normalize_rows(vectors: FloatArray) -> FloatArray:
    """Divide each row by its L2 norm; the epsilon is added after the square root, so a zero row stays zero."""
    norms = np.sqrt(np.einsum("ij,ij->i", vectors, vectors, dtype=np.float32)) + np.float32(EPSILON)
    scaled: FloatArray = vectors / norms[:, None]
    return scaled
