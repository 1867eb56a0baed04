"""What a host's calls return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EmbedResult:
    """``vectors``: float32 (n, dims), in input order; ``truncated``: indices of texts that were cut."""

    vectors: FloatArray
    truncated: list[int]
    model: str
    lane: str
    engine: str
    device: str
    tokens: int = 0
    """Token ids sent, special ones included."""


@dataclass(frozen=True, slots=True)
class RerankResult:
    """``scores``: float32 (documents,), in input order; ``truncated``: indices of documents that were cut."""

    scores: FloatArray
    truncated: list[int]
    model: str
    lane: str
    engine: str
    device: str
    tokens: int = 0
    """Token ids of all pairs, special ones included."""

    @property
    def order(self) -> list[int]:
        """Document indices, best first; equal scores keep input order."""
        order: list[int] = (-self.scores).argsort(kind="stable").tolist()
        return order


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished greedy generation; ``n_gen`` excludes the stop token; ``finish_reason`` is ``stop`` or ``length``."""

    text: str
    n_prompt: int
    n_gen: int
    finish_reason: str
    generated_token_ids: tuple[int, ...] = ()
    model: str = ""
    lane: str = ""
    engine: str = ""
    device: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """What a generation has added since the last piece; the pieces' texts end to end are its text.

    ``text`` holds whole characters only and may be empty. ``n_gen`` counts from the start. ``finish_reason`` is None
    until the last piece, which says ``stop`` (an end of the model's own, or a stop string) or ``length``.
    """

    text: str
    n_prompt: int
    n_gen: int
    finish_reason: str | None = None


def sigmoid(logits: FloatArray) -> FloatArray:
    """Return the logistic function, float32, stable at both ends: never overflows, never NaN for finite input."""
    import numpy as np

    small = np.exp(-np.abs(logits))
    result: FloatArray = np.where(logits >= 0, 1.0 / (1.0 + small), small / (1.0 + small)).astype(np.float32)
    return result
