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
    known = of(toy_models.TOYS[toy](tmp_path / "m"), task=task)
    assert {key: getattr(known, key) for key in expected} == expected


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


def test_a_special_id_outside_the_vocabulary(tmp_path: Path) -> None:
    folder = toy_models.write_bert(tmp_path / "m")
    conf = json.loads((folder / "tokenizer.json").read_text())
    conf["added_tokens"].append({"id": 500, "content": "[FAR]", "special": True})
    (folder / "tokenizer.json").write_text(json.dumps(conf))
    (folder / "tokenizer_config.json").write_text(json.dumps({"cls_token": {"content": "[FAR]"}}))
    with pytest.raises(CheckpointError, match="cls token id 500"):
        of(folder)
