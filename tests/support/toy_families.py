"""Small random checkpoints of the families beyond :mod:`tests.support.toy_models`, as `transformers` stores them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engines.bundle.manifest import Family, Task
from engines.checkpoint import layout, safetensors
from engines.checkpoint.families import nomic_bert
from engines.checkpoint.read import complete_config
from tests.support import toy_models

ROBERTA_SPECIALS = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<mask>": 4}


def write_mpnet(
    folder: Path,
    *,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    ffn: int = 128,
    vocab: int = 128,
    max_positions: int = 192,
    cross_encoder: bool = False,
    pooling: str = "mean",
) -> Path:
    """Write an MPNet embedder, or a cross-encoder with one logit; more positions than distances that differ."""
    head = "ForSequenceClassification" if cross_encoder else "Model"
    shape = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        "max_position_embeddings": max_positions + 2,
        "layer_norm_eps": 1e-5,
    }
    own = {"relative_attention_num_buckets": 32, "hidden_act": "gelu", "hidden_dropout_prob": 0.0}
    ids = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    task: Task = "rerank" if cross_encoder else "embed"
    config: dict[str, Any] = {"architectures": [f"MPNet{head}"], "model_type": "mpnet", **shape, **own, **ids}
    weights = _weights("mpnet", task, {**shape, "type_vocab_size": 1}, seed)
    weights.pop("embeddings.token_type_embeddings.weight")
    names = {
        ".attention.self.query.": ".attention.attn.q.",
        ".attention.self.key.": ".attention.attn.k.",
        ".attention.self.value.": ".attention.attn.v.",
        ".attention.output.dense.": ".attention.attn.o.",
        ".attention.output.LayerNorm.": ".attention.LayerNorm.",
    }
    if cross_encoder:
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        names |= {"classifier.": "classifier.out_proj.", "pooler.": "classifier."}
    _write(folder, config, weights, names, prefix="mpnet." if cross_encoder else "", apart=("classifier.",))
    if not cross_encoder:
        toy_models.sentence_files(
            folder, {"hidden_size": hidden, "max_position_embeddings": max_positions}, pooling, True
        )
    toy_models.write_unigram_tokenizer(folder, vocab, ROBERTA_SPECIALS)
    return folder


def write_gemma(
    folder: Path,
    *,
    seed: int = 0,
    layers: int = 3,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    ffn: int = 96,
    vocab: int = 320,
    max_positions: int = 200,
    window: int = 16,
    dense: bool = True,
) -> Path:
    """Write an EmbeddingGemma: mean pooling, with *dense* two Dense modules, prompts. Every second layer is local."""
    config: dict[str, Any] = {
        "architectures": ["Gemma3TextModel"],
        "model_type": "gemma3_text",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": ffn,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "sliding_window": window,
        "_sliding_window_pattern": 2,
        "layer_types": ["full_attention" if n % 2 else "sliding_attention" for n in range(layers)],
        "use_bidirectional_attention": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    weights = _weights("gemma3_text", "embed", config, seed)
    # A norm multiplies by one more than its weight.
    _write(folder, config, {name: array - 1 if "norm" in name else array for name, array in weights.items()}, {})
    sizes = {"hidden_size": hidden, "max_position_embeddings": max_positions}
    toy_models.sentence_files(folder, sizes, "mean", not dense)
    if dense:
        modules = json.loads((folder / "modules.json").read_text())
        for number, inner, outer in ((2, hidden, 96), (3, 96, 48)):
            where = folder / f"{number}_Dense"
            toy_models.write_dense(where, inner, outer, "Identity", seed=seed + number, bias=False)
        for number, kind in ((2, "Dense"), (3, "Dense"), (4, "Normalize")):
            modules.append({"idx": number, "path": f"{number}_{kind}", "type": f"sentence_transformers.models.{kind}"})
        (folder / "modules.json").write_text(json.dumps(modules))
    prompts = {"query": "task: search result | query: ", "document": "title: none | text: "}
    toy_models._json(folder / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": None})
    specials = {"<pad>": 0, "<eos>": 1, "<bos>": 2}
    frame = ("<bos> $A <eos>", "<bos> $A <eos> $B:1 <eos>:1")
    toy_models.write_bytelevel_tokenizer(folder, vocab, specials, frame=frame)
    roles = {f"{role}_token": f"<{role}>" for role in ("bos", "eos", "pad")}
    toy_models._json(folder / "tokenizer_config.json", {"tokenizer_class": "GemmaTokenizer", **roles})
    return folder


def write_nomic(
    folder: Path,
    *,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    ffn: int = 96,
    vocab: int = 128,
    max_positions: int = 200,
    words: tuple[str, ...] = ("published", "transformers"),
) -> Path:
    """Write a Nomic BERT; its config.json in the published words, transformers' words, or both as the newest has it."""
    config: dict[str, Any] = {"architectures": ["NomicBertModel"], "model_type": "nomic_bert", "vocab_size": vocab}
    config |= {"type_vocab_size": 2, "pad_token_id": 0}
    shape = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        "max_position_embeddings": max_positions,
        "layer_norm_eps": 1e-12,
    }
    if "transformers" in words:
        config |= {**shape, "hidden_act": "silu", "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}
    if "published" in words:
        config |= {theirs: shape[ours] for theirs, ours in nomic_bert.KEYS.items() if ours in shape}
        config |= {key: next(iter(values), None) for key, values in nomic_bert.HELD.items()}
        config |= {"rotary_emb_base": 500, "rotary_scaling_factor": None, "n_positions": 8192, "attn_pdrop": 0.0}
        config |= {"auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"}}
    weights = _weights("nomic_bert", "embed", {"vocab_size": vocab, **shape}, seed)
    _write(folder, config, weights, {"layers.": "encoder.layers."})
    toy_models.sentence_files(folder, {"hidden_size": hidden, "max_position_embeddings": 8192}, "mean", True)
    toy_models.write_wordpiece_tokenizer(folder, vocab)
    return folder


def write_gte_qwen2(folder: Path, *, is_causal: bool = False, **options: Any) -> Path:
    """Write a Qwen2 embedder as gte-Qwen2 is published: code of its own, tokens see the whole row unless told.

    tokenizer.json doesn't add the end-of-text token that the published code adds.
    """
    toy_models.write_qwen3(folder, family="qwen2", **options)
    file = folder / "tokenizer.json"
    plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    toy_models._json(file, json.loads(file.read_text()) | {"post_processor": plain})
    settings = {"add_eos_token": True, "eos_token": "<|endoftext|>"}
    toy_models._json(folder / "tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer", **settings})
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"is_causal": is_causal}
    config |= {"architectures": ["Qwen2ForCausalLM"], "auto_map": {"AutoModel": "modeling_qwen.Qwen2Model"}}
    toy_models._json(file, config)
    return folder


def _weights(family: Family, task: Task, config: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return random weights under canonical names."""
    full = complete_config(dict(config), family, where="toy")
    shapes = {name.replace("emb_ln", "emb_norm"): shape for name, shape in layout.required(family, task, full).items()}
    found = toy_models.random_weights(shapes, seed)  # which tells a norm by its name
    return {name.replace("emb_norm", "emb_ln"): array for name, array in found.items()}


def _write(
    folder: Path,
    config: dict[str, Any],
    weights: Mapping[str, Any],
    names: Mapping[str, str],
    *,
    prefix: str = "",
    apart: tuple[str, ...] = (),
) -> None:
    """Write config.json and the weights: each name with *names* replaced, the first that occurs, behind *prefix*."""
    folder.mkdir(parents=True, exist_ok=True)
    toy_models._json(folder / "config.json", config)
    stored = {}
    for name, array in weights.items():
        for ours, theirs in names.items():
            if ours in name:
                name = name.replace(ours, theirs)
                break
        stored[name if name.startswith(apart) else prefix + name] = array
    safetensors.write(folder / "model.safetensors", stored, metadata={"format": "pt"}, dtype="F32")


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
