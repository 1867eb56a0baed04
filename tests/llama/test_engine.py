"""Identity from file names, the floor probe, and LOAD's order of refusals; no worker process needed."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from engines.llama import engine as engine_module
from engines.llama.engine import LlamaEngine, compiled_features, find_installation, loses_token_types, missing_features
from engines.llama.gguf import read_header
from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import EmbedBatch, Generate, Load, Rerank
from engines.runtime.artifact import ArtifactFile
from engines.runtime.engine import WorkerOptions
from engines.runtime.progress import ProgressReporter, silent
from tests.support.toy_gguf import rewrite


def install(site: Path, *libraries: str, version: str | None = "9.9.9") -> None:
    (site / "llama_cpp" / "lib").mkdir(parents=True)
    (site / "llama_cpp" / "__init__.py").write_text("raise AssertionError('HELLO must not import this')\n")
    for name in libraries:
        (site / "llama_cpp" / "lib" / name).touch()
    if version:
        (site / f"llama_cpp_python-{version}.dist-info").mkdir()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


CPU = ("libggml.so", "libggml-base.so.0", "libggml-base.so", "libggml-cpu.so")
METAL = ("libggml.dylib", "libggml-base.dylib", "libggml-cpu.dylib", "libggml-metal.dylib", "libggml-blas.dylib")


@pytest.mark.parametrize(
    ("libraries", "compiled", "device", "told"),
    [
        (CPU, "cpu", "cpu", "cpu"),
        (CPU, "cpu", "metal", "cpu"),
        (METAL, "metal", "metal", "metal"),
        (METAL, "metal", "cpu", "cpu"),
        ((*CPU, "libggml-cuda.so"), "cuda", "cuda:1", "cuda:1"),
        (("ggml.dll", "ggml-cpu.dll", "ggml-vulkan.dll"), "vulkan", "cuda:1", "cpu"),
    ],
)
def test_hello_promises_only_what_the_files_are_compiled_for(
    site: Path, libraries: tuple[str, ...], compiled: str, device: str, told: str
) -> None:
    install(site, *libraries)
    engine = LlamaEngine(WorkerOptions(device=device))
    identity = engine.identity()
    assert identity.version == "llama-cpp-python-9.9.9"
    expected = {"device": told, "backend": told.partition(":")[0], "compiled_backend": compiled}
    assert expected.items() <= identity.build_flags.items()
    assert engine.serves == {EmbedBatch, Rerank, Generate} and engine.max_models is None


def test_no_package_no_library_no_metadata(site: Path) -> None:
    assert find_installation() is None
    identity = LlamaEngine(WorkerOptions(device="cpu")).identity()
    assert identity.version == "llama-cpp-python-missing" and identity.build_flags["compiled_backend"] == "none"
    probe = LlamaEngine(WorkerOptions(device="cpu")).probe_floor()
    assert (probe.status, probe.code) == ("refused", "llama_missing")
    install(site)
    assert find_installation() is None, "a package without its library is none"
    (site / "llama_cpp" / "lib" / "libggml.so").touch()
    (site / "llama_cpp_python-9.9.9.dist-info").rmdir()
    found = find_installation()
    assert found is not None and found.version == "unknown"


INFO = "CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = 1 | AVX512_BF16 = 0 | FMA = 1 | LLAMAFILE = 1 | OPENMP = 1 | "


@pytest.mark.llama
def test_probe_here() -> None:
    probe = LlamaEngine(WorkerOptions(device="cpu")).probe_floor()
    assert (probe.status, probe.code) == ("ok", "ok"), probe


def test_cpu_features_are_compared(tmp_path: Path) -> None:
    assert compiled_features(INFO) == {"SSE3", "AVX2", "AVX512", "FMA", "LLAMAFILE", "OPENMP"}
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: x\nflags\t\t: fpu pni avx2 fma\nflags\t\t: fpu\n")
    assert missing_features(compiled_features(INFO), cpuinfo=cpuinfo) == ["AVX512"]
    cpuinfo.write_text("Features\t: fp asimd\n")
    assert missing_features(compiled_features(INFO), cpuinfo=cpuinfo) == [], "not an x86 machine: nothing is claimed"
    assert missing_features(compiled_features(INFO), cpuinfo=tmp_path / "none") == []


def child(folder: Path, body: str) -> str:
    """Write something that can stand in for the Python of the probe's child."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.process
@pytest.mark.skipif(os.name == "nt", reason="needs a shell script as a program")
@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("kill -ILL $$", "cpu_unsupported", "rebuild"),
        ("echo 'OSError: libllama.so: cannot open' >&2; exit 1", "llama_missing", "cannot open"),
        ("kill -SEGV $$", "llama_missing", "exit status -11"),
        ("sleep 60", "llama_missing", "did not load"),
        (f"echo '{INFO}'", "cpu_unsupported", "AVX512"),
    ],
)
def test_probe_reads_the_childs_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, code: str, words: str
) -> None:
    monkeypatch.setattr(engine_module, "missing_features", lambda features: ["AVX512"])
    install(tmp_path / "site", *CPU)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    monkeypatch.setattr(sys, "executable", child(tmp_path, body))
    monkeypatch.setattr(engine_module, "PROBE_TIMEOUT_S", {"cpu": 1.0})
    probe = LlamaEngine(WorkerOptions(device="cpu")).probe_floor()
    assert (probe.status, probe.code) == ("refused", code)
    assert words in str(probe.observed)


@pytest.mark.llama
def test_a_malformed_header_is_refused_before_hashing(tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    path.write_bytes(b"GGUF" + bytes(3 << 20))
    reporter = silent()
    with pytest.raises(EngineError, match="version 0"):
        LlamaEngine(WorkerOptions(device="cpu")).load(
            Load(req_id="1", artifact_path=str(path), artifact_digest="0" * 64, format="gguf"), progress=reporter
        )
    assert reporter.completed == 0, "nothing was hashed"


@pytest.mark.llama
def test_a_gguf_that_is_written_to_after_it_was_hashed_is_refused(
    toys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "copy.gguf"
    shutil.copyfile(toys("bert").path, path)

    def verify(file: ArtifactFile, digest: str, progress: ProgressReporter) -> None:
        honest(file, digest, progress)
        with path.open("r+b") as other:
            other.seek(-4, os.SEEK_END)
            other.write(bytes(4))

    honest = ArtifactFile.verify
    monkeypatch.setattr(ArtifactFile, "verify", verify)
    request = Load(req_id="1", artifact_path=str(path), artifact_digest=toys("bert").digest, format="gguf")
    with pytest.raises(EngineError, match="written to while it was loaded") as caught:
        LlamaEngine(WorkerOptions(device="cpu")).load(request, progress=silent())
    assert caught.value.code is ErrorCode.ARTIFACT_INVALID


@pytest.mark.llama
def test_token_types_lost_or_kept(toys: Any, tmp_path: Path) -> None:
    def loses(path: Path) -> bool:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return loses_token_types(descriptor, read_header(descriptor))
        finally:
            os.close(descriptor)

    import gguf

    assert not loses(toys("bert-rerank").path), "split vocabulary"
    assert not loses(toys("bert").path), "an embedder uses one type only"
    lost = rewrite(toys("bert-rerank").path, tmp_path / "lost.gguf", synapse__token_type_vocab_offset=-1)
    assert loses(lost.path)
    table = next(t for t in gguf.GGUFReader(lost.path).tensors if t.name == "token_types.weight")
    first_row = table.data[0].tobytes()
    with lost.path.open("r+b") as file:
        file.seek(int(table.data_offset) + len(first_row))
        file.write(first_row)
    assert not loses(lost.path), "two equal types lose nothing"
