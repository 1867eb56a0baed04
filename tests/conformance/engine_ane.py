"""The Core ML worker in the conformance suite, its last call answered by the numpy evaluator.

On a Mac the hardware run (`make hw-ane`) covers the framework; off one the production worker refuses LOAD, which
tests/ane/test_worker.py checks. Everything between the socket and that call is the production code, so it conforms
here.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from engines.bundle import manifest
from engines.checkpoint.read import Checkpoint
from engines.protocol.messages import (
    AneAdmitPacked,
    AneAdmitShape,
    AneEvictPacked,
    AneEvictShape,
    EmbedBatch,
    RerankSequences,
)
from tests.conformance.registry import EngineUnderTest, Subject
from tests.support.toy_models import write_bert


def _bert(folder: Path, name: str, **config: Any) -> Subject:
    from tests.support.ane_bundle import packed, prepared, shape, write_bundle

    checkpoint = Checkpoint.open(write_bert(folder / f"{name}-checkpoint", **config))
    keys = shape(64) + (packed(64) if checkpoint.task == "embed" else [])
    bundle = write_bundle(checkpoint, folder / name, keys)
    path, digest = prepared(bundle)
    return Subject(
        path=path,
        digest=digest,
        format="mlmodelc",
        dims=bundle.manifest.dims,
        vocab_size=128,
        max_tokens=64,
        arguments=("--manifest", str(bundle.root / manifest.FILE_NAME), "--packed", "64"),
        truncatable=False,
    )


ENGINE = EngineUnderTest(
    name="ane",
    module="tests.support.ane_worker",
    hello_name="ane-reference",
    factory="tests.support.ane_worker:ReferenceEngine",
    device="ane",
    serves=frozenset({EmbedBatch, RerankSequences, AneAdmitShape, AneEvictShape, AneAdmitPacked, AneEvictPacked}),
    embedder=lambda folder: _bert(folder, "embedder"),
    reranker=lambda folder: _bert(folder, "reranker", cross_encoder=True),
    bad_config={"compute_units": "all"},
    owned=True,
    marks=(
        pytest.mark.skipif(importlib.util.find_spec("coremltools") is None, reason="needs the extra 'ane'"),
        pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning"),
    ),
)
