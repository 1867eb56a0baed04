"""The same job on Ray: equal vectors, exactly once, whoever dies on the way. One Ray on this machine for all of it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from synapse_host.bulk import Policy
from synapse_host.bulk.cluster import Embedder, embed_on_ray
from synapse_host.cli.console import Console
from synapse_host.errors import InvalidRequest, SequenceTooLong
from tests.support.scripted import expected_vector
from tests.support.small_bundle import CLS, SEP, WORDS, write_bundle, write_matrix

pytestmark = [
    pytest.mark.process,
    pytest.mark.ray,
    pytest.mark.leaks_allowed("threads", "children", "descriptors"),
    pytest.mark.filterwarnings("ignore"),  # Ray's own, about itself
]
QUIET = Console(quiet=True)


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    ray = pytest.importorskip("ray", reason="the extra ray isn't installed")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def vector(text: str) -> list[float]:
    ids = [CLS, *(WORDS.index(word) for word in text.split()), SEP]
    return [float(np.float32(value)) for value in expected_vector(ids)]


class Place:
    """A corpus of letters with ids, a toy bundle and a matrix of one thread."""

    def __init__(self, root: Path, script: dict[str, Any] | None = None) -> None:
        self.root = root
        self.matrix = write_matrix(root, script)
        self.bundle = write_bundle(root / "toy")
        self.words = [WORDS[4 + number % 6] for number in range(3000)]
        self.source = root / "corpus" / "in.jsonl"
        self.source.parent.mkdir()
        lines = (json.dumps({"id": f"n{number}", "text": word}) for number, word in enumerate(self.words))
        self.source.write_text("\n".join(lines) + "\n")
        self.out = root / "vectors"

    def run(self, **options: Any) -> dict[str, Any]:
        given = {"matrix": str(self.matrix), "block_bytes": 8192, "display": QUIET, **options}
        return embed_on_ray(str(self.source), str(self.out), str(self.bundle), **given)

    def rows(self) -> dict[str, list[float]]:
        """Return every row of every part; no id may be there twice."""
        from pyarrow import parquet

        found: dict[str, list[float]] = {}
        for part in sorted(self.out.glob("part-*.parquet")):
            table = parquet.read_table(part).to_pydict()
            for id, row in zip(table["id"], table["vector"], strict=True):
                assert id not in found
                found[id] = row
        return found

    def check(self) -> None:
        assert self.rows() == {f"n{number}": vector(word) for number, word in enumerate(self.words)}
        assert not list(self.out.glob("*.tmp"))


def test_vectors_are_those_of_the_host_and_a_second_run_has_nothing_to_do(tmp_path: Path) -> None:
    place = Place(tmp_path)
    first = place.run()
    assert (first["n"], first["made"]) == (3000, first["parts"]) and first["parts"] > 5
    place.check()
    manifest = json.loads((place.out / "manifest.json").read_text())
    assert manifest["n"] == 3000 and {part["engine"] for part in manifest["parts"]} == {"scripted"}
    (place.out / manifest["parts"][2]["part"]).unlink()
    assert place.run()["made"] == 1
    place.check()
    for changed in ({"policy": Policy(truncate=True)}, {"column": "body"}):
        with pytest.raises(InvalidRequest, match="mixed with another result"):
            place.run(**changed)


def test_bad_rows_are_listed_by_their_line(tmp_path: Path) -> None:
    place = Place(tmp_path)
    lines = place.source.read_text().splitlines()
    lines[1500] = json.dumps({"id": "long", "text": "a " * 40})
    lines[2900] = "{"
    place.source.write_text("\n".join(lines))
    with pytest.raises((SequenceTooLong, InvalidRequest), match=r"in\.jsonl:(1501: has 42 tokens|2901: not valid)"):
        place.run()
    for part in place.out.glob("part-*"):
        part.unlink()
    done = place.run(policy=Policy(on_error="skip"))
    assert (done["n"], done["skipped"]) == (2998, 2)
    errors = [json.loads(line) for line in (place.out / "errors.jsonl").read_text().splitlines()]
    assert [error["where"] for error in errors] == [f"{place.source}:1501", f"{place.source}:2901"]


@pytest.mark.fault
def test_actors_and_workers_that_are_killed_lose_and_double_nothing(tmp_path: Path) -> None:
    """Slow workers, so that the kills meet them at work: an actor twice, its worker three times."""
    place = Place(tmp_path, {"rules": [{"on": "EMBED_BATCH", "do": [{"sleep": 0.1}]}]})
    killed: list[str] = []
    ended = threading.Event()

    def kill() -> None:
        while not ended.wait(1.0) and len(killed) < 5:
            for process in psutil.Process().children(recursive=True):
                try:
                    line = " ".join(process.cmdline())
                    wanted = "--socket" in line if len(killed) % 2 == 0 else "PartWriter" in line
                    if wanted and str(place.out) and len(list(place.out.glob("part-*"))) > len(killed):
                        process.kill()
                        killed.append(line[:40])
                        break
                except psutil.Error:
                    continue

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        began = time.monotonic()
        done = place.run()
    finally:
        ended.set()
        thread.join()
    assert done["n"] == 3000, time.monotonic() - began
    assert len(killed) >= 2, killed
    place.check()


def test_a_program_s_own_dataset(tmp_path: Path) -> None:
    import ray

    place = Place(tmp_path)
    data = ray.data.from_items([{"text": word, "more": number} for number, word in enumerate(place.words[:300])])
    arguments = {"model": str(place.bundle), "matrix": str(place.matrix)}
    actors = ray.data.ActorPoolStrategy(size=1)
    done = data.map_batches(Embedder, fn_constructor_kwargs=arguments, compute=actors, num_cpus=1, batch_size=64)
    rows = sorted(done.take_all(), key=lambda row: row["more"])
    assert [row["vector"].tolist() for row in rows] == [vector(word) for word in place.words[:300]]
    assert not any(row["truncated"] for row in rows)
