"""Which engines the conformance suite runs over, and what it needs to know of each.

To join, an engine adds ``tests/conformance/engine_<name>.py`` with ``ENGINE = EngineUnderTest(...)``; nothing else.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engines.protocol.messages import Request

NAMES = ("llama", "cuda", "ane")


@dataclass(frozen=True)
class Subject:
    """An artifact ready for LOAD, and how to start the worker for it."""

    path: Path
    digest: str
    format: str
    dims: int
    vocab_size: int
    """Ids in [low_id, vocab_size) are ordinary tokens; vocab_size itself must be refused."""
    max_tokens: int
    """A row of this many tokens works, one more is refused."""
    config: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    """Extra worker arguments, such as ``--manifest PATH``."""
    low_id: int = 5
    truncatable: bool = True
    """Whether half of the file is a file to refuse (False for a directory)."""


@dataclass(frozen=True)
class EngineUnderTest:
    """One engine, its worker command's module, and makers of its toys."""

    name: str
    module: str
    hello_name: str
    factory: str
    """``package.module:Class``, constructed from WorkerOptions in a child of the suite."""
    device: str
    serves: frozenset[type[Request]]
    embedder: Callable[[Path], Subject]
    bad_config: dict[str, str]
    """A runtime_config that LOAD must answer with ``config_invalid``."""
    long_embedder: Callable[[Path], Subject] | None = None
    """A model and row length that keep one EMBED_BATCH of 256 rows busy for at least a quarter of a second."""
    reranker: Callable[[Path], Subject] | None = None
    owned: bool = False
    batch_cosine: float = 0.99999
    """How close a row among others is to the row alone."""
    marks: tuple[pytest.MarkDecorator, ...] = ()


def engines() -> list[EngineUnderTest]:
    """Return every engine that has joined."""
    folder = Path(__file__).parent
    return [
        importlib.import_module(f"tests.conformance.engine_{name}").ENGINE
        for name in NAMES
        if (folder / f"engine_{name}.py").is_file()
    ]
