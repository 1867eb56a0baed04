"""ModernBERT: rotary positions, some layers that see a window only, gated feed-forward, a dense head for reranking.

``Wqkv`` stacks query, key and value; ``Wi`` the half that is activated first, then the gate. ``local_attention`` is the
whole window in tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from engines.bundle.manifest import Task
from engines.checkpoint.families.base import Count, Encoder, Number, Tensor, affine, need
from engines.protocol.messages import Pooling


class ModernBert(Encoder, kw_only=True):
    """``ModernBertModel`` and ``ModernBertForSequenceClassification``."""

    pooling: ClassVar[Pooling] = Pooling.CLS

    norm_eps: Number = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    classifier_bias: bool = False
    classifier_pooling: Literal["cls", "mean"] = "cls"
    classifier_activation: Literal["gelu"] = "gelu"
    hidden_activation: Literal["gelu"] = "gelu"
    local_attention: Count | Number = 128
    global_rope_theta: Number = 160000.0
    local_rope_theta: Number = 10000.0
    global_attn_every_n_layers: Count = 3
    layer_types: list[Literal["full_attention", "sliding_attention"]] = []  # noqa: RUF012 - msgspec copies it

    @classmethod
    def thetas(cls, rope: Mapping[str, Any]) -> dict[str, Any]:
        """One theta for layers that see everything and one for layers that see a window."""
        return {"global_rope_theta": rope.get("full_attention"), "local_rope_theta": rope.get("sliding_attention")}

    def complete(self, config: Mapping[str, Any]) -> None:
        """As in every encoder; layers see everything or a window, each by name."""
        Encoder.complete(self, config)
        layers, every = self.num_hidden_layers, self.global_attn_every_n_layers
        if config.get("layer_types") is None:
            self.layer_types = ["sliding_attention" if n % every else "full_attention" for n in range(layers)]
        need(len(self.layer_types) == layers, "layer_types", "must name full_attention or sliding_attention each")

    def unheld(self, task: Task) -> dict[str, str]:
        """Its conversion to GGUF isn't written."""
        return {"gguf": "its conversion isn't written"}

    @property
    def head(self) -> dict[str, Any]:
        """Dense, gelu and norm on the pooled states, then the classifier."""
        return {"kind": "dense", "pooling": self.classifier_pooling}

    def tensors(self, task: Task) -> Iterator[Tensor]:
        """Yield the embeddings, the layers (the first has no norm before attention), and a reranker's head."""
        hidden, ffn = self.hidden_size, self.intermediate_size
        norm_bias, attn_bias, mlp_bias = self.norm_bias, self.attention_bias, self.mlp_bias
        yield "embeddings.tok_embeddings.weight", (self.vocab_size, hidden)
        yield from affine("embeddings.norm", hidden, bias=norm_bias)
        for n in range(self.num_hidden_layers):
            layer = f"layers.{n}"
            if n:
                yield from affine(f"{layer}.attn_norm", hidden, bias=norm_bias)
            yield from affine(f"{layer}.attn.Wqkv", 3 * hidden, hidden, bias=attn_bias)
            yield from affine(f"{layer}.attn.Wo", hidden, hidden, bias=attn_bias)
            yield from affine(f"{layer}.mlp_norm", hidden, bias=norm_bias)
            yield from affine(f"{layer}.mlp.Wi", 2 * ffn, hidden, bias=mlp_bias)
            yield from affine(f"{layer}.mlp.Wo", hidden, ffn, bias=mlp_bias)
        yield from affine("final_norm", hidden, bias=norm_bias)
        if task == "rerank":
            yield from affine("head.dense", hidden, hidden, bias=self.classifier_bias)
            yield from affine("head.norm", hidden, bias=norm_bias)
            yield from affine("classifier", 1, hidden)
