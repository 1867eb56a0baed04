"""What voids a certificate, and what a lane without one answers."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engines.bundle import manifest
from synapse_host import Host, HostConfig, certificates, hardware
from synapse_host.certificates import Binding, Identity
from synapse_host.errors import LaneRefused, NotCertified
from synapse_host.floor import Floor
from synapse_host.matrix import load
from tests.support.evidence import evidence
from tests.support.small_bundle import write_bundle, write_matrix

BOUND = Binding(
    artifact_digest="sha256:" + "a" * 64,
    dtype="f16",
    engine="llama.cpp-worker",
    engine_version="llama-cpp-python-0.3.35",
    kernel_revision="graph-1",
    packages={"llama-cpp-python": "0.3.35"},
    os_build="23F79",
    driver="cuda 13000",
    device="cuda",
    hardware="compute capability 9.0",
)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"artifact_digest": "sha256:" + "b" * 64}, "the artifact changed"),
        ({"packages": {"llama-cpp-python": "0.3.36"}}, "llama-cpp-python changed 0.3.35 → 0.3.36"),
        ({"packages": {}}, "llama-cpp-python changed 0.3.35 → none"),
        ({"engine_version": "2"}, "the engine version changed llama-cpp-python-0.3.35 → 2"),
        ({"kernel_revision": "graph-2"}, "the kernel revision changed graph-1 → graph-2"),
        ({"os_build": "23G93"}, "the operating system build changed 23F79 → 23G93"),
        ({"driver": "cuda 13010"}, "the driver changed cuda 13000 → cuda 13010"),
        ({"driver": None}, "the driver changed cuda 13000 → none"),
        ({"device": "cpu"}, "the device changed cuda → cpu"),
        ({"hardware": "compute capability 8.9"}, "the hardware changed"),
        ({"engine": "owned-cuda"}, "the engine changed"),
        ({"dtype": "f32"}, "the artifact's dtype changed f16 → f32"),
        # A worker that doesn't tell is not compared: it is at the handshake.
        ({"engine_version": None, "kernel_revision": None, "engine": None}, None),
    ],
)
@pytest.mark.report("ollama/ollama#15582")
def test_what_voids_a_certificate_is_named(change: dict[str, Any], reason: str | None) -> None:
    reasons = certificates.void_because(BOUND, msgspec.structs.replace(BOUND, **change))
    if reason is None:
        assert reasons == []
    else:
        assert len(reasons) == 1
        assert reason in reasons[0]


def test_a_gpu_is_bound_to_its_exact_driver_and_model() -> None:
    """One driver API covers many drivers, one compute capability many devices."""
    cuda = load().engines["cuda"]
    answer = Floor("ok", "ok", observed={"driver_api": 13000, "compute_capability": {"major": 9, "minor": 0}})
    plain = dataclasses.replace(hardware.detect(), floors={"cuda:cuda": answer}, nvidia_driver=None, nvidia_models=())
    told = dataclasses.replace(plain, nvidia_driver="580.159.03", nvidia_models=("NVIDIA H200",))
    assert certificates.driver_of(cuda, plain) == "cuda 13000"
    assert certificates.driver_of(cuda, told) == "cuda 13000, 580.159.03"
    assert certificates.accelerator_of(cuda, plain) == "compute capability 9.0"
    assert certificates.accelerator_of(cuda, told) == "NVIDIA H200, compute capability 9.0"
    cpu = load().engines["onnx-cpu"]
    assert certificates.driver_of(cpu, told) is None and certificates.accelerator_of(cpu, told) is None


def test_a_version_line_is_read() -> None:
    line = (
        "synapse-worker-cuda 0.3.0 protocol=3 engine=owned-cuda engine_version=onnxruntime-1.31.1 kernel_revision=g/1"
    )
    assert certificates.identity_of(line) == Identity("owned-cuda", "onnxruntime-1.31.1", "g/1")
    assert certificates.identity_of("rubbish") == Identity()


def test_certificates_are_stored_by_engine_and_manifest(tmp_path: Path) -> None:
    found = certificates.of_evidence(evidence(), path=tmp_path / "e.json", digest="sha256:" + "d" * 64)
    path = certificates.write(found, tmp_path)
    assert path == tmp_path / "synapse" / "certificates" / "llama-cpu" / f"{'b' * 64}.json"
    assert certificates.read(path) == found
    assert list(certificates.stored(tmp_path)) == [(path, found)]
    moved = path.with_name("c" * 64 + ".json")
    path.rename(moved)
    assert certificates.read(moved) is None, "a certificate under another bundle's name is none"
    moved.write_text("{")
    assert list(certificates.stored(tmp_path)) == [(moved, None)]
    for _ in range(2):
        certificates.remove("llama-cpu", "c" * 64, tmp_path)
        assert list(certificates.stored(tmp_path)) == []
    assert list(certificates.stored(tmp_path / "nowhere")) == []


def test_an_int8_certificate_says_approximate(tmp_path: Path) -> None:
    document = evidence("rerank", dtype="int8")
    found = certificates.of_evidence(document, path=tmp_path / "e.json", digest=document.digest)
    assert found.precision == "approximate"


@pytest.mark.parametrize(("share", "why"), [(0.89, "placement_share was 0.89, the matrix asks 0.9"), (0.95, None)])
def test_a_certificate_for_less_than_the_matrix_asks_is_none(share: float, why: str | None, tmp_path: Path) -> None:
    """``--min-placement-share`` below the matrix's, or a matrix that asks more since."""
    document = evidence("embed", ane=True)
    document = msgspec.structs.replace(document, thresholds={**document.thresholds, "placement_share": share})
    found = certificates.of_evidence(document, path=tmp_path / "e.json", digest=document.digest)
    found = msgspec.structs.replace(found, engine_id="ane")
    assert certificates.stricter(found, load()) == ([f"threshold {why}"] if why else [])
    older = msgspec.structs.replace(found, thresholds={})
    assert certificates.stricter(older, load()) == []


# --- the host asks for one -------------------------------------------------------------------------------------------


def grant(tmp_path: Path, bundle: Path, *, engine: str = "llama.cpp-worker", **changes: Any) -> None:
    """Store a certificate for the scripted engine as this machine would have it."""
    opened = manifest.read(bundle)
    profile = hardware.detect()
    artifact = opened.manifest.artifacts[0]
    matrix = load(tmp_path / "matrix.yaml")
    binding = certificates.present(matrix.engines["scripted"], artifact, profile, Identity(engine, "scripted-1", None))
    found = certificates.of_evidence(evidence(), path=tmp_path / "e.json", digest="sha256:" + "d" * 64)
    certificates.write(
        msgspec.structs.replace(
            found,
            engine_id="scripted",
            manifest_digest=opened.digest,
            binding=msgspec.structs.replace(binding, **changes),
        ),
        tmp_path / "data",
    )


def embed(tmp_path: Path, bundle: Path, **config: Any) -> tuple[int, ...]:
    async def main() -> tuple[int, ...]:
        options = HostConfig(data_dir=tmp_path / "data", runtime_dir=tmp_path / "rt", **config)
        async with Host.open(tmp_path / "matrix.yaml", {"toy": bundle}, options) as host:
            return (await host.embed_ids("toy", [[1, 2]])).shape

    return asyncio.run(main())


@pytest.mark.process
@pytest.mark.parametrize("where", ["matrix", "config"])
def test_a_lane_that_needs_a_certificate(where: str, tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "toy")
    lane = {"task": "embed", "engines": ["scripted"], **({"require_certificate": True} if where == "matrix" else {})}
    write_matrix(tmp_path, lanes={"embed": lane})
    # False in the configuration can't weaken the matrix.
    config = {"require_certificate": where == "config"}
    with pytest.raises(NotCertified, match="it has none on this machine") as refused:
        embed(tmp_path, bundle, **config)
    assert refused.value.exit_code == 3
    assert "synapse certify embed --model toy --engine scripted" in refused.value.message
    grant(tmp_path, bundle)
    assert embed(tmp_path, bundle, **config) == (1, 8)
    grant(tmp_path, bundle, os_build="another")
    with pytest.raises(NotCertified, match="operating system build changed another"):
        embed(tmp_path, bundle, **config)
    grant(tmp_path, bundle, engine_version="scripted-0")
    with pytest.raises(NotCertified, match="engine version changed scripted-0 → scripted-1"):
        embed(tmp_path, bundle, **config)
    certificates.path_of("scripted", manifest.read(bundle).digest, tmp_path / "data").write_text("{}")
    with pytest.raises(NotCertified, match="can't be read"):
        embed(tmp_path, bundle, **config)


@pytest.mark.process
def test_without_the_demand_nothing_is_asked(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "toy")
    write_matrix(tmp_path)
    assert embed(tmp_path, bundle) == (1, 8)


@pytest.mark.process
def test_the_certified_kernel_revision_is_pinned_at_the_handshake(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "toy", formats={"safetensors-package": "f32"})
    # --version doesn't come true: only what HELLO says counts then.
    state = tmp_path / "spawns"
    script = {"kernel_revision": "r1", "state": str(state), "generations": [{}, {"kernel_revision": "r2"}]}
    write_matrix(tmp_path, script, engine="cuda")
    grant(tmp_path, bundle, engine="owned-cuda", kernel_revision="r1")
    with pytest.raises(LaneRefused) as refused:
        embed(tmp_path, bundle, require_certificate=True)
    assert refused.value.details["reason"] == "kernel_revision"
    assert (refused.value.details["expected"], refused.value.details["observed"]) == ("r1", "r2")


def test_a_certificate_file_is_plain_json(tmp_path: Path) -> None:
    found = certificates.of_evidence(evidence(), path=tmp_path / "e.json", digest="sha256:" + "d" * 64)
    document = json.loads(certificates.write(found, tmp_path).read_text())
    assert set(document["binding"]) == set(Binding.__struct_fields__)
