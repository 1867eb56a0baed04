"""``python -m engines.ane build CHECKPOINT OUT``, ``prepare BUNDLE``, ``plan ARTIFACT``: JSON lines on stdout.

``build`` runs anywhere: a checkpoint becomes one Core ML artifact with a function per bucket and packed width, straight
from the weights (no torch). The other two run on a Mac. Errors go to stderr. Exit 0 done, 1 failed, 2 usage.
"""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any, Final

from engines.ane import REVISION
from engines.ane.artifact import MAIN
from engines.ane.build import graph, package
from engines.ane.build.package import SUFFIX, Target
from engines.ane.build.plan import plan
from engines.ane.build.prepare import prepare
from engines.ane.signature import HIDDEN, SCORE, Key, check_signature
from engines.bundle.digest import tree_digest
from engines.checkpoint import program
from engines.checkpoint.read import Checkpoint

BUCKETS: Final = (128, 256, 512)
PACKED: Final = (128, 256)


def build(
    checkpoint: Checkpoint,
    out: Path,
    *,
    keys: Sequence[Key],
    target: Target = "macos15",
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Build one artifact at *out* (which must not exist) and return its manifest entry.

    Raises ValueError for an impossible bucket or weight, BundleError for the checkpoint, EngineError when a gate fails:
    the signatures are checked on what was written, not on what was meant.
    """
    checkpoint.need_format("coreml")
    if target == "macos15" and out.suffix != SUFFIX:
        raise ValueError(f"{out.name}: a multi-function package must be named *{SUFFIX}")
    if len(set(keys)) != len(keys) or not any(key.kind == "shape" for key in keys):
        raise ValueError("buckets and packed widths must be distinct, with at least one bucket")
    names = {f"{'s' if key.kind == 'shape' else 'packed'}{key.tokens}": key for key in keys}
    makers = {name: partial(graph.function, checkpoint, key) for name, key in names.items()}
    with _quiet():
        metadata = _metadata(checkpoint, keys, target)
        package.save(makers, out, target=target, metadata=metadata, done=partial(progress, "convert"))
        _gates(out, names, checkpoint, target)
    digest = tree_digest(out, partial(progress, "digest"))
    return {
        "format": "coreml",
        "path": out.name,
        "digest": f"sha256:{digest.compatible}",
        "tree": f"sha256:{digest.injective}",
        "bytes": digest.nbytes,
        "files": digest.files,
        "dtype": "f16",
        "layers": checkpoint.config["num_hidden_layers"],
        "functions": [
            {"name": n, "bucket" if k.kind == "shape" else "packed_width": k.tokens} for n, k in names.items()
        ],
    }


def _metadata(checkpoint: Checkpoint, keys: Sequence[Key], target: Target) -> dict[str, str]:
    import coremltools

    return {
        "synapse.source_model": checkpoint.folder.name,
        "synapse.model_kind": f"{checkpoint.family}-{checkpoint.task}",
        "synapse.seq_len": ",".join(str(key.tokens) for key in keys if key.kind == "shape"),
        "synapse.packed_width": ",".join(str(key.tokens) for key in keys if key.kind == "packed"),
        "synapse.frontend": "mil-builder",
        "synapse.graph_revision": REVISION,
        "synapse.output_name": HIDDEN if checkpoint.task == "embed" else SCORE,
        "synapse.torch_version": "none",
        "synapse.transformers_version": "none",
        "synapse.coremltools_version": str(coremltools.__version__),
        "synapse.macos_version": target,
    }


def _gates(out: Path, names: dict[str, Key], checkpoint: Checkpoint, target: Target) -> None:
    """Read the artifact back and refuse anything that isn't what was asked for."""
    for name, key in names.items():
        path, inner = (out, name) if target == "macos15" else (out / f"{name}{SUFFIX}", MAIN)
        found = package.read_spec(path)
        if inner not in found:
            raise ValueError(f"gate: {path.name} has no function {inner!r}")
        check_signature(name, found[inner], graph.signature(checkpoint, key))


@contextmanager
def _quiet() -> Iterator[None]:
    """coremltools logs, warns and draws progress bars; the builder's stdout and stderr belong to its own lines."""
    from tqdm import tqdm  # type: ignore[import-untyped] # coremltools' own dependency

    logging.getLogger("coremltools").setLevel(logging.ERROR)
    tqdm.monitor_interval = 0  # else its first bar leaves a thread behind
    with warnings.catch_warnings(), Path(os.devnull).open("w") as sink, redirect_stderr(sink):
        warnings.simplefilter("ignore")
        yield


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``build``, ``prepare`` or ``plan``; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m engines.ane", description="Make and prepare Core ML packages.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("build", help="checkpoint folder to Core ML package")
    one.add_argument("checkpoint", type=Path)
    one.add_argument("out", type=Path)
    one.add_argument("--task", choices=("embed", "rerank"), default=None)
    one.add_argument("--buckets", type=_sizes, default=None, metavar="N,N", help="default 128,256,512 cut to the model")
    one.add_argument("--packed", type=_sizes, default=None, metavar="W,W", help="packed widths; 0 for none")
    one.add_argument("--target", choices=("macos14", "macos15"), default="macos15")
    two = verbs.add_parser("prepare", help="compile and specialise a bundle's packages on this Mac")
    two.add_argument("bundle", type=Path)
    two.add_argument("--cache", type=Path, default=None, help="default: the user's cache folder")
    three = verbs.add_parser("plan", help="where the framework would run each function of an artifact, on this Mac")
    three.add_argument("artifact", type=Path)
    three.add_argument("--manifest", type=Path, required=True)
    try:
        args = parser.parse_args(argv)
    except SystemExit as exc:
        return int(exc.code or 0)

    def make() -> dict[str, Any]:
        if args.verb == "prepare":
            return prepare(args.bundle, args.cache, progress=_report)
        if args.verb == "plan":
            return plan(args.artifact, args.manifest, progress=_report)
        checkpoint = Checkpoint.open(args.checkpoint, task=args.task)
        keys = _keys(checkpoint, args.buckets, args.packed)
        return build(checkpoint, args.out, keys=keys, target=args.target, progress=_report)

    return program.run(args.verb, make, missing="pip install 'synapse-workers[ane]'")


def _keys(checkpoint: Checkpoint, buckets: Sequence[int] | None, packed: Sequence[int] | None) -> list[Key]:
    """Return the functions to build: by default the usual ladder cut to the model's positions, packed for embedders."""
    if buckets is None:
        positions = checkpoint.config["max_position_embeddings"]
        buckets = [bucket for bucket in BUCKETS if bucket <= positions] or [positions]
    if packed is None:
        packed = PACKED if checkpoint.task == "embed" else ()
    return [Key("shape", bucket) for bucket in buckets] + [Key("packed", width) for width in packed if width]


def _sizes(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and len(part) < 7 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token counts such as 128,256")
    return tuple(int(part) for part in parts)


def _report(stage: str, done: int, total: int) -> None:
    program.line(stage=stage, done=done, total=total)
