"""tokenizer.json of the kinds that models have gives the same ids as before; what can hurt the host is refused."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from engines.bundle.manifest import Bundle
from synapse_host.text.tokenizer_file import MAX_BYTES, sanitized
from tests.text.test_split_pattern import REAL

TEXTS = ["Hello World, naïve café!", "don't  stop\n\n 12345", "日本語 текст 🙂", "<s>", "   ", "a" * 300]
CHARACTERS = struct.pack("<I", 1024) + bytes(1024) + "ﷺ\0ab\0".encode()
"""A map of no character, as SentencePiece lays it out: the size of the index, the index, the texts."""


def bert() -> Tokenizer:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz!,'", "hello", "world", "##s"]
    words += [f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"]
    made = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    made.enable_padding(length=128)
    made.enable_truncation(128)
    return made


def byte_level(pattern: str | None = None, *, normalizer: Any = None) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {c: i for i, c in enumerate(alphabet)} | {"he": 256, "ll": 257, "hell": 258, "Ġw": 259, "ĠĠ": 260}
    made = Tokenizer(models.BPE(words, [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"), ("Ġ", "Ġ")]))
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    split = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else [pre_tokenizers.Digits(True)]
    made.pre_tokenizer = pre_tokenizers.Sequence([*split, bytes_])
    made.normalizer = normalizer
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.add_tokens([AddedToken("<think>", normalized=False), AddedToken("   ", normalized=True)])
    return made


def modernbert() -> Tokenizer:
    made = byte_level(normalizer=normalizers.NFC())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 261), ("[SEP]", 262)]
    )
    return made


def roberta() -> Tokenizer:
    made = byte_level()
    made.post_processor = processors.RobertaProcessing(("<|im_end|>", 262), ("<|im_start|>", 261))
    return made


def llama2() -> Tokenizer:
    words = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), "▁", *"Helowrd", "▁H", "el"]
    made = Tokenizer(
        models.BPE(
            {w: i for i, w in enumerate(words)}, [("▁", "H"), ("e", "l")], unk_token="<unk>", fuse_unk=True,
            byte_fallback=True,
        )
    )  # fmt: skip
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


def unigram() -> Tokenizer:
    words = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.5), ("▁Hello", -8.123456789012345)]
    made = Tokenizer(models.Unigram([*words, *((c, -3.0 - n / 7) for n, c in enumerate("Wordl!,aéf"))], 3, False))
    made.normalizer = normalizers.Sequence(
        [normalizers.Precompiled(CHARACTERS), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")]
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return made


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "WordPiece (MiniLM, ms-marco, bge)": bert,
    "byte-level BPE (SmolLM2, GPT-2)": byte_level,
    "byte-level BPE with a pattern (Qwen3)": lambda: byte_level(REAL["qwen"], normalizer=normalizers.NFC()),
    "byte-level BPE with a pattern (Llama 3)": lambda: byte_level(REAL["llama 3"]),
    "byte-level BPE in a frame (ModernBERT)": modernbert,
    "byte-level BPE in a frame (RoBERTa)": roberta,
    "SentencePiece BPE with bytes (Llama 2, Gemma)": llama2,
    "Unigram (XLM-R, T5)": unigram,
}


def same(original: str | bytes) -> None:
    data = original.encode() if isinstance(original, str) else original
    before, after = Tokenizer.from_buffer(data), Tokenizer.from_buffer(sanitized(data))
    before.no_padding()
    before.no_truncation()
    for tokenizer in (before, after):
        tokenizer.encode_special_tokens = True
    for text in TEXTS:
        for pair in (None, "b"):
            assert after.encode(text, pair).ids == before.encode(text, pair).ids
    assert after.padding is None and after.truncation is None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_the_kinds_of_published_models_give_the_ids_they_gave(make: Callable[[], Tokenizer]) -> None:
    same(make().to_str())


def test_the_older_words_of_sentencepiece_s_spaces() -> None:
    document = json.loads(unigram().to_str())
    document["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "str_rep": "▁", "add_prefix_space": True}
    same(json.dumps(document))


@pytest.mark.parametrize("make", [bert, byte_level, unigram])
def test_files_of_before_2021_name_no_type_of_model(make: Callable[[], Tokenizer]) -> None:
    document = json.loads(make().to_str())
    del document["model"]["type"]
    same(json.dumps(document))


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


def nested(levels: int) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "NFC"}
    for _ in range(levels):
        part = {"type": "Sequence", "normalizers": [part]}
    return part


PIECES = {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a", "continuing_subword_prefix": "##"}
SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an id beyond any vocabulary": ({"model": words(vocab={"a": 2**31, "[UNK]": 1})}, "1048575"),
    "a negative id": ({"model": words(vocab={"a": -1, "[UNK]": 1})}, ">= 0"),
    "an added token's id": ({"added_tokens": [{"id": 2**31, "content": "b"}]}, "1048575"),
    "a word without limit": ({"model": {**PIECES, "max_input_chars_per_word": 10**9}}, "256"),
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
    "components in components": ({"normalizer": nested(60)}, "more than 48 components"),
    "components without end": ({"normalizer": nested(5000)}, "nested too deeply"),
}  # fmt: skip


@pytest.mark.parametrize(("parts", "words_"), REFUSED.values(), ids=REFUSED)
def test_what_can_hurt_the_host_is_refused_with_its_reason(parts: dict[str, Any], words_: str) -> None:
    sanitized(json.dumps({"model": words()}).encode())
    text = json.dumps({"model": words(), **{name: part for name, part in parts.items() if name != "normalizer"}})
    if "normalizer" in parts:
        # By hand: json's own writer doesn't nest as deep.
        text = text[:-1] + ', "normalizer": ' + deep(parts["normalizer"]) + "}"
    with pytest.raises(ValueError, match=words_):
        sanitized(text.encode())


def test_what_published_models_have_is_within_the_bounds() -> None:
    """Gemma 3's file has 33 MB, and no chain has as many as 48 components."""
    assert MAX_BYTES > 33_000_000
    sanitized(json.dumps({"model": words(), "normalizer": nested(47)}).encode())


def deep(part: dict[str, Any]) -> str:
    opening = closing = ""
    while part.get("type") == "Sequence" and len(part["normalizers"]) == 1:
        opening, closing = opening + '{"type": "Sequence", "normalizers": [', "]}" + closing
        part = part["normalizers"][0]
    return opening + json.dumps(part) + closing


def test_of_a_key_that_occurs_twice_the_library_sees_what_was_checked() -> None:
    data = b'{"model": {"type": "BPE"}, "model": ' + json.dumps(words()).encode() + b', "surprise": [1], "decoder": 5}'
    assert json.loads(sanitized(data))["model"] == words()
