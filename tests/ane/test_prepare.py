"""The preparer's steps with a stand-in compiler, and what LOAD makes of its record. The real compiler is a Mac's."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from engines.ane.backend import Source
from engines.ane.build import prepare as tool
from engines.ane.build.package import read_spec
from engines.ane.signature import FunctionSpec
from engines.bundle import manifest, preparation
from engines.bundle.digest import file_digest, tree_digest
from engines.bundle.manifest import Bundle, BundleError
from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import Load
from engines.runtime.engine import WorkerOptions
from engines.runtime.progress import silent
from synapse_host import builder
from tests.support.ane_worker import ReferenceEngine
from tests.support.mil_reference import ReferenceBackend, ReferenceProgram

Bundles = Callable[[str], Bundle]


class CompiledBackend(ReferenceBackend):
    """Opens only what was "compiled", as Core ML does: signatures come from the record."""

    formats = frozenset({"mlmodelc", "coreml"})
    reads_packages = False
    build = "24A335"

    def __init__(self) -> None:
        self.opened: list[Source] = []

    def os_build(self) -> str:
        return self.build

    def specs(self, path: Path) -> dict[str, FunctionSpec]:
        return {}

    def open(self, source: Source, *, units: str) -> ReferenceProgram:
        self.opened.append(source)
        assert source.path.suffix == ".mlmodelc" and units == "cpu_and_ne"
        spec: FunctionSpec = read_spec(source.path)[source.function]
        return ReferenceProgram(source, spec)


def compiler(package: Path) -> Path:
    """Stands in for Apple's: a copy under another name, somewhere else, as a temporary .mlmodelc."""
    target = Path(tempfile.mkdtemp()) / "anything.mlmodelc"
    shutil.copytree(package, target)
    return target


def prepare(bundle: Bundle, cache: Path, backend: CompiledBackend | None = None) -> CompiledBackend:
    backend = backend or CompiledBackend()
    tool.prepare(bundle.root, cache, backend=backend, compiler=compiler)
    return backend


def load_prepared(bundle: Bundle, cache: Path, backend: CompiledBackend, **config: str) -> None:
    (artifact,) = bundle.artifacts("coreml")
    path, record = preparation.find(cache, artifact.digest)
    engine = ReferenceEngine(WorkerOptions(device="ane", manifest=bundle.path("manifest.json")))
    engine._backend = backend
    request = Load(
        req_id="x",
        artifact_path=str(path),
        artifact_digest=record.compiled_digest,
        format="mlmodelc",
        runtime_config=config,
    )
    engine.load(request, progress=silent()).close()


@pytest.mark.parametrize("name", ["bert", "bert:macos14"])
def test_prepared_bundles_lie_at_a_stable_path_and_load_from_there(name: str, bundles: Bundles, tmp_path: Path) -> None:
    bundle = bundles(name)
    (artifact,) = bundle.artifacts("coreml")
    backend = prepare(bundle, tmp_path)
    path, record = preparation.find(tmp_path, artifact.digest)
    assert path == tmp_path / "ane-coreml" / artifact.digest.removeprefix("sha256:") / "compiled"
    assert record.os_build == "24A335" and record.source_digest == artifact.digest
    assert record.compiled_digest == f"sha256:{tree_digest(path).compatible}"
    assert all(function.first_load_ms is not None for function in record.functions.values())
    assert {source.path.parent for source in backend.opened} == {path}, "specialised at its final path"
    load_prepared(bundle, tmp_path, backend)
    assert not list(path.parent.glob(".*.tmp"))


def zipped(bundle: Bundle, out: Path) -> Bundle:
    """The same bundle with its package in an archive, as a download brings it."""
    (artifact,) = bundle.artifacts("coreml")
    out.mkdir()
    made = shutil.make_archive(str(out / "model"), "zip", bundle.root, artifact.path)
    entry = msgspec.structs.replace(artifact, path=Path(made).name, digest=f"sha256:{file_digest(Path(made))}")
    manifest.write(out, msgspec.structs.replace(bundle.manifest, artifacts=[entry]))
    return manifest.read(out)


def test_a_zipped_package_is_unpacked_beside_what_is_compiled_from_it(bundles: Bundles, tmp_path: Path) -> None:
    bundle = zipped(bundles("bert"), tmp_path / "bundle")
    (artifact,) = bundle.artifacts("coreml")
    cache = tmp_path / "cache"
    backend = prepare(bundle, cache)
    home = preparation.folder(cache, artifact.digest)
    assert sorted(path.name for path in home.iterdir()) == [
        "compiled", "materialization.json", "preparation.json", "tree",
    ]  # fmt: skip
    load_prepared(bundle, cache, backend)
    assert builder.verify(bundle) == []
    engine = ReferenceEngine(WorkerOptions(device="ane", manifest=bundle.path("manifest.json")))
    engine._backend = backend
    request = Load("x", str(bundle.path(artifact.path)), artifact.digest, "coreml", {})
    assert refusal(lambda: engine.load(request, progress=silent())) is ErrorCode.SPECIALIZATION_MISSING


def test_a_zipped_package_that_is_not_the_manifest_s_is_not_compiled(bundles: Bundles, tmp_path: Path) -> None:
    """Its archive's digest is right, the tree inside is another one."""
    bundle = zipped(bundles("bert"), tmp_path / "bundle")
    (artifact,) = bundle.artifacts("coreml")
    other = msgspec.structs.replace(artifact, tree="sha256:" + "0" * 64)
    manifest.write(bundle.root, msgspec.structs.replace(bundle.manifest, artifacts=[other]))
    with pytest.raises(BundleError, match="tree"):
        prepare(manifest.read(bundle.root), tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("compiled"))


def test_a_compiler_that_fails_leaves_no_staging(bundles: Bundles, tmp_path: Path) -> None:
    def failing(package: Path) -> Path:
        raise EngineError(ErrorCode.ARTIFACT_INVALID, "compiling failed")

    with pytest.raises(EngineError):
        tool.prepare(bundles("bert").root, tmp_path, backend=CompiledBackend(), compiler=failing)
    assert not list(tmp_path.rglob(".*.tmp")) and not list(tmp_path.rglob("compiled"))


def test_preparing_twice_compiles_once(bundles: Bundles, tmp_path: Path) -> None:
    bundle = bundles("bert")
    prepare(bundle, tmp_path)
    calls = []

    def counted(package: Path) -> Path:
        calls.append(package)
        return compiler(package)

    backend = CompiledBackend()
    backend.build = "24B1"
    tool.prepare(bundle.root, tmp_path, backend=backend, compiler=counted)
    (artifact,) = bundle.artifacts("coreml")
    assert calls == [] and preparation.find(tmp_path, artifact.digest)[1].os_build == "24B1"


def refusal(call: Callable[[], object]) -> ErrorCode:
    with pytest.raises(EngineError) as refused:
        call()
    return refused.value.code


def test_an_os_update_makes_the_record_void(bundles: Bundles, tmp_path: Path) -> None:
    bundle = bundles("bert")
    backend = prepare(bundle, tmp_path)
    backend.build = "24B1"
    assert refusal(lambda: load_prepared(bundle, tmp_path, backend)) is ErrorCode.SPECIALIZATION_MISSING
    load_prepared(bundle, tmp_path, backend, prepare="allow_cold")


def test_an_interrupted_preparation_is_no_preparation(bundles: Bundles, tmp_path: Path) -> None:
    bundle = bundles("bert")

    class Dies(CompiledBackend):
        def open(self, source: Source, *, units: str) -> ReferenceProgram:
            if len(self.opened) == 2:
                raise EngineError(ErrorCode.OOM, "killed")
            return super().open(source, units=units)

    with pytest.raises(EngineError):
        prepare(bundle, tmp_path, Dies())
    backend = CompiledBackend()
    assert refusal(lambda: load_prepared(bundle, tmp_path, backend)) is ErrorCode.SPECIALIZATION_MISSING
    prepare(bundle, tmp_path, backend)
    load_prepared(bundle, tmp_path, backend)


@pytest.mark.parametrize("damage", ["missing", "garbage", "other source", "unknown field", "path out", "no function"])
def test_a_bad_record_is_refused(damage: str, bundles: Bundles, tmp_path: Path) -> None:
    bundle = bundles("bert")
    backend = prepare(bundle, tmp_path)
    (artifact,) = bundle.artifacts("coreml")
    path, record = preparation.find(tmp_path, artifact.digest)
    file = path.parent / "preparation.json"
    document = json.loads(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "garbage":
        file.write_bytes(b"{")
    else:
        if damage == "other source":
            document["source_digest"] = "sha256:" + "1" * 64
        elif damage == "unknown field":
            document["extra"] = 1
        elif damage == "path out":
            document["functions"]["s16"]["bundle"] = "../compiled/model.mlmodelc"
        else:
            del document["functions"]["s32"]
        file.write_text(json.dumps(document))
    engine = ReferenceEngine(WorkerOptions(device="ane", manifest=bundle.path("manifest.json")))
    engine._backend = backend
    request = Load(req_id="x", artifact_path=str(path), artifact_digest=record.compiled_digest, format="mlmodelc")
    backend.opened.clear()
    code = refusal(lambda: engine.load(request, progress=silent()))
    expected = {
        "other source": ErrorCode.PACKAGE_DIGEST_MISMATCH,
        "path out": ErrorCode.ARTIFACT_INVALID,
        "no function": ErrorCode.ARTIFACT_INVALID,
    }
    assert code is expected.get(damage, ErrorCode.SPECIALIZATION_MISSING)
    assert backend.opened == []


def test_a_changed_package_is_not_compiled(bundles: Bundles, tmp_path: Path) -> None:
    bundle = bundles("bert")
    copy = tmp_path / "bundle"
    shutil.copytree(bundle.root, copy)
    (copy / "model.mlpackage" / "extra").write_bytes(b"x")
    with pytest.raises(BundleError, match="digest"):
        tool.prepare(copy, tmp_path / "cache", backend=CompiledBackend(), compiler=compiler)


def test_losing_the_race_adopts_the_winner(bundles: Bundles, tmp_path: Path) -> None:
    bundle = bundles("bert")
    (artifact,) = bundle.artifacts("coreml")
    final = preparation.folder(tmp_path, artifact.digest) / "compiled"

    def slow(package: Path) -> Path:
        if not final.exists():  # another preparer finishes while this one compiles
            shutil.copytree(package, final / "model.mlmodelc")
        return compiler(package)

    tool.prepare(bundle.root, tmp_path, backend=CompiledBackend(), compiler=slow)
    load_prepared(bundle, tmp_path, CompiledBackend())
    assert not list(final.parent.glob(".*.tmp"))


def test_only_old_staging_is_swept(tmp_path: Path) -> None:
    for name, age in ((".compiled.a.tmp", 25), (".compiled.b.tmp", 23)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (0, 1_000_000 - age * 3600))
    (tmp_path / "compiled").mkdir()
    os.utime(tmp_path / "compiled", (0, 0))
    assert [path.name for path in tool.sweep(tmp_path, now=1_000_000)] == [".compiled.a.tmp"]
    assert (tmp_path / "compiled").exists() and (tmp_path / ".compiled.b.tmp").exists()


def test_off_a_mac_prepare_says_why(bundles: Bundles, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from engines.ane.build import convert

    if sys.platform == "darwin":
        pytest.skip("this is a Mac")
    assert convert.main(["prepare", str(bundles("bert").root), "--cache", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "os_unsupported" in err


def test_the_record_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    record = preparation.Preparation("sha256:" + "0" * 64, "sha256:" + "1" * 64, "24A1", {})
    tool.write(tmp_path / "preparation.json", record)
    tool.write(tmp_path / "preparation.json", msgspec.structs.replace(record, os_build="24A2"))
    assert preparation.read(tmp_path / "preparation.json").os_build == "24A2"
    assert [path.name for path in tmp_path.iterdir()] == ["preparation.json"]
