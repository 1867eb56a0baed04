"""Jobs of ``embed --ray`` on this machine: a corpus, two raylets, and what is killed under a job."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from synapse_host.bulk.cluster import embed_on_ray
from synapse_host.cli.console import Console
from tests.support.small_bundle import WORDS, vector, write_bundle, write_matrix

QUIET = Console(quiet=True)
SLOW = {"rules": [{"on": "EMBED_BATCH", "do": [{"sleep": 0.1}]}]}
"""A worker that takes its time, so that a kill meets it at work."""


class Place:
    """A corpus of letters with ids, a toy bundle and a matrix of one thread."""

    def __init__(self, root: Path, script: dict[str, Any] | None = None, device: str = "cpu") -> None:
        root.mkdir(exist_ok=True)
        if device == "cpu":
            self.matrix = write_matrix(root, script)
            self.bundle = write_bundle(root / "toy")
        else:
            self.matrix = write_matrix(root, script, engine="cuda")
            self.matrix.write_text(self.matrix.read_text().replace('"device": "cpu"', f'"device": "{device}"'))
            self.bundle = write_bundle(root / "toy", formats={"safetensors-package": "f16"})
        self.words = [WORDS[4 + number % 6] for number in range(3000)]
        self.source = root / "corpus" / "in.jsonl"
        self.source.parent.mkdir()
        lines = (json.dumps({"id": f"n{number}", "text": word}) for number, word in enumerate(self.words))
        self.source.write_text("\n".join(lines) + "\n")
        self.out = root / "vectors"

    def run(self, **options: Any) -> dict[str, Any]:
        given = {
            "model": str(self.bundle),
            "matrix": str(self.matrix),
            "block_bytes": 8192,
            "display": QUIET,
            **options,
        }
        return embed_on_ray(str(self.source), str(self.out), **given)

    def parts(self) -> int:
        return len(list(self.out.glob("part-*.parquet")))

    def check(self) -> None:
        """Each row is there once, with its vector, and nothing is left of what was begun."""
        from pyarrow import parquet

        tables = [parquet.read_table(part).to_pydict() for part in sorted(self.out.glob("part-*.parquet"))]
        rows = [row for table in tables for row in zip(table["id"], table["vector"], strict=True)]
        assert dict(rows) == {f"n{number}": vector(word) for number, word in enumerate(self.words)}
        assert len(rows) == len(self.words) and not list(self.out.glob("*.tmp"))


@contextmanager
def two_raylets() -> Iterator[Callable[[], bool]]:
    """Have two raylets with a core each for the block. Its value kills the second one, and starts another."""
    import ray
    from ray.cluster_utils import Cluster

    # A dead raylet is known as one within seconds.
    quick = {"health_check_period_ms": 1000, "health_check_timeout_ms": 3000}
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": quick}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    second = cluster.add_node(num_cpus=1)

    def kill() -> bool:
        nonlocal second
        [raylet] = second.all_processes["raylet"]
        raylet.process.kill()
        raylet.process.wait()
        cluster.remove_node(second, allow_graceful=False)  # what Ray started beside it
        second = cluster.add_node(num_cpus=1)
        return True

    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="CRITICAL")
        yield kill
    finally:
        ray.shutdown()
        cluster.shutdown()


def kill_an_actor() -> bool:
    """Kill a process that holds an actor of the job with -9; say whether there was one."""
    for process in psutil.process_iter(["name", "cmdline"]):
        try:
            if "MapWorker(MapBatches(PartWriter" in " ".join(process.cmdline()) and of_this_program(process):
                process.kill()
                return True
        except psutil.Error:
            continue
    return False


def of_this_program(process: psutil.Process) -> bool:
    """Tell whether a process descends from this one: other people's jobs are left alone."""
    return any(parent.pid == psutil.Process().pid for parent in process.parents())


def run_killed(place: Place, kills: list[Callable[[], bool]], **options: Any) -> tuple[dict[str, Any], int]:
    """Run a job and do each of *kills* in the middle, a part or more apart; return its document and how many met it."""
    done = 0
    with ThreadPoolExecutor(1) as pool:  # the kills stay in the main thread: Ray starts raylets only there
        job = pool.submit(place.run, **options)
        for kill in kills:
            before = place.parts()
            while not job.done() and (place.parts() <= before or not kill()):
                wait([job], 0.1)
            done += not job.done()
        return job.result(), done
