"""Every family, and what is read as BERT, computes what transformers does (tests/goldens), on every engine here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from engines.ane.families import serves
from engines.checkpoint import facts, tokenizer
from engines.checkpoint.families.base import FORMATS
from engines.checkpoint.read import Checkpoint, CheckpointError
from engines.cuda.graphs import families as graphs
from engines.llama.build import convert
from synapse_host.errors import BundleInvalid
from synapse_host.host import Host
from synapse_host.models import builder
from synapse_host.text.tokenizer import TextTokenizer
from tests.support import toy_families, toy_models
from tests.support.served import ENGINES, rows, serve

pytestmark = pytest.mark.process
GOLDENS: dict[str, Any] = {}
for name in ("toys", "families"):
    GOLDENS |= np.load(Path(__file__).parents[1] / "goldens" / f"{name}.npz")
TOYS = {**toy_models.TOYS, **toy_families.TOYS}


@pytest.mark.llama
@pytest.mark.parametrize("format", sorted(ENGINES))
@pytest.mark.parametrize("toy", ["roberta", "distilbert", *(toy for toy in toy_families.TOYS if "rerank" not in toy)])
def test_vectors_are_those_of_transformers(tmp_path: Path, toy: str, format: str) -> None:
    engine, error = ENGINES[format]
    checkpoint = TOYS[toy](tmp_path / "checkpoint")
    options: dict[str, Any] = {"formats": [format], "dtypes": {format: ["f32"]}, "model_id": "toy"}
    known = Checkpoint.open(checkpoint)
    if format in known.known.unheld(known.task):
        with pytest.raises(BundleInvalid, match=rf"can't be built as {format}: .*; build it as (?!.*{format})"):
            builder.build(checkpoint, tmp_path / "b", **options)
        return
    bundle = builder.build(checkpoint, tmp_path / "b", **options)

    async def work(host: Host) -> None:
        assert host.lane_of("toy").require().engine_id == engine
        assert np.abs(await host.embed_ids("toy", rows(GOLDENS, toy)) - GOLDENS[f"{toy}.out"]).max() < error

    serve(bundle.root, work)


@pytest.mark.llama
@pytest.mark.parametrize(
    ("toy", "format"),
    [("mpnet-rerank", "safetensors-package"), ("roberta-rerank", "safetensors-package"), ("roberta-rerank", "gguf")],
)
def test_pairs_have_the_template_of_their_kind(tmp_path: Path, toy: str, format: str) -> None:
    """``<s> query </s></s> document </s>`` on either engine; BERT's template gives other, plausible scores."""
    options: dict[str, Any] = {"formats": [format], "dtypes": {"gguf": ["f32"]}, "model_id": "toy"}
    bundle = builder.build(TOYS[toy](tmp_path / "checkpoint"), tmp_path / "b", **options)
    # Every row of the golden file is <s> 5 6 7 </s></s> document </s>.
    documents = [row[6:-1] for row in rows(GOLDENS, toy)]
    logits = serve(bundle.root, lambda host: host.rerank_ids("toy", [5, 6, 7], documents, raw=True))
    assert np.abs(logits - GOLDENS[f"{toy}.out"][:, 0]).max() < 10 * ENGINES[format][1]


@pytest.mark.llama
def test_dense_layers_come_behind_the_pooling_of_every_engine(tmp_path: Path) -> None:
    checkpoint = toy_models.write_bert(tmp_path / "c", normalize=False)
    ids = [[2, 9, 11, 3], [2, 7, 3], [2, *range(5, 25), 3]]
    options: dict[str, Any] = {"dtypes": {format: ["f32"] for format in ENGINES}, "model_id": "toy"}

    def vectors(name: str, format: str) -> Any:
        bundle = builder.build(checkpoint, tmp_path / name, formats=[format], **options)
        assert builder.verify(bundle) == []
        return serve(bundle.root, lambda host: host.embed_ids("toy", ids))

    pooled = {format: vectors(f"plain-{format}", format).astype(float) for format in ENGINES}
    _, w1, b1 = toy_models.write_dense(checkpoint / "2_Dense", 64, 16, "Tanh", seed=1)
    _, w2, b2 = toy_models.write_dense(checkpoint / "3_Dense", 16, 80, "Identity", seed=2)
    sizes = {"hidden_size": 64, "max_position_embeddings": 64}
    toy_models.sentence_files(checkpoint, sizes, "mean", True, dense=2)
    for format in ENGINES:
        expected = np.tanh(pooled[format] @ w1.T + b1) @ w2.T + b2
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
        found = vectors(format, format)
        assert found.shape == (3, 80) and np.abs(found - expected).max() < 1e-5, format


@pytest.mark.parametrize("write", TOYS.values())
def test_a_format_is_refused_exactly_where_its_engine_lacks_the_family(tmp_path: Path, write: Any) -> None:
    opened = Checkpoint.open(write(tmp_path / "c"))
    family, task = opened.family, opened.task
    lacking = {"coreml"} if not serves(family, task) else set()
    lacking |= {"safetensors-package"} if task == "generate" or family not in graphs.FAMILIES else set()
    lacking |= {"gguf"} if family not in convert.FAMILIES or (family, task) == ("qwen3", "rerank") else set()
    assert set(opened.known.unheld(task)) == lacking < set(FORMATS)


GEMMA, GTE = toy_families.write_gemma, toy_families.write_gte_qwen2


def test_a_prompt_and_two_dense_modules_are_embedding_gemma_s(tmp_path: Path) -> None:
    bundle = builder.build(GEMMA(tmp_path / "c"), tmp_path / "b", formats=["gguf"], dtypes={}, model_id="toy")
    assert (bundle.manifest.dims, bundle.manifest.worker_dims, bundle.manifest.max_tokens) == (48, 64, 200)

    async def work(host: Host) -> None:
        prompted = await host.embed("toy", ["cat"], prompt="query")
        assert np.allclose(prompted, await host.embed("toy", ["task: search result | query: cat"]), atol=1e-6)
        assert not np.allclose(prompted, await host.embed("toy", ["cat"]), atol=1e-2)

    serve(bundle.root, work)


def test_gte_qwen2_s_end_of_text_is_added_and_said(tmp_path: Path) -> None:
    """Its tokenizer.json adds none, the code that comes with it does: without it another token would be pooled."""
    checkpoint = GTE(tmp_path / "c")
    bundle = builder.build(checkpoint, tmp_path / "b", formats=["gguf"], dtypes={}, model_id="toy")
    notes = facts.of_checkpoint(Checkpoint.open(checkpoint)).notes
    assert any("'<|endoftext|>' is put behind every text" in note for note in notes)
    assert builder.verify(bundle) == []
    bare = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode("yes").ids
    assert TextTokenizer(bundle).rows(["yes"]).ids.tolist() == [*bare, 0]
    # A file that adds it already stays as it is.
    (checkpoint / "tokenizer.json").write_bytes((bundle.root / "tokenizer.json").read_bytes())
    assert tokenizer.with_end(checkpoint) is None
    toy_models.edit(checkpoint / "tokenizer_config.json", eos_token="<|none|>")
    with pytest.raises(CheckpointError, match=r"eos_token '<\|none\|>' is no token"):
        tokenizer.with_end(checkpoint)
