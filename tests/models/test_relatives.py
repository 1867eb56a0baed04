"""Models that are read as BERT compute what transformers does (tests/goldens/toys.npz), on every engine here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.checkpoint.families.relatives import RELATIVES
from engines.checkpoint.read import CheckpointError
from synapse_host.errors import BundleInvalid
from synapse_host.host import Host
from synapse_host.models import builder
from tests.support import toy_models
from tests.support.served import ENGINES, rows, serve

pytestmark = pytest.mark.process
GOLDENS = np.load(Path(__file__).parents[1] / "goldens" / "toys.npz")


@pytest.mark.llama
@pytest.mark.parametrize("format", sorted(ENGINES))
@pytest.mark.parametrize("toy", ["roberta", "distilbert"])
def test_vectors_are_those_of_transformers(tmp_path: Path, toy: str, format: str) -> None:
    engine, error = ENGINES[format]
    checkpoint = toy_models.TOYS[toy](tmp_path / "checkpoint")
    bundle = builder.build(checkpoint, tmp_path / "b", formats=[format], dtypes={format: ["f32"]}, model_id="toy")
    assert (bundle.manifest.family, bundle.manifest.max_tokens) == ("bert", 64)

    async def work(host: Host) -> None:
        assert host.lane_of("toy").require().engine_id == engine
        assert np.abs(await host.embed_ids("toy", rows(GOLDENS, toy)) - GOLDENS[f"{toy}.out"]).max() < error

    serve(bundle.root, work)


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
    modules = json.loads((checkpoint / "modules.json").read_text())
    for number, kind in ((2, "Dense"), (3, "Dense"), (4, "Normalize")):
        modules.append({"idx": number, "path": f"{number}_{kind}", "type": f"sentence_transformers.models.{kind}"})
    (checkpoint / "modules.json").write_text(json.dumps(modules))
    for format in ENGINES:
        expected = np.tanh(pooled[format] @ w1.T + b1) @ w2.T + b2
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
        found = vectors(format, format)
        assert found.shape == (3, 80) and np.abs(found - expected).max() < 1e-5, format


@pytest.mark.llama
def test_pairs_have_the_template_of_their_kind(tmp_path: Path) -> None:
    """``<s> query </s></s> document </s>`` on either engine; BERT's template gives other, plausible scores."""
    checkpoint = toy_models.TOYS["roberta-rerank"](tmp_path / "checkpoint")
    # Every row of the golden file is <s> 5 6 7 </s></s> document </s>.
    documents = [row[6:-1] for row in rows(GOLDENS, "roberta-rerank")]
    for format, (_, error) in ENGINES.items():
        dtypes = {format: ["f32"]}
        bundle = builder.build(checkpoint, tmp_path / format, formats=[format], dtypes=dtypes, model_id="toy")
        logits = serve(bundle.root, lambda host: host.rerank_ids("toy", [5, 6, 7], documents, raw=True))
        assert np.abs(logits - GOLDENS["roberta-rerank.out"][:, 0]).max() < 10 * error, format


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("distilbert", {"architectures": ["DistilBertForSequenceClassification"]}, "its head isn't BERT's"),
        ("roberta", {"architectures": ["RobertaForCausalLM"], "is_decoder": True}, "is_decoder"),
        ("roberta", {"max_position_embeddings": 2}, "max_position_embeddings"),
        ("roberta", {"pad_token_id": "one"}, "pad_token_id"),
        ("distilbert", {"activation": "relu"}, "hidden_act"),
        ("electra", {}, "model_type 'electra' is not supported: .* distilbert.*MODEL.gguf"),
        ("phi3", {}, "joined projections .*supported: bert, .*nomic_bert.*MODEL.gguf"),
    ],
)
def test_what_isn_t_bert_is_refused_by_its_key(tmp_path: Path, kind: str, change: dict[str, Any], says: str) -> None:
    folder = toy_models.write_relative(tmp_path / "c", kind if kind in RELATIVES else "roberta")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": kind, **change}))
    with pytest.raises((CheckpointError, BundleInvalid), match=says):
        builder.build(folder, tmp_path / "b", formats=["safetensors-package"], dtypes={}, model_id="toy")
    assert not (tmp_path / "b").exists()
