"""Gemma 3 as an embedder (EmbeddingGemma): every token sees the whole row, in most layers a window around itself.

Four norms a layer, two of them behind attention and feed-forward; each multiplies by one plus its weight. Embeddings
are scaled by the root of their width, queries and keys are normed, and each kind of layer has a rotary theta.
``sliding_window`` is the whole window in tokens. A Gemma that generates isn't served from its checkpoint.

Source: transformers, models/gemma3/modeling_gemma3.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from engines.bundle.manifest import Task
from engines.checkpoint.families.base import Config, Count, Number, Tensor, need
from engines.protocol.messages import Pooling


class Gemma3Text(Config, kw_only=True):
    """``Gemma3TextModel`` with ``use_bidirectional_attention``."""

    pooling: ClassVar[Pooling] = Pooling.MEAN
    ignored: ClassVar[tuple[str, ...]] = ("final_logit_softcapping", "_sliding_window_pattern")

    num_key_value_heads: Count = 4
    head_dim: Count = 256
    rms_norm_eps: Number = 1e-6
    hidden_activation: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    rope_theta: Number = 1e6
    rope_local_base_freq: Number = 1e4
    query_pre_attn_scalar: Number = 256
    attention_bias: Literal[False] = False
    attn_logit_softcapping: None = None
    use_bidirectional_attention: bool = False
    sliding_window: Count = 4096
    sliding_window_pattern: Count = 6
    layer_types: list[Literal["full_attention", "sliding_attention"]] = []  # noqa: RUF012 - msgspec copies it

    @classmethod
    def thetas(cls, rope: Mapping[str, Any]) -> dict[str, Any]:
        """One theta for layers that see everything and one for layers that see a window."""
        return {"rope_theta": rope.get("full_attention"), "rope_local_base_freq": rope.get("sliding_attention")}

    def complete(self, config: Mapping[str, Any]) -> None:
        """As in every family; layers see everything or a window, each by name or every so many."""
        Config.complete(self, config)
        embeds = self.use_bidirectional_attention
        need(embeds, "use_bidirectional_attention", "must be true: a Gemma that generates is built from its GGUF")
        grouped = self.num_attention_heads % self.num_key_value_heads == 0
        need(grouped, "num_key_value_heads", "must divide num_attention_heads")
        layers, every = self.num_hidden_layers, self.sliding_window_pattern
        if config.get("layer_types") is None:
            kinds = ("full_attention", "sliding_attention")
            self.layer_types = [kinds[(n + 1) % every > 0] for n in range(layers)]  # type: ignore[misc]
        need(len(self.layer_types) == layers, "layer_types", "must name full_attention or sliding_attention each")

    def unheld(self, task: Task) -> dict[str, str]:
        """Its authors say that its activations leave float16, which is all that the Neural Engine has."""
        return {"coreml": "its activations exceed float16, and the Neural Engine computes in nothing else"}

    def tensors(self, task: Task) -> Iterator[Tensor]:
        """Yield the embedding, the layers and the last norm."""
        need(task == "embed", "architectures", "a gemma3_text reranker isn't served; served of gemma3_text: embed")
        hidden, ffn, dim = self.hidden_size, self.intermediate_size, self.head_dim
        queries, keys = self.num_attention_heads * dim, self.num_key_value_heads * dim
        yield "embed_tokens.weight", (self.vocab_size, hidden)
        for n in range(self.num_hidden_layers):
            layer = f"layers.{n}"
            for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
                yield f"{layer}.{norm}_layernorm.weight", (hidden,)
            yield f"{layer}.self_attn.q_proj.weight", (queries, hidden)
            yield f"{layer}.self_attn.k_proj.weight", (keys, hidden)
            yield f"{layer}.self_attn.v_proj.weight", (keys, hidden)
            yield f"{layer}.self_attn.o_proj.weight", (hidden, queries)
            yield f"{layer}.self_attn.q_norm.weight", (dim,)
            yield f"{layer}.self_attn.k_norm.weight", (dim,)
            yield f"{layer}.mlp.gate_proj.weight", (ffn, hidden)
            yield f"{layer}.mlp.up_proj.weight", (ffn, hidden)
            yield f"{layer}.mlp.down_proj.weight", (hidden, ffn)
        yield "norm.weight", (hidden,)
