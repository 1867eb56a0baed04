"""EmbeddingGemma in a GGUF: llama.cpp's ``gemma-embedding``. The dense modules behind it are the host's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engines.checkpoint.facts import Facts
from engines.checkpoint.read import Checkpoint
from engines.llama.build.decoder import shape
from engines.llama.build.tensors import GgufTensor, same


def metadata(writer: Any, checkpoint: Checkpoint, known: Facts) -> None:
    """Write the keys that llama.cpp wants of it."""
    shape(writer, checkpoint)
    c = checkpoint.config
    writer.add_float32("gemma-embedding.rope.freq_base_swa", float(c["rope_local_base_freq"]))
    writer.add_causal_attention(False)
    writer.add_sliding_window(c["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in c["layer_types"]])


def tensors(checkpoint: Checkpoint) -> Iterator[GgufTensor]:
    """Yield every tensor in file order."""
    c = checkpoint.config
    # llama.cpp scales queries by the root of head_dim, whatever the model says; their norm takes the difference.
    scale = (c["head_dim"] / float(c["query_pre_attn_scalar"])) ** 0.5
    yield same(checkpoint, "token_embd.weight", "embed_tokens.weight")
    for n in range(c["num_hidden_layers"]):
        layer, block = f"layers.{n}", f"blk.{n}"
        yield _norm(checkpoint, f"{block}.attn_norm", f"{layer}.input_layernorm")
        for short in ("q", "k", "v"):
            yield same(checkpoint, f"{block}.attn_{short}.weight", f"{layer}.self_attn.{short}_proj.weight")
        yield same(checkpoint, f"{block}.attn_output.weight", f"{layer}.self_attn.o_proj.weight")
        yield _norm(checkpoint, f"{block}.attn_q_norm", f"{layer}.self_attn.q_norm", scale)
        yield _norm(checkpoint, f"{block}.attn_k_norm", f"{layer}.self_attn.k_norm")
        yield _norm(checkpoint, f"{block}.post_attention_norm", f"{layer}.post_attention_layernorm")
        yield _norm(checkpoint, f"{block}.ffn_norm", f"{layer}.pre_feedforward_layernorm")
        for short in ("gate", "up", "down"):
            yield same(checkpoint, f"{block}.ffn_{short}.weight", f"{layer}.mlp.{short}_proj.weight")
        yield _norm(checkpoint, f"{block}.post_ffw_norm", f"{layer}.post_feedforward_layernorm")
    yield _norm(checkpoint, "output_norm", "norm")


def _norm(checkpoint: Checkpoint, name: str, source: str, scale: float = 1.0) -> GgufTensor:
    """A norm's weight; Gemma multiplies by one more than is stored."""
    stored = f"{source}.weight"
    shape = checkpoint.shape(stored)
    return GgufTensor(f"{name}.weight", shape, False, lambda: (checkpoint.f32(stored) + 1) * scale)
