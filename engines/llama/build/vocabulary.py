"""A checkpoint's vocabulary into a GGUF: byte-level BPE and SentencePiece's BPE. The way back: ``tokenizer``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from engines.bundle.manifest import BundleError
from engines.checkpoint.read import read_json

# llama.cpp's token types.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

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
