"""Toy bundles (once per run) and models loaded on the CPU provider."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.bundle import manifest
from engines.bundle.manifest import Bundle
from engines.checkpoint.read import Checkpoint
from engines.cuda.engine import CudaEngine
from engines.cuda.graphs.builder import ModelSpec
from engines.cuda.load import spec_of as describe
from engines.cuda.model import OwnedModel
from engines.runtime.engine import WorkerOptions
from engines.runtime.progress import silent
from tests.cuda.cases import case
from tests.support.owned_bundle import load_request, write_bundle

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # before any test module imports onnxruntime itself
GOLDENS = Path(__file__).with_name("goldens.npz")
Bundles = Callable[..., Bundle]
Loader = Callable[..., OwnedModel]


def spec_of(bundle: Bundle) -> tuple[ModelSpec, Mapping[str, np.ndarray]]:
    """Return what a bundle's manifest says of its model, and its tensors."""
    known, (entry, *_) = bundle.manifest, bundle.artifacts("safetensors-package")
    assert isinstance(known.config, dict)
    checkpoint = Checkpoint.from_package(
        bundle.path(entry.path), config=known.config, family=known.family, task=known.task, int8=entry.dtype == "int8"
    )
    return describe(known, checkpoint.config), checkpoint.tensors


@pytest.fixture(scope="session")
def goldens() -> dict[str, np.ndarray]:
    """What transformers computed, by case."""
    with np.load(GOLDENS) as file:
        return dict(file)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Return a case's checkpoint: written once, opened anew, so that no mapped file outlives its test."""
    written: dict[str, Path] = {}

    def get(name: str) -> Checkpoint:
        if name not in written:
            written[name] = case(name).checkpoint(tmp_path_factory.mktemp("toy") / name)
        return Checkpoint.open(written[name])

    return get


@pytest.fixture(scope="session")
def bundles(checkpoints: Callable[[str], Checkpoint], tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    """Return a case's bundle, written once per set of overrides."""
    made: dict[tuple[str, str], Bundle] = {}

    def get(name: str, **fields: Any) -> Bundle:
        key = name, repr(sorted(fields.items()))
        if key not in made:
            made[key] = write_bundle(checkpoints(name), tmp_path_factory.mktemp("bundle") / name, **fields)
        return made[key]

    return get


@pytest.fixture
def load() -> Iterator[Loader]:
    """Load a bundle in this process, on the CPU provider unless *device* says otherwise; closed after the test."""
    opened: list[OwnedModel] = []

    def open_model(bundle: Bundle, *, device: str = "cpu", progress: Any = None, **config: str) -> OwnedModel:
        engine = CudaEngine(WorkerOptions(device=device, manifest=bundle.root / manifest.FILE_NAME))
        config.setdefault("threads", "2")
        model = engine.load(load_request(bundle, **config), progress=progress or silent())
        assert isinstance(model, OwnedModel)
        opened.append(model)
        return model

    yield open_model
    for model in opened:
        model.close()
