"""Toy models of the llama tests, built once, and an engine to load them in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from engines.llama.engine import LlamaEngine
from engines.llama.model import LlamaModel
from engines.protocol.messages import Load
from engines.runtime.batch import TokenBatch
from engines.runtime.engine import WorkerOptions
from engines.runtime.progress import ProgressReporter, silent
from tests.support import toy_models
from tests.support.toy_gguf import ToyGguf, build_toy

Toys = Callable[[str], ToyGguf]
LoadModel = Callable[..., LlamaModel]

_RECIPES: dict[str, tuple[Callable[..., Path], dict[str, object]]] = {
    "bert": (toy_models.write_bert, {}),
    "bert512": (toy_models.write_bert, {"max_positions": 512}),
    "bert2048": (toy_models.write_bert, {"max_positions": 2048}),
    "cross": (toy_models.write_bert, {"cross_encoder": True}),
    "qwen3": (toy_models.write_qwen3, {}),
    "qwen3-generate": (toy_models.write_qwen3, {"generate": True}),
    "llama": (toy_models.write_llama, {}),
}


@pytest.fixture(scope="session")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    """Build a toy by name (``bert``, ``bert512``, ``cross``, ``qwen3``, …; ``bert:q8_0`` picks a dtype)."""
    pytest.importorskip("llama_cpp")
    folder = tmp_path_factory.mktemp("toys")
    built: dict[str, ToyGguf] = {}

    def get(name: str) -> ToyGguf:
        if name not in built:
            recipe, _, dtype = name.partition(":")
            write, config = _RECIPES[recipe]
            built[name] = build_toy(folder, recipe, write, dtype=dtype or "f32", **config)
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


def token_batch(rows: Sequence[Sequence[int]]) -> TokenBatch:
    """Return rows as a TokenBatch."""
    flat = np.array([id_ for row in rows for id_ in row], dtype=np.int32)
    return TokenBatch(flat, np.cumsum([0, *map(len, rows)]).astype(np.int32))


@pytest.fixture(name="token_batch")
def _token_batch() -> Callable[[Sequence[Sequence[int]]], TokenBatch]:
    return token_batch
