"""Make the default bundles if they are missing, embed, rerank and generate with them, then kill a worker (-9) and ask
again.

Examples:
  synapse demo
  synapse demo --json
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING, Any, Final

from synapse_host.cli.console import Console
from synapse_host.cli.operate import lanes_page
from synapse_host.cli.parser import Parser
from synapse_host.cli.session import DEFAULT_MODELS, run_host
from synapse_host.errors import EXIT_FAILED, EXIT_OK
from synapse_host.models import catalogue
from synapse_host.placement.matrix import load as load_matrix

if TYPE_CHECKING:
    from synapse_host.host import Host

SENTENCES: Final = ["The cat sat on the mat.", "A feline rested on a rug.", "Rates rose on Tuesday."]
QUERY: Final = "How many people live in Berlin?"
DOCUMENTS: Final = [
    "The population of Germany was about 83 million in 2020.",
    "Berlin has a population of 3,520,031 registered inhabitants in an area of 891.82 square kilometres.",
    "In 2023 the German capital counted roughly 3.8 million residents.",
]
PROMPT: Final = "The capital of Italy is"
NOTICE_S: Final = 5.0


def configure(parser: Parser) -> None:
    """Say what :func:`run_host` asks for: a host of the command's own, and the first engine that fits."""
    parser.set_defaults(local=True, engine=None, lane=None)


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the verb."""
    load_matrix(args.matrix)  # Before minutes of downloads, not after.
    for name in DEFAULT_MODELS.values():
        with console.stages(name) as progress:
            artifacts = catalogue.obtain(name, args.models_dir, progress=progress).manifest.artifacts
        size = sum(artifact.bytes for artifact in artifacts if isinstance(artifact.bytes, int)) / 1e6
        kinds = " + ".join(f"{artifact.dtype} {artifact.format}" for artifact in artifacts)
        console.line(f"model {name:<10}{size:8.1f} MB   {kinds}")

    async def work(host: Host) -> dict[str, Any]:
        return await _demo(host, console)

    document = run_host(args, console, {name: name for name in DEFAULT_MODELS.values()}, work)
    console.document(document)
    return EXIT_OK if document["recovery"]["same_answer"] else EXIT_FAILED


async def _demo(host: Host, console: Console) -> dict[str, Any]:
    """Run the steps on one open host; each prints its part and returns its part of the document."""
    _title(console, "lanes", f"on this machine ({host.profile.summary()})")
    for task, model in DEFAULT_MODELS.items():
        placement = host.lane_of(model).placement
        passed = [item for item in placement.considered if item.verdict == "no"]
        why = " · ".join(f"{item.engine}: {item.reason.partition(': ')[2] or item.reason}" for item in passed)
        console.hang(f"  {task:<10} {placement.engine or 'none':<12} {model:<10}", f" ({why})" if why else "", 35)
    started = time.monotonic()
    for model in DEFAULT_MODELS.values():
        await host.load(model)
    console.line(f"  three workers started and loaded in {time.monotonic() - started:.1f} s")
    document: dict[str, Any] = {"lanes": host.explain()}
    for name, step in (("embed", _embed), ("rerank", _rerank), ("generate", _generate), ("recovery", _recovery)):
        document[name] = await step(host, console)
    console.line()
    console.line(f"{console.style('Next:', 'bold')} synapse doctor · synapse matrix explain embed · synapse --help")
    return document


def _title(console: Console, text: str, rest: str) -> None:
    console.line()
    console.line(f"{console.style(f'{text:<10}', 'bold')} {rest}")


async def _embed(host: Host, console: Console) -> dict[str, Any]:
    await host.embed("minilm", SENTENCES)
    started = time.monotonic()
    result = await host.embed_result("minilm", SENTENCES)
    elapsed = (time.monotonic() - started) * 1000
    similar = (result.vectors @ result.vectors.T).tolist()
    _title(console, "embed", f"{len(SENTENCES)} sentences, {result.vectors.shape[1]} dims, {elapsed:.1f} ms")
    width = max(map(len, SENTENCES))
    console.line(" " * (width + 4) + "".join(f"{number:>7}" for number in range(1, len(SENTENCES) + 1)))
    for number, (text, row) in enumerate(zip(SENTENCES, similar, strict=True), 1):
        console.line(f"  {number} {text:<{width}}" + "".join(f"{value:7.2f}" for value in row))
    return {"engine": result.engine, "ms": elapsed, "similarity": similar}


async def _rerank(host: Host, console: Console) -> dict[str, Any]:
    result = await host.rerank_result("ms-marco", QUERY, DOCUMENTS)
    _title(console, "rerank", f'"{QUERY}"')
    for place, index in enumerate(result.order, 1):
        console.ranked(place, result.scores[index], DOCUMENTS[index])
    return {"engine": result.engine, "scores": result.scores.tolist(), "order": result.order}


async def _generate(host: Host, console: Console) -> dict[str, Any]:
    started = time.monotonic()
    result = await host.generate("smollm2", PROMPT, max_tokens=24)
    speed = result.n_gen / max(time.monotonic() - started, 1e-9)
    first = result.text.strip().partition("\n")[0]
    _title(console, "generate", f'"{PROMPT}" → {first}      {result.n_gen} tokens, {speed:.0f} tok/s')
    return {"engine": result.engine, "text": result.text, "n_gen": result.n_gen, "tokens_per_s": speed}


async def _recovery(host: Host, console: Console) -> dict[str, Any]:
    """Kill the embedding worker without warning and ask the same question again."""
    _title(console, "workers", "")
    lanes_page(host.health(), console)
    lane_id = host.lane_of("minilm").lane_id

    def worker() -> Any:
        return host.health()["lanes"][lane_id]["worker_pid"]

    before, pid = await host.embed("minilm", SENTENCES), worker()
    os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))
    started = time.monotonic()
    while worker() == pid and time.monotonic() < started + NOTICE_S:
        await asyncio.sleep(0.001)
    noticed = (time.monotonic() - started) * 1000
    same = bool((before == await host.embed("minilm", SENTENCES)).all())
    elapsed, successor = (time.monotonic() - started) * 1000, worker()
    outcome = "the same numbers: supervision works." if same else console.style("OTHER numbers", "red")
    _title(console, "recovery", f"The {lane_id} worker (pid {pid}) was killed (-9) on purpose.")
    console.line(
        f"  The host knew after {noticed:.0f} ms; {elapsed:.0f} ms after the kill pid {successor} had answered"
    )
    console.line(f"  the next request: {outcome}")
    facts = {"killed_pid": pid, "worker_pid": successor, "noticed_ms": noticed, "ms": elapsed}
    return {**facts, "same_answer": same}
