"""A bundle from somebody else's GGUF: the file as it is, and a tokenizer that reads texts as llama.cpp does.

Everything a manifest says comes from the file's metadata. The tokenizer.json is written from its vocabulary where that
can be done exactly, or given by the caller; in both cases it must give the very ids that llama.cpp gives for a set of
odd texts (:mod:`engines.llama.build.tokenizer`), or nothing is built.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import UNSET

from engines.bundle import digest, manifest
from engines.bundle.manifest import Artifact, Bundle, FileRef, Manifest
from synapse_host.errors import BundleInvalid, InvalidRequest
from synapse_host.models import builder
from synapse_host.models.builder import FIXTURES, TOKENIZER
from synapse_host.models.bundles import Progress, failures, silent
from synapse_host.text.tokenizer import TextTokenizer


def build(
    source: Path,
    out: Path,
    *,
    model_id: str,
    task: str | None = None,
    pooling: str | None = None,
    max_tokens: int | None = None,
    tokenizer: Path | None = None,
    fixtures: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    progress: Progress = silent,
) -> Bundle:
    """Build a bundle folder of one GGUF for generation or embedding, and return it.

    ``task`` and ``pooling``: where the file doesn't say them; ``tokenizer``: the model's own tokenizer.json;
    ``overrides``: license and source. Raises BundleInvalid or InvalidRequest; *out* is untouched then.
    """
    with failures(out), builder.staging(out) as folder:
        gguf, written = folder / "model.gguf", folder / TOKENIZER
        shutil.copyfile(source, gguf)
        if tokenizer is not None:
            shutil.copyfile(tokenizer, written)
        argv = ["engines.llama", "tokenizer", str(gguf), str(written), *(["--given"] if tokenizer else [])]
        read = builder.run_tool(argv, stage="tokenizer", progress=progress)
        known = read["facts"]
        about = _served(known, source.name, task, pooling, max_tokens)
        gguf = gguf.rename(folder / f"model-{known['dtype']}.gguf")
        found = digest.file_digest(gguf, lambda done, total: progress("digest", done, total))
        built = Manifest(
            manifest_version=1,
            model_id=model_id,
            family=known["architecture"],
            dims=known["dims"],
            artifacts=[Artifact("gguf", gguf.name, digest.PREFIX + found, known["dtype"], bytes=gguf.stat().st_size)],
            tokenizer=FileRef(TOKENIZER, read["digest"]),
            fixtures=(fixtures and builder.take(fixtures, folder / FIXTURES)) or UNSET,
            special_ids=known["special_ids"],
            config=known["config"],
            **{"license": known["license"] or UNSET, "source": source.name, **about, **(overrides or {})},
        )
        manifest.write(folder, built)
        bundle = manifest.read(folder)
        builder.try_bundle(bundle, known["config"]["vocab_size"])
        _check_parity(bundle, read["samples"], read["framed"], tokenizer)
    with failures(out):
        return manifest.read(out)


def _served(
    known: Mapping[str, Any], name: str, task: str | None, pooling: str | None, max_tokens: int | None
) -> dict[str, Any]:
    """Return the manifest's fields of what the file is built for; *task*, *pooling*, *max_tokens* as asked.

    Raises BundleInvalid for what a worker would refuse, or answer wrongly; InvalidRequest for what only a person knows.
    """
    stored, architecture, limit = known["pooling"], known["architecture"], known["max_tokens"]
    task = task or ("rerank" if stored == "rank" else "embed" if stored or not known["causal"] else "generate")
    why = None
    if not known["tensors"] or not known["dims"] or not limit:
        why = "it has no weights, no embedding_length or no context_length"
    elif known["encoder_decoder"]:
        why = f"{architecture} is an encoder-decoder, which no request serves"
    elif task == "rerank" or stored == "rank":
        why = "it reranks, and a pair's form isn't in the file: build the reranker from its checkpoint"
    elif task == "generate" and (stored or not known["causal"]):
        why = f"it embeds ({architecture}, pooling {stored or 'not said'}), it doesn't generate"
    elif task == "embed" and known["dense"]:
        why = f"its layers behind the pooling ({', '.join(known['dense'])}) would be left out"
    if why is not None:
        raise BundleInvalid(f"{name} can't be served: {why}")
    if max_tokens is not None and max_tokens > limit:
        raise InvalidRequest(f"{max_tokens} tokens: {name} has {limit} positions")
    about = {"task": task, "max_tokens": max_tokens or limit}
    if task == "generate":
        return about | {"chat_template": known["chat_template"] or UNSET}
    if pooling is None and stored is None:
        raise InvalidRequest(
            f"{name} doesn't say how it pools.",
            advice={"python": "Say it: mean, cls or last.", "command": "Pass --pooling mean, cls or last."},
        )
    return about | {"pooling": pooling or stored, "normalize": True}


def _check_parity(bundle: Bundle, samples: Sequence[Any], framed: list[int], given: Path | None) -> None:
    """Compare the tokenizer's ids with llama.cpp's; BundleInvalid names the first text that differs."""
    reader = TextTokenizer(bundle)
    rows = ((text, reader.literal(text), expected) for text, expected in samples)
    first = next(((text, ours, theirs) for text, ours, theirs in rows if ours != theirs), None)
    if first is None:
        # A Qwen3 embedder's end of text is ours to add (rows.single_frame), whether the file says so or not.
        ours = reader.rows(["a"]).ids.tolist()
        added = bundle.manifest.task == "embed" and ours[: len(framed)] == framed
        first = None if ours == framed or added else ("a", ours, framed)
    if first is not None:
        text, ours, theirs = first
        fix = (
            f"{given} belongs to another model"
            if given is not None
            else "pass the model's own file, --tokenizer tokenizer.json"
        )
        raise BundleInvalid(
            f"the text {text!r} has the ids {ours} by {TOKENIZER}, {theirs} by llama.cpp: {fix}",
            details={"text": text, "tokenizer": ours, "llama.cpp": theirs},
        )
