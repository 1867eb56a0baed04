"""What a certificate is bound to, what makes one count, and what a lane without one answers."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engines.bundle import manifest
from engines.bundle.manifest import Bundle
from synapse_host import Host, HostConfig
from synapse_host.certificates import binding, standing, verdict
from synapse_host.certificates import document as documents
from synapse_host.certificates.binding import Identity
from synapse_host.certificates.document import Fault
from synapse_host.certificates.standing import OTHERWISE
from synapse_host.errors import EngineCrashed, LaneRefused, NotCertified
from synapse_host.placement import hardware
from synapse_host.placement.matrix import HardwareMatrix, Worker, load
from synapse_host.placement.probe import Floor
from tests.support.certified import Case, certified, grant, toy
from tests.support.evidence import N, bounds, embed_inputs, evidence
from tests.support.sabotage import rewrite
from tests.support.scripted import command
from tests.support.small_bundle import write_matrix

BOUND = {
    "the engine": "owned-cuda",
    "the engine version": "onnxruntime-1.31.1",
    "the engine's build": "sha256:" + "d" * 64,
    "nvidia-cublas": "13.0.2",
}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"nvidia-cublas": "13.1.0"}, "nvidia-cublas changed 13.0.2 → 13.1.0"),
        ({"nvidia-cublas": None}, "nvidia-cublas changed 13.0.2 → none"),
        ({"nvidia-cudnn-cu13": "9.9"}, "nvidia-cudnn-cu13 changed none → 9.9"),
        # A worker that doesn't say who it is may be any.
        ({"the engine": None, "the engine version": None}, "its worker doesn't say which engine"),
        ({"the engine's build": None}, "the files of the engine's installation can't be found"),
    ],
    ids=["another", "gone", "new", "silent", "no files"],
)
def test_what_voids_a_certificate_is_named(change: dict[str, Any], reason: str) -> None:
    """That each part of the binding voids is shown with every field of a stored document (test_document)."""
    (said,) = binding.void_because(BOUND, {**BOUND, **change})
    assert reason in said


def test_a_gpu_is_bound_to_its_exact_driver_and_model() -> None:
    """One driver API covers many drivers, one compute capability many devices."""
    matrix, answer = load(), {"driver_api": 13000, "compute_capability": {"major": 9, "minor": 0}}
    floor = Floor("ok", "ok", observed=answer)
    plain = dataclasses.replace(hardware.detect(), floors={"cuda:cuda": floor}, nvidia_driver=None, nvidia_models=())
    full = dataclasses.replace(plain, nvidia_driver="580.159.03", nvidia_models=("NVIDIA H200",))

    def facts(id: str, profile: hardware.HostProfile) -> tuple[str | None, str | None]:
        found = binding.machine_facts(matrix.engines[id], profile)
        return found.driver, found.accelerator

    assert facts("cuda", plain) == ("cuda 13000", "compute capability 9.0")
    assert facts("cuda", full) == ("cuda 13000, 580.159.03", "NVIDIA H200, compute capability 9.0")
    assert facts("onnx-cpu", full) == (None, None)


def test_a_version_line_is_read() -> None:
    line = (
        "synapse-worker-cuda 0.3.0 protocol=3 engine=owned-cuda engine_version=onnxruntime-1.31.1 kernel_revision=g/1"
    )
    assert binding.identity_of(line) == Identity("owned-cuda", "onnxruntime-1.31.1", "g/1")
    assert binding.identity_of("rubbish") == Identity()


# --- facts of this machine -------------------------------------------------------------------------------------------


def test_an_environment_is_bound_by_name_and_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = msgspec.structs.replace(load().engines["llama-cpu"], env={"TOKEN": "s3cret"})
    before = binding.environment_of(engine)
    assert "TOKEN" in before and "s3cret" not in str(before)
    assert not {"PATH", "HOME", "SYNAPSE_WORKER_ID"} & set(before)
    monkeypatch.setenv("GGML_NO_AVX", "1")
    now = binding.environment_of(engine)
    assert set(now) == {*before, "GGML_NO_AVX"}
    monkeypatch.setenv("GGML_NO_AVX", "0")
    assert binding.environment_of(engine)["GGML_NO_AVX"] != now["GGML_NO_AVX"]


def test_a_build_follows_its_files_and_not_only_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library built anew under the same version, one of our sources changed, a distribution without a file list."""
    site = tmp_path / "site"
    library = site / "llama_cpp" / "lib" / "libggml.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"built with OpenBLAS 0.3.20")
    metadata = site / "llama_cpp_python-0.3.36.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: llama-cpp-python\nVersion: 0.3.36\n")
    (metadata / "RECORD").write_text("llama_cpp/lib/libggml.so,,\n")
    sources = tmp_path / "root" / "engines" / "llama"
    sources.mkdir(parents=True)
    (sources / "inputs.py").write_text("POOLING = 'builtin'\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(binding.interpreter, "package_root", lambda: tmp_path / "root")
    matrix = load()

    def build(id: str = "llama-cpu") -> str | None:
        return binding.build_id(matrix.engines[id], matrix)

    first = build()
    assert first is not None and first == build()
    assert build("onnx-cpu") != first, "the other engine's files"
    stat = library.stat()
    library.write_bytes(b"built with OpenBLAS 0.3.31")  # the same size, and the times put back
    os.utime(library, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    second = build()
    assert second not in (None, first)
    (sources / "inputs.py").write_text("POOLING = 'own'\n")
    assert build() not in (None, first, second)
    (metadata / "RECORD").unlink()
    assert build() is None


def test_a_foreign_command_is_bound_to_the_files_it_names(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text("1")
    path = write_matrix(tmp_path)
    matrix = load(path)
    engine = msgspec.structs.replace(
        matrix.engines["scripted"], worker=Worker(command=(sys.executable, "worker.py", "--fast"))
    )

    def build(*words: str) -> str | None:
        bent = msgspec.structs.replace(engine, worker=Worker(command=words)) if words else engine
        return binding.build_id(bent, matrix)

    first = build()
    assert first is not None and first == build() and build("nowhere-at-all") is None
    assert build(sys.executable, "worker.py") != first
    (tmp_path / "worker.py").write_text("2")
    assert build() != first


# --- one document, one truth -----------------------------------------------------------------------------------------


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return certified(tmp_path)


@pytest.mark.parametrize("changed", [False, True])
def test_the_list_names_each_and_what_this_matrix_no_longer_configures(changed: bool, case: Case) -> None:
    matrix, identities = by_another_matrix(case) if changed else case.matrix, {"scripted": case.identity}
    bundles = {"mine": case.bundle}
    (found,) = standing.listed(matrix, bundles, case.profile, data_dir=case.data, identities=identities)
    assert case.path.parent == case.data / "synapse" / "certificates" / "scripted"
    assert (found.lane, found.engine, found.model) == ("embed", "scripted", "mine")
    assert found.certificate.evidence is not None and found.certificate.evidence.gates == case.evidence.gates
    assert found.certificate.why == ((OTHERWISE,) if changed else ()) and (found.fix is None) == changed


BAD = embed_inputs(cosine=[0.9, *[0.99999] * (N - 1)])


def relabelled(case: Case) -> None:
    """Call a Neural Engine's run one of the CPU, and leave out where it ran."""

    def change(plain: dict[str, Any]) -> None:
        plain["engine"].update(device="cpu", build_flags={"device": "cpu"})
        plain.update(placement_required=False, placement=None)
        plain["gates"] = [gate for gate in plain["gates"] if gate["group"] != "placement"]
        plain["thresholds"] = bounds("embed")

    case.edit(change)


def allowed_on_the_cpu(case: Case) -> None:
    def change(plain: dict[str, Any]) -> None:
        plain["placement"]["cpu_allowed"].append("matmul")
        for function in plain["placement"]["functions"]:
            function["operations"]["matmul"] = {"cpu": 1}

    case.edit(change)


def excused(case: Case) -> None:
    """Let every edge length end in oom, as it was 'expected' to."""
    case.edit(lambda plain: [each.update(expected="oom", outcome="oom") for each in plain["limits"]])


def failed_run(case: Case, **thresholds: float) -> None:
    """Put a bad run's document there; with *thresholds* that it passes."""
    limits = {**case.evidence.thresholds, **thresholds}
    run = verdict.judge(msgspec.structs.replace(case.evidence, inputs=BAD, thresholds=limits))
    assert (run.verdict == "certified") == bool(thresholds)
    documents.write(case.path, run)


def of_another_bundle(case: Case) -> None:
    """Copy the certificate of one bundle to where another's would lie."""
    rewrite(case.bundle.root, max_tokens=17)
    case.bundle = manifest.read(case.bundle.root)
    case.path.rename(
        case.path.with_name(case.path.name.replace(case.evidence.model.manifest_digest, case.bundle.digest))
    )


Act = Callable[[Case], Any]


@pytest.mark.parametrize(
    ("act", "word", "on_ane"),
    [
        (relabelled, "engine.device", True),
        (allowed_on_the_cpu, "placement.cpu_allowed", True),
        (excused, "limits.max.expected", False),
        (failed_run, "don't pass: min_cosine", False),
        (lambda case: failed_run(case, min_cosine=0.5, mean_cosine=0.5), "thresholds.min_cosine", False),
        (of_another_bundle, "model.manifest_digest", False),
    ],
)
def test_a_certificate_believed_wrongly(act: Act, word: str, on_ane: bool, tmp_path: Path) -> None:
    """Edits of one field, and what is no document, are in test_document."""
    case = certified(tmp_path, on_ane=on_ane)
    act(case)
    assert word in "; ".join(case.why())


@pytest.mark.parametrize(
    "engine",
    [
        {"runtime_config": {"pooling_implementation": "builtin"}},
        {"env": {"GGML_NO_AVX": "1"}},
        {"worker": Worker(command=("worker",))},
        {"thresholds": {"embed": {"min_cosine": 0.99995}}},
    ],
    ids=["runtime_config", "env", "worker", "thresholds"],
)
def test_what_the_matrix_configures_otherwise_has_no_certificate(engine: dict[str, Any], case: Case) -> None:
    assert case.why(**engine) == (OTHERWISE,)


def test_a_variable_of_the_host_and_a_library_built_anew_void(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_NO_AVX", "1")
    monkeypatch.setattr(binding, "build_id", lambda *a: "sha256:" + "e" * 64)
    assert {why.partition(" changed ")[0] for why in case.why()} == {"the variable GGML_NO_AVX", "the engine's build"}


def by_another_matrix(case: Case) -> HardwareMatrix:
    other = msgspec.structs.replace(case.matrix.engines["scripted"], runtime_config={"pooling": "builtin"})
    return msgspec.structs.replace(case.matrix, engines={"scripted": other})


def settled(case: Case, question: str, **changes: Any) -> Any:
    """Let a run end that asked less, or asked by another matrix, or by one that asks less."""
    easier = {**case.evidence.thresholds, "min_cosine": 0.5}
    match question:
        case "thresholds":
            return case.settle(thresholds=easier, **changes)
        case "matrix":
            return case.settle(by_another_matrix(case), **changes)
        case _:
            matrix = msgspec.structs.replace(case.matrix, thresholds={"embed": {"min_cosine": 0.5}})
            return case.settle(matrix, thresholds=easier, **changes)


BUSY = {"fault": Fault("ane_lane_busy", "another host", "load")}
FAILED = {"verdict": "uncertified"}


@pytest.mark.parametrize("outcome", [{"created": "now"}, FAILED], ids=["passed", "failed"])
@pytest.mark.parametrize("question", ["thresholds", "matrix", "thresholds of the matrix"])
def test_asking_does_not_change_production(question: str, outcome: dict[str, Any], case: Case) -> None:
    before = case.path.read_bytes()
    settled(case, question, **outcome)
    assert case.settle(**FAILED, **BUSY) is None, "a run that never got the device"
    assert case.path.read_bytes() == before and case.why() == ()
    # The same question, failed, withdraws it.
    assert case.settle(**FAILED) is None and not case.path.exists()


def test_threads_that_the_host_divides_are_no_change_and_those_of_the_matrix_are() -> None:
    engine = load().engines["llama-cpu"]
    document = evidence(engine=msgspec.structs.replace(evidence().engine, runtime_config={"threads": "4"}))
    assert "runtime_config.threads" not in binding.recorded(document, engine)
    pinned = msgspec.structs.replace(engine, runtime_config={"threads": "2"})
    assert binding.recorded(document, pinned)["runtime_config.threads"] == "4"


# --- the host asks for one -------------------------------------------------------------------------------------------


def serving(folder: Path, bundle: Bundle, **config: Any) -> Any:
    options = HostConfig(data_dir=folder / "data", runtime_dir=folder / "rt", **config)
    return Host.open(folder / "matrix.yaml", {"toy": bundle.root}, options)


@pytest.mark.process
async def test_a_lane_that_needs_a_certificate(tmp_path: Path) -> None:
    bundle = toy(tmp_path / "toy")
    lanes = {"embed": {"task": "embed", "engines": ["scripted"], "require_certificate": True}}
    matrix = load(write_matrix(tmp_path, lanes=lanes))
    # False in the configuration can't weaken the matrix.
    async with serving(tmp_path, bundle, require_certificate=False) as host:
        with pytest.raises(NotCertified, match="it has none on this machine") as refused:
            await host.embed_ids("toy", [[1, 2]])
        assert refused.value.exit_code == 3
        assert "synapse certify embed --model toy --engine scripted" in refused.value.message
        path = await asyncio.to_thread(grant, matrix, "scripted", bundle, tmp_path / "data")
        path.write_text("{}")
        with pytest.raises(NotCertified, match="no evidence document"):
            await host.embed_ids("toy", [[1, 2]])


@pytest.mark.process
async def test_a_host_opens_on_the_fastest_engine_that_a_valid_certificate_measured(tmp_path: Path) -> None:
    bundle = toy(tmp_path / "toy")
    plain = json.loads(write_matrix(tmp_path).read_text())
    plain["engines"] = {id: {**plain["engines"]["scripted"], "env": {"NAME": id}} for id in ("first", "second")}
    plain["lanes"] = {"embed": {"task": "embed", "engines": ["first", "second"], "choose": "fastest"}}
    (tmp_path / "matrix.yaml").write_text(json.dumps(plain))
    matrix, clean = load(tmp_path / "matrix.yaml"), evidence().performance
    void = Identity("llama.cpp-worker", "scripted-0")
    for engine, seconds, identity, chosen in (
        ("", 0.0, None, "first"),
        ("second", 9.0, None, "second"),  # the only one that was measured
        ("first", 10.0, None, "second"),
        ("second", 11.0, None, "first"),
        ("first", 1.0, void, "second"),
    ):
        if engine:
            took = msgspec.structs.replace(clean, batch_s=seconds)
            grant(matrix, engine, bundle, tmp_path / "data", performance=took, identity=identity)
        async with serving(tmp_path, bundle) as host:
            assert host.assignments["embed"].placement.engine == chosen


@pytest.mark.process
async def test_an_upgrade_under_a_running_host_voids_and_certifying_again_helps_at_once(tmp_path: Path) -> None:
    """A worker that runs is what was certified; its successor is looked at anew, by a host that was never restarted."""
    bundle = toy(tmp_path / "toy", formats={"safetensors-package": "f32"})
    data, script = tmp_path / "data", tmp_path / "script.json"

    def install(version: str) -> None:
        crash = {"on": "EMBED_BATCH", "first_id": 9, "do": [{"exit": 3}]}
        facts = {"engine": "owned-cuda", "version": version, "kernel_revision": f"graph-{version}"}
        script.write_text(json.dumps({**facts, "rules": [crash]}))

    install("1")
    worker = {"command": [*command({})[:-1], str(script)]}
    matrix = load(write_matrix(tmp_path, engine="cuda", worker=worker))
    async with serving(tmp_path, bundle, require_certificate=True) as host:
        with pytest.raises(NotCertified):
            await host.embed_ids("toy", [[1, 2]])
        assert host.health()["lanes"]["embed"]["strikes"] == 0
        await asyncio.to_thread(grant, matrix, "scripted", bundle, data)
        assert (await host.embed_ids("toy", [[1, 2]])).shape == (1, 8)
        install("2")
        assert (await host.embed_ids("toy", [[1, 2]])).shape == (1, 8), "its worker is the one that was certified"
        with pytest.raises(EngineCrashed):
            await host.embed_ids("toy", [[9, 2]])
        with pytest.raises(NotCertified, match="engine version changed 1 → 2"):
            await host.embed_ids("toy", [[1, 2]])
        await asyncio.to_thread(grant, matrix, "scripted", bundle, data)
        assert (await host.embed_ids("toy", [[1, 2]])).shape == (1, 8)


@pytest.mark.process
async def test_a_neural_engine_lane_asks_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker is brought up for a function of the model, not by the request itself."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # the lock of the one host that drives it
    case = certified(tmp_path, on_ane=True)
    rewrite(case.bundle.root, artifacts=[msgspec.structs.replace(case.bundle.artifacts("coreml")[0], layers=2)])
    bundle, data = manifest.read(case.bundle.root), tmp_path / "data"
    matrix = load(write_matrix(tmp_path, {"buckets": [16]}, engine="ane"))

    async with serving(tmp_path, bundle, require_certificate=True) as host:
        for _ in range(2):
            with pytest.raises(NotCertified):
                await host.embed_ids("toy", [[1, 2]])
        await asyncio.to_thread(grant, matrix, "scripted", bundle, data, ane=True)
        assert (await host.embed_ids("toy", [[1, 2]])).shape == (1, 8)


@pytest.mark.process
async def test_the_certified_kernel_revision_is_pinned_at_the_handshake(tmp_path: Path) -> None:
    bundle = toy(tmp_path / "toy", formats={"safetensors-package": "f32"})
    # --version doesn't come true: only what HELLO says counts then.
    state = tmp_path / "spawns"
    script = {"kernel_revision": "r1", "state": str(state), "generations": [{}, {"kernel_revision": "r2"}]}
    matrix = load(write_matrix(tmp_path, script, engine="cuda"))
    identity = Identity("owned-cuda", "scripted-1", "r1")
    grant(matrix, "scripted", bundle, tmp_path / "data", identity=identity)
    async with serving(tmp_path, bundle, require_certificate=True) as host:
        with pytest.raises(LaneRefused) as refused:
            await host.embed_ids("toy", [[1, 2]])
    assert refused.value.details["reason"] == "kernel_revision"
    assert (refused.value.details["expected"], refused.value.details["observed"]) == ("r1", "r2")
