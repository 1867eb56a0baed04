"""`synapse embed`, `rerank` and `generate` beside a running server: the same documents and exit codes either way."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.cli.conftest import Command, Done, entered, finished
from tests.cli.test_serve import LIMIT_S, Running, running, until
from tests.support.small_bundle import write_bundle

pytestmark = pytest.mark.process

Ask = Callable[..., Done]
ALL = ("toy", "judge", "writer")


@pytest.fixture
def models(cli: Command, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    cli.environment["XDG_RUNTIME_DIR"] = str(runtime_dir)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_dir))
    monkeypatch.setenv("XDG_DATA_HOME", str(cli.root / "data"))
    monkeypatch.chdir(cli.root)
    (cli.root / "tmp").mkdir()
    (cli.root / "texts.jsonl").write_text("".join(f'"{"abcdef"[n % 6]} {"abcdef"[n % 5]}"\n' for n in range(2500)))
    return cli.setup().bundle("toy", max_tokens=64).bundle("judge", task="rerank").bundle("writer", task="generate")


@pytest.fixture
def ask(models: Command) -> Ask:
    """Run a command as the same user, by its own entry."""
    return lambda *words: entered(models.arguments(*words))


@pytest.fixture
def host(models: Command, runtime_dir: Path, ask: Ask) -> Iterator[Running]:
    with running(models, runtime_dir, "--load", *ALL) as up:
        yield up


def told(host: Running, route: str) -> str:
    """Ask the server itself: a command would take a second for it."""
    transport = httpx.HTTPTransport(uds=str(host.socket()))
    with httpx.Client(transport=transport, base_url="http://localhost", timeout=LIMIT_S) as client:
        return client.get(route).text


def used(host: Running) -> int:
    """How many requests the server's lanes have answered."""
    return sum(
        int(float(line.rpartition(" ")[2]))
        for line in told(host, "/metrics").splitlines()
        if line.startswith("synapse_worker_requests_total") and 'op="load"' not in line and 'op="ping"' not in line
    )


def test_documents_and_exit_codes_are_the_same(host: Running, ask: Ask, models: Command) -> None:
    (models.root / "pairs.jsonl").write_text('{"query": "a", "docs": ["b", "c d"]}\n{"query": "b", "docs": ["a"]}\n')
    assert ask("embed", "--file", "texts.jsonl", "--model", "toy", "--out", "index.npy", "--local").code == 0
    calls: list[tuple[tuple[str, ...], int]] = [
        (("embed", "a b", "c", "--model", "toy"), 0),
        (("embed", "--file", "texts.jsonl", "--model", "toy", "--dimensions", "3"), 0),
        (("embed", "a " * 100, "b", "--model", "toy", "--truncate"), 0),
        (("rerank", "a", "b", "c d", "--model", "judge", "--raw"), 0),
        (("rerank", "--file", "pairs.jsonl", "--model", "judge"), 0),
        (("generate", "a b", "--model", "writer", "--max-tokens", "8"), 0),
        (("search", "index.npy", "a b", "--rerank", "--reranker", "judge"), 0),
        (("embed", "b", "a " * 100, "--model", "toy"), 2),
        (("generate", "a", "--chat", "--model", "writer"), 2),
    ]
    for words, code in calls:
        before = used(host)
        there, here = ask(*words, "--json"), ask(*words, "--json", "--local")
        assert there.document == here.document, words
        assert (there.code, here.code) == (code, code), there
        assert (used(host) > before) == (code == 0), "the server was asked, and not by --local"
    plain = ask("embed", "a b", "--model", "toy")
    assert plain.code == 0 and plain.err.count("using the running server (pid ") == 1


def test_a_file_is_filled_by_the_server(host: Running, ask: Ask, models: Command) -> None:
    documents = {}
    for name, more in (("there", ()), ("here", ("--local",))):
        words = ("embed", "--file", "texts.jsonl", "--model", "toy", "--out", f"{name}.npy", "--json")
        done = ask(*words, *more)
        assert done.code == 0, done.err
        assert done.document["tokens_per_s"] > 0
        documents[name] = {key: value for key, value in done.document.items() if "_per_s" not in key and key != "out"}
    assert documents["there"] == documents["here"]
    assert np.array_equal(np.load(models.root / "there.npy"), np.load(models.root / "here.npy"))


def test_a_server_that_would_answer_otherwise_is_left_alone(host: Running, ask: Ask, models: Command) -> None:
    other, copy = models.root / "other" / "toy", models.root / "copy" / "toy"
    write_bundle(other, model_id="toy", max_tokens=32)
    shutil.copytree(models.root / "models" / "toy", copy)
    shutil.copy(models.root / "matrix.yaml", other.parent / "matrix.yaml")
    before = used(host)
    for words in (
        ("--models-dir", str(other.parent), "--model", "toy"),
        ("--matrix", str(other.parent / "matrix.yaml"), "--model", "toy"),
        ("--model", str(other)),
    ):
        done = ask("embed", "a", *words)
        assert done.code == 0 and "running server" not in done.err
    assert used(host) == before
    assert "running server" in ask("embed", "a", "--model", str(copy)).err, "the same bundle elsewhere"


def test_a_stream_has_its_end_when_the_server_drains(models: Command, runtime_dir: Path) -> None:
    slice_of_16 = {"finish_reason": "length", "text": "ab", "n_gen": 16, "generated_token_ids": [4] * 16}
    slow = [{"sleep": 0.3}, {"reply": {"set": slice_of_16}}]
    models.bundle("writer", task="generate", max_tokens=64).setup({"rules": [{"on": "GENERATE", "do": slow}]})
    with running(models, runtime_dir) as host:
        body = {"model": "writer", "prompt": "a", "max_tokens": 48, "stream": True}
        url = f"{host.state['host']['url']}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=LIMIT_S, trust_env=False) as answer:
            lines = answer.iter_lines()
            next(lines)
            host.process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert finished(host.process).code == 0


def test_a_deadline_and_an_end_in_the_middle(models: Command, runtime_dir: Path, ask: Ask) -> None:
    go, started = models.root / "go", models.root / "started"
    models.setup({"rules": [{"on": "EMBED_BATCH", "do": [{"touch": str(started)}, {"wait_for": str(go)}]}]})
    with running(models, runtime_dir, "--drain", "0.2") as host:
        command = host.start("embed", "a", "--model", "toy", "--json")
        until(started.exists)
        late = ask("embed", "a", "--model", "toy", "--deadline", "1", "--json")
        assert (late.code, late.document["error"]["code"]) == (5, "deadline_exceeded")
        host.stop()
        done = finished(command)
        assert (done.code, done.document["error"]["code"]) == (1, "engine_crashed")
