"""``synapse embed``: texts from the command line, a JSONL file or stdin; vectors to stdout or a resumable .npy file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from synapse_host.bulk.jsonl import read_texts
from synapse_host.cli.console import Console
from synapse_host.cli.parser import Parser, UsageError
from synapse_host.cli.session import (
    OWN_HOST,
    READING,
    left,
    limited,
    model_name,
    run_host,
    served_by,
    serving_options,
    watched,
)
from synapse_host.errors import EXIT_OK

if TYPE_CHECKING:
    from synapse_host.host import EmbedResult, Host


def configure(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.description = (
        "Embed texts: one vector per text, in input order. The model's task picks the lane; the lane's first engine\n"
        "that fits this machine serves it (synapse matrix explain embed).\n"
        f"{OWN_HOST}"
    )
    parser.examples("""
        synapse embed 'The cat sat on the mat.' 'Rates rose on Tuesday.'
        synapse embed --file corpus.jsonl --out corpus.npy
        cat lines.jsonl | synapse embed --file - --json
    """)
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="texts to embed")
    parser.add_argument("--file", metavar="F.jsonl", help='one JSON string or {"id"?, "text"} a line; - is stdin')
    serving_options(parser, "embed")
    parser.add_argument("--out", type=Path, metavar="F.npy", help="write float32 (n, dims) here; resumes after a stop")
    parser.add_argument("--truncate", action="store_true", help="cut texts that are too long; what was cut is listed")


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the verb."""
    if args.texts and args.file:
        raise UsageError("give texts or --file, not both. See: synapse embed --help")
    if not args.texts and not args.file:
        raise UsageError("nothing to embed: give texts or --file F.jsonl. See: synapse embed --help")
    if args.out is not None:
        return _to_file(args, console)
    texts: list[str] = args.texts
    if args.file:
        with limited(left(args), READING, of=args.deadline), read_texts(args.file) as lines:
            texts = list(lines)
    model = model_name(args.model)

    async def work(host: Host) -> EmbedResult:
        asked = host.embed_result(model, texts, lane=args.lane, deadline=left(args), truncate=args.truncate)
        return await watched(host, console, asked)

    result = run_host(args, console, {model: args.model}, work)
    n, dims = result.vectors.shape
    if console.json:
        size = {"n": n, "dims": dims, "truncated": result.truncated}
        console.document({**served_by(result), **size, "vectors": result.vectors.tolist()})
        return EXIT_OK
    for row in result.vectors:
        # One line of numbers per text: what a pipe wants. A person sees the beginning.
        numbers = [f"{value:.6f}" for value in row.tolist()]
        if console.interactive and len(numbers) > 8:
            shown = max(1, min(6, (console.width() - 12) // 10))
            numbers = [*numbers[:shown], "…", numbers[-1]]
        console.line(" ".join(numbers))
    _remarks(result.truncated, console, result.model)
    console.note(f"{n} x {dims} from {result.model} on {result.engine} (lane {result.lane})")
    return EXIT_OK


def _to_file(args: argparse.Namespace, console: Console) -> int:
    from synapse_host.bulk.embed_file import Texts, embed_to_file, place

    place(args.out, args.file)  # what can't be written is refused before anything is read
    # Here and not on the host's loop: a pipe that nobody writes to ends with a signal, or with the deadline.
    with limited(left(args), READING, of=args.deadline):
        source = Texts.survey(args.file, args.texts)
    model = model_name(args.model)

    async def work(host: Host) -> dict[str, Any]:
        return await embed_to_file(
            host,
            model,
            source=source,
            out=args.out,
            lane=args.lane,
            deadline=left(args),
            truncate=args.truncate,
            display=console,
        )

    document = run_host(args, console, {model: args.model}, work)
    console.document(document)
    _remarks(document["truncated"], console, model)
    console.line(
        f"{document['n']} x {document['dims']} float32 -> {args.out}   {document['engine']}, "
        f"{document['texts_per_s']:.0f} texts/s, {document['tokens_per_s']:.0f} tokens/s"
    )
    return EXIT_OK


def _remarks(truncated: list[int], console: Console, model: str) -> None:
    if truncated:
        shown = ", ".join(map(str, truncated[:20])) + (" …" if len(truncated) > 20 else "")
        number = "1 text was" if len(truncated) == 1 else f"{len(truncated)} texts were"
        console.note(f"{number} cut to what {model} takes, counted from 0: {shown}")
