"""tokenizer.json of the kinds that models have gives the same ids as before; what can hurt the host is refused."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from engines.bundle.manifest import Bundle
from synapse_host.text.tokenizer_file import MAX_BYTES, sanitized
from tests.support import toy_models
from tests.text.test_split_pattern import REAL

TEXTS = ["Hello World, naïve café!", "don't  stop\n\n 12345", "日本語 текст 🙂", "<s>", "   ", "a" * 300, "the cat w3"]
CHARACTERS = base64.b64encode(struct.pack("<I", 1024) + bytes(1024) + "ﷺ\0ab\0".encode()).decode()
"""A map of no character, as SentencePiece lays it out: the size of the index, the index, the texts."""


def wordpiece(folder: Path) -> None:
    toy_models.write_wordpiece_tokenizer(folder, 128)


def unigram(folder: Path) -> None:
    toy_models.write_unigram_tokenizer(folder, 128)


def byte_level(folder: Path) -> None:
    toy_models.write_bytelevel_tokenizer(folder, 320, toy_models.QWEN_SPECIALS, frame=None)


def in_a_frame(folder: Path) -> None:
    toy_models.write_bytelevel_tokenizer(folder, 320, toy_models.BERT_SPECIALS, frame=toy_models.BERT_FRAME)


def sequence(kind: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: list(parts)}


def split(pattern: str) -> dict[str, Any]:
    parts = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"pre_tokenizer": sequence("pretokenizers", parts, BYTES)}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), "▁", *"Helowrd", "▁H", "el"]
SENTENCEPIECE = {
    "type": "BPE", "vocab": {piece: id for id, piece in enumerate(PIECES)}, "merges": [["▁", "H"], ["e", "l"]],
    "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True,
}  # fmt: skip
PADDING = {"strategy": {"Fixed": 128}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
KINDS: dict[str, tuple[Callable[[Path], None], dict[str, Any]]] = {
    "WordPiece (MiniLM, ms-marco, bge)": (wordpiece, {
        "padding": {**PADDING, "pad_type_id": 0, "pad_token": "[PAD]"},
        "truncation": {"direction": "Right", "max_length": 128, "strategy": "LongestFirst", "stride": 0},
    }),
    "byte-level BPE (SmolLM2, GPT-2)": (byte_level, {
        "pre_tokenizer": sequence("pretokenizers", {"type": "Digits", "individual_digits": True}, BYTES),
        "post_processor": BYTES,
    }),
    "byte-level BPE with a pattern (Qwen3)": (byte_level, split(REAL["qwen"])),
    "byte-level BPE with a pattern (Llama 3)": (byte_level, split(REAL["llama 3"])),
    "byte-level BPE in a frame (ModernBERT)": (in_a_frame, {}),
    "byte-level BPE in a frame (RoBERTa)": (in_a_frame, {
        "post_processor": {"type": "RobertaProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2],
                           "trim_offsets": True, "add_prefix_space": False},
    }),
    "SentencePiece BPE with bytes (Llama 2, Gemma)": (unigram, {
        "model": SENTENCEPIECE, "added_tokens": [],
        "normalizer": sequence("normalizers", {"type": "Prepend", "prepend": "▁"}, SPACES), "pre_tokenizer": None,
    }),
    "Unigram (XLM-R, T5)": (unigram, {
        "normalizer": sequence(
            "normalizers", {"type": "Precompiled", "precompiled_charsmap": CHARACTERS},
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
        ),
    }),
    "the older words of SentencePiece's spaces": (unigram, {
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "str_rep": "▁", "add_prefix_space": True},
    }),
}  # fmt: skip


def same(data: bytes) -> None:
    before, after = Tokenizer.from_buffer(data), Tokenizer.from_buffer(sanitized(data))
    before.no_padding()
    before.no_truncation()
    for tokenizer in (before, after):
        tokenizer.encode_special_tokens = True
    for text in TEXTS:
        for pair in (None, "b"):
            assert after.encode(text, pair).ids == before.encode(text, pair).ids
    assert after.padding is None and after.truncation is None


@pytest.mark.parametrize(("write", "parts"), KINDS.values(), ids=KINDS)
def test_the_kinds_of_published_models_give_the_ids_they_gave(
    tmp_path: Path, write: Callable[[Path], None], parts: dict[str, Any]
) -> None:
    write(tmp_path)
    document = {**json.loads((tmp_path / "tokenizer.json").read_text()), **parts}
    same(json.dumps(document).encode())
    del document["model"]["type"]  # as files of before 2021
    same(json.dumps(document).encode())


@pytest.mark.parametrize("name", ["minilm", "ms-marco", "smollm2"])
def test_the_default_models_give_the_ids_they_gave(name: str, default_bundle: Callable[[str], Bundle]) -> None:
    same(default_bundle(name).path("tokenizer.json").read_bytes())


def words(**changes: Any) -> dict[str, Any]:
    return {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]", **changes}


def replaced(*pairs: tuple[str, str], kind: str = "String") -> dict[str, Any]:
    parts = [{"type": "Replace", "pattern": {kind: old}, "content": new} for old, new in pairs]
    return {"type": "Sequence", "normalizers": parts}


def charsmap(data: bytes) -> dict[str, Any]:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def template(ids: list[int]) -> dict[str, Any]:
    slots = [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokens = {"x": {"id": "x", "ids": ids, "tokens": ["x"] * len(ids)}}
    return {"type": "TemplateProcessing", "single": slots, "pair": slots, "special_tokens": tokens}


def nested(levels: int) -> bytes:
    normalizer = '{"type": "Sequence", "normalizers": [' * levels + '{"type": "NFC"}' + "]}" * levels
    return f'{{"model": {json.dumps(words())}, "normalizer": {normalizer}}}'.encode()


WORD_PIECES = {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a", "continuing_subword_prefix": "##"}
SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an id beyond any vocabulary": ({"model": words(vocab={"a": 2**31, "[UNK]": 1})}, "1048575"),
    "a negative id": ({"model": words(vocab={"a": -1, "[UNK]": 1})}, ">= 0"),
    "an added token's id": ({"added_tokens": [{"id": 2**31, "content": "b"}]}, "1048575"),
    "a word without limit": ({"model": {**WORD_PIECES, "max_input_chars_per_word": 10**9}}, "256"),
    "a huge token": ({"model": words(vocab={"a" * 5000: 0, "[UNK]": 1})}, "1024"),
    "no unknown word": ({"model": words(unk_token="none")}, "'none' is not in the vocabulary"),
    "no unknown piece": ({"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": None}}, "unk_id"),
    "an unknown piece outside": ({"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 1}}, "unk_id 1"),
    "a long piece to try everywhere": (
        {"model": {"type": "Unigram", "vocab": [["a" * 129, 0.0]], "unk_id": 0}}, "length <= 128"),
    "dropout": ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "dropout": 0.1}}, "dropout"),
    "another model": ({"model": {"type": "Neural", "vocab": {}}}, "Neural"),
    "a field that nobody knows": ({"model": words(surprise=1)}, "surprise"),
    "another normalizer": ({"normalizer": {"type": "Exec"}}, "Exec"),
    "replacements that double": ({"normalizer": replaced(*[("a", "aa")] * 5)}, "lengthen a text"),
    "replacements of one letter by many": ({"normalizer": replaced(("a", "a" * 16), ("a", "a" * 16))}, "lengthen"),
    "a long replacement": ({"normalizer": replaced(("a", "b" * 100))}, "length <= 16"),
    "a replacement of nothing": ({"normalizer": replaced(("", "b"))}, "length >= 1"),
    "a replacement of a pattern for nothing": ({"normalizer": replaced(("a*", "b"), kind="Regex")}, "match nothing"),
    "bytes of bytes of bytes": (
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 5}}, "lengthen a text"),
    "many components": ({"normalizer": replaced(*[("a", "b")] * 17)}, "length <= 16"),
    "a pattern that backtracks": ({"pre_tokenizer": SPLIT}, "of no known kind"),
    "a pattern of two": (
        {"pre_tokenizer": {**SPLIT, "pattern": {"Regex": "a", "String": "a"}}}, "either String or Regex"),
    "many ids in a template": ({"post_processor": template([1] * 1000)}, "length <= 16"),
    "a special id beyond any vocabulary": ({"post_processor": template([2**40])}, "1048575"),
    "a map that isn't there": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": None}}, "charsmap"),
    "a map that is left out": ({"normalizer": {"type": "Precompiled"}}, "character map is damaged"),
    "no map of characters": ({"normalizer": charsmap(b"abc")}, "character map is damaged"),
    "a map with an index beyond its end": ({"normalizer": charsmap(b"\xff\xff\xff\x7f" + bytes(8))}, "damaged"),
    "a map that isn't text": ({"normalizer": charsmap(struct.pack("<I", 4) + bytes(4) + b"\xff\xfe")}, "damaged"),
    "a map that writes much": (
        {"normalizer": charsmap(struct.pack("<I", 4) + bytes(4) + b"x" * 1000 + b"\0")}, "writes 1000 bytes"),
}  # fmt: skip


@pytest.mark.parametrize(("parts", "words_"), REFUSED.values(), ids=REFUSED)
def test_what_can_hurt_the_host_is_refused_with_its_reason(parts: dict[str, Any], words_: str) -> None:
    with pytest.raises(ValueError, match=words_):
        sanitized(json.dumps({"model": words(), **parts}).encode())


def test_what_published_models_have_is_within_the_bounds() -> None:
    """Gemma 3's file has 33 MB, and no chain has as many as 48 components."""
    assert MAX_BYTES > 33_000_000
    sanitized(nested(47))
    for levels, said in ((48, "more than 48 components"), (5000, "nested too deeply")):
        with pytest.raises(ValueError, match=said):
            sanitized(nested(levels))


def test_of_a_key_that_occurs_twice_the_library_sees_what_was_checked() -> None:
    data = b'{"model": {"type": "BPE"}, "model": ' + json.dumps(words()).encode() + b', "surprise": [1], "decoder": 5}'
    assert json.loads(sanitized(data))["model"] == words()
