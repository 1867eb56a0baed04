"""The GGUF builder: metadata, names, dtypes, the split vocabulary, and what transformers computes for every toy."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.bundle.digest import file_digest
from engines.bundle.manifest import BundleError
from engines.checkpoint.read import Checkpoint
from engines.checkpoint.safetensors import widen_bf16
from engines.llama.binding import NativeModel
from engines.llama.build import convert as builder
from engines.llama.gguf import Header, read_header
from engines.runtime.progress import silent
from synapse_host.text.spelling import speller
from tests.support import toy_models
from tests.support.toy_gguf import ToyGguf, sha256

gguf = pytest.importorskip("gguf")


def header_of(path: Path) -> Header:
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_header(fd)
    finally:
        os.close(fd)


def make(folder: Path, toy: str, dtype: str = "f32", **options: Any) -> tuple[Checkpoint, Path]:
    checkpoint = Checkpoint.open(toy_models.TOYS[toy](folder / toy))
    out = folder / f"{toy}-{dtype}.gguf"
    assert builder.build(checkpoint, out, dtype=dtype, **options) == out.stat().st_size
    return checkpoint, out


def tensors_of(path: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path, "r").tensors}


def values(tensor: Any) -> np.ndarray:
    """A stored tensor as float32 in its logical shape."""
    shape = tuple(int(n) for n in reversed(tensor.shape))
    kind = tensor.tensor_type.name
    if kind == "BF16":
        return widen_bf16(np.ascontiguousarray(tensor.data).view(np.uint16)).reshape(shape)
    if kind == "Q8_0":
        return np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).reshape(shape)
    return np.asarray(tensor.data, np.float32).reshape(shape)


def test_what_a_file_says_of_itself(tmp_path: Path) -> None:
    """What numbers depend on is proven by numbers (test_model); this is what nothing else would miss."""
    _, out = make(tmp_path, "bert", name="toy")
    head = header_of(out)
    expected = {
        "general.name": "toy",
        "general.file_type": 0,
        "general.quantization_version": 2,
        "tokenizer.ggml.model": "no_vocab",
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
    }
    assert {key: head.metadata.get(key) for key in expected} == expected
    assert head.pooling_type == 1 and not head.has_rank_head and head.token_type_vocab_offset is None
    assert not any(name.startswith("cls") for name in head.tensors)
    assert header_of(make(tmp_path, "bert", pooling="last")[1]).pooling_type == 3, "the pooling that was asked for"
    head = header_of(make(tmp_path, "bert-rerank")[1])
    assert (head.pooling_type, head.token_type_vocab_offset, head.vocab_size, head.embedding_rows) == (4, 128, 128, 256)
    assert head.has_rank_head


KEPT_F32 = ("position_embd", "token_types", "norm", "bias", "cls")


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [("bert", "f32", 0), ("bert-rerank", "f16", 1e-3), ("qwen3", "bf16", 8e-3), ("bert-rerank", "q8_0", 2e-2)],
)
def test_matrices_take_the_dtype_and_nothing_else_does(tmp_path: Path, name: str, dtype: str, tolerance: float) -> None:
    _, out = make(tmp_path, name, dtype)
    exact = tensors_of(make(tmp_path / "exact", name)[1])
    for label, tensor in tensors_of(out).items():
        kept = any(part in label for part in KEPT_F32)
        assert tensor.tensor_type.name == ("F32" if kept else dtype.upper()), label
        allowed = 0 if kept else tolerance
        np.testing.assert_allclose(values(tensor), values(exact[label]), rtol=allowed, atol=allowed * 2)


@pytest.mark.parametrize(
    ("dtype", "most", "error"), [("q6_k", "Q6_K", 0.02), ("q5_k_m", "Q5_K", 0.04), ("q4_k_m", "Q4_K", 0.09)]
)
def test_k_quants_come_near_the_weights_and_generate(
    tmp_path: Path, load: Any, dtype: str, most: str, error: float
) -> None:
    folder = toy_models.write_llama(tmp_path / "m", hidden=256, ffn=512)
    checkpoint, out = Checkpoint.open(folder), tmp_path / "m.gguf"
    assert builder.build(checkpoint, out, dtype=dtype) == out.stat().st_size
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "m.gguf"]
    tensors = tensors_of(out)
    kinds = {name: tensor.tensor_type.name for name, tensor in tensors.items()}
    assert kinds["blk.0.ffn_up.weight"] == most and kinds["blk.0.ffn_norm.weight"] == "F32"
    stored = np.asarray(
        gguf.quants.dequantize(tensors["blk.0.ffn_up.weight"].data, tensors["blk.0.ffn_up.weight"].tensor_type)
    )
    exact = checkpoint.f32("layers.0.mlp.up_proj.weight")
    assert 0 < np.sqrt(np.mean((stored - exact) ** 2)) < error * exact.std()
    assert gguf.LlamaFileType(header_of(out).metadata["general.file_type"]).name == f"MOSTLY_{dtype.upper()}"
    model = load(ToyGguf(out, folder, sha256(out)))
    assert model.generate(np.array([5, 6], np.int32), max_tokens=4, progress=silent()).n_prompt == 2
    embedder = Checkpoint.open(toy_models.write_bert(tmp_path / "bert"))
    with pytest.raises(BundleError, match=f"{dtype} is for generators"):
        builder.build(embedder, out, dtype=dtype)


def test_a_width_that_q8_0_cannot_hold_stays_f16(tmp_path: Path) -> None:
    folder = toy_models.write_bert(tmp_path / "m", hidden=48, heads=4, ffn=64)
    builder.build(Checkpoint.open(folder), tmp_path / "x", dtype="q8_0")
    tensors = tensors_of(tmp_path / "x")
    assert tensors["blk.0.attn_q.weight"].tensor_type.name == "F16"
    assert tensors["blk.0.ffn_down.weight"].tensor_type.name == "Q8_0"


def test_the_same_checkpoint_gives_the_same_bytes(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    _, one = make(tmp_path / "1", "bert-rerank", "bf16", progress=lambda *step: seen.append(step))
    _, two = make(tmp_path / "2", "bert-rerank", "bf16")
    assert one.read_bytes() == two.read_bytes()
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1][0] == seen[-1][1] == header_of(one).tensor_bytes


@pytest.mark.parametrize(
    ("name", "words"), [("modernbert", "safetensors-package .* or coreml"), ("qwen3-rerank", "can't be built as gguf")]
)
def test_what_llama_cpp_cannot_serve_is_refused(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(BundleError, match=words):
        make(tmp_path, name)
    assert not list(tmp_path.glob("*.gguf*"))


def test_a_weight_beyond_f16_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = toy_models.random_weights
    monkeypatch.setattr(
        toy_models,
        "random_weights",
        lambda shapes, seed: {
            name: array * np.float32(1e6 if name.endswith("query.weight") else 1)
            for name, array in original(shapes, seed).items()
        },
    )
    with pytest.raises(BundleError, match="beyond what f16"):
        make(tmp_path, "bert", "f16")
    assert not list(tmp_path.glob("*.gguf*"))
    make(tmp_path, "bert", "bf16")


# --- as a program ----------------------------------------------------------------------------------------------------


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_the_program_reports_and_ends_with_the_artifact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = toy_models.write_bert(tmp_path / "m"), tmp_path / "x.gguf"
    assert builder.main(["build", str(folder), str(out), "--dtype", "bf16"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    *steps, result = lines(said.out)
    assert {step["stage"] for step in steps} == {"build"}
    assert result == {
        "stage": "result", "path": "x.gguf", "bytes": out.stat().st_size, "dtype": "bf16",
        "digest": "sha256:" + file_digest(out),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["build", "nowhere", "x.gguf"], 1, "nowhere is not a folder"),
        (["build", "m", "missing/x.gguf"], 1, "No such file"),
        (["build", "m", "x.gguf", "--dtype", "q4_0"], 2, "invalid choice"),
        (["tokenizer", "nowhere.gguf", "t.json"], 1, "nowhere.gguf"),
        (["tokenizer", "m/config.json", "t.json"], 1, "not a usable GGUF"),
        (["tokenizer", "bert/bert-f32.gguf", "t.json"], 1, "no_vocab"),
        ([], 2, "required"),
    ],
)
def test_the_program_fails_in_words(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    words: str,
) -> None:
    toy_models.write_bert(tmp_path / "m")
    make(tmp_path / "bert", "bert")
    monkeypatch.chdir(tmp_path)
    assert builder.main(arguments) == status
    said = capsys.readouterr()
    assert said.out == ""
    assert words in said.err
    assert "Traceback" not in said.err
    if status == 1:
        assert said.err.count("\n") == 1


# --- what it computes ------------------------------------------------------------------------------------------------


def test_every_end_that_the_model_names_ends_a_generation(tmp_path: Path, load: Any) -> None:
    """lighteval#1278: the turn's end stands in generation_config.json's list alone, and generation never stopped."""
    ids = np.array([5, 6, 7], dtype=np.int32)

    def generated(folder: Path) -> tuple[int, ...]:
        out = folder.with_suffix(".gguf")
        builder.build(Checkpoint.open(folder), out, dtype="f32")
        toy = ToyGguf(out, folder, sha256(out))
        return load(toy).generate(ids, max_tokens=6, progress=silent()).generated_token_ids  # type: ignore[no-any-return]

    folder = toy_models.write_llama(tmp_path / "plain")
    full = generated(folder)
    last = next(n for n in range(1, 6) if full[n] not in full[:n])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, full[last]]}))
    assert generated(folder) == full[:last]


def sentencepiece(folder: Path) -> Path:
    """A toy with Llama-2's kind of tokenizer, and an added token that is not special."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    toy_models.write_llama(folder)
    words = [f"▁é{n}" for n in range(320 - 260)]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, "▁añadido"]
    made = Tokenizer(models.BPE({text: n for n, text in enumerate(tokens)}, [], byte_fallback=True, unk_token="<unk>"))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(tokens[:3])
    made.add_tokens([AddedToken(tokens[-1], normalized=False)])
    made.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("write", [toy_models.TOYS["qwen3-generate"], sentencepiece], ids=["byte-level", "words"])
def test_the_host_spells_every_token_as_the_worker_does(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    """The host puts a character that two slices share together from tokens' bytes."""
    from tokenizers import Tokenizer

    folder, out = write(tmp_path / "toy"), tmp_path / "toy.gguf"
    builder.build(Checkpoint.open(folder), out, dtype="f32")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.decoder = None  # the host opens every tokenizer without one
    with out.open("rb") as file:
        native = NativeModel(file.fileno(), gpu_layers=0, on_tensor=lambda: None)
    spell = speller(tokenizer)
    pieces = [native.piece(id) for id in range(native.n_vocab)]
    assert [spell(id) for id in range(native.n_vocab)] == pieces and spell(native.n_vocab) == b""
    assert len(set(pieces)) > 256
    native.close()


@pytest.mark.parametrize(
    ("part", "words"), [({"decoder": {"type": "WordPiece"}}, "its decoder"), ({"model": {"type": "Unigram"}}, "BPE")]
)
def test_tokens_whose_spelling_is_not_known_are_refused(tmp_path: Path, part: dict[str, Any], words: str) -> None:
    folder = toy_models.write_llama(tmp_path / "toy")
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | part))
    with pytest.raises(BundleError, match=words):
        builder.build(Checkpoint.open(folder), tmp_path / "no.gguf", dtype="f32")
