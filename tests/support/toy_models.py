"""Small random checkpoints of every family and task, as Hugging Face folders. A seed stands for the weights.

Everything is written with numpy alone, and `transformers` loads each folder unchanged (tests/goldens/make_goldens.py
checks it). Weights are scaled so that activations stay near unit size and different inputs give different outputs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from engines.bundle.manifest import Family, Task
from engines.checkpoint import layout, safetensors
from engines.checkpoint.read import complete_config

BERT_SPECIALS = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
BERT_ROLES = {f"{name.strip('[]').lower()}_token": name for name in BERT_SPECIALS}
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def write_bert(
    folder: Path,
    *,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    ffn: int = 128,
    vocab: int = 128,
    max_positions: int = 64,
    cross_encoder: bool = False,
    pooling: str = "mean",
    normalize: bool = True,
    dtype: str = "float32",
    shards: int = 1,
) -> Path:
    """Write a BERT embedding model (BertModel) or cross-encoder (BertForSequenceClassification, one logit)."""
    config = {
        "architectures": ["BertForSequenceClassification" if cross_encoder else "BertModel"],
        "model_type": "bert",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        "max_position_embeddings": max_positions,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "pad_token_id": 0,
    }
    task: Task = "rerank" if cross_encoder else "embed"
    prefix = (lambda name: name if name.startswith("classifier") else "bert." + name) if cross_encoder else None
    _finish(folder, "bert", task, config, seed=seed, dtype=dtype, shards=shards, prefix=prefix)
    if not cross_encoder:
        _sentence_files(folder, hidden, pooling, normalize, max_positions)
    write_wordpiece_tokenizer(folder, vocab)
    return folder


def write_dense(
    folder: Path,
    inner: int,
    outer: int,
    activation: str,
    *,
    seed: int = 0,
    bias: bool = True,
    dtype: str = "float32",
    weight: np.ndarray[Any, Any] | None = None,
) -> tuple[Path, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Write a Dense module of sentence-transformers; return its folder, weight (out, in) and bias."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    if weight is None:
        weight = rng.standard_normal((outer, inner)).astype(np.float32)
    shift = rng.standard_normal(outer).astype(np.float32)
    tensors = {"linear.weight": weight, **({"linear.bias": shift} if bias else {})}
    safetensors.write(folder / "model.safetensors", tensors, dtype=DTYPES[dtype])
    config = {"in_features": inner, "out_features": outer, "bias": bias}
    _json(folder / "config.json", config | {"activation_function": f"torch.nn.modules.activation.{activation}"})
    return folder, weight, shift


def write_relative(
    folder: Path,
    kind: str,
    *,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    ffn: int = 128,
    vocab: int = 128,
    max_positions: int = 64,
    cross_encoder: bool = False,
) -> Path:
    """Write a model that computes what BERT computes, as transformers stores it: ``roberta`` (and the kinds that are
    stored like it) or ``distilbert``.
    """
    like_roberta = kind != "distilbert"
    config: dict[str, Any] = {
        "architectures": ["XForSequenceClassification" if cross_encoder else "XModel"],
        "model_type": kind,
        "vocab_size": vocab,
        "pad_token_id": 1 if like_roberta else 0,
    }
    if like_roberta:
        config |= {
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "intermediate_size": ffn,
            "max_position_embeddings": max_positions + 2,
            "type_vocab_size": 1,
            "layer_norm_eps": 1e-5,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 2,
        }
    else:
        config |= {
            "dim": hidden,
            "n_layers": layers,
            "n_heads": heads,
            "hidden_dim": ffn,
            "max_position_embeddings": max_positions,
            "activation": "gelu",
            "sinusoidal_pos_embds": False,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        }
    if cross_encoder:
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    folder.mkdir(parents=True, exist_ok=True)
    _json(folder / "config.json", config)
    bert = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        "max_position_embeddings": max_positions + (2 if like_roberta else 0),
        "type_vocab_size": 1,
    }
    task: Task = "rerank" if cross_encoder else "embed"
    full = complete_config(bert, "bert", where="toy")
    weights = random_weights(layout.required("bert", task, full), seed)
    if not like_roberta:
        weights.pop("embeddings.token_type_embeddings.weight")
    if like_roberta and not cross_encoder:  # as published ones have it; it takes no part in an embedding
        weights |= random_weights({"pooler.dense.weight": (hidden, hidden), "pooler.dense.bias": (hidden,)}, seed + 1)
    stored = {_name_of_relative(name, like_roberta, cross_encoder): array for name, array in weights.items()}
    safetensors.write(folder / "model.safetensors", stored, metadata={"format": "pt"}, dtype="F32")
    if not cross_encoder:
        _sentence_files(folder, hidden, "mean", True, max_positions)
    specials = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<mask>": 4} if like_roberta else BERT_SPECIALS
    if like_roberta:
        write_unigram_tokenizer(folder, vocab, specials)
    else:
        write_wordpiece_tokenizer(folder, vocab)
    return folder


def _name_of_relative(name: str, like_roberta: bool, cross_encoder: bool) -> str:
    """Return how transformers stores a tensor of BERT's name."""
    if like_roberta:
        if name.startswith("pooler.") and cross_encoder:
            return "classifier" + name.removeprefix("pooler")
        if name.startswith("classifier."):
            return "classifier.out_proj." + name.removeprefix("classifier.")
        return "roberta." + name if cross_encoder else name
    for old, new in (
        ("encoder.layer.", "transformer.layer."),
        ("attention.self.query", "attention.q_lin"),
        ("attention.self.key", "attention.k_lin"),
        ("attention.self.value", "attention.v_lin"),
        ("attention.output.dense", "attention.out_lin"),
        ("attention.output.LayerNorm", "sa_layer_norm"),
        ("intermediate.dense", "ffn.lin1"),
        ("output.dense", "ffn.lin2"),
        ("output.LayerNorm", "output_layer_norm"),
    ):
        name = name.replace(old, new)
    return name


def write_unigram_tokenizer(folder: Path, vocab: int, specials: Mapping[str, int]) -> None:
    """Write a SentencePiece Unigram tokenizer.json as XLM-RoBERTa has it: ``<s> a </s>``, ``<s> a </s></s> b </s>``."""
    letters = "etaoinshrdlucmfwypvbgkjqxz0123456789.,?!-'"
    pieces = [*specials, "\u2581", *(f"\u2581{word}" for word in ("the", "cat", "sat", "on", "mat")), *letters]
    pieces += [f"\u2581w{number}" for number in range(vocab - len(pieces))]
    sides = [{"SpecialToken": {"id": token, "type_id": 0}} for token in ("<s>", "</s>")]
    text = [{"Sequence": {"id": name, "type_id": 0}} for name in ("A", "B")]
    post = {
        "type": "TemplateProcessing",
        "single": [sides[0], text[0], sides[1]],
        "pair": [sides[0], text[0], sides[1], sides[1], text[1], sides[1]],
        "special_tokens": {t: {"id": t, "ids": [specials[t]], "tokens": [t]} for t in ("<s>", "</s>")},
    }
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": n, "content": t, **plain, "special": True} for t, n in specials.items()],
        "normalizer": {"type": "NFKC"},
        "pre_tokenizer": metaspace,
        "post_processor": post,
        "decoder": metaspace,
        "model": {
            "type": "Unigram",
            "unk_id": specials["<unk>"],
            "vocab": [[piece, -float(number)] for number, piece in enumerate(pieces)],
            "byte_fallback": False,
        },
    }
    _json(folder / "tokenizer.json", document)
    roles = {"cls": "<s>", "sep": "</s>", "pad": "<pad>", "unk": "<unk>", "mask": "<mask>", "bos": "<s>", "eos": "</s>"}
    named = {f"{role}_token": token for role, token in roles.items()}
    _json(folder / "tokenizer_config.json", {"tokenizer_class": "XLMRobertaTokenizerFast", **named})


def write_modernbert(
    folder: Path,
    *,
    seed: int = 0,
    layers: int = 4,
    hidden: int = 64,
    heads: int = 4,
    ffn: int = 96,
    vocab: int = 320,
    max_positions: int = 256,
    local_attention: int = 16,
    rerank: bool = False,
    classifier_pooling: str = "mean",
    pooling: str = "cls",
    normalize: bool = True,
    dtype: str = "float32",
    shards: int = 1,
) -> Path:
    """Write a ModernBERT embedder (ModernBertModel) or reranker (ModernBertForSequenceClassification, one logit).

    Every third layer is global (layer 0 first), the others see ``local_attention // 2`` tokens to each side.
    """
    config = {
        "architectures": ["ModernBertForSequenceClassification" if rerank else "ModernBertModel"],
        "model_type": "modernbert",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        "max_position_embeddings": max_positions,
        "norm_eps": 1e-5,
        "norm_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_activation": "gelu",
        "classifier_activation": "gelu",
        "classifier_pooling": classifier_pooling,
        "classifier_bias": False,
        "global_attn_every_n_layers": 3,
        "local_attention": local_attention,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
        "pad_token_id": 0,
        "cls_token_id": 2,
        "bos_token_id": 2,
        "sep_token_id": 3,
        "eos_token_id": 3,
    }
    task: Task = "rerank" if rerank else "embed"
    own = ("head.", "classifier.")
    prefix = (lambda name: name if name.startswith(own) else "model." + name) if rerank else None
    _finish(folder, "modernbert", task, config, seed=seed, dtype=dtype, shards=shards, prefix=prefix)
    if not rerank:
        _sentence_files(folder, hidden, pooling, normalize, max_positions)
    write_bytelevel_tokenizer(folder, vocab, BERT_SPECIALS, template=("[CLS]", "[SEP]"))
    return folder


QWEN_SPECIALS = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}


def write_qwen3(
    folder: Path,
    *,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    ffn: int = 128,
    vocab: int = 320,
    max_positions: int = 512,
    rerank: bool = False,
    generate: bool = False,
    normalize: bool = True,
    dtype: str = "float32",
    shards: int = 1,
    family: Family = "qwen3",
) -> Path:
    """Write a Qwen3 or Qwen2 embedder (last-token pooling), yes/no reranker or generator (tied)."""
    causal = rerank or generate
    config: dict[str, Any] = {
        "architectures": [family.title() + ("ForCausalLM" if causal else "Model")],
        "model_type": family,
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
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "bos_token_id": 0,
        "eos_token_id": 2 if causal else 0,
        "pad_token_id": 0,
    }
    task: Task = "rerank" if rerank else "generate" if generate else "embed"
    prefix = (lambda name: "model." + name) if causal else None
    if family == "qwen2":
        del config["attention_bias"]
        config["head_dim"] = hidden // heads
    _finish(folder, family, task, config, seed=seed, dtype=dtype, shards=shards, prefix=prefix)
    ids = write_bytelevel_tokenizer(folder, vocab, QWEN_SPECIALS, template=None if causal else ("", "<|endoftext|>"))
    if rerank:
        _json(folder / "1_LogitScore" / "config.json", {"true_token_id": ids["yes"], "false_token_id": ids["no"]})
    if task == "embed":
        _sentence_files(folder, hidden, "lasttoken", normalize, max_positions)
    return folder


def write_llama(
    folder: Path,
    *,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    ffn: int = 128,
    vocab: int = 320,
    max_positions: int = 256,
    tied: bool = False,
    dtype: str = "float32",
    shards: int = 1,
    family: Family = "llama",
) -> Path:
    """Write a llama-family generator (LlamaForCausalLM, MistralForCausalLM)."""
    config = {
        "architectures": [family.title() + "ForCausalLM"],
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "intermediate_size": ffn,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    prefix = lambda name: name if name.startswith("lm_head") else "model." + name  # noqa: E731
    _finish(folder, family, "generate", config, seed=seed, dtype=dtype, shards=shards, prefix=prefix)
    write_bytelevel_tokenizer(folder, vocab, QWEN_SPECIALS, template=None)
    return folder


def toy_rows(seed: int, lengths: list[int], vocab: int = 128, low: int = 5) -> list[list[int]]:
    """Return random rows of ids in [low, vocab), one per length."""
    rng = np.random.default_rng(seed)
    return [rng.integers(low, vocab, n).tolist() for n in lengths]


def random_weights(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """Return float32 weights for a layout: the same seed gives the same bytes on every machine."""
    rng = np.random.default_rng(seed)
    weights: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        normal = rng.standard_normal(shape, dtype=np.float32)
        if "norm" in name.lower():
            value = normal * np.float32(0.1) + np.float32(0.0 if name.endswith(".bias") else 1.0)
        elif name.endswith(".bias"):
            value = normal * np.float32(0.1)
        elif name.startswith("embeddings.") or name == "embed_tokens.weight":
            scale = {"position": 0.5, "token_type": 0.7, "embed_tokens": 0.3}  # tied logits stay in single digits
            value = normal * np.float32(next((s for k, s in scale.items() if k in name), 1.0))
        elif name == "classifier.weight":
            value = normal * np.float32(4.0 / shape[1] ** 0.5)
        else:
            value = normal * np.float32(1.0 / shape[1] ** 0.5)
        weights[name] = np.ascontiguousarray(value, np.float32)
    return weights


def write_wordpiece_tokenizer(folder: Path, vocab: int) -> dict[str, int]:
    """Write a WordPiece tokenizer.json with exactly *vocab* entries: specials, letters, continuations, a few words."""
    letters = "etaoinshrdlucmfwypvbgkjqxz0123456789.,?!-'"
    words = ["the", "cat", "sat", "on", "mat", "dog", "ran", "red", "blue", "is", "was", "and", "##s", "##ing", "##ed"]
    tokens = [*BERT_SPECIALS, *letters, *("##" + c for c in letters[:36]), *words]
    tokens = list(dict.fromkeys(tokens))[:vocab]
    tokens += [f"w{n}" for n in range(vocab - len(tokens))]
    ids = {token: n for n, token in enumerate(tokens)}
    model = {
        "type": "WordPiece",
        "vocab": ids,
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
    }
    normalizer = {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": None,
        "lowercase": True,
    }
    _tokenizer_files(
        folder,
        model=model,
        normalizer=normalizer,
        pre_tokenizer={"type": "BertPreTokenizer"},
        decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
        specials=BERT_SPECIALS,
        template=("[CLS]", "[SEP]"),
        roles=BERT_ROLES,
    )
    return ids


def write_bytelevel_tokenizer(
    folder: Path, vocab: int, specials: Mapping[str, int], *, template: tuple[str, str] | None
) -> dict[str, int]:
    """Write a byte-level BPE tokenizer.json with exactly *vocab* entries (at least 256 + specials + 4 merges)."""
    alphabet = _byte_alphabet()
    merges = [("y", "e"), ("ye", "s"), ("n", "o"), ("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġ", "c"), ("a", "t")]
    tokens = [*specials, *alphabet, *(a + b for a, b in merges)]
    if vocab < len(tokens):
        raise ValueError(f"a byte-level vocabulary needs at least {len(tokens)} entries")
    tokens += [f"<|extra_{n}|>" for n in range(vocab - len(tokens))]
    ids = {token: n for n, token in enumerate(tokens)}
    model = {"type": "BPE", "vocab": ids, "merges": [list(pair) for pair in merges], "byte_fallback": False}
    names = list(specials)
    roles = {"pad_token": names[0], "eos_token": names[-1]}
    if "[CLS]" in specials:
        roles = BERT_ROLES
    _tokenizer_files(
        folder,
        model=model,
        normalizer={"type": "NFC"},
        pre_tokenizer={"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        specials=specials,
        template=template,
        roles=roles,
    )
    return ids


def _byte_alphabet() -> list[str]:
    """Return the 256 characters that stand for bytes in byte-level BPE, in byte order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(spare)) for b in range(256)]


def _tokenizer_files(
    folder: Path,
    *,
    model: dict[str, Any],
    normalizer: dict[str, Any],
    pre_tokenizer: dict[str, Any],
    decoder: dict[str, Any],
    specials: Mapping[str, int],
    template: tuple[str, str] | None,
    roles: Mapping[str, str],
) -> None:
    post: dict[str, Any] | None = None
    if template is not None:
        first, last = template
        special = lambda token, kind: [{"SpecialToken": {"id": token, "type_id": kind}}] if token else []  # noqa: E731
        text = lambda name, kind: [{"Sequence": {"id": name, "type_id": kind}}]  # noqa: E731
        single = special(first, 0) + text("A", 0) + special(last, 0)
        post = {
            "type": "TemplateProcessing",
            "single": single,
            "pair": single + text("B", 1) + special(last, 1),
            "special_tokens": {t: {"id": t, "ids": [specials[t]], "tokens": [t]} for t in template if t},
        }
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": n, "content": t, **plain, "special": True} for t, n in specials.items()]
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": post,
        "decoder": decoder,
        "model": model,
    }
    _json(folder / "tokenizer.json", document)
    _json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **roles})


def _sentence_files(folder: Path, hidden: int, pooling: str, normalize: bool, max_positions: int) -> None:
    """Write what sentence-transformers keeps beside a model: pooling, normalisation, the length limit."""
    kind = "sentence_transformers.models."
    modules = [{"idx": 0, "name": "0", "path": "", "type": kind + "Transformer"}]
    modules.append({"idx": 1, "name": "1", "path": "1_Pooling", "type": kind + "Pooling"})
    if normalize:
        modules.append({"idx": 2, "name": "2", "path": "2_Normalize", "type": kind + "Normalize"})
    (folder / "modules.json").write_text(json.dumps(modules, indent=2))
    modes = {"mean": "mean_tokens", "cls": "cls_token", "lasttoken": "lasttoken"}
    flags = {f"pooling_mode_{flag}": name == pooling for name, flag in modes.items()}
    _json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": hidden, **flags})
    _json(folder / "sentence_bert_config.json", {"max_seq_length": max_positions, "do_lower_case": False})


def _finish(
    folder: Path,
    family: Family,
    task: Task,
    config: dict[str, Any],
    *,
    seed: int,
    dtype: str,
    shards: int,
    prefix: Callable[[str], str] | None,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if task == "rerank" and family != "qwen3":
        config = {**config, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    config = {**config, "dtype": dtype}
    _json(folder / "config.json", config)
    full = complete_config(config, family, where="toy")
    weights = random_weights(layout.required(family, task, full), seed)
    stored = {(prefix(name) if prefix else name): array for name, array in weights.items()}
    if shards == 1:
        safetensors.write(folder / "model.safetensors", stored, metadata={"format": "pt"}, dtype=DTYPES[dtype])
        return
    names = list(stored)
    weight_map: dict[str, str] = {}
    for n in range(shards):
        part = names[n::shards]
        file = f"model-{n + 1:05d}-of-{shards:05d}.safetensors"
        safetensors.write(folder / file, {k: stored[k] for k in part}, metadata={"format": "pt"}, dtype=DTYPES[dtype])
        weight_map |= dict.fromkeys(part, file)
    total = sum(array.nbytes for array in stored.values())
    _json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _json(file: Path, value: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")


TOYS: dict[str, Callable[[Path], Path]] = {
    "bert": write_bert,
    "bert-rerank": lambda folder: write_bert(folder, cross_encoder=True),
    "roberta": lambda folder: write_relative(folder, "xlm-roberta"),
    "roberta-rerank": lambda folder: write_relative(folder, "roberta", cross_encoder=True),
    "distilbert": lambda folder: write_relative(folder, "distilbert"),
    "modernbert": write_modernbert,
    "modernbert-rerank": lambda folder: write_modernbert(folder, rerank=True),
    "modernbert-rerank-cls": lambda folder: write_modernbert(folder, rerank=True, classifier_pooling="cls"),
    "qwen3": write_qwen3,
    "qwen3-rerank": lambda folder: write_qwen3(folder, rerank=True),
    "qwen3-generate": lambda folder: write_qwen3(folder, generate=True),
    "qwen2": lambda folder: write_qwen3(folder, family="qwen2"),
    "qwen2-generate": lambda folder: write_qwen3(folder, family="qwen2", generate=True),
    "llama-generate": write_llama,
    "mistral-generate": lambda folder: write_llama(folder, family="mistral"),
}
"""The toys that tests/goldens/toys.npz holds reference outputs for."""


if __name__ == "__main__":
    for toy_name, write_toy in TOYS.items():
        write_toy(Path(sys.argv[1]) / toy_name)
