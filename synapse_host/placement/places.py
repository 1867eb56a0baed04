"""The user's own folders: where models, probe answers and certificates are kept when nobody names another place.

A user may have none: ``docker run --user 54321`` has neither HOME nor an entry in passwd. What needs such a folder says
so (:class:`NoHome`), and what only would be kept there is not kept. Never is a folder called ``~`` made.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from synapse_host.errors import InvalidRequest


class NoHome(InvalidRequest):
    """This user has no home folder, and no XDG variable names another one."""


class NoTemporary(InvalidRequest):
    """No folder for temporary files can be written."""


def temporary() -> Path:
    """Return the folder for temporary files. Raises NoTemporary."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as exc:
        raise NoTemporary(
            f"{exc.strerror}. Set TMPDIR to a folder that this user may write",
            details={"reason": "no_temporary"},
        ) from exc


def cache() -> Path:
    """Return the user's cache folder of this project. Raises NoHome."""
    from platformdirs import user_cache_path

    return _found(lambda: user_cache_path("synapse", appauthor=False), "XDG_CACHE_HOME")


def data() -> Path:
    """Return the user's data folder of this project. Raises NoHome."""
    from platformdirs import user_data_path

    return _found(lambda: user_data_path("synapse", appauthor=False), "XDG_DATA_HOME")


def expanded(path: Path | str) -> Path:
    """Return *path* with a leading ``~`` replaced by the home folder. Raises NoHome."""
    try:
        return Path(path).expanduser()
    except RuntimeError as exc:
        raise _no_home("HOME") from exc


def _found(folder: Callable[[], Path], variable: str) -> Path:
    try:
        path = folder()
    except RuntimeError as exc:
        raise _no_home(variable) from exc
    # An older platformdirs leaves the `~` where it is.
    if not path.is_absolute():
        raise _no_home(variable)
    return path


def _no_home(variable: str) -> NoHome:
    user = f"user {os.getuid()}" if hasattr(os, "getuid") else "this user"
    return NoHome(
        f"{user} has no home folder to keep things in: set HOME, or {variable}, to a folder that may be written"
        if variable != "HOME"
        else f"{user} has no home folder: set HOME, or write paths without ~",
        details={"reason": "no_home"},
    )
