"""Text to token ids, on the host's side: workers receive ids only.

A tokenizer opens with ``no_padding``, ``no_truncation`` and ``encode_special_tokens``: a literal ``[SEP]`` or
``<|im_end|>`` in a text is text. Special tokens around a row are those of the tokenizer's own post-processor. Too long
a text is cut only where the caller asked for it, inside the special tokens, and is told by index.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import UNSET

from engines.bundle.digest import same
from engines.bundle.manifest import Bundle, open_plain
from synapse_host.admission import too_long
from synapse_host.errors import BundleInvalid, InvalidRequest

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from tokenizers import Tokenizer

    IntArray = npt.NDArray[np.int32]

MAX_TOKENIZER_BYTES: Final = 256 * 1024 * 1024
MAX_TEXT_BYTES: Final = 16 * 1024 * 1024
"""A text beyond this is refused before it is tokenised: no model takes a thousandth of it."""

BATCH_CHARACTERS: Final = 4 * 1024 * 1024
"""Characters that the tokenizer gets at once: what it makes of them takes a hundred times their memory."""

_ALONE: Final = ("query", "prompt")
"""What a request has one of, so that an index would only confuse."""

# Source: the model card of Qwen3-Reranker, "Transformers Usage".
_JUDGE_PREFIX: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_JUDGE_SUFFIX: Final = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_JUDGE_INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True, slots=True)
class Rows:
    """Token rows laid end to end: ``ids`` int32 (tokens,), one length per row, indices of rows that were cut."""

    ids: IntArray
    lengths: list[int]
    truncated: list[int]


@dataclass(frozen=True, slots=True)
class Frame:
    """Special ids around a row, and between the two parts of a pair."""

    prefix: tuple[int, ...] = ()
    middle: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.prefix) + len(self.middle) + len(self.suffix)


class TextTokenizer:
    """One bundle's tokenizer. Thread-safe: encoding changes nothing in it."""

    def __init__(self, bundle: Bundle, *, model: str | None = None) -> None:
        manifest = bundle.manifest
        self.model = model or manifest.model_id
        self.max_tokens = manifest.max_tokens
        if manifest.tokenizer is UNSET:
            raise InvalidRequest(
                f"bundle {self.model} has no tokenizer: send token ids (embed_ids, rerank_ids, generate_ids)"
            )
        path = bundle.path(manifest.tokenizer.path)
        # Kept: the second object below comes from the same bytes, whatever becomes of the file.
        self._file = _read(path, manifest.tokenizer.digest, self.model)
        self._name = path.name
        self._plain = _open(self._file, self._name, self.model)
        special = manifest.special_ids if manifest.special_ids is not UNSET else {}
        self.single = _single_frame(self._plain, manifest.family, manifest.task, special)
        self._instructed = manifest.task == "rerank" and manifest.family == "qwen3"
        self.pair = _pair_frame(self._plain, special) if manifest.task == "rerank" else Frame()

    def rows(self, texts: Sequence[str], *, truncate: bool = False, offset: int = 0, noun: str = "text") -> Rows:
        """Return the texts' rows with their special tokens.

        Raises InvalidRequest {index} for an empty text and SequenceTooLong {index, tokens, max_tokens}; *offset* is the
        index of the first text.
        """
        return self._fitted(texts, noun, offset, self.single.prefix, self.single.suffix, truncate=truncate)

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
        prefix, suffix = self.template(_JUDGE_PREFIX), self.template(_JUDGE_SUFFIX)
        # Each part has to be a text with tokens of its own.
        for texts, noun in (([query], "query"), (documents, "document")):
            for _ in self._encode(texts, noun, 0):
                pass
        opening = f"<Instruct>: {_JUDGE_INSTRUCTION}\n<Query>: {query}\n<Document>: "
        # Encoded as one text: the first word of a document takes the space before it into its token.
        if len(self.literal(opening)) >= self.max_tokens - len(prefix) - len(suffix):
            raise InvalidRequest(
                f"the query leaves no room for a document: {self.model} takes {self.max_tokens} tokens for both. "
                "Shorten it",
                details={"max_tokens": self.max_tokens},
            )
        bodies = [opening + text for text in documents]
        return self._fitted(bodies, "document", 0, prefix, suffix, truncate=truncate)

    def prompt(self, text: str) -> Rows:
        """Return a prompt's row for generation."""
        return self.rows([text], noun="prompt")

    def template(self, text: str) -> list[int]:
        """Return the ids of text that a chat template wrote: here ``<|im_start|>`` means the special token."""
        return list(self._special.encode(text, add_special_tokens=False).ids)

    def literal(self, text: str) -> list[int]:
        """Return the ids of text that a person wrote, without special tokens."""
        return list(self._plain.encode(text, add_special_tokens=False).ids)

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
    def _special(self) -> Tokenizer:
        # An object of its own: the switch below must never be seen by a thread that encodes a person's text.
        tokenizer = _open(self._file, self._name, self.model)
        tokenizer.encode_special_tokens = False
        return tokenizer

    def _encode(self, texts: Sequence[str], noun: str, offset: int) -> Iterator[list[int]]:
        """Yield the ids of each text, the caller's to drop: a chunk of the longest texts fits no memory as ids."""
        for index, text in enumerate(texts, offset):
            name = noun if noun in _ALONE else f"{noun} {index}"
            if not isinstance(text, str):
                raise InvalidRequest(f"{name} is {type(text).__name__}, not text", details={"index": index})
            if not text.strip():
                raise InvalidRequest(f"{name} is empty", details={"index": index})
            if (length := str.__len__(text)) > MAX_TEXT_BYTES:  # a subclass may say anything
                raise InvalidRequest(
                    f"{name} has {length} characters, at most {MAX_TEXT_BYTES}", details={"index": index}
                )
            if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
                raise InvalidRequest(
                    f"{name} holds half a surrogate pair; it is not valid text", details={"index": index}
                )
        encode = getattr(self._plain, "encode_batch_fast", self._plain.encode_batch)
        index = offset
        for batch in _batches(texts):
            for item in encode(batch, add_special_tokens=False):
                if not item.ids:
                    name = noun if noun in _ALONE else f"{noun} {index}"
                    raise InvalidRequest(
                        f"{name} has no tokens: the tokenizer drops all of it", details={"index": index}
                    )
                yield item.ids
                index += 1

    def _query(self, query: str, special: int) -> list[int]:
        """Return a query's ids, which leave room for a document."""
        ids = next(self._encode([query], "query", 0))
        if len(ids) + special >= self.max_tokens:
            raise InvalidRequest(
                f"the query has {len(ids)} tokens and leaves no room for a document: {self.model} takes "
                f"{self.max_tokens} for both. Shorten it",
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
        taken += len(before) + len(after)
        rows: list[Sequence[int]] = []
        truncated: list[int] = []
        for index, ids in enumerate(self._encode(texts, noun, offset), offset):
            if taken + len(ids) > self.max_tokens:
                if not truncate:
                    raise too_long(index, taken + len(ids), self.max_tokens, model=self.model, noun=noun)
                truncated.append(index)
                ids = ids[: self.max_tokens - taken]
            rows.append((*before, *ids, *after) if before or after else ids)
        return Rows(flatten(rows), [len(row) for row in rows], truncated)


def flatten(rows: Sequence[Sequence[int]]) -> IntArray:
    """Return the rows end to end as int32 (tokens,)."""
    import numpy as np

    total = sum(map(len, rows))
    return np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=total)


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield the texts in lists of at most BATCH_CHARACTERS, or one text."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        length = str.__len__(text)
        if batch and characters + length > BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
        batch.append(text)
        characters += length
    if batch:
        yield batch


def _cut(rows: Rows) -> list[list[int]]:
    flat = rows.ids.tolist()
    cut, start = [], 0
    for length in rows.lengths:
        cut.append(flat[start : start + length])
        start += length
    return cut


def _read(path: Path, digest: str, model: str) -> bytes:
    """Return a tokenizer file's bytes, checked: another vocabulary would give wrong vectors without any error."""
    try:
        with open_plain(path) as file:
            data = file.read(MAX_TOKENIZER_BYTES + 1)
    except OSError as exc:
        raise BundleInvalid(
            f"bundle {model}: {path.name} can't be read as a tokenizer: {exc.strerror or exc}. Rebuild the bundle"
        ) from exc
    if len(data) > MAX_TOKENIZER_BYTES:
        raise BundleInvalid(f"bundle {model}: {path.name} has more than {MAX_TOKENIZER_BYTES} bytes")
    actual = hashlib.sha256(data).hexdigest()
    if not same(digest, actual):
        raise BundleInvalid(
            f"bundle {model}: {path.name} was changed: its digest is sha256:{actual}, the manifest says {digest}. "
            "Install or build the bundle again",
            details={"file": str(path), "expected": digest, "observed": f"sha256:{actual}"},
        )
    return data


def _open(data: bytes, name: str, model: str) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as exc:  # the library raises a bare Exception for any bad file
        raise BundleInvalid(f"bundle {model}: {name} can't be read as a tokenizer: {exc}. Rebuild the bundle") from exc
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _single_frame(tokenizer: Tokenizer, family: str, task: str, special: dict[str, int]) -> Frame:
    frame = _observed(tokenizer, ["a"])
    if len(frame):
        return frame
    # A tokenizer file without a post-processor: the family says what its models were trained with.
    if family in ("bert", "modernbert") and {"cls", "sep"} <= special.keys():
        return Frame(prefix=(special["cls"],), suffix=(special["sep"],))
    if family == "qwen3" and task == "embed" and "eos" in special:
        # Last-token pooling reads the end-of-text token.
        return Frame(suffix=(special["eos"],))
    return Frame()


def _pair_frame(tokenizer: Tokenizer, special: dict[str, int]) -> Frame:
    frame = _observed(tokenizer, ["a", "b"])
    if frame.middle:
        return frame
    if {"cls", "sep"} <= special.keys():
        return Frame((special["cls"],), (special["sep"],), (special["sep"],))
    return frame


def _observed(tokenizer: Tokenizer, parts: list[str]) -> Frame:
    """Read the special ids off an encoding of one or two short texts."""
    encoding = tokenizer.encode(parts[0], parts[1] if len(parts) == 2 else None, add_special_tokens=True)
    ids, mask, owners = encoding.ids, encoding.special_tokens_mask, encoding.sequence_ids
    real = [i for i, is_special in enumerate(mask) if not is_special]
    if not real:
        return Frame()
    middle: tuple[int, ...] = ()
    if len(parts) == 2:
        first = max((i for i in real if owners[i] == 0), default=real[0])
        second = min((i for i in real if owners[i] == 1), default=real[-1])
        middle = tuple(ids[first + 1 : second])
    return Frame(tuple(ids[: real[0]]), middle, tuple(ids[real[-1] + 1 :]))


def pair_frame(bundle: Bundle, tokenizer: TextTokenizer | None) -> Frame:
    """Return the special ids of a pair: the bundle's tokenizer's, or the manifest's where it has none."""
    if tokenizer is not None or bundle.manifest.tokenizer is not UNSET:
        return (tokenizer or TextTokenizer(bundle)).pair
    special = bundle.manifest.special_ids if bundle.manifest.special_ids is not UNSET else {}
    if not {"cls", "sep"} <= special.keys():
        raise InvalidRequest(
            f"bundle {bundle.manifest.model_id} has neither a tokenizer nor special_ids cls and sep: "
            "pairs can't be composed"
        )
    return Frame((special["cls"],), (special["sep"],), (special["sep"],))


def compose_ids(frame: Frame, query: IntArray, candidates: Rows) -> Rows:
    """Return composed rows for an owned rerank worker from bare segments of ids."""
    head = (*frame.prefix, *query.tolist(), *frame.middle)
    rows = [(*head, *candidate, *frame.suffix) for candidate in _cut(candidates)]
    return Rows(flatten(rows), [len(row) for row in rows], [])
