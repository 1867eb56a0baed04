"""README's table of what each default model does in a second on this machine, by the lane that serves it by default.

    python -m bench.figures            measure and print it; about a minute
    python -m bench.figures --write    put it into README.md

Medians of the rounds with the lowest and the highest. The load of the machine before the run is written beside them: a
figure that other work has spoiled says so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np

from bench import machine, texts
from bench.rounds import Spread
from synapse_host import Host
from synapse_host.bulk.search import Index
from synapse_host.models import catalogue

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- made by bench/figures.py -->", "<!-- end of what bench/figures.py made -->"
ROUNDS = 5
ROWS, DIMS = 1_000_000, 384
QUIET = 0.5
"""A load average up to which the figures are the machine's own."""


async def rates() -> list[tuple[str, str, str, str]]:
    """Return model, engine, work and figure of each default model."""
    models = {name: catalogue.obtain(name).root for name in catalogue.DEFAULTS}
    found = []
    async with Host.open(models=models) as host:
        mixed = texts.mix(models["minilm"] / "tokenizer.json", 256)
        query, *documents = texts.equal(models["ms-marco"] / "tokenizer.json", 51, 64)

        async def generated() -> int:
            return (await host.generate("smollm2", "Once upon a time", max_tokens=64)).n_gen

        async def embedded() -> int:
            return len(await host.embed("minilm", mixed))

        async def reranked() -> int:
            return len(await host.rerank("ms-marco", query, documents))

        work: dict[str, tuple[str, str, Callable[[], Awaitable[int]]]] = {
            "minilm": ("embeds 256 texts of 6 to 256 tokens, median 40", "texts/s", embedded),
            "ms-marco": ("reranks 50 documents, pairs of 126 tokens", "pairs/s", reranked),
            "smollm2": ("generates 64 tokens, one stream", "tokens/s", generated),
        }
        for model, (what, unit, call) in work.items():
            await call()
            samples = []
            for _ in range(ROUNDS):
                begun = time.perf_counter()
                samples.append(await call() / (time.perf_counter() - begun))
            engine = host.lane_of(model).require().engine_id
            found.append((model, engine, what, _figure(samples, unit)))
    return found


def search(folder: Path) -> tuple[str, str, str, str]:
    """Return the row of a search over a million vectors, from a file that the page cache holds."""
    index = folder / "x.npy"
    rng = np.random.default_rng(1)
    vectors = np.lib.format.open_memmap(index, mode="w+", dtype=np.float32, shape=(ROWS, DIMS))
    for first in range(0, ROWS, 10_000):
        vectors[first : first + 10_000] = rng.standard_normal((10_000, DIMS), dtype=np.float32)
    facts = {"model": "", "manifest_digest": "", "dims": DIMS, "n": ROWS, "files": [], "column": "text"}
    facts |= {"input_digest": "", "truncate": False, "empty": "error", "on_error": "stop", "chunk": None}
    (folder / "x.npy.meta.json").write_text(json.dumps(facts | {"left_out": []}))
    query = rng.standard_normal((1, DIMS), dtype=np.float32)
    samples = []
    for _ in range(ROUNDS + 1):
        begun = time.perf_counter()
        Index(index).nearest(query, 10)
        samples.append(time.perf_counter() - begun)
    return "search", "numpy", f"the 10 nearest of {ROWS:,} x {DIMS} vectors", _figure(samples[1:], "s", digits=2)


def _figure(samples: list[float], unit: str, *, digits: int = 0) -> str:
    found = Spread.of(samples)
    return f"{found.median:,.{digits}f} {unit} [{found.low:,.{digits}f} to {found.high:,.{digits}f}]"


def table() -> str:
    """Measure, and return the table with the machine below it."""
    load, about = machine.load(), machine.describe()
    rows = asyncio.run(rates())
    with tempfile.TemporaryDirectory() as folder:
        rows.append(search(Path(folder)))
    lines = [("model", "engine", "what it does", "here"), ("---",) * 4, *rows]
    spoiled = "" if load is None or load <= QUIET else ": other work ran beside it, so these are too low"
    made = f"{about['cpu']}, {about['cores']} cores, {time.strftime('%Y-%m-%d')}, load {load} before the run{spoiled}."
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", made])


def main() -> int:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put it into README.md")
    write = parser.parse_args().write
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text("utf-8").partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"README.md has no {BEGIN} with {END} behind it")
    made = table()
    if write:
        readme.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}", "utf-8")
    else:
        print(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
