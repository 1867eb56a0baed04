"""What a checkpoint folder says about its use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engines.checkpoint import facts
from engines.checkpoint.read import Checkpoint, CheckpointError
from tests.support import toy_models


def of(folder: Path, **options: Any) -> facts.Facts:
    return facts.of_checkpoint(Checkpoint.open(folder, **options))


BERT_IDS = {"cls": 2, "sep": 3, "bos": 2, "eos": 3, "pad": 0, "unk": 1, "mask": 4}


def test_a_bert_embedder(tmp_path: Path) -> None:
    known = of(toy_models.write_bert(tmp_path / "m", pooling="cls", normalize=False))
    assert known == facts.Facts(
        dims=64, max_tokens=64, pooling="cls", normalize=False, special_ids=BERT_IDS  # type: ignore[arg-type]
    )  # fmt: skip


def test_a_bert_cross_encoder(tmp_path: Path) -> None:
    known = of(toy_models.write_bert(tmp_path / "m", cross_encoder=True))
    assert (known.dims, known.pooling, known.normalize, known.token_types) == (1, None, None, True)
    assert known.head == {"kind": "pooler"}


def test_a_modernbert_reranker(tmp_path: Path) -> None:
    known = of(toy_models.write_modernbert(tmp_path / "m", rerank=True, classifier_pooling="mean"))
    assert known.head == {"kind": "dense", "pooling": "mean"}
    assert known.special_ids == BERT_IDS
    assert known.token_types is None


def test_qwen3_answers_come_from_the_score_module_then_the_vocabulary(tmp_path: Path) -> None:
    folder = toy_models.write_qwen3(tmp_path / "m", rerank=True)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    expected = {"kind": "yes_no", "yes": vocabulary["yes"], "no": vocabulary["no"]}
    assert of(folder).head == expected
    (folder / "1_LogitScore" / "config.json").unlink()
    assert of(folder, task="rerank").head == expected
    (folder / "1_LogitScore" / "config.json").write_text('{"true_token_id": 7, "false_token_id": 8}')
    assert of(folder).head == {"kind": "yes_no", "yes": 7, "no": 8}
    (folder / "1_LogitScore" / "config.json").write_text('{"true_token_id": 7, "false_token_id": 320}')
    with pytest.raises(CheckpointError, match="'no'"):
        of(folder)


def test_a_qwen3_embedder_pools_the_last_token(tmp_path: Path) -> None:
    known = of(toy_models.write_qwen3(tmp_path / "m"))
    assert (known.pooling, known.normalize, known.dims) == ("last", True, 64)
    assert known.special_ids["eos"] == 0


def test_the_task_can_be_said(tmp_path: Path) -> None:
    known = of(toy_models.write_qwen3(tmp_path / "m", generate=True), task="embed")
    assert known.pooling == "last"


def test_without_sentence_files_the_family_decides(tmp_path: Path) -> None:
    folder = toy_models.write_bert(tmp_path / "m", pooling="cls", normalize=False)
    for file in ("modules.json", "sentence_bert_config.json", "1_Pooling/config.json"):
        (folder / file).unlink()
    known = of(folder)
    assert (known.pooling, known.normalize, known.max_tokens) == ("mean", True, 64)


def test_the_length_limit_never_exceeds_the_position_table(tmp_path: Path) -> None:
    folder = toy_models.write_bert(tmp_path / "m")
    for said, served in ((16, 16), (4096, 64), (0, 64), ("x", 64)):
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": said}))
        assert of(folder).max_tokens == served


@pytest.mark.parametrize(
    "modes",
    [
        {"pooling_mode_max_tokens": True},
        {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
        {"pooling_mode_mean_tokens": False},
    ],
)
def test_a_pooling_that_is_not_served_is_refused(tmp_path: Path, modes: dict[str, bool]) -> None:
    folder = toy_models.write_bert(tmp_path / "m")
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    with pytest.raises(CheckpointError, match="1_Pooling"):
        of(folder)


def test_a_special_id_outside_the_vocabulary(tmp_path: Path) -> None:
    folder = toy_models.write_bert(tmp_path / "m")
    conf = json.loads((folder / "tokenizer.json").read_text())
    conf["added_tokens"].append({"id": 500, "content": "[FAR]", "special": True})
    (folder / "tokenizer.json").write_text(json.dumps(conf))
    (folder / "tokenizer_config.json").write_text(json.dumps({"cls_token": {"content": "[FAR]"}}))
    with pytest.raises(CheckpointError, match="cls token id 500"):
        of(folder)


def test_chat_template_from_either_file(tmp_path: Path) -> None:
    folder = toy_models.write_llama(tmp_path / "m")
    assert of(folder).chat_template is None
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ one }}"}')
    assert of(folder).chat_template == "{{ one }}"
    (folder / "chat_template.jinja").write_text("{{ two }}")
    assert of(folder).chat_template == "{{ two }}"
