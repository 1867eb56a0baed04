"""Nomic's BERT in a GGUF: llama.cpp's ``nomic-bert``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engines.checkpoint.facts import Facts
from engines.checkpoint.read import Checkpoint
from engines.llama.build.tensors import GgufTensor, both, same


def metadata(writer: Any, checkpoint: Checkpoint, known: Facts) -> None:
    """Write the keys that llama.cpp wants of it."""
    c = checkpoint.config
    writer.add_vocab_size(c["vocab_size"])
    writer.add_layer_norm_eps(float(c["layer_norm_eps"]))
    writer.add_causal_attention(False)
    writer.add_rope_freq_base(float(c["rope_theta"]))
    writer.add_token_type_count(c["type_vocab_size"])


def tensors(checkpoint: Checkpoint) -> Iterator[GgufTensor]:
    """Yield every tensor in file order."""
    yield same(checkpoint, "token_embd.weight", "embeddings.word_embeddings.weight")
    yield same(checkpoint, "token_types.weight", "embeddings.token_type_embeddings.weight", matrix=False)
    yield from both(checkpoint, "token_embd_norm", "emb_ln", matrix=False)
    names = {"attn_qkv": "attn.Wqkv", "attn_output": "attn.out_proj"}
    names |= {"ffn_gate": "mlp.fc12", "ffn_up": "mlp.fc11", "ffn_down": "mlp.fc2"}
    for n in range(checkpoint.config["num_hidden_layers"]):
        layer, block = f"layers.{n}", f"blk.{n}"
        for theirs, ours in names.items():
            yield same(checkpoint, f"{block}.{theirs}.weight", f"{layer}.{ours}.weight")
        yield from both(checkpoint, f"{block}.attn_output_norm", f"{layer}.norm1", matrix=False)
        yield from both(checkpoint, f"{block}.layer_output_norm", f"{layer}.norm2", matrix=False)
