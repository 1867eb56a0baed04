"""``synapse demo``: the main job on this machine, and proof that a dead worker doesn't take the host with it."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING, Any, Final

from synapse_host.cli.console import Console
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
MB: Final = 1e6
NOTICE_S: Final = 5.0


def configure(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.description = (
        "Make the default bundles if they are missing, embed, rerank and generate with them, then kill a worker (-9)\n"
        "and ask again."
    )
    parser.examples("""
        synapse demo
        synapse demo --json
    """)


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the verb."""
    load_matrix(args.matrix)  # Before minutes of downloads, not after.
    _bundles(args, console)
    document = run_host(args, console, {name: name for name in DEFAULT_MODELS.values()}, _Demo(console))
    console.document(document)
    return EXIT_OK if document["recovery"]["same_answer"] else EXIT_FAILED


def _bundles(args: argparse.Namespace, console: Console) -> None:
    for number, name in enumerate(DEFAULT_MODELS.values()):
        with console.stages(name) as progress:
            bundle = catalogue.obtain(name, args.models_dir, progress=progress)
        sizes = [artifact.bytes for artifact in bundle.manifest.artifacts if isinstance(artifact.bytes, int)]
        kinds = " + ".join(f"{artifact.dtype} {artifact.format}" for artifact in bundle.manifest.artifacts)
        console.line(f"{'Model bundles' if not number else '':<16}{name:<10}{sum(sizes) / MB:8.1f} MB   {kinds}")


class _Demo:
    """The demo's steps on one open host; each prints its part and adds to the document."""

    def __init__(self, console: Console) -> None:
        self.console = console

    async def __call__(self, host: Host) -> dict[str, Any]:
        self._lanes(host)
        await self._start(host)
        document = {
            "lanes": host.explain(),
            "embed": await self._embed(host),
            "rerank": await self._rerank(host),
            "generate": await self._generate(host),
        }
        self._workers(host)
        document["recovery"] = await self._recovery(host)
        self.console.line()
        self.console.line(
            self.console.style("Next: ", "bold") + "synapse doctor · synapse matrix explain embed · synapse --help"
        )
        return document

    def _title(self, text: str, rest: str = "") -> None:
        self.console.line()
        self.console.line(f"{self.console.style(f'{text:<10}', 'bold')} {rest}".rstrip())

    def _lanes(self, host: Host) -> None:
        self.console.line()
        self.console.line(f"{self.console.style('Lanes on this machine', 'bold')} ({host.profile.summary()})")
        for task, model in DEFAULT_MODELS.items():
            assignment = host.lane_of(model)
            passed = [item for item in assignment.placement.considered if item.verdict == "no"]
            why = " · ".join(f"{item.engine}: {item.reason.partition(': ')[2] or item.reason}" for item in passed)
            engine = assignment.placement.engine or "none"
            self.console.line(f"  {task:<10} {engine:<12} {model:<10}" + (f" ({_short(why, 110)})" if why else ""))

    async def _start(self, host: Host) -> None:
        started = time.monotonic()
        for model in DEFAULT_MODELS.values():
            await host.load(model)
        self.console.line(f"  three workers started and loaded in {time.monotonic() - started:.1f} s")

    async def _embed(self, host: Host) -> dict[str, Any]:
        await host.embed("minilm", SENTENCES)
        started = time.monotonic()
        result = await host.embed_result("minilm", SENTENCES)
        elapsed = time.monotonic() - started
        similar = (result.vectors @ result.vectors.T).tolist()
        self._title("embed", f"{len(SENTENCES)} sentences, {result.vectors.shape[1]} dims, {elapsed * 1000:.1f} ms")
        width = max(map(len, SENTENCES)) + 4
        self.console.line(" " * (width + 2) + "".join(f"{number:>7}" for number in range(1, len(SENTENCES) + 1)))
        for number, (text, row) in enumerate(zip(SENTENCES, similar, strict=True), 1):
            self.console.line(f"  {number} {text:<{width - 2}}" + "".join(f"{value:7.2f}" for value in row))
        return {"engine": result.engine, "ms": elapsed * 1000, "similarity": similar}

    async def _rerank(self, host: Host) -> dict[str, Any]:
        result = await host.rerank_result("ms-marco", QUERY, DOCUMENTS)
        self._title("rerank", f'"{QUERY}"')
        for place, index in enumerate(result.order, 1):
            self.console.line(f"  {place}  {result.scores[index]:.4f}  {_short(DOCUMENTS[index], 90)}")
        return {"engine": result.engine, "scores": result.scores.tolist(), "order": result.order}

    async def _generate(self, host: Host) -> dict[str, Any]:
        started = time.monotonic()
        result = await host.generate("smollm2", PROMPT, max_tokens=24)
        speed = result.n_gen / max(time.monotonic() - started, 1e-9)
        first = result.text.strip().splitlines()[0] if result.text.strip() else ""
        self._title("generate", f'"{PROMPT}" → {first}      {result.n_gen} tokens, {speed:.0f} tok/s')
        return {"engine": result.engine, "text": result.text, "n_gen": result.n_gen, "tokens_per_s": speed}

    def _workers(self, host: Host) -> None:
        lanes = host.health()["lanes"]
        self._title("workers")
        for lane_id, lane in lanes.items():
            if lane["worker_pid"] is not None:
                rss = f" · {lane['rss_mb']} MB" if lane.get("rss_mb") else ""
                self.console.line(f"  {lane_id:<10} pid {lane['worker_pid']} {lane['state']}{rss}")

    async def _recovery(self, host: Host) -> dict[str, Any]:
        """Kill the embedding worker without warning and ask the same question again."""
        lane_id = host.lane_of("minilm").lane_id
        before = await host.embed("minilm", SENTENCES)
        pid = host.health()["lanes"][lane_id]["worker_pid"]
        os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))
        started = time.monotonic()
        while host.health()["lanes"][lane_id]["worker_pid"] == pid and time.monotonic() < started + NOTICE_S:
            await asyncio.sleep(0.001)
        noticed = time.monotonic() - started
        after = await host.embed("minilm", SENTENCES)
        elapsed = time.monotonic() - started
        lane = host.health()["lanes"][lane_id]
        same = bool((before == after).all())
        self._title("recovery")
        ms, seen = elapsed * 1000, noticed * 1000
        outcome = "the same numbers: supervision works." if same else self.console.style("OTHER numbers", "red")
        self.console.line(
            f"  The {lane_id} worker (pid {pid}) was killed (-9) on purpose. The host knew after {seen:.0f} ms;"
        )
        self.console.line(
            f"  {ms:.0f} ms after the kill pid {lane['worker_pid']} had answered the next request: {outcome}"
        )
        return {
            "killed_pid": pid,
            "worker_pid": lane["worker_pid"],
            "noticed_ms": noticed * 1000,
            "ms": elapsed * 1000,
            "same_answer": same,
        }


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
