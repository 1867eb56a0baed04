"""The Python that our own child programs run with (workers, probes, converters and pip), and the release they are of.

A child never imports from the caller's folder: ``python -m`` looks for modules in the current folder first, and a
checkpoint may well hold a ``gguf.py``. Our own modules are started in :func:`package_root`; pip gets ``-P``.

Host and workers are deployed together. A host keeps the code it was started with, while a worker is started from what
lies on the disk: after an upgrade under a running host the two would differ without a word (:func:`changed_release`).
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Final

from synapse_host.errors import BackendMissing

VARIABLE: Final = "SYNAPSE_PYTHON"
"""Environment variable that names the interpreter where this process can't: inside uwsgi, or a frozen program."""
_METADATA: Final = re.compile(r"synapse_workers-(.+)\.dist-info")
_PYTHON: Final = re.compile(r"python|pypy", re.IGNORECASE)


def installed_release() -> str | None:
    """Return the version on the disk now; None in a tree that was never installed, or in the middle of an upgrade."""
    # The name of the metadata folder says it; importlib.metadata takes 15 ms to say the same.
    for folder in sys.path:
        try:
            with os.scandir(folder or ".") as entries:
                found = sorted(match[1] for entry in entries if (match := _METADATA.fullmatch(entry.name)))
        except OSError:
            continue  # a zip archive, or a folder that isn't there
        if found:
            return found[-1]
    return None


RELEASE: Final = installed_release()
"""The version that this process was started with."""
VERSION: Final = RELEASE or "0+unknown"
"""How people are told that version, also in a tree that was never installed."""


def changed_release() -> tuple[str, str] | None:
    """Return the versions loaded and installed where they differ, None where they don't or one isn't known."""
    now = installed_release()
    return (RELEASE, now) if RELEASE is not None and now is not None and now != RELEASE else None


def executable() -> str:
    """Return the path of a Python that imports what this process does.

    ``SYNAPSE_PYTHON``, else ``sys.executable`` where that is a Python, else the one of this environment's own folder.
    An embedding program (uwsgi, a frozen application) has its own path in ``sys.executable``, or nothing: started as a
    worker it would start itself over and over. BackendMissing says so and what to set.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen:
        if os.access(chosen, os.X_OK) and os.path.isfile(chosen):  # noqa: PTH113 - a name as the user wrote it
            return chosen
        raise _missing(f"{VARIABLE} is {chosen!r}, which is no program")
    own = sys.executable
    if own and _PYTHON.search(os.path.basename(own)) and not getattr(sys, "frozen", False):  # noqa: PTH119
        return own
    for path in _of_this_environment():
        if os.access(path, os.X_OK):
            return str(path)
    raise _missing(f"this process is {own!r}, which is no Python" if own else "this process doesn't know its Python")


def module(name: str) -> tuple[str, ...]:
    """Return the command that runs one of our modules; start it in :func:`package_root`. Raises BackendMissing."""
    return (executable(), "-m", name)


def package_root() -> Path:
    """Return the folder that holds the ``engines`` package: where our own child programs are started."""
    import engines

    return Path(next(iter(engines.__path__))).absolute().parent


def search_path() -> dict[str, str]:
    """Return the environment variable by which a child finds what is installed through PYTHONPATH alone, or nothing.

    Those of PYTHONPATH's folders that hold installed packages (``pip install --target``), absolute, for the child is
    started elsewhere. A folder of a program's own modules is left out: a worker needs none of them.
    """
    if sys.flags.ignore_environment:
        return {}
    entries = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]  # noqa: PTH100
    installs = [entry for entry in entries if any(Path(entry).glob("*.dist-info"))]
    return {"PYTHONPATH": os.pathsep.join(installs)} if installs else {}


def _of_this_environment() -> list[Path]:
    prefix, version = Path(sys.prefix), f"python{sys.version_info.major}.{sys.version_info.minor}"
    if os.name == "nt":
        return [prefix / "Scripts" / "python.exe", prefix / "python.exe"]
    return [prefix / "bin" / version, prefix / "bin" / "python3"]


def _missing(why: str) -> BackendMissing:
    return BackendMissing(
        f"workers can't be started: {why}. Set {VARIABLE} to the Python that has synapse-workers installed",
        details={"reason": "no_python", "executable": sys.executable or "", "variable": VARIABLE},
    )
