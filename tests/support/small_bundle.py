"""Tiny bundles with a real tokenizer and an artifact that only a scripted worker accepts; and matrices for them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from engines.bundle import manifest
from engines.bundle.manifest import Artifact, FileRef, Manifest
from engines.protocol.messages import Pooling
from synapse_host.placement.matrix import WORKER_ENGINES
from tests.support.scripted import command, expected_vector

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdef", "query", "probe", "<|im_start|>", "<|im_end|>"]
CLS, SEP = 2, 3


def vector(text: str) -> list[float]:
    """Return what a scripted worker makes of a text of WORDS."""
    return expected_vector([CLS, *(WORDS.index(word) for word in text.split()), SEP])


def write_tokenizer(path: Path, *, frame: bool = True) -> None:
    """Write a word-level tokenizer over WORDS; with *frame* it puts [CLS] and [SEP] around texts and pairs."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel({word: id for id, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "<|im_start|>", "<|im_end|>"])
    if frame:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
        )
    # As shipped tokenizers do: padding and truncation are baked in and must be switched off on open.
    tokenizer.enable_padding(length=12)
    tokenizer.enable_truncation(12)
    tokenizer.save(str(path))


def write_byte_tokenizer(path: Path) -> None:
    """Write a byte-level tokenizer whose ids are the bytes of a text, with the special id 256 behind them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    vocabulary = {chr(byte): byte for byte in printed} | {chr(256 + n): byte for n, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE({**vocabulary, "<|end|>": 256}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <|end|>", special_tokens=[("<|end|>", 256)])
    tokenizer.save(str(path))


def write_bundle(
    folder: Path,
    *,
    task: str = "embed",
    model_id: str = "toy",
    dims: int = 8,
    max_tokens: int = 16,
    score: str = "sigmoid",
    tokenizer: bool = True,
    frame: bool = True,
    of_bytes: bool = False,
    formats: dict[str, str] | None = None,
    **more: Any,
) -> Path:
    """Write a bundle folder; *formats* maps format to dtype. *of_bytes*: its tokenizer's ids are bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    artifacts = []
    for format, dtype in (formats or {"gguf": "f16"}).items():
        file = folder / f"model.{format}.{dtype}"
        file.write_bytes(b"not a model")
        artifacts.append(
            Artifact(format=format, path=file.name, digest=_digest(file), dtype=dtype, bytes=file.stat().st_size)
        )
    fields: dict[str, Any] = {}
    if tokenizer:
        if of_bytes:
            write_byte_tokenizer(folder / "tokenizer.json")
        else:
            write_tokenizer(folder / "tokenizer.json", frame=frame)
        fields["tokenizer"] = FileRef("tokenizer.json", _digest(folder / "tokenizer.json"))
    if task == "embed":
        fields |= {"pooling": Pooling.MEAN, "normalize": True}
    if task == "rerank":
        fields |= {"score": score}
        dims = 1
    family = "llama" if task == "generate" else "bert"
    manifest.write(
        folder,
        Manifest(
            manifest_version=1,
            model_id=model_id,
            family=more.pop("family", family),
            task=task,  # type: ignore[arg-type]
            dims=dims,
            max_tokens=max_tokens,
            artifacts=artifacts,
            **(fields | more),
        ),
    )
    return folder


def write_matrix(
    folder: Path,
    script: dict[str, Any] | None = None,
    *,
    kind: str = "catalog",
    engine: str = "llama",
    lanes: dict[str, Any] | None = None,
    **more: Any,
) -> Path:
    """Write a matrix whose lanes embed, rerank and generate are served by a scripted worker.

    *more*: other fields of its engine.
    """
    script = {"engine": WORKER_ENGINES[engine], **(script or {})}
    tasks = ("embed", "rerank", "generate") if engine == "llama" else ("embed", "rerank")
    document = {
        "version": 1,
        "hardware": {"any": {}},
        "engines": {
            "scripted": {
                "engine": engine,
                "device": "ane" if engine == "ane" else "cpu",
                "format": {"llama": "gguf", "cuda": "safetensors-package", "ane": "coreml"}[engine],
                "requires": "any",
                "worker": {"command": command(script)},
                **more,
            }
        },
        "lanes": lanes or {task: {"task": task, "engines": ["scripted"], "kind": kind} for task in tasks},
    }
    path = folder / "matrix.yaml"
    path.write_text(json.dumps(document))  # JSON is YAML
    return path


def _digest(file: Path) -> str:
    return "sha256:" + hashlib.sha256(file.read_bytes()).hexdigest()
