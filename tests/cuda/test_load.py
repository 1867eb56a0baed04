"""LOAD: order and codes of llama-cuda.md 6.2 and 8.2 that the conformance suite doesn't ask for; identity, settings."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engines.bundle import manifest
from engines.bundle.manifest import Bundle
from engines.checkpoint import safetensors
from engines.cuda import binding
from engines.cuda import engine as engine_module
from engines.cuda.engine import CudaEngine, kernel_revision, runtime_version, source_revision
from engines.cuda.model import OwnedModel
from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import EmbedBatch, Err, Load, RerankSequences
from engines.runtime.artifact import ArtifactFile
from engines.runtime.engine import Probe, WorkerOptions
from engines.runtime.progress import ProgressReporter, silent
from tests.cuda.conftest import Bundles
from tests.support.owned_bundle import load_request, repackaged
from tests.support.worker_client import module_worker

REFUSED = Probe("refused", "cuda_no_driver", {}, None)


def engine_for(bundle: Bundle | None, device: str = "cpu") -> CudaEngine:
    path = bundle.root / manifest.FILE_NAME if bundle is not None else None
    return CudaEngine(WorkerOptions(device=device, manifest=path))


def refused(engine: CudaEngine, request: Load, code: ErrorCode, words: str) -> None:
    with pytest.raises(EngineError, match=words) as caught:
        engine.load(request, progress=silent())
    assert caught.value.code is code, caught.value


@pytest.mark.parametrize(
    ("config", "code", "words"),
    [
        ({"profile": "other.owned-cuda"}, ErrorCode.MODEL_UNSUPPORTED, "model_unsupported"),
        ({"operation": "rerank"}, ErrorCode.OPERATION_MISMATCH, "task is embed"),
        ({"backend": "cuda"}, ErrorCode.BACKEND_MISSING, "backend_unavailable"),
        ({"threads": "0"}, ErrorCode.CONFIG_INVALID, "threads"),
        ({"threads": "1025"}, ErrorCode.CONFIG_INVALID, "threads"),
        ({"cuda_graphs": "yes"}, ErrorCode.CONFIG_INVALID, "cuda_graphs"),
        ({"warm": "2"}, ErrorCode.CONFIG_INVALID, "warm"),
        ({"precision": "f16"}, ErrorCode.CONFIG_INVALID, "SYNAPSE_CUDA_PRECISION"),
        ({"gpu_mem_limit_mb": "-1"}, ErrorCode.CONFIG_INVALID, "gpu_mem_limit_mb"),
        ({"call_tokens": "1.5"}, ErrorCode.CONFIG_INVALID, "call_tokens"),
    ],
)
def test_codes(bundles: Bundles, config: dict[str, str], code: ErrorCode, words: str) -> None:
    bundle = bundles("bert-mean")
    refused(engine_for(bundle), load_request(bundle, **config), code, words)


def test_optional_keys_that_agree_and_unknown_ones_are_fine(bundles: Bundles) -> None:
    bundle = bundles("bert-mean")
    config = {"profile": "toy.owned-cuda", "operation": "embed", "backend": "cpu", "precision": "f32", "shiny": "yes"}
    config |= {"cuda_graphs": "false", "warm": "0"}
    model = engine_for(bundle).load(load_request(bundle, threads="1", **config), progress=silent())
    assert isinstance(model, OwnedModel) and model.dims == 64
    model.close()
    model.close()  # idempotent


def test_a_missing_or_broken_manifest_is_refused_at_load(bundles: Bundles, tmp_path: Path) -> None:
    request = load_request(bundles("bert-mean"))
    refused(engine_for(None), request, ErrorCode.ARTIFACT_INVALID, "without --manifest")
    (tmp_path / manifest.FILE_NAME).write_text('{"manifest_version": 1, "manifest_version": 1}')
    broken = CudaEngine(WorkerOptions(device="cpu", manifest=tmp_path / manifest.FILE_NAME))
    assert broken.identity().manifest_digest is None
    refused(broken, request, ErrorCode.ARTIFACT_INVALID, "twice")


def test_a_generator_is_not_served(bundles: Bundles) -> None:
    bundle = bundles("qwen3-last", task="generate", pooling=None, normalize=None)
    refused(engine_for(bundle), load_request(bundle), ErrorCode.MODEL_UNSUPPORTED, "not served here")


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("bert-mean", {"dims": 32}, "dims 32, the checkpoint has 64"),
        ("bert-mean", {"special_ids": {"pad": 128}}, "pad id 128 is not in the vocabulary"),
        ("bert-rerank", {"special_ids": {"pad": 0}}, r"token_types needs special_ids\.sep"),
    ],
)
def test_a_manifest_that_its_package_contradicts(
    name: str, fields: dict[str, Any], words: str, bundles: Bundles
) -> None:
    bundle = bundles(name, **fields)
    refused(engine_for(bundle), load_request(bundle), ErrorCode.ARTIFACT_INVALID, words)


def test_hardware_comes_before_the_artifact(bundles: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that doesn't exist and a digest of nothing: the floor still speaks first, and no runtime is touched."""
    bundle = bundles("bert-mean")
    engine = engine_for(bundle, "cuda")
    monkeypatch.setattr(engine, "probe_floor", lambda: REFUSED)
    monkeypatch.setattr("engines.cuda.binding.session", lambda *a, **k: pytest.fail("a session was made"))
    request = msgspec.structs.replace(load_request(bundle), artifact_path="/nowhere/at.all", artifact_digest="1" * 64)
    refused(engine, request, ErrorCode.BACKEND_MISSING, "^backend_missing: cuda_no_driver: ")
    empty = msgspec.structs.replace(request, artifact_path="")
    refused(engine, empty, ErrorCode.ARTIFACT_INVALID, "artifact_path is empty")
    rerank = msgspec.structs.replace(request, runtime_config={"operation": "rerank"})
    refused(engine, rerank, ErrorCode.OPERATION_MISMATCH, "task is embed")
    refused(engine_for(bundle, "metal"), request, ErrorCode.BACKEND_MISSING, "no metal")


@pytest.mark.process
@pytest.mark.skipif(bool(binding.driver_facts(0).driver_api), reason="this machine has a driver")
def test_a_machine_without_a_driver(bundles: Bundles) -> None:
    """HELLO and PING work, LOAD is a typed refusal."""
    bundle = bundles("bert-mean")
    arguments, entry = ["--manifest", str(bundle.root / manifest.FILE_NAME)], bundle.artifacts("safetensors-package")[0]
    with module_worker("engines.cuda", device="cuda", arguments=arguments) as client:
        assert str(client.hello.kernel_revision).endswith("/cuda/f16")
        reply = client.load(bundle.path(entry.path), entry.digest, entry.format).reply
        assert isinstance(reply, Err) and reply.code == "backend_missing" and reply.msg.startswith("cuda_no_driver: ")
        assert client.ping().models_loaded == 0
        assert client.shutdown() == 0


# --- packages --------------------------------------------------------------------------------------------------------

Tensors = dict[str, np.ndarray]
OUTPUT = "encoder.layer.0.output.dense.weight"


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (lambda t: t.pop("classifier.bias"), ErrorCode.ARTIFACT_INVALID, "head_tensor_missing: .*classifier.*missing"),
        (
            lambda t: t.update({"classifier.weight": np.zeros((2, 64), np.float32)}), ErrorCode.ARTIFACT_INVALID,
            r"head_tensor_missing: .*has shape \[2, 64\]",
        ),
        (
            lambda t: t[OUTPUT].fill(np.nan), ErrorCode.ARTIFACT_INVALID,
            f"NaN or infinity; its weights are damaged: {OUTPUT}",
        ),
        (
            lambda t: t[OUTPUT].fill(3e38), ErrorCode.NONFINITE_OUTPUT,
            "though every weight is finite: a value leaves float32",
        ),
    ],
)  # fmt: skip
def test_a_package_that_cannot_be_served(
    change: Callable[[Tensors], object], code: ErrorCode, words: str, bundles: Bundles, tmp_path: Path
) -> None:
    bundle = repackaged(bundles("bert-rerank"), tmp_path, change)
    refused(engine_for(bundle), load_request(bundle), code, words)


def test_another_models_package_is_refused(bundles: Bundles, tmp_path: Path) -> None:
    bundle = repackaged(bundles("bert-rerank"), tmp_path, lambda t: None, profile="other.owned-cuda")
    words = "the package is 'other.owned-cuda'"
    refused(engine_for(bundle), load_request(bundle), ErrorCode.PACKAGE_DIGEST_MISMATCH, words)


def test_a_flipped_bit_is_refused_before_a_weight_is_read(
    bundles: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = repackaged(bundles("bert-rerank"), tmp_path, lambda t: None)
    with bundle.path("model.safetensors").open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"\x01")
    monkeypatch.setattr(
        safetensors.MappedTensors, "__getitem__", lambda *a: pytest.fail("a weight was read before it was hashed")
    )
    refused(engine_for(bundle), load_request(bundle), ErrorCode.ARTIFACT_INVALID, "digest mismatch")


def test_a_package_that_is_written_to_after_it_was_hashed_is_refused(
    bundles: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = repackaged(bundles("bert-rerank"), tmp_path, lambda t: None)

    def verify(file: ArtifactFile, digest: str, progress: ProgressReporter) -> None:
        honest(file, digest, progress)
        with bundle.path("model.safetensors").open("r+b") as other:
            other.seek(-4, os.SEEK_END)
            other.write(bytes(4))

    honest = ArtifactFile.verify
    monkeypatch.setattr(ArtifactFile, "verify", verify)
    refused(engine_for(bundle), load_request(bundle), ErrorCode.ARTIFACT_INVALID, "written to while it was loaded")


# --- identity --------------------------------------------------------------------------------------------------------


def test_identity_says_what_runs(bundles: Bundles) -> None:
    bundle = bundles("bert-mean")
    cpu, gpu = engine_for(bundle).identity(), engine_for(bundle, "cuda:1").identity()
    assert cpu.engine == gpu.engine == "owned-cuda"
    assert cpu.manifest_digest == gpu.manifest_digest == bundle.digest
    assert cpu.build_flags["device"] == "cpu" and cpu.build_flags["hardware_floor"] == "skipped"
    assert gpu.build_flags["device"] == "cuda:1" and "hardware_floor" not in gpu.build_flags
    assert gpu.build_flags["minimum_device_cc"] == "7.5" and gpu.build_flags["minimum_cuda_driver_api"] == "13000"
    assert (cpu.build_flags["dtype"], gpu.build_flags["dtype"]) == ("f32", "f16")
    assert CudaEngine.serves == {EmbedBatch, RerankSequences}


@pytest.mark.parametrize("source", ["options.py", "graphs/bert.py", "graphs/builder.py", "graphs/families.py"])
def test_revision_follows_every_source_of_numbers(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path(engine_module.__file__).parent
    shutil.copytree(here, tmp_path / "cuda", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(engine_module, "__file__", str(tmp_path / "cuda/engine.py"))
    before = source_revision()
    assert len(before) == 12
    with (tmp_path / "cuda" / source).open("a") as file:
        file.write("\n")
    assert source_revision() != before


def test_kernel_revision_names_the_numerics() -> None:
    revision = kernel_revision("1.31.1", "cuda:0", "f16", (9, 0))
    assert revision == f"graph-{source_revision()}/onnxruntime-1.31.1/cuda-sm_90/f16"
    assert kernel_revision("1.31.1", "cuda:3", "f16", (9, 0)) == revision
    others = {
        kernel_revision("1.31.1", "cpu", "f16"),
        kernel_revision("1.32.0", "cuda", "f16", (9, 0)),
        kernel_revision("1.31.1", "cuda", "f32", (9, 0)),
        kernel_revision("1.31.1", "cuda", "f16", (8, 9)),  # other kernels
        kernel_revision("1.31.1", "cuda", "f16"),
    }
    assert len(others | {revision}) == 6


def test_runtime_version_is_the_installed_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import onnxruntime

    assert runtime_version() == onnxruntime.__version__
    monkeypatch.setattr(sys, "path", [str(tmp_path), "/nowhere"])
    assert runtime_version() == "missing"


def test_precision_is_chosen_before_hello(monkeypatch: pytest.MonkeyPatch, bundles: Bundles) -> None:
    monkeypatch.setenv(engine_module.PRECISION_VARIABLE, "f32")
    oracle = engine_for(bundles("bert-mean"), "cuda")
    assert oracle.precision == "f32" and str(oracle.identity().kernel_revision).endswith("/cuda/f32")
    monkeypatch.setenv(engine_module.PRECISION_VARIABLE, "bf16")
    with pytest.raises(SystemExit):
        engine_for(bundles("bert-mean"), "cuda")
    monkeypatch.setenv(engine_module.PRECISION_VARIABLE, "f16")
    with pytest.raises(SystemExit):  # the CPU's graphs are float32: HELLO must not say otherwise
        engine_for(bundles("bert-mean"), "cpu")
