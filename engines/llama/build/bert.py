"""BERT in a GGUF.

llama.cpp adds token type 0 to every token and its own converter drops the pooler. So the pooler is written as ``cls``,
and a cross-encoder's vocabulary is doubled: row V + i is word[i] + (type1 - type0), which makes the sum before the
embedding norm exactly the trained one. ``synapse.token_type_vocab_offset`` says V to the worker, and
``synapse.pair_separators`` how many separators stand between query and document where that isn't one (RoBERTa).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from engines.checkpoint.facts import Facts
from engines.checkpoint.read import Checkpoint
from engines.llama.build.tensors import GgufTensor, both, same
from engines.llama.gguf import TOKEN_TYPE_KEY

if TYPE_CHECKING:
    from engines.checkpoint.safetensors import FloatArray

SEPARATORS_KEY: Final = "synapse.pair_separators"


def metadata(writer: Any, checkpoint: Checkpoint, known: Facts) -> None:
    """Write the keys that llama.cpp wants of a BERT."""
    c = checkpoint.config
    doubled = known.token_types is True
    writer.add_vocab_size(c["vocab_size"] * (2 if doubled else 1))
    writer.add_layer_norm_eps(float(c["layer_norm_eps"]))
    writer.add_causal_attention(False)
    # Required even without a vocabulary: the loader throws on 0.
    writer.add_token_type_count(c["type_vocab_size"])
    if doubled:
        writer.add_uint32(TOKEN_TYPE_KEY, c["vocab_size"])
    if known.pair_separators != 1:
        writer.add_uint32(SEPARATORS_KEY, known.pair_separators)


def tensors(checkpoint: Checkpoint) -> Iterator[GgufTensor]:
    """Yield every tensor in file order."""
    c = checkpoint.config
    split = checkpoint.task == "rerank" and checkpoint.known.token_types
    words, types = "embeddings.word_embeddings.weight", "embeddings.token_type_embeddings.weight"

    def embedding() -> FloatArray:
        table = checkpoint.f32(words)
        if not split:
            return table
        kinds = checkpoint.f32(types)
        return np.concatenate((table, table + (kinds[1] - kinds[0])))

    rows, width = checkpoint.shape(words)
    yield GgufTensor("token_embd.weight", (rows * 2 if split else rows, width), True, embedding)
    yield same(checkpoint, "position_embd.weight", "embeddings.position_embeddings.weight", matrix=False)
    yield same(checkpoint, "token_types.weight", types, matrix=False)
    yield from both(checkpoint, "token_embd_norm", "embeddings.LayerNorm", matrix=False)
    for n in range(c["num_hidden_layers"]):
        layer, block = f"encoder.layer.{n}", f"blk.{n}"
        for short, part in (("q", "query"), ("k", "key"), ("v", "value")):
            yield from both(checkpoint, f"{block}.attn_{short}", f"{layer}.attention.self.{part}")
        yield from both(checkpoint, f"{block}.attn_output", f"{layer}.attention.output.dense")
        norm = f"{layer}.attention.output.LayerNorm"
        yield from both(checkpoint, f"{block}.attn_output_norm", norm, matrix=False)
        yield from both(checkpoint, f"{block}.ffn_up", f"{layer}.intermediate.dense")
        yield from both(checkpoint, f"{block}.ffn_down", f"{layer}.output.dense")
        yield from both(checkpoint, f"{block}.layer_output_norm", f"{layer}.output.LayerNorm", matrix=False)
    if checkpoint.task == "rerank":
        yield from both(checkpoint, "cls", "pooler.dense", matrix=False)
        yield from both(checkpoint, "cls.output", "classifier", matrix=False)
