"""Which engines the conformance suite runs over, and what it needs to know of each. To join, an engine adds one."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engines.bundle import manifest
from engines.bundle.manifest import Bundle
from engines.checkpoint.read import Checkpoint
from engines.protocol.messages import (
    CUDA_ENGINE,
    LLAMA_ENGINE,
    AneAdmitPacked,
    AneAdmitShape,
    AneEvictPacked,
    AneEvictShape,
    EmbedBatch,
    Generate,
    Request,
    Rerank,
    RerankSequences,
)
from tests.support import owned_bundle
from tests.support.toy_gguf import build_toy
from tests.support.toy_models import write_bert

LOW_ID, VOCABULARY = 5, 128
"""Ids from one to the other are ordinary tokens of every toy; the other itself must be refused."""


@dataclass(frozen=True)
class Subject:
    """An artifact ready for LOAD, and how to start the worker for it. *max_tokens*: a row of so many works."""

    path: Path
    digest: str
    format: str
    dims: int
    max_tokens: int
    config: dict[str, str] = field(default_factory=dict)
    manifest: Path | None = None


@dataclass(frozen=True)
class EngineUnderTest:
    """One engine, its worker command's module, and makers of its toys.

    *factory*: ``package.module:Class``, constructed from WorkerOptions in a child of the suite. *bad_config*: a
    runtime_config that LOAD must answer with ``config_invalid``. *long*: keywords of a toy that keeps one EMBED_BATCH
    of 256 rows of full length busy for at least a quarter of a second; None: it has no such toy.
    """

    name: str
    module: str
    hello_name: str
    factory: str
    device: str
    serves: frozenset[type[Request]]
    toy: Callable[..., Subject]
    bad_config: dict[str, str]
    long: dict[str, int] | None = None
    arguments: tuple[str, ...] = ()
    owned: bool = True
    marks: tuple[pytest.MarkDecorator, ...] = ()


def _gguf(folder: Path, **config: Any) -> Subject:
    toy = build_toy(folder, "toy", write_bert, **config)
    dims = 1 if config.get("cross_encoder") else config.get("hidden", 64)
    return Subject(toy.path, toy.digest, "gguf", dims, config.get("max_positions", 64), {"threads": "2"})


def _package(folder: Path, **config: Any) -> Subject:
    bundle = owned_bundle.write_bundle(Checkpoint.open(write_bert(folder / "checkpoint", **config)), folder / "toy")
    path = bundle.path(bundle.artifacts("safetensors-package")[0].path)
    return _owned(bundle, path, bundle.artifacts("safetensors-package")[0].digest, "safetensors-package")


def _compiled(folder: Path, **config: Any) -> Subject:
    from tests.support.ane_bundle import packed, prepared, shape, write_bundle

    checkpoint = Checkpoint.open(write_bert(folder / "checkpoint", **config))
    bundle = write_bundle(checkpoint, folder / "toy", shape(64) + (packed(64) if checkpoint.task == "embed" else []))
    return _owned(bundle, *prepared(bundle), "mlmodelc")


def _owned(bundle: Bundle, path: Path, digest: str, format: str) -> Subject:
    said = bundle.manifest
    config = {} if format == "mlmodelc" else {"threads": "2"}
    return Subject(path, digest, format, said.dims, said.max_tokens, config, bundle.root / manifest.FILE_NAME)


ENGINES = (
    EngineUnderTest(
        name="llama",
        module="engines.llama",
        hello_name=LLAMA_ENGINE,
        factory="engines.llama.engine:LlamaEngine",
        device="cpu",
        serves=frozenset({EmbedBatch, Rerank, Generate}),
        toy=_gguf,
        bad_config={"threads": "many"},
        long={"layers": 4, "max_positions": 256},
        owned=False,
        marks=(pytest.mark.llama,),
    ),
    EngineUnderTest(
        name="cuda",
        module="engines.cuda",
        hello_name=CUDA_ENGINE,
        factory="engines.cuda.engine:CudaEngine",
        device="cpu",
        serves=frozenset({EmbedBatch, RerankSequences}),
        toy=_package,
        bad_config={"threads": "many"},
        long={"layers": 12, "hidden": 128, "ffn": 512, "max_positions": 256},
    ),
    # The Core ML worker, its last call answered by the numpy evaluator: everything between the socket and that call is
    # the production code. On a Mac `make hw-ane` covers the framework; off one the production worker refuses LOAD.
    EngineUnderTest(
        name="ane",
        module="tests.support.ane_worker",
        hello_name="ane-reference",
        factory="tests.support.ane_worker:ReferenceEngine",
        device="ane",
        serves=frozenset({EmbedBatch, RerankSequences, AneAdmitShape, AneEvictShape, AneAdmitPacked, AneEvictPacked}),
        toy=_compiled,
        bad_config={"compute_units": "all"},
        arguments=("--packed", "64"),
        marks=(
            pytest.mark.skipif(importlib.util.find_spec("coremltools") is None, reason="needs the extra 'ane'"),
            pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning"),
        ),
    ),
)
