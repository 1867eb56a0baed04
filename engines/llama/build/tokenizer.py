"""A tokenizer.json from a GGUF's vocabulary, and how llama.cpp itself reads some odd texts, to compare with.

Theory of operation. A worker takes ids only, so the host needs the tokenizer that a model was trained with. A GGUF has
its tokens, and of the rest a name: ``tokenizer.ggml.model`` says the kind, ``tokenizer.ggml.pre`` how a text is cut
into words. Only kinds and names whose Hugging Face form is known here are written (:data:`WORDS`); what stands around a
text and which tokens are special is asked of llama.cpp. The host then reads the odd texts with the file and compares
every id with llama.cpp's own, so that a wrong tokenizer can't be built, whoever wrote it.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engines.bundle.manifest import BundleError
from engines.llama.build import native
from engines.llama.build.odd_texts import TEXTS
from engines.llama.build.vocabulary import BYTE, CONTROL, UNKNOWN
from engines.llama.gguf import Header, read_header

_BYTES: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_WORDS: Final = {**_BYTES, "use_regex": True}
_DIGITS: Final = {"type": "Digits", "individual_digits": True}

_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SUFFIX: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACE: Final = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3: Final = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACE
_QWEN2: Final = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACE
_QWEN35: Final = (
    _SUFFIX + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _SPACE
)  # fmt: skip
_UPPER: Final = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN: Final = rf"{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*" + _SPACE
_O200K: Final = (
    rf"{_UPPER}*{_LOWER}+{_SUFFIX}?|{_UPPER}+{_LOWER}*{_SUFFIX}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*" + _SPACE
)
_DEEPSEEK3: Final = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _SPACE
)


def _split(*patterns: str) -> tuple[dict[str, Any], ...]:
    parts = [{"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in patterns]
    return (*parts, _BYTES)


WORDS: Final = {
    **dict.fromkeys(("gpt-2", "phi-2", "modern-bert", "mpt", "olmo"), (_WORDS,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), (_DIGITS, _WORDS)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe"), _split(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), _split(_QWEN2)),
    "qwen35": _split(_QWEN35),
    "tekken": _split(_TEKKEN),
    **dict.fromkeys(("gpt-4o", "llama4"), _split(_O200K)),
    "deepseek-coder": _split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    "deepseek-v3": _split(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3),
    "falcon": _split(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
}
"""How byte-level BPE cuts a text into words, by ``tokenizer.ggml.pre``: llama.cpp's own table (llama-vocab.cpp), with
the expressions of the published tokenizers that it quotes."""
_WHOLE_WORDS: Final = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""Of those, where a word that is a token becomes it at once (``ignore_merges``)."""


@dataclass(frozen=True)
class Vocabulary:
    """What a GGUF says of its tokens."""

    kind: str
    pre: str
    tokens: list[str]
    types: list[int]
    value: Callable[..., Any]
    """Any metadata value by its key, with a default."""

    @classmethod
    def read(cls, source: Path) -> Vocabulary:
        """Read a file whose header was checked. Raises BundleError for tokens that llama.cpp would abort on."""
        import gguf

        reader = gguf.GGUFReader(source, "r")

        def value(key: str, default: Any = None) -> Any:
            field = reader.get_field(key)
            return default if field is None else field.contents()

        kind, pre = value("tokenizer.ggml.model"), value("tokenizer.ggml.pre", "default")
        tokens = value("tokenizer.ggml.tokens", [])
        types = value("tokenizer.ggml.token_type", [1] * len(tokens))
        if not tokens or len(set(tokens)) != len(tokens) or len(types) != len(tokens):
            raise BundleError(
                f"{source.name}: {len(tokens)} tokens, {len(set(tokens))} different, {len(types)} types: it has no"
                f" vocabulary that text could be read with (tokenizer {kind!r})"
            )
        return cls(str(kind), str(pre), tokens, types, value)


def describe(source: Path, out: Path | None) -> dict[str, Any]:
    """Return what a GGUF says about its model; write its tokenizer to *out*, unless that is None.

    The returned object: ``facts``, ``samples`` ([text, ids] as llama.cpp reads it) and ``framed`` (the ids of the text
    ``a`` with what stands around it). Raises BundleError where the vocabulary isn't of a kind that is known here,
    EngineError for a damaged file.
    """
    descriptor = os.open(source, os.O_RDONLY)
    try:
        header = read_header(descriptor)
        known = Vocabulary.read(source)
        own = native.NativeVocabulary(descriptor)
        try:
            framed, bare = own.tokenize("a", framed=True), own.tokenize("a")
            if out is not None:
                at = next((n for n in range(len(framed)) if framed[n : n + len(bare)] == bare), 0)
                frame = (framed[:at], framed[at + len(bare) :])
                document = tokenizer_document(known, own.attributes(len(known.tokens)), frame)
                out.write_text(json.dumps(document, ensure_ascii=False, indent=1), encoding="utf-8")
            # Where the file doesn't say how words are cut, llama.cpp guesses: only words themselves can be compared.
            guessed = known.kind == "gpt2" and known.pre == "default"
            texts = re.findall("[A-Za-z]+", " ".join(TEXTS)) if guessed else TEXTS
            samples = [[text, own.tokenize(text)] for text in texts]
        finally:
            own.close()
    finally:
        os.close(descriptor)
    return {"samples": samples, "framed": framed, "facts": facts(known, header)}


def facts(known: Vocabulary, header: Header) -> dict[str, Any]:
    """Return what a GGUF says of its model: what a manifest holds, and what decides whether it can be served."""
    from gguf import LlamaFileType

    value = known.value
    architecture = header.architecture
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    names |= {"cls": "cls", "sep": "seperator", "mask": "mask"}
    limit = header.vocab_size or 0
    ids = {role: header.integer(f"tokenizer.ggml.{key}_token_id") for role, key in names.items()}
    hyper = {
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "block_count": "num_hidden_layers",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
    }
    config = {name: header.integer(key, scoped=True) for key, name in hyper.items()}
    stored = value("general.file_type")
    positions = [size for size in (header.context_length, header.position_rows) if size]
    tensors = tuple(header.tensors)
    return {
        "architecture": architecture,
        "special_ids": {role: id for role, id in ids.items() if id is not None and id < limit},
        "chat_template": value("tokenizer.chat_template"),
        "config": {
            **{name: number for name, number in config.items() if number is not None},
            "vocab_size": limit,
            "model_type": architecture,
        },
        "dims": header.integer("embedding_length_out", scoped=True) or config["hidden_size"],
        "max_tokens": min(positions, default=None),
        "pooling": {1: "mean", 2: "cls", 3: "last", 4: "rank"}.get(header.pooling_type or 0),
        "causal": value(f"{architecture}.attention.causal", True),
        "encoder_decoder": any(name.startswith("enc.") for name in tensors)
        and any(name.startswith("dec.") for name in tensors),
        "dense": [name for name in tensors if name.startswith("dense_")],
        "tensors": len(tensors),
        "dtype": LlamaFileType(stored).name.lower().removeprefix("mostly_").removeprefix("all_")
        if stored in LlamaFileType._value2member_map_
        else "gguf",
        "license": value("general.license"),
    }


def tokenizer_document(
    known: Vocabulary, attributes: Sequence[int], frame: tuple[list[int], list[int]]
) -> dict[str, Any]:
    """Return the tokenizer.json object of a vocabulary; *frame*: the ids that stand before and after a text.

    Raises BundleError, which says what is known, for another kind.
    """
    parts = _KINDS.get(known.kind)
    if parts is None:
        raise BundleError(
            f"tokenizer {known.kind!r} can't be written exactly ({', '.join(_KINDS)} can): pass the model's own file,"
            " --tokenizer tokenizer.json"
        )
    flags = {"single_word": native.SINGLE_WORD, "lstrip": native.LSTRIP, "rstrip": native.RSTRIP}
    closed = native.CONTROL | native.UNKNOWN
    added = [
        {
            "id": n,
            "content": known.tokens[n],
            **{flag: bool(bits & bit) for flag, bit in flags.items()},
            "normalized": False,
            "special": bool(bits & closed),
        }
        for n, bits in enumerate(attributes)
        if bits & (closed | native.USER_DEFINED)
    ]
    made = {"added_tokens": added, **parts(known)}
    made["post_processor"] = _template(known.tokens, *frame)
    order = ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder", "model")
    return {"version": "1.0", "truncation": None, "padding": None, **{part: made[part] for part in order}}


def _template(tokens: list[str], before: list[int], after: list[int]) -> dict[str, Any] | None:
    if not before and not after:
        return None
    text = [{"Sequence": {"id": "A", "type_id": 0}}]
    first, last = ([{"SpecialToken": {"id": tokens[n], "type_id": 0}} for n in ids] for ids in (before, after))
    return {
        "type": "TemplateProcessing",
        "single": [*first, *text, *last],
        "pair": [*first, *text, *last, {"Sequence": {"id": "B", "type_id": 1}}, *last],
        "special_tokens": {
            tokens[n]: {"id": tokens[n], "ids": [n], "tokens": [tokens[n]]} for n in dict.fromkeys((*before, *after))
        },
    }


def _bpe(known: Vocabulary, merges: list[list[str]], **flags: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        **dict.fromkeys(("unk_token", "continuing_subword_prefix", "end_of_word_suffix"), None),
        **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
        **flags,
        "vocab": {token: n for n, token in enumerate(known.tokens)},
        "merges": merges,
    }


def _merges(known: Vocabulary) -> list[list[str]]:
    merges: list[str] = known.value("tokenizer.ggml.merges", [])
    cuts = [merge.find(" ", 1) for merge in merges]
    return [[merge[:cut], merge[cut + 1 :]] for merge, cut in zip(merges, cuts, strict=True) if cut > 0]


def _byte_level(known: Vocabulary) -> dict[str, Any]:
    if known.pre not in WORDS:
        raise BundleError(
            f"pre-tokenizer {known.pre!r} is not known here ({', '.join(WORDS)} are): pass the model's own file,"
            " --tokenizer tokenizer.json"
        )
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(WORDS[known.pre])},
        "decoder": {**_WORDS, "add_prefix_space": True},
        "model": _bpe(known, _merges(known), ignore_merges=known.pre in _WHOLE_WORDS),
    }


_ESCAPE: Final = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
_UNESCAPE: Final = [
    {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]


def _sentencepiece(known: Vocabulary) -> dict[str, Any]:
    """SentencePiece's BPE has no list of merges: two pieces join where the result is one, the best score first."""
    ids = {token: n for n, token in enumerate(known.tokens)}
    scores = known.value("tokenizer.ggml.scores", [])
    if len(scores) != len(ids) or not all(f"<0x{byte:02X}>" in ids for byte in range(256)):
        raise BundleError("a SentencePiece vocabulary needs a score for each token and a token for each byte")
    found = [
        (-scores[n], ids[left], ids[right])
        for n, text in enumerate(known.tokens)
        if known.types[n] not in (CONTROL, UNKNOWN, BYTE)
        for left, right in ((text[:at], text[at:]) for at in range(1, len(text)))
        if left in ids and right in ids
    ]
    merges = [[known.tokens[left], known.tokens[right]] for _, left, right in sorted(found)]
    unknown = next((known.tokens[n] for n, kind in enumerate(known.types) if kind == UNKNOWN), None)
    prefixed = known.value("tokenizer.ggml.add_space_prefix", True)
    first = [{"type": "Prepend", "prepend": "\u2581"}] if prefixed else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*first, _ESCAPE]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [*_UNESCAPE, *strip]},
        "model": _bpe(known, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }


def _word_piece(known: Vocabulary) -> dict[str, Any]:
    """A GGUF marks what begins a word, BERT's own file what doesn't."""
    lowers = known.value("tokenizer.ggml.normalizer.lowercase", True)
    strips = known.value("tokenizer.ggml.normalizer.strip_accents", lowers)
    closed = (CONTROL, UNKNOWN)
    words = [
        text if kind in closed else text[1:] if text.startswith("\u2581") else f"##{text}"
        for text, kind in zip(known.tokens, known.types, strict=True)
    ]
    unknown = known.value("tokenizer.ggml.unknown_token_id", 100)
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": strips,
            "lowercase": lowers,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": words[unknown],
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {word: n for n, word in enumerate(words)},
        },
    }


def _unigram(known: Vocabulary) -> dict[str, Any]:
    """Every piece of a Unigram model can be found in a text, so what is no text has another name there."""
    scores = known.value("tokenizer.ggml.scores", [])
    unknown = known.value("tokenizer.ggml.unknown_token_id", 2)
    if len(scores) != len(known.tokens) or not 0 <= unknown < len(scores):
        raise BundleError("a Unigram vocabulary needs a score for each token, and an unknown token")
    hidden = ("\ue000" if kind in (CONTROL, UNKNOWN) else "" for kind in known.types)
    steps: list[dict[str, Any]] = []
    if characters := bytes(byte & 0xFF for byte in known.value("tokenizer.ggml.precompiled_charsmap", [])):
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(characters).decode()})
    if known.value("tokenizer.ggml.remove_extra_whitespaces", False):
        steps.append({"type": "Strip", "strip_left": False, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    words = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    return {
        "added_tokens": [],
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": words,
        "decoder": words,
        "model": {
            "type": "Unigram",
            "unk_id": unknown,
            "vocab": [[mark + text, score] for mark, text, score in zip(hidden, known.tokens, scores, strict=True)],
            "byte_fallback": False,
        },
    }


def _gemma4(known: Vocabulary) -> dict[str, Any]:
    return {
        "normalizer": _ESCAPE,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": r"[^\n]+|[\n]+"},
            "behavior": "Isolated",
            "invert": False,
        },
        "decoder": {"type": "Sequence", "decoders": _UNESCAPE},
        "model": _bpe(known, _merges(known), byte_fallback=True),
    }


_KINDS: Final = {"gpt2": _byte_level, "llama": _sentencepiece, "bert": _word_piece, "t5": _unigram, "gemma4": _gemma4}
