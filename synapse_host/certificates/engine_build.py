"""Which build of an engine is installed: a digest over everything that computes its numbers.

A version says too little: llama-cpp-python built again against OpenBLAS keeps its version and gives other numbers. So
the native libraries of an engine's distributions are hashed, with the sources of our own worker; of a foreign worker
the files that its command names. Hashing hundreds of megabytes takes a second, so a process remembers the digest of a
file until its size, times or inode are others.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Final

from synapse_host.placement import interpreter
from synapse_host.placement import probe as floors
from synapse_host.placement.matrix import WORKER_ENGINES, Engine, HardwareMatrix

_NATIVE: Final = re.compile(r"\.(so|dylib|dll|pyd|metallib)(\.[0-9.]+)?$")


def build_id(engine: Engine, matrix: HardwareMatrix) -> str | None:
    """Return ``sha256:<hex>`` of an engine's native libraries and sources; None where they can't be found."""
    try:
        files = sorted(_foreign(engine.command, matrix.path.parent) if engine.command else _own(engine.engine))
        stats = [(path, path.stat()) for _, path in files]
        digests = [_digest(path, of.st_size, of.st_mtime_ns, of.st_ctime_ns, of.st_ino) for path, of in stats]
    except OSError:
        return None
    named = sorted((name, digest) for (name, _), digest in zip(files, digests, strict=True))
    words = json.dumps([list(engine.command or ()), named])
    return "sha256:" + hashlib.sha256(words.encode()).hexdigest() if files else None


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
    from importlib.metadata import PackageNotFoundError, distribution

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


@lru_cache(maxsize=4096)
def _digest(path: Path, size: int, modified: int, changed: int, inode: int) -> str:
    """Return the SHA-256 of a file; it is hashed again once its size, times or inode are others."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
