"""What a finding is; then those about the machine, its Python, and what hosts left on it."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from synapse_host.worker import runtime_dir

GIB: Final = 1024**3
MIN_DESCRIPTORS: Final = 256
MIN_FREE_RAM: Final = 1 * GIB
MIN_FREE_DISK: Final = 1 * GIB


Severity: TypeAlias = Literal["info", "warning", "failure"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found. ``fix`` is a line to type or do, empty where nothing needs doing."""

    id: str
    severity: Severity
    what: str
    fix: str = ""


def onnxruntime_findings(found: Mapping[str, str]) -> Iterator[Finding]:
    """Report two distributions that own the same module."""
    if len(found) > 1:
        names = sorted(found)
        what = f"both {' and '.join(names)} are installed; they own the same module and one hides the other"
        fix = f"pip uninstall -y {' '.join(names)} && pip install --force-reinstall onnxruntime-gpu"
        yield Finding("onnxruntime.clash", "failure", what, fix)


def resource_findings(ram_free: int, models_dir: Path | None) -> Iterator[Finding]:
    """Report little memory, and a folder for bundles that has no room or can't be written."""
    if ram_free < MIN_FREE_RAM:
        what = f"{ram_free / GIB:.1f} GB of memory are free"
        yield Finding("memory.low", "warning", what, "close something before loading models")
    if models_dir is None:
        return
    disk_free, place = free_disk(models_dir), _existing(models_dir)
    if not os.access(place, os.W_OK):
        # A read-only file system has no free space either; that is not what is wrong with it.
        what = f"no bundle can be made in {models_dir}: {place} can't be written"
        yield Finding("models.unwritable", "warning", what, "pass --models-dir, or make it writable")
    elif disk_free is not None and disk_free < MIN_FREE_DISK:
        what = f"{disk_free / GIB:.1f} GB are free where bundles are made ({models_dir})"
        yield Finding("disk.low", "warning", what, "free some space or pass --models-dir")


def descriptor_findings(limit: int | None) -> Iterator[Finding]:
    """Report a low limit of open files."""
    if limit is not None and limit < MIN_DESCRIPTORS:
        what = f"only {limit} files may be open at once; lanes need about 8 each"
        yield Finding("descriptors.low", "warning", what, "ulimit -n 1024")


def socket_length(runtime: Path) -> int:
    """Return the bytes of the longest socket path below a runtime directory."""
    # mkdtemp adds synapse-xxxxxxxx, a worker's name its lane and generation.
    return len(os.fsencode(str(runtime / "synapse-12345678" / "synapse" / "workers" / "generate-1000.sock")))


def abandoned_findings(roots: Iterable[Path]) -> Iterator[Finding]:
    """Report private runtime directories whose hosts were killed; the next one-shot verb removes them."""
    found = [path for root in roots for path in runtime_dir.sweep(root, remove=False)]
    if found:
        number = "1 runtime directory" if len(found) == 1 else f"{len(found)} runtime directories"
        what = f"{number} of hosts that were killed, first {found[0]}; the next synapse embed removes what is left"
        yield Finding("runtime.abandoned", "warning", what, f"rm -r {shlex.join(map(str, found))}")


def free_disk(folder: Path) -> int | None:
    """Return the free bytes where a folder is or will be made; None where that can't be found out."""
    try:
        return shutil.disk_usage(_existing(folder)).free
    except OSError:
        return None


def _existing(folder: Path) -> Path:
    """Return the folder itself, or the nearest one above it that there is."""
    return next((place for place in (folder, *folder.parents) if place.exists()), Path(folder.anchor))


def descriptor_limit() -> int | None:
    """Return how many files a process may open; None where nothing limits it."""
    try:
        import resource
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft
