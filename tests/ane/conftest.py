"""Toy models of every family as Core ML bundles, built once, and an engine to load them in this process."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engines.ane.engine import AneEngine
from engines.ane.model import AneModel
from engines.ane.signature import Key
from engines.bundle.manifest import Bundle
from engines.checkpoint.read import Checkpoint
from engines.protocol.errors import EngineError
from engines.protocol.messages import Load
from engines.runtime.engine import WorkerOptions
from engines.runtime.progress import ProgressReporter, silent
from tests.ane.recipes import RECIPES
from tests.support.ane_bundle import packed, prepared, shape, write_bundle
from tests.support.ane_worker import ReferenceEngine

Bundles = Callable[[str], Bundle]


@pytest.fixture(scope="session", autouse=True)
def quiet_coremltools() -> None:
    """coremltools warns on import that a Mac's libraries are missing, which is why these tests exist."""
    pytest.importorskip("coremltools", reason="needs the extra 'ane' (coremltools)")
    logging.getLogger("coremltools").setLevel(logging.ERROR)


@pytest.fixture(autouse=True)
def converter_warnings() -> Iterator[None]:
    """numpy's overflow warning inside a converter pass is harmless and not ours."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=RuntimeWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    folder = tmp_path_factory.mktemp("ane-checkpoints")

    def get(name: str) -> Checkpoint:
        write, options = RECIPES[name]
        if not (folder / name).exists():
            (folder / name).mkdir()
            write(folder / name, **options)
        return Checkpoint.open(folder / name)

    return get


@pytest.fixture(scope="session")
def bundles(
    tmp_path_factory: pytest.TempPathFactory, checkpoints: Callable[[str], Checkpoint]
) -> Callable[[str], Bundle]:
    """Build a toy by name with buckets 16, 64 (bert's 32 as well) and, for embedders, packed width 64; ``name:macos14``
    for that target."""
    folder = tmp_path_factory.mktemp("ane-bundles")
    built: dict[str, Bundle] = {}

    def get(name: str) -> Bundle:
        if name not in built:
            recipe, _, target = name.partition(":")
            checkpoint = checkpoints(recipe)
            embed = checkpoint.task == "embed"
            # Conversion is what these tests spend their time on: fewer functions where one more shows nothing new.
            keys: list[Key] = shape(*(16, 32, 64) if name == "bert" else (16, 64)) + packed(*[64] * embed)
            out = folder / name.replace(":", "-")
            built[name] = write_bundle(checkpoint, out, keys, target="macos14" if target else "macos15")
        return built[name]

    return get


def refusal(call: Callable[[], Any]) -> EngineError:
    """Return what a call is refused with."""
    with pytest.raises(EngineError) as refused:
        call()
    return refused.value


def load_request(bundle: Bundle, **config: str) -> Load:
    """Return LOAD of a bundle's only Core ML artifact."""
    path, digest = prepared(bundle)
    return Load("load", str(path), digest, "mlmodelc", config)


@pytest.fixture
def load(bundles: Bundles) -> Iterator[Callable[..., AneModel]]:
    """Load a toy (by name) or a bundle in this process; *engine* and *widths* as wanted; closed afterwards."""
    models: list[AneModel] = []

    def call(
        bundle: str | Bundle,
        *,
        widths: tuple[int, ...] | None = (64,),
        engine: AneEngine | None = None,
        progress: ProgressReporter | None = None,
        **config: str,
    ) -> AneModel:
        found = bundles(bundle) if isinstance(bundle, str) else bundle
        options = WorkerOptions(device="ane", manifest=found.path("manifest.json"), packed=widths)
        model = (engine or ReferenceEngine(options)).load(load_request(found, **config), progress=progress or silent())
        assert isinstance(model, AneModel)
        models.append(model)
        return model

    yield call
    for model in models:
        model.close()
