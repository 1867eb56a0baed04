"""The host puts a character that two slices share together from tokens' bytes: they must be those of the worker."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engines.checkpoint.read import Checkpoint
from engines.llama.binding import NativeModel
from engines.llama.build import convert
from synapse_host.text.spelling import speller
from tests.support import toy_models

pytest.importorskip("gguf")
pytestmark = pytest.mark.llama


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
def test_the_host_spells_every_token_as_the_worker_does(tmp_path: Path, write) -> None:
    from tokenizers import Tokenizer

    folder = write(tmp_path / "toy")
    out = tmp_path / "toy.gguf"
    convert.build(Checkpoint.open(folder), out, dtype="f32")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.decoder = None  # the host opens every tokenizer without one
    descriptor = os.open(out, os.O_RDONLY)
    native = NativeModel(descriptor, gpu_layers=0, on_tensor=lambda: None)
    try:
        spell = speller(tokenizer)
        pieces = [native.piece(id) for id in range(native.n_vocab)]
        assert [spell(id) for id in range(native.n_vocab)] == pieces and spell(native.n_vocab) == b""
        assert len(set(pieces)) > 256
    finally:
        native.close()
        os.close(descriptor)
