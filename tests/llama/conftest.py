"""Toy models of the llama tests, built once, and an engine to load them in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engines.llama.engine import LlamaEngine
from engines.llama.model import LlamaModel
from engines.protocol.messages import Load
from engines.runtime.engine import WorkerOptions
from engines.runtime.progress import ProgressReporter, silent
from tests.support import toy_models
from tests.support.toy_gguf import ToyGguf, build_toy

Toys = Callable[[str], ToyGguf]
LoadModel = Callable[..., LlamaModel]

_RECIPES: dict[str, Callable[[Path], Path]] = {
    **toy_models.TOYS,
    "bert512": lambda folder: toy_models.write_bert(folder, max_positions=512),
    "bert2048": lambda folder: toy_models.write_bert(folder, max_positions=2048),
}


@pytest.fixture(scope="session")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    """Build a toy by its name in TOYS, or ``bert512``, ``bert2048``; ``bert:q8_0`` picks a dtype."""
    pytest.importorskip("llama_cpp")
    folder = tmp_path_factory.mktemp("toys")
    built: dict[str, ToyGguf] = {}

    def get(name: str) -> ToyGguf:
        if name not in built:
            recipe, _, dtype = name.partition(":")
            built[name] = build_toy(folder, recipe, _RECIPES[recipe], dtype=dtype or "f32")
        return built[name]

    return get


@pytest.fixture
def load(toys: Toys) -> Iterator[LoadModel]:
    """Load a toy (by name) or a ToyGguf in this process; closed afterwards."""
    engine = LlamaEngine(WorkerOptions(device="cpu"))
    models: list[LlamaModel] = []

    def call(toy: str | ToyGguf, *, progress: ProgressReporter | None = None, **config: object) -> LlamaModel:
        found = toys(toy) if isinstance(toy, str) else toy
        request = Load(
            req_id="load",
            artifact_path=str(found.path),
            artifact_digest=found.digest,
            format="gguf",
            runtime_config={key: str(value) for key, value in config.items()},
        )
        model = engine.load(request, progress=progress or silent())
        assert isinstance(model, LlamaModel)
        models.append(model)
        return model

    yield call
    for model in models:
        model.close()
