"""The same job on Ray: equal vectors, exactly once, whoever dies on the way. One Ray on this machine for all of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from bench.on_ray import memory
from synapse_host.bulk import Policy
from synapse_host.bulk.cluster import Embedder
from synapse_host.cli import main
from synapse_host.errors import InvalidRequest, NotCertified, SequenceTooLong, UnknownModel
from tests.support.on_ray import SLOW, Place, kill_an_actor, run_killed
from tests.support.small_bundle import vector

pytestmark = [
    pytest.mark.process,
    pytest.mark.ray,
    pytest.mark.leaks_allowed("threads", "children", "descriptors"),
    pytest.mark.filterwarnings("ignore"),  # Ray's own, about itself
]


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    ray = pytest.importorskip("ray", reason="the extra ray isn't installed")
    ray.init("local", num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


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
    with place.source.open("a") as file:
        file.write('"a"\n')
    with pytest.raises(InvalidRequest, match="as it was, or of another corpus"):
        place.run()


def test_bad_rows_are_listed_by_their_line(tmp_path: Path) -> None:
    place = Place(tmp_path)
    lines = place.source.read_text().splitlines()
    lines[1500] = json.dumps({"id": "long", "text": "a " * 40})
    lines[2900] = "{"
    place.source.write_text("\n".join(lines))
    with pytest.raises((SequenceTooLong, InvalidRequest), match=r"in\.jsonl:(1501: has 42 tokens|2901: not valid)"):
        place.run()
    assert place.parts() > 0
    done = place.run(policy=Policy(on_error="skip"))
    assert (done["n"], done["skipped"]) == (2998, 2)
    errors = [json.loads(line) for line in (place.out / "errors.jsonl").read_text().splitlines()]
    assert [error["where"] for error in errors] == [f"{place.source}:1501", f"{place.source}:2901"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"policy": Policy(prompt="passage")}, InvalidRequest, "no prompt"),
        ({"require_certificate": True}, NotCertified, "certificate"),
        ({"models_dir": "nowhere", "model": "nobody"}, UnknownModel, "no model 'nobody'"),
    ],
    ids=["an actor's start", "a call", "the model"],
)
def test_errors_of_actors_keep_their_codes(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Place(tmp_path).run(**options)


def test_the_command_takes_uris_and_counts_by_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Place(tmp_path, SLOW)
    monkeypatch.setattr("synapse_host.bulk.cluster.LINE_EVERY_S", 0.1)
    monkeypatch.chdir(tmp_path)
    source, out = place.source.parent.as_uri(), place.out.as_uri()
    command = ["embed", "--ray", "--matrix", "matrix.yaml", "--model", "./toy", "--file"]
    assert main([*command, f"{source}/*.jsonl", "--out", out]) == 0
    assert "synapse: 0 of 1 parts, 0 texts\n" in capsys.readouterr().err
    place.check()


def test_a_lane_on_a_gpu_reserves_one(tmp_path: Path) -> None:
    place = Place(tmp_path, {"ready": [{"report": str(tmp_path / "worker.json")}]}, "cuda")
    place.run(block_bytes=1 << 20)
    assert json.loads((tmp_path / "worker.json").read_text())["environment"]["CUDA_VISIBLE_DEVICES"] == "0"


@pytest.mark.fault
def test_actors_and_workers_that_are_killed_lose_and_double_nothing(tmp_path: Path) -> None:
    """Slow workers, so that the kills meet them at work: a worker three times, its actor twice."""
    place = Place(tmp_path, SLOW)

    def kill_a_worker() -> bool:
        for process in psutil.Process().children(recursive=True):
            if "--socket" in process.cmdline():
                process.kill()
                return True
        return False

    document, killed = run_killed(place, [kill_a_worker, kill_an_actor] * 2 + [kill_a_worker])
    assert document["n"] == 3000 and killed == 5
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


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    """60,000 rows are 92 MB. The figures of 200,000: python -m bench.on_ray."""
    found = memory(tmp_path, 60_000, dims=384)
    assert found["lines"] == 60_000
    assert max(found[process]["grown"] for process in ("driver", "actor", "worker")) < 46, found


@pytest.mark.parametrize(
    ("column", "message"),
    [({"body": ["a"]}, r"no column 'text' \(have: body\)"), ({"text": ["a", None]}, "text 1: .* holds NoneType")],
)
def test_a_column_that_holds_no_texts_is_refused(tmp_path: Path, column: dict[str, Any], message: str) -> None:
    place = Place(tmp_path)
    embedder = Embedder(str(place.bundle), matrix=str(place.matrix))
    try:
        with pytest.raises(InvalidRequest, match=message):
            embedder({name: np.array(values, object) for name, values in column.items()})
    finally:
        embedder.close()
