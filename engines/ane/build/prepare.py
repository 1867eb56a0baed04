"""Install-time preparation on a Mac: compile a bundle's packages to a stable path and pay every first load there.

Apple's specialisation is cached by full path and configuration. So bundles are compiled into a staging folder on the
same volume, renamed once, and each function is then loaded from its final path with exactly the worker's configuration;
the record says what was made from what, on which OS build, and how long each first load took (ane.md 5 and 6). An OS
update makes the record void: run it again.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from engines.ane.artifact import MAIN
from engines.ane.backend import Source
from engines.ane.binding import compile_package
from engines.ane.build.package import SPEC, SUFFIX, read_spec
from engines.ane.coreml import CoreML
from engines.bundle import manifest, preparation
from engines.bundle.digest import same, tree_digest
from engines.bundle.manifest import BundleError
from engines.bundle.preparation import FunctionRecord, Preparation, sweep

if TYPE_CHECKING:
    from engines.ane.backend import Backend
    from engines.bundle.manifest import Artifact

COMPILED_SUFFIX = ".mlmodelc"
Compiler: TypeAlias = Callable[[Path], Path]
Progress: TypeAlias = Callable[[str, int, int], None]


def prepare(
    bundle: Path,
    cache: Path | None = None,
    *,
    backend: Backend | None = None,
    compiler: Compiler = compile_package,
    progress: Progress = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Prepare every coreml artifact of a bundle; return {prepared: [{source_digest, path, digest, …}]}.

    Raises BundleError (digest, manifest) or EngineError (backend_missing off a Mac, what compiling and loading raise).
    *backend* and *compiler* are the two calls into the framework; tests pass others.
    """
    backend = backend or CoreML()
    backend.require()
    found = manifest.read(bundle)
    artifacts = found.artifacts("coreml")
    if not artifacts:
        raise BundleError(f"{found.root}: no coreml artifact; build one with `python -m engines.ane build`")
    cache = cache or preparation.default_cache()
    return {"prepared": [_prepare(found.path(a.path), a, cache, backend, compiler, progress) for a in artifacts]}


def _prepare(
    source: Path, artifact: Artifact, cache: Path, backend: Backend, compiler: Compiler, progress: Progress
) -> dict[str, Any]:
    found = tree_digest(source, partial(progress, "digest"))
    if not same(artifact.digest, found.compatible):
        raise BundleError(f"{source}: digest is sha256:{found.compatible}, expected {artifact.digest}; build it again")
    if not same(str(artifact.tree), found.injective):
        raise BundleError(f"{source}: tree is sha256:{found.injective}, expected {artifact.tree}; build it again")
    root = preparation.folder(cache, artifact.digest)
    root.mkdir(parents=True, exist_ok=True)
    sweep(root)
    names = [function.name for function in artifact.functions or ()]
    functions = _compile(source, root, names, compiler, progress)
    compiled, file = root / preparation.COMPILED, root / preparation.RECORD
    digest = f"sha256:{tree_digest(compiled).compatible}"
    record = Preparation(artifact.digest, digest, backend.os_build(), functions)
    # First without load times, so that an interrupted preparation is visible as one; then function by function.
    write(file, record)
    for done, (name, one) in enumerate(functions.items(), 1):
        started = time.monotonic()
        where = Source(compiled / one.bundle, name if one.multi else MAIN, one.multi)
        backend.open(where, units="cpu_and_ne").close()
        timed = msgspec.structs.replace(one, first_load_ms=round((time.monotonic() - started) * 1000))
        record = msgspec.structs.replace(record, functions={**record.functions, name: timed})
        write(file, record)
        progress("load", done, len(names))
    return {
        "source_digest": record.source_digest,
        "path": str(compiled),
        "digest": digest,
        "os_build": record.os_build,
        "first_load_ms": {name: function.first_load_ms for name, function in record.functions.items()},
    }


def _compile(
    source: Path, root: Path, names: Sequence[str], compiler: Compiler, progress: Progress
) -> dict[str, FunctionRecord]:
    """Compile into a staging folder beside the final one and rename it; a finished ``compiled`` folder is kept."""
    multi = (source / SPEC).exists()
    packages = {"model": source} if multi else {name: source / f"{name}{SUFFIX}" for name in names}
    specs = {stem: read_spec(path) for stem, path in packages.items()}
    final = root / preparation.COMPILED
    if not final.exists():
        staging = Path(tempfile.mkdtemp(dir=root, prefix=".compiled.", suffix=".tmp"))
        try:
            for done, (stem, path) in enumerate(packages.items(), 1):
                # The compiler's place may be another volume, so this may copy; only the rename below has to be atomic.
                shutil.move(str(compiler(path)), str(staging / f"{stem}{COMPILED_SUFFIX}"))
                progress("compile", done, len(packages))
            staging.rename(final)
        except OSError:
            # Another preparer was quicker: its result lies at the same path.
            if not final.is_dir():
                raise
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    records = {}
    for name in names:
        stem, inner = ("model", name) if multi else (name, MAIN)
        if inner not in specs[stem]:
            raise BundleError(f"the package has no function {name!r} (it has: {sorted(specs[stem])})")
        spec = specs[stem][inner]
        records[name] = FunctionRecord(spec.inputs, spec.outputs, f"{stem}{COMPILED_SUFFIX}", multi)
    return records


def write(file: Path, record: Preparation) -> None:
    """Write the record so that a crash leaves the old one or the new one, never half of one."""
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=".record.", suffix=".tmp")
    with os.fdopen(descriptor, "wb") as out:
        out.write(msgspec.json.format(msgspec.json.encode(record), indent=1))
        out.flush()
        os.fsync(out.fileno())
    Path(name).replace(file)
