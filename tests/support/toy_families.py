"""Small random checkpoints of the families beyond :mod:`tests.support.toy_models`, as `transformers` stores them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engines.bundle.manifest import Family, Task
from engines.checkpoint import layout
from engines.checkpoint.families import nomic_bert
from engines.checkpoint.read import complete_config
from tests.support import toy_models
from tests.support.toy_models import ONE_LABEL, ROBERTA_HEAD, sentence_files, sized, write_json, write_model


def write_mpnet(
    folder: Path, *, cross_encoder: bool = False, pooling: str = "mean", seed: int = 0, **changes: Any
) -> Path:
    """Write an MPNet embedder, or a cross-encoder with one logit; more positions than distances that differ."""
    sizes, _ = sized(changes, max_positions=192)
    task: Task = "rerank" if cross_encoder else "embed"
    stored = sizes | {"max_position_embeddings": sizes["max_position_embeddings"] + 2}
    weights = _weights("mpnet", task, stored | {"type_vocab_size": 1}, seed)
    del weights["embeddings.token_type_embeddings.weight"]
    config = {
        "architectures": ["MPNetForSequenceClassification" if cross_encoder else "MPNetModel"],
        "model_type": "mpnet",
        **stored,
        "layer_norm_eps": 1e-5,
        "relative_attention_num_buckets": 32,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        **{"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2},
        **(ONE_LABEL if cross_encoder else {}),
    }
    names = {
        ".attention.self.query.": ".attention.attn.q.",
        ".attention.self.key.": ".attention.attn.k.",
        ".attention.self.value.": ".attention.attn.v.",
        ".attention.output.dense.": ".attention.attn.o.",
        ".attention.output.LayerNorm.": ".attention.LayerNorm.",
        **(ROBERTA_HEAD if cross_encoder else {}),
    }
    write_model(folder, config, weights, names, prefix="mpnet." if cross_encoder else "")
    if not cross_encoder:
        sentence_files(folder, sizes, pooling, True)
    toy_models.write_unigram_tokenizer(folder, sizes["vocab_size"])
    return folder


def write_gemma(folder: Path, *, dense: bool = True, seed: int = 0, **changes: Any) -> Path:
    """Write an EmbeddingGemma: mean pooling, with *dense* two Dense modules, prompts. Every second layer is local."""
    sizes, _ = sized(changes, layers=3, ffn=96, vocab=320, max_positions=200)
    config: dict[str, Any] = {
        "architectures": ["Gemma3TextModel"],
        "model_type": "gemma3_text",
        **sizes,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "sliding_window": 16,
        "_sliding_window_pattern": 2,
        "layer_types": ["full_attention" if n % 2 else "sliding_attention" for n in range(sizes["num_hidden_layers"])],
        "use_bidirectional_attention": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    weights = _weights("gemma3_text", "embed", config, seed)
    # A norm multiplies by one more than its weight.
    write_model(folder, config, {name: array - 1 if "norm" in name else array for name, array in weights.items()})
    hidden = sizes["hidden_size"]
    layers = ((hidden, 96), (96, 48)) if dense else ()
    for number, (inner, outer) in enumerate(layers, 2):
        where = folder / f"{number}_Dense"
        toy_models.write_dense(where, inner, outer, "Identity", seed=seed + number, bias=False)
    sentence_files(folder, sizes, "mean", True, dense=len(layers))
    prompts = {"query": "task: search result | query: ", "document": "title: none | text: "}
    write_json(folder / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": None})
    specials = {"<pad>": 0, "<eos>": 1, "<bos>": 2}
    frame = ("<bos> $A <eos>", "<bos> $A <eos> $B:1 <eos>:1")
    toy_models.write_bytelevel_tokenizer(folder, sizes["vocab_size"], specials, frame=frame)
    roles = {f"{role}_token": f"<{role}>" for role in ("bos", "eos", "pad")}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "GemmaTokenizer", **roles})
    return folder


def write_nomic(
    folder: Path, *, words: tuple[str, ...] = ("published", "transformers"), seed: int = 0, **changes: Any
) -> Path:
    """Write a Nomic BERT; its config.json in the published words, transformers' words, or both as the newest has it."""
    sizes, _ = sized(changes, ffn=96, max_positions=200)
    shape = sizes | {"layer_norm_eps": 1e-12}
    config: dict[str, Any] = {"architectures": ["NomicBertModel"], "model_type": "nomic_bert"}
    config |= {"vocab_size": sizes["vocab_size"], "type_vocab_size": 2, "pad_token_id": 0}
    if "transformers" in words:
        config |= {**shape, "hidden_act": "silu", "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}
    if "published" in words:
        config |= {theirs: shape[ours] for theirs, ours in nomic_bert.KEYS.items() if ours in shape}
        config |= {key: next(iter(values), None) for key, values in nomic_bert.HELD.items()}
        config |= {"rotary_emb_base": 500, "rotary_scaling_factor": None, "n_positions": 8192, "attn_pdrop": 0.0}
        config |= {"auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"}}
    write_model(folder, config, _weights("nomic_bert", "embed", shape, seed), {"layers.": "encoder.layers."})
    sentence_files(folder, sizes | {"max_position_embeddings": 8192}, "mean", True)
    toy_models.write_wordpiece_tokenizer(folder, sizes["vocab_size"])
    return folder


def write_gte_qwen2(folder: Path, *, is_causal: bool = False, **options: Any) -> Path:
    """Write a Qwen2 embedder as gte-Qwen2 is published: code of its own, tokens see the whole row unless told.

    tokenizer.json doesn't add the end-of-text token that the published code adds.
    """
    toy_models.write_qwen3(folder, family="qwen2", **options)
    plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    toy_models.edit(folder / "tokenizer.json", post_processor=plain)
    settings = {"add_eos_token": True, "eos_token": "<|endoftext|>"}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer", **settings})
    code = {"auto_map": {"AutoModel": "modeling_qwen.Qwen2Model"}}
    return toy_models.edit(folder / "config.json", architectures=["Qwen2ForCausalLM"], is_causal=is_causal, **code)


def _weights(family: Family, task: Task, config: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return random weights under canonical names."""
    full = complete_config(dict(config), family, where="toy")
    shapes = {name.replace("emb_ln", "emb_norm"): shape for name, shape in layout.required(family, task, full).items()}
    found = toy_models.random_weights(shapes, seed)  # which tells a norm by its name
    return {name.replace("emb_norm", "emb_ln"): array for name, array in found.items()}


TOYS: dict[str, Callable[[Path], Path]] = {
    "mpnet": write_mpnet,
    "mpnet-rerank": lambda folder: write_mpnet(folder, cross_encoder=True),
    "gemma": write_gemma,
    "nomic": write_nomic,
    "qwen2-embed": write_gte_qwen2,
    "qwen2-embed-causal": lambda folder: write_gte_qwen2(folder, is_causal=True),
}
"""The toys that tests/goldens/families.npz holds reference outputs for."""


if __name__ == "__main__":
    for toy_name, write_toy in TOYS.items():
        write_toy(Path(sys.argv[1]) / toy_name)
