"""Llama, Mistral, Qwen2 and Qwen3 in a GGUF."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from engines.checkpoint.facts import Facts
from engines.checkpoint.read import Checkpoint
from engines.llama.build.tensors import GgufTensor, both, same

if TYPE_CHECKING:
    from engines.checkpoint.safetensors import FloatArray


def metadata(writer: Any, checkpoint: Checkpoint, known: Facts) -> None:
    """Write the keys that llama.cpp wants of a decoder."""
    shape(writer, checkpoint)
    if not checkpoint.config["is_causal"]:
        writer.add_causal_attention(False)


def shape(writer: Any, checkpoint: Checkpoint) -> None:
    """Write the keys of grouped heads with rotary positions and RMS norms."""
    c = checkpoint.config
    writer.add_vocab_size(c["vocab_size"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_key_length(c["head_dim"])
    writer.add_value_length(c["head_dim"])
    writer.add_rope_dimension_count(c["head_dim"])
    writer.add_rope_freq_base(float(c["rope_theta"]))
    writer.add_layer_norm_rms_eps(float(c["rms_norm_eps"]))


def tensors(checkpoint: Checkpoint) -> Iterator[GgufTensor]:
    """Yield every tensor in file order."""
    c = checkpoint.config
    yield same(checkpoint, "token_embd.weight", "embed_tokens.weight")
    for n in range(c["num_hidden_layers"]):
        layer, block = f"layers.{n}", f"blk.{n}"
        yield same(checkpoint, f"{block}.attn_norm.weight", f"{layer}.input_layernorm.weight", matrix=False)
        for short, heads in (("q", c["num_attention_heads"]), ("k", c["num_key_value_heads"]), ("v", 0)):
            for part in ("weight", "bias"):
                source = f"{layer}.self_attn.{short}_proj.{part}"
                name = f"{block}.attn_{short}.{part}"
                if source not in checkpoint.tensors:
                    continue
                # llama's rotary pairs neighbours where Hugging Face pairs halves; Qwen keeps halves on both sides.
                turned = 0 if checkpoint.family.startswith("qwen") else heads
                yield _rotated(checkpoint, name, source, turned, matrix=part == "weight")
        output = f"{layer}.self_attn.o_proj"
        yield from both(checkpoint, f"{block}.attn_output", output, bias=f"{output}.bias" in checkpoint.tensors)
        if f"{layer}.self_attn.q_norm.weight" in checkpoint.tensors:
            for short in ("q", "k"):
                source = f"{layer}.self_attn.{short}_norm.weight"
                yield same(checkpoint, f"{block}.attn_{short}_norm.weight", source, matrix=False)
        yield same(checkpoint, f"{block}.ffn_norm.weight", f"{layer}.post_attention_layernorm.weight", matrix=False)
        for short in ("gate", "up", "down"):
            yield from both(
                checkpoint, f"{block}.ffn_{short}", f"{layer}.mlp.{short}_proj", bias=c.get("mlp_bias", False)
            )
    yield same(checkpoint, "output_norm.weight", "norm.weight", matrix=False)
    if "lm_head.weight" in checkpoint.tensors:
        yield same(checkpoint, "output.weight", "lm_head.weight")


def _rotated(checkpoint: Checkpoint, name: str, source: str, heads: int, *, matrix: bool) -> GgufTensor:
    shape = checkpoint.shape(source)

    def make() -> FloatArray:
        array = checkpoint.f32(source)
        if not heads:
            return array
        halves = array.reshape(heads, 2, shape[0] // heads // 2, *shape[1:])
        return halves.swapaxes(1, 2).reshape(shape)

    return GgufTensor(name, shape, matrix, make)
