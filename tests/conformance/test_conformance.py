"""One suite over every engine: what protocol-v3 asks of any worker, through real processes."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from engines.protocol.messages import (
    AneAdmitPacked,
    AneAdmitShape,
    AneEvictPacked,
    AneEvictShape,
    EmbedBatch,
    Err,
    Generate,
    Item,
    Phase,
    Pooling,
    Request,
    Rerank,
    RerankSequences,
    Segment,
    encode,
)
from tests.conformance.registry import ENGINES, LOW_ID, VOCABULARY, EngineUnderTest, Subject
from tests.support.worker_client import ROOT, WorkerClient, ids_bytes, require_loaded

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="the suite's client speaks Unix sockets"),
]

Start = Callable[..., WorkerClient]


@pytest.fixture(scope="module", params=[pytest.param(e, id=e.name, marks=e.marks) for e in ENGINES])
def engine(request: pytest.FixtureRequest) -> EngineUnderTest:
    found: EngineUnderTest = request.param
    return found


@pytest.fixture(scope="module")
def subject(engine: EngineUnderTest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return engine.toy(tmp_path_factory.mktemp("embedder"))


@pytest.fixture(scope="module")
def long_subject(engine: EngineUnderTest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    if engine.long is None:
        pytest.skip(f"{engine.name} has no long call to offer here")
    return engine.toy(tmp_path_factory.mktemp("long"), **engine.long)


def arguments_of(engine: EngineUnderTest, of: Subject) -> list[str]:
    return [*(("--manifest", str(of.manifest)) if of.manifest else ()), *engine.arguments]


@pytest.fixture
def start(engine: EngineUnderTest, subject: Subject) -> Iterator[Start]:
    running: list[WorkerClient] = []

    def call(of: Subject = subject, **keywords: object) -> WorkerClient:
        command, arguments = [sys.executable, "-m", engine.module], arguments_of(engine, of)
        running.append(WorkerClient(command, device=engine.device, arguments=arguments, **keywords))  # type: ignore[arg-type]
        return running[-1]

    yield call
    for client in running:
        client.close()


@pytest.fixture
def worker(start: Start) -> WorkerClient:
    return start()


def load(client: WorkerClient, of: Subject) -> str:
    loaded = require_loaded(client.load(of.path, of.digest, of.format, **of.config))
    assert loaded.dims == of.dims
    return loaded.model_ref


def rows_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(LOW_ID, VOCABULARY, n).tolist() for n in lengths]


def items(lengths: list[int]) -> list[Item]:
    return [Item(id=str(n), n_tokens=length) for n, length in enumerate(lengths)]


# --- handshake and the ends of a life ---------------------------------------------------------------------------------


def test_hello_and_the_small_idle_worker(engine: EngineUnderTest, worker: WorkerClient) -> None:
    hello = worker.hello
    assert (hello.v, hello.nonce, hello.pid) == (3, worker.nonce, worker.process.pid)
    assert hello.engine.engine == engine.hello_name and hello.engine.version
    assert isinstance(hello.engine.build_flags, dict) and hello.engine.build_flags["device"] == engine.device
    assert 1 <= hello.max_frame <= 64 * 1024 * 1024
    assert isinstance(hello.manifest_digest, str) is engine.owned
    assert isinstance(hello.kernel_revision, str) is engine.owned
    pong = worker.ping()
    assert pong.models_loaded == 0
    assert 1 <= pong.rss_mb < 40, "an idle worker before LOAD has imported nothing heavy"


@pytest.mark.parametrize("end", [WorkerClient.shutdown, WorkerClient.hang_up])
def test_both_ends_of_a_life_exit_0(end: Callable[[WorkerClient], int], worker: WorkerClient, subject: Subject) -> None:
    worker.embed(load(worker, subject), rows_of([3]))
    assert end(worker) == 0
    assert worker.stdout() == "", "stdout is never written to"


def test_the_host_may_leave_in_mid_call(start: Start, long_subject: Subject) -> None:
    client = start(long_subject)
    ref = load(client, long_subject)
    lengths = [long_subject.max_tokens] * 256
    request = EmbedBatch(req_id="long", model_ref=ref, pooling=Pooling.MEAN, normalize=True, items=items(lengths))
    client.write_frame(encode(request))
    client.write_frame(ids_bytes(rows_of(lengths)))
    client.read_frame()  # the first progress (or, on a very fast machine, the reply): it is in the middle of it
    assert client.hang_up() == 0


def test_two_requests_at_once_are_answered_in_order(worker: WorkerClient, subject: Subject) -> None:
    """The host never does this; a SHUTDOWN behind a running request is the case that matters."""
    ref = load(worker, subject)
    rows = rows_of([subject.max_tokens] * 8)
    request = EmbedBatch(
        req_id="a", model_ref=ref, pooling=Pooling.MEAN, normalize=True, items=items(list(map(len, rows)))
    )
    worker.write_frame(encode(request))
    worker.write_frame(ids_bytes(rows))
    worker.write_frame(b'{"type":"SHUTDOWN"}')
    assert worker.answer(request).floats.shape == (8, subject.dims), "the current request is finished"
    assert worker.process.wait(30) == 0


# --- LOAD and UNLOAD --------------------------------------------------------------------------------------------------


def test_load_errors(worker: WorkerClient, subject: Subject, engine: EngineUnderTest, tmp_path: Path) -> None:
    def code(path: Path, digest: str = subject.digest, format: str = subject.format, **extra: str) -> str:
        return worker.load(path, digest, format, **{**subject.config, **extra}).code

    # Owned workers compare the digest with their manifest's before they open the file (llama-cuda.md 6.2); what a Mac
    # compiled has one of its own, which no manifest holds.
    in_place = subject.format == "mlmodelc"
    assert code(subject.path, "0" * 64) == (
        "package_digest_mismatch" if engine.owned and not in_place else "artifact_invalid"
    )
    assert code(subject.path, "") == "artifact_invalid"
    assert code(subject.path, "sha256:short") == "artifact_invalid"
    assert code(subject.path, format="pickle") == "artifact_invalid"
    assert code(tmp_path / "missing") == "artifact_invalid"
    assert code(tmp_path) == "artifact_invalid"
    assert code(subject.path, **engine.bad_config) == "config_invalid"
    if not in_place:
        data = subject.path.read_bytes()
        for length in (0, 1, len(data) // 2, len(data) - 1):
            short = tmp_path / f"short{length}"
            short.write_bytes(data[:length])
            answer = worker.load(short, hashlib.sha256(data[:length]).hexdigest(), subject.format, **subject.config)
            assert answer.code in ("artifact_invalid", "package_digest_mismatch"), answer.reply
    assert worker.ping().models_loaded == 0
    assert all(ord(" ") <= ord(c) or c == "\n" for c in worker.stderr()) and "Traceback" not in worker.stderr()
    load(worker, subject)
    assert worker.ping().models_loaded == 1


def test_load_with_a_prefixed_digest_and_unknown_keys(worker: WorkerClient, subject: Subject) -> None:
    config = {**subject.config, "artifact_path": "elsewhere", "a_key_of_tomorrow": "1"}
    require_loaded(
        worker.load(subject.path, f"sha256:{subject.digest.removeprefix('sha256:')}", subject.format, **config)
    )


def test_the_artifact_is_not_needed_after_load(worker: WorkerClient, subject: Subject, tmp_path: Path) -> None:
    if subject.format == "mlmodelc":
        pytest.skip("a directory is loaded in place")
    copy = tmp_path / subject.path.name
    shutil.copyfile(subject.path, copy)
    ref = require_loaded(worker.load(copy, subject.digest, subject.format, **subject.config)).model_ref
    rows = rows_of([5, 9])
    before = worker.embed(ref, rows).raw
    os.truncate(copy, 0)
    copy.unlink()
    assert worker.embed(ref, rows).raw == before


def test_unload(worker: WorkerClient, subject: Subject) -> None:
    ref = load(worker, subject)
    assert not isinstance(worker.unload(ref).reply, Err)
    assert worker.unload(ref).code == "model_not_loaded", "a second UNLOAD"
    assert worker.unload("nobody:0").code == "model_not_loaded"
    assert worker.embed(ref, rows_of([3])).code == "model_not_loaded"
    assert worker.ping().models_loaded == 0
    again = load(worker, subject)
    assert again != ref, "refs are never reused"
    assert worker.embed(again, rows_of([3])).floats.shape == (1, subject.dims)


# --- requests that are refused ----------------------------------------------------------------------------------------


def test_unserved_types_are_drained_and_the_connection_lives(
    worker: WorkerClient, engine: EngineUnderTest, subject: Subject
) -> None:
    ref = load(worker, subject)
    requests: list[Request] = [
        Rerank(req_id="1", model_ref=ref, query_n_tokens=2, candidates=[Segment(n_tokens=1)]),
        RerankSequences(req_id="2", model_ref=ref, sequences=[Segment(n_tokens=3)]),
        Generate(req_id="3", model_ref=ref, max_tokens=4),
        AneAdmitShape(req_id="4", model_ref=ref, shape=128),
        AneEvictShape(req_id="5", model_ref=ref, shape=128),
        AneAdmitPacked(req_id="6", model_ref=ref, width=256),
        AneEvictPacked(req_id="7", model_ref=ref, width=256),
    ]
    for request in requests:
        if type(request) in engine.serves:
            continue
        raw = ids_bytes([[5, 6, 7]]) if type(request).payload else None
        assert worker.call(request, raw).code == "unsupported_request", request
        worker.ping()
    # A frame that would parse as JSON must not be taken for the next request.
    if RerankSequences not in engine.serves:
        trap = b'{"type":"SHUTDOWN"} '
        request = RerankSequences(req_id="t", model_ref=ref, sequences=[Segment(n_tokens=len(trap) // 4)])
        assert worker.call(request, trap).code == "unsupported_request"
        worker.ping()


def test_bad_batches_are_typed_and_the_same_process_answers_the_next(worker: WorkerClient, subject: Subject) -> None:
    ref = load(worker, subject)
    good = rows_of([1, 7, 3])
    expected = worker.embed(ref, good).raw

    def bad(name: str, *args: object, code: str = "invalid_request", **keywords: object) -> None:
        answer = worker.embed(ref, *args, **keywords)  # type: ignore[arg-type]
        assert answer.code == code, f"{name}: {answer.reply}"
        assert worker.embed(ref, good).raw == expected, f"after {name}"
        assert worker.process.poll() is None

    bad("an empty batch", [])
    bad("an empty item", [[LOW_ID], []])
    bad("a count too high", [[LOW_ID, LOW_ID]], counts=[3])
    bad("a count too low", [[LOW_ID, LOW_ID]], counts=[1])
    bad("counts beyond u32 together", [[LOW_ID]], counts=[2**32 - 1] * 3)
    bad("no ids at all", [[LOW_ID]], raw=b"")
    bad("half an id", [[LOW_ID]], raw=b"\0\0")
    bad("a negative id", [[LOW_ID, -1]])
    bad("an id beyond the vocabulary", [[VOCABULARY]])
    bad("the greatest id", [[2**31 - 1]])
    bad("a row too long", [[LOW_ID] * (subject.max_tokens + 1)])
    bad("too many items", [[LOW_ID]] * 257)
    unknown = worker.embed("nobody:7", good)
    assert unknown.code == "model_not_loaded"
    assert worker.embed(ref, good).raw == expected


def test_an_embedder_does_not_rerank(worker: WorkerClient, engine: EngineUnderTest, subject: Subject) -> None:
    ref = load(worker, subject)
    if Rerank in engine.serves:
        assert worker.rerank(ref, [5, 6], [[7], [8, 9]]).code == "operation_mismatch"
    else:
        request = RerankSequences(req_id="x", model_ref=ref, sequences=[Segment(n_tokens=2)])
        assert worker.call(request, ids_bytes([[5, 6]])).code == "operation_mismatch"
    worker.ping()


def test_a_reply_that_would_not_fit_is_refused(start: Start, subject: Subject) -> None:
    client = start(max_frame=16 * 1024)
    ref = load(client, subject)
    fits = 16 * 1024 // (4 * subject.dims)
    if fits >= 256:
        pytest.skip("256 rows fit the smallest frame that carries a request")
    assert client.embed(ref, [[5]] * (fits + 1)).code == "invalid_request"
    assert client.embed(ref, [[5]] * min(fits, 8)).floats.shape[1] == subject.dims


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_vectors(worker: WorkerClient, subject: Subject) -> None:
    ref = load(worker, subject)
    top = subject.max_tokens
    rows = rows_of([1, top, 2, 3, top // 2, 1, top - 1, 17 % top + 1] * 4, seed=1)
    rows[5] = [LOW_ID] * (top // 2)  # repeated tokens
    together = worker.embed(ref, rows)
    assert together.floats.shape == (len(rows), subject.dims)
    assert np.isfinite(together.floats).all()
    assert np.abs(np.linalg.norm(together.floats, axis=1) - 1).max() < 1e-3
    assert worker.embed(ref, rows).raw == together.raw, "a repeat is byte-identical"
    alone = np.concatenate([worker.embed(ref, [row]).floats for row in rows])
    assert _cosine(together.floats, alone).min() >= 0.99999
    order = np.random.default_rng(0).permutation(len(rows))
    shuffled = worker.embed(ref, [rows[n] for n in order]).floats
    assert _cosine(shuffled, together.floats[order]).min() >= 0.99999
    for n, m in itertools.combinations(range(len(rows)), 2):
        apart = np.abs(together.floats[n] - together.floats[m]).max()
        assert (apart < 1e-3) == (rows[n] == rows[m]), f"rows {n} and {m}: different rows have different vectors"


def test_rerank(engine: EngineUnderTest, start: Start, tmp_path: Path) -> None:
    of = engine.toy(tmp_path, cross_encoder=True)
    client = start(of)
    ref = load(client, of)
    rows = rows_of([3, 9, 1, 20, 9, 2])

    def score(documents: list[list[int]]) -> np.ndarray:
        if Rerank in engine.serves:
            return client.rerank(ref, [5, 6], documents).floats
        request = RerankSequences(
            req_id=client.next_id(), model_ref=ref, sequences=[Segment(n_tokens=len(row)) for row in documents]
        )
        return client.call(request, ids_bytes(documents)).floats

    scores = score(rows)
    assert scores.shape == (6,) and np.isfinite(scores).all() and np.ptp(scores) > 0.01
    assert score(rows).tobytes() == scores.tobytes()
    assert np.abs(score(rows[::-1])[::-1] - scores).max() < 0.02
    assert client.embed(ref, rows).code == "operation_mismatch"


def _cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    x, y = a.astype(np.float64), b.astype(np.float64)
    return (x * y).sum(axis=1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)


# --- progress and the GIL ---------------------------------------------------------------------------------------------


def test_progress_of_a_long_call(start: Start, long_subject: Subject) -> None:
    """The client checks ids, phases, the rising counter and that nothing stands between header and payload."""
    client = start(long_subject)
    ref = load(client, long_subject)
    answer = client.embed(ref, rows_of([long_subject.max_tokens] * 256))
    assert answer.floats.shape == (256, long_subject.dims)
    assert answer.progress, "a call of this length reports finished work"
    assert answer.progress[-1].phase is Phase.INFERENCE
    client.socket.settimeout(0.3)
    with pytest.raises(TimeoutError):
        client.read_frame()  # nothing after the terminal reply, and nothing from a timer while idle
    client.socket.settimeout(30)
    client.ping()


def test_progress_of_load_is_setup(start: Start, long_subject: Subject) -> None:
    client = start(long_subject)
    answer = client.load(long_subject.path, long_subject.digest, long_subject.format, **long_subject.config)
    require_loaded(answer)
    assert all(frame.phase is Phase.SETUP for frame in answer.progress)


def test_a_long_call_releases_the_gil(engine: EngineUnderTest, long_subject: Subject) -> None:
    task = {
        "factory": engine.factory,
        "device": engine.device,
        "manifest": None if long_subject.manifest is None else str(long_subject.manifest),
        "path": str(long_subject.path),
        "digest": long_subject.digest,
        "format": long_subject.format,
        "config": long_subject.config,
        "rows": 256,
        "length": long_subject.max_tokens,
        "vocab": VOCABULARY,
    }
    script = Path(__file__).with_name("gil_probe.py")
    child = subprocess.run(
        [sys.executable, str(script), json.dumps(task)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    seen = json.loads(child.stdout)
    assert seen["call_s"] > 0.1, f"not a long call: {seen}"
    assert seen["ticks"] >= 20, seen
    assert seen["longest_gap_s"] < seen["call_s"] / 2, seen


# --- alone ------------------------------------------------------------------------------------------------------------


def test_version_and_usage(engine: EngineUnderTest, subject: Subject) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", engine.module, *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)

    version = run("--version", *arguments_of(engine, subject))
    assert version.returncode == 0 and version.stdout.count("\n") == 1 and engine.hello_name in version.stdout
    usage = run()
    assert (usage.returncode, usage.stdout) == (2, "") and "Traceback" not in usage.stderr
    probe = run("--probe-floor", "--device", engine.device, *arguments_of(engine, subject))
    document = json.loads(probe.stdout)
    assert set(document) == {"status", "code", "required", "observed"}
    assert probe.returncode == (0 if document["status"] == "ok" else 2)
