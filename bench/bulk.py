"""Embed a generated file of many lines through the host into a .npy, and watch the resident set.

python -m bench.bulk FOLDER LINES      prints: texts/s, MiB grown after the first tenth, peak MiB
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from bench import echo_worker
from synapse_host import Host, HostConfig
from synapse_host.bulk import Corpus, Policy, embed_file
from synapse_host.cli.console import Console
from tests.support.small_bundle import write_bundle

DIMS = 32


def resident() -> dict[str, float]:
    """Return MiB of anonymous and of file-backed resident memory: the output is a mapped file."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(("RssAnon", "RssFile")):
            key, value, _ = line.split()
            found[key.rstrip(":")] = int(value) / 1024
    return found


def echo_corpus(folder: Path, lines: int, dims: int = DIMS) -> tuple[Path, Path, Path]:
    """Write a bundle, a .jsonl of *lines* texts of 7 to 56 words, and a matrix whose engine computes nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    bundle = write_bundle(folder / "echo", dims=dims, max_tokens=64)
    source = folder / f"{lines}.jsonl"
    with source.open("w") as file:
        for number in range(lines):
            text = "a b c d e f query " * (1 + number % 8)
            file.write(json.dumps(text.strip()) + "\n")
    command = json.dumps([*echo_worker.command(dims)])
    matrix = folder / "echo.yaml"
    matrix.write_text(
        "version: 1\nhardware: {any: {}}\nengines:\n"
        f"  echo: {{engine: llama, device: cpu, format: gguf, requires: any, worker: {{command: {command}}}}}\n"
        "lanes:\n  embed: {task: embed, engines: [echo]}\n"
    )
    return bundle, source, matrix


async def run(folder: Path, lines: int) -> tuple[float, float, float]:
    """Return texts a second, anonymous MiB grown after a tenth of the lines, and the highest anonymous MiB."""
    bundle, source, matrix = echo_corpus(folder, lines)
    samples: list[tuple[int, float]] = []

    class Watching:
        def __init__(self) -> None:
            self.done = 0

        def advance(self, amount: int = 1) -> None:
            self.done += amount
            samples.append((self.done, resident()["RssAnon"]))

    class Quiet(Console):
        def bar(self, label: str, total: int | None = None, *, unit: str = "") -> Any:
            from contextlib import nullcontext

            return nullcontext(Watching().advance)

    async with Host.open(matrix, {"bulk": bundle}, HostConfig()) as host:
        await host.load("bulk")
        begun = time.perf_counter()
        policy = Policy(truncate=True)
        corpus = Corpus.of(source)
        await embed_file(host, "bulk", corpus, folder / "bulk.npy", policy=policy, display=Quiet(quiet=True))
        rate = lines / (time.perf_counter() - begun)
    settled = [value for done, value in samples if done >= lines / 10]
    return rate, settled[-1] - settled[0], max(value for _, value in samples)


if __name__ == "__main__":
    print(*asyncio.run(run(Path(sys.argv[1]), int(sys.argv[2]))))
