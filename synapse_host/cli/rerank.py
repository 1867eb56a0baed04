"""Score documents against a query, best first on a terminal, in input order under --json. Scores are probabilities
where the model says so; --raw gives the logits.

Examples:
  synapse rerank 'How many people live in Berlin?' 'Berlin has 3,520,031 inhabitants.' 'Berlin is a city.'
  synapse rerank --file queries.jsonl --json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from synapse_host.bulk.corpus import opened, queries
from synapse_host.cli.console import Console
from synapse_host.cli.parser import Parser, UsageError
from synapse_host.cli.session import READING, left, limited, model_name, run_host, served_by, serving_options, watched
from synapse_host.errors import EXIT_OK, SynapseError

if TYPE_CHECKING:
    from synapse_host.host import Host, RerankResult


def configure(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.option("query", "QUERY", "the query", nargs="?")
    parser.option("documents", "DOC", "documents to score", nargs="*")
    parser.option("--file", "F.jsonl", 'one {"id"?, "query", "docs"} a line; - is stdin')
    serving_options(parser, "rerank")
    parser.option("--out", "F.jsonl", "write a line of scores a query; it resumes", type=Path)
    parser.flag("--raw", help="logits instead of probabilities")
    parser.flag("--truncate", help="cut documents that are too long; what was cut is listed")


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the verb."""
    if args.file and args.query is not None:
        raise UsageError("give a query with documents or --file, not both. See: synapse rerank --help")
    if args.out is not None:
        return _to_file(args, console)
    if not args.file and not args.documents:
        raise UsageError("give a query and at least one document. See: synapse rerank --help")
    places, pairs = _read(args) if args.file else ([], [(args.query, args.documents)])
    model = model_name(args.model)

    async def work(host: Host) -> list[RerankResult]:
        if not args.file:
            return [await watched(host, console, host.rerank_result(model, *pairs[0], **_options(args)))]
        results = []
        with console.bar("reranking", len(pairs), unit="queries") as advance:
            for pair, where in zip(pairs, places, strict=True):
                try:
                    results.append(await host.rerank_result(model, *pair, **_options(args)))
                except SynapseError as exc:
                    raise exc.located(where) from exc
                advance(1)
        return results

    results = run_host(args, console, {model: args.model}, work)
    rows = [{"scores": one.scores.tolist(), "order": one.order, "truncated": one.truncated} for one in results]
    console.document({**served_by(results[0]), **({"results": rows} if args.file else rows[0])})
    for (query, documents), result in zip(pairs, results, strict=True):
        if args.file:
            console.line(console.style(query, "bold"))
        for place, index in enumerate(result.order, 1):
            console.ranked(place, result.scores[index], documents[index])
        if result.truncated:
            console.note(f"cut to what {model} takes: documents {', '.join(map(str, result.truncated))}")
    return EXIT_OK


def _read(args: argparse.Namespace) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Return where each query of --file stands, ``file:line``, and the queries with their documents."""
    name = "stdin" if args.file == "-" else args.file
    with limited(args, READING), opened(args.file) as file:
        found = [(f"{name}:{number}", (one.query, one.docs)) for number, one in queries(file, name)]
    if not found:
        raise UsageError(f"{name} holds no query")
    return [where for where, _ in found], [pair for _, pair in found]


def _options(args: argparse.Namespace) -> dict[str, Any]:
    return {"raw": args.raw, "truncate": args.truncate, "lane": args.lane, "deadline": left(args)}


def _to_file(args: argparse.Namespace, console: Console) -> int:
    from synapse_host.bulk import rerank_file

    if not args.file or args.file == "-":
        raise UsageError("--out needs a file of queries: --file F.jsonl. See: synapse rerank --help")
    model = model_name(args.model)

    async def work(host: Host) -> dict[str, Any]:
        return await rerank_file(host, model, args.file, args.out, display=console, **_options(args))

    document = run_host(args, console, {model: args.model}, work)
    console.document(document)
    console.line(f"{document['n']} queries -> {args.out}   {document['engine']}")
    return EXIT_OK
