"""The bundles on this machine and how they are opened: folders that are given, by name, or the installed ones."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from engines.bundle import manifest
from engines.bundle.manifest import Bundle, BundleError
from synapse_host.errors import BundleInvalid, Place, of_os
from synapse_host.placement import places
from synapse_host.placement.places import NoHome

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called as ``progress(stage, done, total)``; the unit is bytes of finished work."""

_log = logging.getLogger(__name__)


def silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""


@contextmanager
def failures(place: Path, model: str = "") -> Iterator[None]:
    """Raise a BundleError of the block as BundleInvalid, an OSError as that or as StorageFull where there is no room.

    *place*: what an OSError is about that names no file. *model*: named first, where the caller knows one by name.
    """
    about, details = (f"model {model}: ", {"model": model}) if model else ("", {})
    try:
        yield
    except BundleError as exc:
        raise BundleInvalid(f"{about}{exc}", details=details) from exc
    except OSError as exc:
        text = f"{about}{exc.filename or place}: {exc.strerror or exc}"
        raise of_os(exc, text, otherwise=BundleInvalid, details=details) from exc


def models_dir(given: Path | None = None) -> Path:
    """Return the folder of the bundles: the given one, ``SYNAPSE_MODELS_DIR``, or the user's cache. Raises NoHome."""
    chosen = given or os.environ.get("SYNAPSE_MODELS_DIR")
    return places.expanded(Path(chosen)).absolute() if chosen else places.cache() / "models"


def installed(folder: Path | None = None) -> dict[str, Path]:
    """Return the bundles in the models folder by name: every sub-folder with a manifest, sorted."""
    try:
        root = models_dir(folder)
        names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    except (FileNotFoundError, NoHome):
        return {}
    return {name: root / name for name in names if (root / name / manifest.FILE_NAME).exists()}


def read(name: str, path: Path) -> Bundle:
    """Return the bundle in a folder; BundleInvalid names the model, which the manifest's own words don't."""
    try:
        return manifest.read(path)
    except BundleError as exc:
        advice: dict[Place, str] = {}
        if not path.exists() and len(path.parts) == 1:
            # Most likely a name where a folder is wanted.
            advice = {
                "python": "A model is given by its folder; without models= a host has the installed ones.",
                "command": f"A model is given by its folder; an installed one's: synapse models path {path}.",
            }
        text = f"model {name}: {exc}{'.' if advice else ''}"
        raise BundleInvalid(text, details={"model": name, "path": str(path)}, advice=advice) from exc


def open_bundles(models: Mapping[str, Path | str]) -> dict[str, Bundle]:
    """Read the manifests of bundle folders by name; BundleInvalid says which one can't be used."""
    return {name: read(name, Path(path)) for name, path in models.items()}


def open_installed(
    models_dir: Path | None, *, left_out: Callable[[BundleInvalid], None] | None = None
) -> dict[str, Bundle]:
    """Read the manifests of the bundles in the models directory; one that can't be used is left out of what is served.

    *left_out* is called for each of those; without it a warning is logged.
    """
    bundles: dict[str, Bundle] = {}
    for name, path in installed(models_dir).items():
        try:
            bundles[name] = read(name, path)
        except BundleInvalid as exc:
            if left_out is not None:
                left_out(exc)
            else:
                _log.warning("a bundle is left out: %s", exc.message)
    return bundles


def readable(models_dir: Path | None) -> dict[str, Bundle]:
    """Return the installed bundles by name, without those that can't be read and without a word about them."""
    try:
        return open_installed(models_dir, left_out=lambda exc: None)
    except OSError:
        return {}
