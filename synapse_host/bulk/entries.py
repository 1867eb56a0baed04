"""What a corpus becomes before it is embedded: texts cut into chunks, empty ones by the caller's policy.

An *entry* is one row of the result. Reading a corpus twice with the same policy gives the same entries, which is what
counting, resuming and the list of ids rest on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from synapse_host.bulk.corpus import OnBad, Text, refuse
from synapse_host.errors import InvalidRequest
from synapse_host.text.validate import prompt_text

if TYPE_CHECKING:
    from engines.bundle.manifest import Bundle
    from synapse_host.text.tokenizer import TextTokenizer

Empty: TypeAlias = Literal["error", "skip", "zero"]
"""What becomes of an empty text: an error, nothing, or a row of zeros."""
OnError: TypeAlias = Literal["stop", "skip"]


@dataclass(frozen=True, slots=True)
class Chunking:
    """Cut texts into chunks of at most ``tokens`` tokens; the first ``overlap`` are the end of the chunk before."""

    tokens: int
    overlap: int = 0

    @classmethod
    def of(cls, text: str) -> Chunking:
        """Parse ``TOKENS[:OVERLAP]``. InvalidRequest."""
        tokens, _, overlap = text.partition(":")
        if not re.fullmatch("[0-9]{1,9}(:[0-9]{1,9})?", text) or int(tokens) <= int(overlap or 0):
            raise InvalidRequest(f"chunks of {text[:40]!r}: must be TOKENS or TOKENS:OVERLAP, with fewer of the latter")
        return cls(int(tokens), int(overlap or 0))

    def check(self, tokenizer: TextTokenizer, prompt: str | None = None) -> None:
        """Raise InvalidRequest where a chunk would not fit the model behind *prompt*."""
        room = tokenizer.room(prompt)
        if self.tokens > room:
            raise InvalidRequest(
                f"chunks of {self.tokens} tokens don't fit: {tokenizer.model} takes {room} beside its special "
                "tokens and prompt",
                details={"tokens": self.tokens, "max_tokens": room},
            )


@dataclass(frozen=True, slots=True)
class Policy:
    """What becomes of each text: cut where too long, cut into chunks, left out where empty or bad, put behind a prompt.

    ``prompt`` and ``dimensions``: as :meth:`synapse_host.host.Host.embed`.
    """

    truncate: bool = False
    empty: Empty = "error"
    on_error: OnError = "stop"
    chunking: Chunking | None = None
    prompt: str | None = None
    dimensions: int | None = None

    def tokenizer(self, bundle: Bundle, model: str) -> TextTokenizer | None:
        """Return what cuts chunks for a model, None where none are cut. InvalidRequest for one it can't follow."""
        prompt_text(bundle.manifest, self.prompt)
        if self.chunking is None:
            return None
        from synapse_host.text.tokenizer import TextTokenizer

        tokenizer = TextTokenizer(bundle, model=model)
        self.chunking.check(tokenizer, self.prompt)
        return tokenizer

    def entries(self, texts: Iterable[Text], tokenizer: TextTokenizer | None, on_bad: OnBad = None) -> Iterator[Text]:
        """Iterate over the entries of *texts*; chunk *n* of the text ``id`` has the id ``id#n``.

        Raises as the corpus, and InvalidRequest {where} for an empty text under ``error``, unless *on_bad* takes it.
        """
        for text in texts:
            if not text.text.strip():
                if self.empty == "zero":
                    yield text
                elif self.empty == "error" and not text.blank:
                    error = InvalidRequest(
                        f"{text.where}: the text is empty.",
                        details={"where": text.where},
                        advice={
                            "python": 'Leave it out, or pass Policy(empty="skip") or Policy(empty="zero").',
                            "command": "Leave it out, or pass --empty skip or --empty zero.",
                        },
                    )
                    refuse(error, on_bad)
            elif self.chunking is None or tokenizer is None:
                yield text
            else:
                pieces = tokenizer.pieces(text.text, self.chunking.tokens, self.chunking.overlap, self.prompt)
                for number, piece in enumerate(pieces):
                    name, where = f"{text.id}#{number}", f"{text.where}#{number}"
                    yield replace(text, text=piece, id=name, where=where, named=True)

    def facts(self) -> dict[str, Any]:
        """Return what of it shapes the rows, for records and for who reads the corpus again."""
        cut = self.chunking and [self.chunking.tokens, self.chunking.overlap]
        policy = {"truncate": self.truncate, "empty": self.empty, "on_error": self.on_error, "chunk": cut}
        # Parts of older jobs don't have this key: without it a job still goes on from theirs.
        short = {} if self.dimensions is None else {"dimensions": self.dimensions}
        return policy | {"prompt": self.prompt} | short
