"""LOAD: order and codes of llama-cuda.md 6.2 and 8.2, identity, settings."""

from __future__ import annotations

import json
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
from engines.bundle.digest import PREFIX, file_digest
from engines.bundle.manifest import Bundle
from engines.checkpoint import safetensors
from engines.cuda import engine as engine_module
from engines.cuda.engine import CudaEngine, kernel_revision, runtime_version, source_revision
from engines.cuda.model import OwnedModel
from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import MAX_ITEMS, EmbedBatch, Load, PackedCapability, RerankSequences
from engines.runtime.artifact import ArtifactFile
from engines.runtime.engine import Probe, WorkerOptions
from engines.runtime.progress import ProgressReporter, silent
from tests.cuda.conftest import Bundles
from tests.support.owned_bundle import load_request

REFUSED = Probe("refused", "cuda_no_driver", {}, None)


def engine_for(bundle: Bundle | None, device: str = "cpu") -> CudaEngine:
    path = bundle.root / manifest.FILE_NAME if bundle is not None else None
    return CudaEngine(WorkerOptions(device=device, manifest=path))


def refused(engine: CudaEngine, request: Load, code: ErrorCode, words: str) -> None:
    with pytest.raises(EngineError, match=words) as caught:
        engine.load(request, progress=silent())
    assert caught.value.code is code, caught.value


def changed(request: Load, **fields: Any) -> Load:
    return msgspec.structs.replace(request, **fields)


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"artifact_path": ""}, ErrorCode.ARTIFACT_INVALID, "artifact_path"),
        ({"format": ""}, ErrorCode.ARTIFACT_INVALID, "format"),
        ({"format": "gguf"}, ErrorCode.ARTIFACT_INVALID, "safetensors-package only"),
        ({"artifact_digest": ""}, ErrorCode.ARTIFACT_INVALID, "empty"),
        ({"artifact_digest": "sha256:12"}, ErrorCode.ARTIFACT_INVALID, "not a SHA-256"),
        ({"artifact_digest": "0" * 64}, ErrorCode.PACKAGE_DIGEST_MISMATCH, "package_digest_mismatch"),
        ({"artifact_path": "/nowhere/at.all"}, ErrorCode.ARTIFACT_INVALID, "can't open"),
        ({"runtime_config": {"profile": "other.owned-cuda"}}, ErrorCode.MODEL_UNSUPPORTED, "model_unsupported"),
        ({"runtime_config": {"operation": "rerank"}}, ErrorCode.OPERATION_MISMATCH, "task is embed"),
        ({"runtime_config": {"backend": "cuda"}}, ErrorCode.BACKEND_MISSING, "backend_unavailable"),
        ({"runtime_config": {"threads": "many"}}, ErrorCode.CONFIG_INVALID, "threads"),
        ({"runtime_config": {"threads": "0"}}, ErrorCode.CONFIG_INVALID, "threads"),
        ({"runtime_config": {"cuda_graphs": "yes"}}, ErrorCode.CONFIG_INVALID, "cuda_graphs"),
        ({"runtime_config": {"warm": "2"}}, ErrorCode.CONFIG_INVALID, "warm"),
        ({"runtime_config": {"bucket_policy": "v9"}}, ErrorCode.CONFIG_INVALID, "bucket_policy"),
        ({"runtime_config": {"precision": "f16"}}, ErrorCode.CONFIG_INVALID, "SYNAPSE_CUDA_PRECISION"),
        ({"runtime_config": {"attention": "fused"}}, ErrorCode.CONFIG_INVALID, "attention"),
        ({"runtime_config": {"gpu_mem_limit_mb": "-1"}}, ErrorCode.CONFIG_INVALID, "gpu_mem_limit_mb"),
    ],
)
def test_codes(bundles: Bundles, fields: dict[str, Any], code: ErrorCode, words: str) -> None:
    bundle = bundles("bert-mean")
    refused(engine_for(bundle), changed(load_request(bundle), **fields), code, words)


def test_optional_keys_that_agree_and_unknown_ones_are_fine(bundles: Bundles) -> None:
    bundle = bundles("bert-mean")
    config = {"profile": "toy.owned-cuda", "operation": "embed", "backend": "cpu", "precision": "f32", "shiny": "yes"}
    model = engine_for(bundle).load(load_request(bundle, threads="1", **config), progress=silent())
    assert isinstance(model, OwnedModel) and model.dims == 64
    model.close()
    model.close()  # idempotent


def test_a_missing_or_broken_manifest_is_told_at_load(bundles: Bundles, tmp_path: Path) -> None:
    request = load_request(bundles("bert-mean"))
    refused(engine_for(None), request, ErrorCode.ARTIFACT_INVALID, "without --manifest")
    (tmp_path / manifest.FILE_NAME).write_text('{"manifest_version": 1, "manifest_version": 1}')
    broken = CudaEngine(WorkerOptions(device="cpu", manifest=tmp_path / manifest.FILE_NAME))
    assert broken.identity().manifest_digest is None
    refused(broken, request, ErrorCode.ARTIFACT_INVALID, "twice")


def test_a_generator_is_not_served(bundles: Bundles, tmp_path: Path) -> None:
    bundle = bundles("qwen3-last", task="generate", pooling=None, normalize=None)
    refused(engine_for(bundle), load_request(bundle), ErrorCode.MODEL_UNSUPPORTED, "not served here")


def test_hardware_comes_before_the_artifact(bundles: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that doesn't exist and a digest of nothing: the floor still speaks first, and no runtime is touched."""
    bundle = bundles("bert-mean")
    engine = engine_for(bundle, "cuda")
    monkeypatch.setattr(engine, "probe_floor", lambda: REFUSED)
    monkeypatch.setattr("engines.cuda.binding.session", lambda *a, **k: pytest.fail("a session was made"))
    request = changed(load_request(bundle), artifact_path="/nowhere/at.all", artifact_digest="1" * 64)
    refused(engine, request, ErrorCode.BACKEND_MISSING, "^backend_missing: cuda_no_driver: ")
    refused(engine, changed(request, format="gguf"), ErrorCode.ARTIFACT_INVALID, "only")
    refused(
        engine, changed(request, runtime_config={"operation": "rerank"}), ErrorCode.OPERATION_MISMATCH, "task is embed"
    )


def test_another_device_is_refused(bundles: Bundles) -> None:
    bundle = bundles("bert-mean")
    refused(engine_for(bundle, "metal"), load_request(bundle), ErrorCode.BACKEND_MISSING, "no metal")


@pytest.fixture
def forged(bundles: Bundles, tmp_path: Path) -> Callable[..., tuple[Bundle, Load]]:
    """Copy a bundle, let a function change its package, and describe the result honestly in a new manifest."""

    def make(change: Callable[[Path], None], *, honest: bool = True) -> tuple[Bundle, Load]:
        source = bundles("bert-rerank")
        root = tmp_path / "forged"
        shutil.copytree(source.root, root)
        file = root / "model.safetensors"
        change(file)
        if honest:
            text = json.loads((root / manifest.FILE_NAME).read_text())
            text["artifacts"][0]["digest"] = PREFIX + file_digest(file)
            (root / manifest.FILE_NAME).write_bytes(manifest.canonical_bytes(text))
        bundle = manifest.read(root)
        return bundle, load_request(bundle)

    return make


def rewrite(file: Path, change: Callable[[dict[str, np.ndarray]], None], profile: str = "toy.owned-cuda") -> None:
    opened = safetensors.SafetensorsFile.open(file)
    tensors = {name: np.array(opened.array(name)) for name in opened.header.tensors}
    del opened
    change(tensors)
    file.unlink()
    safetensors.write(file, tensors, metadata={"profile": profile})


def test_a_headless_package_is_refused_by_its_header(forged: Callable[..., tuple[Bundle, Load]]) -> None:
    bundle, request = forged(lambda file: rewrite(file, lambda t: t.pop("classifier.weight")))
    refused(engine_for(bundle), request, ErrorCode.ARTIFACT_INVALID, "head_tensor_missing: classifier.* is missing")


def test_a_misshapen_head_is_refused(forged: Callable[..., tuple[Bundle, Load]]) -> None:
    def widen(tensors: dict[str, np.ndarray]) -> None:
        tensors["classifier.weight"] = np.zeros((2, 64), np.float32)

    bundle, request = forged(lambda file: rewrite(file, widen))
    refused(engine_for(bundle), request, ErrorCode.ARTIFACT_INVALID, r"has shape \[2, 64\]")


def test_another_models_package_is_refused(forged: Callable[..., tuple[Bundle, Load]]) -> None:
    bundle, request = forged(lambda file: rewrite(file, lambda t: None, profile="other.owned-cuda"))
    refused(engine_for(bundle), request, ErrorCode.PACKAGE_DIGEST_MISMATCH, "the package is 'other.owned-cuda'")


def test_a_flipped_bit_is_refused_before_weights_are_read(
    forged: Callable[..., tuple[Bundle, Load]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def flip(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)

    bundle, request = forged(flip, honest=False)
    monkeypatch.setattr(
        "engines.cuda.load.Checkpoint.from_package", lambda *a, **k: pytest.fail("mapped before hashed")
    )
    refused(engine_for(bundle), request, ErrorCode.ARTIFACT_INVALID, "digest mismatch")


def test_a_package_that_is_written_to_after_it_was_hashed_is_refused(
    forged: Callable[..., tuple[Bundle, Load]], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, request = forged(lambda file: None)

    def verify(file: ArtifactFile, digest: str, progress: ProgressReporter) -> None:
        honest(file, digest, progress)
        with Path(request.artifact_path).open("r+b") as other:
            other.seek(-4, os.SEEK_END)
            other.write(bytes(4))

    honest = ArtifactFile.verify
    monkeypatch.setattr(ArtifactFile, "verify", verify)
    refused(engine_for(bundle), request, ErrorCode.ARTIFACT_INVALID, "written to while it was loaded")


@pytest.mark.parametrize("size", [0, 7, 64, 5000])
def test_a_truncated_package_is_refused(forged: Callable[..., tuple[Bundle, Load]], size: int) -> None:
    bundle, request = forged(lambda file: file.write_bytes(file.read_bytes()[:size]))
    refused(engine_for(bundle), request, ErrorCode.ARTIFACT_INVALID, "model.safetensors")


@pytest.mark.parametrize(
    ("value", "code", "words"),
    [
        (np.nan, ErrorCode.ARTIFACT_INVALID, "NaN or infinity; its weights are damaged: encoder.layer.0.output.dense"),
        (3e38, ErrorCode.NONFINITE_OUTPUT, "though every weight is finite: a value leaves float32"),
    ],
)
def test_a_model_that_answers_nan_is_refused_with_the_cause(
    value: float, code: ErrorCode, words: str, forged: Callable[..., tuple[Bundle, Load]]
) -> None:
    def poison(tensors: dict[str, np.ndarray]) -> None:
        tensors["encoder.layer.0.output.dense.weight"][:] = value

    bundle, request = forged(lambda file: rewrite(file, poison))
    refused(engine_for(bundle), request, code, words)


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


@pytest.mark.parametrize(
    ("name", "device", "packs"),
    [("bert-mean", "cuda", True), ("bert-mean", "cpu", False), ("qwen3-last", "cuda", False)],
)
def test_packing_is_announced_where_rows_run_end_to_end(name: str, device: str, packs: bool, bundles: Bundles) -> None:
    """Spec (protocol-v3, 3): owned-cuda may advertise varlen-v1 without widths; no request ever names one."""
    packed = engine_for(bundles(name), device).identity().packed
    assert packed == (PackedCapability("varlen-v1", [], MAX_ITEMS) if packs else None)
