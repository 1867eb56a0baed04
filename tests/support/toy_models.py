"""Small random checkpoints of every family and task, as Hugging Face folders. A seed stands for the weights.

Everything is written with numpy and `tokenizers` alone, and `transformers` loads each folder unchanged
(tests/goldens/make_goldens.py checks it). Weights are scaled so that activations stay near unit size and different
inputs give different outputs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from engines.bundle.manifest import Family, Task
from engines.checkpoint import layout, safetensors
from engines.checkpoint.read import complete_config

BERT_SPECIALS = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
BERT_FRAME = ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")
BERT_ROLES = {f"{name.strip('[]').lower()}_token": name for name in BERT_SPECIALS}
ROBERTA_SPECIALS = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<mask>": 4}
ROBERTA_HEAD = {"classifier.": "classifier.out_proj.", "pooler.": "classifier."}
DISTILBERT = {
    "encoder.layer.": "transformer.layer.",
    "attention.self.query": "attention.q_lin",
    "attention.self.key": "attention.k_lin",
    "attention.self.value": "attention.v_lin",
    "attention.output.dense": "attention.out_lin",
    "attention.output.LayerNorm": "sa_layer_norm",
    "intermediate.dense": "ffn.lin1",
    "output.dense": "ffn.lin2",
    "output.LayerNorm": "output_layer_norm",
}
"""BERT's names -> how transformers stores a RoBERTa's head, and a DistilBERT; replaced in this order."""
ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
SIZES = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "max_positions": "max_position_embeddings",
}
"""What a test may ask for -> its key in config.json. ``seed``, ``dtype`` and ``shards`` go to :func:`_finish`."""
SMALL = {"vocab": 128, "hidden": 64, "layers": 2, "heads": 4, "ffn": 128, "max_positions": 64}


def sized(changes: dict[str, Any], **defaults: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the sizes of a config.json, small unless *changes* or *defaults* say others; and the other changes."""
    sizes = {SIZES[name]: changes.pop(name, size) for name, size in (SMALL | defaults).items()}
    return sizes, changes


def write_bert(
    folder: Path, *, cross_encoder: bool = False, pooling: str = "mean", normalize: bool = True, **changes: Any
) -> Path:
    """Write a BERT embedding model (BertModel) or cross-encoder (BertForSequenceClassification, one logit)."""
    sizes, stored = sized(changes)
    config = {
        "architectures": ["BertForSequenceClassification" if cross_encoder else "BertModel"],
        "model_type": "bert",
        **sizes,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "pad_token_id": 0,
    }
    task: Task = "rerank" if cross_encoder else "embed"
    _finish(folder, "bert", task, config, prefix="bert." if cross_encoder else "", **stored)
    if not cross_encoder:
        sentence_files(folder, config, pooling, normalize)
    write_wordpiece_tokenizer(folder, config["vocab_size"])
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
    write_json(folder / "config.json", config | {"activation_function": f"torch.nn.modules.activation.{activation}"})
    return folder, weight, shift


def write_relative(folder: Path, kind: str, *, cross_encoder: bool = False) -> Path:
    """Write a model that computes what BERT computes, as transformers stores it: ``roberta`` (and the kinds that are
    stored like it) or ``distilbert``.
    """
    sizes, _ = sized({})
    hidden, table = sizes["hidden_size"], sizes["max_position_embeddings"] + 2 * (kind != "distilbert")
    config: dict[str, Any] = {
        "architectures": ["XForSequenceClassification" if cross_encoder else "XModel"],
        "model_type": kind,
        **(ONE_LABEL if cross_encoder else {}),
    }
    full = complete_config({**sizes, "max_position_embeddings": table, "type_vocab_size": 1}, "bert", where="toy")
    weights = random_weights(layout.required("bert", "rerank" if cross_encoder else "embed", full), 0)
    if kind == "distilbert":
        del weights["embeddings.token_type_embeddings.weight"]
        config |= {"pad_token_id": 0, "vocab_size": sizes["vocab_size"], "dim": hidden, "hidden_dim": 128}
        config |= {"n_layers": 2, "n_heads": 4, "max_position_embeddings": table}
        config |= {"activation": "gelu", "sinusoidal_pos_embds": False, "dropout": 0.0, "attention_dropout": 0.0}
        write_model(folder, config, weights, DISTILBERT)
        write_wordpiece_tokenizer(folder, sizes["vocab_size"])
    else:
        if not cross_encoder:  # as published ones have it; it takes no part in an embedding
            weights |= random_weights({"pooler.dense.weight": (hidden, hidden), "pooler.dense.bias": (hidden,)}, 1)
        config |= sizes | {"max_position_embeddings": table}
        config |= {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "hidden_act": "gelu"}
        config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config |= {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
        names, prefix = (ROBERTA_HEAD, "roberta.") if cross_encoder else ({}, "")
        write_model(folder, config, weights, names, prefix=prefix)
        write_unigram_tokenizer(folder, sizes["vocab_size"])
    if not cross_encoder:
        sentence_files(folder, sizes, "mean", True)
    return folder


def write_unigram_tokenizer(folder: Path, vocab: int) -> None:
    """Write a SentencePiece Unigram tokenizer.json as XLM-RoBERTa has it: ``<s> a </s>``, ``<s> a </s></s> b </s>``."""
    pieces = [*ROBERTA_SPECIALS, "\u2581", *(f"\u2581{word}" for word in ("the", "cat", "sat", "on", "mat")), *LETTERS]
    pieces += [f"\u2581w{number}" for number in range(vocab - len(pieces))]
    scored = [(piece, -float(number)) for number, piece in enumerate(pieces)]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=ROBERTA_SPECIALS["<unk>"], byte_fallback=False))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    roles = {"cls": "<s>", "sep": "</s>", "pad": "<pad>", "unk": "<unk>", "mask": "<mask>", "bos": "<s>", "eos": "</s>"}
    named = {f"{role}_token": token for role, token in roles.items()}
    frame = ("<s> $A </s>", "<s> $A </s> </s> $B </s>")
    _save(folder, tokenizer, ROBERTA_SPECIALS, frame, {"tokenizer_class": "XLMRobertaTokenizerFast", **named})


def write_modernbert(
    folder: Path,
    *,
    rerank: bool = False,
    local_attention: int = 16,
    classifier_pooling: str = "mean",
    pooling: str = "cls",
    normalize: bool = True,
    **changes: Any,
) -> Path:
    """Write a ModernBERT embedder (ModernBertModel) or reranker (ModernBertForSequenceClassification, one logit).

    Every third layer is global (layer 0 first), the others see ``local_attention // 2`` tokens to each side.
    """
    sizes, stored = sized(changes, layers=4, ffn=96, vocab=320, max_positions=256)
    config = {
        "architectures": ["ModernBertForSequenceClassification" if rerank else "ModernBertModel"],
        "model_type": "modernbert",
        **sizes,
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
        **{f"{role}_token_id": id for role, id in (("cls", 2), ("bos", 2), ("sep", 3), ("eos", 3))},
    }
    task: Task = "rerank" if rerank else "embed"
    _finish(folder, "modernbert", task, config, prefix="model." if rerank else "", **stored)
    if not rerank:
        sentence_files(folder, config, pooling, normalize)
    write_bytelevel_tokenizer(folder, config["vocab_size"], BERT_SPECIALS, frame=BERT_FRAME)
    return folder


QWEN_SPECIALS = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}


def write_qwen3(
    folder: Path,
    *,
    rerank: bool = False,
    generate: bool = False,
    kv_heads: int = 2,
    head_dim: int = 32,
    normalize: bool = True,
    family: Family = "qwen3",
    **changes: Any,
) -> Path:
    """Write a Qwen3 or Qwen2 embedder (last-token pooling), yes/no reranker or generator (tied)."""
    causal = rerank or generate
    sizes, stored = sized(changes, vocab=320, max_positions=512)
    config: dict[str, Any] = {
        "architectures": [family.title() + ("ForCausalLM" if causal else "Model")],
        "model_type": family,
        **sizes,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
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
    if family == "qwen2":
        del config["attention_bias"]
        config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    _finish(folder, family, task, config, prefix="model." if causal else "", **stored)
    frame = None if causal else ("$A <|endoftext|>", "$A <|endoftext|> $B:1 <|endoftext|>:1")
    ids = write_bytelevel_tokenizer(folder, config["vocab_size"], QWEN_SPECIALS, frame=frame)
    if rerank:
        write_json(folder / "1_LogitScore" / "config.json", {"true_token_id": ids["yes"], "false_token_id": ids["no"]})
    if task == "embed":
        sentence_files(folder, config, "lasttoken", normalize)
    return folder


def write_llama(
    folder: Path, *, kv_heads: int = 2, tied: bool = False, family: Family = "llama", **changes: Any
) -> Path:
    """Write a llama-family generator (LlamaForCausalLM, MistralForCausalLM)."""
    sizes, stored = sized(changes, vocab=320, max_positions=256)
    config = {
        "architectures": [family.title() + "ForCausalLM"],
        "model_type": family,
        **sizes,
        "num_key_value_heads": kv_heads,
        "head_dim": sizes["hidden_size"] // sizes["num_attention_heads"],
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
    _finish(folder, family, "generate", config, prefix="model.", **stored)
    write_bytelevel_tokenizer(folder, config["vocab_size"], QWEN_SPECIALS, frame=None)
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


LETTERS = "etaoinshrdlucmfwypvbgkjqxz0123456789.,?!-'"


def write_wordpiece_tokenizer(folder: Path, vocab: int) -> dict[str, int]:
    """Write a WordPiece tokenizer.json with exactly *vocab* entries: specials, letters, continuations, a few words."""
    words = ["the", "cat", "sat", "on", "mat", "dog", "ran", "red", "blue", "is", "was", "and", "##s", "##ing", "##ed"]
    tokens = [*BERT_SPECIALS, *LETTERS, *("##" + c for c in LETTERS[:36]), *words]
    tokens = list(dict.fromkeys(tokens))[:vocab]
    tokens += [f"w{n}" for n in range(vocab - len(tokens))]
    ids = {token: n for n, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    _save(folder, tokenizer, BERT_SPECIALS, BERT_FRAME, BERT_ROLES)
    return ids


def write_bytelevel_tokenizer(
    folder: Path, vocab: int, specials: Mapping[str, int], *, frame: tuple[str, str] | None
) -> dict[str, int]:
    """Write a byte-level BPE tokenizer.json with exactly *vocab* entries (at least 256 + specials + 8 merges)."""
    merges = [("y", "e"), ("ye", "s"), ("n", "o"), ("t", "h"), ("th", "e")]
    merges += [("\u0120", "the"), ("\u0120", "c"), ("a", "t")]
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = iter(range(256, 512))
    alphabet = [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]
    tokens = [*specials, *alphabet, *(a + b for a, b in merges)]
    assert vocab >= len(tokens)
    tokens += [f"<|extra_{n}|>" for n in range(vocab - len(tokens))]
    ids = {token: n for n, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(ids, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = list(specials)
    roles = BERT_ROLES if "[CLS]" in specials else {"pad_token": names[0], "eos_token": names[-1]}
    _save(folder, tokenizer, specials, frame, roles)
    return ids


def _save(
    folder: Path,
    tokenizer: Tokenizer,
    specials: Mapping[str, int],
    frame: tuple[str, str] | None,
    config: Mapping[str, str],
) -> None:
    """Write a tokenizer with its special tokens; *frame*: what is put around a text, and around a pair."""
    tokenizer.add_special_tokens(list(specials))
    if frame is not None:
        used = [(token, id) for token, id in specials.items() if token in frame[0]]
        tokenizer.post_processor = processors.TemplateProcessing(single=frame[0], pair=frame[1], special_tokens=used)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **config})


def sentence_files(folder: Path, config: Mapping[str, Any], pooling: str, normalize: bool, *, dense: int = 0) -> None:
    """Write what sentence-transformers keeps beside a model: pooling, *dense* layers, normalisation, the limit."""
    kinds = ["Transformer", "Pooling", *["Dense"] * dense, *["Normalize"] * normalize]
    modules = [
        {"idx": n, "name": str(n), "path": f"{n}_{kind}" if n else "", "type": f"sentence_transformers.models.{kind}"}
        for n, kind in enumerate(kinds)
    ]
    write_json(folder / "modules.json", modules)
    modes = {"mean": "mean_tokens", "cls": "cls_token", "lasttoken": "lasttoken"}
    flags = {f"pooling_mode_{flag}": name == pooling for name, flag in modes.items()}
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": config["hidden_size"], **flags})
    longest = config["max_position_embeddings"]
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": longest, "do_lower_case": False})


def _finish(
    folder: Path,
    family: Family,
    task: Task,
    config: dict[str, Any],
    *,
    prefix: str,
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 1,
) -> None:
    if task == "rerank" and family != "qwen3":
        config = {**config, **ONE_LABEL}
    full = complete_config(config, family, where="toy")
    weights = random_weights(layout.required(family, task, full), seed)
    write_model(folder, {**config, "dtype": dtype}, weights, prefix=prefix, dtype=dtype, shards=shards)


def write_model(
    folder: Path,
    config: dict[str, Any],
    weights: Mapping[str, np.ndarray],
    names: Mapping[str, str] = {},
    *,
    prefix: str = "",
    dtype: str = "float32",
    shards: int = 1,
) -> None:
    """Write config.json and the weights: *names* replaced in each one's, all but a head's behind *prefix*."""
    write_json(folder / "config.json", config)
    stored = {}
    for name, array in weights.items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        stored[name if name.startswith(("classifier", "head.", "lm_head")) else prefix + name] = array
    parts = [list(stored)[n::shards] for n in range(shards)]
    files = ["model.safetensors"] if shards == 1 else [f"model-{n}-of-{shards}.safetensors" for n in range(shards)]
    for file, part in zip(files, parts, strict=True):
        own = {name: stored[name] for name in part}
        safetensors.write(folder / file, own, metadata={"format": "pt"}, dtype=DTYPES[dtype])
    if shards > 1:
        weight_map = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})


def write_json(file: Path, value: Any) -> None:
    """Write a JSON file, in a folder that is made for it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")


def edit(file: Path, **changes: Any) -> Path:
    """Change keys of a JSON object; one that is None stays as null. Return the folder."""
    write_json(file, {**json.loads(file.read_text("utf-8")), **changes})
    return file.parent


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
