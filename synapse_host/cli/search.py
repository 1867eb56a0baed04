"""``synapse search``: the nearest texts of a corpus that ``synapse embed --out`` has embedded."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from synapse_host.cli.console import Console
from synapse_host.cli.parser import Parser, UsageError
from synapse_host.cli.session import DEFAULT_MODELS, lane_options, left, model_name, run_host
from synapse_host.errors import EXIT_OK, SequenceTooLong
from synapse_host.text.limits import too_long

if TYPE_CHECKING:
    from synapse_host.bulk.search import Hit, Index
    from synapse_host.host import Host


def configure(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.description = (
        "Find the texts nearest to a query, by cosine, in what synapse embed --out wrote. The query is embedded by "
        "the model that made the index. --rerank reads the texts again and lets a reranker order them."
    )
    parser.examples("""
        synapse search notes.parquet 'when does the contract end?' --top 5 --rerank
        synapse embed --file notes/ --chunk 200:20 --out notes.parquet
    """)
    parser.add_argument("index", type=Path, metavar="INDEX", help="the .npy or .parquet file of vectors")
    parser.add_argument("queries", nargs="+", metavar="QUERY", help="what to look for")
    parser.add_argument("--top", type=int, default=10, metavar="K", help="results a query (default: 10)")
    parser.add_argument("--text", action="store_true", help="show the texts, read from the corpus again")
    parser.add_argument("--rerank", action="store_true", help="order the best 5 x K by a reranker; shows their texts")
    parser.add_argument(
        "--prompt",
        metavar="NAME",
        help="prompt before each query (default: query, where the model has one; none: none)",
    )
    parser.add_argument("--model", metavar="M", help="bundle that made the index (default: the one it names)")
    lane_options(parser, "embed")
    reranker = DEFAULT_MODELS["rerank"]
    parser.add_argument("--reranker", default=reranker, metavar="M", help=f"bundle for --rerank (default: {reranker})")


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the verb."""
    from synapse_host.bulk.search import Index

    if args.top < 1:
        raise UsageError(f"--top {args.top}: must be at least 1. See: synapse search --help")
    index = Index(args.index)
    source = args.model or str(index.facts.get("model"))
    model, reranker = model_name(source), model_name(args.reranker)
    models = {model: source} | ({reranker: args.reranker} if args.rerank else {})

    async def work(host: Host) -> list[dict[str, Any]]:
        return await _search(host, index, model, reranker, args)

    results = run_host(args, console, models, work)
    console.document({"index": str(args.index), "model": model, "n": index.rows, "results": results})
    for result in results:
        console.line(console.style(result["query"], "bold"))
        for place, hit in enumerate(result["hits"], 1):
            head = f"{place:>3}  {hit['score']:.4f}  "
            shown = " ".join(hit["text"].split()) if "text" in hit else ""
            console.hang(head, f"{hit['id']}  {shown if len(shown) <= 90 else shown[:89] + '…'}".rstrip(), len(head))
    return EXIT_OK


async def _search(
    host: Host, index: Index, model: str, reranker: str, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return, for each query, its hits as the document has them; reranked ones have the reranker's ``score``."""
    bundle = host.lane_of(model, args.lane).bundle
    index.check_model(bundle, model)
    prompt = args.prompt or ("query" if "query" in (bundle.manifest.prompts or {}) else None)
    options: dict[str, Any] = {"lane": args.lane, "prompt": prompt, "dimensions": index.dims}
    try:
        asked = await host.embed_result(model, args.queries, deadline=left(args), **options)
    except SequenceTooLong as exc:
        row = {name: exc.details[name] for name in ("index", "tokens", "max_tokens")}
        raise too_long(**row, model=model, noun="query") from exc  # the verb has no --truncate
    found = index.nearest(asked.vectors, 5 * args.top if args.rerank else args.top)
    texts: dict[int, str] = {}
    if args.rerank or args.text:
        texts = index.texts(sorted({hit.row for hits in found for hit in hits}), bundle)
    results = []
    for query, hits in zip(args.queries, found, strict=True):
        rows = [_hit(hit, texts) for hit in hits]
        if args.rerank and rows:
            documents = [row["text"] for row in rows]
            scores = await host.rerank_result(reranker, query, documents, deadline=left(args), truncate=True)
            rows = [{**rows[at], "cosine": rows[at]["score"], "score": float(scores.scores[at])} for at in scores.order]
        results.append({"query": query, "hits": rows[: args.top]})
    return results


def _hit(hit: Hit, texts: dict[int, str]) -> dict[str, Any]:
    text = {"text": texts[hit.row]} if hit.row in texts else {}
    return {"row": hit.row, "id": hit.id, "score": hit.score, **text}
