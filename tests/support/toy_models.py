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


def _sized(changes: dict[str, Any], **defaults: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the sizes of a config.json, small unless *changes* or *defaults* say others; and the other changes."""
    sizes = {SIZES[name]: changes.pop(name, size) for name, size in (SMALL | defaults).items()}
    return sizes, changes


def write_bert(
    folder: Path, *, cross_encoder: bool = False, pooling: str = "mean", normalize: bool = True, **changes: Any
) -> Path:
    """Write a BERT embedding model (BertModel) or cross-encoder (BertForSequenceClassification, one logit)."""
    sizes, stored = _sized(changes)
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
    prefix = (lambda name: name if name.startswith("classifier") else "bert." + name) if cross_encoder else None
    _finish(folder, "bert", task, config, prefix=prefix, **stored)
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
    _json(folder / "config.json", config | {"activation_function": f"torch.nn.modules.activation.{activation}"})
    return folder, weight, shift


DISTILBERT = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
DISTILBERT |= {"intermediate_size": "hidden_dim"}


def write_relative(folder: Path, kind: str, *, cross_encoder: bool = False, seed: int = 0, **changes: Any) -> Path:
    """Write a model that computes what BERT computes, as transformers stores it: ``roberta`` (and the kinds that are
    stored like it) or ``distilbert``.
    """
    like_roberta = kind != "distilbert"
    sizes, rest = _sized(changes)
    assert not rest
    positions = sizes["max_position_embeddings"]
    sizes["max_position_embeddings"] += 2 if like_roberta else 0
    config: dict[str, Any] = {
        "architectures": ["XForSequenceClassification" if cross_encoder else "XModel"],
        "model_type": kind,
        "pad_token_id": 1 if like_roberta else 0,
    }
    if like_roberta:
        config |= sizes | {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "hidden_act": "gelu"}
        config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config |= {"bos_token_id": 0, "eos_token_id": 2}
    else:
        config |= {DISTILBERT.get(name, name): size for name, size in sizes.items()}
        config |= {"activation": "gelu", "sinusoidal_pos_embds": False, "dropout": 0.0, "attention_dropout": 0.0}
    if cross_encoder:
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    _json(folder / "config.json", config)
    task: Task = "rerank" if cross_encoder else "embed"
    full = complete_config({**sizes, "type_vocab_size": 1}, "bert", where="toy")
    weights = random_weights(layout.required("bert", task, full), seed)
    if not like_roberta:
        weights.pop("embeddings.token_type_embeddings.weight")
    if like_roberta and not cross_encoder:  # as published ones have it; it takes no part in an embedding
        hidden = sizes["hidden_size"]
        weights |= random_weights({"pooler.dense.weight": (hidden, hidden), "pooler.dense.bias": (hidden,)}, seed + 1)
    stored = {_name_of_relative(name, like_roberta, cross_encoder): array for name, array in weights.items()}
    safetensors.write(folder / "model.safetensors", stored, metadata={"format": "pt"}, dtype="F32")
    if not cross_encoder:
        sentence_files(folder, {**sizes, "max_position_embeddings": positions}, "mean", True)
    if like_roberta:
        specials = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<mask>": 4}
        write_unigram_tokenizer(folder, sizes["vocab_size"], specials)
    else:
        write_wordpiece_tokenizer(folder, sizes["vocab_size"])
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
    pieces = [*specials, "\u2581", *(f"\u2581{word}" for word in ("the", "cat", "sat", "on", "mat")), *LETTERS]
    pieces += [f"\u2581w{number}" for number in range(vocab - len(pieces))]
    scored = [(piece, -float(number)) for number, piece in enumerate(pieces)]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=specials["<unk>"], byte_fallback=False))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    roles = {"cls": "<s>", "sep": "</s>", "pad": "<pad>", "unk": "<unk>", "mask": "<mask>", "bos": "<s>", "eos": "</s>"}
    named = {f"{role}_token": token for role, token in roles.items()}
    frame = ("<s> $A </s>", "<s> $A </s> </s> $B </s>")
    _save(folder, tokenizer, specials, frame, {"tokenizer_class": "XLMRobertaTokenizerFast", **named})


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
    sizes, stored = _sized(changes, layers=4, ffn=96, vocab=320, max_positions=256)
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
    own = ("head.", "classifier.")
    prefix = (lambda name: name if name.startswith(own) else "model." + name) if rerank else None
    _finish(folder, "modernbert", task, config, prefix=prefix, **stored)
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
    sizes, stored = _sized(changes, vocab=320, max_positions=512)
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
    prefix = (lambda name: "model." + name) if causal else None
    if family == "qwen2":
        del config["attention_bias"]
        config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    _finish(folder, family, task, config, prefix=prefix, **stored)
    frame = None if causal else ("$A <|endoftext|>", "$A <|endoftext|> $B:1 <|endoftext|>:1")
    ids = write_bytelevel_tokenizer(folder, config["vocab_size"], QWEN_SPECIALS, frame=frame)
    if rerank:
        _json(folder / "1_LogitScore" / "config.json", {"true_token_id": ids["yes"], "false_token_id": ids["no"]})
    if task == "embed":
        sentence_files(folder, config, "lasttoken", normalize)
    return folder


def write_llama(
    folder: Path, *, kv_heads: int = 2, tied: bool = False, family: Family = "llama", **changes: Any
) -> Path:
    """Write a llama-family generator (LlamaForCausalLM, MistralForCausalLM)."""
    sizes, stored = _sized(changes, vocab=320, max_positions=256)
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
    prefix = lambda name: name if name.startswith("lm_head") else "model." + name  # noqa: E731
    _finish(folder, family, "generate", config, prefix=prefix, **stored)
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
    merges = [
        ("y", "e"),
        ("ye", "s"),
        ("n", "o"),
        ("t", "h"),
        ("th", "e"),
        ("\u0120", "the"),
        ("\u0120", "c"),
        ("a", "t"),
    ]
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
    _json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **config})


def sentence_files(folder: Path, config: Mapping[str, Any], pooling: str, normalize: bool) -> None:
    """Write what sentence-transformers keeps beside a model: pooling, normalisation, the length limit."""
    kind = "sentence_transformers.models."
    modules = [{"idx": 0, "name": "0", "path": "", "type": kind + "Transformer"}]
    modules.append({"idx": 1, "name": "1", "path": "1_Pooling", "type": kind + "Pooling"})
    if normalize:
        modules.append({"idx": 2, "name": "2", "path": "2_Normalize", "type": kind + "Normalize"})
    (folder / "modules.json").write_text(json.dumps(modules, indent=2))
    modes = {"mean": "mean_tokens", "cls": "cls_token", "lasttoken": "lasttoken"}
    flags = {f"pooling_mode_{flag}": name == pooling for name, flag in modes.items()}
    _json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": config["hidden_size"], **flags})
    longest = config["max_position_embeddings"]
    _json(folder / "sentence_bert_config.json", {"max_seq_length": longest, "do_lower_case": False})


def _finish(
    folder: Path,
    family: Family,
    task: Task,
    config: dict[str, Any],
    *,
    prefix: Callable[[str], str] | None,
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 1,
) -> None:
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
