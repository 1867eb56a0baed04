"""``python -m engines.ane build CHECKPOINT OUT`` and ``prepare BUNDLE``: JSON progress lines on stdout, errors on
stderr.

``build`` runs anywhere: a checkpoint becomes one Core ML artifact with a function per bucket and packed width, straight
from the weights (no torch). ``prepare`` runs on a Mac: see :mod:`engines.ane.prepare`. Exit 0 done, 1 failed, 2 usage.
"""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, Final

from engines.ane import REVISION, graph, package, shapes
from engines.ane.package import MAIN, Target
from engines.ane.shapes import Key
from engines.bundle.digest import tree_digest
from engines.checkpoint import program
from engines.checkpoint.read import Checkpoint

BUCKETS: Final = (128, 256, 512)
PACKED: Final = (128, 256)
OPERATORS: Final = frozenset(
    {"add", "cast", "concat", "const", "conv", "expand_dims", "gather", "gelu", "layer_norm", "matmul", "mul"}
    | {"real_div", "reduce_sum", "reshape", "silu", "slice_by_index", "slice_by_size", "softmax", "split", "squeeze"}
    | {"sub", "tanh", "transpose"}
)
"""What a package of ours may consist of. A conversion pass that brings anything else changed the graph: refuse it."""

Progress = Callable[[str, int, int], None]


def function_name(key: Key) -> str:
    """Return the manifest's name of a function: ``s128``, ``packed256``."""
    return f"s{key.tokens}" if key.kind == "shape" else f"packed{key.tokens}"


def default_keys(checkpoint: Checkpoint) -> list[Key]:
    """Return the usual ladder cut to the model's positions, and for embedders the usual packed widths."""
    positions = checkpoint.config["max_position_embeddings"]
    keys = [Key("shape", bucket) for bucket in BUCKETS if bucket <= positions] or [Key("shape", positions)]
    return keys + ([Key("packed", width) for width in PACKED] if checkpoint.task == "embed" else [])


def build(
    checkpoint: Checkpoint,
    out: Path,
    *,
    keys: Sequence[Key] | None = None,
    target: Target = "macos15",
    progress: Progress = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Build one artifact at *out* (which must not exist) and return its manifest entry.

    Raises ValueError for an impossible bucket or weight, BundleError for the checkpoint, EngineError when a gate fails:
    signature, operator set and finite constants are checked on what was written, not on what was meant.
    """
    if checkpoint.task == "generate" or checkpoint.family == "llama":
        raise ValueError(f"{checkpoint.family} for {checkpoint.task} can't be built: Core ML serves encoders only")
    if checkpoint.family == "qwen3" and checkpoint.task == "rerank":
        raise ValueError("a Qwen3 reranker can't be built: its yes/no readout is not part of this engine")
    if target == "macos15" and out.suffix != package.SUFFIX:
        raise ValueError(f"{out.name}: a multi-function package must be named *{package.SUFFIX}")
    keys = list(default_keys(checkpoint) if keys is None else keys)
    if len(set(keys)) != len(keys) or not any(key.kind == "shape" for key in keys):
        raise ValueError("buckets and packed widths must be distinct, with at least one bucket")
    names = {function_name(key): key for key in keys}
    arch = graph.Arch.of(checkpoint)
    opset = package.opset(target)

    def maker(key: Key) -> Callable[[], Any]:
        return lambda: graph.function(checkpoint, width=key.tokens, packed=key.kind == "packed", opset=opset)

    done = 0

    def one(name: str) -> None:
        nonlocal done
        done += 1
        progress("convert", done, len(names))

    with _quiet():
        package.save(
            {name: maker(key) for name, key in names.items()},
            out,
            target=target,
            metadata=_metadata(checkpoint, keys, target),
            done=one,
        )
        _gates(out, names, arch, target)
    digest = tree_digest(out, lambda done, total: progress("digest", done, total))
    return {
        "format": "coreml",
        "path": out.name,
        "digest": f"sha256:{digest.compatible}",
        "tree": f"sha256:{digest.injective}",
        "bytes": digest.nbytes,
        "files": digest.files,
        "dtype": "f16",
        "layers": arch.layers,
        "functions": [
            {"name": name, "bucket" if key.kind == "shape" else "packed_width": key.tokens}
            for name, key in names.items()
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
        "synapse.output_name": graph.HIDDEN if checkpoint.task == "embed" else graph.SCORE,
        "synapse.torch_version": "none",
        "synapse.transformers_version": "none",
        "synapse.coremltools_version": str(coremltools.__version__),
        "synapse.macos_version": target,
    }


def _gates(out: Path, names: dict[str, Key], arch: graph.Arch, target: Target) -> None:
    """Read the artifact back and refuse anything that isn't what was asked for."""
    for name, key in names.items():
        path, inner = (out, name) if target == "macos15" else (out / f"{name}{package.SUFFIX}", MAIN)
        found = package.read_spec(path).functions
        if inner not in found:
            raise ValueError(f"gate: {path.name} has no function {inner!r}")
        shapes.check_signature(name, found[inner], shapes.expected(key, arch.rules, task=arch.task, hidden=arch.hidden))
        alien = package.operators(path, inner) - OPERATORS
        if alien:
            raise ValueError(f"gate: function {name} contains {sorted(alien)}, which this builder never writes")


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
            from engines.ane.prepare import prepare

            return prepare(args.bundle, args.cache, progress=_report)
        if args.verb == "plan":
            from engines.ane.plan import plan

            return plan(args.artifact, args.manifest, progress=_report)
        checkpoint = Checkpoint.open(args.checkpoint, task=args.task)
        keys = _keys(checkpoint, args.buckets, args.packed)
        return build(checkpoint, args.out, keys=keys, target=args.target, progress=_report)

    return program.run("build", make, missing="install the extra 'ane'")


def _keys(checkpoint: Checkpoint, buckets: tuple[int, ...] | None, packed: tuple[int, ...] | None) -> list[Key]:
    usual = default_keys(checkpoint)
    chosen = [key for key in usual if key.kind == "shape"] if buckets is None else [Key("shape", n) for n in buckets]
    if packed is None:
        return chosen + [key for key in usual if key.kind == "packed"]
    return chosen + [Key("packed", width) for width in packed if width]


def _sizes(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and len(part) < 7 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token counts such as 128,256")
    return tuple(int(part) for part in parts)


def _report(stage: str, done: int, total: int) -> None:
    program.line(stage=stage, done=done, total=total)
