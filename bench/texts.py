"""The texts that everyone gets: English words that are one token each, so that lengths are exact (models.md 7)."""

from __future__ import annotations

import json
import random
from pathlib import Path

SEED = 20240711


def words(tokenizer: Path) -> list[str]:
    """Return the plain words of a WordPiece vocabulary, in its order."""
    vocabulary = json.loads(tokenizer.read_text())["model"]["vocab"]
    return [word for word in vocabulary if word.isascii() and word.isalpha() and word.islower() and len(word) > 2]


def text(rng: random.Random, vocabulary: list[str], tokens: int) -> str:
    """Return a text of exactly *tokens* tokens, [CLS] and [SEP] included."""
    return " ".join(rng.choice(vocabulary) for _ in range(tokens - 2))


def equal(tokenizer: Path, count: int, tokens: int) -> list[str]:
    """Return *count* texts of *tokens* tokens."""
    rng = random.Random(SEED + tokens)
    vocabulary = words(tokenizer)
    return [text(rng, vocabulary, tokens) for _ in range(count)]


def mixed_lengths(count: int) -> list[int]:
    """Return *count* log-normal lengths, median 40, from 6 to 256 tokens."""
    rng = random.Random(SEED)
    return [min(256, max(6, round(rng.lognormvariate(3.69, 0.85)))) for _ in range(count)]


def mix(tokenizer: Path, count: int) -> list[str]:
    """Return *count* texts of :func:`mixed_lengths`."""
    rng = random.Random(SEED)
    vocabulary = words(tokenizer)
    return [text(rng, vocabulary, length) for length in mixed_lengths(count)]
