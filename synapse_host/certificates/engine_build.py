"""Which build of an engine is installed: a digest over everything that computes its numbers.

A version says too little: llama-cpp-python built again against OpenBLAS keeps its version and gives other numbers. So
the native libraries of an engine's distributions are hashed, with the sources of our own worker; of a foreign worker
the files that its command names. Hashing hundreds of megabytes takes a second, so a file's digest is kept until its
size, times or inode are others.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

from synapse_host.placement import interpreter
from synapse_host.placement import probe as floors
from synapse_host.placement.hardware import default_cache_dir
from synapse_host.placement.matrix import WORKER_ENGINES, Engine, HardwareMatrix

FILE_NAME: Final = "builds.json"
_NATIVE: Final = re.compile(r"\.(so|dylib|dll|pyd|metallib)(\.[0-9.]+)?$")
_lock: Final = threading.Lock()


def build_id(engine: Engine, matrix: HardwareMatrix, *, cache_dir: Path | None = None) -> str | None:
    """Return ``sha256:<hex>`` of an engine's native libraries and sources; None where they can't be found."""
    try:
        files = list(_foreign(engine.command, matrix.path.parent) if engine.command else _own(engine.engine))
        folder = cache_dir or default_cache_dir()
        digests = _digests([path for _, path in files], folder / FILE_NAME if folder else None)
    except OSError:
        return None
    words = list(engine.command or ())
    told = json.dumps([words, sorted((name, digests[path]) for name, path in files)])
    return "sha256:" + hashlib.sha256(told.encode()).hexdigest() if files else None


def _own(engine: str) -> Iterator[tuple[str, Path]]:
    """Yield name and path of the files behind one of our engines. OSError where pip left no list of them."""
    root = interpreter.package_root()
    others = {name for name in WORKER_ENGINES if name != engine}
    for path in sorted((root / "engines").rglob("*.py")):
        inside = path.relative_to(root)
        if inside.parts[1] not in others:
            yield inside.as_posix(), path
    for name in floors.installed(engine):
        yield from _native(name)


def _native(name: str) -> Iterator[tuple[str, Path]]:
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return
    if found.files is None:
        raise FileNotFoundError(f"{name}: its installed files are not recorded")
    for file in found.files:
        if _NATIVE.search(file.name):
            yield file.as_posix(), Path(str(found.locate_file(file)))


def _foreign(command: Iterable[str], cwd: Path) -> Iterator[tuple[str, Path]]:
    """Yield the program and every other file that the words of a command name."""
    for number, word in enumerate(command):
        program = (
            shutil.which(word, path=os.environ.get("PATH")) if number == 0 and not Path(word).parent.name else None
        )
        path = Path(program) if program else cwd / word
        try:
            if path.is_file():
                yield word, path
        except (OSError, ValueError):
            continue  # no path at all: a script of JSON, say


def _digests(paths: Iterable[Path], cache: Path | None) -> dict[Path, str]:
    """Return the SHA-256 of each file, hashing those that changed since they were hashed last, without *cache* all."""
    with _lock:
        known = _read(cache) if cache is not None else {}
        kept: dict[str, list[object]] = {}
        found: dict[Path, str] = {}
        for path in paths:
            stat = path.stat()
            stamp = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
            entry = known.get(str(path))
            if not (isinstance(entry, list) and entry[:-1] == stamp and isinstance(entry[-1], str)):
                with path.open("rb") as file:
                    entry = [*stamp, hashlib.file_digest(file, "sha256").hexdigest()]
            kept[str(path)] = entry
            found[path] = str(entry[-1])
        if cache is not None and any(known.get(name) != entry for name, entry in kept.items()):
            _write(cache, {**known, **kept})
        return found


def _read(cache: Path) -> dict[str, object]:
    try:
        found = json.loads(cache.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(cache: Path, entries: Mapping[str, object]) -> None:
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        part = cache.with_name(f".{cache.name}.{os.getpid()}.part")
        part.write_text(json.dumps({name: entry for name, entry in entries.items() if os.path.exists(name)}))  # noqa: PTH110
        part.replace(cache)
    except OSError:
        pass  # A full or read-only disk costs the time to hash again, nothing else.
