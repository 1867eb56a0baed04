"""Embed texts: one vector per text, in input order. The model's task picks the lane; the lane's first engine that fits
this machine serves it (synapse matrix explain embed).

Examples:
  synapse embed 'The cat sat on the mat.' 'Rates rose on Tuesday.'
  synapse embed --file corpus.jsonl --out corpus.npy
  synapse embed --file notes/ --chunk 200:20 --out notes.parquet
  cat lines.txt | synapse embed --json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from synapse_host.cli.console import Console
from synapse_host.cli.parser import Parser, UsageError, count
from synapse_host.cli.session import READING, left, limited, model_name, run_host, serving_options, watched
from synapse_host.errors import EXIT_OK

if TYPE_CHECKING:
    from synapse_host.bulk import Policy
    from synapse_host.bulk.embedding import Block
    from synapse_host.host import Host

NOTHING: Final = "nothing to embed: give texts or --file F. See: synapse embed --help"

_FILE: Final = (
    '.jsonl (a JSON string or {"id"?, "text"} a line), .txt (one text a line), .csv, .parquet, .md (one text), a '
    "folder of these, or - for stdin"
)
_RAY: Final = (
    "run on Ray: on this machine, or on the cluster at ADDRESS (auto: the one that runs here); --file may be a pattern "
    "or a URI (s3://…), --out is a folder of parquet parts"
)
_PROMPT: Final = (
    "a prompt of the model, put before each text (default: the model's own choice; none: no prompt; which there are: "
    "synapse models show M)"
)


def configure(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.option("texts", "TEXT", "texts to embed", nargs="*")
    parser.option("--file", "F", _FILE)
    parser.option("--column", "C", "where a table has its texts (default: text)", default="text")
    serving_options(parser, "embed")
    parser.option(
        "--out", "F", "write float32 (n, dims) to F.npy, or ids and vectors to F.parquet; resumes after a stop"
    )
    certified = "only on an engine that is certified for the model on this machine; with --ray on every machine"
    parser.flag("--require-certificate", help=certified)
    parser.option("--ray", "ADDRESS", _RAY, nargs="?", const="local")
    parser.flag("--truncate", help="cut texts that are too long; what was cut is listed")
    parser.option("--prompt", "NAME", _PROMPT)
    short = "only the first N numbers of each vector, for a model trained for it (Matryoshka)"
    parser.option("--dimensions", "N", short, type=count)
    parser.option("--chunk", "N[:M]", "cut texts into chunks of N tokens, M of them shared")
    empty = "an empty text: refuse it, leave it out, or give it zeros (default: error)"
    parser.add_argument("--empty", choices=("error", "skip", "zero"), default="error", help=empty)
    bad = "a bad text: stop, or leave it out and list it in F.errors.jsonl (needs --out; default: stop)"
    parser.add_argument("--on-error", choices=("stop", "skip"), default="stop", help=bad)


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the verb."""
    args.local = args.local or args.require_certificate  # a running server has its own rule
    if args.texts and args.file:
        raise UsageError("give texts or --file, not both. See: synapse embed --help")
    if not args.texts and not args.file:
        if sys.stdin is None or sys.stdin.isatty():
            raise UsageError(NOTHING)
        args.file = "-"
    if args.ray is not None:
        return _on_ray(args, console)
    if args.out is not None:
        return _to_file(args, console)
    if args.on_error != "stop" or args.chunk:
        raise UsageError("--chunk and --on-error need --out F.npy or F.parquet. See: synapse embed --help")
    from synapse_host.bulk import Corpus
    from synapse_host.bulk.embedding import Job
    from synapse_host.bulk.output import maker
    from synapse_host.text.validate import absolute

    policy = _policy(args)
    with limited(args, READING):
        found = list(policy.entries(Corpus.of(args.file or args.texts, column=args.column), None, None))
    if not found:
        raise UsageError(f"{args.file} holds no text" if args.file not in (None, "-") else NOTHING)
    model = model_name(args.model)

    async def work(host: Host) -> tuple[dict[str, str], Block]:
        job = Job(host, model, args.lane, absolute(left(args)), policy)
        block = await watched(host, console, job.block(found))
        return maker(host.lane_of(model, args.lane)), block

    made, block = run_host(args, console, {model: args.model}, work)
    vectors = block.joined()
    n, dims = vectors.shape
    if console.json:
        ids = {"ids": [text.id for text in found]} if any(text.named for text in found) else {}
        size = {"n": n, "dims": dims, "truncated": block.truncated, **ids}
        console.document({**made, **size, "vectors": vectors.tolist()})
        return EXIT_OK
    for row in vectors:
        # One line of numbers per text: what a pipe wants. A person sees the beginning.
        numbers = [f"{value:.6f}" for value in row.tolist()]
        if console.interactive and len(numbers) > 8:
            shown = max(1, min(6, (console.width() - 12) // 10))
            numbers = [*numbers[:shown], "…", numbers[-1]]
        console.line(" ".join(numbers))
    _remarks(block.truncated, console, model)
    console.note(f"{n} x {dims} from {model} on {made['engine']} (lane {made['lane']})")
    return EXIT_OK


def _policy(args: argparse.Namespace) -> Policy:
    from synapse_host.bulk import Chunking, Policy

    chunking = Chunking.of(args.chunk) if args.chunk else None
    return Policy(args.truncate, args.empty, args.on_error, chunking, args.prompt, args.dimensions)


def _on_ray(args: argparse.Namespace, console: Console) -> int:
    from synapse_host.bulk.cluster import embed_on_ray

    if not args.file or args.file == "-" or args.out is None:
        raise UsageError("--ray needs --file (a file, folder, pattern or URI) and --out (a folder)")
    paths = {name: str(path) for name in ("matrix", "models_dir") if (path := getattr(args, name)) is not None}
    address = None if args.ray == "local" else args.ray
    embedder = {"lane": args.lane, "engine": args.engine, "require_certificate": args.require_certificate, **paths}
    how = {"policy": _policy(args), "column": args.column, "address": address, **embedder}
    interactive = console.bars and console.interactive  # Ray's bar is one for stdout
    with limited(args, "the corpus was embedded"):
        document = embed_on_ray(args.file, args.out, args.model, display=console, interactive=interactive, **how)
    console.document(document)
    if document["skipped"]:
        console.note(f"{document['skipped']} left out: {args.out}/errors.jsonl says which and why")
    console.line(f"{document['n']} x {document['dims']} float32 -> {args.out}   {document['parts']} parts")
    return EXIT_OK


def _to_file(args: argparse.Namespace, console: Console) -> int:
    from synapse_host.bulk import Corpus, embed_file
    from synapse_host.bulk.output import place

    policy, out = _policy(args), Path(args.out)
    place(out, [args.file] if args.file else [])  # what can't be written is said before anything is read
    # Here and not on the host's loop: a pipe that nobody writes to ends with a signal, or with the deadline.
    with limited(args, READING):
        skip = args.on_error == "skip"
        corpus = Corpus.of(args.file or args.texts, column=args.column, skip=skip)
    model = model_name(args.model)

    async def work(host: Host) -> dict[str, Any]:
        options = {"policy": policy, "lane": args.lane, "deadline": left(args), "display": console}
        return await embed_file(host, model, corpus, out, **options)

    document = run_host(args, console, {model: args.model}, work)
    console.document(document)
    _remarks(document["truncated"], console, model)
    if document["skipped"]:
        console.note(f"{document['skipped']} left out: {args.out}.errors.jsonl says which and why")
    speed = f"{document['texts_per_s']:.0f} texts/s, {document['tokens_per_s']:.0f} tokens/s"
    console.line(f"{document['n']} x {document['dims']} float32 -> {args.out}   {document['engine']}, {speed}")
    return EXIT_OK


def _remarks(truncated: list[int], console: Console, model: str) -> None:
    if truncated:
        shown = ", ".join(map(str, truncated[:20])) + (" …" if len(truncated) > 20 else "")
        number = "1 text was" if len(truncated) == 1 else f"{len(truncated)} texts were"
        console.note(f"{number} cut to what {model} takes, counted from 0: {shown}")
