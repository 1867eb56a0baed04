"""Spellings of special tokens in a person's text, for vocabularies that hold them as pieces of text.

The tokenizers library doesn't look for special tokens in a text (``encode_special_tokens``), yet a model that takes the
longest or the best piece of its vocabulary finds them there all the same: SentencePiece's Unigram has ``<s>`` and
``</s>`` with the best score of all, WordPiece and WordLevel take a word that is one. SentencePiece itself never gives a
control symbol for text. So a text whose ids hold one is encoded again without those pieces: rare, and paid for by it
alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer


class Literals:
    """The special tokens that a tokenizer gives for their spelling. Thread-safe."""

    def __init__(self, plain: Tokenizer, file: bytes, open_file: Callable[[bytes], Tokenizer]) -> None:
        self._file, self._open = file, open_file
        special = {id: one.content for id, one in plain.get_added_tokens_decoder().items() if one.special}
        texts = list(special.values())
        found = zip(special.items(), plain.encode_batch(texts, add_special_tokens=False), strict=True)
        self._taken = {id: content for (id, content), encoding in found if id in encoding.ids}
        # The unknown token is in the ids of many a text: only its spelling says that it was typed.
        unknown = getattr(plain.model, "unk_token", None)
        if unknown is None and isinstance(position := getattr(plain.model, "unk_id", None), int):
            unknown = plain.id_to_token(position)
        self._unknown = unknown if unknown in self._taken.values() else None
        self._marks = frozenset(id for id, content in self._taken.items() if content != unknown)

    def read(self, text: str, encoding: Encoding) -> Encoding:
        """Return the encoding of a text, of which *encoding* is right unless it spells a special token."""
        if self._marks.isdisjoint(encoding.ids) and (self._unknown is None or self._unknown not in text):
            return encoding
        return self._bare.encode(text, add_special_tokens=False)

    @cached_property
    def _bare(self) -> Tokenizer:
        """The tokenizer without these pieces: their places have names that no text has, whatever splits it."""
        document: dict[str, Any] = msgspec.json.decode(self._file)
        model = document["model"]
        names = {content: f"\0 {id} \0" for id, content in self._taken.items()}
        if model["type"] == "Unigram":
            model["vocab"] = [(names.get(piece, piece), score) for piece, score in model["vocab"]]
        else:
            model["vocab"] = {names.get(piece, piece): id for piece, id in model["vocab"].items()}
            if model.get("unk_token") is not None:
                model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        if "merges" in model:
            pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
            model["merges"] = [pair for pair in pairs if names.keys().isdisjoint((*pair, "".join(pair)))]
        document["added_tokens"] = [one for one in document["added_tokens"] if not one["special"]]
        return self._open(msgspec.json.encode(document))
