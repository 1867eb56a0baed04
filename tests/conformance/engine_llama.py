"""llama.cpp on the CPU, in the conformance suite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engines.protocol.messages import LLAMA_ENGINE, EmbedBatch, Generate, Rerank
from tests.conformance.registry import EngineUnderTest, Subject
from tests.support.toy_gguf import build_toy
from tests.support.toy_models import write_bert


def _bert(folder: Path, name: str, **config: Any) -> Subject:
    toy = build_toy(folder, name, write_bert, **config)
    return Subject(
        path=toy.path,
        digest=toy.digest,
        format="gguf",
        dims=1 if config.get("cross_encoder") else config.get("hidden", 64),
        vocab_size=128,
        max_tokens=config.get("max_positions", 64),
        config={"threads": "2"},
    )


ENGINE = EngineUnderTest(
    name="llama",
    module="engines.llama",
    hello_name=LLAMA_ENGINE,
    factory="engines.llama.engine:LlamaEngine",
    device="cpu",
    serves=frozenset({EmbedBatch, Rerank, Generate}),
    embedder=lambda folder: _bert(folder, "embedder"),
    long_embedder=lambda folder: _bert(folder, "long", layers=4, max_positions=256),
    reranker=lambda folder: _bert(folder, "reranker", cross_encoder=True),
    bad_config={"threads": "many"},
    marks=(pytest.mark.llama,),
)
