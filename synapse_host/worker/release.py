"""Which release of the project runs here, and which one is installed by now.

Host and workers are deployed together. A host keeps the code it was started with, while a worker is started from what
lies on the disk: after an upgrade under a running host the two would differ without a word.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final

DISTRIBUTION: Final = "synapse-workers"


def installed() -> str | None:
    """Return the version on the disk now; None in a tree that was never installed, or in the middle of an upgrade."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return None


LOADED: Final = installed()
"""The version that this process was started with."""


def changed() -> tuple[str, str] | None:
    """Return the versions loaded and installed where they differ, None where they don't or one isn't known."""
    now = installed()
    return (LOADED, now) if LOADED is not None and now is not None and now != LOADED else None
