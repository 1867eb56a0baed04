"""Llama, Mistral, Qwen2 and Qwen3: causal, rotary positions, grouped queries, SwiGLU.

Llama and Mistral are built as GGUF only. Qwen2 has biases where queries, keys and values are made; Qwen3 norms each
head's query and key.

``lm_head`` is needed only where the output matrix isn't the embedding table and the task is generate or rerank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from engines.bundle.manifest import Task
from engines.checkpoint.families.base import Config, Count, Number, Tensor, affine, need
from engines.protocol.messages import Pooling


class Llama(Config, kw_only=True):
    """``LlamaForCausalLM``."""

    pooling: ClassVar[Pooling] = Pooling.LAST
    causal: ClassVar[bool] = True
    head_norms: ClassVar[bool] = False
    """Whether each head's query and key are normed."""

    num_key_value_heads: Count = 0
    rms_norm_eps: Number = 1e-6
    hidden_act: Literal["silu"] = "silu"
    rope_theta: Number = 10000.0
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    is_causal: bool = True
    """False in embedders whose tokens see the whole row; transformers honours it in every decoder."""

    def complete(self, config: Mapping[str, Any]) -> None:
        """As in every family; no layer may see a window only."""
        Config.complete(self, config)
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        need(not config.get("use_sliding_window"), "use_sliding_window", "sliding windows are not supported")
        kinds = config.get("layer_types") or []
        need(isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds), "layer_types",
             "only full_attention is served")  # fmt: skip
        grouped = self.num_attention_heads % self.num_key_value_heads == 0
        need(grouped, "num_key_value_heads", "must divide num_attention_heads")

    def unheld(self, task: Task) -> dict[str, str]:
        """Only llama.cpp computes it; Qwen3 is an exception."""
        return dict.fromkeys(("safetensors-package", "coreml"), "no graph of it is written")

    def tensors(self, task: Task) -> Iterator[Tensor]:
        """Yield the embedding, the layers, and the output matrix where it is one of its own."""
        need(self.is_causal or task == "embed", "is_causal", f"false is for embedders, this is a {task} checkpoint")
        hidden, ffn, dim = self.hidden_size, self.intermediate_size, self.head_dim
        queries, keys = self.num_attention_heads * dim, self.num_key_value_heads * dim
        bias, bias_out = self.biased
        yield "embed_tokens.weight", (self.vocab_size, hidden)
        for n in range(self.num_hidden_layers):
            layer = f"layers.{n}"
            yield f"{layer}.input_layernorm.weight", (hidden,)
            yield from affine(f"{layer}.self_attn.q_proj", queries, hidden, bias=bias)
            yield from affine(f"{layer}.self_attn.k_proj", keys, hidden, bias=bias)
            yield from affine(f"{layer}.self_attn.v_proj", keys, hidden, bias=bias)
            yield from affine(f"{layer}.self_attn.o_proj", hidden, queries, bias=bias_out)
            if self.head_norms:
                yield f"{layer}.self_attn.q_norm.weight", (dim,)
                yield f"{layer}.self_attn.k_norm.weight", (dim,)
            yield f"{layer}.post_attention_layernorm.weight", (hidden,)
            yield from affine(f"{layer}.mlp.gate_proj", ffn, hidden, bias=self.mlp_bias)
            yield from affine(f"{layer}.mlp.up_proj", ffn, hidden, bias=self.mlp_bias)
            yield from affine(f"{layer}.mlp.down_proj", hidden, ffn, bias=self.mlp_bias)
        yield "norm.weight", (hidden,)
        if task != "embed" and not self.tie_word_embeddings:
            yield "lm_head.weight", (self.vocab_size, hidden)

    @property
    def biased(self) -> tuple[bool, bool]:
        """Whether queries, keys and values have a bias, and whether the output of attention has one."""
        return self.attention_bias, self.attention_bias


class Mistral(Llama, kw_only=True):
    """``MistralForCausalLM`` and ``MistralModel``: Llama, where no window is set. From GGUF."""

    def complete(self, config: Mapping[str, Any]) -> None:
        """As Llama; a window as long as all positions is none. Without the key transformers has one of 4096."""
        Llama.complete(self, config)
        window = config.get("sliding_window", 4096)
        whole = window is None or (type(window) is int and window >= self.max_position_embeddings)
        need(whole, "sliding_window", f"{window!r}: sliding windows are not supported")

    def tensors(self, task: Task) -> Iterator[Tensor]:
        """As Llama; there is no reranker."""
        need(task != "rerank", "architectures", "a mistral reranker isn't served; served: embed and generate")
        return Llama.tensors(self, task)


class Qwen2(Llama, kw_only=True):
    """``Qwen2Model`` and ``Qwen2ForCausalLM``, which generate and embed; gte-Qwen2, whose tokens see the whole row."""

    def complete(self, config: Mapping[str, Any]) -> None:
        """As in every family; where a checkpoint has code of its own, it must say which tokens see which."""
        Llama.complete(self, config)
        whole = self.head_dim * self.num_attention_heads == self.hidden_size
        need(whole, "head_dim", "times num_attention_heads must be hidden_size, as llama.cpp has it")
        said = not config.get("auto_map") or config.get("is_causal") is not None
        need(said, "auto_map", "its own code may attend to later tokens: say is_causal true or false in config.json")

    def unheld(self, task: Task) -> dict[str, str]:
        """As every model."""
        return Config.unheld(self, task)

    def tensors(self, task: Task) -> Iterator[Tensor]:
        """As Llama; there is no reranker."""
        need(task != "rerank", "architectures", "a qwen2 reranker isn't served; served of qwen2: embed and generate")
        return Llama.tensors(self, task)

    @property
    def biased(self) -> tuple[bool, bool]:
        """Always where queries, keys and values are made, and nowhere else."""
        return True, False


class Qwen3(Llama, kw_only=True):
    """``Qwen3Model`` and ``Qwen3ForCausalLM``; as a reranker it reads off the words yes and no."""

    head_norms: ClassVar[bool] = True

    def unheld(self, task: Task) -> dict[str, str]:
        """As every model; a reranker's words and template are onnxruntime's alone."""
        why = "its answer is read off two words behind a template of its own, which that engine doesn't have"
        return {"gguf": why, "coreml": why} if task == "rerank" else Config.unheld(self, task)
