"""Vocabularies between GGUF metadata and a tokenizer.json: byte-level BPE both ways, SentencePiece BPE into a GGUF.

Recipe of the tokenizer.json (models.md, rulings): BPE(tokens, merges); pre-tokenizer Sequence[Digits(one at a time),
ByteLevel(no prefix space, own regular expression)]; ByteLevel decoder; tokens of type 3 are special.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from engines.bundle.manifest import BundleError
from engines.checkpoint.read import read_json

# llama.cpp's token types.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

#: Pre-tokenizers of the GGUF family whose Hugging Face form is the recipe above.
_KNOWN_PRE: Final = ("smollm",)
_BYTE: Final = re.compile(r"<0x[0-9A-F]{2}>")


def write_bpe(writer: Any, tokenizer: Path, vocab_size: int) -> None:
    """Write a generator's tokens, merges and token types into a GGUF from its tokenizer.json.

    Rows of the embedding beyond the tokenizer's entries are written as unused. The pre-tokenizer's name stays
    ``default``: text is tokenised outside the worker, which only ever turns ids into text. What a token's text means
    follows from the tokenizer's own fields: bytes in GPT-2's alphabet, or SentencePiece's words with ``▁`` for a space
    and ``<0x0A>`` for a byte. Raises BundleError for any other kind.
    """
    conf = read_json(tokenizer)
    model = conf.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE" or not isinstance(model.get("vocab"), dict):
        kind = model.get("type") if isinstance(model, dict) else model
        raise BundleError(
            f"{tokenizer}: a generator needs a BPE tokenizer (byte-level or SentencePiece), this one is {kind!r}"
        )
    byte_level = _mentions(conf.get("decoder"), "ByteLevel")
    if not byte_level and not _mentions(conf.get("decoder"), "ByteFallback"):
        raise BundleError(
            f"{tokenizer}: its decoder is neither ByteLevel nor ByteFallback, so what its tokens spell isn't known here"
        )
    tokens = [f"[UNUSED{n}]" for n in range(vocab_size)]
    types = [UNUSED] * vocab_size
    entries = [(text, n, NORMAL) for text, n in model["vocab"].items()]
    for token in conf.get("added_tokens") or []:
        entries.append((token["content"], token["id"], CONTROL if token.get("special") else USER_DEFINED))
    for text, n, kind in entries:
        if type(n) is not int or not 0 <= n < vocab_size:
            raise BundleError(f"{tokenizer}: token {text!r} has id {n}, config.json has {vocab_size} rows")
        tokens[n], types[n] = text, kind
    if not byte_level:
        _write_sentencepiece(writer, tokens, types, unknown=model.get("unk_token"))
        return
    merges = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges") or []]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges or ["a b"])  # the loader wants the key, and an empty array has no type


def _write_sentencepiece(writer: Any, tokens: list[str], types: list[int], *, unknown: Any) -> None:
    """Write tokens as llama.cpp's SentencePiece kind; scores only order merges, which happen outside the worker."""
    for n, text in enumerate(tokens):
        if types[n] == NORMAL and _BYTE.fullmatch(text):
            types[n] = BYTE
        elif text == unknown:
            types[n] = UNKNOWN
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(n) for n in range(len(tokens))])
    writer.add_token_types(types)


def _mentions(part: Any, kind: str) -> bool:
    """Whether a tokenizer's component is *kind*, or a sequence that holds one."""
    if not isinstance(part, dict):
        return False
    inner = [*(part.get("decoders") or []), *(part.get("pretokenizers") or [])]
    return part.get("type") == kind or any(_mentions(item, kind) for item in inner)


def write_tokenizer(source: Path, out: Path, *, progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
    """Write a tokenizer.json from a GGUF's vocabulary; return what the file says about the model.

    The returned object: architecture, special_ids, chat_template, and config (the header's own numbers).
    Raises BundleError where the vocabulary isn't the kind whose recipe is known.
    """
    import gguf

    try:
        reader = gguf.GGUFReader(source, "r")
    except (ValueError, OSError) as exc:
        raise BundleError(f"{source}: not a readable GGUF: {exc}") from exc

    def value(key: str, default: Any = None) -> Any:
        field = reader.get_field(key)
        return default if field is None else field.contents()

    model, pre = value("tokenizer.ggml.model"), value("tokenizer.ggml.pre")
    if model != "gpt2" or pre not in _KNOWN_PRE:
        raise BundleError(
            f"{source}: tokenizer {model!r}/{pre!r}: only 'gpt2' with {', '.join(_KNOWN_PRE)} is known here"
        )
    tokens, merges, types = (value(f"tokenizer.ggml.{key}", []) for key in ("tokens", "merges", "token_type"))
    if len(set(tokens)) != len(tokens) or len(types) != len(tokens):
        raise BundleError(f"{source}: {len(tokens)} tokens, {len(set(tokens))} different, {len(types)} types")
    if progress is not None:
        progress(1, 2)
    document = tokenizer_document(tokens, merges, [n for n, kind in enumerate(types) if kind == CONTROL])
    out.write_text(json.dumps(document, ensure_ascii=False, indent=1), encoding="utf-8")
    if progress is not None:
        progress(2, 2)
    architecture = value("general.architecture")
    ids = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    numbers = {
        role: value(f"tokenizer.ggml.{key}_token_id")
        for role, key in ids.items()
        if reader.get_field(f"tokenizer.ggml.{key}_token_id") is not None
    }
    hyper = {
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "block_count": "num_hidden_layers",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
    }
    config = {name: value(f"{architecture}.{key}") for key, name in hyper.items()}
    return {
        "architecture": architecture,
        "special_ids": numbers,
        "chat_template": value("tokenizer.chat_template"),
        "config": {**config, "vocab_size": len(tokens), "model_type": architecture},
    }


def tokenizer_document(tokens: list[str], merges: list[str], special: list[int]) -> dict[str, Any]:
    """Return the tokenizer.json object for a byte-level BPE vocabulary with single-digit splitting."""
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": n, "content": tokens[n], **dict.fromkeys(flags, False), "special": True} for n in special
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            **dict.fromkeys(("unk_token", "continuing_subword_prefix", "end_of_word_suffix"), None),
            **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
            "vocab": {token: n for n, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }
