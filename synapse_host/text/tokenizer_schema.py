"""What a tokenizer.json may hold: the components that published models use, each field with its type and bounds.

The names are those of the file; :mod:`synapse_host.text.tokenizer_file` reads it by them and refuses the rest. Each
kind of component is one class: ``type`` says which of them it is, and a field that the file leaves out stays left out.
Which fields a type needs is checked by the tokenizers library itself.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from synapse_host.text import split_pattern

MAX_IDS: Final = 2**20
"""Ids are below this; the largest published vocabularies have 262,144."""
MAX_PIECE: Final = 1024
"""Characters of one token; the longest known are runs of 200 to 600 spaces or dashes."""
MAX_UNIGRAM_PIECE: Final = 128
"""The same for Unigram, which tries every length at every character; SentencePiece makes them of 16."""
MAX_WORD: Final = 256
"""Characters of a word that WordPiece looks up piece by piece, in time that grows with their square; BERT has 100."""
MAX_PARTS: Final = 16
"""Components in one sequence; the longest known have 7."""

Id = Annotated[int, Meta(ge=0, lt=MAX_IDS)]
Piece = Annotated[str, Meta(max_length=MAX_PIECE)]
Short = Annotated[str, Meta(max_length=16)]
Char = Annotated[str, Meta(min_length=1, max_length=1)]
Few = Meta(max_length=MAX_PARTS)
Flag: TypeAlias = bool | UnsetType


class Pattern(Struct, forbid_unknown_fields=True, rename="pascal"):
    """What is looked for: a literal text or a regular expression."""

    string: Annotated[str, Meta(min_length=1, max_length=64)] | UnsetType = UNSET
    regex: str | UnsetType = UNSET

    def check(self) -> None:
        """Raise ValueError unless it is one of both, and the expression of a harmless kind."""
        if (self.string is UNSET) is (self.regex is UNSET):
            raise ValueError("a pattern is either String or Regex")
        if self.regex is not UNSET:
            split_pattern.check(self.regex)


class Normalizer(Struct, forbid_unknown_fields=True):
    """Changes characters before words are looked for."""

    type: Literal[
        "BertNormalizer", "Strip", "Replace", "Prepend", "Precompiled", "StripAccents", "NFC", "NFD", "NFKC", "NFKD",
        "Lowercase", "Nmt", "ByteLevel", "Sequence",
    ]  # fmt: skip
    clean_text: Flag = UNSET
    handle_chinese_chars: Flag = UNSET
    strip_accents: bool | UnsetType | None = UNSET
    lowercase: Flag = UNSET
    strip_left: Flag = UNSET
    strip_right: Flag = UNSET
    pattern: Pattern | UnsetType = UNSET
    content: Short | UnsetType = UNSET
    prepend: Short | UnsetType = UNSET
    precompiled_charsmap: Annotated[str, Meta(min_length=1)] | UnsetType = UNSET
    normalizers: Annotated[list[Normalizer], Few] | UnsetType = UNSET


class PreTokenizer(Struct, forbid_unknown_fields=True):
    """Splits a text into words. ``add_prefix_space`` and ``str_rep`` of a Metaspace are of older files."""

    type: Literal[
        "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength", "Metaspace", "Punctuation", "Split",
        "BertPreTokenizer", "UnicodeScripts", "Whitespace", "WhitespaceSplit", "Sequence",
    ]  # fmt: skip
    add_prefix_space: Flag = UNSET
    trim_offsets: Flag = UNSET
    use_regex: Flag = UNSET
    individual_digits: Flag = UNSET
    split: Flag = UNSET
    invert: Flag = UNSET
    delimiter: Char | UnsetType = UNSET
    replacement: Char | UnsetType = UNSET
    str_rep: Short | UnsetType = UNSET
    length: Annotated[int, Meta(ge=1, le=MAX_PIECE)] | UnsetType = UNSET
    prepend_scheme: Literal["always", "first", "never"] | UnsetType = UNSET
    behavior: Literal["Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"] | UnsetType = UNSET
    pattern: Pattern | UnsetType = UNSET
    pretokenizers: Annotated[list[PreTokenizer], Few] | UnsetType = UNSET


class Place(Struct, forbid_unknown_fields=True):
    """A special token, or the text A or B, in a template."""

    id: Piece
    type_id: Annotated[int, Meta(ge=0, le=255)]


class Slot(Struct, forbid_unknown_fields=True, rename="pascal"):
    """One place of a template."""

    special_token: Place | UnsetType = UNSET
    sequence: Place | UnsetType = UNSET


class SpecialToken(Struct, forbid_unknown_fields=True):
    """A special token's ids."""

    id: Piece
    ids: Annotated[list[Id], Few]
    tokens: Annotated[list[Piece], Few]


class PostProcessor(Struct, forbid_unknown_fields=True):
    """Puts special tokens around one text and around a pair; a ByteLevel only moves offsets."""

    type: Literal["BertProcessing", "RobertaProcessing", "ByteLevel", "TemplateProcessing", "Sequence"]
    sep: tuple[Piece, Id] | UnsetType = UNSET
    cls: tuple[Piece, Id] | UnsetType = UNSET
    trim_offsets: Flag = UNSET
    add_prefix_space: Flag = UNSET
    use_regex: Flag = UNSET
    single: Annotated[list[Slot], Few] | UnsetType = UNSET
    pair: Annotated[list[Slot], Few] | UnsetType = UNSET
    special_tokens: Annotated[dict[Piece, SpecialToken], Few] | UnsetType = UNSET
    processors: Annotated[list[PostProcessor], Few] | UnsetType = UNSET


class _Model(Struct, forbid_unknown_fields=True, tag_field="type", tag=True):
    """What makes ids of words. Fields that the file leaves out are written with their defaults."""


class BPE(_Model):
    """Byte pair encoding."""

    vocab: dict[Piece, Id]
    merges: list[str | tuple[str, str]]
    dropout: float | None = None
    unk_token: Piece | None = None
    continuing_subword_prefix: Short | None = None
    end_of_word_suffix: Short | None = None
    fuse_unk: bool = False
    byte_fallback: bool = False
    ignore_merges: bool = False

    def check(self) -> None:
        """Raise ValueError for a model that gives other ids each time."""
        if self.dropout:
            raise ValueError(f"dropout is {self.dropout}: the same text would get other ids each time")


class Unigram(_Model):
    """SentencePiece's unigram model."""

    vocab: list[tuple[Annotated[str, Meta(max_length=MAX_UNIGRAM_PIECE)], float]]
    unk_id: Id
    byte_fallback: bool = False

    def check(self) -> None:
        """Raise ValueError for an unknown token that isn't there."""
        if self.unk_id >= len(self.vocab):
            raise ValueError(f"unk_id {self.unk_id} is outside of a vocabulary of {len(self.vocab)}")
        if len(self.vocab) > MAX_IDS:
            raise ValueError(f"a vocabulary of {len(self.vocab)}, at most {MAX_IDS}")


class _Words(_Model):
    vocab: dict[Piece, Id]
    unk_token: Piece

    def check(self) -> None:
        """Raise ValueError for an unknown token that isn't there."""
        if self.unk_token not in self.vocab:
            raise ValueError(f"the unknown token {self.unk_token!r} is not in the vocabulary")


class WordLevel(_Words):
    """Whole words."""


class WordPiece(_Words):
    """BERT's pieces of words."""

    continuing_subword_prefix: Short = "##"
    max_input_chars_per_word: Annotated[int, Meta(ge=1, le=MAX_WORD)] = 100


Model: TypeAlias = BPE | Unigram | WordLevel | WordPiece


class AddedToken(Struct, forbid_unknown_fields=True):
    """A token that is looked for before anything else."""

    id: Id
    content: Piece
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = False


class File(Struct):
    """A whole file but for what the host doesn't use (padding, truncation, the decoder), and the model, read apart."""

    model: Raw
    added_tokens: Annotated[list[AddedToken], Meta(max_length=MAX_IDS)] = []
    normalizer: Normalizer | None = None
    pre_tokenizer: PreTokenizer | None = None
    post_processor: PostProcessor | None = None
