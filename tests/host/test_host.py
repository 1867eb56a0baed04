from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.checkpoint import dense
from synapse_host import lanes
from synapse_host.config import HostConfig
from synapse_host.errors import (
    BackendMissing,
    BundleInvalid,
    DeadlineExceeded,
    EngineCrashed,
    InvalidRequest,
    ProbeRequired,
    SequenceTooLong,
    SynapseError,
    UnknownModel,
)
from synapse_host.host import Host, open_bundles
from synapse_host.results import sigmoid
from synapse_host.sync import SyncHost
from synapse_host.text import encoders, limits, validate
from tests.conftest import children
from tests.support.scripted import expected_score, expected_sequence_score, expected_vector
from tests.support.small_bundle import CLS, SEP, WORDS, write_bundle, write_matrix
from tests.support.toy_models import write_dense

pytestmark = pytest.mark.process

NO_TEXTS: list[Any] = [None, 5, b"a", {"a"}, {"a": 1}, (text for text in ["a"]), [None], [b"a"], ["a", 1]]
NO_DEADLINES: list[Any] = [float("nan"), "5", object(), 10**400, [1]]
NO_NAMES: list[Any] = [None, 1, ["toy"], {"toy": 1}, b"toy"]

A, B, QUERY = (WORDS.index(word) for word in ("a", "b", "query"))


class Bench:
    """Bundles and a matrix over a scripted worker; ``host`` opens a host on them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.models: dict[str, Path] = {}

    def model(self, name: str, **options: Any) -> Bench:
        self.models[name] = write_bundle(self.root / name, model_id=name, **options)
        return self

    def host(
        self, script: dict[str, Any] | None = None, *, config: HostConfig | None = None, **matrix: Any
    ) -> AbstractAsyncContextManager[Host]:
        path = write_matrix(self.root, script, **matrix)
        return Host.open(path, self.models, config or HostConfig(shutdown_grace=5))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def vector(ids: list[int]) -> list[float]:
    return [float(np.float32(value)) for value in expected_vector(ids)]


async def test_texts_become_vectors_in_input_order(bench: Bench) -> None:
    async with bench.model("toy").host() as host:
        vectors = await host.embed("toy", ["a b", "a", "b"])
        assert vectors.dtype == np.float32 and vectors.shape == (3, 8)
        assert vectors.tolist() == [vector([CLS, A, B, SEP]), vector([CLS, A, SEP]), vector([CLS, B, SEP])]
        assert (await host.embed_ids("toy", [[7, 8], [9]])).tolist() == [vector([7, 8]), vector([9])]
        result = await host.embed_result("toy", ["a", "a " * 40], truncate=True)
        assert (result.truncated, result.lane, result.engine, result.device) == ([1], "embed", "scripted", "cpu")
        assert result.tokens == 3 + 16


async def test_a_prompt_of_the_model_is_put_before_its_texts(bench: Bench) -> None:
    few, many = ["a", "b"], ["a"] * (encoders.CHUNK + 1)
    plain, asked = vector([CLS, A, SEP]), vector([CLS, QUERY, A, SEP])
    prompts = {"query": "query ", "doc": "b "}
    bench.model("toy", prompts=prompts, default_prompt="query").model("free", prompts=prompts)
    async with bench.host() as host:
        for texts in (few, many):
            for model, prompt, expected in (
                ("toy", None, asked),
                ("toy", "none", plain),
                ("toy", "doc", vector([CLS, B, A, SEP])),
                ("free", None, plain),
                ("free", "query", asked),
            ):
                assert (await host.embed(model, texts, prompt=prompt))[0].tolist() == expected
                assert (await host.embed_result(model, texts, prompt=prompt)).vectors[0].tolist() == expected
            with pytest.raises(InvalidRequest, match="doc, query, none"):
                await host.embed("toy", texts, prompt="passage")
        assert (await host.embed_ids("toy", [[A]])).tolist() == [vector([A])], "ids are sent as they are"


async def test_dense_layers_are_applied_to_what_the_worker_pooled(bench: Bench) -> None:
    folder, weight, shift = write_dense(bench.root / "2_Dense", 8, 20, "Tanh")
    (bench.root / "toy").mkdir()
    layers = dense.write([dense.read_module(folder)], bench.root / "toy")
    rows = [[1 + number % 13, 1 + number // 13] for number in range(600)]
    expected = np.tanh(np.array([vector(row) for row in rows]) @ weight.T + shift)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    async with bench.model("toy", dims=20, dense=layers).host() as host:
        assert np.abs(await host.embed_ids("toy", rows) - expected).max() < 1e-5
        assert np.abs(await host.embed_ids("toy", rows[5:6]) - expected[5:6]).max() < 1e-5
        assert (await host.embed("toy", ["a"] * (encoders.CHUNK + 1))).shape == (encoders.CHUNK + 1, 20)
        await host.probe("embed")
    write_dense(folder, 8, 20, "Identity", weight=np.full((20, 8), 3e38, np.float32))
    bench.model("toy", dims=20, dense=dense.write([dense.read_module(folder)], bench.root / "toy"))
    async with bench.host() as host:
        with pytest.raises(SynapseError, match="overflow") as caught:
            await host.embed_ids("toy", rows)
        assert caught.value.code == "nonfinite_output"
    (bench.root / "toy" / dense.FILE).write_bytes(b"something else")
    async with bench.host() as host:
        with pytest.raises(BundleInvalid, match="digest"):
            await host.embed_ids("toy", [[1]])
        assert host.health()["lanes"]["embed"]["worker_pid"] is None


@pytest.mark.report("ollama/ollama#6187")
@pytest.mark.parametrize("max_frame", [None, 16 * 1024])
async def test_many_texts_are_split_and_keep_their_order(bench: Bench, max_frame: int | None) -> None:
    rows = [[1 + number % 13, 1 + number // 13] for number in range(700)]
    config = None if max_frame is None else HostConfig(max_frame=max_frame)
    async with bench.model("toy").host(config=config) as host:
        vectors = await host.embed_ids("toy", rows)
        assert vectors.tolist() == [vector(row) for row in rows]


async def test_many_rows_are_checked_and_cut_beside_the_loop(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    here: list[tuple[str, bool]] = []

    def note(module: Any, name: str) -> None:
        real = getattr(module, name)

        def noted(*args: Any, **options: Any) -> Any:
            here.append((name, threading.current_thread() is threading.main_thread()))
            return real(*args, **options)

        monkeypatch.setattr(module, name, noted)

    note(validate, "id_rows")
    note(limits, "split")
    rows = [[1 + number % 13, 1 + number // 13] for number in range(encoders.CHUNK + 1)]

    async with bench.model("toy").model("judge", task="rerank").host({"rules": []}) as host:
        assert (await host.embed_ids("toy", rows)).tolist() == [vector(row) for row in rows]
        await host.embed_ids("toy", rows[:3])
        with pytest.raises(DeadlineExceeded):
            await host.embed_ids("toy", rows, deadline=0.0)
        assert here[:4] == [("id_rows", False), ("split", False), ("id_rows", True), ("split", True)]
        here.clear()
        await host.rerank("judge", "query", ["a"] * (encoders.CHUNK + 1))
        await host.rerank_ids("judge", [QUERY], rows)
        assert [name for name, _ in here].count("split") == 2 and not any(on_the_loop for _, on_the_loop in here)


async def test_a_chat_is_rendered_in_a_process_that_ends_with_the_host(bench: Bench) -> None:
    template = "{% for m in messages %}<|im_start|> {{ m.content }} <|im_end|>{% endfor %}"
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    options: dict[str, Any] = {"task": "generate", "frame": False, "max_tokens": 64}
    bench.model("writer", chat_template=template, **options).model("hostile", chat_template=endless, **options)
    before = children()
    started = time.monotonic()
    async with bench.host() as host:
        answer = await host.generate("writer", "a b", chat=True, max_tokens=2)
        assert answer.n_prompt == 4
        with pytest.raises(DeadlineExceeded):
            await host.generate("hostile", "a", chat=True, deadline=0.3)
        # Its template still runs: closing the host ends it.
        assert len(children()) >= 2
    assert children() == before and time.monotonic() - started < 30


async def test_rerank_segments_and_the_sigmoid_once(bench: Bench) -> None:
    async with bench.model("judge", task="rerank").model("plain", task="rerank", score="identity").host() as host:
        raw = await host.rerank("judge", "query", ["a", "b a"], raw=True)
        logits = [expected_score([QUERY], [A]), expected_score([QUERY], [B, A])]
        assert raw.tolist() == [float(np.float32(value)) for value in logits]
        scores = await host.rerank("judge", "query", ["a", "b a"])
        assert scores.tolist() == sigmoid(raw).tolist()
        assert (await host.rerank("plain", "query", ["a", "b a"])).tolist() == raw.tolist()
        assert (await host.rerank_ids("judge", [QUERY], [[A], [B, A]], raw=True)).tolist() == raw.tolist()
        result = await host.rerank_result("judge", "query", ["a"] * 300)
        assert result.lane == "rerank:judge" and len(result.scores) == 300
        assert result.order == list(range(300))


async def test_owned_lanes_get_composed_sequences(bench: Bench) -> None:
    async with bench.model("judge", task="rerank", formats={"safetensors-package": "f32"}).host(engine="cuda") as host:
        sequences = [[CLS, QUERY, SEP, A, SEP], [CLS, QUERY, SEP, B, A, SEP]]
        expected = [float(np.float32(expected_sequence_score(ids))) for ids in sequences]
        assert (await host.rerank("judge", "query", ["a", "b a"], raw=True)).tolist() == expected
        assert (await host.rerank_ids("judge", [QUERY], [[A], [B, A]], raw=True)).tolist() == expected


@pytest.mark.parametrize(("family", "tokenizer", "longest"), [("bert", True, 12), ("roberta", True, 12),
                                                             ("bert", False, 12), ("roberta", False, 11),
                                                             ("mpnet", False, 11)])  # fmt: skip
async def test_the_special_ids_of_a_pair_count_whoever_composes_it(
    bench: Bench, family: str, tokenizer: bool, longest: int
) -> None:
    """Of 16 tokens the query has one; RoBERTa's pair has four special ids, where no tokenizer's template says three."""
    async with bench.model("judge", task="rerank", family=family, tokenizer=tokenizer).host() as host:
        assert (await host.rerank_ids("judge", [QUERY], [[A] * longest])).shape == (1,)
        with pytest.raises(SequenceTooLong) as caught:
            await host.rerank_ids("judge", [QUERY], [[A] * (longest + 1)])
        assert caught.value.details["tokens"] == 17


@pytest.mark.report("ggml-org/llama.cpp#5733")
@pytest.mark.report("ggml-org/llama.cpp#7277")
async def test_local_refusals_start_no_worker(bench: Bench) -> None:
    async with bench.model("toy").model("writer", task="generate", frame=False).host() as host:
        refused: list[tuple[type[SynapseError], Awaitable[Any]]] = [
            (UnknownModel, host.embed("other", ["a"])),
            (InvalidRequest, host.rerank("toy", "a", ["b"])),
            (InvalidRequest, host.embed("toy", ["a"], lane="nowhere")),
            (InvalidRequest, host.embed("toy", "one text")),
            (InvalidRequest, host.embed("toy", ["a", ""])),
            (InvalidRequest, host.embed_ids("toy", [[1], []])),
            (InvalidRequest, host.embed_ids("toy", [[-1]])),
            (SequenceTooLong, host.embed_ids("toy", [[1] * 17])),
            (SequenceTooLong, host.embed_ids("toy", [range(10**12)])),
            (SequenceTooLong, host.embed("toy", ["a " * 17])),
            (InvalidRequest, host.probe("nowhere")),
            *((InvalidRequest, host.embed("toy", texts)) for texts in NO_TEXTS),
            *((InvalidRequest, host.embed("toy", ["a"], deadline=deadline)) for deadline in NO_DEADLINES),
            *((InvalidRequest, host.load("toy", deadline=deadline)) for deadline in NO_DEADLINES),
            *((UnknownModel, host.embed(model, ["a"])) for model in NO_NAMES),
            *((UnknownModel, host.load(model)) for model in NO_NAMES),
            *((UnknownModel, host.unload(model)) for model in NO_NAMES),
            *((InvalidRequest, host.probe(lane)) for lane in NO_NAMES),
            (InvalidRequest, host.embed_ids("toy", np.array(3))),
            (InvalidRequest, host.embed("toy", ["a"], lane=np.array(["a", "b"]))),
            *((InvalidRequest, host.generate("writer", "a", max_tokens=n)) for n in (0, -1, True, "3", 2**32)),
            (SequenceTooLong, host.generate("writer", "a b", max_tokens=15)),
            (InvalidRequest, host.generate("writer", "a", chat=True)),
        ]
        for kind, call in refused:
            with pytest.raises(kind):
                await call
        for rows in ([[1]] * 65, []):
            with pytest.raises(InvalidRequest, match=f"{len(rows)} rows to be packed, one exchange takes 1 to 64"):
                await host.embed_packed("toy", rows, 128)
        resting = host.health()["lanes"]["embed"]
        assert (resting["state"], resting["worker_pid"], resting["generation"]) == ("idle", None, 0)
        await host.load("toy")
        assert set(resting) == set(host.health()["lanes"]["embed"]), "a lane that never ran has the same fields"


@pytest.mark.parametrize("engine", ["llama", "cuda"])
async def test_nothing_to_do_is_done_without_a_worker(bench: Bench, engine: str) -> None:
    formats = {"gguf": "f16", "safetensors-package": "f32"}
    bench.model("toy", formats=formats).model("judge", task="rerank", formats=formats)
    async with bench.host(engine=engine) as host:
        for vectors in (await host.embed("toy", []), await host.embed_ids("toy", []), await host.embed("toy", ())):
            assert vectors.shape == (0, 8) and vectors.dtype == np.float32
        result = await host.embed_result("toy", [])
        assert (result.vectors.shape, result.truncated, result.tokens) == ((0, 8), [], 0)
        for scores in (await host.rerank("judge", "a", []), await host.rerank_ids("judge", [5], [], raw=True)):
            assert scores.shape == (0,) and scores.dtype == np.float32
        assert (await host.rerank_result("judge", "a", [])).order == []
        with pytest.raises(InvalidRequest, match="the query is empty"):
            await host.rerank("judge", "", [])
        assert {lane["generation"] for lane in host.health()["lanes"].values()} == {0}


@pytest.mark.parametrize("task", ["embed", "rerank", "generate"])
async def test_a_legacy_lane_opens_again_by_probe(bench: Bench, task: str) -> None:
    script = {"rules": [{"on": "serving", "first_id": 99, "do": [{"exit": 3}]}]}

    async def call(host: Host, id: int) -> Any:
        if task == "embed":
            return await host.embed_ids("toy", [[id]])
        if task == "rerank":
            return await host.rerank_ids("toy", [id], [[1]])
        return await host.generate_ids("toy", [id], 1)

    async with bench.model("toy", task=task, frame=task != "generate").host(script, kind="legacy") as host:
        for _ in range(2):
            with pytest.raises(EngineCrashed):
                await call(host, 99)
        with pytest.raises(ProbeRequired):
            await call(host, 1)
        await host.probe(task)
        await call(host, 1)


async def test_a_load_opens_the_tokenizer_too(bench: Bench) -> None:
    """The first text after it took 95 ms of the host's own time for that."""
    async with bench.model("toy").host() as host:
        await host.load("toy")
        host.bundles["toy"].path("tokenizer.json").unlink()
        assert (await host.embed("toy", ["a"])).shape == (1, 8)


async def test_dims_unlike_the_bundles_are_refused(bench: Bench) -> None:
    async with bench.model("toy").host({"dims": 5}) as host:
        with pytest.raises(BundleInvalid, match="says dims 8, its artifact gives 5"):
            await host.embed_ids("toy", [[1]])


async def test_lane_ids_and_explanations(bench: Bench) -> None:
    lanes = {
        "embed": {"task": "embed", "engines": ["scripted"]},
        "other": {"task": "embed", "engines": ["scripted"]},
    }

    async with bench.model("one").model("two").host(lanes=lanes) as host:
        assert list(host.assignments) == ["embed:one", "embed:two", "other:one", "other:two"]
        a = await host.embed_result("one", ["a"], lane="other")
        b = await host.embed_result("one", ["a"], lane="embed:one")
        assert (a.lane, b.lane) == ("other:one", "embed:one")
        (row,) = [row for row in host.explain("other") if row["model"] == "two"]
        assert row["placement"] == "scripted" and row["considered"][0]["verdict"] == "yes"


async def test_a_lane_without_an_engine_says_why(bench: Bench) -> None:
    async with bench.model("toy", formats={"coreml-x": "f16"}).host() as host:
        with pytest.raises(BackendMissing) as caught:
            await host.embed("toy", ["a"])
        assert "bundle toy has no format gguf" in caught.value.message and caught.value.exit_code == 4
        assert host.health()["lanes"]["embed"]["state"] == "refused"


async def test_threads_are_shared_by_the_lanes_of_a_device(bench: Bench) -> None:
    async with bench.model("toy").model("judge", task="rerank").host() as host:
        specs = [assignment.require() for assignment in host.assignments.values()]
        threads = {spec.load.runtime_config["threads"] for spec in specs}
        assert threads == {str(max(1, host.profile.cores // 2))}


async def test_another_event_loop_is_told_so(bench: Bench) -> None:
    async with bench.model("toy").host() as host:
        ends: list[Any] = []

        def elsewhere() -> None:
            for call in (
                lambda: host.embed("toy", ["a"]),
                lambda: host.load("toy"),
                lambda: host.probe("embed"),
                host.aclose,
            ):
                try:
                    ends.append(asyncio.run(call()))
                except InvalidRequest as exc:
                    ends.append(exc.message)

        await asyncio.to_thread(elsewhere)
        assert len(ends) == 4 and all("another event loop" in str(end) for end in ends), ends
        assert (await host.embed("toy", ["a"])).shape == (1, 8)


async def test_a_cancelled_caller_leaves_the_lane_usable(bench: Bench) -> None:
    script = {"rules": [{"on": "EMBED_BATCH", "first_id": 99, "do": [{"sleep": 0.5}]}]}

    async with bench.model("toy").host(script) as host:
        task = asyncio.ensure_future(host.embed_ids("toy", [[99]] * 1500))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await host.embed_ids("toy", [[1]])).tolist() == [vector([1])]
        assert host.health()["lanes"]["embed"]["strikes"] == 0


def test_the_sync_host_makes_the_same_calls(bench: Bench) -> None:
    path = write_matrix(bench.root)
    bench.model("toy").model("judge", task="rerank").model("writer", task="generate", frame=False)
    with SyncHost.open(path, bench.models) as host:
        host.load("toy")
        assert host.embed("toy", ["a"]).tolist() == [vector([CLS, A, SEP])]
        assert host.embed_ids("toy", [[7]]).tolist() == [vector([7])]
        assert host.embed_result("toy", ["a"], prompt="none").lane == "embed"
        assert host.rerank("judge", "query", ["a"]).shape == (1,)
        assert host.rerank_result("judge", "query", ["a"]).order == [0]
        assert host.rerank_ids("judge", [QUERY], [[A]]).shape == (1,)
        assert host.generate("writer", "a", max_tokens=2).n_gen == 2
        assert host.generate_ids("writer", [A], 2).n_prompt == 1
        assert host.health()["lanes"]["embed"]["worker_pid"] is not None
        assert host.explain("embed")[0]["placement"] == "scripted"
        assert host.ping("toy")["models"] == ["toy"]
        with pytest.raises(UnknownModel):
            host.embed("other", ["a"])
        host.probe("embed")
        host.unload("toy")


def test_the_sync_host_has_every_call_of_the_host_with_the_same_arguments() -> None:
    calls = {name for name, value in vars(Host).items() if callable(value) and not name.startswith("_")}
    calls -= {"aclose", "on_loop"}  # its block closes it, and its loop is its own business
    for name in calls:
        ours, theirs = inspect.signature(getattr(SyncHost, name)), inspect.signature(getattr(Host, name))
        assert list(ours.parameters.values()) == list(theirs.parameters.values()), name
        if not name.endswith("_stream"):
            assert ours.return_annotation == theirs.return_annotation, name
    opened, theirs = inspect.signature(SyncHost.open), inspect.signature(Host.open)
    arguments = list(theirs.parameters.values())
    assert list(opened.parameters.values()) == [each for each in arguments if each.name != "qualifying"]


def test_health_is_read_on_the_loop_from_any_thread_and_after_its_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts: list[Host] = []

    async def main() -> None:
        async with bench.model("toy").host() as host:
            hosts.append(host)
            await reads(host)

    async def reads(host: Host) -> None:
        assert not (await asyncio.to_thread(host.health))["closed"]
        assert await asyncio.to_thread(host.on_loop, threading.current_thread) is threading.current_thread()
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(host.on_loop, lambda: 1 // 0)
        monkeypatch.setattr(lanes, "READ_S", 0.05)
        asking = asyncio.ensure_future(asyncio.to_thread(host.health))
        await asyncio.sleep(0)
        time.sleep(0.5)  # the loop stands still
        with pytest.raises(DeadlineExceeded, match="busy"):
            await asking

    asyncio.run(main())
    assert hosts[0].health()["closed"]


def test_a_folder_that_is_not_there_gets_no_hint(tmp_path: Path) -> None:
    with pytest.raises(BundleInvalid, match=r"No such file or directory$"):
        open_bundles({"a": str(tmp_path / "nothing")})


@pytest.mark.parametrize(
    ("logit", "probability"), [(0.0, 0.5), (-1e4, 0.0), (1e4, 1.0), (3.0, 0.95257413), (-3.0, 0.04742587)]
)
def test_the_sigmoid_is_stable(logit: float, probability: float) -> None:
    with np.errstate(all="raise", under="ignore"):
        value = sigmoid(np.array([logit], np.float32))
    assert value.dtype == np.float32
    assert value[0] == pytest.approx(probability, abs=1e-7)
