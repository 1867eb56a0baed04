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
    options: dict[str, Any] = {"formats": [format], "dtypes": {format: ["f32"]}, "model_id": "toy"}
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


MPNET, GEMMA, NOMIC = toy_families.write_mpnet, toy_families.write_gemma, toy_families.write_nomic
GTE = toy_families.write_gte_qwen2


def roberta(folder: Path) -> Path:
    return toy_models.write_relative(folder, "roberta")


def distilbert(folder: Path) -> Path:
    return toy_models.write_relative(folder, "distilbert")


@pytest.mark.parametrize(
    ("write", "change", "says"),
    [
        (MPNET, {"relative_attention_num_buckets": 64}, "relative_attention_num_buckets"),
        (MPNET, {"hidden_act": "relu"}, "hidden_act"),
        (MPNET, {"max_position_embeddings": 2}, "max_position_embeddings"),
        (MPNET, {"architectures": ["MPNetForTokenClassification"], "is_decoder": True}, "is_decoder"),
        (GEMMA, {"use_bidirectional_attention": False}, "use_bidirectional_attention: .*from its GGUF"),
        (GEMMA, {"use_bidirectional_attention": None}, "use_bidirectional_attention"),
        (GEMMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (GEMMA, {"attention_bias": True}, "attention_bias"),
        (GEMMA, {"hidden_activation": "gelu"}, "hidden_activation"),
        (GEMMA, {"layer_types": ["full_attention"]}, "layer_types"),
        (GEMMA, {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "rope_type"),
        (GEMMA, {"architectures": ["Gemma3ForSequenceClassification"]}, "gemma3_text reranker"),
        (NOMIC, {"prenorm": True}, "prenorm"),
        (NOMIC, {"causal": True}, "causal"),
        (NOMIC, {"activation_function": "gelu"}, "activation_function"),
        (NOMIC, {"rotary_emb_interleaved": True}, "rotary_emb_interleaved"),
        (NOMIC, {"rotary_emb_fraction": 0.5}, "rotary_emb_fraction"),
        (NOMIC, {"num_experts": 8, "moe_every_n_layers": 2}, "moe_every_n_layers"),
        (NOMIC, {"qkv_proj_bias": True}, "qkv_proj_bias"),
        (NOMIC, {"hidden_act": "gelu"}, "hidden_act"),
        (NOMIC, {"rotary_emb_base": 1000}, "rotary_emb_base: 1000 contradicts rope_theta"),
        (NOMIC, {"n_inner": 64}, "n_inner: 64 contradicts intermediate_size 96"),
        (NOMIC, {"head_scale": 2.0}, "'head_scale' isn't known"),
        (NOMIC, {"architectures": ["NomicBertForSequenceClassification"]}, "nomic_bert reranker"),
        (GTE, {"is_causal": None}, "auto_map: .*say is_causal true or false"),
        (GTE, {"is_causal": "no"}, "is_causal"),
        (GTE, {"use_sliding_window": True}, "use_sliding_window"),
        (distilbert, {"architectures": ["DistilBertForSequenceClassification"]}, "its head isn't BERT's"),
        (distilbert, {"activation": "relu"}, "hidden_act"),
        (roberta, {"architectures": ["RobertaForCausalLM"], "is_decoder": True}, "is_decoder"),
        (roberta, {"max_position_embeddings": 2}, "max_position_embeddings"),
        (roberta, {"pad_token_id": "one"}, "pad_token_id"),
        (roberta, {"model_type": "electra"}, "model_type 'electra' is not supported: .* distilbert.*MODEL.gguf"),
        (roberta, {"model_type": "phi3"}, "joined projections .*supported: bert, .*nomic_bert.*MODEL.gguf"),
        (toy_models.write_llama, {"is_causal": False}, "is_causal: false is for embedders"),
        (toy_models.write_bert, {"is_causal": True}, "is_causal"),
    ],
)
def test_a_key_that_changes_the_forward_pass_is_refused_by_name(
    tmp_path: Path, write: Any, change: dict[str, Any], says: str
) -> None:
    folder = toy_models.edit(write(tmp_path / "c") / "config.json", **change)
    with pytest.raises(CheckpointError, match=says):
        facts.of_checkpoint(Checkpoint.open(folder))


@pytest.mark.parametrize("words", [("published",), ("transformers",)])
def test_either_spelling_of_nomic_s_config_says_the_same(tmp_path: Path, words: tuple[str, ...]) -> None:
    both, one = (Checkpoint.open(NOMIC(tmp_path / name, **how)) for name, how in (("a", {}), ("b", {"words": words})))
    assert one.known == both.known and facts.of_checkpoint(one).max_tokens == 200


def test_gemma_s_layers_are_known_by_their_number_where_no_list_names_them(tmp_path: Path) -> None:
    file = GEMMA(tmp_path / "c") / "config.json"
    for pattern, kinds in ((2, ["sliding", "full", "sliding"]), (6, ["sliding"] * 3)):
        folder = toy_models.edit(file, layer_types=None, sliding_window_pattern=pattern)
        assert Checkpoint.open(folder).config["layer_types"] == [f"{kind}_attention" for kind in kinds]


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
