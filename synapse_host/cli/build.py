"""Make a model bundle from a checkpoint: a folder (config.json and safetensors; never pickles), or a name on the
Hugging Face hub, owner/name or owner/name@revision, which is fetched into the hub's cache. Or of a GGUF file of any
architecture that llama.cpp knows, to generate or embed: as it is, in any of its dtypes.

Examples:
  synapse build ./all-MiniLM-L6-v2 ./minilm
  synapse build BAAI/bge-small-en-v1.5 ./bge
  synapse build ./Qwen2.5-7B-Instruct-Q4_K_M.gguf ./qwen
  synapse build ./my-reranker ./bundle --formats gguf --dtype q8_0
  synapse build ./e5 ./bundle --dtype gguf=f16+bf16,safetensors-package=f32 --pooling mean
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from engines.bundle.manifest import Bundle
from engines.checkpoint import facts
from engines.checkpoint.families import FAMILIES
from engines.checkpoint.families.relatives import RELATIVES
from engines.checkpoint.read import Checkpoint
from synapse_host.cli.console import Console
from synapse_host.cli.parser import Parser, count
from synapse_host.errors import EXIT_OK, InvalidRequest
from synapse_host.models import builder, from_gguf, hub
from synapse_host.placement import places

_DTYPES: Final[dict[str, tuple[str, ...]]] = {
    "gguf": ("f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m"),
    "safetensors-package": ("f32", "f16", "bf16", "int8"),
    "coreml": ("f16",),
}


_DTYPE: Final = (
    "f32, f16, bf16, q8_0, int8, of generators also q6_k, q5_k_m, q4_k_m; or per format: "
    "gguf=f16,safetensors-package=f32+int8"
)
_UNSAID: Final = "where the checkpoint doesn't say it"


def configure(parser: Parser) -> None:
    """Declare the verb's arguments."""
    parser.description = f"{parser.description}\nFamilies: {', '.join((*FAMILIES, *RELATIVES))}."
    parser.option("checkpoint", "CHECKPOINT", "folder with config.json, owner/name on the hub, or a .gguf")
    parser.option("out", "OUT", "bundle folder to make; must not exist yet, or be empty", type=Path)
    formats = "gguf, safetensors-package, coreml (default: what the model allows)"
    parser.option("--formats", "FORMAT,…", formats, type=_formats)
    parser.option("--dtype", "DTYPE", _DTYPE)
    own = "of a GGUF: its own tokenizer.json, where it can't be written"
    parser.option("--tokenizer", "FILE", own, type=Path)
    parser.option("--name", "NAME", "model id (default: OUT's name)")
    parser.add_argument("--task", choices=("embed", "rerank", "generate"), help=_UNSAID)
    parser.add_argument("--pooling", choices=("mean", "cls", "last"), help=_UNSAID)
    parser.option("--max-tokens", "N", "longest row served, at most the position table", type=count)
    parser.add_argument("--score", choices=("sigmoid", "identity"), help="what the host applies to rerank logits")
    parser.flag("--fixtures", help="compute reference fixtures with transformers (extra 'reference')")
    parser.flag("--force", help="replace OUT if it is a bundle already")


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the verb; return the exit code."""
    out: Path = places.expanded(args.out)
    _check_target(out, force=args.force)
    folder, source = places.expanded(Path(args.checkpoint)), ""
    if folder.is_file():
        return _of_gguf(args, folder, out, console)
    if args.tokenizer is not None:
        raise InvalidRequest("--tokenizer is for a GGUF; a checkpoint is built with its own tokenizer.json")
    if hub.is_name(args.checkpoint):
        console.note(f"fetching {args.checkpoint}")
        folder, source = hub.fetch(args.checkpoint, bars=console.bars)
    checkpoint = Checkpoint.open(folder, task=args.task)
    formats = args.formats or _possible(checkpoint)
    limit = checkpoint.config["max_position_embeddings"]
    if args.max_tokens is not None and args.max_tokens > limit:
        raise InvalidRequest(f"--max-tokens {args.max_tokens}: the checkpoint has {limit} positions")
    notes = facts.of_checkpoint(checkpoint).notes
    with console.stages(out.name) as progress:
        bundle = builder.build(
            checkpoint.folder,
            out,
            formats=formats,
            dtypes=_dtypes(args.dtype, formats),
            model_id=args.name or _model_id(out),
            task=checkpoint.task,
            overrides={**_overrides(args, checkpoint), **({"source": source} if source else {})},
            reference=args.fixtures,
            progress=progress,
        )
    return _said(bundle, notes, console)


def _of_gguf(args: argparse.Namespace, file: Path, out: Path, console: Console) -> int:
    """Build from a GGUF, which is taken as it is: what would change it is refused."""
    for option in ("dtype", "score", "fixtures"):
        if getattr(args, option):
            raise InvalidRequest(f"--{option} is for a checkpoint; a GGUF is taken as it is")
    if args.formats not in (None, ["gguf"]):
        raise InvalidRequest("--formats is for a checkpoint; a GGUF stays one")
    with console.stages(out.name) as progress:
        bundle = from_gguf.build(
            file,
            out,
            model_id=args.name or _model_id(out),
            task=args.task,
            pooling=args.pooling,
            max_tokens=args.max_tokens,
            tokenizer=None if args.tokenizer is None else places.expanded(args.tokenizer),
            progress=progress,
        )
    notes = []
    if bundle.manifest.task == "embed":
        notes.append("a GGUF doesn't say whether vectors are normalised; these are, as llama.cpp's server does it")
    return _said(bundle, notes, console)


def _said(bundle: Bundle, notes: Sequence[str], console: Console) -> int:
    artifacts = [
        {"format": a.format, "path": a.path, "digest": a.digest, "bytes": a.bytes, "dtype": a.dtype}
        for a in bundle.manifest.artifacts
    ]
    made = {"bundle": str(bundle.root), "manifest_digest": bundle.digest}
    console.document({**made, "artifacts": artifacts, "notes": list(notes)})
    console.line(f"{bundle.root}  {bundle.manifest.family} {bundle.manifest.task}, manifest {bundle.digest[:12]}")
    for artifact in bundle.manifest.artifacts:
        console.line(f"  {artifact.format:<20} {artifact.dtype:<5} {artifact.bytes:>12,} bytes  {artifact.path}")
    for note in notes:
        console.line(f"  note: {note}")
    return EXIT_OK


def _formats(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in _DTYPES:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(_DTYPES)}")
    return list(dict.fromkeys(names))


def _dtypes(text: str | None, formats: list[str]) -> dict[str, list[str]]:
    """Read ``f16`` or ``gguf=f16+bf16,coreml=f16``; InvalidRequest names the part that is wrong."""
    if text is None:
        return {}
    if "=" not in text:
        chosen = {name: [text] for name in formats if text in _DTYPES[name]}
        if not chosen:
            allowed = "; ".join(f"{name}: {', '.join(_DTYPES[name])}" for name in formats)
            raise InvalidRequest(f"--dtype {text!r} is not possible here ({allowed})")
        return chosen
    chosen = {}
    for part in text.split(","):
        name, _, values = part.partition("=")
        kinds = values.split("+")
        if name not in formats or not set(kinds) <= set(_DTYPES.get(name, ())):
            raise InvalidRequest(f"--dtype {part!r}: no such dtype, or {name!r} is not among the formats built")
        chosen[name] = kinds
    return chosen


def _possible(checkpoint: Checkpoint) -> list[str]:
    """Return the formats that serve this checkpoint on machines without an accelerator."""
    return [name for name in ("gguf", "safetensors-package") if name not in checkpoint.known.unheld(checkpoint.task)]


def _overrides(args: argparse.Namespace, checkpoint: Checkpoint) -> dict[str, Any]:
    if args.pooling is not None and checkpoint.task != "embed":
        raise InvalidRequest(f"--pooling is for embedding models, this is a {checkpoint.task} checkpoint")
    if args.score is not None and checkpoint.task != "rerank":
        raise InvalidRequest(f"--score is for rerankers, this is a {checkpoint.task} checkpoint")
    given = {"max_tokens": args.max_tokens, "pooling": args.pooling, "score": args.score}
    return {name: value for name, value in given.items() if value is not None}


def _check_target(out: Path, *, force: bool) -> None:
    if out.exists() and not out.is_dir():
        raise InvalidRequest(f"{out} is a file; name a folder that doesn't exist yet")
    if not out.exists() or not any(out.iterdir()):
        return
    if not (out / "manifest.json").exists():
        raise InvalidRequest(f"{out} is not empty and not a bundle; name a folder that doesn't exist yet")
    if not force:
        raise InvalidRequest(f"{out} is a bundle already; pass --force to replace it")


def _model_id(out: Path) -> str:
    """Return OUT's name with what a model id can't hold turned into dashes."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", out.resolve().name).strip("-._")[:64]
    return name or "model"
