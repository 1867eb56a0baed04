"""The owned worker on the CPU provider, in the conformance suite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engines.bundle import manifest
from engines.checkpoint.read import Checkpoint
from engines.protocol.messages import CUDA_ENGINE, EmbedBatch, RerankSequences
from tests.conformance.registry import EngineUnderTest, Subject
from tests.support.owned_bundle import write_bundle
from tests.support.toy_models import write_bert


def _bert(folder: Path, name: str, **config: Any) -> Subject:
    checkpoint = Checkpoint.open(write_bert(folder / f"{name}-checkpoint", **config))
    bundle = write_bundle(checkpoint, folder / name)
    entry = bundle.artifacts("safetensors-package")[0]
    return Subject(
        path=bundle.path(entry.path),
        digest=entry.digest,
        format=entry.format,
        dims=bundle.manifest.dims,
        vocab_size=128,
        max_tokens=config.get("max_positions", 64),
        config={"threads": "2"},
        arguments=("--manifest", str(bundle.root / manifest.FILE_NAME)),
    )


ENGINE = EngineUnderTest(
    name="cuda",
    module="engines.cuda",
    hello_name=CUDA_ENGINE,
    factory="engines.cuda.engine:CudaEngine",
    device="cpu",
    serves=frozenset({EmbedBatch, RerankSequences}),
    embedder=lambda folder: _bert(folder, "embedder"),
    long_embedder=lambda folder: _bert(folder, "long", layers=12, hidden=128, ffn=512, max_positions=256),
    reranker=lambda folder: _bert(folder, "reranker", cross_encoder=True),
    bad_config={"threads": "many"},
    owned=True,
)
