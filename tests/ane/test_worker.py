"""The whole path over a real socket with real packages, and the production worker where there is no Mac."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

from engines.ane import coreml
from engines.bundle.manifest import Bundle
from engines.protocol.messages import (
    ANE_ENGINE,
    UNSET,
    Admitted,
    AneAdmitPacked,
    AneAdmitShape,
    AneEvictPacked,
    AneEvictShape,
    Evicted,
)
from tests.ane.make_goldens import GOLDENS, rows
from tests.support.ane_bundle import prepared
from tests.support.mil_reference import ENGINE
from tests.support.rows import cosines
from tests.support.worker_client import ROOT, WorkerClient, require_loaded

pytestmark = pytest.mark.process
Bundles = Callable[[str], Bundle]
PRODUCTION = [sys.executable, "-m", "engines.ane"]
REFERENCE = [sys.executable, "-m", "tests.support.ane_worker"]
ON_MAC = sys.platform == "darwin"


def worker(bundle: Bundle, command: list[str]) -> WorkerClient:
    arguments = ["--manifest", str(bundle.root / "manifest.json"), "--packed", "64"]
    return WorkerClient(command, device="ane", arguments=arguments)


def test_admit_embed_evict_over_the_socket(bundles: Bundles) -> None:
    """What the conformance suite, whose workers need no admission, leaves out."""
    bundle = bundles("bert")
    with worker(bundle, REFERENCE) as client:
        hello = client.hello
        assert hello.engine.engine == ENGINE and hello.manifest_digest == bundle.digest
        assert hello.packed is not UNSET and hello.packed.widths == [64] and hello.packed.layout == "tight-v1"
        ref = require_loaded(client.load(*prepared(bundle), "mlmodelc")).model_ref
        assert ref == "ane:0"
        for admit in (
            AneAdmitShape("a", ref, shape=32),
            AneAdmitShape("b", ref, shape=64),
            AneAdmitPacked("c", ref, width=64),
        ):
            reply = client.call(admit).reply
            assert isinstance(reply, Admitted) and reply.inventory.executables[0].layers == [0, 1]
        found = [row.tolist() for row in rows("bert")]
        for width in (UNSET, 64):
            vectors = client.embed(ref, found, packed_width=width).floats
            assert cosines(vectors, np.load(GOLDENS)["bert"]).min() >= 0.999
        pong = client.ping()
        assert pong.placement_share is UNSET, "the evaluator never has a share"
        assert pong.buckets == [16, 32, 64] and pong.rss_mb > 50
        assert pong.ane_resident_shapes == {ref: [16, 32, 64]} and pong.ane_resident_packed == {ref: [64]}
        for evict in (AneEvictShape("d", ref, shape=32), AneEvictPacked("e", ref, width=64)):
            assert isinstance(client.call(evict).reply, Evicted)
        assert client.embed(ref, found[-1:]).code == "shape_not_admitted"
        assert client.embed(ref, found[:1], packed_width=64).code == "shape_not_admitted"
        assert client.ping().ane_resident_shapes == {ref: [16, 64]}
        client.unload(ref)
        assert client.ping().ane_resident_shapes is UNSET


# --- the production worker -------------------------------------------------------------------------------------------


@pytest.mark.skipif(ON_MAC, reason="a Mac's answers are the hardware run's")
def test_without_a_mac_hello_and_ping_work_and_load_is_a_typed_refusal(bundles: Bundles) -> None:
    bundle = bundles("bert")
    with worker(bundle, PRODUCTION) as client:
        assert client.hello.engine.engine == ANE_ENGINE and client.hello.manifest_digest == bundle.digest
        assert client.hello.engine.build_flags is not UNSET and client.hello.engine.build_flags["device"] == "ane"
        assert client.hello.kernel_revision is not UNSET
        assert client.ping().placement_share is UNSET
        (artifact,) = bundle.artifacts("coreml")
        refused = client.load(bundle.path(artifact.path), artifact.digest, format="coreml")
        assert refused.code == "backend_missing" and "os_unsupported" in refused.reply.msg  # type: ignore[attr-defined]
        assert client.load(bundle.path(artifact.path), artifact.digest, format="gguf").code == "artifact_invalid"
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
def test_floor_codes(system: str, version: str, machine: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(coreml, "mac_version", lambda: version)
    monkeypatch.setattr(coreml, "find_spec", lambda name: None)
    assert coreml.floor() == code


def test_no_configuration_reaches_the_evaluator() -> None:
    """Its name and module live under tests/ only."""
    for folder in ("engines", "synapse_host"):
        for file in (ROOT / folder).rglob("*.py"):
            text = file.read_text()
            assert "mil_reference" not in text and "ane_worker" not in text, file
            assert ENGINE not in text, file
    assert ENGINE not in (ROOT / "hw_matrix.yaml").read_text()
