"""Which release of the project runs here, and which one is installed by now.

Host and workers are deployed together. A host keeps the code it was started with, while a worker is started from what
lies on the disk: after an upgrade under a running host the two would differ without a word.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Final

_FOLDER: Final = re.compile(r"synapse_workers-(.+)\.dist-info")


def installed() -> str | None:
    """Return the version on the disk now; None in a tree that was never installed, or in the middle of an upgrade."""
    # The name of the metadata folder says it; importlib.metadata takes 15 ms to say the same.
    for folder in sys.path:
        try:
            with os.scandir(folder or ".") as entries:
                found = sorted(match[1] for entry in entries if (match := _FOLDER.fullmatch(entry.name)))
        except OSError:
            continue  # a zip archive, or a folder that isn't there
        if found:
            return found[-1]
    return None


LOADED: Final = installed()
"""The version that this process was started with."""


def changed() -> tuple[str, str] | None:
    """Return the versions loaded and installed where they differ, None where they don't or one isn't known."""
    now = installed()
    return (LOADED, now) if LOADED is not None and now is not None and now != LOADED else None
