"""The revision of what decides which numbers come out of a checkpoint: graphs, session options, provider options."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

SOURCES: Final = (
    *(f"graphs/{name}.py" for name in ("bert", "builder", "families", "int8", "modernbert", "qwen3")),
    "options.py",
)


def source_revision() -> str:
    """Return 12 hex digits over these source files."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()[:12]
