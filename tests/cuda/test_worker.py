"""The worker as a process: the CPU lane over a real socket, and the CUDA lane on a machine without a driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from engines.bundle import manifest
from engines.bundle.manifest import Bundle
from engines.cuda import binding
from engines.protocol.messages import (
    AneAdmitShape,
    Err,
    Generate,
    Phase,
    Pooling,
    RerankSequences,
    Scores,
    Segment,
    Vectors,
)
from tests.cuda.conftest import Bundles, case, cosines
from tests.support.worker_client import WorkerClient, ids_bytes, module_worker, require_loaded

pytestmark = pytest.mark.process

Start = Callable[..., WorkerClient]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start workers for a bundle; all are closed after the test."""
    stack: list[WorkerClient] = []
    contexts = []

    def run(bundle: Bundle, device: str = "cpu") -> WorkerClient:
        context = module_worker(
            "engines.cuda", device=device, arguments=["--manifest", str(bundle.root / manifest.FILE_NAME)]
        )
        contexts.append(context)
        stack.append(context.__enter__())
        return stack[-1]

    yield run
    for context in contexts:
        context.__exit__(None, None, None)


def load(client: WorkerClient, bundle: Bundle, **config: object):  # type: ignore[no-untyped-def]
    entry = bundle.artifacts("safetensors-package")[0]
    return client.load(bundle.path(entry.path), entry.digest, entry.format, **config)


def rerank_sequences(client: WorkerClient, ref: str, rows: list[list[int]]):  # type: ignore[no-untyped-def]
    request = RerankSequences(
        req_id=client.next_id(), model_ref=ref, sequences=[Segment(n_tokens=len(row)) for row in rows]
    )
    return client.call(request, ids_bytes(rows))


def test_cpu_lane_embeds(start: Start, bundles: Bundles, goldens: dict[str, np.ndarray]) -> None:
    bundle = bundles("bert-mean")
    client = start(bundle)
    hello = client.hello
    assert hello.engine.engine == "owned-cuda" and hello.manifest_digest == bundle.digest
    assert isinstance(hello.engine.build_flags, dict)
    assert hello.engine.build_flags["device"] == "cpu" and hello.engine.build_flags["hardware_floor"] == "skipped"
    assert str(hello.kernel_revision).endswith("/cpu/f32")
    loaded = require_loaded(load(client, bundle, threads=2))
    assert (loaded.model_ref, loaded.dims) == ("owned-cuda:0", 64)
    exchange = client.embed(loaded.model_ref, case("bert-mean").rows())
    assert cosines(exchange.floats, goldens["bert-mean"]).min() >= 0.99999
    switch = [frame for frame in exchange.progress if frame.phase is Phase.INFERENCE]
    assert switch, "the switch frame comes before every forward"
    again = client.embed(loaded.model_ref, case("bert-mean").rows())
    assert again.raw == exchange.raw
    assert client.embed(loaded.model_ref, [[5, 6]], pooling=Pooling.CLS).code == "invalid_request"
    assert client.embed(loaded.model_ref, [[5] * 65]).code == "invalid_request"
    assert client.embed(loaded.model_ref, [[128]]).code == "invalid_request"
    assert load(client, bundle).code == "config_invalid"  # one model per owned worker
    assert isinstance(client.embed(loaded.model_ref, [[5, 6]]).reply, Vectors)
    assert client.ping().models_loaded == 1
    assert client.shutdown() == 0 and client.stdout() == ""


def test_cpu_lane_reranks_composed_sequences(start: Start, bundles: Bundles, goldens: dict[str, np.ndarray]) -> None:
    bundle = bundles("bert-rerank")
    client = start(bundle)
    loaded = require_loaded(load(client, bundle))
    assert loaded.dims == 1
    exchange = rerank_sequences(client, loaded.model_ref, case("bert-rerank").rows())
    assert isinstance(exchange.reply, Scores)
    assert np.abs(exchange.floats - goldens["bert-rerank"]).max() <= 1e-4
    assert client.embed(loaded.model_ref, [[2, 5, 3]]).code == "operation_mismatch"


def drained_refusals(client: WorkerClient, ref: str) -> None:
    """Every refused request's raw frame is read, so the next request finds the stream in step."""
    assert client.rerank(ref, [5, 6], [[7], [8, 9]]).code == "unsupported_request"
    generate = Generate(req_id=client.next_id(), model_ref=ref, max_tokens=4)
    assert client.call(generate, ids_bytes([[5, 6, 7]])).code == "unsupported_request"
    shape = AneAdmitShape(req_id=client.next_id(), model_ref=ref, shape=128)
    assert client.call(shape).code == "unsupported_request"
    assert client.ping().models_loaded >= 0


@pytest.mark.skipif(bool(binding.driver_facts(0).driver_api), reason="this machine has a driver")
def test_a_machine_without_a_driver(start: Start, bundles: Bundles) -> None:
    """HELLO and PING work, LOAD is a typed refusal before the artifact is opened, and raw frames are still read."""
    bundle = bundles("bert-mean")
    client = start(bundle, "cuda")
    assert isinstance(client.hello.engine.build_flags, dict) and client.hello.engine.build_flags["device"] == "cuda"
    assert str(client.hello.kernel_revision).endswith("/cuda/f16")
    assert client.ping().models_loaded == 0
    reply = load(client, bundle).reply
    assert isinstance(reply, Err) and reply.code == "backend_missing" and reply.msg.startswith("cuda_no_driver: ")
    entry = bundle.artifacts("safetensors-package")[0]
    missing = client.load("/nowhere/at.all", entry.digest, entry.format)
    assert missing.code == "backend_missing"
    assert client.embed("owned-cuda:0", [[1, 2, 3]]).code == "model_not_loaded"
    drained_refusals(client, "owned-cuda:0")
    assert client.shutdown() == 0
