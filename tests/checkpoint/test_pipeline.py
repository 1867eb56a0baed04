"""What the files beside a checkpoint's weights say: each key is followed, known as harmless, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.checkpoint import facts
from engines.checkpoint.read import Checkpoint, CheckpointError
from tests.support import toy_models

ST = "sentence_transformers.models."
TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": ST + "Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": ST + "Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": ST + "Normalize"}
DENSE = {"idx": 2, "name": "2", "path": "2_Dense", "type": ST + "Dense"}


def known(folder: Path, **options: Any) -> facts.Facts:
    return facts.of_checkpoint(Checkpoint.open(folder, **options))


def merged(file: Path, value: Any) -> None:
    """Write *value*; an object is laid over what is there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    there = json.loads(file.read_text()) if file.exists() else None
    if isinstance(value, dict) and isinstance(there, dict):
        value = there | value
    file.write_text(json.dumps(value))


EMBEDDER, CROSS, GENERATOR = (
    toy_models.write_bert,
    lambda folder: toy_models.write_bert(folder, cross_encoder=True),
    toy_models.write_llama,
)
Write = Callable[..., Path]
TEXT = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}


@pytest.mark.parametrize(
    ("write", "file", "value", "words"),
    [
        # A module that would be left out of every vector (vllm#15509, text-embeddings-inference#732).
        (EMBEDDER, "modules.json", [TRANSFORMER, DENSE, POOLING], "module 1 is a Dense after Transformer"),
        (EMBEDDER, "modules.json", [TRANSFORMER, POOLING, NORMALIZE, DENSE], "module 3 is a Dense"),
        (EMBEDDER, "modules.json", [TRANSFORMER, POOLING, {**DENSE, "type": "pylate.models.Dense"}], "Dense"),
        (EMBEDDER, "modules.json", [TRANSFORMER, POOLING, {**DENSE, "type": ST + "LayerNorm"}], "LayerNorm"),
        (EMBEDDER, "modules.json", [TRANSFORMER, NORMALIZE, POOLING], "Normalize"),
        (EMBEDDER, "modules.json", [TRANSFORMER, POOLING, {**POOLING, "path": "3_Pooling"}], "Pooling"),
        (EMBEDDER, "modules.json", [{**TRANSFORMER, "type": ST + "StaticEmbedding"}, POOLING], "StaticEmbedding"),
        (EMBEDDER, "modules.json", [{**TRANSFORMER, "path": "0_Transformer"}, POOLING], "0_Transformer"),
        (EMBEDDER, "modules.json", [TRANSFORMER, {**POOLING, "path": "../other"}], "folder beside it"),
        (EMBEDDER, "modules.json", {"0": TRANSFORMER}, "list of objects"),
        (EMBEDDER, "modules.json", [TRANSFORMER, 7], "list of objects"),
        (EMBEDDER, "modules.json", [TRANSFORMER, {**POOLING, "type": 7}], "module 1 has no type"),
        (EMBEDDER, "modules.json", [TRANSFORMER, {**POOLING, "type": "mine.Pooling"}], "mine.Pooling"),
        (EMBEDDER, "modules.json", [TRANSFORMER, {**POOLING, "kwargs": ["task"]}], "kwargs"),
        (EMBEDDER, "modules.json", [TRANSFORMER, {**POOLING, "weight": 2}], "'weight'"),
        (EMBEDDER, "2_Normalize/config.json", {"module_input_name": "token_embeddings"}, "module_input_name"),
        (EMBEDDER, "2_Normalize/config.json", {"p": 1}, "'p'"),
        (EMBEDDER, "1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        (EMBEDDER, "1_Pooling/config.json", {"pooling_mode_mean_sqrt_len_tokens": True}, "mean_sqrt_len"),
        (EMBEDDER, "1_Pooling/config.json", {"pooling_mode_cls_token": True}, "mean_tokens.*cls_token"),
        (EMBEDDER, "1_Pooling/config.json", {"pooling_mode_mean_tokens": False}, "pooling none"),
        (EMBEDDER, "1_Pooling/config.json", {"layer_weights": [1, 2]}, "layer_weights"),
        (EMBEDDER, "1_Pooling/config.json", {"pooling_mode": "cls"}, "mean_tokens"),
        (toy_models.write_modernbert, "sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case"),
        (EMBEDDER, "sentence_bert_config.json", {"truncate_dim": 32}, "truncate_dim"),
        (EMBEDDER, "sentence_bert_config.json", {"transformer_task": "fill-mask"}, "transformer_task"),
        (EMBEDDER, "sentence_bert_config.json", {"module_output_name": "sentence_embedding"}, "module_output_name"),
        (EMBEDDER, "sentence_bert_config.json", {"modality_config": {**TEXT, "message": TEXT["text"]}}, "message"),
        (EMBEDDER, "sentence_bert_config.json", {"tokenizer_args": {"do_lower_case": True}}, "do_lower_case"),
        (EMBEDDER, "sentence_bert_config.json", {"query_length": 32}, "query_length"),
        (
            EMBEDDER,
            "config_sentence_transformers.json",
            {"prompts": {"query": "query: "}, "default_prompt_name": "passage"},
            "'passage' is none of the prompts 'query'",
        ),
        (EMBEDDER, "config_sentence_transformers.json", {"prompts": {"query": 7}}, "names to texts"),
        (EMBEDDER, "config_sentence_transformers.json", {"truncate_dim": 0}, "truncate_dim"),
        (EMBEDDER, "adapter_config.json", {"peft_type": "LORA"}, "merge_and_unload"),
        (EMBEDDER, "config.json", {"is_decoder": True}, "is_decoder"),
        (EMBEDDER, "config.json", {"is_encoder_decoder": True}, "is_encoder_decoder"),
        (EMBEDDER, "config.json", {"pruned_heads": {"0": [1]}}, "pruned_heads"),
        (EMBEDDER, "config.json", {"embedding_multiplier": 12.0}, "embedding_multiplier"),
        (EMBEDDER, "config.json", {"quantization_config": {"bits": 4}}, "quantization_config"),
        (EMBEDDER, "tokenizer_config.json", {"tokenizer_class": "BertTokenizer", "do_lower_case": False}, "lower"),
        (CROSS, "config.json", {"sbert_ce_default_activation_function": "torch.nn.Softplus"}, "Softplus"),
        (CROSS, "config_sentence_transformers.json", {"activation_fn": "torch.nn.Softplus"}, "Softplus"),
        (CROSS, "config_sentence_transformers.json", {"prompts": {"q": "x"}, "default_prompt_name": "q"}, "prompt"),
        (GENERATOR, "config.json", {"rope_interleaved": True}, "rope_interleaved"),
        (GENERATOR, "config.json", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        (GENERATOR, "generation_config.json", {"suppress_tokens": [5]}, "suppress_tokens"),
        (GENERATOR, "generation_config.json", {"min_new_tokens": 4}, "min_new_tokens"),
        (GENERATOR, "generation_config.json", {"sequence_bias": [[[5], -1.0]]}, "sequence_bias"),
        (GENERATOR, "generation_config.json", {"guidance_scale": 2.0}, "guidance_scale"),
        (GENERATOR, "generation_config.json", {"end_of_turn": "x"}, "'end_of_turn'"),
        (GENERATOR, "generation_config.json", {"eos_token_id": [0, 99999]}, "99999"),
        (GENERATOR, "tokenizer_config.json", {"chat_template": [{"name": "tools", "template": "x"}]}, "default"),
    ],
)
def test_what_would_change_a_number_is_refused_by_name(
    tmp_path: Path, write: Write, file: str, value: Any, words: str
) -> None:
    folder = write(tmp_path / "m")
    known(folder)
    merged(folder / file, value)
    with pytest.raises(CheckpointError, match=words) as caught:
        known(folder)
    assert file.rpartition("/")[2] in str(caught.value), "the message names the file"


def test_a_tokenizer_in_another_form_is_refused_with_the_way_to_convert_it(tmp_path: Path) -> None:
    folder = toy_models.write_bert(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    known(folder)  # none at all: the bundle takes ids
    (folder / "vocab.txt").write_text("[PAD]\n")
    with pytest.raises(CheckpointError, match="save_pretrained"):
        known(folder)


@pytest.mark.parametrize(
    ("write", "file", "value", "expected"),
    [
        (EMBEDDER, "modules.json", [TRANSFORMER, POOLING], {"normalize": False}),
        (EMBEDDER, "modules.json", [TRANSFORMER, POOLING, NORMALIZE], {"normalize": True}),
        (EMBEDDER, "config_sentence_transformers.json", {}, {"prompts": {}, "default_prompt": None}),
        (
            EMBEDDER,
            "config_sentence_transformers.json",
            {"prompts": {"query": "q: ", "document": ""}, "default_prompt_name": "query"},
            {"prompts": {"query": "q: ", "document": ""}, "default_prompt": "query"},
        ),
        (EMBEDDER, "config_sentence_transformers.json", {"truncate_dim": 16}, {"truncate_dim": 16, "dims": 64}),
        (EMBEDDER, "config_sentence_transformers.json", {"truncate_dim": 64}, {"truncate_dim": None}),
        (
            EMBEDDER,
            "sentence_bert_config.json",
            {
                "transformer_task": "feature-extraction",
                "modality_config": TEXT,
                "module_output_name": "token_embeddings",
            }
            | {"unpad_inputs": True, "tokenizer_args": {"trust_remote_code": True}},
            {"max_tokens": 64},
        ),
        (EMBEDDER, "tokenizer_config.json", {"model_max_length": 32}, {"max_tokens": 32}),
        (EMBEDDER, "tokenizer_config.json", {"model_max_length": 10**30}, {"max_tokens": 64}),
        (EMBEDDER, "config.json", {"transformers_version": "9", "use_cache": True, "torch_dtype": "float16"}, {}),
        (CROSS, "config.json", {}, {"score": "sigmoid"}),
        (CROSS, "config.json", {"sbert_ce_default_activation_function": "torch.nn.Sigmoid"}, {"score": "sigmoid"}),
        (
            CROSS,
            "config.json",
            {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
            {"score": "identity"},
        ),
        (
            CROSS,
            "config.json",
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.1.0"}},
            {"score": "identity"},
        ),
        (
            CROSS,
            "config_sentence_transformers.json",
            {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.linear.Identity"},
            {"score": "identity"},
        ),
        (
            GENERATOR,
            "generation_config.json",
            {"eos_token_id": [3, 1], "_from_model_config": True, "max_new_tokens": 9, "guidance_scale": 1.0},
            {"end_ids": (1, 2, 3)},
        ),
        (GENERATOR, "tokenizer_config.json", {"chat_template": "{{ t }}"}, {"chat_template": "{{ t }}"}),
        (GENERATOR, "config.json", {}, {"chat_template": None}),
        (GENERATOR, "chat_template.json", {"chat_template": "{{ j }}"}, {"chat_template": "{{ j }}"}),
        (
            GENERATOR,
            "tokenizer_config.json",
            {"chat_template": [{"name": "tools", "template": "x"}, {"name": "default", "template": "{{ d }}"}]},
            {"chat_template": "{{ d }}"},
        ),
    ],
)
def test_what_the_files_say_is_followed(
    tmp_path: Path, write: Write, file: str, value: Any, expected: dict[str, Any]
) -> None:
    folder = write(tmp_path / "m")
    merged(folder / file, value)
    found = known(folder)
    assert {key: getattr(found, key) for key in expected} == expected


def test_a_template_file_of_its_own_comes_first(tmp_path: Path) -> None:
    folder = toy_models.write_llama(tmp_path / "m")
    merged(folder / "tokenizer_config.json", {"chat_template": "{{ t }}"})
    (folder / "chat_template.jinja").write_text("{{ j }}")
    assert known(folder).chat_template == "{{ j }}"
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="not UTF-8"):
        known(folder)


def test_dense_layers_are_followed_in_their_order_and_must_fit(tmp_path: Path) -> None:
    folder = toy_models.write_bert(tmp_path / "m")
    sizes = {"hidden_size": 64, "max_position_embeddings": 64}
    toy_models.sentence_files(folder, sizes, "mean", False, dense=2)
    toy_models.write_dense(folder / "2_Dense", 64, 16, "GELU")
    toy_models.write_dense(folder / "3_Dense", 16, 24, "Identity")
    found = known(folder)
    assert (found.dims, found.normalize) == (24, False)
    assert [(one.layer.in_features, one.layer.activation) for one in found.dense] == [(64, "GELU"), (16, "Identity")]
    toy_models.sentence_files(folder, sizes, "mean", True, dense=2)
    assert known(folder).normalize
    toy_models.write_dense(folder / "3_Dense", 64, 24, "Identity")
    with pytest.raises(CheckpointError, match="3_Dense: takes 64 numbers, 16 are before it"):
        known(folder)


def test_a_pooling_without_the_prompt_is_refused_where_there_is_a_prompt(tmp_path: Path) -> None:
    folder = toy_models.write_bert(tmp_path / "m")
    merged(folder / "1_Pooling/config.json", {"include_prompt": False})
    merged(folder / "config_sentence_transformers.json", {"prompts": {"query": ""}})
    known(folder)
    merged(folder / "config_sentence_transformers.json", {"prompts": {"query": "q: "}})
    with pytest.raises(CheckpointError, match="include_prompt"):
        known(folder)


def test_a_pooling_lies_where_its_module_says(tmp_path: Path) -> None:
    folder = toy_models.write_bert(tmp_path / "m")
    merged(folder / "modules.json", [TRANSFORMER, {**POOLING, "path": "elsewhere"}])
    merged(folder / "elsewhere/config.json", {"word_embedding_dimension": 64, "pooling_mode_cls_token": True})
    assert known(folder).pooling == "cls"


@pytest.mark.parametrize(
    ("write", "file", "value", "words"),
    [
        (EMBEDDER, "config_sentence_transformers.json", {"prompts": {"query": "q: "}}, "query: 'q: '"),
        (GENERATOR, "generation_config.json", {"do_sample": True, "temperature": 0.6}, "temperature"),
        (GENERATOR, "generation_config.json", {"repetition_penalty": 1.1}, "repetition_penalty 1.1"),
    ],
)
def test_what_a_person_should_know_is_noted(tmp_path: Path, write: Write, file: str, value: Any, words: str) -> None:
    folder = write(tmp_path / "m")
    assert known(folder).notes == ()
    merged(folder / file, value)
    (note,) = known(folder).notes
    assert words in note


# --- what goes into a manifest ----------------------------------------------------------------------------------------

BERT_IDS = {"cls": 2, "sep": 3, "bos": 2, "eos": 3, "pad": 0, "unk": 1, "mask": 4}


def test_a_bert_embedder(tmp_path: Path) -> None:
    found = known(toy_models.write_bert(tmp_path / "m", pooling="cls", normalize=False))
    assert found == facts.Facts(
        dims=64, max_tokens=64, pooling="cls", normalize=False, special_ids=BERT_IDS  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("toy", "task", "expected"),
    [
        ("bert-rerank", None, {"dims": 1, "pooling": None, "normalize": None, "token_types": True,
                               "head": {"kind": "pooler"}}),
        ("modernbert-rerank", None, {"head": {"kind": "dense", "pooling": "mean"}, "special_ids": BERT_IDS,
                                     "token_types": None}),
        ("qwen3", None, {"pooling": "last", "normalize": True, "dims": 64,
                         "special_ids": {"bos": 0, "eos": 0, "pad": 0}}),
        ("qwen3-generate", "embed", {"pooling": "last"}),
    ],
)  # fmt: skip
def test_each_family_and_task(tmp_path: Path, toy: str, task: str | None, expected: dict[str, Any]) -> None:
    found = known(toy_models.TOYS[toy](tmp_path / "m"), task=task)
    assert {key: getattr(found, key) for key in expected} == expected


def test_qwen3_answers_come_from_the_score_module_then_the_vocabulary(tmp_path: Path) -> None:
    folder = toy_models.write_qwen3(tmp_path / "m", rerank=True)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    expected = {"kind": "yes_no", "yes": vocabulary["yes"], "no": vocabulary["no"]}
    assert known(folder).head == expected
    (folder / "1_LogitScore" / "config.json").unlink()
    assert known(folder, task="rerank").head == expected
    (folder / "1_LogitScore" / "config.json").write_text('{"true_token_id": 7, "false_token_id": 8}')
    assert known(folder).head == {"kind": "yes_no", "yes": 7, "no": 8}
    (folder / "1_LogitScore" / "config.json").write_text('{"true_token_id": 7, "false_token_id": 320}')
    with pytest.raises(CheckpointError, match="'no'"):
        known(folder)


def test_without_sentence_files_the_family_decides(tmp_path: Path) -> None:
    folder = toy_models.write_bert(tmp_path / "m", pooling="cls", normalize=False)
    for file in ("modules.json", "sentence_bert_config.json", "1_Pooling/config.json"):
        (folder / file).unlink()
    found = known(folder)
    assert (found.pooling, found.normalize, found.max_tokens) == ("mean", True, 64)


def test_the_length_limit_never_exceeds_the_position_table(tmp_path: Path) -> None:
    folder = toy_models.write_bert(tmp_path / "m")
    for said, served in ((16, 16), (4096, 64), (0, 64), ("x", 64)):
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": said}))
        assert known(folder).max_tokens == served


def test_a_special_id_outside_the_vocabulary(tmp_path: Path) -> None:
    folder = toy_models.write_bert(tmp_path / "m")
    toy_models.edit(folder / "tokenizer.json", added_tokens=[{"id": 500, "content": "[FAR]", "special": True}])
    toy_models.edit(folder / "tokenizer_config.json", cls_token={"content": "[FAR]"})
    with pytest.raises(CheckpointError, match="cls token id 500"):
        known(folder)
