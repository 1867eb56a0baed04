"""``synapse rerank``: how well each document answers a query."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from synapse_host.bulk.corpus import opened, queries
from synapse_host.cli.console import Console
from synapse_host.cli.parser import Parser, UsageError
from synapse_host.cli.session import OWN_HOST, left, model_name, reading, run_host, served_by, serving_options, watched
from synapse_host.errors import EXIT_OK

if TYPE_CHECKING:
    from synapse_host.host import Host, RerankResult


def configure(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.description = (
        "Score documents against a query, best first on a terminal, in input order under --json. Scores are "
        "probabilities where the model says so; --raw gives the logits.\n"
        f"{OWN_HOST}"
    )
    parser.examples("""
        synapse rerank 'How many people live in Berlin?' 'Berlin has 3,520,031 inhabitants.' 'Berlin is a city.'
        synapse rerank --file queries.jsonl --json
    """)
    parser.add_argument("query", nargs="?", metavar="QUERY", help="the query")
    parser.add_argument("documents", nargs="*", metavar="DOC", help="documents to score")
    parser.add_argument("--file", metavar="F.jsonl", help='one {"id"?, "query", "docs"} a line; - is stdin')
    serving_options(parser, "rerank")
    parser.add_argument("--out", type=Path, metavar="F.jsonl", help="write a line of scores a query; it resumes")
    parser.add_argument("--raw", action="store_true", help="logits instead of probabilities")
    parser.add_argument(
        "--truncate", action="store_true", help="cut documents that are too long; what was cut is listed"
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the verb."""
    if args.file and args.query is not None:
        raise UsageError("give a query with documents or --file, not both. See: synapse rerank --help")
    if args.out is not None:
        return _to_file(args, console)
    if args.file:
        return _file(args, console)
    if args.query is None or not args.documents:
        raise UsageError("give a query and at least one document. See: synapse rerank --help")
    model = model_name(args.model)

    async def work(host: Host) -> RerankResult:
        return await watched(host, console, _score(host, model, args.query, args.documents, args))

    result = run_host(args, console, {model: args.model}, work)
    console.document({**served_by(result), **_scores(result)})
    _page(result, args.documents, console)
    return EXIT_OK


def _file(args: argparse.Namespace, console: Console) -> int:
    name = "stdin" if args.file == "-" else args.file
    with reading(args), opened(args.file) as file:
        pairs = [(one.query, one.docs) for _, one in queries(file, name)]
    if not pairs:
        raise UsageError(f"{name} holds no query")
    model = model_name(args.model)

    async def work(host: Host) -> list[RerankResult]:
        results = []
        with console.bar("reranking", len(pairs), unit="queries") as advance:
            for query, documents in pairs:
                results.append(await _score(host, model, query, documents, args))
                advance(1)
        return results

    results = run_host(args, console, {model: args.model}, work)
    console.document({**served_by(results[0]), "results": list(map(_scores, results))})
    for (query, documents), result in zip(pairs, results, strict=True):
        console.line(console.style(query, "bold"))
        _page(result, documents, console)
    return EXIT_OK


def _to_file(args: argparse.Namespace, console: Console) -> int:
    from synapse_host.bulk import rerank_file

    if not args.file or args.file == "-":
        raise UsageError("--out needs a file of queries: --file F.jsonl. See: synapse rerank --help")
    model = model_name(args.model)

    async def work(host: Host) -> dict[str, Any]:
        options = {"raw": args.raw, "truncate": args.truncate, "lane": args.lane, "deadline": left(args)}
        return await rerank_file(host, model, args.file, args.out, display=console, **options)

    document = run_host(args, console, {model: args.model}, work)
    console.document(document)
    console.line(f"{document['n']} queries -> {args.out}   {document['engine']}")
    return EXIT_OK


async def _score(host: Host, model: str, query: str, documents: list[str], args: argparse.Namespace) -> RerankResult:
    return await host.rerank_result(
        model, query, documents, raw=args.raw, lane=args.lane, deadline=left(args), truncate=args.truncate
    )


def _scores(result: RerankResult) -> dict[str, Any]:
    return {"scores": result.scores.tolist(), "order": result.order, "truncated": result.truncated}


def _page(result: RerankResult, documents: list[str], console: Console) -> None:
    for place, index in enumerate(result.order, 1):
        text = " ".join(documents[index].split())
        shown = text if len(text) <= 90 else f"{text[:89]}…"
        score = f"{place:>3}  {result.scores[index]:.4f}  "
        console.hang(score, shown, len(score))
    if result.truncated:
        console.note(f"cut to what {result.model} takes: documents {', '.join(map(str, result.truncated))}")
