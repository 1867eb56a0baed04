"""Find the texts nearest to a query, by cosine, in what synapse embed --out wrote. The query is embedded by the model
that made the index. --rerank reads the texts again and lets a reranker order them.

Examples:
  synapse search notes.parquet 'when does the contract end?' --top 5 --rerank
  synapse embed --file notes/ --chunk 200:20 --out notes.parquet
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from synapse_host.cli.console import Console
from synapse_host.cli.parser import Parser, count
from synapse_host.cli.session import DEFAULT_MODELS, lane_options, left, model_name, run_host
from synapse_host.errors import EXIT_OK, SequenceTooLong
from synapse_host.text.limits import too_long

if TYPE_CHECKING:
    from synapse_host.bulk.search import Index
    from synapse_host.host import Host


def configure(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.option("index", "INDEX", "the .npy or .parquet file of vectors", type=Path)
    parser.option("queries", "QUERY", "what to look for", nargs="+")
    parser.option("--top", "K", "results a query (default: 10)", type=count, default=10)
    parser.flag("--text", help="show the texts, read from the corpus again")
    parser.flag("--rerank", help="order the best 5 x K by a reranker; shows their texts")
    parser.option("--prompt", "NAME", "prompt before each query (default: query, where there is one; none: no prompt)")
    parser.option("--model", "M", "bundle that made the index (default: the one it names)")
    lane_options(parser, "embed")
    reranker = DEFAULT_MODELS["rerank"]
    parser.option("--reranker", "M", f"bundle for --rerank (default: {reranker})", default=reranker)


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the verb."""
    from synapse_host.bulk.search import Index

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
            console.ranked(place, hit["score"], f"{hit['id']}  {hit.get('text', '')}")
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
        rows = [{**asdict(hit), **({"text": texts[hit.row]} if texts else {})} for hit in hits]
        if args.rerank:
            rows = [row for row in rows if row["text"].strip()]  # nothing can be said of the zeros of an empty text
        if args.rerank and rows:
            documents = [row["text"] for row in rows]
            scores = await host.rerank_result(reranker, query, documents, deadline=left(args), truncate=True)
            rows = [{**rows[at], "cosine": rows[at]["score"], "score": float(scores.scores[at])} for at in scores.order]
        results.append({"query": query, "hits": rows[: args.top]})
    return results
