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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from engines.ane.backend import Source
from engines.ane.package import MAIN, SPEC, SUFFIX, PackageSpec, read_spec
from engines.bundle import manifest, preparation
from engines.bundle.digest import same, tree_digest
from engines.bundle.manifest import BundleError
from engines.bundle.preparation import FunctionRecord, Preparation, TensorRecord, sweep

if TYPE_CHECKING:
    from engines.ane.backend import Backend
    from engines.bundle.manifest import Artifact

COMPILED_SUFFIX = ".mlmodelc"


def prepare(
    bundle: Path,
    cache: Path | None = None,
    *,
    backend: Backend | None = None,
    compiler: Callable[[Path], Path] | None = None,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Prepare every coreml artifact of a bundle; return {prepared: [{source_digest, path, digest, functions}]}.

    Raises BundleError (digest, manifest) or EngineError (backend_missing off a Mac, what compiling and loading raise).
    *backend* and *compiler* are the two calls into the framework; tests pass others.
    """
    if backend is None or compiler is None:
        from engines.ane.binding import compile_package
        from engines.ane.coreml import CoreML

        backend, compiler = backend or CoreML(), compiler or compile_package
    backend.require()
    found = manifest.read(bundle)
    artifacts = found.artifacts("coreml")
    if not artifacts:
        raise BundleError(f"{found.root}: no coreml artifact; build one with `python -m engines.ane build`")
    cache = cache if cache is not None else preparation.default_cache()
    results = [_prepare(found.path(one.path), one, cache, backend, compiler, progress) for one in artifacts]
    return {"prepared": results}


def _prepare(
    source: Path,
    artifact: Artifact,
    cache: Path,
    backend: Backend,
    compiler: Callable[[Path], Path],
    progress: Callable[[str, int, int], None],
) -> dict[str, Any]:
    found = tree_digest(source, partial(progress, "digest"))
    if not same(artifact.digest, found.compatible):
        raise BundleError(f"{source}: digest is sha256:{found.compatible}, expected {artifact.digest}; build it again")
    if not same(str(artifact.tree), found.injective):
        raise BundleError(f"{source}: tree is sha256:{found.injective}, expected {artifact.tree}; build it again")
    root = preparation.folder(cache, artifact.digest)
    root.mkdir(parents=True, exist_ok=True)
    sweep(root)
    names = [function.name for function in artifact.functions] if artifact.functions is not UNSET else []
    functions = _compile(source, root, names, compiler, progress)
    compiled = root / preparation.COMPILED
    record = Preparation(
        source_digest=artifact.digest,
        compiled_digest=f"sha256:{tree_digest(compiled).compatible}",
        os_build=backend.os_build(),
        functions=functions,
    )
    # First without load times, so that an interrupted preparation is visible as one; then function by function.
    write(root / preparation.RECORD, record)
    for index, name in enumerate(names):
        one = record.functions[name]
        started = time.monotonic()
        program = backend.open(
            Source(compiled / one.bundle, name if one.multi else MAIN, one.multi), units="cpu_and_ne"
        )
        program.close()
        took = round((time.monotonic() - started) * 1000)
        timed = msgspec.structs.replace(one, first_load_ms=took)
        record = msgspec.structs.replace(record, functions={**record.functions, name: timed})
        write(root / preparation.RECORD, record)
        progress("load", index + 1, len(names))
    return {
        "source_digest": record.source_digest,
        "path": str(compiled),
        "digest": record.compiled_digest,
        "os_build": record.os_build,
        "first_load_ms": {name: function.first_load_ms for name, function in record.functions.items()},
    }


def _compile(
    source: Path,
    root: Path,
    names: list[str],
    compiler: Callable[[Path], Path],
    progress: Callable[[str, int, int], None],
) -> dict[str, FunctionRecord]:
    """Compile into a staging folder beside the final one and rename it; a finished ``compiled`` folder is kept."""
    multi = (source / SPEC).exists()
    packages = {None: source} if multi else {name: source / f"{name}{SUFFIX}" for name in names}
    specs = {key: read_spec(path) for key, path in packages.items()}
    final = root / preparation.COMPILED
    if not final.exists():
        staging = Path(tempfile.mkdtemp(dir=root, prefix=".compiled.", suffix=".tmp"))
        try:
            for index, (key, path) in enumerate(packages.items()):
                target = staging / f"{key or 'model'}{COMPILED_SUFFIX}"
                # The compiler's place may be another volume, so this may copy; only the rename below has to be atomic.
                # coremltools' own helper moves *into* an existing folder of that name; the target here is always new.
                shutil.move(str(compiler(path)), str(target))
                progress("compile", index + 1, len(packages))
            staging.rename(final)
        except OSError:
            # Another preparer won the race: its result stands at the same path.
            if not final.is_dir():
                raise
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return {name: _record(specs[None if multi else name], name, multi) for name in names}


def _record(spec: PackageSpec, name: str, multi: bool) -> FunctionRecord:
    one = spec.functions.get(name if multi else MAIN)
    if one is None:
        raise BundleError(f"the package has no function {name!r} (it has: {sorted(spec.functions)})")
    return FunctionRecord(
        inputs={key: TensorRecord(list(t.shape), t.dtype) for key, t in one.inputs.items()},
        outputs={key: TensorRecord(list(t.shape), t.dtype) for key, t in one.outputs.items()},
        bundle=f"{'model' if multi else name}{COMPILED_SUFFIX}",
        multi=multi,
    )


def write(file: Path, record: Preparation) -> None:
    """Write the record so that a crash leaves the old one or the new one, never half of one."""
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=".record.", suffix=".tmp")
    with os.fdopen(descriptor, "wb") as out:
        out.write(msgspec.json.format(msgspec.json.encode(record), indent=1))
        out.flush()
        os.fsync(out.fileno())
    Path(name).replace(file)
