"""The preparer's steps with a stand-in compiler, and what LOAD makes of its record. The real compiler is a Mac's."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engines.ane.backend import Source
from engines.ane.build import prepare as tool
from engines.bundle import manifest, preparation
from engines.bundle.digest import tree_digest
from engines.bundle.manifest import Bundle, BundleError
from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import Load
from engines.runtime.engine import WorkerOptions
from engines.runtime.progress import silent
from tests.ane.conftest import refusal
from tests.support.ane_bundle import compiler
from tests.support.ane_worker import ReferenceEngine
from tests.support.mil_reference import ReferenceBackend, ReferenceProgram

Bundles = Callable[[str], Bundle]


class CompiledBackend(ReferenceBackend):
    """Notes what was opened: compiled bundles only, as the framework does."""

    def __init__(self) -> None:
        self.build = "24A335"
        self.opened: list[Source] = []

    def open(self, source: Source, *, units: str) -> ReferenceProgram:
        self.opened.append(source)
        assert source.path.suffix == ".mlmodelc" and units == "cpu_and_ne"
        return super().open(source, units=units)


def prepare(bundle: Bundle, cache: Path, backend: CompiledBackend | None = None) -> CompiledBackend:
    backend = backend or CompiledBackend()
    tool.prepare(bundle.root, cache, backend=backend, compiler=compiler)
    return backend


def load_prepared(bundle: Bundle, cache: Path, backend: CompiledBackend, **config: str) -> None:
    """Load from where the preparer puts it, whatever its record says."""
    (artifact,) = bundle.artifacts("coreml")
    path = preparation.folder(cache, artifact.digest) / "compiled"
    request = Load("x", str(path), tree_digest(path).compatible, "mlmodelc", config)
    engine = ReferenceEngine(WorkerOptions(device="ane", manifest=bundle.path("manifest.json")), backend)
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


@pytest.mark.parametrize("key", ["digest", "tree"])
def test_a_package_that_is_not_the_manifest_s_is_not_compiled(key: str, bundles: Bundles, tmp_path: Path) -> None:
    source = bundles("bert")
    (artifact,) = source.artifacts("coreml")
    shutil.copytree(source.root, tmp_path / "bundle")
    other = msgspec.structs.replace(artifact, **{key: "sha256:" + "0" * 64})
    manifest.write(tmp_path / "bundle", msgspec.structs.replace(source.manifest, artifacts=[other]))
    with pytest.raises(BundleError, match=key):
        prepare(manifest.read(tmp_path / "bundle"), tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("compiled"))


def test_a_compiler_that_fails_leaves_no_staging(bundles: Bundles, tmp_path: Path) -> None:
    def failing(package: Path) -> Path:
        raise EngineError(ErrorCode.ARTIFACT_INVALID, "compiling failed")

    refusal(lambda: tool.prepare(bundles("bert").root, tmp_path, backend=CompiledBackend(), compiler=failing))
    assert not list(tmp_path.rglob(".*.tmp")) and not list(tmp_path.rglob("compiled"))


def test_an_os_update_makes_the_record_void_and_preparing_again_compiles_nothing(
    bundles: Bundles, tmp_path: Path
) -> None:
    bundle = bundles("bert")
    backend = prepare(bundle, tmp_path)
    backend.build = "24B1"
    assert refusal(lambda: load_prepared(bundle, tmp_path, backend)).code is ErrorCode.SPECIALIZATION_MISSING
    load_prepared(bundle, tmp_path, backend, prepare="allow_cold")

    def never(package: Path) -> Path:
        raise AssertionError("compiled again")

    tool.prepare(bundle.root, tmp_path, backend=backend, compiler=never)
    load_prepared(bundle, tmp_path, backend)


def test_an_interrupted_preparation_is_no_preparation(bundles: Bundles, tmp_path: Path) -> None:
    bundle = bundles("bert")

    class Dies(CompiledBackend):
        def open(self, source: Source, *, units: str) -> ReferenceProgram:
            if len(self.opened) == 2:
                raise EngineError(ErrorCode.OOM, "killed")
            return super().open(source, units=units)

    refusal(lambda: prepare(bundle, tmp_path, Dies()))
    backend = CompiledBackend()
    assert refusal(lambda: load_prepared(bundle, tmp_path, backend)).code is ErrorCode.SPECIALIZATION_MISSING
    prepare(bundle, tmp_path, backend)
    load_prepared(bundle, tmp_path, backend)


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (None, ErrorCode.SPECIALIZATION_MISSING),
        ({"extra": 1}, ErrorCode.SPECIALIZATION_MISSING),
        ({"source_digest": "sha256:" + "1" * 64}, ErrorCode.PACKAGE_DIGEST_MISMATCH),
        ({"functions": {"s32": None}}, ErrorCode.ARTIFACT_INVALID),
        ({"functions": {"s16": {"bundle": "../compiled/model.mlmodelc"}}}, ErrorCode.ARTIFACT_INVALID),
    ],
    ids=["missing", "unknown field", "other source", "no function", "path out"],
)
def test_a_bad_record_is_refused(damage: Any, code: ErrorCode, bundles: Bundles, tmp_path: Path) -> None:
    bundle = bundles("bert")
    backend = prepare(bundle, tmp_path)
    file = preparation.folder(tmp_path, bundle.artifacts("coreml")[0].digest) / "preparation.json"
    document = json.loads(file.read_bytes())
    file.unlink()
    if damage is not None:
        functions = document["functions"]
        for name, change in damage.get("functions", {}).items():
            functions = {**functions, name: {**functions[name], **(change or {})}}
            if change is None:
                del functions[name]
        file.write_text(json.dumps({**document, **damage, "functions": functions}))
    backend.opened.clear()
    assert refusal(lambda: load_prepared(bundle, tmp_path, backend)).code is code
    assert backend.opened == []


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


def test_off_a_mac_prepare_says_why(bundles: Bundles, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from engines.ane.build import convert

    if sys.platform == "darwin":
        pytest.skip("this is a Mac")
    assert convert.main(["prepare", str(bundles("bert").root), "--cache", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("prepare: ") and "os_unsupported" in err
