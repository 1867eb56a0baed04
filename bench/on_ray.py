"""Rows about `synapse embed --ray` on this machine: beside the single-machine command and beside Ray Data by hand.

    python -m bench --only ray [--quick]            the rows, under 3 minutes on a quiet machine
    python -m bench.on_ray FOLDER LINES [LINES …]   what 20000, 200000 … lines take in memory, by process

On Ray a rate is taken between the first finished part and the last one: starting Ray, the actor and the model takes
seconds that a job of hours doesn't notice. That of the single command is taken from its first text with the model
loaded: two of its blocks are under way at a time, so there is no earlier moment with a clean cut. The whole job's
seconds stand beside it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from bench import texts
from bench.bulk import echo_corpus
from bench.models import AGREEMENT, host, matrix
from bench.rivals import Missing, Rival
from bench.rounds import Row, interleaved, row
from synapse_host.bulk import Corpus, embed_file
from synapse_host.cli.console import Console
from synapse_host.models import catalogue

if TYPE_CHECKING:
    from bench.plan import Plan

PIECES = 4
"""Parts of a run."""
TOKENS = 32
EVERY_S = 0.2


class Turn:
    """What one contestant's last run took."""

    def __init__(self) -> None:
        self.whole_s: list[float] = []
        self.cpu_ms: list[float] = []


class Watch:
    """Samples the processes below this one while a block runs: their CPU time, and their memory by kind."""

    def __init__(self, kind: Callable[[psutil.Process], str | None] = lambda process: None) -> None:
        self._kind = kind
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self.cpu: list[tuple[float, float]] = []
        self.memory: dict[str, list[tuple[float, float]]] = {}

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        used: dict[int, float] = {}
        own = psutil.Process()
        while not self._ended.wait(EVERY_S):
            kinds: dict[str, float] = {}
            for process in [own, *own.children(recursive=True)]:
                try:
                    times = process.cpu_times()
                    used[process.pid] = times.user + times.system
                    if (kind := self._kind(process)) is not None:
                        kinds[kind] = max(kinds.get(kind, 0.0), anonymous(process.pid))
                except (psutil.Error, OSError):
                    continue
            now = time.time()
            self.cpu.append((now, sum(used.values())))
            for kind, size in kinds.items():
                self.memory.setdefault(kind, []).append((now, size))

    def cpu_between(self, first: float, last: float) -> float:
        """Return CPU seconds between two moments, as near as the samples are."""
        at = [min(self.cpu, key=lambda sample: abs(sample[0] - moment))[1] for moment in (first, last)]
        return at[1] - at[0]


def anonymous(pid: int) -> float:
    """Return MiB of anonymous resident memory: files that are mapped are the system's to drop."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def parts_made(folder: Path) -> list[tuple[float, int]]:
    """Return when each part of a folder was finished, and its rows."""
    from pyarrow import parquet

    return sorted((path.stat().st_mtime, parquet.read_metadata(path).num_rows) for path in folder.glob("*.parquet"))


def first_vector(folder: Path) -> list[float]:
    """Return the vector of the corpus's first text."""
    from pyarrow import parquet

    for path in folder.glob("*.parquet"):
        table = parquet.read_table(path, columns=["id", "vector"]).to_pydict()
        if "0" in table["id"]:
            return list(table["vector"][table["id"].index("0")])
    raise AssertionError(f"{folder} lacks the first text")


async def rows(plan: Plan) -> list[Row]:
    """Return every row of this group."""
    try:
        import ray  # noqa: F401
    except ImportError:
        return [Row("ray", "embed --ray", "texts/s", "higher", status="not installed", note="pip install '.[ray]'")]
    bundle = catalogue.obtain("minilm", plan.models_dir)
    piece = 512 if plan.quick else 1024
    count = PIECES * piece
    source = plan.folder / "corpus.jsonl"
    sentences = texts.equal(bundle.root / "tokenizer.json", count, TOKENS)
    source.write_text("".join(json.dumps({"id": str(n), "text": t}) + "\n" for n, t in enumerate(sentences)))
    turns = {name: Turn() for name in ("ray", "single", "by hand")}
    contestants: dict[str, Any] = {}
    vectors: dict[str, list[float]] = {}

    def measured(name: str, made: list[tuple[float, int]], begun: float, watch: Watch) -> float:
        done = sum(rows for _, rows in made[1:])
        turns[name].whole_s.append(time.time() - begun)
        turns[name].cpu_ms.append(1e3 * watch.cpu_between(made[0][0], made[-1][0]) / done)
        return done / (made[-1][0] - made[0][0])

    def on_ray() -> float:
        from synapse_host.bulk.cluster import embed_on_ray

        out = plan.folder / f"ray-{len(turns['ray'].whole_s)}"
        lanes = {"embed": ("embed", "onnx-cpu")}
        begun = time.time()
        with Watch() as watch:
            embed_on_ray(
                str(source), str(out), str(bundle.root), display=Console(quiet=True),
                matrix=str(matrix(plan, lanes, threads=plan.threads)), block_bytes=source.stat().st_size // PIECES + 1,
            )  # fmt: skip
        vectors["ray"] = first_vector(out)
        return measured("ray", parts_made(out), begun, watch)

    async def single() -> float:
        made: list[tuple[float, int]] = []

        class Noting(Console):
            def bar(self, label: str, total: int, *, unit: str) -> Any:
                return nullcontext(lambda done: made.append((time.time(), done)))

        begun = time.time()
        with Watch() as watch:
            async with host(plan, "minilm", "embed", "onnx-cpu", threads=plan.threads) as opened:
                out = plan.folder / f"single-{len(turns['single'].whole_s)}.npy"
                await embed_file(opened, "minilm", Corpus.of(source), out, display=Noting(quiet=True))
        return measured("single", made, begun, watch)

    def by_hand(rival: Rival) -> float:
        out = plan.folder / f"hand-{len(turns['by hand'].whole_s)}"
        begun = time.time()
        with Watch() as watch:
            rival.ask("embed_file", source=str(source), out=str(out), pieces=PIECES, piece=piece)
        vectors["by hand"] = first_vector(out)
        return measured("by hand", parts_made(out), begun, watch)

    contestants = {"ray": on_ray, "single": single}
    missing, what, rival = "", "sentence-transformers under Ray Data", None
    try:
        rival = Rival("sentence-transformers on ray", plan, bundle=str(bundle.root))
        what = rival.what
        contestants["by hand"] = lambda: by_hand(rival)
    except Missing as exc:
        missing = str(exc)
    try:
        figures = await interleaved(contestants, 2 if plan.quick else 3)
    finally:
        if rival is not None:
            rival.close()
    if not missing:
        cosine = sum(a * b for a, b in zip(vectors["ray"], vectors["by hand"], strict=True))
        assert cosine > AGREEMENT, f"Ray Data by hand computed something else: cosine {cosine:.4f}"
    extra = {
        name: {"whole_s": [round(s, 1) for s in turn.whole_s], "cpu_ms_a_text": [round(s, 2) for s in turn.cpu_ms]}
        for name, turn in turns.items()
    }
    name = f"embed --ray, {count} texts of {TOKENS} tokens, first part to last"
    note = f"{plan.threads} threads each; extra has the whole jobs' seconds and CPU time by round"
    shared: dict[str, Any] = {"group": "ray", "name": name, "unit": "texts/s", "better": "higher", "note": note}
    found = [row(figures, "ray", "single", rival_name="the single-machine command", target=0.9, extra=extra, **shared)]
    if missing:
        status = "not installed" if "not installed" in missing else "failed"
        found.append(Row("ray", name, "texts/s", "higher", rival_name=what, status=status, note=missing))
    else:
        found.append(row(figures, "ray", "by hand", rival_name=what, **shared))
    return found


# --- memory ----------------------------------------------------------------------------------------------------------


def memory(folder: Path, lines: int, dims: int = 32) -> dict[str, Any]:
    """Embed *lines* on Ray with an engine that computes nothing; return each kind of process's anonymous MiB."""
    from synapse_host.bulk.cluster import embed_on_ray

    bundle, source, lanes = echo_corpus(folder, lines, dims)
    begun = time.time()
    with Watch(_kind) as watch:
        document = embed_on_ray(
            str(source), str(folder / f"{lines}"), str(bundle), display=Console(quiet=True), matrix=str(lanes),
            block_bytes=1 << 18,
        )  # fmt: skip
    made = parts_made(folder / f"{lines}")
    settled = made[len(made) // 10][0]
    found: dict[str, Any] = {"lines": document["n"], "parts": document["parts"], "s": round(time.time() - begun, 1)}
    for kind, samples in watch.memory.items():
        after = [size for moment, size in samples if settled <= moment <= made[-1][0]] or [samples[-1][1]]
        found[kind] = {"peak": round(max(size for _, size in samples), 1), "grown": round(after[-1] - after[0], 1)}
    return found


def _kind(process: psutil.Process) -> str | None:
    if process.pid == os.getpid():
        return "driver"
    line = " ".join(process.cmdline())
    return "actor" if "MapWorker" in line else "worker" if "--socket" in line and "echo_worker" in line else None


if __name__ == "__main__":
    for each in sys.argv[2:]:
        print(json.dumps(memory(Path(sys.argv[1]), int(each))), flush=True)
