"""Nomic's BERT (nomic-embed-text): rotary positions, gated layers with SiLU, norms behind each half, few biases.

Published config.json files have GPT-2's words, transformers' words, or both; this class has transformers', and
:data:`HELD` says what the others may be. Tensor names are the published ones without ``encoder.``: ``Wqkv`` stacks
query, key and value, ``fc12`` is the half that is activated, ``fc11`` the other. Beyond the positions that it was
trained on the model's own code stretches rotary positions, if told so; here such a row is refused.

Sources: transformers, models/nomic_bert; nomic-ai/nomic-bert-2048, modeling_hf_nomic_bert.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final, Literal

from engines.bundle.manifest import Task
from engines.checkpoint.families.base import Count, Encoder, Number, Spelling, Tensor, affine, need
from engines.protocol.messages import Pooling

KEYS: Final = {
    "n_embd": "hidden_size",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "max_trained_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}
"""Published keys, and what this class calls them."""
HELD: Final[Mapping[str, tuple[Any, ...]]] = {
    "activation_function": ("swiglu",),
    "causal": (False,),
    "mlp_fc1_bias": (False,),
    "mlp_fc2_bias": (False,),
    "moe_every_n_layers": (0,),
    "num_experts": (0,),
    "parallel_block": (False,),
    "prenorm": (False,),
    "qkv_proj_bias": (False,),
    "rotary_emb_fraction": (1, 1.0),
    "rotary_emb_interleaved": (False,),
    "rotary_emb_scale_base": (),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "use_rms_norm": (False,),
}
"""Published keys that may be absent, null or this; another value is another forward pass."""


class _Published(Spelling):
    prefix = "nomic_bert"
    renames = ((r"^encoder\.layers\.", "layers."),)

    def config(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return config.json in transformers' words; what they say twice must be the same."""
        for key, values in HELD.items():
            value = raw.get(key)
            need(value is None or value in values, key, f"{value!r} isn't served: it changes the forward pass")
        config = {key: value for key, value in raw.items() if key not in KEYS and key not in HELD and value is not None}
        rope = raw.get("rope_parameters")
        if isinstance(rope, dict) and "rope_theta" in rope:
            config.setdefault("rope_theta", rope["rope_theta"])
        for key, ours in KEYS.items():
            value = raw.get(key)
            if value is not None:
                need(config.setdefault(ours, value) == value, key, f"{value!r} contradicts {ours} {config[ours]!r}")
        return config


class NomicBert(Encoder, kw_only=True):
    """``NomicBertModel``."""

    pooling: ClassVar[Pooling] = Pooling.MEAN
    spelling: ClassVar[Spelling] = _Published()
    ignored: ClassVar[tuple[str, ...]] = (
        *KEYS,
        *HELD,
        *("attn_pdrop", "embd_pdrop", "resid_pdrop", "fused_bias_fc", "fused_dropout_add_ln", "dense_seq_output"),
        *("use_flash_attn", "use_xentropy", "pad_vocab_size_multiple", "reorder_and_upcast_attn", "n_positions"),
        *("parallel_block_tied_norm", "rotary_scaling_factor", "add_pooling_layer"),
        *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
    )

    type_vocab_size: Count = 2
    layer_norm_eps: Number = 1e-12
    hidden_act: Literal["silu"] = "silu"
    rope_theta: Number = 1000.0

    def tensors(self, task: Task) -> Iterator[Tensor]:
        """Yield the embeddings and the layers."""
        need(task == "embed", "architectures", "a nomic_bert reranker isn't served; served of nomic_bert: embed")
        hidden, ffn = self.hidden_size, self.intermediate_size
        yield "embeddings.word_embeddings.weight", (self.vocab_size, hidden)
        yield "embeddings.token_type_embeddings.weight", (self.type_vocab_size, hidden)
        yield from affine("emb_ln", hidden)
        for n in range(self.num_hidden_layers):
            layer = f"layers.{n}"
            yield f"{layer}.attn.Wqkv.weight", (3 * hidden, hidden)
            yield f"{layer}.attn.out_proj.weight", (hidden, hidden)
            yield from affine(f"{layer}.norm1", hidden)
            yield f"{layer}.mlp.fc11.weight", (ffn, hidden)
            yield f"{layer}.mlp.fc12.weight", (ffn, hidden)
            yield f"{layer}.mlp.fc2.weight", (hidden, ffn)
            yield from affine(f"{layer}.norm2", hidden)
