"""Text to token ids, on the host's side: workers receive ids only.

A tokenizer opens without padding and truncation (:mod:`synapse_host.text.tokenizer_file`) and with
``encode_special_tokens``, and a vocabulary's own piece of that spelling isn't taken
(:mod:`synapse_host.text.literals`): a literal ``[SEP]``, ``<s>`` or ``<|im_end|>`` in a text is text. Special tokens
around a row are those of the tokenizer's own post-processor. Too long a text is cut only where the caller asked for it,
inside the special tokens, and the result names it by its index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final, TypeVar

from msgspec import UNSET

from engines.bundle.manifest import Bundle
from synapse_host.errors import BundleInvalid, InvalidRequest
from synapse_host.text import tokenizer_file
from synapse_host.text.limits import FREE_CHARACTERS, budget, named, too_long
from synapse_host.text.literals import Literals
from synapse_host.text.rows import Frame, Rows, flatten, pair_frame, single_frame
from synapse_host.text.spelling import speller
from synapse_host.text.tokenizer_schema import MAX_IDS
from synapse_host.text.validate import prompt_text

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

    from synapse_host.arrays import IntArray

T = TypeVar("T")

# What the tokenizer makes of a text takes up to 250 bytes a character while it runs. So a text is read in growing
# pieces from its start, until it has too many tokens or is read whole, and all threads together stay in one budget.
BATCH_CHARACTERS: Final = 256 * 1024
"""Characters of short texts that the tokenizer gets at once, and the first piece of a long one at most."""
BATCH_TEXTS: Final = 2048
"""Texts that it gets at once."""
MAX_CHARACTERS: Final = 4 * 1024 * 1024
"""Of a longer text only this much is ever read; without truncation it is refused unread."""
LEAST_CHARACTERS: Final = 64 * 1024
"""So long may a text be for any model: of spaces or unknown words, many characters make few tokens."""
FIRST_PIECE: Final = 8
"""Characters a token in the first piece of a long text; the average of most languages is two to five."""
MARGIN: Final = 16
"""Tokens at the end of a piece that the cut may have changed."""

NO_TOKENS: Final = "has no tokens: the tokenizer drops all of it"

# Source: the model card of Qwen3-Reranker, "Transformers Usage".
_JUDGE_PREFIX: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_JUDGE_SUFFIX: Final = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_JUDGE_INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"


class TextTokenizer:
    """One bundle's tokenizer. Thread-safe: encoding changes nothing in it."""

    def __init__(self, bundle: Bundle, *, model: str | None = None) -> None:
        # For the first rows, which may be made on the event loop's thread; the opener has one of its own.
        import numpy as np  # noqa: F401

        manifest = bundle.manifest
        self._manifest = manifest
        self.model = model or manifest.model_id
        self.max_tokens = manifest.max_tokens
        if manifest.tokenizer is UNSET:
            raise InvalidRequest(
                f"bundle {self.model} has no tokenizer.",
                advice={
                    "python": "Send token ids (embed_ids, rerank_ids, generate_ids).",
                    "command": "Its texts can't be read here; a Python program may send it token ids.",
                },
            )
        path = bundle.path(manifest.tokenizer.path)
        # Kept: the second object below comes from the same bytes, whatever becomes of the file.
        self._file = tokenizer_file.checked(path, manifest.tokenizer.digest, self.model)
        self._name = path.name
        self._plain = self._opened(self._file)
        self._literals = self._run(lambda: Literals(self._plain, self._file, self._opened))
        self._longest = max(map(len, self._plain.get_vocab()), default=1) or 1
        self.max_characters = min(MAX_CHARACTERS, max(LEAST_CHARACTERS, self.max_tokens * self._longest))
        """A longer text can't fit: it is refused, or cut to this, before it is tokenised."""
        special = manifest.special_ids or {}
        self._instructed = manifest.task == "rerank" and manifest.family == "qwen3"
        self.single = self._run(lambda: single_frame(self._plain, manifest.family, manifest.task, special))
        self.pair = self._run(lambda: pair_frame(self._plain, special)) if manifest.task == "rerank" else Frame()
        known = (manifest.config or {}).get("vocab_size")
        for frame in (self.single, self.pair):
            self._check_frame(frame, known if isinstance(known, int) else MAX_IDS)
        if self._instructed:
            _ = self._special  # opened now, where nobody else waits: pairs() may run on the event loop's thread

    def rows(
        self, texts: Sequence[str], *, truncate: bool = False, offset: int = 0, noun: str = "text",
        prompt: str | None = None,
    ) -> Rows:  # fmt: skip
        """Return the texts' rows with their special tokens, each text behind the model's *prompt* of that name.

        Raises InvalidRequest {index} for an empty text and SequenceTooLong {index, tokens, max_tokens}; *offset* is the
        index of the first text. *prompt*: see :func:`prompt_text`; its tokens count, and it is never cut.
        """
        if before := prompt_text(self._manifest, prompt):
            self._check(texts, noun, offset)
            self.room(prompt)
            # One text, as sentence-transformers makes it: the first word's tokens may depend on what is before it.
            texts = [before + text for text in texts]
        return self._fitted(texts, noun, offset, self.single.prefix, self.single.suffix, truncate=truncate)

    def room(self, prompt: str | None = None) -> int:
        """Return how many tokens a text may have beside the special ones and a prompt; InvalidRequest for none."""
        room = self.max_tokens - len(self.single)
        if before := prompt_text(self._manifest, prompt):
            taken = len(self._ids(self._plain, before, room)[0])
            if taken >= room:
                raise InvalidRequest(
                    f"the prompt {before[:80]!r} leaves no room for a text: {self.model} takes {room} tokens for both"
                )
            room -= taken
        return room

    def segments(
        self, query: str, documents: Sequence[str], *, truncate: bool = False, special: int = 3
    ) -> tuple[IntArray, Rows]:
        """Return the bare query ids and the bare document rows, for a worker that composes the pairs itself.

        *special* is how many ids the worker adds to a pair. Only documents are cut. Raises as :meth:`rows`.
        """
        ids = self._query(query, special)
        return flatten([ids]), self._fitted(documents, "document", truncate=truncate, taken=len(ids) + special)

    def pairs(self, query: str, documents: Sequence[str], *, truncate: bool = False) -> Rows:
        """Return composed rows, ``[CLS] query [SEP] document [SEP]`` in BERT's case, for owned workers."""
        if self._instructed:
            return self._judged(query, documents, truncate=truncate)
        frame = self.pair
        before = (*frame.prefix, *self._query(query, len(frame)), *frame.middle)
        return self._fitted(documents, "document", 0, before, frame.suffix, truncate=truncate)

    def _judged(self, query: str, documents: Sequence[str], *, truncate: bool) -> Rows:
        """Rows of a Qwen3 reranker: query and document inside its question, which ends where 'yes' or 'no' follows."""
        import numpy as np

        prefix, suffix = self.template(_JUDGE_PREFIX), self.template(_JUDGE_SUFFIX)
        self._query(query, len(prefix) + len(suffix))
        self._check(documents, "document", 0)
        opening = f"<Instruct>: {_JUDGE_INSTRUCTION}\n<Query>: {query}\n<Document>: "
        # Encoded as one text: the first word of a document takes the space before it into its token.
        bare = self.literal(opening)
        if len(bare) >= self.max_tokens - len(prefix) - len(suffix):
            raise InvalidRequest(
                f"the query leaves no room for a document: {self.model} takes {self.max_tokens} tokens for both. "
                "Shorten it",
                details={"max_tokens": self.max_tokens},
            )
        bodies = [opening + text for text in documents]
        rows = self._fitted(bodies, "document", 0, prefix, suffix, truncate=truncate)
        empty = np.array([*prefix, *bare, *suffix], np.int32)
        start = 0
        for index, length in enumerate(rows.lengths):
            if length == len(empty) and np.array_equal(rows.ids[start : start + length], empty):
                raise _refused("document", index, NO_TOKENS)
            start += length
        return rows

    def prompt(self, text: str) -> Rows:
        """Return a prompt's row for generation."""
        return self.rows([text], noun="prompt")

    def template(self, text: str) -> list[int]:
        """Return the ids of text that a chat template wrote: here ``<|im_start|>`` means the special token.

        Of a text with more than ``max_tokens`` not all of them, but more than that. SequenceTooLong where that can't be
        known, since too much of the text was left unread.
        """
        return self._many(self._special, text)

    def literal(self, text: str) -> list[int]:
        """Return the ids of text that a person wrote, without special tokens; else as :meth:`template`."""
        return self._many(self._plain, text)

    def _many(self, tokenizer: Tokenizer, text: str) -> list[int]:
        ids, whole = self._ids(tokenizer, text, self.max_tokens)
        if not whole and len(ids) <= self.max_tokens:
            raise too_long(0, self.max_tokens + 1, self.max_tokens, model=self.model, noun="prompt", at_least=True)
        return ids

    def pieces(self, text: str, tokens: int, overlap: int = 0, prompt: str | None = None) -> Iterator[str]:
        """Yield the text in pieces of at most *tokens* tokens; each begins with the last *overlap* of the one before.

        A piece ends where a token ends, never inside a character. Read alone it may have a token or two more, since
        a word was cut: never more than the model takes behind *prompt*. A text without tokens is yielded whole.
        """
        room = self.room(prompt)
        start, size = 0, self._first_piece(8 * tokens)
        while True:
            window = text[start : start + size]
            with budget.taken(len(window)):
                spans = self._encoding(self._plain, window).offsets
            last = start + size >= len(text)
            sure = len(spans) if last else len(spans) - MARGIN
            at = 0
            while sure - at > tokens:
                end = self._piece_end(window, spans, at, at + tokens, room)
                yield window[spans[at][0] : spans[end - 1][1]]
                at = max(at + 1, end - overlap)
            if last:
                # What is left fits, unless a word that was cut at its beginning has more tokens now.
                while at < len(spans) and (end := self._piece_end(window, spans, at, len(spans), room)) < len(spans):
                    yield window[spans[at][0] : spans[end - 1][1]]
                    at = max(at + 1, end - overlap)
                yield window[spans[at][0] :] if spans else window
                return
            if at:
                start += spans[at][0]
            else:
                size *= 2

    def _piece_end(self, window: str, spans: Sequence[tuple[int, int]], at: int, end: int, room: int) -> int:
        """Return where a piece of at most *room* tokens that begins with the token *at* ends, at most at *end*."""
        while end - at > 1 and (
            # Several tokens of one character have the same span.
            (end < len(spans) and spans[end][0] < spans[end - 1][1])
            or (
                end - at > room - MARGIN
                and len(self._ids(self._plain, window[spans[at][0] : spans[end - 1][1]], room)[0]) > room
            )
        ):
            end -= 1
        return end

    def mentions_special(self, text: str) -> bool:
        """True when reading the text's special-token literals as tokens would change its ids."""
        return self.template(text) != self.literal(text)

    @property
    def last_id(self) -> int:
        """The largest id that this tokenizer can give, added tokens included."""
        return max(self._plain.get_vocab(with_added_tokens=True).values())

    def token(self, id: int) -> str:
        """Return the text of a token id; empty where the vocabulary has no such id."""
        return self._plain.id_to_token(id) or ""

    def id(self, token: str) -> int | None:
        """Return the id of a token, None where the vocabulary has no such token."""
        found: int | None = self._plain.token_to_id(token)
        return found

    @cached_property
    def spell(self) -> Callable[[int], bytes]:
        """The function from a token id to the bytes that it spells."""
        return speller(self._plain)

    @cached_property
    def _special(self) -> Tokenizer:
        # An object of its own: the switch below must never be seen by a thread that encodes a person's text.
        tokenizer = self._opened(self._file)
        tokenizer.encode_special_tokens = False
        return tokenizer

    def _opened(self, data: bytes) -> Tokenizer:
        from tokenizers import Tokenizer

        opened = self._run(lambda: Tokenizer.from_buffer(data), "can't be read as a tokenizer")
        opened.encode_special_tokens = True
        return opened

    def _check(self, texts: Sequence[str], noun: str, offset: int) -> None:
        """Raise InvalidRequest {index} for what is no text, is empty, or holds half a surrogate pair."""
        for index, text in enumerate(texts, offset):
            if not isinstance(text, str):
                raise _refused(noun, index, f"is {type(text).__name__}, not text")
            if not text.strip():
                raise _refused(noun, index, "is empty")
            if not text.isascii():
                try:
                    text[: self.max_characters].encode()
                except UnicodeEncodeError:
                    why = "holds half a surrogate pair; it is not valid text"
                    raise _refused(noun, index, why) from None

    def _encode(self, texts: Sequence[str], noun: str, offset: int, room: int) -> Iterator[tuple[list[int], bool]]:
        """Yield the ids of each text, and whether they are all of them: of a text with more than *room*, enough.

        Raises as :meth:`_check`, and InvalidRequest {index} for a text without tokens.
        """
        self._check(texts, noun, offset)
        encode = getattr(self._plain, "encode_batch_fast", self._plain.encode_batch)
        first = self._first_piece(room)
        index = offset
        for batch in _batches(texts, first):
            if len(batch) == 1 and len(batch[0]) > first:
                found = [self._ids(self._plain, batch[0], room)]
            else:
                with budget.taken(sum(map(len, batch))):
                    encoded = self._run(lambda batch=batch: encode(batch, add_special_tokens=False))  # type: ignore[misc]
                    found = [(item.ids, True) for item in map(self._literals.read, batch, encoded)]
                    del encoded
            for ids, whole in found:
                if not ids:
                    raise _refused(noun, index, NO_TOKENS)
                yield ids, whole
                index += 1

    def _ids(self, tokenizer: Tokenizer, text: str, room: int) -> tuple[list[int], bool]:
        """Return a text's ids and True, or so many of its first ids that *room* of them are certain, and False."""
        size = self._first_piece(room)
        end = min(len(text), self.max_characters)
        while True:
            piece = text if size >= len(text) else text[: min(size, end)]
            with budget.taken(len(piece)):
                ids: list[int] = self._encoding(tokenizer, piece).ids
            if len(piece) == len(text):
                return ids, True
            if len(ids) > room + MARGIN or len(piece) == end:
                return ids, False
            size *= 2

    def _encoding(self, tokenizer: Tokenizer, text: str) -> Encoding:
        """Return what a tokenizer makes of a text; :attr:`_plain` makes special tokens of none of its spellings."""
        found = self._run(lambda: tokenizer.encode(text, add_special_tokens=False))
        return self._run(lambda: self._literals.read(text, found)) if tokenizer is self._plain else found

    def _first_piece(self, room: int) -> int:
        return min(BATCH_CHARACTERS, self.max_characters, max(FREE_CHARACTERS, FIRST_PIECE * (room + MARGIN)))

    def _run(self, work: Callable[[], T], failed: str = "fails as a tokenizer") -> T:
        """Run what calls the tokenizers library; whatever it fails with is the bundle's fault."""
        try:
            return work()
        except (MemoryError, BundleInvalid):
            raise
        except BaseException as exc:
            # Bare Exceptions, and panics of a class that can't be imported.
            if not isinstance(exc, Exception) and type(exc).__name__ != "PanicException":
                raise
            raise BundleInvalid(f"bundle {self.model}: {self._name} {failed}: {exc}. Rebuild the bundle") from exc

    def _check_frame(self, frame: Frame, vocabulary: int) -> None:
        ids = (*frame.prefix, *frame.middle, *frame.suffix)
        if any(not 0 <= id < vocabulary for id in ids):
            raise BundleInvalid(
                f"bundle {self.model}: a special token has the id {max(ids)}, beyond a vocabulary of {vocabulary}"
            )
        if len(ids) >= self.max_tokens:
            raise BundleInvalid(
                f"bundle {self.model}: its {len(ids)} special tokens leave no room in {self.max_tokens} tokens"
            )

    def _query(self, query: str, special: int) -> list[int]:
        """Return a query's ids, which leave room for a document."""
        ids, whole = next(self._encode([query], "query", 0, self.max_tokens))
        if not whole or len(ids) + special >= self.max_tokens:
            raise InvalidRequest(
                f"the query has {'' if whole else 'at least '}{len(ids)} tokens and leaves no room for a document: "
                f"{self.model} takes {self.max_tokens} for both. Shorten it",
                details={"tokens": len(ids), "max_tokens": self.max_tokens},
            )
        return ids

    def _fitted(
        self,
        texts: Sequence[str],
        noun: str,
        offset: int = 0,
        before: Sequence[int] = (),
        after: Sequence[int] = (),
        *,
        truncate: bool,
        taken: int = 0,
    ) -> Rows:
        """Return the texts' rows between the ids *before* and *after*; *taken*: ids that the worker adds to each."""
        import numpy as np

        taken += len(before) + len(after)
        room = self.max_tokens - taken
        rows: list[Sequence[int]] = []
        blocks: list[IntArray] = []
        lengths: list[int] = []
        truncated: list[int] = []
        if not truncate:
            self._check_characters(texts, noun, offset)
        for index, (ids, whole) in enumerate(self._encode(texts, noun, offset, room), offset):
            if len(ids) > room or not whole:
                if not truncate:
                    raise too_long(
                        index, taken + len(ids), self.max_tokens, model=self.model, noun=noun, at_least=not whole
                    )
                truncated.append(index)
                ids = ids[:room]
            rows.append((*before, *ids, *after) if before or after else ids)
            lengths.append(len(rows[-1]))
            if len(rows) == BATCH_TEXTS:
                # In steps: joining and freeing a million rows at once would hold up every other thread.
                blocks.append(flatten(rows))
                rows = []
        last = flatten(rows)
        return Rows(np.concatenate([*blocks, last]) if blocks else last, lengths, truncated)

    def _check_characters(self, texts: Sequence[str], noun: str, offset: int) -> None:
        """Raise SequenceTooLong for a text that can't fit, however long its tokens are."""
        for index, text in enumerate(texts, offset):
            if isinstance(text, str) and len(text) > self.max_characters:
                tokens = max(self.max_tokens + 1, len(text) // self._longest)
                raise too_long(index, tokens, self.max_tokens, model=self.model, noun=noun, at_least=True)


def _refused(noun: str, index: int, why: str) -> InvalidRequest:
    return InvalidRequest(f"{named(noun, index)} {why}", details={"index": index})


def _batches(texts: Sequence[str], longest: int) -> Iterator[list[str]]:
    """Yield the texts in lists of at most BATCH_TEXTS and BATCH_CHARACTERS; one longer than *longest* goes alone."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        full = len(batch) == BATCH_TEXTS or characters + len(text) > BATCH_CHARACTERS
        if batch and (full or len(text) > longest):
            yield batch
            batch, characters = [], 0
        batch.append(text)
        characters = characters + len(text) if len(text) <= longest else BATCH_CHARACTERS
    if batch:
        yield batch
