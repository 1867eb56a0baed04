"""Somebody else's GGUF as a bundle: what the manifest says, and a tokenizer that must read as llama.cpp does."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.bundle import manifest
from engines.bundle.manifest import UNSET, Bundle
from synapse_host.errors import BundleInvalid, InvalidRequest
from synapse_host.models import builder, from_gguf
from synapse_host.text.tokenizer import TextTokenizer
from tests.support import toy_families, toy_models
from tests.support.served import ENGINES, rows, serve
from tests.support.toy_gguf import build_toy, rewrite

pytest.importorskip("llama_cpp")
pytestmark = [pytest.mark.process, pytest.mark.llama]

T = "tokenizer__ggml__"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIALS = ["<unk>", "<s>", "</s>"]
WORDS = ["\u2581", "H", "e", "l", "o", "He", "ll", "Hell", "Hello", "\u2581Hello", "\u2581\u2581"]


def byte_level(folder: Path, name: str = "foreign", **changes: Any) -> Path:
    """A small llama with a byte-level vocabulary, as another converter names its parts."""
    toy = build_toy(folder, f"{name}-toy", toy_models.write_llama)
    words = {f"{T}pre": "llama-bpe", f"{T}add_bos_token": True, "synapse__end_token_ids": -1, **changes}
    return rewrite(toy.path, folder / f"{name}.gguf", **words).path


def sentencepiece(folder: Path, **changes: Any) -> Path:
    """The same with a vocabulary of SentencePiece's kind: bytes, some pieces, and a score for each."""
    tokens = [*SPECIALS, *BYTES, *WORDS, "  "]
    tokens += [f"[X{n}]" for n in range(320 - len(tokens))]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(WORDS), 4] + [5] * 320
    words = {f"{T}model": "llama", f"{T}tokens": tokens, f"{T}token_type": kinds[:320], f"{T}merges": -1}
    return byte_level(folder, "spm", **words, **{f"{T}scores": [-float(n) for n in range(320)]}, **changes)


def encoder(folder: Path, kind: str, write: Callable[..., Path] = toy_models.write_bert, **changes: Any) -> Path:
    """A small encoder with a vocabulary of WordPiece's or SentencePiece's Unigram kind."""
    toy = build_toy(folder, "encoder-toy", write)
    entries = json.loads((toy.checkpoint / "tokenizer.json").read_text())["model"]["vocab"]
    marked = [t if t[0] == "[" else t[2:] if t.startswith("##") else f"\u2581{t}" for t in entries]
    tokens = marked if kind == "bert" else [*SPECIALS, "\u2581", *dict.fromkeys(marked[5:])]
    tokens += [f"[X{n}]" for n in range(128 - len(tokens))]
    types = [3 if n < 5 else 1 for n in range(128)] if kind == "bert" else [2, 3, 3, *[1] * 125]
    words: dict[str, Any] = {f"{T}model": kind, f"{T}tokens": tokens[:128], f"{T}token_type": types}
    if kind == "bert":
        words |= {f"{T}unknown_token_id": 1, f"{T}cls_token_id": 2}
    else:
        words |= {f"{T}scores": [-float(n % 7) - 1 for n in range(128)], f"{T}add_space_prefix": True}
        words |= {f"{T}unknown_token_id": 0, f"{T}bos_token_id": 1, f"{T}eos_token_id": 2}
        words |= {f"{T}add_bos_token": True, f"{T}remove_extra_whitespaces": True}
        words |= {f"{T}precompiled_charsmap": white_space_map()}
    return rewrite(toy.path, folder / f"{kind}.gguf", **words, **changes).path


def white_space_map() -> bytes:
    """SentencePiece's map of characters, a double array: white space becomes a space, all else stays."""
    units = [0] * 4096
    units[0] = 256 << 10
    for byte in b"\t\n\r":
        units[256 ^ byte] = byte | 1 << 8 | 768 << 10
    first = 256 ^ 0xC2
    units[first] = 0xC2 | 1024 << 10
    units[first ^ 1024 ^ 0xA0] = 0xA0 | 1 << 8 | 2048 << 10
    return struct.pack("<I4096I", 4 * 4096, *units) + b" \0"


def make(file: Path, **options: Any) -> Bundle:
    return from_gguf.build(file, file.with_suffix(""), model_id="mine", **options)


def test_a_generator_as_its_file_says_it(tmp_path: Path) -> None:
    words = {"general__license": "mit", "general__file_type": 15}
    file = byte_level(tmp_path, tokenizer__chat_template="{{ bos_token }}{{ messages }}", **words)
    bundle = make(file)
    made = bundle.manifest
    assert (made.family, made.task, made.dims, made.max_tokens) == ("llama", "generate", 64, 256)
    assert (made.license, made.source, made.chat_template) == ("mit", file.name, "{{ bos_token }}{{ messages }}")
    assert made.config is not UNSET and made.config["vocab_size"] == 320
    assert [(a.format, a.dtype, a.path) for a in made.artifacts] == [("gguf", "q4_k_m", "model-q4_k_m.gguf")]
    assert bundle.path("model-q4_k_m.gguf").read_bytes() == file.read_bytes()
    assert builder.verify(bundle) == []
    tokenizer = TextTokenizer(bundle)
    bos = made.special_ids["bos"]  # type: ignore[index]
    assert tokenizer.prompt("Hello").ids.tolist() == [bos, *tokenizer.literal("Hello")]
    assert bos in tokenizer.template(tokenizer.token(bos)) and bos not in tokenizer.literal(tokenizer.token(bos))
    assert make(file.rename(tmp_path / "short.gguf"), max_tokens=32).manifest.max_tokens == 32


@pytest.mark.parametrize(
    "pre",
    ["gpt-2", "smollm", "qwen2", "qwen35", "tekken", "gpt-4o", "deepseek-coder", "deepseek-v3", "falcon", "command-r"],
)
def test_words_are_cut_as_the_file_names_it(tmp_path: Path, pre: str) -> None:
    """A build that passes has compared every odd text with llama.cpp."""
    bundle = make(byte_level(tmp_path, **{f"{T}pre": pre}))
    assert TextTokenizer(bundle).literal("Hello, w\u00f6rld 1234")


@pytest.mark.parametrize("prefixed", [True, False])
def test_sentencepiece_joins_by_scores(tmp_path: Path, prefixed: bool) -> None:
    tokenizer = TextTokenizer(make(sentencepiece(tmp_path, **{f"{T}add_space_prefix": prefixed})))
    piece = {word: n for n, word in enumerate(WORDS, 259)}
    assert tokenizer.literal("Hello") == ([piece["\u2581Hello"]] if prefixed else [piece["Hello"]])
    assert tokenizer.literal("Hello\n")[-1] == 3 + 10, "a byte where there is no piece"
    assert 2 not in tokenizer.literal("</s>") and tokenizer.template("</s>")[-1] == 2
    assert tokenizer.prompt("e").ids.tolist()[0] == 1


@pytest.mark.parametrize(
    ("kind", "write"),
    [("bert", toy_models.write_bert), ("t5", toy_models.write_bert), ("bert", toy_families.write_nomic)],
)
def test_an_encoder_embeds(tmp_path: Path, kind: str, write: Callable[..., Path]) -> None:
    bundle = make(encoder(tmp_path, kind, write))
    assert (bundle.manifest.task, bundle.manifest.pooling, bundle.manifest.normalize) == ("embed", "mean", True)
    assert bundle.manifest.chat_template is UNSET
    tokenizer = TextTokenizer(bundle)
    first, *ids, last = tokenizer.rows(["the cat"]).ids.tolist()
    assert (first, last) == ((2, 3) if kind == "bert" else (1, 2))
    assert [tokenizer.token(id).strip("\u2581") for id in ids] == ["the", "cat"]
    specials = [0, 2, 3, 4] if kind == "bert" else [1, 2]
    assert not set(specials) & set(tokenizer.literal("<s> the </s> cat"))
    toy = "bert" if write is toy_models.write_bert else "nomic"
    goldens = np.load(Path(__file__).parents[1] / "goldens" / ("toys.npz" if toy == "bert" else "families.npz"))
    vectors = serve(bundle.root, lambda host: host.embed_ids("toy", rows(goldens, toy)))
    assert np.abs(vectors - goldens[f"{toy}.out"]).max() < ENGINES["gguf"][1]


def test_a_decoder_embeds_where_it_is_said(tmp_path: Path) -> None:
    file = byte_level(tmp_path)
    with pytest.raises(InvalidRequest, match="how it pools"):
        make(file, task="embed")
    assert make(file, task="embed", pooling="last").manifest.pooling == "last"
    file = byte_level(tmp_path, "named", llama__pooling_type=2)
    assert (make(file).manifest.task, make(file).manifest.pooling) == ("embed", "cls")
    with pytest.raises(BundleInvalid, match="doesn't generate"):
        make(file, task="generate")


def test_a_tokenizer_that_differs_is_refused_with_the_text_and_both_ids(tmp_path: Path) -> None:
    file = byte_level(tmp_path)
    own = make(file).path("tokenizer.json")
    assert make(file, tokenizer=own).manifest.tokenizer is not UNSET
    document = json.loads(own.read_text())
    document["pre_tokenizer"]["pretokenizers"].insert(0, {"type": "Digits", "individual_digits": True})
    document["model"]["merges"].insert(0, ["3", "3"])
    other = tmp_path / "other.json"
    document["model"]["vocab"] |= {"33": document["model"]["vocab"].pop("th")}
    document["model"]["merges"] = [["3", "3"]]
    other.write_text(json.dumps(document))
    with pytest.raises(BundleInvalid, match=r"the text '.*' has the ids \[.*\] by tokenizer.json, \[.*other.json"):
        make(file, tokenizer=other)
    document["post_processor"] = None
    document["model"] = json.loads(own.read_text())["model"]
    document["pre_tokenizer"]["pretokenizers"].pop(0)
    other.write_text(json.dumps(document))
    with pytest.raises(BundleInvalid, match="the text 'a' has the ids"):  # without the BOS that llama.cpp adds
        make(file, tokenizer=other)


def test_words_alone_are_compared_where_the_file_says_no_more(tmp_path: Path) -> None:
    """Our own GGUFs have no pre-tokenizer, since text is read outside of the worker; llama.cpp would only guess."""
    toy = build_toy(tmp_path, "own", toy_models.write_llama)
    with pytest.raises(BundleInvalid, match=r"pre-tokenizer 'default' .*--tokenizer"):
        make(toy.path)
    bundle = make(toy.path, tokenizer=toy.checkpoint / "tokenizer.json")
    assert bundle.path("tokenizer.json").read_bytes() == (toy.checkpoint / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({f"{T}pre": "kimi-k2"}, {}, "pre-tokenizer 'kimi-k2' .*--tokenizer"),
        ({f"{T}pre": "no-such"}, {}, "unknown pre-tokenizer type: 'no-such'"),
        ({f"{T}model": "rwkv"}, {}, "rwkv"),
        ({f"{T}tokens": ["a"] * 320}, {}, "320 tokens, 1 different"),
        ({"general__architecture": "nonesuch"}, {}, "nonesuch"),
        ({"llama__pooling_type": 4}, {}, "it reranks"),
        ({}, {"task": "rerank"}, "it reranks"),
        ({"drop": ("",)}, {}, "no weights"),
        ({}, {"max_tokens": 257}, "257 tokens: "),
    ],
)
def test_what_could_not_be_served_is_refused(
    tmp_path: Path, changes: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    file = byte_level(tmp_path, **changes)
    with pytest.raises((BundleInvalid, InvalidRequest), match=words):
        make(file, **options)
    assert not file.with_suffix("").exists()


def test_an_encoder_doesn_t_generate_and_layers_behind_the_pooling_are_not_left_out(tmp_path: Path) -> None:
    file = encoder(tmp_path, "bert")
    with pytest.raises(BundleInvalid, match="doesn't generate"):
        make(file, task="generate")
    data = file.read_bytes()
    file.write_bytes(data.replace(b"token_types.weight", b"dense_2.weight1234"))
    with pytest.raises(BundleInvalid, match=r"behind the pooling \(dense_2"):
        make(file)


def test_a_bundle_made_of_a_default_s_own_file_is_the_default(
    tmp_path: Path, default_bundle: Callable[[str], Bundle]
) -> None:
    installed = default_bundle("smollm2")
    known = installed.manifest
    made = from_gguf.build(
        installed.path(known.artifacts[0].path),
        tmp_path / "made",
        model_id="smollm2",
        fixtures=installed.path("fixtures.npz"),
        overrides={"license": known.license, "source": known.source},
    )
    assert manifest.read(made.root).digest == installed.digest
