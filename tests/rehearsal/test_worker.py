"""The worker process: its floor; LOAD, requests, UNLOAD, a second LOAD and SHUTDOWN; and a device that is lost."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engines.bundle.manifest import FILE_NAME, Bundle
from engines.protocol.messages import Loaded, Message, Pooling, RerankSequences, Segment, Unloaded
from tests.rehearsal import libraries
from tests.rehearsal.conftest import Bundles, Environment, Rehearse, case
from tests.rehearsal.test_path import CAPABILITIES, EMBED, LEFT, RERANK, USUAL
from tests.support.worker_client import Exchange, WorkerClient, ids_bytes, module_worker, require_loaded

pytestmark = pytest.mark.process
QUICK = {("bert-mean", "f16"), ("modernbert-rerank", "f16"), ("qwen3-last", "f32")}
ILLEGAL_ADDRESS = 700


def cells() -> list[Any]:
    return [
        pytest.param(
            name, precision, cc, marks=() if (name, precision) in QUICK and cc == USUAL else (pytest.mark.soak,)
        )
        for cc in CAPABILITIES
        for name in (*EMBED, *RERANK)
        for precision in ("f16", "f32")
    ]


def load(client: WorkerClient, bundle: Bundle) -> Exchange:
    entry = bundle.artifacts("safetensors-package")[0]
    return client.load(bundle.path(entry.path), entry.digest, entry.format)


def ask(client: WorkerClient, name: str, reference: str) -> Exchange:
    rows = case(name).rows()
    if case(name).task == "embed":
        pooling = Pooling("last" if name.startswith("qwen3") else "mean")
        return client.embed(reference, rows, pooling=pooling, normalize=True)
    sequences = [Segment(n_tokens=len(row)) for row in rows]
    request = RerankSequences(req_id=client.next_id(), model_ref=reference, sequences=sequences)
    return client.call(request, ids_bytes(rows))


def worker(bundle: Bundle, env: dict[str, str]) -> Any:
    manifest = str(bundle.root / FILE_NAME)
    return module_worker("engines.cuda", device="cuda", arguments=["--manifest", manifest], env=env)


@pytest.mark.parametrize(("name", "precision", "capability"), cells())
def test_a_workers_life(
    name: str, precision: str, capability: str, bundles: Bundles, environment: Environment, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    env = environment(precision, CUDASHIM_CC=capability, CUDASHIM_REPORT=str(report))
    with worker(bundles(name), env) as client:
        assert str(client.hello.kernel_revision).endswith(f"/cuda-sm_{capability.replace('.', '')}/{precision}")
        for _ in range(2):
            reference = require_loaded(load(client, bundles(name))).model_ref
            first = ask(client, name, reference)
            assert first.floats.shape[0] == len(case(name).rows())
            assert ask(client, name, reference).raw == first.raw
            assert isinstance(client.unload(reference).reply, Unloaded)
        assert isinstance(load(client, bundles(name)).reply, Loaded)  # and SHUTDOWN with a model loaded
        assert client.shutdown() == 0, client.stderr()
        assert client.stdout() == ""
    found = json.loads(report.read_text())
    assert not found["violations"] and found["captures"] == 3 * 16
    assert not any(found[what] for what in LEFT), {what: found[what] for what in LEFT}


@pytest.fixture(scope="module")
def until_loaded(bundles: Bundles, rehearse: Rehearse) -> dict[str, int]:
    """How often each CUDA function is called until LOAD has ended."""
    calls: dict[str, int] = rehearse(bundles("bert-mean"), [])["steps"]["load"]["stats"]["calls"]
    return calls


@pytest.mark.parametrize(
    ("where", "share", "during"),
    [
        ("cudaEventSynchronize", 1.0, "request"),
        ("kernel", 1.0, "request"),
        ("kernel", 0.99, "recording"),  # between two recordings: sessions with recorded launches exist already
        ("kernel", 0.1, "warming"),
        ("cudaStreamSynchronize", 1.0, "unload"),
    ],
)
def test_a_lost_device_is_answered_and_the_process_leaves(
    where: str, share: float, during: str, bundles: Bundles, environment: Environment, until_loaded: dict[str, int]
) -> None:
    """ERR, then exit status 1: no abort of a native destructor in between, and no worker that goes on serving."""
    bundle = bundles("bert-mean")
    skip = int(until_loaded[where] * share)
    env = environment(CUDASHIM_FAULT=f"{where}:{skip}:1:{ILLEGAL_ADDRESS}:1")
    with worker(bundle, env) as client:
        exchange = load(client, bundle)
        if during in ("request", "unload"):
            reference = require_loaded(exchange).model_ref
            exchange = client.unload(reference) if during == "unload" else ask(client, "bert-mean", reference)
        assert exchange.code == "inference_failed", exchange.reply
        assert lost(exchange.reply)
        assert client.process.wait(20) == 1, client.stderr()


def lost(reply: Message) -> bool:
    return str(getattr(reply, "msg", "")).startswith("the CUDA context is lost: ")


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"CUDASHIM_CC": "12.1"}, "ok"),
        ({"CUDASHIM_DRIVER_API": "12080"}, "cuda_driver_too_old"),
        ({"without": "libcublas.so.13"}, "cuda_runtime_missing:libcublas.so.13"),
        ({"without": "libcuda.so.1"}, "cuda_no_driver"),
    ],
)
def test_the_probes_verdict(settings: dict[str, str], code: str, stubs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "libraries"
    shutil.copytree(stubs, folder)
    if (missing := settings.get("without")) is not None:
        (folder / missing).unlink()
    env = libraries.environment(folder, **{key: value for key, value in settings.items() if key != "without"})
    command = [sys.executable, "-m", "engines.cuda", "--probe-floor"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert json.loads(done.stdout)["code"] == code
    assert done.returncode == (0 if code == "ok" else 2)
