"""Checkpoint folder -> the single file of a ``safetensors-package`` artifact.

``python -m engines.checkpoint.package CHECKPOINT OUT.safetensors --profile minilm.owned-cuda --dtype f32``

The file holds the family's required tensors under canonical names (``engines.checkpoint.layout``), all in one dtype
(int8: the layers' matrices only, with scales and columns apart beside them: ``engines.checkpoint.quantize``), sorted by
name, and these strings under ``__metadata__``:

``format``   ``pt``
``profile``  ``<model_id>.owned-cuda``; the CUDA worker compares it with the manifest's model before it reads a weight
``family``   bert, modernbert or qwen3
``task``     embed or rerank
``dtype``    f32, f16, bf16 or int8: how the tensors are stored
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engines.bundle.digest import PREFIX, file_digest
from engines.checkpoint import program, safetensors
from engines.checkpoint.layout import INT8
from engines.checkpoint.read import Checkpoint, CheckpointError

if TYPE_CHECKING:
    from engines.checkpoint.safetensors import Array

DTYPES: Final = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
PROFILE_SUFFIX: Final = ".owned-cuda"


def profile_of(model_id: str) -> str:
    """Return the profile id that a package of this model carries."""
    return model_id + PROFILE_SUFFIX


def write_package(
    checkpoint: Checkpoint,
    out: Path,
    *,
    profile: str,
    dtype: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Write the package and return its size; *dtype* defaults to the checkpoint's own.

    Raises BundleError for a task that no package is served for or a weight that f16 can't hold.
    """
    checkpoint.need_format("safetensors-package")
    dtype = dtype or checkpoint.stored_dtype
    if dtype not in (*DTYPES, INT8):
        raise CheckpointError(f"dtype {dtype!r}: a safetensors-package is f32, f16, bf16 or int8")
    shapes = {name: checkpoint.shape(name) for name in checkpoint.tensors}
    metadata = {"format": "pt", "profile": profile, "family": checkpoint.family, "task": checkpoint.task}
    metadata["dtype"] = dtype
    tensors: Mapping[str, Array] = checkpoint.tensors
    kind: str | Callable[[str], str] = DTYPES.get(dtype, "")
    if dtype == INT8:
        from engines.checkpoint.quantize import Quantised  # the host imports this module, and it needs no numpy

        quantised = Quantised(checkpoint)
        tensors, shapes, kind = quantised, quantised.shapes, quantised.kind
    temporary = out.with_name(out.name + ".part")
    try:
        size = safetensors.write(temporary, tensors, metadata=metadata, dtype=kind, shapes=shapes, progress=progress)
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
    return size


def main(argv: Sequence[str] | None = None) -> int:
    """Run as a program; progress as JSON lines on stdout, a failure as one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m engines.checkpoint.package", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--profile", required=True)
    parser.add_argument("--dtype", choices=sorted((*DTYPES, INT8)), default=None)
    parser.add_argument("--task", choices=("embed", "rerank"), default=None)
    args = parser.parse_args(argv)

    def make() -> dict[str, Any]:
        checkpoint = Checkpoint.open(args.checkpoint, task=args.task)
        dtype = args.dtype or checkpoint.stored_dtype
        report = program.report("package")
        size = write_package(checkpoint, args.out, profile=args.profile, dtype=dtype, progress=report)
        return {"path": args.out.name, "bytes": size, "digest": PREFIX + file_digest(args.out), "dtype": dtype}

    return program.run("package", make, missing="install it")


if __name__ == "__main__":
    raise SystemExit(main())
