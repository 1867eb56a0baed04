"""The bundles a host opens: the folders it is given, by name, or the installed ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from engines.bundle.manifest import Bundle, BundleError, read
from synapse_host.errors import BundleInvalid

_log = logging.getLogger(__name__)


def open_bundles(models: Mapping[str, Path | str]) -> dict[str, Bundle]:
    """Read the manifests of bundle folders by name; BundleInvalid says which one can't be used."""
    bundles: dict[str, Bundle] = {}
    for name, path in models.items():
        try:
            bundles[name] = read(Path(path))
        except BundleError as exc:
            hint = ""
            if not Path(path).exists() and len(Path(path).parts) == 1:
                # Most likely a name where a folder is wanted.
                hint = f". A model is given by its folder; an installed one's: synapse models path {path}"
            raise BundleInvalid(f"model {name}: {exc}{hint}", details={"model": name, "path": str(path)}) from exc
    return bundles


def open_installed(
    models_dir: Path | None, *, left_out: Callable[[BundleInvalid], None] | None = None
) -> dict[str, Bundle]:
    """Read the manifests of the bundles in the models directory; one that can't be used is left out of what is served.

    *left_out* is told of each; without it a warning is logged.
    """
    from synapse_host.models import catalogue

    bundles: dict[str, Bundle] = {}
    for name, path in catalogue.installed(models_dir).items():
        try:
            bundles |= open_bundles({name: path})
        except BundleInvalid as exc:
            if left_out is not None:
                left_out(exc)
            else:
                _log.warning("a bundle is left out: %s", exc.message)
    return bundles
