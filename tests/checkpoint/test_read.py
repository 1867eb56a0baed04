"""Opening checkpoints of every family, and every way in which one can be wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.bundle.manifest import BundleError
from engines.checkpoint import facts, layout, safetensors
from engines.checkpoint.package import write_package
from engines.checkpoint.read import Checkpoint, CheckpointError, complete_config, guess_task, plain_numbers
from tests.support import toy_families, toy_models


def rewrite(folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    file = folder / "model.safetensors"
    opened = safetensors.SafetensorsFile.open(file)
    tensors = {name: opened.array(name).copy() for name in opened.header.tensors}
    change(tensors)
    safetensors.write(file, tensors)


EXPECTED = {
    "bert": ("bert", "embed"),
    "bert-rerank": ("bert", "rerank"),
    "modernbert": ("modernbert", "embed"),
    "modernbert-rerank": ("modernbert", "rerank"),
    "modernbert-rerank-cls": ("modernbert", "rerank"),
    "qwen3": ("qwen3", "embed"),
    "qwen3-rerank": ("qwen3", "rerank"),
    "qwen3-generate": ("qwen3", "generate"),
    "llama-generate": ("llama", "generate"),
}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_toy_opens_under_canonical_names(tmp_path: Path, name: str) -> None:
    checkpoint = Checkpoint.open(toy_models.TOYS[name](tmp_path / name))
    assert (checkpoint.family, checkpoint.task) == EXPECTED[name]
    shapes = layout.required(checkpoint.family, checkpoint.task, checkpoint.config)
    weights = toy_models.random_weights(shapes, 0)
    assert list(checkpoint.tensors) == list(shapes)
    for key in shapes:
        np.testing.assert_array_equal(checkpoint.f32(key), weights[key])
    assert checkpoint.stored_dtype == "f32"
    assert checkpoint.nbytes == sum(array.nbytes for array in weights.values())


@pytest.mark.parametrize(
    ("architecture", "files", "task"),
    [
        ("Qwen3ForCausalLM", [], "generate"),
        ("Qwen3Model", [], "embed"),
        ("Qwen3ForCausalLM", ["modules.json"], "embed"),
        ("Qwen3ForCausalLM", ["1_Pooling/config.json"], "embed"),
        ("Qwen3ForCausalLM", ["modules.json", "1_LogitScore/config.json"], "rerank"),
        ("Qwen3ForSequenceClassification", ["modules.json"], "rerank"),
    ],
)
def test_the_task_of_a_decoder_is_told_by_the_files_beside_it(
    tmp_path: Path, architecture: str, files: list[str], task: str
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert guess_task({"architectures": [architecture]}, "qwen3", tmp_path) == task


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    whole = Checkpoint.open(toy_models.write_qwen3(tmp_path / "whole", seed=5))
    parts = Checkpoint.open(toy_models.write_qwen3(tmp_path / "parts", seed=5, shards=3))
    assert not (tmp_path / "parts" / "model.safetensors").exists()
    assert list(whole.tensors) == list(parts.tensors)
    for name in whole.tensors:
        np.testing.assert_array_equal(whole.tensors[name], parts.tensors[name])
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) == 3


def test_opening_reads_no_weights(tmp_path: Path) -> None:
    """A header with huge claims over a sparse file opens at once: only sizes are looked at."""
    folder = toy_models.write_bert(tmp_path / "m")
    toy_models.edit(folder / "config.json", vocab_size=4_000_000)
    opened = safetensors.SafetensorsFile.open(folder / "model.safetensors")
    header, position = {}, 0
    for name, info in opened.header.tensors.items():
        shape = [4_000_000, 64] if "word_embeddings" in name else list(info.shape)
        end = position + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)
    assert Checkpoint.open(folder).nbytes == position > 1_000_000_000


def test_old_layer_norm_names_and_training_heads(tmp_path: Path) -> None:
    folder = toy_models.write_bert(tmp_path / "m")

    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["embeddings.LayerNorm.gamma"] = tensors.pop("embeddings.LayerNorm.weight")
        tensors["embeddings.LayerNorm.beta"] = tensors.pop("embeddings.LayerNorm.bias")
        tensors["embeddings.position_ids"] = np.arange(64, dtype=np.int64)
        tensors["cls.predictions.bias"] = np.zeros(128, np.float32)
        tensors["pooler.dense.weight"] = np.zeros((64, 64), np.float32)

    rewrite(folder, change)
    checkpoint = Checkpoint.open(folder)
    assert "embeddings.LayerNorm.weight" in checkpoint.tensors
    assert "pooler.dense.weight" not in checkpoint.tensors


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("encoder.layer.1.output.dense.bias"), ["encoder.layer.1.output.dense.bias", "missing"]),
        (
            lambda t: t.update({"embeddings.LayerNorm.weight": np.zeros(63, np.float32)}),
            ["embeddings.LayerNorm.weight", "[63]", "[64]"],
        ),
        (
            lambda t: t.update({"embeddings.LayerNorm.weight": np.zeros(64, np.int64)}),
            ["embeddings.LayerNorm.weight", "I64"],
        ),
        (
            lambda t: t.update({"bert.embeddings.LayerNorm.weight": np.zeros(64, np.float32)}),
            ["same tensor", "embeddings.LayerNorm.weight"],
        ),
        (
            lambda t: t.update({"encoder.layer.2.output.dense.bias": np.zeros(64, np.float32)}),
            ["encoder.layer.2.output.dense.bias", "not part of"],
        ),
    ],
)
def test_a_wrong_tensor_is_named_with_its_file(
    tmp_path: Path, change: Callable[[dict[str, np.ndarray]], None], words: list[str]
) -> None:
    folder = toy_models.write_bert(tmp_path / "m")
    rewrite(folder, change)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    for word in [*words, "model.safetensors"]:
        assert word in str(caught.value)


BERT, QWEN3, LLAMA = toy_models.write_bert, toy_models.write_qwen3, toy_models.write_llama
MPNET, GEMMA, NOMIC = toy_families.write_mpnet, toy_families.write_gemma, toy_families.write_nomic
GTE, QWEN2 = toy_families.write_gte_qwen2, toy_models.TOYS["qwen2"]


def roberta(folder: Path) -> Path:
    return toy_models.write_relative(folder, "roberta")


def distilbert(folder: Path) -> Path:
    return toy_models.write_relative(folder, "distilbert")


@pytest.mark.parametrize(
    ("write", "change", "says"),
    [
        (BERT, {"hidden_size": 0}, "hidden_size"),
        (BERT, {"hidden_size": "64"}, "hidden_size"),
        (BERT, {"hidden_size": True}, "hidden_size"),
        (BERT, {"num_hidden_layers": 100000}, "num_hidden_layers"),
        (BERT, {"vocab_size": -5}, "vocab_size"),
        (BERT, {"num_attention_heads": 5}, "num_attention_heads"),
        (BERT, {"num_attention_heads": 65}, "head_dim"),
        (BERT, {"layer_norm_eps": "x"}, "layer_norm_eps"),
        (BERT, {"layer_norm_eps": float("inf")}, "layer_norm_eps"),
        (BERT, {"hidden_act": "relu"}, "hidden_act"),
        (BERT, {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        (BERT, {"rope_scaling": {"type": "yarn"}}, "rope_type"),
        (QWEN3, {"use_sliding_window": True}, "use_sliding_window"),
        (QWEN3, {"num_key_value_heads": 3}, "num_key_value_heads"),
        (QWEN3, {"attention_bias": "no"}, "attention_bias"),
        (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        (QWEN3, {"hidden_act": "gelu"}, "hidden_act"),
        (QWEN3, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type"),
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
        (LLAMA, {"is_causal": False}, "is_causal: false is for embedders"),
        (BERT, {"is_causal": True}, "is_causal"),
        (QWEN2, {"model_type": "mistral", "sliding_window": 256}, "sliding_window: 256"),
        (QWEN2, {"auto_map": {"AutoModel": "modeling_qwen.Qwen2Model"}}, "auto_map: its own code"),
        (QWEN2, {"head_dim": 32}, "head_dim: times num_attention_heads"),
        (QWEN2, {"architectures": ["Qwen2ForSequenceClassification"]}, "a qwen2 reranker isn't served"),
    ],
)
def test_a_key_that_changes_the_forward_pass_is_refused_by_name(
    tmp_path: Path, write: Callable[..., Path], change: dict[str, Any], says: str
) -> None:
    folder = toy_models.edit(write(tmp_path / "m") / "config.json", **change)
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


BASE = {
    "vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 4,
    "num_attention_heads": 2, "max_position_embeddings": 16,
}  # fmt: skip
DECODER = {
    "head_dim": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "attention_bias": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("bert", {"head_dim": 4, "type_vocab_size": 2, "layer_norm_eps": 1e-12}),
        ("modernbert", {
            "head_dim": 4, "norm_eps": 1e-5, "norm_bias": False, "attention_bias": False, "mlp_bias": False,
            "classifier_bias": False, "classifier_pooling": "cls", "local_attention": 128,
            "global_rope_theta": 160000.0, "local_rope_theta": 10000.0,
            "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
        }),
        ("qwen3", DECODER | {"tie_word_embeddings": False}),
        ("llama", DECODER | {"tie_word_embeddings": False}),
    ],
)  # fmt: skip
def test_what_a_config_leaves_out_has_the_family_s_default(family: Any, expected: dict[str, Any]) -> None:
    config = complete_config({**BASE, "num_key_value_heads": None}, family, where="x")
    assert {key: config[key] for key in expected} == expected


def test_both_spellings_of_rope_settings_mean_the_same() -> None:
    old = complete_config(
        {**BASE, "global_rope_theta": 5e5, "local_rope_theta": 2e4, "global_attn_every_n_layers": 2},
        "modernbert",
        where="x",
    )
    kinds = ["full_attention", "sliding_attention"] * 2
    rope = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 2e4, "rope_type": "default"}}
    new = complete_config({**BASE, "layer_types": kinds, "rope_parameters": rope}, "modernbert", where="x")
    for key in ("global_rope_theta", "local_rope_theta", "layer_types"):
        assert old[key] == new[key]
    qwen = complete_config({**BASE, "rope_parameters": {"rope_theta": 1e6}}, "qwen3", where="x")
    assert qwen["rope_theta"] == 1e6
    with pytest.raises(CheckpointError, match="layer_types"):
        complete_config({**BASE, "layer_types": ["full_attention"]}, "modernbert", where="x")


def test_files_that_are_missing_or_alien(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        Checkpoint.open(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Checkpoint.open(tmp_path)
    folder = toy_models.write_bert(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickle and is never opened"):
        Checkpoint.open(folder)
    (folder / "config.json").write_text('{"model_type": "bert", "model_type": "bert"}')
    with pytest.raises(CheckpointError, match="twice"):
        Checkpoint.open(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("shard", "words"),
    [
        *((shard, "must be a file beside it") for shard in ("../x.safetensors", "/etc/passwd", "a/b", "..", "")),
        ("model-1-of-2.safetensors", "the index says it is here"),
    ],
)
def test_a_shard_index_stays_beside_itself_and_says_the_truth(tmp_path: Path, shard: str, words: str) -> None:
    folder = toy_models.write_bert(tmp_path / "m", shards=2)
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"] | {"embeddings.LayerNorm.bias": shard}
    toy_models.edit(index, weight_map=weight_map)
    with pytest.raises(CheckpointError, match=words):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("bert", "f32"), ("bert-rerank", "f16"), ("modernbert-rerank", "bf16"), ("qwen3", "f16"), ("qwen3-rerank", "f32")],
)
def test_a_package_is_the_checkpoint_again(tmp_path: Path, name: str, dtype: str) -> None:
    checkpoint = Checkpoint.open(toy_models.TOYS[name](tmp_path / name))
    out = tmp_path / "p.safetensors"
    size = write_package(checkpoint, out, profile="toy.owned-cuda", dtype=dtype)
    assert size == out.stat().st_size
    assert safetensors.SafetensorsFile.open(out).header.metadata == {
        "format": "pt", "profile": "toy.owned-cuda", "family": checkpoint.family, "task": checkpoint.task,
        "dtype": dtype,
    }  # fmt: skip
    config = json.loads(json.dumps(plain_numbers(checkpoint.config)))
    fd = os.open(out, os.O_RDONLY)
    try:
        again = Checkpoint.from_package(out, config=config, family=checkpoint.family, task=checkpoint.task, fd=fd)
    finally:
        os.close(fd)
    assert again.stored_dtype == dtype
    assert list(again.tensors) == list(checkpoint.tensors)
    tolerance = {"f32": 0.0, "f16": 1e-3, "bf16": 8e-3}[dtype]
    for key in checkpoint.tensors:
        np.testing.assert_allclose(again.f32(key), checkpoint.f32(key), rtol=tolerance, atol=1e-6 if tolerance else 0)
    for key in ("layer_norm_eps", "norm_eps", "rms_norm_eps", "rope_theta", "global_rope_theta"):
        assert again.config.get(key) == checkpoint.config.get(key)


def test_a_package_of_another_model_is_refused(tmp_path: Path) -> None:
    embed = Checkpoint.open(toy_models.write_bert(tmp_path / "m"))
    write_package(embed, tmp_path / "p", profile="x")
    for task, layers, words in (("rerank", 2, "pooler"), ("embed", 1, "not part of")):
        config = {**embed.config, "num_hidden_layers": layers}
        with pytest.raises(CheckpointError, match=words):
            Checkpoint.from_package(tmp_path / "p", config=config, family="bert", task=task)


def test_what_cannot_be_packaged_leaves_no_file(tmp_path: Path) -> None:
    folder = toy_models.write_bert(tmp_path / "m")
    rewrite(folder, lambda tensors: tensors["embeddings.word_embeddings.weight"].__setitem__((0, 0), 1e6))
    with pytest.raises(BundleError, match="word_embeddings"):
        write_package(Checkpoint.open(folder), tmp_path / "p", profile="x", dtype="f16")
    assert not list(tmp_path.glob("p*"))
    write_package(Checkpoint.open(folder), tmp_path / "p", profile="x", dtype="bf16")
    generator = Checkpoint.open(toy_models.write_llama(tmp_path / "g"))
    with pytest.raises(BundleError, match="gguf"):
        write_package(generator, tmp_path / "q", profile="x")


def test_numbers_in_a_manifest_and_back() -> None:
    config = {"layer_norm_eps": 1e-12, "rope_theta": 1000000.0, "dropout": 0.1, "x": None, "n": 3, "l": [1.5, True]}
    plain = plain_numbers(config)
    assert plain == {"layer_norm_eps": "1e-12", "rope_theta": "1000000.0", "dropout": "0.1", "n": 3, "l": ["1.5", True]}
    stored = plain_numbers(complete_config({**BASE, "rope_theta": 5e5, "local_attention": 64}, "qwen3", where="x"))
    assert stored["rope_theta"] == "500000.0"
    again = complete_config(stored, "qwen3", where="x", from_manifest=True)
    assert (again["rms_norm_eps"], again["rope_theta"]) == (1e-6, 5e5)
    for wrong in ({"rope_theta": "fast"}, {"hidden_size": "64.5"}, {"attention_bias": "perhaps"}):
        with pytest.raises(CheckpointError, match=next(iter(wrong))):
            complete_config({**stored, **wrong}, "qwen3", where="x", from_manifest=True)
    modern = complete_config({**BASE, "local_attention": "128.0"}, "modernbert", where="x", from_manifest=True)
    assert modern["local_attention"] == 128


NAN, INF = float("nan"), float("inf")
STRANGE = [None, True, -1, 0, 0.5, 10**400, 2**63, NAN, INF, "x", [], [1], [[]], {}, {"a": 1}, {"a": []}]


@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3", "qwen2", "llama", "mistral"])
def test_whatever_stands_in_a_config_is_served_or_refused_by_key(family: Any) -> None:
    """What a manifest's config holds reaches a worker: any other exception there ends it."""
    keys = [*complete_config(BASE, family, where="x"), "rope_parameters", "rope_scaling", "use_sliding_window"]
    changes = [{key: value} for key in [*keys, "architectures"] for value in STRANGE]
    changes += [{"rope_parameters": {"full_attention": value}} for value in STRANGE]
    served = 0
    for change in changes:
        try:
            config = complete_config({**BASE, **change}, family, where="x")
        except CheckpointError:
            continue
        served += 1
        for key, value in config.items():
            if key not in change or key.endswith(("eps", "theta")):
                assert not isinstance(value, int | float) or abs(float(value)) < 2**64, (key, change)
    assert served > len(STRANGE)  # what nobody reads may be anything
