"""The whole path over a real socket with real packages, and the production worker where there is no Mac."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from engines.bundle.manifest import Bundle
from engines.protocol.messages import (
    ANE_ENGINE,
    UNSET,
    Admitted,
    AneAdmitPacked,
    AneAdmitShape,
    AneEvictPacked,
    AneEvictShape,
    EmbedBatch,
    Evicted,
    Item,
    Phase,
    Pooling,
)
from tests.ane.make_goldens import GOLDENS, rows
from tests.support.ane_bundle import prepared
from tests.support.mil_reference import ENGINE
from tests.support.worker_client import ROOT, Exchange, WorkerClient, ids_bytes, require_loaded

pytestmark = pytest.mark.process
Bundles = Callable[[str], Bundle]
PRODUCTION = [sys.executable, "-m", "engines.ane"]
REFERENCE = [sys.executable, "-m", "tests.support.ane_worker"]
ON_MAC = sys.platform == "darwin"


@contextmanager
def worker(bundle: Bundle, *, command: list[str] = REFERENCE, packed: str | None = "64") -> Iterator[WorkerClient]:
    arguments = ["--manifest", str(bundle.root / "manifest.json"), *(["--packed", packed] if packed else [])]
    with WorkerClient(command, device="ane", arguments=arguments) as client:
        yield client


def load(client: WorkerClient, bundle: Bundle, **config: str) -> str:
    path, digest = prepared(bundle)
    exchange = client.load(path, digest, format="mlmodelc", **config)
    assert all(progress.phase is Phase.SETUP for progress in exchange.progress)
    return require_loaded(exchange).model_ref


def embed(client: WorkerClient, ref: str, found: list[Any], pooling: Pooling, width: int | None = None) -> Exchange:
    request = EmbedBatch(
        req_id=client.next_id(),
        model_ref=ref,
        pooling=pooling,
        normalize=True,
        items=[Item(id=str(n), n_tokens=len(row)) for n, row in enumerate(found)],
        packed_width=UNSET if width is None else width,
    )
    return client.call(request, ids_bytes(found))


def test_load_admit_embed_evict_over_the_socket(bundles: Bundles) -> None:
    bundle = bundles("bert")
    with worker(bundle) as client:
        hello = client.hello
        assert hello.engine.engine == ENGINE and hello.manifest_digest == bundle.digest
        assert hello.packed is not UNSET and hello.packed.widths == [64] and hello.packed.layout == "tight-v1"
        assert client.ping().models_loaded == 0
        ref = load(client, bundle)
        assert ref == "ane:0"
        for shape in (32, 64):
            reply = client.call(AneAdmitShape(req_id=client.next_id(), model_ref=ref, shape=shape)).reply
            assert isinstance(reply, Admitted) and reply.inventory.executables[0].layers == [0, 1]
        reply = client.call(AneAdmitPacked(req_id=client.next_id(), model_ref=ref, width=64)).reply
        assert isinstance(reply, Admitted)
        found, expected = rows("bert"), np.load(GOLDENS)["bert"]
        for width in (None, 64):
            exchange = embed(client, ref, found, Pooling.MEAN, width)
            assert all(progress.phase is Phase.INFERENCE for progress in exchange.progress)
            cosine = (exchange.floats.astype(np.float64) * expected).sum(1)
            assert cosine.min() >= 0.999
        pong = client.ping()
        assert pong.placement_share is UNSET, "the evaluator never has a share"
        assert pong.buckets == [16, 32, 64] and pong.rss_mb > 50
        assert pong.ane_resident_shapes == {ref: [16, 32, 64]} and pong.ane_resident_packed == {ref: [64]}
        assert isinstance(client.call(AneEvictShape(req_id=client.next_id(), model_ref=ref, shape=32)).reply, Evicted)
        assert isinstance(client.call(AneEvictPacked(req_id=client.next_id(), model_ref=ref, width=64)).reply, Evicted)
        assert embed(client, ref, [found[-1]], Pooling.MEAN).code == "shape_not_admitted"
        assert embed(client, ref, [found[0]], Pooling.MEAN, 64).code == "shape_not_admitted"
        assert client.ping().ane_resident_shapes == {ref: [16, 64]}
        client.unload(ref)
        assert client.ping().ane_resident_shapes is UNSET


# --- the production worker -------------------------------------------------------------------------------------------


@pytest.mark.skipif(ON_MAC, reason="a Mac's answers are the hardware run's")
def test_without_a_mac_hello_and_ping_work_and_load_is_a_typed_refusal(bundles: Bundles) -> None:
    bundle = bundles("bert")
    with worker(bundle, command=PRODUCTION) as client:
        assert client.hello.engine.engine == ANE_ENGINE and client.hello.manifest_digest == bundle.digest
        assert client.hello.engine.build_flags is not UNSET and client.hello.engine.build_flags["device"] == "ane"
        assert client.hello.kernel_revision is not UNSET
        assert client.ping().placement_share is UNSET
        (artifact,) = bundle.artifacts("coreml")
        refused = client.load(bundle.path(artifact.path), artifact.digest, format="coreml")
        assert refused.code == "backend_missing" and "os_unsupported" in refused.reply.msg  # type: ignore[attr-defined]
        assert client.load(bundle.path(artifact.path), artifact.digest, format="gguf").code == "artifact_invalid"
        assert client.load(bundle.path(artifact.path), "", format="coreml").code == "artifact_invalid"
        assert client.ping().models_loaded == 0
    run = subprocess.run([*PRODUCTION, "--probe-floor"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 2 and json.loads(run.stdout)["code"] == "os_unsupported"


@pytest.mark.parametrize(
    ("system", "version", "machine", "code"),
    [
        ("Linux", "", "x86_64", "os_unsupported"),
        ("Darwin", "13.6", "arm64", "os_too_old"),
        ("Darwin", "14.3.1", "arm64", "os_too_old"),
        ("Darwin", "14.4", "x86_64", "arch_unsupported"),
        ("Darwin", "15.0", "arm64", "bindings_missing"),
    ],
)
def test_floor_codes(system: str, version: str, machine: str, code: str) -> None:
    if ON_MAC and code == "bindings_missing":
        pytest.skip("they may be installed here")
    from engines.ane.coreml import floor

    assert floor(system, version, machine) == code


def test_no_configuration_reaches_the_evaluator() -> None:
    """Its name and module live under tests/ only."""
    for folder in ("engines", "synapse_host"):
        for file in (ROOT / folder).rglob("*.py"):
            text = file.read_text()
            assert "mil_reference" not in text and "ane_worker" not in text, file
            assert ENGINE not in text, file
    assert ENGINE not in (ROOT / "hw_matrix.yaml").read_text()
