"""Jobs of ``embed --ray`` on this machine: a corpus, two raylets, and what is killed under a job.

    python -m tests.support.on_ray [JOBS]        so many jobs (20), an actor and a raylet killed in each: a table

Every job must end with each row once and with its own vector.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from synapse_host.bulk.cluster import embed_on_ray
from synapse_host.cli.console import Console
from tests.support.scripted import expected_vector
from tests.support.small_bundle import CLS, SEP, WORDS, write_bundle, write_matrix

QUIET = Console(quiet=True)
SLOW = {"rules": [{"on": "EMBED_BATCH", "do": [{"sleep": 0.1}]}]}
"""A worker that takes its time, so that a kill meets it at work."""


def vector(text: str) -> list[float]:
    ids = [CLS, *(WORDS.index(word) for word in text.split()), SEP]
    return [float(np.float32(value)) for value in expected_vector(ids)]


class Place:
    """A corpus of letters with ids, a toy bundle and a matrix of one thread."""

    def __init__(self, root: Path, script: dict[str, Any] | None = None, device: str = "cpu") -> None:
        self.root = root
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

    def expected(self) -> dict[str, list[float]]:
        return {f"n{number}": vector(word) for number, word in enumerate(self.words)}

    def every_row(self) -> list[tuple[str, list[float]]]:
        """Return id and vector of every row of every part in the folder."""
        from pyarrow import parquet

        tables = [parquet.read_table(part).to_pydict() for part in sorted(self.out.glob("part-*.parquet"))]
        return [row for table in tables for row in zip(table["id"], table["vector"], strict=True)]

    def check(self) -> None:
        """Each row is there once, with its vector, and nothing is left of what was begun."""
        rows = self.every_row()
        assert dict(rows) == self.expected() and len(rows) == len(self.words)
        assert not list(self.out.glob("*.tmp"))


class Raylets:
    """A Ray of two raylets with a core each; the second one can be killed, and then another one comes."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        # A dead raylet is known as one within seconds.
        quick = {"health_check_period_ms": 1000, "health_check_timeout_ms": 3000}
        head = {"num_cpus": 1, "include_dashboard": False, "_system_config": quick}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address = self._cluster.address
        self._second = self._cluster.add_node(num_cpus=1)

    def kill(self) -> bool:
        """Kill the second raylet with -9: its actors end with it. Another one comes in its place."""
        [raylet] = self._second.all_processes["raylet"]
        raylet.process.kill()
        raylet.process.wait()
        self._cluster.remove_node(self._second, allow_graceful=False)  # what Ray started beside it
        self._second = self._cluster.add_node(num_cpus=1)
        return True

    def close(self) -> None:
        self._cluster.shutdown()


@contextmanager
def two_raylets() -> Iterator[Raylets]:
    """Have two raylets for the block, and be connected to the first."""
    import ray

    raylets = Raylets()
    try:
        ray.init(address=raylets.address, log_to_driver=False, logging_level="CRITICAL")
        try:
            yield raylets
        finally:
            ray.shutdown()
    finally:
        raylets.close()


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


def main(jobs: int) -> int:
    """Run the jobs and print what came of each."""
    failed = 0
    kills = 0
    with two_raylets() as raylets:
        for number in range(jobs):
            with tempfile.TemporaryDirectory(prefix="r") as folder:
                place = Place(Path(folder), SLOW)
                begun = time.monotonic()
                _, done = run_killed(place, [kill_an_actor, raylets.kill])
                seconds = time.monotonic() - begun
                expected, rows = place.expected(), place.every_row()
                lost = len(set(expected) - {id for id, _ in rows})
                doubled = len(rows) - len({id for id, _ in rows})
                wrong = sum(row != expected.get(id) for id, row in rows)
                kills += done
                failed += bool(lost or doubled or wrong or done < 2)
                print(
                    f"job {number + 1:2}: {done} kills, {lost} lost, {doubled} doubled, {wrong} wrong, {seconds:.0f} s",
                    flush=True,
                )
    print(f"{jobs} jobs, {kills} kills, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20))
