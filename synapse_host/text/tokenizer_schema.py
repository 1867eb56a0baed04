"""What a tokenizer.json may hold: the components that published models use, each field with its type and bounds.

The names are those of the file; :mod:`synapse_host.text.tokenizer_file` reads it by them and refuses anything else.
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
Behavior: TypeAlias = Literal["Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"]


class Part(Struct, forbid_unknown_fields=True, tag_field="type", omit_defaults=False):
    """A component; ``type`` is the name that the tokenizers library gives it."""


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


# --- normalizers -----------------------------------------------------------------------------------------------------


class BertNormalizer(Part, tag=True):
    """Lower case, no accents, spaces around Chinese characters."""

    clean_text: bool
    handle_chinese_chars: bool
    strip_accents: bool | None = None
    lowercase: bool = True


class Strip(Part, tag=True):
    """No spaces at the ends."""

    strip_left: bool = True
    strip_right: bool = True


class Replace(Part, tag=True):
    """One text in place of another."""

    pattern: Pattern
    content: Short


class Prepend(Part, tag=True):
    """A text put in front."""

    prepend: Short


class Precompiled(Part, tag=True):
    """SentencePiece's character map."""

    precompiled_charsmap: Annotated[str, Meta(min_length=1)]


class StripAccents(Part, tag=True):
    """No accents."""


class NFC(Part, tag=True):
    """Unicode's form C."""


class NFD(Part, tag=True):
    """Unicode's form D."""


class NFKC(Part, tag=True):
    """Unicode's form KC."""


class NFKD(Part, tag=True):
    """Unicode's form KD."""


class Lowercase(Part, tag=True):
    """Lower case."""


class Nmt(Part, tag=True):
    """SentencePiece's control characters."""


class ByteNormalizer(Part, tag="ByteLevel"):
    """Bytes as printable characters."""


class NormalizerSequence(Part, tag="Sequence"):
    """One after the other."""

    normalizers: Annotated[list[Normalizer], Few]


Normalizer: TypeAlias = (
    BertNormalizer | Strip | Replace | Prepend | Precompiled | StripAccents | NFC | NFD | NFKC | NFKD | Lowercase | Nmt
    | ByteNormalizer | NormalizerSequence
)  # fmt: skip


# --- pre-tokenizers --------------------------------------------------------------------------------------------------


class ByteLevel(Part, tag=True):
    """GPT-2's words, in bytes as printable characters; as a post-processor it only moves offsets."""

    add_prefix_space: bool = True
    trim_offsets: bool = True
    use_regex: bool = True


class CharDelimiterSplit(Part, tag=True):
    """Split at a character."""

    delimiter: Char


class Digits(Part, tag=True):
    """Numbers apart."""

    individual_digits: bool = False


class FixedLength(Part, tag=True):
    """Pieces of one length."""

    length: Annotated[int, Meta(ge=1, le=MAX_PIECE)]


class Metaspace(Part, tag=True):
    """SentencePiece's spaces. ``add_prefix_space`` and ``str_rep`` are of older files."""

    replacement: Char
    prepend_scheme: Literal["always", "first", "never"] | UnsetType = UNSET
    split: bool | UnsetType = UNSET
    add_prefix_space: bool | UnsetType = UNSET
    str_rep: Short | UnsetType = UNSET


class Punctuation(Part, tag=True):
    """Punctuation apart."""

    behavior: Behavior = "Isolated"


class Split(Part, tag=True):
    """Split at a pattern."""

    pattern: Pattern
    behavior: Behavior
    invert: bool = False


class BertPreTokenizer(Part, tag=True):
    """Split at spaces and punctuation."""


class UnicodeScripts(Part, tag=True):
    """Split between scripts."""


class Whitespace(Part, tag=True):
    """Words and punctuation."""


class WhitespaceSplit(Part, tag=True):
    """Split at spaces."""


class SplitterSequence(Part, tag="Sequence"):
    """One after the other."""

    pretokenizers: Annotated[list[PreTokenizer], Few]


PreTokenizer: TypeAlias = (
    ByteLevel | CharDelimiterSplit | Digits | FixedLength | Metaspace | Punctuation | Split | BertPreTokenizer
    | UnicodeScripts | Whitespace | WhitespaceSplit | SplitterSequence
)  # fmt: skip


# --- post-processors -------------------------------------------------------------------------------------------------


class BertProcessing(Part, tag=True):
    """[CLS] and [SEP]."""

    sep: tuple[Piece, Id]
    cls: tuple[Piece, Id]


class RobertaProcessing(Part, tag=True):
    """<s> and </s>."""

    sep: tuple[Piece, Id]
    cls: tuple[Piece, Id]
    trim_offsets: bool = True
    add_prefix_space: bool = True


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


class TemplateProcessing(Part, tag=True):
    """Special tokens around one text and around a pair."""

    single: Annotated[list[Slot], Few]
    pair: Annotated[list[Slot], Few]
    special_tokens: Annotated[dict[Piece, SpecialToken], Few]


class ProcessorSequence(Part, tag="Sequence"):
    """One after the other."""

    processors: Annotated[list[PostProcessor], Few]


PostProcessor: TypeAlias = BertProcessing | RobertaProcessing | ByteLevel | TemplateProcessing | ProcessorSequence


# --- models ----------------------------------------------------------------------------------------------------------


class BPE(Part, tag=True):
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


class Unigram(Part, tag=True):
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


class _Words(Part):
    vocab: dict[Piece, Id]
    unk_token: Piece

    def check(self) -> None:
        """Raise ValueError for an unknown token that isn't there."""
        if self.unk_token not in self.vocab:
            raise ValueError(f"the unknown token {self.unk_token!r} is not in the vocabulary")


class WordLevel(_Words, tag=True):
    """Whole words."""


class WordPiece(_Words, tag=True):
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
